"""Groups are those of the folding, every one has the time-out, and what is sent is counted."""

import pytest
import torch
from torch import Tensor

from moefold.comm import collectives as comm
from moefold.comm.recorder import BACKWARD, FORWARD, CallRecord, CallSite
from moefold.comm.world import GROUP_KINDS, World
from moefold.mesh.config import Sizes
from moefold.mesh.folding import Folding
from tests.gloo.harness import RankError, run_ranks

LAYOUTS = ["tp2", "pp4", "cp2 ep2", "tp2 pp2 ep2", "ep4", "tp4 ep2 etp2"]
TIME_OUT_S = 17.0


def folding(text: str, world: int) -> Folding:
    return Folding(Sizes.parse(text), world)


def check_groups(rank: int, text: str, n: int) -> int:
    laid = folding(text, n)
    world = World.open(laid, "cpu", TIME_OUT_S)
    assert (world.rank, world.size) == (rank, n)
    assert world.attention == laid.attention_coordinates(rank)
    assert world.experts == laid.expert_coordinates(rank)
    handles = set()
    for kind in GROUP_KINDS:
        ranks = laid.group(kind, rank)
        group = world.group(kind)
        assert (group.ranks, group.size, group.ranks[group.index]) == (ranks, len(ranks), rank)
        assert kind in group.name.split("+") and (group.handle is None) == (group.size == 1)
        assert group is world.group(group.kind)
        if group.handle is not None:
            handles.add(group.handle)
            mine = torch.tensor([float(2**rank)])
            assert comm.sum_(mine, group).item() == sum(2.0**other for other in ranks)
    assert not world.recorder.waiting()
    world.close()
    return len(handles)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_are_those_of_the_folding(layout: str) -> None:
    made = run_ranks(check_groups, 4, layout, 4)
    for rank, count in enumerate(made):
        groups = {folding(layout, 4).group(kind, rank) for kind in GROUP_KINDS}
        assert count == len([ranks for ranks in groups if len(ranks) > 1])


def time_outs(rank: int, text: str, n: int) -> dict[str, float]:
    world = World.open(folding(text, n), "cpu", TIME_OUT_S)
    groups = [world.group(kind) for kind in GROUP_KINDS]
    groups.append(world.stage_group((0, 1)))
    cpu = torch.device("cpu")
    return {
        group.name: group.handle._get_backend(cpu).options._timeout.total_seconds()
        for group in groups
        if group.handle is not None
    }


def test_every_group_has_the_configured_time_out() -> None:
    for found in run_ranks(time_outs, 4, "tp2 pp2 ep2", 4):
        assert len(found) == 3
        assert set(found.values()) == {TIME_OUT_S}


def check_stages(rank: int) -> list[tuple[str, tuple[int, ...], float]]:
    world = World.open(folding("pp4", 4), "cpu", TIME_OUT_S)
    found = []
    for stages in ((0, 2), (0, 3), (2, 0), (0, 1, 2, 3), (2, 3), (1,)):
        group = world.stage_group(stages)
        total = comm.sum_(torch.tensor([float(2**rank)]), group).item()
        found.append((group.name, group.ranks, total))
    assert world.stage_group((2, 0)) is world.stage_group((0, 2))
    return found


def test_weights_on_several_stages_have_a_group() -> None:
    answers = run_ranks(check_stages, 4)
    pipeline = (folding("pp4", 4).first_equal_kinds()["pp"], (0, 1, 2, 3))
    for rank, (few, ends, again, whole, late, one) in enumerate(answers):
        inside = ("stages 0,2", (0, 2), 5.0) if rank in (0, 2) else None
        assert few == (inside or ("beside stages 0,2", (1, 3), 10.0)) and again == few
        assert ends[1:] == (((0, 3), 9.0) if rank in (0, 3) else ((1, 2), 6.0))
        assert ends[0].endswith("embedding")
        assert (whole[0].split("+")[0], whole[1], whole[2]) == (*pipeline, 15.0)
        assert late[1:] == (((2, 3), 12.0) if rank > 1 else ((0, 1), 3.0))
        assert one == ("stage 1", (rank,), float(2**rank))


def too_many(rank: int) -> None:
    World.open(folding("tp4", 4), "cpu", TIME_OUT_S)


def test_a_layout_for_other_ranks_is_refused() -> None:
    with pytest.raises(RankError, match="the layout needs 4 ranks, but 2 run"):
        run_ranks(too_many, 2)
    with pytest.raises(ValueError, match="but 1 runs; start them all"):
        too_many(0)


def test_one_rank_needs_no_process_group() -> None:
    assert not torch.distributed.is_initialized()
    for world in (World.single(), World.open(folding("", 1), "cpu", 1.0)):
        assert all(world.group(kind).ranks == (0,) for kind in GROUP_KINDS)
        assert world.stage_group((0,)).size == 1
        world.close()
    assert not torch.distributed.is_initialized()
    with pytest.raises(ValueError, match="no group of kind 'x'; kinds are tp, cp, dp"):
        World.single().group("x")


def bytes_sent(rank: int, n: int) -> dict[CallSite, tuple[int, int]]:
    world = World.open(folding("", n), "cpu", TIME_OUT_S)
    group, recorder = world.group("world"), world.recorder
    x = torch.ones(4 * n, 3, dtype=torch.float64, requires_grad=True)  # 96 n bytes
    counts = [2, 0, 5][:n]
    with recorder.module("a"):
        gathered = comm.all_gather(x, group)
        with recorder.module("a.b"):
            own = comm.reduce_scatter(gathered, group)
        summed = comm.sum_over(own, group)
    rows = comm.gather_rows(summed[: counts[rank]], group, counts)
    with recorder.module("c"):
        back = comm.scatter_rows(rows, group, counts)
        send = [1 if to == (rank + 1) % n else 0 for to in range(n)]
        got = [1 if source == (rank - 1) % n else 0 for source in range(n)]
        sent = comm.all_to_all(x[:1].float(), group, send, got)
    (back.sum() + sent.sum()).backward()
    with recorder.module("d"):
        comm.broadcast_(torch.ones(2), group, 1)
        comm.max_(torch.ones(5, dtype=torch.bfloat16), group)
        arriving = comm.receive(torch.empty(3), group.ranks[rank - 1], group)
        comm.send(torch.ones(3), (rank + 1) % n, group).wait()
        arriving.wait()
    numbers = [r.number for r in recorder.last() if r.channel == group.channel]
    assert numbers == list(range(1, 16)), f"{[r.description for r in recorder.last()]}"
    return {site._replace(group=""): tuple(total) for site, total in recorder.totals.items()}


def test_bytes_are_counted_exactly_at_each_call_site() -> None:
    n, whole = 3, 96 * 3
    rows = [2 * 24, 0, 5 * 24]
    for rank, found in enumerate(run_ranks(bytes_sent, n, n)):
        others = sum(rows) - rows[rank]
        wanted = {
            ("a", "all_gather", FORWARD): 2 * whole,
            ("a.b", "reduce_scatter", FORWARD): 2 * whole,
            ("a", "all_reduce", FORWARD): 2 * 2 * whole // 3,
            ("", "gather_rows", FORWARD): 2 * rows[rank],
            ("c", "scatter_rows", FORWARD): others,
            ("c", "all_to_all", FORWARD): 12,
            ("c", "all_to_all", BACKWARD): 12,
            ("c", "gather_rows", BACKWARD): 2 * rows[rank],
            ("", "scatter_rows", BACKWARD): others,
            ("a", "all_reduce", BACKWARD): 2 * 2 * whole // 3,
            ("a.b", "all_gather", BACKWARD): 2 * whole,
            ("a", "reduce_scatter", BACKWARD): 2 * whole,
            ("d", "broadcast", FORWARD): 2 * 8 if rank == 1 else 0,
            ("d", "all_reduce_max", FORWARD): 2 * 2 * 10 // 3,
            ("d", "receive", FORWARD): 0,
            ("d", "send", FORWARD): 12,
        }
        assert found == {
            CallSite(label, op, "", way): (1, sent) for (label, op, way), sent in wanted.items()
        }


def altered(rank: int) -> list[list[float]]:
    world = World.open(folding("", 2), "cpu", TIME_OUT_S)
    group, recorder = world.group("world"), world.recorder
    results = []
    for broken in ("", "alone", "half"):

        def alter(record: CallRecord, result: Tensor, alone: Tensor, how: str = broken) -> Tensor:
            if record.site.label != "here" or not how:
                return result
            return alone if how == "alone" else result / 2

        recorder.inject_fault = alter
        x = torch.tensor([rank + 1.0, 10.0], requires_grad=True)
        with recorder.module("elsewhere"):
            y = comm.sum_over(x, group)
        with recorder.module("here"):
            y = comm.all_to_all(y * (rank + 1), group, [1, 1], [1, 1])
            out = torch.empty(4)
            pending = comm.all_gather_into(out, y.detach(), group, asynchronous=True)
            pending.wait()
            comm.sum_(total := torch.tensor([rank + 1.0]), group)
        y.sum().backward()
        assert x.grad is not None
        results.append([*y.tolist(), *out.tolist(), *total.tolist(), *x.grad.tolist()])
    return results


def test_a_call_site_can_be_broken_on_purpose() -> None:
    first, second = run_ranks(altered, 2)
    assert first[0] == [3.0, 6.0, 3.0, 6.0, 20.0, 40.0, 3.0, 3.0, 3.0]
    assert second[0] == [20.0, 40.0, 3.0, 6.0, 20.0, 40.0, 3.0, 3.0, 3.0]
    # Alone: own rows stay in place, the other rank's are zero; of a gather, own rows repeated.
    assert first[1] == [3.0, 0.0, 3.0, 0.0, 3.0, 0.0, 1.0, 1.0, 2.0]
    assert second[1] == [0.0, 40.0, 0.0, 40.0, 0.0, 40.0, 2.0, 1.0, 2.0]
    # Half, in forward and in backward alike; the gather is halved once more.
    assert first[2] == [1.5, 3.0, 0.75, 1.5, 5.0, 10.0, 1.5, 1.5, 1.5]
    assert second[2] == [10.0, 20.0, 0.75, 1.5, 5.0, 10.0, 1.5, 1.5, 1.5]
