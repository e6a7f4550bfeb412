"""Saves by several ranks: killed anywhere, refused by one disk, damaged by one byte."""

import errno
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moefold.checkpoint import manifest
from moefold.checkpoint.config import CheckpointPolicy
from moefold.checkpoint.disk import Disk
from moefold.checkpoint.errors import CheckpointError, DamagedError, SaveError
from moefold.checkpoint.folder import find_newest
from moefold.checkpoint.lock import FolderLock
from moefold.checkpoint.save import save
from moefold.checkpoint.tensors import TensorSlice
from moefold.checkpoint.verify import verify
from moefold.comm.group import Group
from tests.cpu.checkpoint_tools import Calls, Deadly, Refusing, load, quick_folder, same
from tests.gloo.forks import fork_ranks

ONE = CheckpointPolicy(keep=1, shard_bytes=1024, attempts=1)
WORLD = 2


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Path]:
    """Return a folder where syncing takes no time."""
    with quick_folder(tmp_path) as folder:
        yield folder


def whole(number: int) -> dict[str, torch.Tensor]:
    """Return a state, different for each number."""
    return {
        "rows": torch.arange(24.0).view(6, 4) + number,
        "columns": torch.arange(300.0).view(5, 60) * number,
        "step": torch.tensor(number),
    }


def boxes(number: int, rank: int, world: int) -> dict[str, list[TensorSlice]]:
    """Return a rank's boxes of it: rows, columns, and a scalar that the last rank has."""
    found: dict[str, list[TensorSlice]] = {}
    state = whole(number)
    for name, dim in (("rows", 0), ("columns", 1)):
        tensor = state[name]
        each = tensor.shape[dim] // world
        at = tuple(rank * each if d == dim else 0 for d in range(2))
        box = tensor.narrow(dim, rank * each, each)
        found[name] = [TensorSlice(box.contiguous(), tuple(tensor.shape), at)]
    if rank == world - 1:
        found["step"] = [TensorSlice(state["step"], (), ())]
    return found


def save_in_ranks(folder: Path, number: int, ranks: Group, disk: Disk, warn=lambda text: None):
    """Save a state from all ranks, the first one holding the lock."""
    lock = FolderLock(folder, "the test", warn=warn)
    if ranks.index == 0:
        folder.mkdir(exist_ok=True)
        lock.acquire()
    mine = boxes(number, ranks.index, ranks.size)
    meta = {"step": number}
    return save(folder, number, mine, meta, ONE, lock=lock, ranks=ranks, warn=warn, disk=disk)


@pytest.mark.parametrize("dying", range(WORLD))
def test_killed_at_every_write_boundary_of_a_collective_save(quick: Path, dying: int) -> None:
    """The rank dies before, in the middle of, and between all that it does to the disk: torn
    files, before and after the rename, between rename and pointer. The newest stays whole."""
    seen = []
    for at in range(100):
        folder = quick / f"{dying}-{at}"
        save(folder, 5, whole(5), {"step": 5}, ONE)

        def work(ranks: Group, folder: Path = folder, at: int = at) -> None:
            disk = Deadly(at) if ranks.index == dying else Calls()
            save_in_ranks(folder, 7, ranks, disk)

        statuses = fork_ranks(work, WORLD, quick)
        found = find_newest(folder, warn=lambda text: None)
        assert found is not None and verify(found) == []
        tensors, meta = load(found)
        assert same(tensors, whole(meta["step"]))
        seen.append(meta["step"])
        told: list[str] = []
        path = save(folder, 9, whole(9), {}, ONE, warn=told.append)
        assert sorted(p.name for p in folder.iterdir()) == ["latest", path.name]
        assert all("Taking over" in text for text in told)
        if statuses[dying] == 0:
            break
        assert statuses[dying] == -signal.SIGKILL
    assert statuses == [0] * WORLD, "the loop reached the end of a save"
    assert seen == sorted(seen) and seen[-1] == 7, "once the new one counts it goes on counting"
    assert seen.count(5) >= (8 if dying == 0 else 4)


def test_one_rank_without_room_keeps_all_from_publishing(quick: Path) -> None:
    """All ranks raise with the reason of the one; what was there stands; the next save passes."""
    folder = quick / "run"
    before = save(folder, 5, whole(5), {"step": 5}, ONE)

    def work(ranks: Group) -> None:
        refusing = Refusing({"write": (99, errno.ENOSPC)})
        disk = refusing if ranks.index == 1 else Calls()
        with pytest.raises(SaveError, match=r"rank 1: .*needs \d+ bytes and \d+ are free"):
            save_in_ranks(folder, 7, ranks, disk)

    assert fork_ranks(work, 3, quick) == [0, 0, 0]
    assert find_newest(folder) == before
    assert [p.name for p in folder.iterdir() if ".tmp-" in p.name] == []

    def again(ranks: Group) -> None:
        save_in_ranks(folder, 7, ranks, Refusing({"write": (0, errno.ENOSPC)}))

    assert fork_ranks(again, 3, quick) == [0, 0, 0]
    found = find_newest(folder)
    assert found is not None and same(load(found)[0], whole(7))


@pytest.mark.parametrize("wrong", ["missing", "twice"])
def test_boxes_of_some_ranks_alone_are_never_published(quick: Path, wrong: str) -> None:
    """Ranks that leave their experts out, or all write the same ones, end in an error on all."""
    folder = quick / "run"
    before = save(folder, 5, whole(5), {"step": 5}, ONE)

    def work(ranks: Group) -> None:
        mine = boxes(7, 0 if wrong == "twice" else ranks.index, ranks.size)
        if wrong == "missing" and ranks.index == 1:
            del mine["rows"]
        lock = FolderLock(folder, "the test")
        if ranks.index == 0:
            lock.acquire()
        with pytest.raises(CheckpointError, match="slices that do not tile its shape"):
            save(folder, 7, mine, {}, ONE, lock=lock, ranks=ranks)

    assert fork_ranks(work, WORLD, quick) == [0, 0]
    assert find_newest(folder, warn=pytest.fail) == before
    assert sorted(p.name for p in folder.iterdir() if p.is_dir()) == [before.name]


def test_a_refusal_that_passes_is_tried_again(quick: Path) -> None:
    folder = quick / "run"

    def work(ranks: Group) -> None:
        policy = ONE.model_copy(update={"attempts": 3})
        disk = Refusing({"sync": (1 if ranks.index == 1 else 0, errno.EIO)})
        lock = FolderLock(folder, "the test")
        if ranks.index == 0:
            folder.mkdir()
            lock.acquire()
        told: list[str] = []
        mine = boxes(3, ranks.index, ranks.size)
        save(
            folder, 3, mine, {}, policy,
            lock=lock, ranks=ranks, warn=told.append, disk=disk,
        )  # fmt: skip
        assert len(told) == (1 if ranks.index == 1 else 0)

    assert fork_ranks(work, 2, quick) == [0, 0]
    found = find_newest(folder)
    assert found is not None and verify(found) == []
    assert same(load(found)[0], whole(3))


def test_any_flipped_byte_is_found_and_the_tensor_named(quick: Path) -> None:
    """In the shards of three ranks, every byte; in headers and manifest, every few."""
    fork = fork_ranks(lambda ranks: _saved(quick / "run", ranks), 3, quick)
    assert fork == [0, 0, 0]
    path = find_newest(quick / "run")
    assert path is not None
    found = manifest.read(path)
    assert {shard.rank for shard in found.shards} == {0, 1, 2}
    for number, rows in enumerate(manifest.slices_by_shard(found)):
        file = path / found.shards[number].file
        raw = file.read_bytes()
        for name, part in rows:
            for at in range(*part.span, 11):
                file.write_bytes(_flipped(raw, at))
                with pytest.raises(DamagedError) as caught:
                    load(path, [name])
                assert caught.value.tensor == name and caught.value.file == file.name
        for at in range(0, found.shards[number].header, 9):
            file.write_bytes(_flipped(raw, at))
            assert any(problem.file == file.name for problem in verify(path))
        file.write_bytes(raw)
    raw = (path / manifest.FILE).read_bytes()
    for at in range(0, len(raw), 23):
        (path / manifest.FILE).write_bytes(_flipped(raw, at))
        assert verify(path) != []


def _saved(folder: Path, ranks: Group) -> None:
    save_in_ranks(folder, 2, ranks, Calls())


def _flipped(raw: bytes, at: int) -> bytes:
    return raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :]


def test_only_the_first_rank_holds_what_ranks_wrote(quick: Path) -> None:
    """Each rank sends its lines of the manifest to the first one, and receives nobody's."""

    def work(ranks: Group) -> None:
        save_in_ranks(quick / "run", 2, ranks, Calls())
        sent = {site.op: total.bytes for site, total in ranks.recorder.totals.items()}
        (quick / f"sent-{ranks.index}").write_text(json.dumps(sent))

    assert fork_ranks(work, 3, quick) == [0, 0, 0]
    for rank in range(3):
        sent = json.loads((quick / f"sent-{rank}").read_text())
        assert ("send" in sent) == (rank > 0)
        assert sent.get("all_gather", 0) < 100
