"""A run whose ranks are killed, stopped and cut off ends as the unbroken one, bit for bit."""

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import fault_injection as faults
import pytest
from fault_injection import computed

from moefold.comm.config import Survive
from moefold.comm.elastic import launch_elastic
from moefold.comm.launch import RankError
from moefold.config.load import load
from moefold.run import Run
from moefold.training.run_folder import History
from tests.cpu.runs import raw_run
from tests.gloo.harness import one_at_a_time

STEPS = 16
QUICK = Survive(stopped_s=0.6)


def run_of(folder: Path, ranks: int, **watch: Any) -> Run:
    layout = {"sizes": "pp2 ep2"} if ranks == 4 else {}
    raw = raw_run(
        folder,
        train={"steps": STEPS, "batch": 4, "micro_batch": 1, "precision": "fp64"},
        watch={"progress": {"style": "off"}, "plots": None, "time_out_s": 20, **watch},
        layout=layout,
    )
    return load(Run, raw).record


def trained(
    folder: Path,
    ranks: int,
    injector: Callable[[Path, Path], None] | None = None,
    until: int = STEPS,
    **watch: Any,
) -> History:
    """Train, an injector at work beside it; return what the run wrote."""
    run, out, notes = run_of(folder, ranks, **watch), folder / "out", folder / "notes"
    notes.mkdir(parents=True, exist_ok=True)
    thread = threading.Thread(target=injector or (lambda *_: None), args=(out, notes), daemon=True)
    with one_at_a_time():
        thread.start()
        done = launch_elastic(
            faults.train_rank, ranks, run, out, notes, until, record=QUICK, time_out_s=20
        )
    thread.join(5)
    assert done == until
    return History.read(out)


def recoveries(history: History) -> list[dict[str, Any]]:
    return [event["recovered"] for event in history.events if "recovered" in event]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Any]:
    folder = tmp_path_factory.mktemp("unbroken")
    history = trained(folder, 4)
    assert not recoveries(history)
    return computed(history), faults.samples(folder / "notes")


def faults_at(*plan: tuple[int, Callable[[Path, Path], None]]) -> Callable[[Path, Path], None]:
    def injector(out: Path, notes: Path) -> None:
        for step, fault in plan:
            if not faults.wait_for(out, step):
                return
            fault(out, notes)

    return injector


def killed(*ranks: int) -> Callable[[Path, Path], None]:
    return lambda out, notes: [faults.kill(faults.pid_of(notes, at)) for at in ranks] and None


def stopped(at: int) -> Callable[[Path, Path], None]:
    return lambda out, notes: faults.stop(faults.pid_of(notes, at))


@pytest.mark.slow
def test_kills_and_stops_change_no_bit_and_lose_no_sample(
    tmp_path: Path, unbroken: tuple[list[dict[str, Any]], Any]
) -> None:
    """Case 1, 17: the first rank dies too; each loses at most the step under way, a stop none."""
    plan = [(3, killed(2)), (6, killed(0)), (9, stopped(3)), (12, killed(1, 0))]
    history = trained(tmp_path, 4, faults_at(*plan))
    assert computed(history) == unbroken[0]
    assert faults.samples(tmp_path / "notes") == unbroken[1]
    lived = recoveries(history)
    assert [set(each["lost"]) for each in lived] == [{2}, {0}, {0, 1}]
    starts = [event["step"] for event in history.events if "recovered" in event]
    assert all(each["reached"] - step <= 1 for each, step in zip(lived, starts, strict=True))
    assert all("SIGKILL" in each["why"] for each in lived), "the one that stopped was woken"


def test_all_ranks_may_die_at_once_and_a_torn_checkpoint_is_passed_over_by_the_next_launch(
    tmp_path: Path, unbroken: tuple[list[dict[str, Any]], Any]
) -> None:
    """Cases 3, 7, 8: memory is the launcher's; a full disk costs a checkpoint, not the run."""

    def fill(out: Path, notes: Path) -> None:
        with faults.full_disk(faults.pid_of(notes, 1)):
            faults.wait_for(out, faults.steps_in(out) + 4)

    saving = {"checkpoint": {"every": 3, "keep": 3, "attempts": 1}}
    plan = faults_at((7, killed(0, 1, 2, 3)), (9, fill))
    history = trained(tmp_path, 4, plan, until=14, **saving)
    assert computed(history)[:13] == unbroken[0][:13], "the last step ends with an evaluation"
    (start,) = [event for event in history.events if "recovered" in event]
    assert start["recovered"]["reached"] - start["step"] <= 1
    saved = [event["step"] for event in history.events if event["event"] == "saved"]
    assert 12 not in saved, "the save was to be refused"
    torn = faults.tear(tmp_path / "out", random.Random(1))
    assert torn is not None and torn.parent.name == "step-00000014"
    history = trained(tmp_path, 4, **saving)
    assert computed(history) == unbroken[0]
    assert faults.samples(tmp_path / "notes") == unbroken[1]
    starts = [event["step"] for event in history.events if event["event"] == "start"]
    assert starts[-1] == max(step for step in saved if step < 14)


def test_a_run_that_cannot_be_saved_by_starting_anew_is_not(tmp_path: Path) -> None:
    """Case 23: a rank that dies again and again at one step."""

    def again_and_again(out: Path, notes: Path) -> None:
        faults.wait_for(out, 2)
        pid = faults.pid_of(notes, 1)
        # Once the launcher has given up nobody comes in its place.
        with suppress(TimeoutError):
            while True:
                faults.kill(pid)
                while faults.pid_of(notes, 1, seconds=20) == pid:
                    time.sleep(0.02)
                pid = faults.pid_of(notes, 1)

    with pytest.raises(RankError, match=r"in a row.*too often for watch.survive"):
        trained(tmp_path, 2, again_and_again)
