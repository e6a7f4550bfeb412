"""A rank that is stopped, dead or elsewhere is named, with real signals."""

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from moefold.comm import collectives as comm
from moefold.comm.agree import run_on_first
from moefold.comm.environment import RankInfo
from moefold.comm.launch import RankError, launch, launch_all
from moefold.comm.recorder import Recorder
from moefold.comm.rendezvous import connect, serve
from moefold.comm.watch import HangWatch
from moefold.comm.world import World
from moefold.mesh.config import Sizes
from moefold.mesh.folding import Folding
from tests.gloo.harness import one_at_a_time

TIME_OUT_S = 8.0


def pipeline(info: RankInfo, how: str, who: int, folder: str) -> None:
    """Four stages pass a message down; one of them breaks off in the third round."""
    laid = Folding(Sizes.parse(f"pp{info.world_size}"), info.world_size)
    with World.open(laid, "cpu", TIME_OUT_S, Path(folder)) as world:
        stages, me = world.group("pp"), info.rank
        for turn in range(3):
            if turn == 2 and me == who:
                time.sleep(0.5)
                break_off(how)
            with world.recorder.module(f"layers.{turn}"):
                if me > 0:
                    comm.receive(torch.empty(2), me - 1, stages).wait()
                if me + 1 < stages.size:
                    comm.send(torch.ones(2), me + 1, stages).wait()
                comm.sum_(torch.ones(3), world.group("world"))


def break_off(how: str) -> None:
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "sleep":
        time.sleep(60)


SCENARIOS = {
    "rank 0 stopped": ("stop", 0, 4),
    "rank 2 stopped": ("stop", 2, 4),
    "rank 1 asleep": ("sleep", 1, 3),
    "rank 2 killed": ("kill", 2, 4),
}


class Outcome(NamedTuple):
    """How a scenario ended."""

    text: str
    seconds: float
    folder: Path


def end_of(name: str, folder: Path) -> Outcome:
    how, who, ranks = SCENARIOS[name]
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        launch(pipeline, ranks, how, who, str(folder), time_out_s=TIME_OUT_S)
    return Outcome(str(caught.value), time.monotonic() - started, folder)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """All scenarios at once: they mostly wait."""
    folders = [tmp_path_factory.mktemp("reports") for _ in SCENARIOS]
    with one_at_a_time(), ThreadPoolExecutor(len(SCENARIOS)) as threads:
        return dict(zip(SCENARIOS, threads.map(end_of, SCENARIOS, folders), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 2], ids=["rank 0", "two stages away"])
def test_a_stopped_rank_is_named_by_every_other(who: int, outcomes: dict[str, Outcome]) -> None:
    text, _, folder = outcomes[f"rank {who} stopped"]
    named = f"rank {who} is absent: it sends no heartbeat"
    assert named in text
    assert re.search(
        rf"first divergence: .* in #4 \w+ of pp.* in layers\.2.*rank {who} began", text
    )
    assert named in (folder / "report.txt").read_text()
    for rank in {0, 1, 2, 3} - {who}:
        report = (folder / f"rank-{rank:05d}.txt").read_text()
        assert named in report and f"rank {rank} has waited" in report
        assert "#3 all_reduce of pp@0 in layers.1, float32[3]" in report
        assert "in pipeline" in report, "the stack shows the function"
        waited = re.findall(r"has waited ([0-9.]+) s", report)
        assert waited and all(float(seconds) < TIME_OUT_S for seconds in waited)
    assert not (folder / f"rank-{who:05d}.txt").exists()


def test_a_killed_rank_is_named_in_seconds(outcomes: dict[str, Outcome]) -> None:
    text, seconds, _ = outcomes["rank 2 killed"]
    assert "rank 2 was killed by SIGKILL" in text
    assert seconds < min(
        outcome.seconds for name, outcome in outcomes.items() if "kill" not in name
    )


def test_a_rank_that_lives_and_stays_away_is_named_with_its_stack(
    outcomes: dict[str, Outcome],
) -> None:
    text, _, folder = outcomes["rank 1 asleep"]
    assert "rank 1 is absent: it is alive and in no operation" in text
    assert "Its last operation: #3 all_reduce of pp@0 in layers.1" in text
    assert "in break_off" in (folder / "rank-00001.txt").read_text()


def word_after(info: RankInfo, seconds: float, how: str, folder: str) -> Any:
    """The first rank works for a while, or breaks off; the others wait for its word."""
    laid = Folding(Sizes(), info.world_size)
    with World.open(laid, "cpu", BRIEF_S, Path(folder)) as world:

        def work() -> str:
            if how:
                Path(folder, "pid").write_text(str(os.getpid()))
            break_off(how)
            time.sleep(seconds)
            return "done"

        return run_on_first(work, world.on_host)


BRIEF_S = 2.0


def test_a_disk_that_refuses_reports_ends_no_watch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without its watch a rank would give no sign of life, and be blamed."""
    _store, port = serve("127.0.0.1", 0, 10.0)
    (tmp_path / "hangs").write_text("no folder")
    own = connect("127.0.0.1", port, 10.0)
    watch = HangWatch(Recorder(), own, 0, 1, 4.0, tmp_path / "hangs")
    try:
        watch._alarm_requested.set()
        assert watch._verdict_known.wait(30) and watch._thread.is_alive()
    finally:
        watch.stop()
    assert "ranks hang" in capsys.readouterr().err


def test_the_first_rank_may_work_longer_than_the_time_out(tmp_path: Path) -> None:
    with one_at_a_time():
        word = launch(word_after, 2, 2 * BRIEF_S, "", str(tmp_path), time_out_s=BRIEF_S)
    assert word == "done" and not list(tmp_path.iterdir()), "an alarm was raised over nothing"


def test_a_first_rank_that_is_stopped_is_named_by_who_waits_for_its_word(tmp_path: Path) -> None:
    report, where = tmp_path / "report.txt", (0.0, "stop", str(tmp_path))

    def end_when_named() -> None:
        until = time.monotonic() + 60
        while not report.exists() and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)

    with one_at_a_time(), ThreadPoolExecutor(1) as thread, pytest.raises(RankError) as caught:
        thread.submit(end_when_named)
        launch_all(word_after, 2, where, time_out_s=BRIEF_S, limit_s=90)
    assert "rank 0 is absent" in report.read_text(), caught.value
