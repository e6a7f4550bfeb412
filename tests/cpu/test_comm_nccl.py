"""Ranks under NCCL's rules: nothing hangs, nothing is made for nobody, and the model has teeth."""

import dataclasses
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moefold.comm import collectives as comm
from moefold.comm import world as comm_world
from moefold.comm.agree import broadcast_from_first
from moefold.comm.group import Group
from moefold.comm.world import GROUP_KINDS, World
from tests.gloo.pipelines import Case
from tests.nccl.rules import Hang
from tests.nccl.trials import (
    Trial,
    layouts,
    open_world,
    others,
    save,
    schedules,
    start,
    train,
    tried,
)

SECONDS = 8.0
"""Longest until a hang is reported on a busy machine; its time-out would be 30."""
PIPELINE = 4
"""Communicators of two ranks: one each way to either neighbour."""
FEW = [each for each in (*schedules(), *layouts()) if each.ranks < 4 and "merged" in each.name]


@pytest.mark.parametrize("trial", [*others(), *FEW], ids=lambda trial: trial.name)
def test_no_rank_waits_in_vain(trial: Trial) -> None:
    tried(trial)


def test_a_pipeline_warms_up() -> None:
    for stages in (2, 3, 4, 5):
        tried(Trial("opened", stages, start, (f"pp{stages}", "meta"), "meta"))


@pytest.mark.parametrize("kind", ["1f1b", "zb_h1", "interleaved"])
def test_both_directions_of_a_pipeline_pass(kind: str) -> None:
    tried(Trial(kind, 2, train, (Case("pp2", kind, "tied", 4),)))


def test_a_checkpoint_asks_nothing_of_a_device(tmp_path: Path) -> None:
    opened = tried(Trial("opened", 3, start, ("pp3", "meta"), "meta"))
    saved = tried(Trial("saved", 3, save, ("pp3", str(tmp_path / "run")), "meta"))
    assert saved.made == opened.made, "communicators"
    assert saved.on_device == opened.on_device != {}, "operations"


@pytest.mark.parametrize(("sizes", "ranks"), [("pp2", 2), ("pp4", 4), ("tp2 cp2 pp4 ep16", 64)])
def test_communicators_are_made_for_what_is_said(sizes: str, ranks: int) -> None:
    made = tried(Trial(sizes, ranks, start, (sizes, "meta"), "meta")).made
    most = max(map(len, made.values()))
    worlds = {"pp2": 1 + 2, "pp4": 1 + PIPELINE, "tp2 cp2 pp4 ep16": 8 + PIPELINE}
    assert most == worlds[sizes] <= len(GROUP_KINDS) + PIPELINE, made[0]


def speaks(rank: int, sizes: str) -> None:
    world = open_world(sizes, "meta")
    inner, outer = world.split("dp_cp", world.group("dp_cp").size)
    assert inner is world.group("dp_cp") and outer.size == 1
    assert world.group("ep") is world.group("tp_ep") is not inner
    assert world.group("ep").ranks == inner.ranks


def test_bulk_of_the_same_ranks_has_a_communicator_apart() -> None:
    """Else the exchanges to experts, for which a pass waits, queue behind gradients."""
    made = tried(Trial("ep4", 4, speaks, ("ep4",), "meta")).made
    assert [len(communicators) for communicators in made.values()] == [2] * 4, made[0]


def test_nccl_is_told_what_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Options(SimpleNamespace):
        def __init__(self, is_high_priority_stream: bool) -> None:
            super().__init__(first=is_high_priority_stream, config=SimpleNamespace())

    stand_in = SimpleNamespace(
        is_initialized=lambda: True,
        get_backend=lambda: "nccl",
        ProcessGroupNCCL=SimpleNamespace(Options=Options),
    )
    monkeypatch.setattr(comm_world, "dist", stand_in)
    limit = timedelta(seconds=7)
    waited, bulk = (comm_world._options(bulk, limit) for bulk in (False, True))
    assert waited.first and not bulk.first and waited._timeout == bulk._timeout == limit
    assert bulk.config == SimpleNamespace(max_ctas=comm_world.BULK_CTAS) != waited.config


# That the model looks at its threads

LOOKS = """
import gc, threading
from tests.nccl.rules import frames_of_threads

class Kept:
    pass

gc.set_threshold(3)
for _ in range(100):
    over = threading.Event()
    parked = [threading.Thread(target=over.wait) for _ in range(8)]
    for thread in parked:
        thread.start()
    kept = Kept()
    kept.itself, kept.own = kept, threading.local()
    del kept
    frames_of_threads()
    over.set()
    for thread in parked:
        thread.join()
"""


def test_a_look_at_threads_waits_for_nothing() -> None:
    """Python 3.11 hung here for good where the look began to collect a machine's local."""
    subprocess.run([sys.executable, "-c", LOOKS], check=True, timeout=60)


# That the model notices


def all_at_once(self: World, group: Group) -> None:
    """Warm a pipeline up as gloo allows: everyone receives, and then sends."""
    if "pp" in group.name.split("+"):
        for way in (1, -1):
            to = group.ranks[(group.index + way) % group.size]
            source = group.ranks[(group.index - way) % group.size]
            arriving = comm.receive(torch.empty(1, device=self.device), source, group)
            comm.send(torch.zeros(1, device=self.device), to, group).wait()
            arriving.wait()


@pytest.mark.parametrize("sizes", ["pp2", "pp3", "pp4"])
def test_a_warm_up_in_no_order_hangs(sizes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "_warm_up", all_at_once)
    started = time.monotonic()
    with pytest.raises(Hang, match=r"rank 0 waits in making communicator pp") as caught:
        tried(Trial(sizes, int(sizes[-1]), start, (sizes, "meta"), "meta"))
    assert time.monotonic() - started < SECONDS
    assert all(f"rank {rank} waits in" in str(caught.value) for rank in range(int(sizes[-1])))


def test_one_channel_for_both_directions_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = comm._point_to_point
    monkeypatch.setattr(
        comm,
        "_point_to_point",
        lambda *given: passed(*given[:-1], dataclasses.replace(given[-1], reverse_handle=None)),
    )
    with pytest.raises(Hang, match=r"rank 0 waits in receive from 1 on .*: rank 1 is at receive"):
        tried(Trial("1f1b", 2, train, (Case("pp2", "1f1b", "tied", 4),)))


def other_order(rank: int) -> None:
    group = open_world("").group("world")
    x, whole = torch.ones(2), torch.ones(4)
    for turn in (0, 1):
        if turn == rank:
            comm.sum_(x, group)
        else:
            comm.all_gather_into(whole, x, group)


def test_other_orders_of_operations_are_noticed() -> None:
    with pytest.raises(Hang, match="do different things at one place: rank 0 all_reduce"):
        tried(Trial("orders", 2, other_order, ()))


def circle(rank: int) -> None:
    world = open_world("pp3")
    new = comm.dist.new_group(range(3))
    group = dataclasses.replace(world.group("pp"), handle=new, reverse_handle=None)
    after, before = (rank + 1) % 3, (rank - 1) % 3
    arriving = comm.receive(torch.empty(1), before, group)
    comm.send(torch.ones(1), after, group).wait()
    arriving.wait()


def test_ranks_that_wait_in_a_circle_are_named() -> None:
    with pytest.raises(Hang) as caught:
        tried(Trial("circle", 3, circle, ()))
    for rank, late in enumerate((2, 0, 1)):
        assert f"rank {rank} waits in making communicator" in str(caught.value)
        assert f"[{late}] have not come" in str(caught.value)


def left_behind(rank: int) -> None:
    world = open_world("pp2")
    if rank == 0:
        comm.send(torch.ones(1), 1, world.group("pp"))


def test_what_nobody_receives_is_noticed() -> None:
    with pytest.raises(Hang, match="rank 0 left send to 1"):
        tried(Trial("left", 2, left_behind, ()))


def on_the_wrong_side(rank: int, host: bool) -> None:
    world = open_world("", "meta")
    broadcast_from_first(1, world.on_host if host else world.group("world"))
    comm.sum_(torch.ones(1, device="cpu" if host else "meta"), world.group("world"))


@pytest.mark.parametrize("host", [True, False])
def test_tensors_in_host_memory_are_refused(host: bool) -> None:
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        tried(Trial("side", 2, on_the_wrong_side, (host,), "meta"))
