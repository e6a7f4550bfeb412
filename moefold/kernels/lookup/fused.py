"""The gradient of looked-up rows of a table, as one Triton kernel: sums of runs of equal ids.

T rows, D width, V rows of the table. The sums are fp32, made in one order: the same bits each time,
and nothing of the table's size but the table's gradient is touched.
"""

from torch import Tensor

from moefold.kernels.fused import Op, blocks, jit, power_of_2, tl

ROWS, COLUMNS = 8, 256
"""Of a program at once, columns at most: a frequent id has a run of thousands of rows."""


@jit
def _add_runs(
    rows, ids, order, into,
    count, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    name = tl.load(ids + at)
    if tl.load(ids + at - 1, mask=at > 0, other=-1) != name:
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        # A condition that is carried from turn to turn breaks Triton 3.6, so it is asked anew.
        while tl.load(ids + at, mask=at < count, other=-1) == name:
            of = at + tl.arange(0, ROWS)
            mine = tl.load(ids + of, mask=of < count, other=-1) == name
            row = tl.load(order + of, mask=mine, other=0).to(tl.int64)
            found = tl.load(
                rows + row[:, None] * width + column[None, :],
                mask=mine[:, None] & inside[None, :],
                other=0.0,
            )
            total += found.to(tl.float32)
            at += ROWS
        place = into + name.to(tl.int64) * width + column
        before = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        tl.store(place, (before + tl.sum(total, 0)).to(into.dtype.element_ty), mask=inside)


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
            rows_TD.contiguous(), ids_T, order_T, into_VD, count, width, ROWS, columns
        )


gradient = Op(lookup_gradient, changes=("into_VD",))
