"""Copies in memory: which one is whole on all ranks, and that bits come back as they were."""

import errno
import json
import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_injection import tear

from moefold.checkpoint.disk import Disk
from moefold.checkpoint.folder import step_name
from moefold.comm.config import Survive
from moefold.comm.worker import Attempt, RankMemory
from moefold.comm.world import World
from moefold.training import local, recover, resume
from moefold.training.nonfinite import digest_bytes
from moefold.training.recover import MemoryCheckpoint, newest_common, pack, packed_size, unpack
from moefold.training.state import Progress
from tests.cpu.checkpoint_tools import run_child
from tests.cpu.runs import job_of


@pytest.mark.parametrize(
    ("said", "turn"),
    [
        ([[(0, 4), (0, 5)], [(0, 4), (0, 5)]], (0, 5)),
        ([[(0, 4), (0, 5)], [(0, 4)], [(0, 5), (0, 4)]], (0, 4)),  # the second died in writing
        ([[(0, 5), (1, 1)], [(0, 5), (1, 1)]], (1, 1)),
        ([[(0, 5), (1, 1)], [(0, 5), (0, 6)]], (0, 5)),  # the second has not been in step again
        ([[(0, 1)], []], None),
    ],
)
def test_the_newest_copy_that_all_have(said: list[Any], turn: tuple[int, int] | None) -> None:
    assert newest_common(said) == turn


def tensors(value: float) -> list[torch.Tensor]:
    return [torch.full((5000,), value, dtype=torch.float64), torch.tensor(int(value))]


def opened(memory: RankMemory, number: int = 0, every: int = 1) -> MemoryCheckpoint:
    return MemoryCheckpoint(Attempt(memory, number, None), Survive(every=every))


def found(memory: RankMemory, number: int) -> tuple[MemoryCheckpoint, int | None]:
    """Open the memory as a process started anew; return the step that its state is of."""
    again, state = opened(memory, number), tensors(0)
    said = again.restore(state, World.single())
    if said is None:
        return again, None
    assert all((tensor == said["step"]).all() for tensor in state)
    return again, said["step"]


def test_a_process_started_anew_finds_the_newest_copy_and_drops_the_other() -> None:
    memory = RankMemory.create()
    first = opened(memory)
    first.format = {"held": "fp64"}
    for step in (7, 8, 9):
        first.save({"step": step}, lambda step=step: tensors(step))
    again, step = found(memory, 1)
    assert step == 9 and again.format == {"held": "fp64"}
    again.save({"step": 3}, lambda: tensors(3))  # a rewind goes back behind what is kept
    assert found(memory, 2)[1] == 3


def test_copies_come_as_often_as_asked_for() -> None:
    memory = RankMemory.create()
    checkpoint = opened(memory, every=4)
    for step in range(3, 8):
        checkpoint.save({"step": step}, lambda step=step: tensors(step))
        assert memory.counters[2] == 1 + (3 if step < 4 else 4), "the first one comes at once"
    checkpoint.save({"step": 3}, lambda: tensors(3), rewound=True)
    assert found(memory, 1)[1] == 3, "the run went back: what is newer is void"


def test_a_process_killed_while_it_writes_leaves_the_copy_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = RankMemory.create()

    def work() -> None:
        checkpoint = opened(memory)
        for step in (1, 2):
            checkpoint.save({"step": step}, lambda step=step: tensors(step))

        def half(state: list[torch.Tensor], into: torch.Tensor) -> None:
            pack(state[:1], into)
            os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr(recover, "pack", half)
        checkpoint.save({"step": 3}, lambda: tensors(3))

    assert run_child(work) == -signal.SIGKILL
    assert found(memory, 1)[1] == 2


def test_bits_come_back_as_they_were() -> None:
    odd = torch.tensor([float("nan"), -0.0, 1e-310, float("inf")], dtype=torch.float64)
    state = [odd, torch.randn(3, 5).bfloat16(), torch.arange(7), torch.tensor(2.5), odd[:0]]
    copy = torch.empty(packed_size(state), dtype=torch.uint8)
    pack(state, copy)
    back = [torch.zeros_like(tensor) for tensor in state]
    unpack(copy, back)
    assert digest_bytes(back) == digest_bytes(state)
    assert digest_bytes(back) != digest_bytes([torch.zeros_like(tensor) for tensor in state])


def test_how_far_a_run_is_comes_back() -> None:
    progress = Progress(7, 900, (2, 5), 2, 6)
    assert Progress.from_dict(json.loads(json.dumps(asdict(progress) | {"more": 2}))) == progress


def test_there_is_nothing_to_tear_without_checkpoints(tmp_path: Any) -> None:
    import random

    assert tear(tmp_path, random.Random(0)) is None


def test_ranks_that_fork_later_say_the_code_that_is_loaded() -> None:
    """Files may change while a run lasts; a rank started anew must still agree with the others."""
    assert resume.code_version.cache_info().currsize == 1


def test_a_disk_that_stays_full_costs_no_older_copy_of_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does what a loss of power leaves of the copies' name keep the run from starting."""
    watch = {"checkpoint": {"every": None, "local": {"folder": str(tmp_path / "disk"), "every": 1}}}
    write, full = local.write_file, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuse(disk: Disk, path: Path, *parts: Any) -> None:
        write(disk, path, parts[0])
        raise full

    with job_of(tmp_path, watch=watch) as job:
        for step in range(1, 6):
            monkeypatch.setattr(local, "write_file", refuse if step in (3, 4) else write)
            job.step()
            assert job.local is not None
            job.local.wait()
            left = [at.parent.name for at in (tmp_path / "disk").glob("*/*/0.by-0")]
            assert step == 1 or step_name(2) in left
    with job_of(tmp_path, watch=watch) as job:
        assert job.step_number == 5
    (tmp_path / "out" / local.NAME_FILE).write_text("")
    with job_of(tmp_path, watch=watch) as job:
        assert job.step_number == 0
        job.step()
    with job_of(tmp_path, watch=watch) as job:
        assert job.step_number == 1
