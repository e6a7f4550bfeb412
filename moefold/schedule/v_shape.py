"""Schedules whose two chunks per rank lie in the shape of a V: down the ranks and back up.

The last stage lies beside the first, so rank 0 sees its first gradient as early as it can. Letters
as in ``schedule.config``: p pipeline ranks, v = 2 stage chunks per rank, m >= 2 p micro-batches.
Each table function is the owner of one record and takes the record, p, v and m.
"""

from collections import deque

from moefold.schedule.config import DualPipeV, ZeroBubbleV
from moefold.schedule.table import Action, Kind, Line, Pair, Step, Table


def zb_v(record: ZeroBubbleV, p: int, v: int, m: int) -> Table:
    """Return the table of ZB-V (arXiv 2405.15362), in which weight gradients stand apart.

    Where F = I = W no rank waits once it has started; the makespan holds the p - 1 forwards that
    the last rank starts late. In flight: 2 p chunks on every rank, what 1F1B keeps on rank 0.
    """
    lines = tuple(_zb_v_line(rank, p, m) for rank in range(p))
    return Table(lines, chunks=2, micro_batches=m, placement="vee")


def dualpipe_v(record: DualPipeV, p: int, v: int, m: int) -> Table:
    """Return the table of DualPipeV, the V-shaped half of DualPipe (arXiv 2412.19437).

    The order is the one that its authors publish. In the steady phase a forward of one chunk always
    runs beside a backward of the other, so that exchanges hide. Bubble (p - 1)(FB + B - 3 W), where
    FB is the time of a pair. In flight: 2 p + 1 chunks on every rank.
    """
    lines = tuple(_dualpipe_v_line(rank, p, m) for rank in range(p))
    return Table(lines, chunks=2, micro_batches=m, placement="vee")


class LineBuilder:
    """Builds one rank's line and counts micro-batches, so that phases only say what comes next.

    Each chunk's forwards and backwards come in ascending order of micro-batches.
    """

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._next: dict[tuple[str, int], int] = {}
        self._weights: deque[Action] = deque()

    def forward(self, chunk: int) -> None:
        """Add the next forward of a chunk."""
        self._steps.append(self._take("F", chunk))

    def backward(self, chunk: int) -> None:
        """Add the next backward of a chunk, inputs and weights at once."""
        self._steps.append(self._take("B", chunk))

    def inputs(self, chunk: int) -> None:
        """Add the next input gradient of a chunk and put its weight gradient off."""
        action = self._take("I", chunk)
        self._steps.append(action)
        self._weights.append(action._replace(kind="W"))

    def weights(self) -> None:
        """Add the oldest weight gradient that was put off."""
        self._steps.append(self._weights.popleft())

    def pair(self, forward: int, backward: int) -> None:
        """Add the next forward of one chunk beside the next backward of another."""
        self._steps.append(Pair(self._take("F", forward), self._take("B", backward)))

    def done(self) -> Line:
        """Return the line, once no weight gradient is put off any more."""
        assert not self._weights, "weight gradients are left over"
        return tuple(self._steps)

    def _take(self, kind: Kind, chunk: int) -> Action:
        way = "forward" if kind == "F" else "backward"
        micro = self._next.get((way, chunk), 0)
        self._next[way, chunk] = micro + 1
        return Action(kind, chunk, micro)


def _zb_v_line(rank: int, p: int, m: int) -> Line:
    line = LineBuilder()
    below = p - rank  # ranks from here to the turn of the V, this one included
    for _ in range(2 * below - 1):  # 1. down the V
        line.forward(0)
    for _ in range(rank):  # 2. the first ones come back up
        line.forward(1)
        line.forward(0)
    for _ in range(below):  # 3. their gradients come back down
        line.forward(1)
        line.inputs(1)
        line.weights()
    for turn in range(m - p):  # 4. steady: a forward and a whole backward of each chunk
        if turn < m - (2 * p - rank - 1):
            line.forward(0)
        line.inputs(0)
        line.weights()
        line.forward(1)
        line.inputs(1)
        line.weights()
    for _ in range(rank):  # 5. gradients run down and up, weights wait
        line.inputs(0)
        line.inputs(1)
    for _ in range(below):  # 6. gradients run up, weights fill the gaps
        line.inputs(0)
        line.weights()
    for _ in range(2 * rank):  # 7. the rest of the weight gradients
        line.weights()
    return line.done()


def _dualpipe_v_line(rank: int, p: int, m: int) -> Line:
    line = LineBuilder()
    below = p - rank - 1  # ranks between here and the turn of the V
    _fill(line, rank, below)
    for turn in range(m - 2 * p + rank + 1):  # 4. steady: each chunk forward beside the other's
        if turn == 0 and below == 0:  # backward; at the turn the first pair has nothing to hide
            line.forward(0)
            line.backward(1)
        else:
            line.pair(0, 1)
        line.pair(1, 0)
    _drain(line, rank, below)
    return line.done()


def _fill(line: LineBuilder, rank: int, below: int) -> None:
    for _ in range(2 * below):  # 1. down the V
        line.forward(0)
    for _ in range(rank + 1):  # 2. the first ones come back up
        line.forward(0)
        line.forward(1)
    for _ in range(below):  # 3. their gradients come back down; weights fill the gaps
        line.inputs(1)
        line.weights()
        line.forward(1)


def _drain(line: LineBuilder, rank: int, below: int) -> None:
    for _ in range(below):  # 5. the last forwards
        line.backward(1)
        line.pair(1, 0)
    whole = rank + 1  # 6. backwards of both chunks; in the second half weights wait
    for turn in range(2 * (rank + 1)):
        if turn < whole:
            line.backward(1 - turn % 2)
        else:
            line.inputs(1 - turn % 2)
    for _ in range(below):  # 7. the last gradients run up, weights fill the gaps
        line.weights()
        line.inputs(0)
    for _ in range(rank + 1):  # 8. the rest of the weight gradients
        line.weights()
