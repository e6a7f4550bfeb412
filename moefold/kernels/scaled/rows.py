"""Which rows share blocks along rows, and the scale of a matrix: the same in every layout.

A *run* is the rows of one micro-batch, of one expert where there are several, in the micro-batch's
order. Ranks that hold parts of a dense run cut it between blocks; an expert's run is whole.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.kernels.grouped.loop import spans

GROUP = 40
"""Bits of a row's number below those of its group."""
ROW = 24
"""Bits of a row's place in its micro-batch, below those of the micro-batch in a sent number."""


def sent_numbers(first: int, row_T: Tensor) -> Tensor:
    """Return what tells an expert's rank which micro-batch a row is of, and its place there.

    fp64, since what sends rows sends floating point; exact up to 2^29 rows of a step.

    Args:
        first: number of the micro-batch's first row in the step.
        row_T: int64 place of each row in the whole micro-batch.
    """
    return (row_T + (first << ROW)).double()


class RowRuns(NamedTuple):
    """The rows that count, in runs."""

    runs: tuple[tuple[int, int, int], ...]
    """Group, first row and end of each, in order."""
    number_N: Tensor | None = None
    """int64 number of each row, in order, that chance goes by; None where runs number theirs."""
    order_N: Tensor | None = None
    """Which of the rows given each one is; None where they stand in order, the first of all."""
    grouped: bool = False
    """Whether each group has a matrix of its own."""
    first: tuple[int, ...] = ()
    """Number of the first row of each run, where those of a run follow one another."""

    @property
    def end(self) -> int:
        """How many rows count."""
        return self.runs[-1][2] if self.runs else 0

    @property
    def groups(self) -> list[int]:
        """The group of each run."""
        return [group for group, *_ in self.runs]

    @classmethod
    def dense(cls, n_valid: int, number_T: Tensor) -> "RowRuns":
        """Return the one run of a micro-batch's rows, or of the part of them that is here."""
        return cls(((0, 0, n_valid),), number_T[:n_valid])

    @classmethod
    def of_groups(
        cls, offs_E: Tensor, first: int, first_group: int = 0, sent_R: Tensor | None = None
    ) -> "RowRuns":
        """Return the runs of rows that are sorted by group.

        Args:
            offs_E: int32 end row of each group.
            first: number of the micro-batch's first row, where all rows are of one.
            first_group: number of the first group among those of all ranks.
            sent_R: what :func:`sent_numbers` gave each row; None where rows of one micro-batch
                stand in its order.
        """
        groups = spans(offs_E)
        if sent_R is None:
            numbers = tuple(_number(first, first_group + group) for group, *_ in groups)
            return cls(tuple(groups), None, None, True, numbers)
        sent_N = sent_R[: groups[-1][2] if groups else 0].to(torch.int64)
        sizes = torch.tensor([b - a for _, a, b in groups], device=offs_E.device)
        group_N = torch.arange(len(groups), device=offs_E.device).repeat_interleave(sizes)
        order_N = sent_N.argsort(stable=True)
        order_N = order_N[group_N[order_N].argsort(stable=True)]
        named = torch.stack((group_N, sent_N >> ROW))[:, order_N]
        (group_R, first_R), counts = named.unique_consecutive(dim=1, return_counts=True)
        ends = [0, *counts.cumsum(0).tolist()]
        named = list(zip(group_R.tolist(), first_R.tolist(), strict=True))
        runs = tuple((group, *cut) for (group, _), cut in zip(named, pairwise(ends), strict=True))
        numbers = tuple(_number(of, first_group + group) for group, of in named)
        return cls(runs, None, order_N, True, numbers)

    def inside(self, x_NI: Tensor) -> Tensor:
        """Return the rows that count, in order."""
        return x_NI[: self.end] if self.order_N is None else x_NI.index_select(0, self.order_N)

    def split(self, inside: Tensor) -> list[Tensor]:
        """Return the rows of each run."""
        return [inside[start:end] for _, start, end in self.runs]

    def numbers(self, run: int, device: torch.device) -> Tensor:
        """Return int64 numbers of a run's rows."""
        _, start, end = self.runs[run]
        if self.number_N is not None:
            return self.number_N[start:end]
        return torch.arange(end - start, device=device) + self.first[run]

    def put(self, parts: list[Tensor], into_NO: Tensor) -> Tensor:
        """Put each run's rows back where they stood; the others stay."""
        found = torch.cat(parts) if parts else into_NO[:0]
        if self.order_N is None:
            into_NO[: self.end] = found
            return into_NO
        return into_NO.index_copy_(0, self.order_N, found)


def _number(first: int, group: int) -> int:
    return first + (group << GROUP)
