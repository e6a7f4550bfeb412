"""``fp8_block`` products by DeepGEMM (2.1 and newer): dense, and all groups of rows in one call.

Rows of a group are padded to multiples of 128; padding is not multiplied. DeepGEMM arranges scales
in columns itself; on Blackwell it packs them as exponents, which rounds fp32 scales.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from moefold.kernels.quantise.blocks import Quantised
from moefold.kernels.scaled.emulated import Emulated, Use
from moefold.kernels.scaled.operands import Joined, along, fill

MODULE = "deep_gemm"
DEVICE = "cuda"
"""Device type on which it runs."""
BLOCK = 128


class DeepGemm(Emulated):
    """DeepSeek's kernels, which accumulate in fp32 after every 128 elements of the summed dim."""

    name = "deep_gemm"
    remedy = "Install 2.1 or newer from github.com/deepseek-ai/DeepGEMM"

    def missing(self, device: torch.device) -> str:
        """Return why the package cannot be used on a device; imports it."""
        if device.type != DEVICE:
            return f"it runs on NVIDIA GPUs, not on {device.type}"
        try:
            module = import_module(MODULE)
        except Exception as error:  # imports of CUDA packages fail with errors of any type
            return str(error).partition("\n")[0] or f"its import fails with {type(error).__name__}"
        names = ("fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous")
        return ", ".join(f"no {name}" for name in names if getattr(module, name, None) is None)

    def why_not(self, use: Use) -> str:
        """Return why a product is not supported, first by its kind, then by installation."""
        if use.kind != "fp8_block":
            return f"it does not support {use.kind}"
        if use.dtype != torch.bfloat16:
            return "it supports bf16 rows only"
        if why := self.missing(use.device):
            return why
        packs = use.device.type == "cuda" and torch.cuda.get_device_capability(use.device)[0] > 9
        return "it rounds scales to powers of two here" if packs and use.scales == "fp32" else ""

    def times(self, a_NK: Quantised, b_KM: Quantised, dtype: torch.dtype) -> Tensor:
        """Return ``a @ b``; weight gradients, of which both operands are rows, are fp32 first."""
        library: Any = import_module(MODULE)
        (a, its), (b, others) = _whole(a_NK), _whole(b_KM.mT)
        by_rows = b_KM.format.rows == 1
        y_NM = a.new_zeros(len(a), len(b), dtype=torch.float32 if by_rows else torch.bfloat16)
        given = {"c": y_NM, "recipe": (1, 1, BLOCK)} if by_rows else {}
        library.fp8_gemm_nt((a, its), (b, others), y_NM, **given)
        return y_NM[: a_NK.shape[0], : b_KM.shape[1]].to(dtype)

    def each(
        self,
        made: Sequence[Quantised],
        weight_KM: Quantised,
        groups: list[int],
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """Return each run's product with its matrix."""
        if len(weight_KM.shape) == 2 or not sum(one.shape[0] for one in made):
            return super().each(made, weight_KM, groups, dtype)
        library: Any = import_module(MODULE)
        joined, (b_EMK, others) = Joined.of(made, groups, BLOCK), _whole(weight_KM.mT)
        a_RK = fill(joined.codes, 1, BLOCK)
        named = torch.tensor(joined.groups, device=a_RK.device)
        sizes = torch.tensor(joined.rows, device=a_RK.device)
        group_R = named.repeat_interleave(sizes, output_size=len(a_RK)).to(torch.int32)
        y_RM = a_RK.new_empty(len(a_RK), b_EMK.shape[1], dtype=torch.bfloat16)
        library.m_grouped_fp8_gemm_nt_contiguous(
            (a_RK, joined.scales), (b_EMK, others), y_RM, group_R
        )
        return joined.parts(y_RM[:, : weight_KM.shape[-1]].to(dtype))


def _whole(x_RK: Quantised) -> tuple[Tensor, Tensor]:
    """Return codes padded to whole blocks, and their scales."""
    codes, scales = along(x_RK)
    codes = fill(codes, BLOCK, BLOCK)
    return codes, (fill(scales, BLOCK, 1) if x_RK.format.rows == 1 else scales).contiguous()
