"""The gradient of looked-up rows of a table, as one Triton kernel: sums of runs of equal ids.

T rows, D width, V rows of the table. The sums are fp32, made in the order of the rows: the same
bits each time, and nothing of the table's size but the table's gradient is touched.
"""

from torch import Tensor

from moefold.kernels.fused import Op, blocks, jit, power_of_2, tl

COLUMNS = 512
"""Of a program at most."""


@jit
def _add_runs(
    rows,
    ids,
    order,
    into,
    count,
    width,
    COLUMNS: tl.constexpr,
):
    at = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    name = tl.load(ids + at)
    running = tl.load(ids + at - 1, mask=at > 0, other=-1) != name
    if running:
        total = tl.zeros((COLUMNS,), tl.float32)
        while running:
            row = tl.load(order + at).to(tl.int64)
            total += tl.load(rows + row * width + column, mask=inside, other=0.0).to(tl.float32)
            at += 1
            running = tl.load(ids + at, mask=at < count, other=-1) == name
        place = into + name.to(tl.int64) * width + column
        before = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        tl.store(place, (before + total).to(into.dtype.element_ty), mask=inside)


def lookup_gradient(rows_TD: Tensor, ids_T: Tensor, order_T: Tensor, into_VD: Tensor) -> None:
    """Add each row to the table's row of its id.

    Args:
        rows_TD: gradients of the rows that were looked up.
        ids_T: their ids, sorted.
        order_T: the row that each sorted id is of.
        into_VD: contiguous gradient of the table.
    """
    count, width = rows_TD.shape
    columns = min(COLUMNS, power_of_2(width))
    if rows_TD.numel():
        _add_runs[(count, blocks(width, columns))](
            rows_TD.contiguous(), ids_T, order_T, into_VD, count, width, columns
        )


gradient = Op(lookup_gradient, lambda *given: None, changes=("into_VD",))
