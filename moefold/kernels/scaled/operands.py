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


def along(x_RK: Quantised) -> tuple[Tensor, Tensor]:
    """Return codes [(E,) R, K], contiguous along K, and their scales.

    Scales of square ``nvfp4`` blocks are repeated for each row.
    """
    codes, scales, form = x_RK.codes, x_RK.scales, x_RK.format
    if form.element is None:
        if x_RK.dim == -2:
            each = unpack(codes.mT).mT[..., : x_RK.shape[-2], :]
            codes = pack(fill(each, 1, 2))
        if form.rows != 1:
            assert form.rows is not None
            rows = scales.view(torch.uint8).repeat_interleave(form.rows, -2)
            scales = rows[..., : x_RK.shape[-2], :].view(scales.dtype)
    return codes.contiguous(), scales


def fill(x: Tensor, rows: int, columns: int) -> Tensor:
    """Pad the last two dims with zeros to multiples of ``rows`` and ``columns``."""
    below, beside = -x.shape[-2] % rows, -x.shape[-1] % columns
    if not below and not beside:
        return x
    return F.pad(bare(x), (0, beside, 0, below)).view(x.dtype)


def bare(x: Tensor) -> Tensor:
    """View one-byte dtypes as uint8, as not every device pads, concatenates or copies others."""
    return x.view(torch.uint8) if x.itemsize == 1 else x


def cat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate tensors of one dtype."""
    return torch.cat([bare(part) for part in parts], dim).view(parts[0].dtype)


def swizzled(scales_RB: Tensor) -> Tensor:
    """Return one-byte scales [(E,) R, B] in the order of Blackwell's products, [(E,) all].

    Tiles of 128 rows and 4 blocks, padded with zeros, are ordered along B; in a tile the scale of
    row r and block b is at ``r % 32 * 16 + r // 32 * 4 + b`` (cuBLAS, layout of one-dimensional
    block scales).
    """
    whole = bare(fill(scales_RB, 128, 4))
    tiles = whole.unflatten(-1, (-1, 4)).unflatten(-3, (-1, 4, 32))  # [.., tile, 4, 32, tile, 4]
    return tiles.movedim(-2, -4).transpose(-2, -3).flatten(-5).view(scales_RB.dtype)


class Joined(NamedTuple):
    """Concatenated runs, with each group padded by zeros to a multiple of rows."""

    codes: Tensor
    """[R, K]"""
    scales: Tensor
    """[R, B]"""
    groups: tuple[int, ...]
    """Group of each range of rows (a run or padding); -1 is padding."""
    rows: tuple[int, ...]
    """Rows of each range."""

    @classmethod
    def of(cls, made: Sequence[Quantised], groups: list[int], step: int) -> "Joined":
        """Concatenate runs, which are sorted by group and have at least one row in total."""
        codes, scales, stretches, end = list[Tensor](), list[Tensor](), list[tuple[int, int]](), 0
        for number, (one, group) in enumerate(zip(made, groups, strict=True)):
            its_codes, its_scales = map(bare, along(one))
            stretches.append((group, len(its_codes)))
            codes.append(its_codes)
            scales.append(its_scales.expand(len(its_codes), -1))
            end += len(its_codes)
            if groups[number + 1 : number + 2] != [group] and (rest := -end % step):
                stretches.append((-1, rest))
                codes.append(its_codes.new_zeros(rest, its_codes.shape[1]))
                scales.append(its_scales.new_zeros(rest, its_scales.shape[1]))
                end += rest
        whose, rows = zip(*stretches, strict=True)
        all_codes = torch.cat(codes).view(made[0].codes.dtype)
        return cls(all_codes, torch.cat(scales).view(made[0].scales.dtype), whose, rows)

    def ends(self, groups: int) -> list[int]:
        """Return the end row of each group, its padding included."""
        rows, last = [0] * groups, 0
        for group, count in zip(self.groups, self.rows, strict=True):
            last = last if group < 0 else group
            rows[last] += count
        return list(accumulate(rows))

    def parts(self, y_RM: Tensor) -> list[Tensor]:
        """Return the rows of each run."""
        stretches = zip(y_RM.split(self.rows), self.groups, strict=True)
        return [part for part, group in stretches if group >= 0]
