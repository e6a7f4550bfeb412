#!/usr/bin/env bash
# FP8 weights whose last block is smaller are dequantised with the wrong scales, or not at all.
#
# Versions: transformers 5.24.0, torch 2.13.0 (CPU; accelerate 1.15.0).
#
# Input: folders of small qwen3_moe and deepseek_v3 models with FP8 weights in DeepSeek's format: blocks
#   of 128 x 128, `weight_scale_inv` of ceil(rows / 128) x ceil(columns / 128), `weight_block_size` in
#   config.json. They are loaded with FineGrainedFP8Config(dequantize=True).
# Expected: row r of a matrix has the scale of block row r // 128, whatever the number of rows: this is
#   how the format is defined (DeepSeek-V3's own conversion) and config.json says 128.
# Seen: experts 128 wide are exact. Experts 192 wide (blocks of 128 and 64 rows) load without a word, and
#   rows 96 to 127 of gate and up, likewise columns 96 to 127 of down, have the second block's scale: the
#   size of a block is taken as rows / number of scales = 96. A matrix of 576 rows, as attention's
#   kv_a_proj_with_mqa in DeepSeek-V3 with its 512 + 64, is refused, as 576 is no multiple of its 5 scales.
# For users: sizes that are no multiple of 128 give a model that answers, but wrongly; compare one
#   matrix with code * scale before you train or convert such a folder.
#
# Exit status: 0 while this is so, 1 when it is not.
source "$(dirname "$0")/install.sh"
install env torch==2.13.0 transformers==5.24.0 accelerate==1.15.0
cat > show.py <<'P'
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, FineGrainedFP8Config, Qwen3MoeConfig

BLOCK, EXPERTS, HIDDEN = 128, 2, 128
COMMON = {
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 1,
    "dtype": "float32",
}


def qwen3(width):
    return Qwen3MoeConfig(**COMMON, moe_intermediate_size=width, head_dim=64, num_experts=EXPERTS)


def deepseek():
    return DeepseekV3Config(
        **COMMON,
        moe_intermediate_size=128,
        n_routed_experts=EXPERTS,
        n_group=1,
        topk_group=1,
        q_lora_rank=128,
        kv_lora_rank=512,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
    )


def quantised(config, folder):
    """Save a model in FP8; return its weights as code * scale, block by block."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    file = folder / "model.safetensors"
    stored, due = {}, {}
    for name, weight in load_file(file).items():
        if "_proj" not in name:
            stored[name] = weight
            continue
        rows, columns = weight.shape
        codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        scales = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
        due[name] = torch.empty(rows, columns)
        for i, j in torch.cartesian_prod(*map(torch.arange, scales.shape)).view(-1, 2).tolist():
            box = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            block = weight[box] * 8 ** (i + j)
            scales[i, j] = block.abs().max() / 448
            codes[box] = (block / scales[i, j]).to(codes.dtype)
            due[name][box] = codes[box].float() * scales[i, j]
        stored[name] = codes
        stored[f"{name}_scale_inv"] = scales
    save_file(stored, file, metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    described["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    (folder / "config.json").write_text(json.dumps(described))
    return due


def load(folder):
    how = FineGrainedFP8Config(dequantize=True, weight_block_size=(BLOCK, BLOCK))
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=how, dtype=torch.float32)


def wrong(got, due):
    """Return the rows, then the columns, in which two matrices differ by more than rounding."""
    bad = (got - due).abs() > 1e-5 * due.abs().max()
    return bad.any(1).nonzero().flatten().tolist(), bad.any(0).nonzero().flatten().tolist()


def experts(width):
    folder = Path(f"qwen3-{width}")
    due = quantised(qwen3(width), folder)
    layer = load(folder).model.layers[0].mlp.experts
    at = "model.layers.0.mlp.experts.0."
    gate = wrong(layer.gate_up_proj[0, :width].detach(), due[at + "gate_proj.weight"])[0]
    down = wrong(layer.down_proj[0].detach(), due[at + "down_proj.weight"])[1]
    for name, lines in (("rows of gate", gate), ("columns of down", down)):
        print(f"width {width}: wrong {name}: {f'{lines[0]} to {lines[-1]}' if lines else 'none'}")
    return gate, down


as_stated = experts(128) == ([], [])
as_stated &= experts(192) == (list(range(96, 128)), list(range(96, 128)))
quantised(deepseek(), Path("deepseek"))
try:
    load(Path("deepseek"))
except RuntimeError as error:
    print(f"576 rows: RuntimeError: {str(error).splitlines()[0]}")
else:
    print("576 rows: loaded")
    as_stated = False
raise SystemExit(0 if as_stated else 1)
P
env/bin/python -W ignore show.py 2>log || { status=$?; tail -5 log; exit $status; }
grep -m 1 -o "not divisible by scale grid.*" log || true
