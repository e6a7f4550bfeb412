"""Ranks that die, stop, hang or lose a connection are started anew, and all meet again."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moefold.comm.config import Survive
from moefold.comm.environment import Spot
from moefold.comm.launch import RankError
from moefold.comm.respawn import survive
from moefold.comm.respawn_rank import Line
from moefold.comm.world import World
from moefold.mesh.config import Sizes
from moefold.mesh.folding import Folding
from tests.gloo.harness import one_at_a_time

QUICK = Survive(stopped_s=0.3, same_step=4)
LAST = 12


def counting(line: Line, folder: str, fault: str, once: bool = True) -> list[tuple[int, int]]:
    """Add ranks up, step after step; at step 4 something happens to rank 1.

    Returns this process's (pid, attempts), and what the sums were.
    """
    done = [0]
    told: list[tuple[int, int]] = []

    def attempt(spot: Spot) -> list[tuple[int, int]]:
        with World.open(Folding(Sizes(), spot.world), "cpu", 8.0, survives=True) as world:
            told.append((os.getpid(), spot.attempt))
            ranks = world.group("world")
            # All go on from where the first that survived is.
            dist.all_reduce(place := torch.tensor([done[0]]), dist.ReduceOp.MAX, ranks.handle)
            done[0] = int(place)
            line.ready(done[0])
            while done[0] < LAST:
                if done[0] == 4 and spot.rank == 1 and (spot.attempt == 0 or not once):
                    happen(fault, Path(folder))
                with world.recorder.module("count"):
                    world_sum(world)
                done[0] += 1
        return told

    return line.through(attempt)


def world_sum(world: World) -> None:
    from moefold.comm.collectives import sum_

    sum_(torch.ones(4), world.group("world"))


def happen(fault: str, folder: Path) -> None:
    (folder / "at").write_text(str(time.time()))
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "hang":
        time.sleep(60)
    elif fault == "raise":
        raise LookupError("rank one found nothing")
    elif fault == "network":
        from moefold.comm.respawn_rank import cut

        cut()


def run(folder: Path, fault: str, ranks: int = 3, once: bool = True, time_out_s: float = 8) -> list:
    with one_at_a_time():
        return survive(
            counting, ranks, str(folder), fault, once, record=QUICK, time_out_s=time_out_s
        )


@pytest.mark.parametrize("fault", ["kill", "stop", "network"])
def test_the_others_keep_their_process_and_go_on(tmp_path: Path, fault: str) -> None:
    told = run(tmp_path, fault)
    pids = {pid for pid, _ in told}
    assert len(pids) == 1, "rank 0 was not to be started anew"
    assert [attempt for _, attempt in told] == [0, 1]
    assert time.time() - float((tmp_path / "at").read_text()) < 10


def test_an_error_of_a_rank_itself_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 failed first.*LookupError: rank one found"):
        run(tmp_path, "raise")


def test_a_loss_again_and_again_at_one_step_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"killed by SIGKILL; the loss number 4 in a row after st"):
        run(tmp_path, "kill", 2, once=False)
