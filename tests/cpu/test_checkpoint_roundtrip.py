"""What is saved comes back bit for bit, with little memory, and others can read it."""

import json
import random
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from moefold.checkpoint import manifest
from moefold.checkpoint.config import CheckpointPolicy
from moefold.checkpoint.errors import CheckpointError, MismatchError
from moefold.checkpoint.load import Reader
from moefold.checkpoint.manifest import ITEM_BYTES
from moefold.checkpoint.save import save
from moefold.checkpoint.tensors import DTYPES, iter_blocks
from moefold.checkpoint.verify import verify
from moefold.training.state import restore
from tests.cpu.checkpoint_tools import (
    Calls,
    bits,
    load,
    quick_folder,
    run_child,
    same,
    state,
    write_sliced,
)
from tests.cpu.runs import equal, job_of, weights

SMALL = CheckpointPolicy(shard_bytes=1024)


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Path]:
    """Return a folder where syncing takes no time."""
    with quick_folder(tmp_path) as folder:
        yield folder


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_keeps_every_bit(tmp_path: Path, name: str) -> None:
    """Each bit pattern of a type comes back, NaN with its payload and -0.0 included."""
    dtype = DTYPES[name]
    raw = torch.randint(0, 256, (24 * 16,), dtype=torch.uint8)
    if dtype == torch.bool:
        raw = raw % 2
    tensors = {
        "matrix": raw.view(dtype).view(4, -1),
        "scalar": raw.view(dtype)[5],
        "one": raw.view(dtype)[:1],
        "empty": raw.view(dtype)[:0],
        "empty.rows": torch.empty(0, 3, dtype=dtype),
        "empty.cols": torch.empty(5, 0, 2, dtype=dtype),
    }
    path = save(tmp_path, 1, tensors, {})
    assert same(load(path)[0], tensors)
    assert verify(path) == []


def test_any_strides_come_back(tmp_path: Path) -> None:
    base = torch.randn(6, 8, 10)
    tensors = {
        "transposed": base.transpose(0, 2),
        "strided": base[::2, :, 1::3],
        "expanded": base[:, :1, :].expand(6, 8, 10),
        "reversed dims": base.permute(2, 1, 0),
        "view": base.view(-1)[7:400],
        "parameter": torch.nn.Parameter(base[0]),
        "conjugate": torch.randn(5, dtype=torch.complex64).conj(),
    }
    path = save(tmp_path, 1, tensors, {})
    loaded, _ = load(path)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert list(loaded) == list(manifest.read(path).tensors)


@pytest.mark.parametrize("limit", [1, 7, 8, 64, 100, 1000])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_blocks_of_any_size_make_up_the_tensor(limit: int, order: tuple[int, ...]) -> None:
    """Cutting is in row-major order and obeys the limit, one element at least."""
    tensor = torch.randn(3, 4, 5).permute(order)
    found = list(iter_blocks(tensor, limit))
    assert b"".join(found) == bits(tensor)
    assert max(map(len, found)) <= max(limit, 4)


def test_chunk_boundaries(tmp_path: Path) -> None:
    """Sizes around the 4 MiB chunk each get the right number of digests and come back."""
    sizes = [2**22 - 1, 2**22, 2**22 + 1, 2**23]
    tensors = {str(n): torch.randint(0, 256, (n,), dtype=torch.uint8) for n in sizes}
    path = save(tmp_path, 1, tensors, {})
    counts = [len(manifest.read(path).tensors[str(n)].slices[0].sha256) for n in sizes]
    assert counts == [1, 1, 2, 2]
    assert same(load(path)[0], tensors)


def test_meta_comes_back_exactly(tmp_path: Path) -> None:
    floats = [random.Random(5).uniform(-1, 1) * 10.0**e for e in range(-300, 300, 7)]
    meta = {
        "floats": [*floats, 5e-324, 1.7976931348623157e308, -0.0, 0.1],
        "integers": [0, -1, 2**63, -(2**200)],
        "text": 'é 漢字 🙂 "quoted" \\ \n \x00',
        "nested": {"": [[], {}, None, True, False]},
    }
    path = save(tmp_path, 1, {}, meta)
    found = load(path)[1]
    assert found == meta
    assert str(found) == str(meta)  # -0.0, and whole floats that stay floats


@pytest.mark.parametrize(
    ("meta", "place"),
    [
        ({"a": {"b": [1, float("nan")]}}, "meta.a.b[1]"),
        ({"a": float("inf")}, "meta.a"),
        ({"a": (1, 2)}, "meta.a is a tuple"),
        ({"a": {1: 2}}, "meta.a has the key 1"),
        ({"a": torch.tensor(1)}, "meta.a is a Tensor"),
        ({"a": "\ud800"}, "meta.a"),
        ({"\udfff": 1}, "a key of meta"),
        ({"a": 1 << 5000}, "meta.a is an integer"),
    ],
)
def test_meta_that_would_change_is_refused(tmp_path: Path, meta: dict, place: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path / "folder", 1, {}, meta)
    assert place in str(caught.value)
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, dtype=torch.complex128),
        torch.zeros(2, device="meta"),
        torch.zeros(3, 3).to_sparse(),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(tmp_path: Path, tensor: torch.Tensor) -> None:
    with pytest.raises(CheckpointError, match="'bad one'"):
        save(tmp_path / "folder", 1, {"good": torch.ones(1), "bad one": tensor}, {})
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize(("step", "name"), [(-1, "a"), (True, "a"), (1, ""), (1, "a\x1b[2J")])
def test_bad_steps_and_names_are_refused(tmp_path: Path, step: int, name: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be stored"):
        save(tmp_path / "folder", step, {name: torch.ones(1)}, {})


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    tensors = {"big": torch.randn(1000, 1000), "small": torch.randn(10), "other": torch.ones(3)}
    path = save(tmp_path, 1, tensors, {"a": 1})
    disk = Calls()
    loaded, meta = load(path, ["small"], disk=disk)
    assert list(loaded) == ["small"] and torch.equal(loaded["small"], tensors["small"])
    assert meta == {"a": 1}
    assert disk.read_bytes == (path / "manifest.json").stat().st_size + 40


def test_loading_is_on_the_host_whatever_the_default_device(tmp_path: Path) -> None:
    path = save(tmp_path, 1, state(1), {})
    with torch.device("meta"):
        loaded, _ = load(path)
    assert same(loaded, state(1))


def test_targets_are_filled_whatever_their_strides(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(5, 7), "b": torch.randn(4, 3)}
    parameter, turned = torch.nn.Parameter(torch.zeros(5, 7)), torch.zeros(3, 4).t()
    with Reader(save(tmp_path, 1, tensors, {})) as reader:
        reader.read_into("a", parameter)
        reader.read_into("b", turned)
    assert torch.equal(parameter, tensors["a"]) and parameter.requires_grad
    assert torch.equal(turned, tensors["b"])


@pytest.mark.parametrize("layers", [1, 3])
def test_another_models_tensors_are_all_told_and_none_is_touched(
    tmp_path: Path, layers: int
) -> None:
    """Case 10: every difference is listed, and nothing is half loaded."""
    with job_of(tmp_path, "two") as job:
        job.step()
        path = job.save()
    shape = {"hidden": 16, "layers": layers, "heads": 2, "kv_heads": 1}
    shape |= {"experts": 4, "top_k": 2, "expert_width": 24}
    with job_of(tmp_path, "other", model={"shape": shape}) as other:
        before = weights(other)
        with pytest.raises(MismatchError) as caught:
            restore(path, other.state, other.optimizer)
        assert equal(weights(other), before) == []
    error, experts = caught.value, "layers.0.moe.experts.w_out"
    said = "stored float32 [4, 16, 16], expected float32 [4, 16, 24]"
    assert error.mismatched[f"model.{experts}"] == said
    assert any(experts in name and "model." not in name for name in error.mismatched), "moments"
    odd = error.unexpected if layers == 1 else error.missing
    assert {name.split(".")[2] for name in odd if name.startswith("model.layers.")} == (
        {"1"} if layers == 1 else {"2"}
    )
    assert not (error.missing if layers == 1 else error.unexpected)
    assert all(name in str(error) for name in error.mismatched)


def test_shards_obey_their_limit(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.randn(100) for i in range(7)} | {"large": torch.randn(1000)}
    path = save(tmp_path, 1, tensors, {}, SMALL)
    found = manifest.read(path)
    data = [shard.size - shard.header for shard in found.shards]
    assert data == [800, 800, 800, 400, 4000]
    assert same(load(path)[0], tensors)


def test_the_safetensors_library_reads_every_shard(tmp_path: Path) -> None:
    """Header, alignment and data are the format's own, for every type at once."""
    tensors = {}
    for i, (name, dtype) in enumerate(DTYPES.items()):
        raw = torch.randint(0, 2, (8 * (3 + i),), dtype=torch.uint8)
        tensors[f"x.{name}"] = raw.view(dtype)
        tensors[f"scalar.{name}"] = raw.view(dtype)[0]
        tensors[f"empty.{name}"] = raw.view(dtype)[:0].reshape(0, 4)
    del tensors["x.F8_E8M0"], tensors["scalar.F8_E8M0"], tensors["empty.F8_E8M0"]
    path = save(tmp_path, 1, tensors, {}, SMALL)
    read = {}
    shards = sorted(path.glob("*.safetensors"))
    assert len(shards) > 1
    for shard in shards:
        read.update(load_file(shard))
        with safe_open(shard, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    assert same(read, tensors)
    for stored in manifest.read(path).tensors.values():
        assert stored.slices[0].span[0] % ITEM_BYTES[stored.dtype] == 0, "aligned to its elements"


def test_slices_are_put_together(tmp_path: Path) -> None:
    """A tensor that several processes wrote is read whole, and verified slice by slice."""
    experts = torch.randn(6, 4, 5)
    grid = torch.randint(0, 99, (5, 7))
    everything = slice(None)
    parts = {
        "experts": (experts, [(slice(e, e + 2), everything, everything) for e in (0, 2, 4)]),
        "grid": (
            grid,
            [
                (slice(0, 3), slice(0, 4)),
                (slice(0, 3), slice(4, 7)),
                (slice(3, 5), slice(0, 6)),
                (slice(3, 5), slice(6, 7)),
            ],
        ),
        "whole": (torch.tensor(2.5), [()]),
    }
    path = write_sliced(tmp_path / "step-00000004", 4, parts, {"a": 1}, chunk_bytes=16)
    loaded, meta = load(path)
    assert same(loaded, {name: tensor for name, (tensor, _) in parts.items()})
    assert meta == {"a": 1}
    assert verify(path) == []
    entries = load_file(path / "shard-00001.safetensors")
    assert torch.equal(entries["experts[2:4,0:4,0:5]"], experts[2:4])
    assert torch.equal(entries["grid[0:3,4:7]"], grid[:3, 4:])


def test_a_slice_has_the_same_digest_wherever_it_lies(tmp_path: Path) -> None:
    """Digests compare a unit, such as one expert, across ways of cutting a tensor up."""
    tensor = torch.randn(4, 100)
    rows = [(slice(i, i + 1), slice(None)) for i in range(4)]
    a = write_sliced(tmp_path / "a", 1, {"x": (tensor, rows)}, {}, chunk_bytes=64)
    other = {"y": (torch.ones(9), [(slice(None),)]), "x": (tensor, rows[::-1])}
    b = write_sliced(tmp_path / "b", 1, other, {}, chunk_bytes=64)
    slices = (manifest.read(path).tensors["x"].slices for path in (a, b))
    one, two = ({part.at: part.digest for part in parts} for parts in slices)
    assert one == two and len(set(one.values())) == 4


def test_equal_states_give_equal_files_and_other_states_other_ones(tmp_path: Path) -> None:
    paths = [save(tmp_path / str(i), 5, state(n), {"a": 1}) for i, n in enumerate((1, 1, 2))]
    contents = [{f.name: f.read_bytes() for f in path.iterdir()} for path in paths]
    assert contents[0] == contents[1]
    assert all(contents[0][name] != contents[2][name] for name in contents[0])


def test_the_second_save_holds_the_second_state(tmp_path: Path) -> None:
    """A saver that keeps the first step's bytes writes them again."""
    weight = torch.zeros(5)
    first = save(tmp_path, 1, {"w": weight}, {})
    weight += 1
    second = save(tmp_path, 2, {"w": weight}, {})
    assert torch.equal(load(first)[0]["w"], torch.zeros(5))
    assert torch.equal(load(second)[0]["w"], torch.ones(5))


def test_manifest_is_plain_json(tmp_path: Path) -> None:
    path = save(tmp_path, 3, state(1), {"run": "x"})
    fields = json.loads((path / "manifest.json").read_text())
    assert fields["format"] == "moefold-checkpoint" and fields["version"] == 1
    assert fields["step"] == 3 and fields["meta"] == {"run": "x"}


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory of a fork is told by Linux only")
@pytest.mark.parametrize("turned", [False, True])
def test_peak_memory_is_bounded(quick: Path, turned: bool) -> None:
    """Saving copies no more than a block, also where strides need a copy; loading nothing."""
    size = 192 * 2**20

    def work() -> None:
        tensor = torch.ones(size // 4).view(1024, -1)
        start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        path = save(quick, 1, {"x": tensor.t() if turned else tensor}, {})
        extra = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) * 1024
        assert extra < (96 if turned else 32) * 2**20, extra
        if not turned:
            target = torch.empty_like(tensor).fill_(0)
            start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            with Reader(path) as reader:
                reader.read_into("x", target)
            extra = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) * 1024
            assert extra < 32 * 2**20, extra
            assert target.view(-1)[-1] == 1

    assert run_child(work) == 0
