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
from moefold.kernels.scaled.emulated import ProductSpec
from moefold.kernels.scaled.operands import PaddedGroups, cat, contiguous_codes, pad, swizzled
from moefold.kernels.scaled.scaled_mm import ScaledMm

ROW_MULTIPLE = 32
"""Row multiple to which groups of ``mxfp8`` are padded."""


class ScaledGroupedMm(ScaledMm):
    """``scaled_grouped_mm`` for all groups of rows in one call."""

    name = "scaled_grouped_mm"
    remedy = "Run on an NVIDIA GPU of sm_90 or sm_100"

    def why_unavailable(self, device: torch.device) -> str:
        """Return why a device is not supported; only GPUs are."""
        return super().why_unavailable(device) or (
            "" if device.type == "cuda" else "it needs a GPU"
        )

    def why_unsupported(self, spec: ProductSpec) -> str:
        """Return why a product is not supported."""
        if why := self.why_unavailable(spec.device):
            return why
        if not spec.grouped or spec.product == "dw" or spec.dtype != torch.bfloat16:
            return "it supports y and dx of experts' bf16 rows only"
        if spec.kind not in ("mxfp8", "fp8_tensor"):
            return f"it does not support {spec.kind} with a scale for each run"
        if spec.kind == "fp8_tensor" and spec.product == "dx":
            return "it does not support E5M2"
        return super().why_unsupported(spec)

    def multiply_runs(
        self,
        runs: Sequence[Quantised],
        weight_KM: Quantised,
        groups: list[int],
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """Return each run's product with its matrix."""
        if not sum(run.shape[0] for run in runs):
            return super().multiply_runs(runs, weight_KM, groups, dtype)
        b_EMK, scales = contiguous_codes(weight_KM.mT)
        mx = weight_KM.format.kind == "mxfp8"
        padded = PaddedGroups.of(runs, groups, ROW_MULTIPLE if mx else 1)
        ends = padded.ends(len(b_EMK))
        offs_E = torch.tensor(ends, dtype=torch.int32, device=b_EMK.device)
        b_EMK = pad(b_EMK, 16, ROW_MULTIPLE)
        library = F.scaled_grouped_mm  # type: ignore[attr-defined]
        product = partial(library, pad(padded.codes, 1, ROW_MULTIPLE), b_EMK.mT)
        if mx:
            sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
            parts = [swizzled(part) for part in padded.scales.split(sizes) if len(part)]
            blocks = -(-padded.scales.shape[1] // 4) * 4
            kind = F.ScalingType.BlockWise1x32
            swizzle = F.SwizzleType.SWIZZLE_32_4_4
            row_scales = cat(parts).view(-1, blocks)
            weight_scales = swizzled(pad(scales, 16, 1))
        else:
            kind = F.ScalingType.RowWise
            swizzle = F.SwizzleType.NO_SWIZZLE
            row_scales = padded.scales.flatten()
            weight_scales = scales.flatten(1).expand(-1, b_EMK.shape[1]).contiguous()
        y_RM = product(
            row_scales, kind, weight_scales, kind, swizzle, swizzle, offs=offs_E, output_dtype=dtype
        )
        return padded.split_runs(y_RM[:, : weight_KM.shape[-1]])
