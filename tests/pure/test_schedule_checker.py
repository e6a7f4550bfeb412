"""The checker notices every sort of wrong table."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from moefold.schedule.config import DualPipeV, GPipe, OneFOneB, ZeroBubbleH1, build_table
from moefold.schedule.simulate import Deadlock, topological_steps
from moefold.schedule.table import Action, Line, Pair, Table
from tests.schedule_checker import peak_in_flight, problems

Change = Callable[[list], None]


def changed(table: Table, rank: int, change: Change) -> Table:
    line = list(table.lines[rank])
    change(line)
    lines: list[Line] = list(table.lines)
    lines[rank] = tuple(line)
    return replace(table, lines=tuple(lines))


def swap(one: str, other: str) -> Change:
    def change(line: list) -> None:
        words = [str(step) for step in line]
        i, j = words.index(one), words.index(other)
        line[i], line[j] = line[j], line[i]

    return change


def without(word: str) -> Change:
    return lambda line: line.pop([str(step) for step in line].index(word))


def put(step: Action | Pair, at: int) -> Change:
    return lambda line: line.insert(at, step)


ONE = build_table(OneFOneB(), 2, 1, 4)
SPLIT = build_table(ZeroBubbleH1(), 2, 1, 4)
F3, B3 = Action("F", 0, 3), Action("B", 0, 3)

FAULTS = [
    ("a forward is missing", ONE, 0, without("F3"), "micro-batch 3 has F 0, B 1, I 0, W 0 times"),
    ("a backward is missing", ONE, 1, without("B3"), "micro-batch 3 has F 1, B 0, I 0, W 0 times"),
    ("a weight gradient is missing", SPLIT, 1, without("W3"), "F 1, B 0, I 1, W 0 times"),
    ("a backward stands twice", ONE, 1, put(Action("B", 0, 3), 8), "F 1, B 2, I 0, W 0 times"),
    ("weights counted twice", ONE, 1, put(Action("W", 0, 3), 8), "F 1, B 1, I 0, W 1 times"),
    ("a micro-batch too many", ONE, 0, put(Action("F", 0, 4), 8), "micro-batch 4 does not exist"),
    ("a chunk too many", ONE, 0, put(Action("F", 1, 0), 8), "micro-batch 0 does not exist"),
    ("backward before forward", ONE, 1, swap("F0", "B0"), "rank 1: B0 is not after F0"),
    ("weights before inputs", SPLIT, 0, swap("I0", "W0"), "rank 0: W0 is not after I0"),
    ("micro-batches out of order", ONE, 0, swap("F2", "F3"), "F2 comes after F3"),
    ("weights out of order", SPLIT, 0, swap("W2", "W3"), "W2 comes after W3"),
    ("no room for the peer", ONE, 0, swap("F1", "B1"), "deadlock: rank 0 stays at"),
    ("a pair that needs itself", ONE, 1, put(Pair(F3, B3), 6), "B3 is not"),
    ("two forwards as a pair", ONE, 0, put(Pair(F3, F3), 0), "F3+F3 is no"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("table", "rank", "change", "said"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS]
)
def test_the_checker_notices(table: Table, rank: int, change: Change, said: str) -> None:
    assert problems(table) == []
    found = problems(changed(table, rank, change))
    assert any(said in text for text in found), found


def test_a_deadlock_names_each_rank_and_what_it_awaits() -> None:
    early = (Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1))
    late = (Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), Action("B", 0, 1))
    with pytest.raises(Deadlock) as error:
        list(topological_steps(Table((early, late), 1, 2)))
    assert str(error.value) == (
        "rank 0 stays at B0 and waits for the gradient of stage 1, micro-batch 0; "
        "rank 1 stays at F1 and waits for the output of stage 0, micro-batch 1"
    )


def test_weights_wait_for_their_inputs() -> None:
    line = tuple(Action(kind, 0, 0) for kind in ("F", "W", "I"))
    with pytest.raises(Deadlock, match="rank 0 stays at W0 and waits for the gradient of stage 0"):
        list(topological_steps(Table((line,), 1, 1)))


def test_a_pair_waits_for_both_of_its_inputs() -> None:
    """Beside each other the two would wait in a ring, one after the other they run."""
    first = (Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), Action("B", 0, 1))
    second = (Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1))
    ring = (Action("F", 0, 0), Pair(Action("F", 0, 1), Action("B", 0, 0)), Action("B", 0, 1))
    assert problems(Table((first, second), 1, 2)) == []
    assert problems(Table((ring, second), 1, 2)) == []
    assert any("deadlock" in text for text in problems(Table((ring, ring), 1, 2)))


def test_both_ends_of_a_channel_keep_one_order() -> None:
    """Chunks of two micro-batches that change places on one rank only are sent in another order."""
    table = build_table(GPipe(), 2, 2, 2)
    rank = [Action("F", 0, 0), Action("F", 0, 1), Action("F", 1, 0), Action("F", 1, 1)]
    back = [Action("B", 1, 0), Action("B", 0, 0), Action("B", 1, 1), Action("B", 0, 1)]
    deep = replace(table, lines=(table.lines[0], (*rank, *back)))
    assert problems(deep) == [
        "gradients from rank 1 to rank 0 are received in another order than they are sent"
    ]


def test_memory_above_the_limit_is_named() -> None:
    table = build_table(OneFOneB(), 3, 1, 6)
    assert problems(table, limit=[3, 2, 1]) == []
    assert problems(table, limit=[3, 1, 1]) == [
        "rank 1 keeps 2 chunks in flight, at most 1 are allowed"
    ]


def test_what_waits_for_its_weights_is_kept() -> None:
    line = tuple(Action(kind, 0, 0) for kind in ("F", "I"))
    after = tuple(Action(kind, 0, 1) for kind in ("F", "I"))
    both = (*line, *after, Action("W", 0, 0), Action("W", 0, 1))
    assert peak_in_flight(Table((both,), 1, 2)) == (2,)
    assert set(peak_in_flight(build_table(DualPipeV(), 2, 2, 4))) == {5}
