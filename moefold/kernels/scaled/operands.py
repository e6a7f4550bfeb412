"""Codes and scales in the layouts of libraries: along the summed dim, padded, and swizzled.

R rows, K elements along the summed dim, B blocks along it, E groups.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.kernels.quantise.blocks import Quantised
from moefold.kernels.quantise.elements import pack, unpack


def contiguous_codes(x_RK: Quantised) -> tuple[Tensor, Tensor]:
    """Return codes [(E,) R, K], contiguous along K, and their scales.

    Scales of square ``nvfp4`` blocks are repeated for each row.
    """
    codes = x_RK.codes
    scales = x_RK.scales
    form = x_RK.format
    if form.element is None:
        if x_RK.dim == -2:
            each = unpack(codes.mT).mT[..., : x_RK.shape[-2], :]
            codes = pack(pad(each, 1, 2))
        if form.rows != 1:
            assert form.rows is not None
            rows = scales.view(torch.uint8).repeat_interleave(form.rows, -2)
            scales = rows[..., : x_RK.shape[-2], :].view(scales.dtype)
    return codes.contiguous(), scales


def pad(x: Tensor, rows: int, columns: int) -> Tensor:
    """Pad the last two dims with zeros to multiples of ``rows`` and ``columns``."""
    extra_rows = -x.shape[-2] % rows
    extra_columns = -x.shape[-1] % columns
    if not extra_rows and not extra_columns:
        return x
    return F.pad(as_uint8(x), (0, extra_columns, 0, extra_rows)).view(x.dtype)


def as_uint8(x: Tensor) -> Tensor:
    """View one-byte dtypes as uint8, as some devices cannot pad, concatenate or copy the others."""
    return x.view(torch.uint8) if x.itemsize == 1 else x


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate tensors of one dtype."""
    return torch.cat([as_uint8(tensor) for tensor in tensors], dim).view(tensors[0].dtype)


def swizzled(scales_RB: Tensor) -> Tensor:
    """Return one-byte scales [(E,) R, B] in the order of Blackwell's products, [(E,) all].

    Tiles of 128 rows and 4 blocks, padded with zeros, are ordered along B; in a tile the scale of
    row r and block b is at ``r % 32 * 16 + r // 32 * 4 + b`` (cuBLAS, layout of one-dimensional
    block scales).
    """
    padded = as_uint8(pad(scales_RB, 128, 4))
    tiles = padded.unflatten(-1, (-1, 4)).unflatten(-3, (-1, 4, 32))  # [.., tile, 4, 32, tile, 4]
    return tiles.movedim(-2, -4).transpose(-2, -3).flatten(-5).view(scales_RB.dtype)


class PaddedGroups(NamedTuple):
    """Concatenated runs; zeros pad each group to a row multiple."""

    codes: Tensor
    """[R, K]"""
    scales: Tensor
    """[R, B]"""
    groups: tuple[int, ...]
    """Group of each range of rows (a run or padding); -1 is padding."""
    rows: tuple[int, ...]
    """Rows of each range."""

    @classmethod
    def of(cls, runs: Sequence[Quantised], groups: list[int], multiple: int) -> "PaddedGroups":
        """Concatenate runs, which are sorted by group and have at least one row in total."""
        codes = list[Tensor]()
        scales = list[Tensor]()
        ranges = list[tuple[int, int]]()
        end = 0
        for number, (run, group) in enumerate(zip(runs, groups, strict=True)):
            run_codes, run_scales = map(as_uint8, contiguous_codes(run))
            ranges.append((group, len(run_codes)))
            codes.append(run_codes)
            scales.append(run_scales.expand(len(run_codes), -1))
            end += len(run_codes)
            if groups[number + 1 : number + 2] != [group] and (rest := -end % multiple):
                ranges.append((-1, rest))
                codes.append(run_codes.new_zeros(rest, run_codes.shape[1]))
                scales.append(run_scales.new_zeros(rest, run_scales.shape[1]))
                end += rest
        range_groups, rows = zip(*ranges, strict=True)
        all_codes = torch.cat(codes).view(runs[0].codes.dtype)
        return cls(all_codes, torch.cat(scales).view(runs[0].scales.dtype), range_groups, rows)

    def ends(self, groups: int) -> list[int]:
        """Return the end row of each group, its padding included."""
        rows = [0] * groups
        last = 0
        for group, count in zip(self.groups, self.rows, strict=True):
            last = last if group < 0 else group
            rows[last] += count
        return list(accumulate(rows))

    def split_runs(self, y_RM: Tensor) -> list[Tensor]:
        """Return the rows of each run."""
        ranges = zip(y_RM.split(self.rows), self.groups, strict=True)
        return [rows for rows, group in ranges if group >= 0]
