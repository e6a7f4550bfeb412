"""Who writes which bytes, which bytes are read, and how much memory that takes."""

import ctypes
import gc
import math
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moefold.api import export
from moefold.checkpoint import load as loading
from moefold.checkpoint.load import Reader
from moefold.checkpoint.manifest import tiles
from moefold.checkpoint.save import save
from moefold.checkpoint.tensors import LazyTensor, TensorSlice
from moefold.convert.importer import import_folder
from moefold.convert.plan import meta_state_dict
from moefold.model.config import MODEL
from moefold.parallel.data.sharding import LocalSlice
from moefold.training.model_checkpoint import MODEL_PREFIX as PREFIX
from moefold.training.model_checkpoint import describe_model
from moefold.training.state import assigned_slices
from tests.cpu.checkpoint_tools import Calls, quick_folder, run_child, write_sliced

MIB = 2**20


def shares(name: str, tensor: Tensor, copies: int, share_bytes: int) -> list[list[TensorSlice]]:
    """Return what each holder of a box writes; the box is the last half of a tensor's columns."""
    shape = (tensor.shape[0], 2 * tensor.shape[1])
    box = ((0, shape[0]), (tensor.shape[1], shape[1]))
    helds = [LocalSlice(name, tensor, shape, box, copy, copies) for copy in range(copies)]
    return [list(assigned_slices(name, held, share_bytes)) for held in helds]


@pytest.mark.parametrize("copies", [1, 2, 3, 8, 1000])
@pytest.mark.parametrize(("rows", "share_bytes"), [(1, 64), (7, 64), (300, 512), (300, 10**9)])
def test_each_element_of_a_box_is_written_by_one_of_its_holders(
    copies: int, rows: int, share_bytes: int
) -> None:
    tensor = torch.arange(rows * 5.0).view(rows, 5)
    found = [part for parts in shares("w", tensor, copies, share_bytes) for part in parts]
    half = [((part.at[0], part.at[1] - 5), tuple(part.tensor.shape)) for part in found]
    assert tiles((rows, 5), half)
    assert all(torch.equal(part.tensor, tensor[part.at[0] :][: len(part.tensor)]) for part in found)
    size = rows * 20
    assert len(found) == max(1, min(copies, rows, size // share_bytes))


def test_holders_write_about_as_much_each() -> None:
    """Of a hundred tensors of all sizes, each of eight holders writes its eighth within a fifth."""
    written = [0] * 8
    for number in range(100):
        tensor = torch.zeros(64 if number % 10 else 4096, 16)
        for copy, parts in enumerate(shares(f"layers.{number}.w", tensor, 8, 4096)):
            written[copy] += sum(part.tensor.numel() for part in parts)
    mean = sum(written) / 8
    assert max(written) < 1.2 * mean and min(written) > 0.8 * mean


def test_only_the_chunks_of_a_box_are_read(tmp_path: Path) -> None:
    """Whatever the slices and the box: no more than the rows asked for, in whole chunks."""
    tensor = torch.arange(64 * 32.0).view(64, 32)
    boxes = [(slice(0, 20), slice(None)), (slice(20, 64), slice(None))]
    path = write_sliced(tmp_path / "step-00000001", 1, {"w": (tensor, boxes)}, {}, chunk_bytes=512)
    for first, last in ((0, 64), (3, 4), (10, 30), (20, 64), (63, 64)):
        for columns in (slice(0, 32), slice(8, 16)):
            disk, target = Calls(), torch.zeros(last - first, len(range(32)[columns]))
            with Reader(path, disk=disk) as reader:
                disk.read_bytes = 0
                reader.read_into("w", target, (first, columns.start))
            assert torch.equal(target, tensor[first:last, columns])
            assert disk.read_bytes <= (last - first) * 128 + 4 * 512


def test_a_box_of_columns_takes_little_memory_beside_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.arange(512 * 64.0).view(512, 64)
    whole = {"w": (tensor, [(slice(None), slice(None))])}
    path = write_sliced(tmp_path / "step-00000001", 1, whole, {}, chunk_bytes=1024)
    taken: list[int] = []
    empty = loading.allocate

    def noted(dtype: str, shape: tuple[int, ...]) -> Tensor:
        made = empty(dtype, shape)
        taken.append(made.numel() * made.element_size())
        return made

    monkeypatch.setattr(loading, "allocate", noted)
    monkeypatch.setattr(loading, "BLOCK_BYTES", 4096)
    target = torch.zeros(512, 8)
    with Reader(path) as reader:
        reader.read_into("w", target, (0, 24))
    assert torch.equal(target, tensor[:, 24:32])
    assert max(taken) <= 4096 + 2 * 1024, "some rows at a time, in whole chunks"


# ------------------------------------------------------------------------------ streaming


M_MMAP_THRESHOLD = -3


def anonymous() -> int:
    """Return the bytes of this process's own memory, without files it has mapped."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def peak_of(work: Callable[[], object]) -> int:
    """Return by how many bytes this process's own memory grew at most while it worked."""
    # What earlier tests left free would be taken first, and not be seen to grow.
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    # What is large is given back as it is freed, however large the blocks before it were.
    libc.mallopt(M_MMAP_THRESHOLD, MIB)
    before, most, over = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.is_set():
            most = max(most, anonymous())
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    over.set()
    watcher.join()
    return most - before


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_export_and_import_hold_at_most_twice_the_largest_group(tmp_path: Path) -> None:
    """A checkpoint in slices of four ranks goes out to a folder and comes in again."""
    shape = {"hidden": 256, "layers": 4, "heads": 4, "kv_heads": 2, "experts": 16, "top_k": 2}
    data = {"family": "olmoe", "context": 64, "shape": shape | {"expert_width": 512}}
    record = MODEL.kinds["olmoe"].model_validate(data)
    decoder = record.describe(512)  # type: ignore[attr-defined]
    wanted = meta_state_dict(decoder)
    largest = max(math.prod(t.shape) * t.dtype.itemsize for t in wanted.values())
    total = sum(math.prod(t.shape) * t.dtype.itemsize for t in wanted.values())
    assert total > 4 * largest and largest >= 16 * MIB, "the bound says something"
    with quick_folder(tmp_path) as quick:
        checkpoint = quick / "step-00000001"
        assert run_child(lambda: _written(decoder, checkpoint)) == 0

        def measure(what: str, work: Callable[[], object]) -> None:
            torch.set_num_threads(1)
            grown = peak_of(work)
            said = f"{what} took {grown / largest:.2f} times the largest group"
            # Small blocks too, in a heap full of holes: up to 0.4 groups were seen.
            assert largest < grown <= 2 * largest + 8 * MIB, said

        out = partial(export, checkpoint, quick / "hub")
        assert run_child(partial(measure, "export", out)) == 0
        back = partial(_brought_in, quick / "hub", quick / "back")
        assert run_child(partial(measure, "import", back)) == 0


def _written(decoder: object, path: Path) -> None:
    """Write a checkpoint as four ranks would: experts in slices, by expert and by width."""
    parts = {}
    for name, target in meta_state_dict(decoder).items():  # type: ignore[arg-type]
        tensor = torch.rand(target.shape).to(target.dtype)
        whole = [tuple(slice(None) for _ in target.shape)]
        if name.endswith("experts.w_in"):
            half, wide = target.shape[0] // 2, target.shape[2] // 2
            ends = (slice(0, half), slice(half, None)), (slice(0, wide), slice(wide, None))
            whole = [(e, slice(None), f, slice(None)) for e, f in product(*ends)]
        parts[PREFIX + name] = (tensor, whole)
    write_sliced(path, 1, parts, describe_model(decoder, None))


def _brought_in(source: Path, folder: Path) -> None:
    with import_folder(source) as found:
        held = found.tensors
        tensors = {
            name: LazyTensor(target.dtype, target.shape, lambda n=name: held[n])
            for name, target in held.targets.items()
        }
        save(folder, 0, tensors, {"pid": os.getpid()})
