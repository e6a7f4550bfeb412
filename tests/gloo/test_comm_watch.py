"""A rank that is stopped, dead or elsewhere is named, with real signals."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from moefold.comm import collectives as comm
from moefold.comm.environment import Spot
from moefold.comm.world import World
from moefold.mesh.config import Sizes
from moefold.mesh.folding import Folding
from tests.gloo.harness import RankError, run_spots

TIME_OUT_S = 4.0


def pipeline(spot: Spot, how: str, who: int, folder: str) -> None:
    """Four stages pass a message down; one of them breaks off in the third round."""
    laid = Folding(Sizes.parse(f"pp{spot.world}"), spot.world)
    with World.open(laid, "cpu", TIME_OUT_S, Path(folder)) as world:
        stages, me = world.group("pp"), spot.rank
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


def failure(how: str, who: int, folder: Path, world: int = 4) -> tuple[str, float]:
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_spots(pipeline, world, how, who, str(folder), time_out_s=TIME_OUT_S)
    return str(caught.value), time.monotonic() - started


@pytest.mark.parametrize("who", [0, 2], ids=["rank 0", "two stages away"])
def test_a_stopped_rank_is_named_by_every_other(who: int, tmp_path: Path) -> None:
    text, _ = failure("stop", who, tmp_path)
    named = f"rank {who} is absent: it does not answer"
    assert named in text
    assert re.search(
        rf"first divergence: .* in #4 \w+ of pp.* in layers\.2.*rank {who} began", text
    )
    assert named in (tmp_path / "report.txt").read_text()
    for rank in {0, 1, 2, 3} - {who}:
        report = (tmp_path / f"rank-{rank:05d}.txt").read_text()
        assert named in report and f"rank {rank} has waited" in report
        assert "#3 all_reduce of pp@0 in layers.1, float32[3]" in report
        assert "in pipeline" in report, "the stack shows the function"
        waited = re.findall(r"has waited ([0-9.]+) s", report)
        assert waited and all(float(seconds) < TIME_OUT_S for seconds in waited)
    assert not (tmp_path / f"rank-{who:05d}.txt").exists()


def test_a_killed_rank_is_named_in_seconds(tmp_path: Path) -> None:
    text, seconds = failure("kill", 2, tmp_path)
    assert "rank 2: the process died: killed by SIGKILL" in text
    assert seconds < TIME_OUT_S


def test_a_rank_that_lives_and_stays_away_is_named_with_its_stack(tmp_path: Path) -> None:
    text, _ = failure("sleep", 1, tmp_path, world=3)
    assert "rank 1 is absent: it is alive and in no operation" in text
    assert "Its last operation: #3 all_reduce of pp@0 in layers.1" in text
    assert "in break_off" in (tmp_path / "rank-00001.txt").read_text()
