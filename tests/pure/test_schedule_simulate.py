"""Timelines equal stored ones, closed forms, and sums done by hand."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hidden_exchanges import Exchanges, duration, hidden
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.config.errors import RunError
from moefold.schedule.config import (
    DualPipeV,
    GPipe,
    Merged,
    OneFOneB,
    ZeroBubbleH1,
    ZeroBubbleV,
    build_table,
)
from moefold.schedule.simulate import StageCosts, simulate
from moefold.schedule.table import Action, Pair, Table, actions_of
from tests.schedule_checker import bubble, gaps, problems
from tests.schedules import THEIRS, Sizes, legal_sizes, mended, schedule, stored

WHOLE = [(name, row) for row in stored() for name in [row["schedule"]]]
IDS = ["{schedule}-p{p}-v{v}-m{m}-B{TB_input}-W{TW}".format(**row) for row in stored()]
costs = st.builds(StageCosts, *[st.integers(0, 9).map(float)] * 3).filter(lambda c: c.forward > 0)


def shortened(table: Table, m: int) -> Table:
    """Leave out the micro-batches from m on."""
    lines = (tuple(s for s in line if actions_of(s)[0].micro < m) for line in table.lines)
    return replace(table, lines=tuple(lines), micro_batches=m)


def test_the_stored_rows_are_all_there() -> None:
    assert len(stored()) == 129
    assert {row["schedule"] for row in stored()} == set(THEIRS)


@pytest.mark.parametrize(("theirs", "row"), WHOLE, ids=IDS)
def test_bubbles_equal_those_of_torch(theirs: str, row: dict[str, Any]) -> None:
    """Below m = 2 p a V has no table of ours; the rows there are the least legal one, cut short."""
    record, p, v, m = THEIRS[theirs], row["p"], row["v"], row["m"]
    legal = mended(record, p, v, m)
    if legal[3] == m:
        table = build_table(record, p, v, m)
    else:
        with pytest.raises(RunError, match=f"nearest: {2 * p}"):
            build_table(record, p, v, m)
        table = shortened(build_table(*legal), m)
    timeline = simulate(table, StageCosts(row["TF"], row["TB_input"], row["TW"]))
    assert problems(table) == []
    assert set(bubble(timeline)) == {row["bubble"]}
    assert timeline.makespan == row["makespan"]
    assert set(timeline.busy) == {row["ideal"]}


@pytest.mark.parametrize("kind", ["1f1b", "gpipe", "interleaved", "merged"])
@given(sizes=legal_sizes(), costs=costs)
@settings(max_examples=12, deadline=None, database=None, derandomize=True)
def test_whole_backwards_leave_a_bubble_of_one_chunk_per_rank_below(
    kind: str, sizes: Sizes, costs: StageCosts
) -> None:
    record, p, v, m = mended(schedule(kind), *sizes[1:])
    if kind == "gpipe":
        m = max(m, p)
    wanted = (p - 1) * (costs.duration_of("F") + costs.duration_of("B"))
    timeline = simulate(build_table(record, p, v, m), costs)
    assert set(bubble(timeline)) == {wanted}
    assert wanted / timeline.busy[0] == pytest.approx((p - 1) / (v * m))


@given(legal_sizes(), costs)
@settings(max_examples=20, deadline=None, database=None, derandomize=True)
def test_zb_h1_takes_the_weights_out_of_the_bubble(sizes: Sizes, costs: StageCosts) -> None:
    record, p, v, m = mended(ZeroBubbleH1(), *sizes[1:])
    f, i, w = costs.duration_of("F"), costs.duration_of("I"), costs.duration_of("W")
    m = max(m, p)
    found = max(bubble(simulate(build_table(record, p, v, m), costs)))
    assert found == (p - 1) * max(f + i - w, f, i)


@pytest.mark.parametrize("p", range(1, 17))
def test_zb_v_never_waits_once_it_has_started(p: int) -> None:
    for m in (2 * p, 2 * p + p % 3):
        timeline = simulate(build_table(ZeroBubbleV(), p, 2, m), StageCosts(3, 3, 3))
        assert set(gaps(timeline)) == {0}
        assert set(bubble(timeline)) == {3 * (p - 1)}


@pytest.mark.parametrize("p", range(1, 17))
@pytest.mark.parametrize("weight", [0.5, 1.0])
def test_dualpipe_v_has_the_bubble_its_authors_state(p: int, weight: float) -> None:
    """Where F = I: (p - 1)(FB + B - 3 W), for 2 p stages."""
    costs = StageCosts(1, 1, weight)
    whole = costs.duration_of("B")
    for m in (2 * p, 2 * p + p % 3):
        found = max(bubble(simulate(build_table(DualPipeV(), p, 2, m), costs)))
        assert found == (p - 1) * (1 + whole + whole - 3 * weight)


@given(legal_sizes(ranks=8), costs)
@settings(max_examples=40, deadline=None, database=None, derandomize=True)
def test_a_timeline_breaks_no_law(sizes: Sizes, costs: StageCosts) -> None:
    table = build_table(*sizes)
    timeline = simulate(table, costs)
    ends: dict[Any, float] = {}
    for rank, line in enumerate(timeline.spans):
        assert [span.step for span in line] == list(table.lines[rank])
        assert all(a.end <= b.start for a, b in pairwise(line))
        for span in line:
            given_out = (table.action_result(rank, action) for action in actions_of(span.step))
            ends.update({result: span.end for result in given_out if result})
    for rank, line in enumerate(timeline.spans):
        for span in line:
            for action in actions_of(span.step):
                for need in table.action_inputs(rank, action):
                    assert span.start >= ends[need]
    stage = costs.duration_of("F") + costs.duration_of("B")
    assert all(work == stage * table.chunks * table.micro_batches for work in timeline.busy)
    assert max(bubble(timeline)) == timeline.makespan - min(timeline.busy)


def test_1f1b_by_hand() -> None:
    """Two ranks, two micro-batches, F = 1, B = 2."""
    timeline = simulate(build_table(OneFOneB(), 2, 1, 2))
    times = [[(str(s.step), s.start, s.end) for s in line] for line in timeline.spans]
    assert times == [
        [("F0", 0, 1), ("F1", 1, 2), ("B0", 4, 6), ("B1", 7, 9)],
        [("F0", 1, 2), ("B0", 2, 4), ("F1", 4, 5), ("B1", 5, 7)],
    ]
    assert bubble(timeline) == (3, 3)
    assert gaps(timeline) == (3, 0)


def test_stages_may_differ() -> None:
    each = [StageCosts(1, 2, 1), StageCosts(5, 1, 0), StageCosts(2, 2, 2)]
    timeline = simulate(build_table(GPipe(), 3, 1, 1), each)
    assert timeline.makespan == (1 + 5 + 2) + (3 + 1 + 4)
    assert timeline.busy == (4, 6, 6)
    with pytest.raises(ValueError, match="costs of 2 stages, but the table has 3"):
        simulate(build_table(GPipe(), 3, 1, 1), each[:2])


@pytest.mark.parametrize(
    ("took", "lasts"),
    [
        ([(2.0, 1.0)], 3),  # alone, an exchange is waited for
        ([(1.0, 1.0), (2.0, 1.0)], 3),  # beside each other, both hide
        ([(1.0, 4.0), (2.0, 4.0)], 8),  # the network is busy all the time
        ([(1.0, 0.0), (2.0, 5.0)], 7),  # no action is shorter than its own parts
    ],
)
def test_how_long_steps_last(took: list[tuple[float, float]], lasts: float) -> None:
    assert duration(took) == lasts


STAGE = Exchanges(StageCosts(1, 1, 1), 1, 1)


@pytest.mark.parametrize("m", [1, 2, 16])
def test_merged_on_one_rank_shows_the_first_forward_and_the_last_backward_only(m: int) -> None:
    assert hidden(build_table(Merged(), 1, 1, m), [STAGE]) == (pytest.approx(1 - 1 / m),)
    assert hidden(build_table(OneFOneB(), 1, 1, m), [STAGE]) == (0,)


def test_merged_hides_most_exchanges_on_several_ranks_too() -> None:
    """Rank r shows the exchanges of its 2 (p - r) - 1 first forwards and as many last backwards."""
    p, m = 2, 16
    found = hidden(build_table(Merged(), p, 1, m), [STAGE] * p)
    shown = [2 * (p - rank) - 1 for rank in range(p)]
    assert list(found) == [pytest.approx(1 - one / m) for one in shown]


def test_weight_gradients_exchange_nothing() -> None:
    table = Table(((Action("F", 0, 0), Action("I", 0, 0), Action("W", 0, 0)),), 1, 1)
    assert hidden(table, [Exchanges(StageCosts(1, 1, 1), 2, 3)]) == (0,)
    assert [Exchanges(StageCosts(1, 1, 1), 2, 3).took(kind)[1] for kind in "FIW"] == [2, 3, 0]


def test_a_pair_starts_when_both_inputs_are_there() -> None:
    first = (Action("F", 0, 0), Pair(Action("F", 0, 1), Action("B", 0, 0)), Action("B", 0, 1))
    second = tuple(Action(kind, 0, micro) for micro in (0, 1) for kind in ("F", "B"))
    timeline = simulate(Table((first, second), 1, 2))
    assert [span.start for span in timeline.spans[0]] == [0, 4, 10]
