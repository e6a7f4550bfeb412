"""Products of codes by ``torch.nn.functional.scaled_mm``, one call per run.

It requires multiples of 16 bytes along the summed dim and of 16 rows of the second operand; both
are padded with zeros. Scales of 1 x 128 are contiguous along rows, those of 128 x 128 along the
summed dim, padded to multiples of four; ``mxfp8`` and ``nvfp4`` scales are swizzled. The library
applies scales of whole matrices to the sum (torch 2.11 to 2.13).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.kernels.quantise.blocks import Quantised
from moefold.kernels.scaled.emulated import Emulated, ProductSpec
from moefold.kernels.scaled.operands import contiguous_codes, pad, swizzled

MIN_CAPABILITY = {"fp8_tensor": (8, 9), "fp8_block": (9, 0), "mxfp8": (10, 0), "nvfp4": (10, 0)}
"""Lowest compute capability of NVIDIA GPUs with products of a kind."""


class ScaledMm(Emulated):
    """``scaled_mm``, one call per run."""

    name = "scaled_mm"
    remedy = "Run on an NVIDIA GPU of sm_89 or newer"

    def why_unavailable(self, device: torch.device) -> str:
        """Return why a device is not supported, such as ROCm with a_args other FP8 dtypes."""
        if device.type not in ("cuda", "cpu"):
            return f"it runs on NVIDIA GPUs and CPUs, not on {device.type}"
        return "it uses other FP8 formats on ROCm" if torch.version.hip else ""

    def why_unsupported(self, spec: ProductSpec) -> str:
        """Return why the device does not support a product."""
        if spec.device.type == "cpu":
            return "" if spec.kind == "fp8_tensor" else f"it does not support {spec.kind} on CPUs"
        capability = torch.cuda.get_device_capability(spec.device)
        last = MIN_CAPABILITY["fp8_block"] if spec.kind == "fp8_block" else capability
        if MIN_CAPABILITY[spec.kind] <= capability <= last:
            return ""
        return f"it does not support {spec.kind} on sm_{capability[0]}{capability[1]}"

    def multiply(self, a_NK: Quantised, b_KM: Quantised, dtype: torch.dtype) -> Tensor:
        """Return ``a @ b`` in ``dtype``, with the device's accumulation."""
        (a, *a_args) = _operand(a_NK)
        (b, *b_args) = _operand(b_KM.mT)
        y_NM = F.scaled_mm(
            a,
            b.mT,
            scale_a=a_args[0],
            scale_recipe_a=a_args[1],
            swizzle_a=a_args[2],
            scale_b=b_args[0],
            scale_recipe_b=b_args[1],
            swizzle_b=b_args[2],
            output_dtype=dtype,
        )
        return y_NM[: a_NK.shape[0], : b_KM.shape[1]]


def _operand(x_RK: Quantised) -> tuple[Any, ...]:
    """Return codes, scales, and the scaling recipes and swizzles of these."""
    scaling = F.ScalingType
    swizzle = F.SwizzleType
    form = x_RK.format
    codes, scales = contiguous_codes(x_RK)
    if form.kind == "fp8_tensor":
        return pad(codes, 16, 16), [scales], [scaling.TensorWise], [swizzle.NO_SWIZZLE]
    if form.kind == "fp8_block":
        codes = pad(codes, 128, 128)
        if form.rows == 1:
            of_rows = pad(scales, 128, 1).mT.contiguous().mT
            return codes, [of_rows], [scaling.BlockWise1x128], [swizzle.NO_SWIZZLE]
        of_blocks = pad(scales, 1, 4).contiguous().mT
        return codes, [of_blocks], [scaling.BlockWise128x128], [swizzle.NO_SWIZZLE]
    if form.kind == "mxfp8":
        args = [swizzled(scales)], [scaling.BlockWise1x32], [swizzle.SWIZZLE_32_4_4]
        return pad(codes, 16, 32), *args
    assert x_RK.matrix_scale is not None
    pairs = pad(codes, 16, 16).view(torch.float4_e2m1fn_x2)
    both_scales = [swizzled(scales), x_RK.matrix_scale.flatten()]
    recipes = [scaling.BlockWise1x16, scaling.TensorWise]
    return pairs, both_scales, recipes, [swizzle.SWIZZLE_32_4_4, swizzle.NO_SWIZZLE]
