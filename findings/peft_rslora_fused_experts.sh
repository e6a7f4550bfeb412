#!/usr/bin/env bash
# rsLoRA adapters of experts are applied sqrt(2) times too strongly once gate and up are fused.
#
# Versions: peft 0.21.2, transformers 5.24.0, torch 2.13.0 (CPU).
#
# Input: an adapter with one linear layer per expert, as PEFT saved it for models of transformers 4,
#   rank 4, alpha 8, `use_rslora: true`, loaded onto a qwen3_moe model of transformers 5.
# Expected: each weight changes by alpha / sqrt(rank) * B A = 4 B A, the definition of rsLoRA in PEFT's
#   reference of LoraConfig. Loading in a newer release should not change what the adapter does; the
#   converter's own comment says that it keeps the scale of each branch.
# Seen: down changes by 4 B A, but gate and up by 4 sqrt(2) B A. The converter fuses gate and up, of
#   rank 4 each, to one adapter of rank 8 and doubles alpha to 16. This keeps alpha / rank, but
#   16 / sqrt(8) is sqrt(2) times 8 / sqrt(4). The only message is a warning that the patterns of rank and
#   alpha for gate_up_proj matched nothing and were ignored, which is not so. Without rsLoRA all is right.
# For users: such an adapter, evaluated, merged or trained on with these releases, is another one than
#   was trained: gate and up have 1.41 times their scale relative to every other weight.
#
# Exit status: 0 while this is so, 1 when it is not.
source "$(dirname "$0")/install.sh"
install env torch==2.13.0 transformers==5.24.0 peft==0.21.2
cat > show.py <<'P'
import json
import math
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

RANK, ALPHA, EXPERTS, HIDDEN, WIDTH = 4, 8, 4, 16, 8
SIZES = {"gate_proj": (WIDTH, HIDDEN), "up_proj": (WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}


def base():
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
    )
    return Qwen3MoeForCausalLM(config).double()


def adapter(folder, rslora):
    """Save an adapter with one linear layer per expert; return its products B A."""
    torch.manual_seed(1)
    tensors, products = {}, {}
    for name, (rows, columns) in SIZES.items():
        for e in range(EXPERTS):
            at = f"base_model.model.model.layers.0.mlp.experts.{e}.{name}"
            a, b = torch.randn(RANK, columns), torch.randn(rows, RANK)
            tensors[f"{at}.lora_A.weight"] = a
            tensors[f"{at}.lora_B.weight"] = b
            products[name, e] = b.double() @ a.double()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "use_rslora": rslora,
        "target_modules": list(SIZES),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return {name: torch.stack([products[name, e] for e in range(EXPERTS)]) for name in SIZES}


def factor(change, product):
    """Return s where change = s * product, after a check that there is one."""
    s = ((change * product).sum() / product.square().sum()).item()
    assert (change - s * product).abs().max() < 1e-9
    return s


def scales(rslora):
    folder = Path(f"adapter-{rslora}")
    products = adapter(folder, rslora)
    model = base()
    experts = model.model.layers[0].mlp.experts
    before = {n: getattr(experts, n).detach().clone() for n in ("gate_up_proj", "down_proj")}
    merged = PeftModel.from_pretrained(model, folder).merge_and_unload()
    experts = merged.model.layers[0].mlp.experts
    after = {n: getattr(experts, n).detach() for n in before}
    gate, up = (after["gate_up_proj"] - before["gate_up_proj"]).chunk(2, dim=1)
    changes = {"gate_proj": gate, "up_proj": up, "down_proj": after["down_proj"] - before["down_proj"]}
    return {name: factor(changes[name], products[name]) for name in SIZES}


as_stated = True
for rslora in (False, True):
    due = ALPHA / (math.sqrt(RANK) if rslora else RANK)
    for name, scale in scales(rslora).items():
        print(f"rslora={rslora!s:5} {name:9} scale due {due:.4f}, applied {scale:.4f}, ratio {scale / due:.4f}")
        wrong = rslora and name != "down_proj"
        as_stated &= abs(scale / due - (math.sqrt(2) if wrong else 1)) < 1e-6
raise SystemExit(0 if as_stated else 1)
P
env/bin/python -W ignore show.py
