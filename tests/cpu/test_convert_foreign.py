"""Pickled checkpoints of other programs give their tensors and nothing else."""

import io
import os
import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save

from moefold.cli.main import main
from moefold.convert.importer import import_folder
from moefold.convert.source import ConvertError
from moefold.training.model_checkpoint import MODEL_PREFIX
from tests.cpu.checkpoint_tools import load
from tests.cpu.hubs import decoder_of, on_disk, same_bits, weights_of, write_hub

FAMILY = "qwen3_moe"


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A folder that describes a model and holds no weights."""
    write_hub(tmp_path / "hub", decoder_of(FAMILY), {})
    (tmp_path / "hub" / "model.safetensors").unlink()
    return tmp_path / "hub"


def theirs() -> dict[str, Tensor]:
    return on_disk(decoder_of(FAMILY), weights_of(decoder_of(FAMILY)))


def save_plain(path: Path) -> Path:
    torch.save(theirs(), path / "model.pt")
    return path / "model.pt"


def save_wrapped(path: Path) -> Path:
    """As a trainer does that wraps its model, its optimizer beside it."""
    model = {f"module.{name}": tensor for name, tensor in theirs().items()}
    optimizer = {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1}]}
    torch.save({"state_dict": model, "optimizer": optimizer, "step": 7}, path / "last.ckpt")
    return path / "last.ckpt"


def save_split(path: Path) -> Path:
    stored = theirs()
    for n in range(3):
        part = {name: stored[name] for name in sorted(stored)[n::3]}
        torch.save(part, path / f"pytorch_model-{n + 1:05d}-of-00003.bin")
    torch.save(Trap(path / "mark"), path / "training_args.bin")
    return path


def save_distributed(path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process alone saves
        state = {"model": theirs(), "optim": {"m": torch.zeros(4)}, "step": 3}
        save(state, checkpoint_id=path / "dcp")
    return path / "dcp"


def save_in_boxes(path: Path) -> Path:
    """As several ranks do: each tensor cut in two along its first dim, last box first."""
    return write_dcp(path / "boxes", theirs())


Change = Callable[[Metadata], object]


def write_dcp(folder: Path, tensors: Mapping[str, Tensor], change: Change = id) -> Path:
    folder.mkdir()
    described, places = {}, {}
    with (folder / "__0_0.distcp").open("wb") as file:
        for name, tensor in tensors.items():
            rows = (len(tensor) + 1) // 2
            chunks = []
            for first, part in ((rows, tensor[rows:]), (0, tensor[:rows])):
                at = torch.Size([first] + [0] * (tensor.dim() - 1))
                chunks.append(ChunkStorageMetadata(at, part.shape))
                start = file.tell()
                torch.save(part.clone(), file)
                info = _StorageInfo("__0_0.distcp", start, file.tell() - start)
                places[MetadataIndex(name, at)] = info
            facts = TensorProperties(tensor.dtype)
            described[name] = TensorStorageMetadata(facts, tensor.shape, chunks)
    found = Metadata(described, storage_data=places)
    change(found)
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    return folder


FORMS = [save_plain, save_wrapped, save_split, save_distributed, save_in_boxes]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_every_tensor_arrives_exactly(
    hub: Path, tmp_path: Path, form: Callable[[Path], Path]
) -> None:
    weights = weights_of(decoder_of(FAMILY))
    with import_folder(hub, form(tmp_path)) as found:
        assert list(found.tensors) == list(weights)
        for name, tensor in found.tensors.items():
            assert same_bits(tensor, weights[name]), name
            box = tuple((size // 3, size) for size in tensor.shape)
            part = weights[name][tuple(slice(*side) for side in box)]
            assert same_bits(found.tensors.read_box(name, box).contiguous(), part.contiguous())
    assert not (tmp_path / "mark").exists()


def test_the_command_makes_a_checkpoint_of_it(hub: Path, tmp_path: Path) -> None:
    foreign = str(save_wrapped(tmp_path))
    assert main(["import", str(hub), str(tmp_path / "ours"), "--weights", foreign, "--json"]) == 0
    tensors, _ = load(tmp_path / "ours" / "step-00000000")
    for name, tensor in weights_of(decoder_of(FAMILY)).items():
        assert same_bits(tensors[MODEL_PREFIX + name], tensor), name


def test_what_is_missing_or_left_over_is_told(hub: Path, tmp_path: Path) -> None:
    stored = theirs()
    stored["model.extra"] = stored.pop("model.norm.weight")
    torch.save(stored, tmp_path / "odd.pt")
    with pytest.raises(ConvertError) as caught:
        import_folder(hub, tmp_path / "odd.pt")
    assert sorted(caught.value.problems) == [
        "model.extra in odd.pt is not a tensor of the model that config.json describes; "
        "remove it, or correct config.json",
        "model.norm.weight is missing",
    ]
    torch.save({"a": theirs(), "b": theirs()}, tmp_path / "two.pt")
    with pytest.raises(ConvertError, match=r"one tensor named model\.embed_tokens\.weight.*not 2"):
        import_folder(hub, tmp_path / "two.pt")
    with pytest.raises(ConvertError, match="does not exist"):
        import_folder(hub, tmp_path / "none.pt")


# --------------------------------------------------------------------------------- hostile ones


class Trap:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


def refused(hub: Path, weights: Path, why: str) -> None:
    """Show that weights are refused, when they are opened or when they are read."""
    with pytest.raises(ConvertError, match=why), import_folder(hub, weights) as found:
        for name in found.tensors:
            found.tensors[name]


def test_the_trap_is_one(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Trap(tmp_path / "mark")))
    assert (tmp_path / "mark").exists()


def test_a_hostile_pickle_is_refused_and_runs_nothing(hub: Path, tmp_path: Path) -> None:
    trap, mark = Trap(tmp_path / "mark"), tmp_path / "mark"
    torch.save({**theirs(), "more": trap}, tmp_path / "model.pt")
    refused(hub, tmp_path / "model.pt", "Weights only load failed")
    (tmp_path / "raw.pt").write_bytes(pickle.dumps({**theirs(), "more": trap}))
    refused(hub, tmp_path / "raw.pt", "raw.pt")
    folder = write_dcp(tmp_path / "meta", theirs(), lambda said: setattr(said, "odd", trap))
    refused(hub, folder, r"(posix|nt)\.system is not on the allow-list")
    folder = write_dcp(tmp_path / "part", theirs())
    raw = io.BytesIO()
    torch.save(trap, raw)
    file = folder / "__0_0.distcp"
    start = file.stat().st_size
    file.write_bytes(file.read_bytes() + raw.getvalue())
    said = pickle.loads((folder / ".metadata").read_bytes())
    for index in said.storage_data:
        said.storage_data[index] = _StorageInfo(file.name, start, len(raw.getvalue()))
    (folder / ".metadata").write_bytes(pickle.dumps(said))
    refused(hub, folder, "Weights only load failed")
    assert not mark.exists()


@pytest.mark.parametrize(
    "names",
    [b"cbuiltins\neval\n", b"cos\nsystem\n", b"ctorch\nload\n", b"ctorch\nSize.__class__\n",
     b"ctorch.distributed.checkpoint.metadata\nos.system\n", b"cpathlib\nos\n"],
)  # fmt: skip
def test_a_name_that_describes_no_tensor_is_refused(
    hub: Path, tmp_path: Path, names: bytes
) -> None:
    folder = write_dcp(tmp_path / "dcp", theirs())
    (folder / ".metadata").write_bytes(names + b"(S'touch /'\ntR.")
    refused(hub, folder, "not on the allow-list")


def elsewhere(said: Metadata) -> None:
    for info in said.storage_data.values():  # type: ignore[union-attr]
        info.relative_path = "../boxes/__0_0.distcp"


def beyond(said: Metadata) -> None:
    next(iter(said.storage_data.values())).length = 2**40  # type: ignore[union-attr]


def twice(said: Metadata) -> None:
    held: Any = next(iter(said.state_dict_metadata.values()))
    held.chunks[0] = held.chunks[1]


def huge(said: Metadata) -> None:
    held: Any = next(iter(said.state_dict_metadata.values()))
    held.size = torch.Size([2**50, 2**10])


def without(said: Metadata) -> None:
    said.storage_data.clear()  # type: ignore[union-attr]


def other(said: Metadata) -> None:
    said.state_dict_metadata = {"a": 3}  # type: ignore[dict-item]


def packed(said: Metadata) -> None:
    next(iter(said.storage_data.values())).transform_descriptors = ["zstd"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (elsewhere, "is not a file in the folder"),
        (beyond, "has no bytes"),
        (twice, "parts do not cover its shape"),
        (huge, "parts do not cover its shape"),
        (without, r"\.metadata has an unknown structure: KeyError"),
        (other, r"\.metadata has an unknown structure: TypeError"),
        (packed, "is compressed"),
    ],
)
def test_metadata_that_lies_is_refused(hub: Path, tmp_path: Path, change: Change, why: str) -> None:
    write_dcp(tmp_path / "boxes", theirs())
    refused(hub, write_dcp(tmp_path / "dcp", theirs(), change), why)


def test_a_part_that_is_another_tensor_is_refused(hub: Path, tmp_path: Path) -> None:
    def swapped(said: Metadata) -> None:
        places: Any = said.storage_data
        first, *_, last = places
        places[first], places[last] = places[last], places[first]

    refused(
        hub, write_dcp(tmp_path / "dcp", theirs(), swapped), r"is not the torch\.float32 tensor"
    )


def test_dictionaries_that_hold_themselves_end(hub: Path, tmp_path: Path) -> None:
    cycle: dict[str, Any] = theirs()
    cycle["again"] = cycle
    torch.save(cycle, tmp_path / "cycle.pt")
    refused(hub, tmp_path / "cycle.pt", "not 4; its first tensors")
