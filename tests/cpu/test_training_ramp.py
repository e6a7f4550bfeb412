"""Runs whose batch grows: exact wherever they stop, and in forks."""

from pathlib import Path
from typing import Any

import pytest

from moefold.data.loader import Loader
from moefold.training.fork import fork
from tests.cpu.runs import Notes, equal, job_of, weights
from tests.plain import tokens_of

RAMP: dict[str, Any] = {
    "train": {"steps": 8, "batch": 8, "micro_batch": 2, "ramp": {"from": 2, "steps": 6}}
}
SIZES = [2, 2, 4, 4, 6, 6, 8, 8]


def test_a_ramp_is_the_same_wherever_a_run_stops(tmp_path: Path) -> None:
    notes = Notes()
    with job_of(tmp_path, "unbroken", notes, **RAMP) as job:
        job.train()
        expected = weights(job)
    assert [figures["tokens"] for figures in notes.steps] == [
        16 * sum(SIZES[: number + 1]) for number in range(8)
    ]
    for last in (3, 6, 8):
        with job_of(tmp_path, "stopped", **RAMP) as job:
            job.last_step = last
            job.train()
            final = weights(job)
    assert equal(final, expected) == []


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_data_ranks_share_each_batch(tmp_path: Path, ranks: int) -> None:
    """All together read the order of a constant batch, with the same number each."""
    with job_of(tmp_path, **RAMP) as job:
        prepared, sizes = job.loader.prepared, job.loader.sizes
    plain = Loader(prepared, 16, 2, 2)
    expected = [t for step in range(20) for b in plain.load_step(step) for t in tokens_of(b)]
    loaders = [Loader(prepared, 16, sizes, 2, rank=rank, ranks=ranks) for rank in range(ranks)]
    found = []
    for step, size in enumerate(SIZES):
        by_rank = [loader.load_step(step) for loader in loaders]
        assert {len(batches) for batches in by_rank} == {-(-size // (2 * ranks))}
        for number in range(-(-size // (2 * ranks))):
            for batches in by_rank:
                found += tokens_of(batches[number])
    assert found == expected


def test_a_fork_with_another_ramp_reads_on(tmp_path: Path) -> None:
    """Its batch is that of its own ramp at the step where it begins."""
    with job_of(tmp_path, "old", **RAMP) as job:
        job.last_step = 3
        job.train()
    plain = Loader(job.loader.prepared, 16, 1)
    for ramp, size in (({"from": 2, "steps": 4}, 6), (None, 8)):
        changes = {"train": {**RAMP["train"], "ramp": ramp}}
        with job_of(tmp_path, f"new{size}", **changes) as new:
            fork(new, tmp_path / "old")
            read = [t for batch in new.loader.load_step(3) for t in tokens_of(batch)]
        wanted = range(2 + 2 + 4, 2 + 2 + 4 + size)
        assert read == [t for n in wanted for b in plain.load_step(n) for t in tokens_of(b)]
