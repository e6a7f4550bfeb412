#!/usr/bin/env bash
# NVFP4 of torchao makes NaN of an expert whose weights are zero, and zero of inputs it saw none of.
#
# Versions: torchao 0.18.0, torch 2.13.0 (CPU).
#
# Input: `NVFP4WeightOnlyConfig()` on two linear layers, one of zeros (a down projection at its start, an
#   expert that was cut); a stack of experts with a scale for each, one of zeros; and the static recipe of
#   NVFP4DynamicActivationNVFP4WeightConfig (`step` "prepare", then "convert") where one of two experts
#   is chosen by no token of the calibration.
# Expected: zeros stay zeros, as they do without the second scale (`use_dynamic_per_tensor_scale=False`)
#   and in torchao's MX formats. For an expert without tokens a refusal, a warning, or no scale.
# Seen: the scale of a matrix is its largest magnitude over 2688, so 0; block scales are divided by it. Zero
#   weights become NaN, so that the layer's output does, for each input. The expert without tokens gets the
#   scale 0 for its inputs, by which any input is read as 0, and zeros as NaN. No message mentions either.
# For users: one such expert makes the logits of every token routed to it NaN, or is silently left out. Count
#   the tokens of each expert in a calibration, and look for NaN after dequantising.
#
# Exit status: 0 while this is so, 1 when it is not.
source "$(dirname "$0")/install.sh"
install env torch==2.13.0 numpy==2.4.6 torchao==0.18.0
cat > show.py <<'P'
import torch
from torch import nn
from torchao.prototype.mx_formats import NVFP4DynamicActivationNVFP4WeightConfig, NVFP4WeightOnlyConfig
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.quantization import quantize_

IN, OUT = 64, 32
torch.manual_seed(0)
x = torch.randn(16, IN, dtype=torch.bfloat16)


def linear(factor=1.0):
    layer = nn.Linear(IN, OUT, bias=False, dtype=torch.bfloat16)
    layer.weight.data *= factor
    return layer


def state(y):
    """Return what a tensor consists of."""
    if y.isnan().any():
        return "NaN" if y.isnan().all() else "some NaN"
    return "numbers" if y.any() else "zeros"


seen = {}
for scaled in (True, False):
    model = nn.ModuleList([linear(), linear(0.0)])
    quantize_(model, NVFP4WeightOnlyConfig(use_dynamic_per_tensor_scale=scaled))
    seen[f"outputs, scale of the matrix {scaled}"] = [state(layer(x)) for layer in model]

experts = torch.randn(3, OUT, IN, dtype=torch.bfloat16)
experts[1] = 0
scales = per_tensor_amax_to_scale(experts.abs().amax((1, 2), keepdim=True))
for name, stack in {
    "a scale for each": NVFP4Tensor.to_nvfp4(experts, per_tensor_scale=scales),
    "block scales alone": NVFP4Tensor.to_nvfp4(experts),
    "MXFP4": MXTensor.to_mx(experts, torch.float4_e2m1fn_x2, block_size=32),
}.items():
    seen[f"experts, {name}"] = [state(expert) for expert in stack.dequantize(torch.bfloat16)]

model = nn.ModuleList([linear(), linear()])
quantize_(model, NVFP4DynamicActivationNVFP4WeightConfig(step="prepare", use_triton_kernel=False))
model[0](x)
quantize_(model, NVFP4DynamicActivationNVFP4WeightConfig(step="convert", use_triton_kernel=False))
for name, rows in {"inputs": x, "inputs of zero": torch.zeros_like(x)}.items():
    scales = [layer.weight.act_per_tensor_scale for layer in model]
    read = [NVFP4Tensor.to_nvfp4(rows, per_tensor_scale=s).dequantize(torch.bfloat16) for s in scales]
    seen[f"{name}, as calibrated experts read them"] = [state(y) for y in read]

due = [
    ["numbers", "NaN"],
    ["numbers", "zeros"],
    ["numbers", "NaN", "numbers"],
    ["numbers", "zeros", "numbers"],
    ["numbers", "zeros", "numbers"],
    ["numbers", "zeros"],
    ["zeros", "NaN"],
]
for name, states in seen.items():
    print(f"{name}: {', '.join(states)}")
raise SystemExit(0 if list(seen.values()) == due else 1)
P
env/bin/python -W default show.py 2>log || { status=$?; tail -5 log; exit $status; }
! grep -iwE "nan|zeros?|calibrat\w*" log
