"""Copies on the machines' own disks: a restart goes on from them when machines were lost."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from moefold.comm.group import Group
from moefold.comm.world import World
from moefold.mesh.folding import Folding
from moefold.training import machine as rates
from moefold.training.local import RankCopy, newest_complete
from moefold.training.trainer import Trainer
from tests.cpu.checkpoint_tools import quick_folder, same
from tests.cpu.runs import job_of, run_of
from tests.gloo.forks import fork_ranks
from tests.gloo.test_checkpoint_jobs import SHAPE, assumed, state

RANKS, SAVED, LAST = 4, 2, 6
"""Steps with a checkpoint and of the newest copies, which come every two."""
HERE = ["a", "b", "c", "d"]
"""The machine of each rank."""


@pytest.fixture(scope="module")
def trained() -> Iterator[Path]:
    """Return a folder with a run that was broken off after its last copies."""
    with pytest.MonkeyPatch.context() as patch, quick_folder(Path("/tmp")) as folder:
        patch.setattr(rates, "measure_rates_cached", assumed)
        with job_of(folder, "first"):
            pass

        def work(job: Trainer) -> None:
            for step in range(1, LAST + 2):
                job.step()
                if step == SAVED:
                    job.save()
                save_file(state(job), folder / f"state-{step}-{job.world.rank}")

        assert on_machines(folder, HERE, work) == [0] * RANKS
        yield folder


@pytest.fixture
def quick(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return that folder as it was, to lose machines in."""
    monkeypatch.setattr(rates, "measure_rates_cached", assumed)
    kept = trained.with_name(f"{trained.name}-kept")
    shutil.copytree(trained, kept)
    yield trained
    # In place: what a run computes hangs on the paths of its data.
    shutil.rmtree(trained)
    kept.rename(trained)


def on_machines(
    folder: Path,
    machines: list[str],
    work: Callable[[Trainer], None],
    sizes: str = "pp2 tp2",
    out: str = "out",
) -> list[int]:
    """Open a run whose ranks are on some machines, and call ``work`` with its job."""

    def open_and_work(ranks: Group) -> None:
        os.environ["MACHINE"] = machines[ranks.index]
        local = {"folder": str(folder / "$MACHINE"), "every": 2}
        run = run_of(
            folder,
            model={"shape": SHAPE},
            layout={"sizes": sizes},
            train={"steps": 20},
            watch={"checkpoint": {"every": None, "keep": 9, "local": local}},
        )
        with World.open(Folding(run.layout.split, len(machines)), "cpu", 30.0) as here:
            job = Trainer(run, folder / out, cache=folder / "prepared", world=here)
            try:
                work(job)
            finally:
                job.close(RuntimeError("broken off"))

    return fork_ranks(open_and_work, len(machines), folder)


def goes_on(folder: Path, step: int, where: str, machines: list[str] = HERE, **more: Any) -> None:
    """Show that the run goes on from a step, each rank with the bits that it had there."""

    def work(job: Trainer) -> None:
        assert job.step_number == step
        found = str(job.resumed_from and job.resumed_from.relative_to(folder))
        assert found.startswith(where), found
        if not more:
            kept = load_file(folder / f"state-{step}-{job.world.rank}")
            assert same(state(job), kept)

    assert on_machines(folder, machines, work, **more) == [0] * len(machines)


def copies(folder: Path, step: int, rank: int, writer: int) -> list[Path]:
    return list(folder.glob(f"[a-d]/*/step-{step:08d}/{rank}.by-{writer}"))


def damage(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 4
    path.write_bytes(raw)


def test_the_newest_copies_are_taken_before_an_older_checkpoint(quick: Path) -> None:
    goes_on(quick, LAST, "")
    assert not list(quick.glob("[a-d]/*/step-00000002")), "two steps stay"


@pytest.mark.parametrize("lost", ["a", "d"])
def test_a_lost_machine_costs_nothing(quick: Path, lost: str) -> None:
    shutil.rmtree(quick / lost)
    goes_on(quick, LAST, "")


def test_ranks_that_come_up_on_other_machines_find_their_state(quick: Path) -> None:
    shutil.rmtree(quick / "b")
    goes_on(quick, LAST, "", ["d", "new", "a", "c"])


def test_where_a_machine_and_its_keeper_are_lost_the_checkpoint_is_taken(quick: Path) -> None:
    shutil.rmtree(quick / "b")
    shutil.rmtree(quick / "d")
    goes_on(quick, SAVED, "out/step-")


def test_a_checkpoint_that_is_newer_is_taken(quick: Path) -> None:
    """Made in another layout, say, or while the machines' disks were full."""

    def work(job: Trainer) -> None:
        job.step()
        job.save()

    assert on_machines(quick, HERE, work) == [0] * RANKS
    goes_on(quick, LAST + 1, "out/step-")


def test_a_damaged_copy_is_passed_over_and_then_its_step(quick: Path) -> None:
    (own,) = copies(quick, LAST, 1, 1)
    damage(own)
    goes_on(quick, LAST, "")
    (replica,) = copies(quick, LAST, 1, 3)
    replica.write_bytes(replica.read_bytes()[:-9])
    goes_on(quick, LAST - 2, "")


def test_two_pasts_are_never_mixed(quick: Path) -> None:
    """A machine that was away comes back with copies of steps that were made again meanwhile."""
    shutil.copytree(quick / "b", quick / "away")
    shutil.rmtree(quick / "b")
    shutil.rmtree(quick / "d")

    def work(job: Trainer) -> None:
        for _ in range(SAVED, LAST):
            job.step()

    assert on_machines(quick, HERE, work) == [0] * RANKS
    for machine in "bcd":
        shutil.rmtree(quick / machine)
    shutil.copytree(quick / "away", quick / "b")
    goes_on(quick, SAVED, "out/step-")


def test_another_layout_and_another_run_have_nothing_of_them(quick: Path) -> None:
    goes_on(quick, SAVED, "out/step-", sizes="ep2")
    goes_on(quick, 0, "None", out="new")


def test_a_disk_that_refuses_costs_the_copies_alone(quick: Path) -> None:
    for machine in HERE:
        shutil.rmtree(quick / machine)
    (quick / "a").write_text("no folder")

    def work(job: Trainer) -> None:
        for _ in range(4):
            job.step()

    assert on_machines(quick, HERE, work) == [0] * RANKS
    goes_on(quick, LAST, "")


def share(step: int, rank: int, session: str = "s", progress: str = "{}") -> RankCopy:
    return RankCopy(step, session, rank, "f", progress)


def test_which_step_is_whole_and_who_reads_it() -> None:
    both = [share(4, 0), share(4, 1)]
    found = newest_complete([(both, "f"), ([share(4, 1)], "f")], 1)
    assert found == [(share(4, 0), 0), (share(4, 1), 1)]
    found = newest_complete([([*both, share(6, 0)], "f"), ([], "f")], 1)
    assert found == [(share(4, 0), 0), (share(4, 1), 0)], "what one lacks its keeper reads"
    for odd in (share(4, 1, "t"), share(4, 1, progress=json.dumps(1)), share(5, 1)):
        assert newest_complete([([share(4, 0)], "f"), ([odd], "f")], 1) is None
    assert newest_complete([([share(4, 0)], "f"), ([share(4, 1)], "g")], 1) is None, (
        "of another form"
    )
