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
from moefold.kernels.scaled.emulated import Emulated, ProductSpec
from moefold.kernels.scaled.operands import PaddedGroups, contiguous_codes, pad

MODULE = "deep_gemm"
DEVICE = "cuda"
"""Device type on which it runs."""
BLOCK = 128


class DeepGemm(Emulated):
    """DeepSeek's kernels, which accumulate in fp32 after every 128 elements of the summed dim."""

    name = "deep_gemm"
    remedy = "Install 2.1 or newer from github.com/deepseek-ai/DeepGEMM"

    def why_unavailable(self, device: torch.device) -> str:
        """Return why the package cannot be used on a device; imports it."""
        if device.type != DEVICE:
            return f"it runs on NVIDIA GPUs, not on {device.type}"
        try:
            module = import_module(MODULE)
        except Exception as error:  # imports of CUDA packages fail with errors of any type
            return str(error).partition("\n")[0] or f"its import fails with {type(error).__name__}"
        names = ("fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous")
        return ", ".join(f"no {name}" for name in names if getattr(module, name, None) is None)

    def why_unsupported(self, spec: ProductSpec) -> str:
        """Return why a product is not supported, first by its kind, then by installation."""
        if spec.kind != "fp8_block":
            return f"it does not support {spec.kind}"
        if spec.dtype != torch.bfloat16:
            return "it supports bf16 rows only"
        if why := self.why_unavailable(spec.device):
            return why
        packs = spec.device.type == "cuda" and torch.cuda.get_device_capability(spec.device)[0] > 9
        return "it rounds scales to powers of two here" if packs and spec.scales == "fp32" else ""

    def multiply(self, a_NK: Quantised, b_KM: Quantised, dtype: torch.dtype) -> Tensor:
        """Return ``a @ b``; weight gradients, both of whose operands are rows, are fp32 first."""
        library: Any = import_module(MODULE)
        (a, a_scales) = _padded_operand(a_NK)
        (b, b_scales) = _padded_operand(b_KM.mT)
        by_rows = b_KM.format.rows == 1
        y_NM = a.new_zeros(len(a), len(b), dtype=torch.float32 if by_rows else torch.bfloat16)
        kwargs = {"c": y_NM, "recipe": (1, 1, BLOCK)} if by_rows else {}
        library.fp8_gemm_nt((a, a_scales), (b, b_scales), y_NM, **kwargs)
        return y_NM[: a_NK.shape[0], : b_KM.shape[1]].to(dtype)

    def multiply_runs(
        self,
        runs: Sequence[Quantised],
        weight_KM: Quantised,
        groups: list[int],
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """Return each run's product with its matrix."""
        if len(weight_KM.shape) == 2 or not sum(run.shape[0] for run in runs):
            return super().multiply_runs(runs, weight_KM, groups, dtype)
        library: Any = import_module(MODULE)
        padded = PaddedGroups.of(runs, groups, BLOCK)
        (b_EMK, b_scales) = _padded_operand(weight_KM.mT)
        a_RK = pad(padded.codes, 1, BLOCK)
        group_ids = torch.tensor(padded.groups, device=a_RK.device)
        sizes = torch.tensor(padded.rows, device=a_RK.device)
        group_R = group_ids.repeat_interleave(sizes, output_size=len(a_RK)).to(torch.int32)
        y_RM = a_RK.new_empty(len(a_RK), b_EMK.shape[1], dtype=torch.bfloat16)
        library.m_grouped_fp8_gemm_nt_contiguous(
            (a_RK, padded.scales), (b_EMK, b_scales), y_RM, group_R
        )
        return padded.split_runs(y_RM[:, : weight_KM.shape[-1]].to(dtype))


def _padded_operand(x_RK: Quantised) -> tuple[Tensor, Tensor]:
    """Return codes padded to whole blocks, and their scales."""
    codes, scales = contiguous_codes(x_RK)
    codes = pad(codes, BLOCK, BLOCK)
    return codes, (pad(scales, BLOCK, 1) if x_RK.format.rows == 1 else scales).contiguous()
