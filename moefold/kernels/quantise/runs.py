"""Codes of a run (shard) of a parameter's elements, equal to those of the whole parameter.

A scaling block may span several ranks. Each computes the largest magnitudes of its elements; the
maximum over ranks is that of the block, from which a run's codes follow. G matrices, B blocks down
and A across a matrix, N rows and C columns, c columns of a block; L elements of a run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.kernels.quantise.blocks import Format, Quantised, cast, scales_of
from moefold.kernels.quantise.elements import pack, unpack


@dataclass(frozen=True)
class BlockGrid:
    """Scaling blocks of a weight whose codes serve products over either dim."""

    form: Format
    matrices: int
    """Number of matrices of a tensor with three dims; 0 for a matrix."""
    rows: int
    columns: int

    @classmethod
    def of(cls, form: Format, shape: Sequence[int], groups: int) -> "BlockGrid":
        """Return the grid of a parameter whose first ``groups`` dims are batches of matrices."""
        matrices = prod(shape[:groups]) if groups else 0
        return cls(form, matrices, prod(shape[groups:-1]), shape[-1])

    @property
    def lead(self) -> tuple[int, ...]:
        """Batch dims."""
        return (self.matrices,) if self.matrices else ()

    @property
    def amaxes(self) -> tuple[int, ...]:
        """Shape of the largest magnitudes of blocks: [(G,) B, A]."""
        height, width = self._block
        return (*self.lead, -(-self.rows // height), -(-self.columns // width))

    @property
    def _block(self) -> tuple[int, int]:
        return self.form.rows or max(self.rows, 1), self.form.columns or max(self.columns, 1)

    def largest(self, run_L: Tensor, start: int) -> Tensor:
        """Return the largest magnitudes of blocks among a run's elements, 0 for other blocks.

        Args:
            run_L: elements of the parameter.
            start: index of the first one in the parameter.

        Returns:
            fp32 of shape ``amaxes``; Inf for NaN, which a maximum over ranks could lose.
        """
        values_NAc, down_N = self._rows(run_L, start)
        most_NA = values_NAc.abs().amax(-1).nan_to_num_(nan=torch.inf, posinf=torch.inf)
        found = most_NA.new_zeros(prod(self.amaxes[:-1]), self.amaxes[-1])
        at_NA = down_N[:, None].expand_as(most_NA)
        return found.scatter_reduce_(0, at_NA, most_NA, "amax").view(self.amaxes)

    def codes(self, run_L: Tensor, start: int, amaxes: Tensor, matrix: Tensor | None) -> Tensor:
        """Return a run's codes, one per uint8, from the amax of whole blocks and matrices.

        ``matrix`` is fp32 [(G,) 1, 1], None for kinds without scales of matrices.
        """
        values_NAc, down_N = self._rows(run_L, start)
        factor = scales_of(amaxes, matrix, self.form).factor
        factor_NA = factor.reshape(-1, self.amaxes[-1])[down_N]
        coded_NC = cast(values_NAc * factor_NA[..., None], self.form).view(torch.uint8).flatten(1)
        at = start % self.columns
        return coded_NC[:, : self.columns].flatten()[at : at + run_L.numel()]

    def read(self, row: Tensor, amaxes: Tensor, matrix: Tensor | None) -> Quantised:
        """Return the parameter from its codes in one row; E2M1 has two per byte."""
        made = scales_of(amaxes, matrix, self.form)
        shape = torch.Size((*self.lead, self.rows, self.columns))
        if self.form.element is not None:
            codes = row[: shape.numel()].view(shape).view(self.form.element)
        else:
            # Pad rows to whole blocks, as sent codes have no padding.
            loose = unpack(row)[: shape.numel()].view(shape)
            codes = pack(F.pad(loose, (0, -self.columns % self._block[1])))
        return Quantised(codes, made.block, made.matrix, self.form, -1, shape)

    def _rows(self, run_L: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Return the rows [N, A, c] that a run touches, zeros elsewhere, and their block rows."""
        (height, width), columns = self._block, self.columns
        first, last = start // columns, -(-(start + run_L.numel()) // columns)
        values_NC = run_L.new_zeros(last - first, columns, dtype=torch.float32)
        at = start - first * columns
        values_NC.view(-1)[at : at + run_L.numel()] = run_L
        number_N = torch.arange(first, last, device=run_L.device)
        down_N = number_N // self.rows * self.amaxes[-2] + number_N % self.rows // height
        return F.pad(values_NC, (0, -columns % width)).unflatten(1, (-1, width)), down_N
