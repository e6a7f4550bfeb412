"""DualPipeV (the V-shaped half of DualPipe, arXiv 2412.19437; order as its authors publish it).

Two chunks per rank in the shape of a V; in the steady phase a forward of one chunk always runs
beside a backward of the other, so that exchanges hide. Bubble (p - 1)(FB + B - 3 W), where FB is
the time of a pair. In flight: 2 p + 1 chunks on every rank.
"""

from moefold.schedule.config import DualPipeV
from moefold.schedule.lanes import Lanes
from moefold.schedule.table import Line, Table


def table(record: DualPipeV, p: int, v: int, m: int) -> Table:
    """Return the table; m >= 2 p and v = 2."""
    lines = tuple(_line(rank, p, m) for rank in range(p))
    return Table(lines, chunks=2, micro_batches=m, placement="vee")


def _line(rank: int, p: int, m: int) -> Line:
    lanes = Lanes()
    below = p - rank - 1  # ranks between here and the turn of the V
    _fill(lanes, rank, below)
    for turn in range(m - 2 * p + rank + 1):  # 4. steady: each chunk forward beside the other's
        if turn == 0 and below == 0:  # backward; at the turn the first pair has nothing to hide
            lanes.forward(0)
            lanes.backward(1)
        else:
            lanes.pair(0, 1)
        lanes.pair(1, 0)
    _drain(lanes, rank, below)
    return lanes.line()


def _fill(lanes: Lanes, rank: int, below: int) -> None:
    for _ in range(2 * below):  # 1. down the V
        lanes.forward(0)
    for _ in range(rank + 1):  # 2. the first ones come back up
        lanes.forward(0)
        lanes.forward(1)
    for _ in range(below):  # 3. their gradients come back down; weights fill the gaps
        lanes.inputs(1)
        lanes.weights()
        lanes.forward(1)


def _drain(lanes: Lanes, rank: int, below: int) -> None:
    for _ in range(below):  # 5. the last forwards
        lanes.backward(1)
        lanes.pair(1, 0)
    whole = rank + 1  # 6. backwards of both chunks; in the second half weights wait
    for turn in range(2 * (rank + 1)):
        if turn < whole:
            lanes.backward(1 - turn % 2)
        else:
            lanes.inputs(1 - turn % 2)
    for _ in range(below):  # 7. the last gradients run up, weights fill the gaps
        lanes.weights()
        lanes.inputs(0)
    for _ in range(rank + 1):  # 8. the rest of the weight gradients
        lanes.weights()
