"""Codes of a shard of a parameter's elements, equal to those of the full parameter.

A scaling block may span several ranks. Each computes the largest magnitudes of its elements; the
maximum over ranks is the block's, from which a shard's codes follow. G matrices, B blocks down and
A across a matrix, N rows and C columns, c columns of a block; L elements of a shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.kernels.quantise.blocks import Format, Quantised, cast, compute_scales
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
    def batch_shape(self) -> tuple[int, ...]:
        """Batch dims."""
        return (self.matrices,) if self.matrices else ()

    @property
    def amax_shape(self) -> tuple[int, ...]:
        """Shape of the largest magnitudes of blocks: [(G,) B, A]."""
        height, width = self._block
        down = -(-self.rows // height)
        across = -(-self.columns // width)
        return (*self.batch_shape, down, across)

    @property
    def _block(self) -> tuple[int, int]:
        return self.form.rows or max(self.rows, 1), self.form.columns or max(self.columns, 1)

    def block_amax(self, shard_L: Tensor, start: int) -> Tensor:
        """Return the largest magnitudes of blocks among a shard's elements, 0 for other blocks.

        Args:
            shard_L: consecutive elements of the parameter.
            start: index of the first one in the parameter.

        Returns:
            fp32 of shape ``amax_shape``; Inf for NaN, which a maximum over ranks could lose.
        """
        values_NAc, block_row_N = self._rows(shard_L, start)
        magnitude_NA = values_NAc.abs().amax(-1).nan_to_num_(nan=torch.inf, posinf=torch.inf)
        largest = magnitude_NA.new_zeros(prod(self.amax_shape[:-1]), self.amax_shape[-1])
        index_NA = block_row_N[:, None].expand_as(magnitude_NA)
        return largest.scatter_reduce_(0, index_NA, magnitude_NA, "amax").view(self.amax_shape)

    def encode(self, shard_L: Tensor, start: int, amaxes: Tensor, matrix: Tensor | None) -> Tensor:
        """Return a shard's codes, one per uint8, from the amax of full blocks and matrices.

        ``matrix`` is fp32 [(G,) 1, 1], None for kinds without scales of matrices.
        """
        values_NAc, block_row_N = self._rows(shard_L, start)
        factor = compute_scales(amaxes, matrix, self.form).factor
        factor_NA = factor.reshape(-1, self.amax_shape[-1])[block_row_N]
        coded_NC = cast(values_NAc * factor_NA[..., None], self.form).view(torch.uint8).flatten(1)
        offset = start % self.columns
        return coded_NC[:, : self.columns].flatten()[offset : offset + shard_L.numel()]

    def decode(self, row: Tensor, amaxes: Tensor, matrix: Tensor | None) -> Quantised:
        """Return the parameter from its codes in one row; E2M1 has two per byte."""
        scales = compute_scales(amaxes, matrix, self.form)
        shape = torch.Size((*self.batch_shape, self.rows, self.columns))
        if self.form.element is not None:
            codes = row[: shape.numel()].view(shape).view(self.form.element)
        else:
            # Pad rows to full blocks, as gathered codes have no padding.
            unpacked = unpack(row)[: shape.numel()].view(shape)
            codes = pack(F.pad(unpacked, (0, -self.columns % self._block[1])))
        return Quantised(codes, scales.block, scales.matrix, self.form, -1, shape)

    def _rows(self, shard_L: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Return the rows [N, A, c] that a shard covers, zeros elsewhere, and their block rows."""
        (height, width) = self._block
        columns = self.columns
        first = start // columns
        last = -(-(start + shard_L.numel()) // columns)
        values_NC = shard_L.new_zeros(last - first, columns, dtype=torch.float32)
        offset = start - first * columns
        values_NC.view(-1)[offset : offset + shard_L.numel()] = shard_L
        number_N = torch.arange(first, last, device=shard_L.device)
        matrix_N = number_N // self.rows
        block_row_N = matrix_N * self.amax_shape[-2] + number_N % self.rows // height
        padded_NC = F.pad(values_NC, (0, -columns % width))
        return padded_NC.unflatten(1, (-1, width)), block_row_N
