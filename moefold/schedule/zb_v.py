"""ZB-V (arXiv 2405.15362): two chunks per rank in the shape of a V, and weight gradients apart.

The last stage lies beside the first, so rank 0 sees its first gradient as early as it can. Where
F = I = W no rank waits once it has started; the makespan holds the p - 1 forwards that the last
rank starts late. In flight: 2 p chunks on every rank, what 1F1B keeps on rank 0.
"""

from moefold.schedule.config import ZeroBubbleV
from moefold.schedule.lanes import Lanes
from moefold.schedule.table import Line, Table


def table(record: ZeroBubbleV, p: int, v: int, m: int) -> Table:
    """Return the table; m >= 2 p and v = 2."""
    lines = tuple(_line(rank, p, m) for rank in range(p))
    return Table(lines, chunks=2, micro_batches=m, placement="vee")


def _line(rank: int, p: int, m: int) -> Line:
    lanes = Lanes()
    below = p - rank  # ranks from here to the turn of the V, this one included
    for _ in range(2 * below - 1):  # 1. down the V
        lanes.forward(0)
    for _ in range(rank):  # 2. the first ones come back up
        lanes.forward(1)
        lanes.forward(0)
    for _ in range(below):  # 3. their gradients come back down
        lanes.forward(1)
        lanes.inputs(1)
        lanes.weights()
    for turn in range(m - p):  # 4. steady: a forward and a whole backward of each chunk
        if turn < m - (2 * p - rank - 1):
            lanes.forward(0)
        lanes.inputs(0)
        lanes.weights()
        lanes.forward(1)
        lanes.inputs(1)
        lanes.weights()
    for _ in range(rank):  # 5. gradients run down and up, weights wait
        lanes.inputs(0)
        lanes.inputs(1)
    for _ in range(below):  # 6. gradients run up, weights fill the gaps
        lanes.inputs(0)
        lanes.weights()
    for _ in range(2 * rank):  # 7. the rest of the weight gradients
        lanes.weights()
    return lanes.line()
