"""Runs: rows that share scaling blocks along rows and a matrix scale, independent of the layout.

A *run* is the rows of one micro-batch, or those of one expert, in the micro-batch's order. Ranks
that hold parts of a dense run cut it between blocks; an expert's run is whole.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.kernels.grouped.loop import group_spans

GROUP = 40
"""Bits of a row's number; its group's bits are above them."""
ROW = 24
"""Bits of a row's index in its micro-batch; in a row id the micro-batch's bits are above them."""


def encode_row_ids(first: int, row_T: Tensor) -> Tensor:
    """Return ids by which an expert's rank identifies each row's micro-batch and index in it.

    They are fp64, as exchanges of rows send floating point; exact up to 2^29 rows per step.

    Args:
        first: number of the micro-batch's first row in the step.
        row_T: int64 index of each row in the whole micro-batch.
    """
    return (row_T + (first << ROW)).double()


class RowRuns(NamedTuple):
    """Valid rows, divided into runs."""

    runs: tuple[tuple[int, int, int], ...]
    """Group, first row and end row of each run, in order."""
    number_N: Tensor | None = None
    """int64 number of each row for stochastic rounding; None if runs have consecutive numbers."""
    order_N: Tensor | None = None
    """Index of each valid row among all rows; None if valid rows are first and in order."""
    grouped: bool = False
    """Whether each group has its own matrix."""
    first: tuple[int, ...] = ()
    """Number of the first row of each run, if rows of a run have consecutive numbers."""

    @property
    def end(self) -> int:
        """Number of valid rows."""
        return self.runs[-1][2] if self.runs else 0

    @property
    def groups(self) -> list[int]:
        """The group of each run."""
        return [group for group, *_ in self.runs]

    @classmethod
    def dense(cls, n_valid: int, number_T: Tensor) -> "RowRuns":
        """Return a single run with a micro-batch's rows, or with this rank's part of them."""
        return cls(((0, 0, n_valid),), number_T[:n_valid])

    @classmethod
    def of_groups(
        cls, offs_E: Tensor, first: int, first_group: int = 0, row_id_R: Tensor | None = None
    ) -> "RowRuns":
        """Return the runs of rows that are sorted by group.

        Args:
            offs_E: int32 end row of each group.
            first: number of the micro-batch's first row, if all rows are of one micro-batch.
            first_group: index of the first group among those of all ranks.
            row_id_R: result of :func:`encode_row_ids` for each row; None for rows of one
                micro-batch in its order.
        """
        groups = group_spans(offs_E)
        if row_id_R is None:
            numbers = tuple(_row_number(first, first_group + group) for group, *_ in groups)
            return cls(tuple(groups), None, None, True, numbers)
        row_id_N = row_id_R[: groups[-1][2] if groups else 0].to(torch.int64)
        sizes = torch.tensor([b - a for _, a, b in groups], device=offs_E.device)
        group_N = torch.arange(len(groups), device=offs_E.device).repeat_interleave(sizes)
        order_N = row_id_N.argsort(stable=True)
        order_N = order_N[group_N[order_N].argsort(stable=True)]
        key = torch.stack((group_N, row_id_N >> ROW))[:, order_N]
        (group_R, first_R), counts = key.unique_consecutive(dim=1, return_counts=True)
        ends = [0, *counts.cumsum(0).tolist()]
        key = list(zip(group_R.tolist(), first_R.tolist(), strict=True))
        runs = tuple((group, *cut) for (group, _), cut in zip(key, pairwise(ends), strict=True))
        numbers = tuple(_row_number(start, first_group + group) for group, start in key)
        return cls(runs, None, order_N, True, numbers)

    def valid_rows(self, x_NI: Tensor) -> Tensor:
        """Return the valid rows of ``x_NI``, in order."""
        return x_NI[: self.end] if self.order_N is None else x_NI.index_select(0, self.order_N)

    def row_numbers(self, run: int, device: torch.device) -> Tensor:
        """Return int64 numbers of a run's rows."""
        _, start, end = self.runs[run]
        if self.number_N is not None:
            return self.number_N[start:end]
        return torch.arange(end - start, device=device) + self.first[run]

    def scatter(self, runs: list[Tensor], into_NO: Tensor) -> Tensor:
        """Write each run's rows to their positions in ``into_NO``; other rows are unchanged."""
        rows = torch.cat(runs) if runs else into_NO[:0]
        if self.order_N is None:
            into_NO[: self.end] = rows
            return into_NO
        return into_NO.index_copy_(0, self.order_N, rows)


def _row_number(first: int, group: int) -> int:
    return first + (group << GROUP)
