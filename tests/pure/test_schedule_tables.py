"""Every schedule's tables over its whole domain: right, and in the memory stated."""

from itertools import chain, pairwise

import pytest
from hypothesis import given, settings

from moefold.schedule.config import (
    GroupedSchedule,
    Interleaved,
    Merged,
    OneFOneB,
    Schedule,
    build_table,
)
from moefold.schedule.table import Action, Pair, Table
from tests.schedule_checker import Transfer, peak_in_flight, problems, with_transfers
from tests.schedules import KINDS, Sizes, legal_sizes, mended, schedule


def most_in_flight(record: Schedule, rank: int, p: int, v: int, m: int) -> int:
    """What each schedule says about the chunks that a rank keeps at once."""
    below, group = p - rank - 1, 1
    if isinstance(record, GroupedSchedule):
        group = record.group_size(p, m)
    warm_up = 2 * below + (v - 1) * group if v > 1 else below
    kept = {
        "gpipe": m * v,
        "1f1b": below + 1,
        "interleaved": warm_up + 1,
        "zb_h1": (v - 1) * group + p,
        "zb_v": 2 * p,
        "dualpipe_v": 2 * p + 1,
        "merged": (v - 1) * group + 2 * below + 2,
    }
    return min(m * v, kept[type(record).model_fields["kind"].default])


@given(legal_sizes())
@settings(max_examples=60, deadline=None, database=None, derandomize=True)
def test_a_table_passes_the_checker_and_keeps_what_is_stated(sizes: Sizes) -> None:
    record, p, v, m = sizes
    table = build_table(record, p, v, m)
    stated = [most_in_flight(record, rank, p, v, m) for rank in range(p)]
    assert problems(table, limit=stated) == []
    assert list(peak_in_flight(table)) == stated
    assert (table.ranks, table.chunks, table.micro_batches) == (p, v, m)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("p", range(1, 17))
def test_every_schedule_has_a_table_for_this_many_ranks(kind: str, p: int) -> None:
    record, p, v, m = mended(schedule(kind), p, 2, 2 * p)
    assert problems(build_table(record, p, v, m)) == []


@pytest.mark.parametrize(
    ("kind", "v", "times"),
    [
        ("1f1b", 1, 1),
        ("gpipe", 1, 5),  # m / p
        ("interleaved", 2, 1 + 7 / 16),  # 1 + (p - 1) / (p v)
        ("interleaved", 4, 1 + 7 / 32),
        ("zb_h1", 1, 1),
        ("zb_h1", 2, 1),
        ("zb_v", 2, 1),
        ("dualpipe_v", 2, 17 / 16),  # (PP + 1) / PP, where PP = 2 p stages
    ],
)
def test_memory_is_that_many_times_what_1f1b_keeps(kind: str, v: int, times: float) -> None:
    p, m = 8, 40
    baseline = max(peak_in_flight(build_table(OneFOneB(), p, 1, m)))
    peak = max(peak_in_flight(build_table(schedule(kind), p, v, m)))
    assert peak / v == times * baseline


@pytest.mark.parametrize("p", range(1, 17))
def test_interleaved_with_one_chunk_is_1f1b(p: int) -> None:
    for m in (1, p, 2 * p + 1):
        assert build_table(Interleaved(), p, 1, m) == build_table(OneFOneB(), p, 1, m)
        assert build_table(Interleaved(group=3), p, 1, m) == build_table(OneFOneB(), p, 1, m)


@pytest.mark.parametrize("kind", ["interleaved", "zb_h1", "merged"])
def test_a_group_is_no_longer_than_there_are_micro_batches(kind: str) -> None:
    longer, fitting = (build_table(schedule(kind, group), 2, 2, 3) for group in (9, 3))
    assert longer == fitting


def test_1f1b_of_two_ranks_written_out() -> None:
    table = build_table(OneFOneB(), 2, 1, 3)
    written = [" ".join(map(str, line)) for line in table.lines]
    assert written == ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]


def test_interleaved_takes_groups_through_the_chunks() -> None:
    table = build_table(Interleaved(), 2, 2, 4)
    forwards = [action for action in table.actions(1) if action.kind == "F"]
    assert " ".join(map(str, forwards)) == "F0 F1 F0'1 F1'1 F2 F3 F2'1 F3'1"
    backwards = [action for action in table.actions(1) if action.kind == "B"]
    assert " ".join(map(str, backwards)) == "B0'1 B1'1 B0 B1 B2'1 B3'1 B2 B3"


@given(legal_sizes(ranks=6))
@settings(max_examples=40, deadline=None, database=None, derandomize=True)
def test_merged_pairs_all_but_the_warm_up(sizes: Sizes) -> None:
    _, p, v, m = sizes
    record, p, v, m = mended(Merged(), p, v, m)
    for rank, line in enumerate(build_table(record, p, v, m).lines):
        pairs = [step for step in line if isinstance(step, Pair)]
        assert all((step.forward.kind, step.backward.kind) == ("F", "B") for step in pairs)
        ahead = 2 * (p - rank - 1) + (v - 1) * min(p, m) + 1
        assert len(pairs) == max(0, m * v - ahead)


def test_stages_of_a_v_lie_down_and_back_up() -> None:
    lines = ((Action("F", 0, 0),),) * 3
    table = Table(lines, chunks=2, micro_batches=1, stage_mapping="v")
    assert [table.rank_of(stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    loop = Table(lines, chunks=2, micro_batches=1)
    assert [loop.rank_of(stage) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    for each in (table, loop):
        spots = {each.stage_of(rank, chunk): rank for rank in range(3) for chunk in range(2)}
        assert spots == {stage: each.rank_of(stage) for stage in range(6)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("p", [1, 2, 4])
def test_as_many_tensors_cross_as_stages_meet_on_two_ranks(kind: str, p: int) -> None:
    record, p, v, m = mended(schedule(kind), p, 2, 2 * p)
    table = build_table(record, p, v, m)
    homes = [table.rank_of(stage) for stage in range(table.stages)]
    meetings = sum(one != other for one, other in pairwise(homes))
    parts = list(chain.from_iterable(with_transfers(table)))
    crossing = [part.way for part in parts if isinstance(part, Transfer)]
    assert crossing.count("send") == crossing.count("receive") == 2 * m * meetings


def test_transfers_stand_beside_what_they_serve() -> None:
    (_, middle, _) = with_transfers(build_table(OneFOneB(), 3, 1, 1))
    told = [
        f"{part.way} {part.result.kind} {part.peer}" if isinstance(part, Transfer) else str(part)
        for part in middle
    ]
    assert told == [
        "receive output 0",
        "F0",
        "send output 2",
        "receive gradient 2",
        "B0",
        "send gradient 0",
    ]
