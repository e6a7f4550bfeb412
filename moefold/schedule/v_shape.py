"""Schedules with two chunks per rank in a V: from the first rank to the last and back.

Rank 0 has the first and the last stage, so that its first backward is as early as possible.
Letters: p pipeline ranks, v = 2 stage chunks per rank, m >= 2 p micro-batches. Each table function
is the owner of one record and takes the record, p, v and m.
"""

from collections import deque
from typing import cast

from moefold.schedule.config import DualPipeV, ZeroBubbleV
from moefold.schedule.table import Action, Kind, Line, Pair, Step, Table


def zb_v(record: ZeroBubbleV, p: int, v: int, m: int) -> Table:
    """Return the table of ZB-V (arXiv 2405.15362), with separate weight-gradient actions.

    If F = I = W, no rank waits once it has started; the makespan includes the p - 1 forwards by
    which the last rank starts later. In flight: 2 p chunks on every rank, as on rank 0 in 1F1B.
    """
    lines = []
    for rank in range(p):
        line = LineBuilder()
        below = p - rank  # ranks from this one to the turn of the V, inclusive
        line.add("F0", 2 * below - 1)  # 1. down the V
        line.add("F1 F0", rank)  # 2. the first micro-batches return
        line.add("F1 I1 W", below)  # 3. their gradients go down
        steady = m - (2 * p - rank - 1)  # 4. a forward and all of a backward of each chunk
        line.add("F0 I0 W F1 I1 W", steady)
        line.add("I0 W F1 I1 W", m - p - steady)
        line.add("I0 I1", rank)  # 5. gradients go down and up, weight gradients are delayed
        line.add("I0 W", below)  # 6. gradients go up, weight gradients fill the gaps
        line.add("W", 2 * rank)  # 7. the remaining weight gradients
        lines.append(line.build())
    return Table(tuple(lines), chunks=2, micro_batches=m, stage_mapping=record.stage_mapping)


def dualpipe_v(record: DualPipeV, p: int, v: int, m: int) -> Table:
    """Return the table of DualPipeV, the V-shaped half of DualPipe (arXiv 2412.19437).

    The order is that published by its authors. In the steady phase each forward of one chunk
    overlaps with a backward of the other, which hides exchanges. Bubble (p - 1)(FB + B - 3 W),
    where FB is the time of a pair. In flight: 2 p + 1 chunks on every rank.
    """
    lines = []
    for rank in range(p):
        line = LineBuilder()
        below = p - rank - 1  # ranks after this one, up to the turn of the V
        line.add("F0", 2 * below)  # 1. down the V
        line.add("F0 F1", rank + 1)  # 2. the first micro-batches return
        line.add("I1 W F1", below)  # 3. their gradients go down; weight gradients fill the gaps
        # 4. steady: a chunk's forward with the other's backward, except the last rank's first
        line.add("F0+B1 F1+B0" if below else "F0 B1 F1+B0")
        line.add("F0+B1 F1+B0", m - 2 * p + rank)
        line.add("B1 F1+B0", below)  # 5. the last forwards
        # 6. backwards of both chunks; in the second half weights wait
        half, odd = divmod(rank + 1, 2)
        line.add("B1 B0", half)
        line.add("B1 I0", odd)
        line.add("I1 I0", half)
        line.add("W I0", below)  # 7. the last gradients go up, weight gradients fill the gaps
        line.add("W", rank + 1)  # 8. the remaining weight gradients
        lines.append(line.build())
    return Table(tuple(lines), chunks=2, micro_batches=m, stage_mapping=record.stage_mapping)


class LineBuilder:
    """Builds one rank's line from short words, and numbers the micro-batches.

    Each chunk's forwards and backwards are in ascending order of micro-batches.
    """

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._next: dict[tuple[str, str], int] = {}
        self._weights: deque[Action] = deque()

    def add(self, words: str, times: int = 1) -> None:
        """Add steps ``times`` times: ``F0``, ``B0`` and ``I0`` are the next of chunk 0.

        ``I0`` delays a weight gradient, ``W`` is the oldest delayed one; ``F0+B1`` is a pair.
        """
        for word in words.split() * times:
            first, *second = map(self._next_action, word.split("+"))
            self._steps.append(Pair(first, *second) if second else first)

    def build(self) -> Line:
        """Return the line; no weight gradient may be left over."""
        assert not self._weights, "weight gradients are left over"
        return tuple(self._steps)

    def _next_action(self, word: str) -> Action:
        if word == "W":
            return self._weights.popleft()
        key = "F" if word[0] == "F" else "B", word[1:]
        micro = self._next.get(key, 0)
        self._next[key] = micro + 1
        action = Action(cast(Kind, word[0]), int(word[1:]), micro)
        if action.kind == "I":
            self._weights.append(action._replace(kind="W"))
        return action
