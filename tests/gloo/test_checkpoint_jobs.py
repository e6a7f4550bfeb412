"""Runs of several ranks that are killed, moved to other layouts, and saved behind their steps."""

import errno
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moefold.checkpoint.disk import Disk
from moefold.checkpoint.errors import SaveError
from moefold.checkpoint.folder import find_newest, step_name
from moefold.checkpoint.verify import verify
from moefold.comm.group import Group
from moefold.comm.world import World
from moefold.mesh.folding import Folding
from moefold.training import machine as rates
from moefold.training.hooks.base import Hook
from moefold.training.machine import MatrixRate
from moefold.training.state import iter_state
from moefold.training.trainer import Trainer
from tests.cpu.checkpoint_tools import load, quick_folder
from tests.cpu.runs import job_of, run_of
from tests.gloo.forks import fork_ranks

STEPS = 4
KEEP = {"every": None, "keep": 9, "attempts": 1}
SHAPE = {"hidden": 16, "layers": 2, "heads": 2, "kv_heads": 2} | {
    "experts": 4,
    "top_k": 2,
    "expert_width": 16,
}


def assumed(dtypes: tuple[torch.dtype, ...], device: torch.device) -> dict[Any, MatrixRate]:
    """Take the place of measuring."""
    return dict.fromkeys(dtypes, MatrixRate(1e9, "assumed"))


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder where syncing takes no time, with prepared data in it."""
    monkeypatch.setattr(rates, "measure_rates_cached", assumed)
    with quick_folder(tmp_path) as folder:
        with job_of(folder, "first"):
            pass
        yield folder


def in_ranks(
    folder: Path,
    out: str,
    sizes: str,
    world: int,
    work: Callable[[Trainer], Any],
    adapter: dict[str, Any] | None = None,
    **changes: Any,
) -> list[int]:
    """Open a run in a layout on each of some ranks, and call ``work`` with its job."""

    def open_and_work(ranks: Group) -> None:
        run = run_of(
            folder,
            model={"shape": SHAPE},
            layout={"sizes": sizes, "zero": 1},
            train={"steps": STEPS},
            watch={"checkpoint": KEEP | changes},
            adapter=adapter,
        )
        folding = Folding(run.layout.split, world)
        with World.open(folding, "cpu", 30.0) as here:
            job = Trainer(run, folder / out, cache=folder / "prepared", world=here)
            try:
                work(job)
            except BaseException as error:
                job.close(error)
                raise
            job.close()

    return fork_ranks(open_and_work, world, folder)


def state(job: Trainer) -> dict[str, torch.Tensor]:
    """Return copies of all that is here of the state; boxes of one tensor by their place."""
    return {
        json.dumps([name, held.box]): held.tensor.detach().clone()
        for name, held in iter_state(job.state, job.optimizer)
    }


def note_state(job: Trainer, folder: Path, name: str) -> None:
    """Write what is here of the state beside the checkpoints."""
    save_file(state(job), folder / f"{name}-{job.world.rank}")


def watched(job: Trainer, folder: Path) -> None:
    """Note the documents and places that each step trains on here."""
    feed = job.reader.read

    def step(place: int) -> Any:
        batches = feed(place)
        said = [[list(map(str, origin)) for origin in batch.sources] for batch in batches]
        with (folder / f"seen-{os.getpid()}").open("a") as file:
            file.write(json.dumps([place, said]) + "\n")
        return batches

    job.reader.read = step  # type: ignore[method-assign]


def seen(folder: Path) -> dict[int, list[str]]:
    """Return what all ranks trained on by place in the order, the last attempt of each."""
    found: dict[int, dict[int, list[str]]] = {}
    for file in sorted(folder.glob("seen-*"), key=lambda path: path.stat().st_mtime_ns):
        for line in file.read_text().splitlines():
            place, batches = json.loads(line)
            found.setdefault(place, {})[int(file.name.rpartition("-")[2])] = [
                json.dumps(batch) for batch in batches
            ]
        file.unlink()
    return {p: sorted(x for ranks in found[p].values() for x in ranks) for p in sorted(found)}


def test_data_goes_on_where_it_was_when_the_number_of_data_ranks_changes(quick: Path) -> None:
    """Pain 19: dp 2 to 1 to 2, with a step made again after a loss: the same rows in each step."""

    def steps(count: int, saved: int) -> Callable[[Trainer], None]:
        def work(job: Trainer) -> None:
            watched(job, quick)
            for made in range(count):
                job.step()
                if made + 1 == saved:
                    job.save()

        return work

    assert in_ranks(quick, "one", "", 1, steps(STEPS, STEPS)) == [0]
    unbroken = seen(quick)
    assert len(unbroken) == STEPS and len({json.dumps(rows) for rows in unbroken.values()}) > 1
    broken: dict[int, list[str]] = {}
    for sizes, world, count, saved in (
        ("", 2, 2, 1),
        ("tp2", 2, 2, 2),
        ("", 2, 1, 1),
    ):
        assert in_ranks(quick, "two", sizes, world, steps(count, saved)) == [0] * world
        found = seen(quick)
        # tensor ranks are given the same rows
        broken |= {p: sorted(set(rows)) if sizes else rows for p, rows in found.items()}
    assert broken == {p: sorted(rows) for p, rows in unbroken.items()}


# ------------------------------------------------------------------------- behind the steps


def slow_disk() -> tuple[threading.Event, threading.Event]:
    """Hold every write of this process back; the first event tells of one, the second lets go."""
    begun, go, write = threading.Event(), threading.Event(), Disk.write

    def slow(disk: Disk, fd: int, data: memoryview) -> None:
        begun.set()
        assert go.wait(20)
        write(disk, fd, data)

    Disk.write = slow  # type: ignore[method-assign]
    return begun, go


def refusing_disk(job: Trainer, rank: int) -> None:
    """Let the disk of one rank refuse all shards."""
    if job.world.rank == rank:

        def refuse(disk: Disk, fd: int, data: memoryview) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        Disk.write = refuse  # type: ignore[method-assign]


def test_checkpoints_behind_the_steps_hold_the_state_of_their_own_step(quick: Path) -> None:
    """Steps go on while a slow disk writes; the second one holds none of the first one's bytes."""

    def work(job: Trainer) -> None:
        begun, go = slow_disk()
        job.step()
        job.save()
        note_state(job, quick, "first")
        assert begun.wait(20)
        job.step()  # updates in place what the first one was copied from
        assert find_newest(quick / "out") is None, "the first one is still being written"
        go.set()
        job.save()  # waits for the first one
        note_state(job, quick, "second")
        found = find_newest(quick / "out")
        assert found is not None and found.name == step_name(1)
        job.step()

    assert in_ranks(quick, "out", "ep2", 2, work, asynchronous=True) == [0, 0]
    for step, name in ((1, "first"), (2, "second")):
        path = quick / "out" / step_name(step)
        assert verify(path) == []
        tensors, meta = load(path)
        assert meta["progress"]["step"] == step
        for rank in range(2):
            for key, held in load_file(quick / f"{name}-{rank}").items():
                tensor, box = json.loads(key)
                part = tensors[tensor][tuple(slice(*ends) for ends in box)]
                assert torch.equal(part, held), (name, key)
    first, second = (load(quick / "out" / step_name(step))[0] for step in (1, 2))
    assert all(not torch.equal(first[name], second[name]) for name in first if "exp_avg" in name)


def test_a_failure_behind_the_steps_is_raised_on_all_ranks_at_the_next_step(quick: Path) -> None:
    def work(job: Trainer) -> None:
        refusing_disk(job, 1)
        job.step()
        job.save()
        with pytest.raises(SaveError, match=r"rank 1: .*Read-only"):
            for _ in range(50):
                job.step(())
        assert job.step_number < 45, "it was raised at a step"

    statuses = in_ranks(
        quick, "out", "ep2", 2, _with_idle_steps(work), asynchronous=True, on_failure="stop"
    )
    assert statuses == [0, 0]
    assert find_newest(quick / "out") is None


def _with_idle_steps(work: Callable[[Trainer], None]) -> Callable[[Trainer], None]:
    """Let steps without batches do nothing but ask how the save is."""

    def wrapped(job: Trainer) -> None:
        step = job.step

        def idle(*given: Any) -> Any:
            if not given:
                return step()
            threading.Event().wait(0.02)
            job.saver.poll()
            return {}

        job.step = idle  # type: ignore[method-assign]
        work(job)

    return wrapped


def test_a_run_whose_last_checkpoint_failed_does_not_end_well(quick: Path) -> None:
    """Also where failures on the way are let pass."""

    def work(job: Trainer) -> None:
        refusing_disk(job, 0)
        job.step()
        job.save()
        job.train()

    statuses = in_ranks(quick, "out", "ep2", 2, work, asynchronous=True)
    assert statuses == [1, 1]


def test_the_last_checkpoint_is_waited_for(quick: Path) -> None:
    def work(job: Trainer) -> None:
        _, go = slow_disk()
        threading.Timer(0.5, go.set).start()
        job.train()

    assert in_ranks(quick, "out", "ep2", 2, work, asynchronous=True) == [0, 0]
    found = find_newest(quick / "out")
    assert found is not None and found.name == step_name(STEPS) and verify(found) == []


def test_followers_go_on_where_the_policy_lets_a_failed_save_pass(quick: Path) -> None:
    """The first rank's hook decides; no other rank ends by itself."""

    def work(job: Trainer) -> None:
        class Saves(Hook):
            def on_step(self, job: Any, metrics: Any) -> None:
                with pytest.raises(SaveError, match="rank 1"):
                    job.save()

        job.hooks = (Saves(),) if job.world.rank == 0 else ()
        write = Disk.write
        refusing_disk(job, 1)
        job.step()
        Disk.write = write  # type: ignore[method-assign]
        job.hooks = ()
        job.step()
        job.save()

    assert in_ranks(quick, "out", "ep2", 2, work) == [0, 0]
    found = find_newest(quick / "out")
    assert found is not None and found.name == step_name(2)
