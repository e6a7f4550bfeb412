"""Schedules whose two chunks per rank lie in the shape of a V: down the ranks and back up.

The last stage lies beside the first, so rank 0 sees its first gradient as early as it can. Letters
as in ``schedule.config``: p pipeline ranks, v = 2 stage chunks per rank, m >= 2 p micro-batches.
Each table function is the owner of one record and takes the record, p, v and m.
"""

from collections import deque
from typing import cast

from moefold.schedule.config import DualPipeV, ZeroBubbleV
from moefold.schedule.table import Action, Kind, Line, Pair, Step, Table


def zb_v(record: ZeroBubbleV, p: int, v: int, m: int) -> Table:
    """Return the table of ZB-V (arXiv 2405.15362), in which weight gradients stand apart.

    Where F = I = W no rank waits once it has started; the makespan holds the p - 1 forwards that
    the last rank starts late. In flight: 2 p chunks on every rank, what 1F1B keeps on rank 0.
    """
    lines = tuple(_zb_v_line(rank, p, m) for rank in range(p))
    return Table(lines, chunks=2, micro_batches=m, way=record.way)


def dualpipe_v(record: DualPipeV, p: int, v: int, m: int) -> Table:
    """Return the table of DualPipeV, the V-shaped half of DualPipe (arXiv 2412.19437).

    The order is the one that its authors publish. In the steady phase a forward of one chunk always
    runs beside a backward of the other, so that exchanges hide. Bubble (p - 1)(FB + B - 3 W), where
    FB is the time of a pair. In flight: 2 p + 1 chunks on every rank.
    """
    lines = tuple(_dualpipe_v_line(rank, p, m) for rank in range(p))
    return Table(lines, chunks=2, micro_batches=m, way=record.way)


class LineBuilder:
    """Builds one rank's line and counts micro-batches, so that phases only say what comes next.

    Each chunk's forwards and backwards come in ascending order of micro-batches.
    """

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._next: dict[tuple[str, str], int] = {}
        self._weights: deque[Action] = deque()

    def add(self, words: str, times: int = 1) -> None:
        """Add steps, so many times over: ``F0``, ``B0`` and ``I0`` are the next of chunk 0.

        ``I0`` puts a weight gradient off, ``W`` is the oldest of these; ``F0+B1`` is a pair.
        """
        for word in words.split() * times:
            one, *other = map(self._action, word.split("+"))
            self._steps.append(Pair(one, *other) if other else one)

    def done(self) -> Line:
        """Return the line, once no weight gradient is put off any more."""
        assert not self._weights, "weight gradients are left over"
        return tuple(self._steps)

    def _action(self, word: str) -> Action:
        if word == "W":
            return self._weights.popleft()
        key = "F" if word[0] == "F" else "B", word[1:]
        micro = self._next.get(key, 0)
        self._next[key] = micro + 1
        action = Action(cast(Kind, word[0]), int(word[1:]), micro)
        if action.kind == "I":
            self._weights.append(action._replace(kind="W"))
        return action


def _zb_v_line(rank: int, p: int, m: int) -> Line:
    line = LineBuilder()
    below = p - rank  # ranks from here to the turn of the V, this one included
    line.add("F0", 2 * below - 1)  # 1. down the V
    line.add("F1 F0", rank)  # 2. the first ones come back up
    line.add("F1 I1 W", below)  # 3. their gradients come back down
    full = m - (2 * p - rank - 1)  # 4. steady: a forward and a whole backward of each chunk
    line.add("F0 I0 W F1 I1 W", full)
    line.add("I0 W F1 I1 W", m - p - full)
    line.add("I0 I1", rank)  # 5. gradients run down and up, weights wait
    line.add("I0 W", below)  # 6. gradients run up, weights fill the gaps
    line.add("W", 2 * rank)  # 7. the rest of the weight gradients
    return line.done()


def _dualpipe_v_line(rank: int, p: int, m: int) -> Line:
    line = LineBuilder()
    below = p - rank - 1  # ranks between here and the turn of the V
    line.add("F0", 2 * below)  # 1. down the V
    line.add("F0 F1", rank + 1)  # 2. the first ones come back up
    line.add("I1 W F1", below)  # 3. their gradients come back down; weights fill the gaps
    # 4. steady: each chunk forward beside the other's backward; at the turn the first pair has
    # nothing to hide
    line.add("F0+B1 F1+B0" if below else "F0 B1 F1+B0")
    line.add("F0+B1 F1+B0", m - 2 * p + rank)
    line.add("B1 F1+B0", below)  # 5. the last forwards
    whole, half = divmod(
        rank + 1, 2
    )  # 6. backwards of both chunks; in the second half weights wait
    line.add("B1 B0", whole)
    line.add("B1 I0", half)
    line.add("I1 I0", whole)
    line.add("W I0", below)  # 7. the last gradients run up, weights fill the gaps
    line.add("W", rank + 1)  # 8. the rest of the weight gradients
    return line.done()
