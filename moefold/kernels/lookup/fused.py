"""Gradient of an embedding look-up as one Triton kernel that sums runs of equal ids.

T rows, D width, V rows of the table. Sums are fp32 and in a fixed order: deterministic. Nothing of
the table's size is allocated.
"""

from torch import Tensor

from moefold.kernels.fused import Op, cdiv, jit, next_power_of_2, tl

ROWS = 8
COLUMNS = 256
"""Largest rows per iteration and columns of a program; frequent ids have thousands of rows."""


@jit
def _add_runs(
    rows, ids, order, into,
    count, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    row_id = tl.load(ids + position)
    if tl.load(ids + position - 1, mask=position > 0, other=-1) != row_id:
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        # Triton 3.6 fails on a loop-carried condition, so it is computed again in each iteration.
        while tl.load(ids + position, mask=position < count, other=-1) == row_id:
            offsets = position + tl.arange(0, ROWS)
            same = tl.load(ids + offsets, mask=offsets < count, other=-1) == row_id
            row = tl.load(order + offsets, mask=same, other=0).to(tl.int64)
            grads = tl.load(
                rows + row[:, None] * width + column[None, :],
                mask=same[:, None] & inside[None, :],
                other=0.0,
            )
            total += grads.to(tl.float32)
            position += ROWS
        target = into + row_id.to(tl.int64) * width + column
        before = tl.load(target, mask=inside, other=0.0).to(tl.float32)
        tl.store(target, (before + tl.sum(total, 0)).to(into.dtype.element_ty), mask=inside)


def lookup_gradient(rows_TD: Tensor, ids_T: Tensor, order_T: Tensor, into_VD: Tensor) -> None:
    """Add each gradient row to the table gradient's row of its id.

    Args:
        rows_TD: gradients of the looked-up rows.
        ids_T: ids of the rows, sorted.
        order_T: index of the row of each sorted id.
        into_VD: contiguous gradient of the table.
    """
    count, width = rows_TD.shape
    columns = min(COLUMNS, next_power_of_2(width))
    if rows_TD.numel():
        _add_runs[(count, cdiv(width, columns))](
            rows_TD.contiguous(), ids_T, order_T, into_VD, count, width, ROWS, columns
        )


gradient = Op(lookup_gradient, mutates_args=("into_VD",))
