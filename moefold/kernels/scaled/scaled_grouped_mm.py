"""Experts' products by ``torch.nn.functional.scaled_grouped_mm``: all groups in one call, in bf16.

It multiplies rows by the matrix of their group (torch 2.11 to 2.13): E4M3 with a scale per row, for
which scales of whole matrices are repeated, and ``mxfp8`` in groups of multiples of 32 rows, with
scales swizzled per group. Not used are its weight gradients, which are rounded to bf16 before they
can be added, and ``nvfp4``, with one matrix scale per group where a group's runs have several.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.kernels.quantise.blocks import Quantised
from moefold.kernels.scaled.emulated import Use
from moefold.kernels.scaled.operands import Joined, along, cat, fill, swizzled
from moefold.kernels.scaled.scaled_mm import ScaledMm

STEP = 32
"""Multiple of rows to which groups of ``mxfp8`` are padded."""


class ScaledGroupedMm(ScaledMm):
    """``scaled_grouped_mm`` for all groups of rows in one call."""

    name = "scaled_grouped_mm"
    remedy = "Run on an NVIDIA GPU of sm_90 or sm_100"

    def missing(self, device: torch.device) -> str:
        """Return why a device is not supported; only GPUs are."""
        return super().missing(device) or ("" if device.type == "cuda" else "it needs a GPU")

    def why_not(self, use: Use) -> str:
        """Return why a product is not supported."""
        if why := self.missing(use.device):
            return why
        if not use.grouped or use.product == "dw" or use.dtype != torch.bfloat16:
            return "it supports y and dx of experts' bf16 rows only"
        if use.kind not in ("mxfp8", "fp8_tensor"):
            return f"it does not support {use.kind} with a scale for each run"
        if use.kind == "fp8_tensor" and use.product == "dx":
            return "it does not support E5M2"
        return super().why_not(use)

    def each(
        self,
        made: Sequence[Quantised],
        weight_KM: Quantised,
        groups: list[int],
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """Return each run's product with its matrix."""
        if not sum(one.shape[0] for one in made):
            return super().each(made, weight_KM, groups, dtype)
        b_EMK, scales = along(weight_KM.mT)
        mx = weight_KM.format.kind == "mxfp8"
        joined = Joined.of(made, groups, STEP if mx else 1)
        ends = joined.ends(len(b_EMK))
        offs_E = torch.tensor(ends, dtype=torch.int32, device=b_EMK.device)
        b_EMK = fill(b_EMK, 16, STEP)
        library = F.scaled_grouped_mm  # type: ignore[attr-defined]
        product = partial(library, fill(joined.codes, 1, STEP), b_EMK.mT)
        if mx:
            cuts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
            parts = [swizzled(part) for part in joined.scales.split(cuts) if len(part)]
            blocks = -(-joined.scales.shape[1] // 4) * 4
            kind, swizzle = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
            ours, theirs = cat(parts).view(-1, blocks), swizzled(fill(scales, 16, 1))
        else:
            kind, swizzle = F.ScalingType.RowWise, F.SwizzleType.NO_SWIZZLE
            ours = joined.scales.flatten()
            theirs = scales.flatten(1).expand(-1, b_EMK.shape[1]).contiguous()
        y_RM = product(ours, kind, theirs, kind, swizzle, swizzle, offs=offs_E, output_dtype=dtype)
        return joined.parts(y_RM[:, : weight_KM.shape[-1]])
