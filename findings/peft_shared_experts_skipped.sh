#!/usr/bin/env bash
# Which feed-forwards of a mixture "all-linear" adapts depends on the model's family, and old adapters
# of shared experts and dense layers are loaded as nothing.
#
# Versions: peft 0.21.2, transformers 5.24.0, torch 2.13.0 (CPU).
#
# Input: (1) LoraConfig(target_modules="all-linear") on small models of deepseek_v3 and qwen2_moe, each
#   with a dense first layer and, in the second, routed experts and a shared one.
#   (2) An adapter of gate_proj, up_proj and down_proj of such a deepseek_v3 model, with one linear layer
#   per expert, as PEFT saved it for models of transformers 4.
# Expected: (1) PEFT's reference of LoraConfig says that "all-linear" chooses all linear modules but the
#   output layer; dense and shared feed-forwards are torch.nn.Linear in both families. That routed
#   experts, now stacked parameters, may be an exception would be the same in both. (2) An adapter
#   changes every weight that it has matrices for, or is refused.
# Seen: (1) In deepseek_v3 the routed experts are adapted, but neither the dense layer nor the shared
#   expert; in qwen2_moe it is the other way round. The only message is a warning, in deepseek_v3, that
#   patterns of rank and alpha for gate_up_proj, which the user has not set, matched nothing. (2) Merging
#   leaves dense layer and shared expert bit for bit as they were: their matrices are dropped.
# For users: a fine-tune "of all linear layers" leaves out whole feed-forwards, others in each family,
#   and an old adapter loses the part that every token passes through. Look at the adapter's parameters
#   before training; after loading, compare a merged weight with the base's.
#
# Exit status: 0 while this is so, 1 when it is not.
source "$(dirname "$0")/install.sh"
install env torch==2.13.0 transformers==5.24.0 peft==0.21.2
cat > show.py <<'P'
import json
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen2MoeConfig

HIDDEN, WIDTH, DENSE, EXPERTS, RANK = 16, 8, 24, 4, 2
COMMON = {
    "vocab_size": 32,
    "hidden_size": HIDDEN,
    "intermediate_size": DENSE,
    "moe_intermediate_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
CONFIGS = {
    "deepseek_v3": DeepseekV3Config(
        **COMMON,
        n_routed_experts=EXPERTS,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=4,
        qk_rope_head_dim=4,
        v_head_dim=4,
    ),
    "qwen2_moe": Qwen2MoeConfig(
        **COMMON, num_experts=EXPERTS, shared_expert_intermediate_size=WIDTH, mlp_only_layers=[0]
    ),
}
PLACES = {"dense": "layers.0.mlp.", "routed": ".experts.", "shared": ".shared_expert"}
WEIGHTS = ("gate_proj", "up_proj", "down_proj")


def fresh(family):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[family])


def adapted(family):
    """Return which kinds of feed-forward have an adapter."""
    model = get_peft_model(fresh(family), LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    names = [n for n, _ in model.named_parameters() if "lora_A" in n]
    return {place for place, part in PLACES.items() if any(part in n for n in names)}


def old_adapter(folder):
    places = {"layers.0.mlp": DENSE, "layers.1.mlp.shared_experts": WIDTH}
    places |= {f"layers.1.mlp.experts.{e}": WIDTH for e in range(EXPERTS)}
    tensors = {}
    for place, width in places.items():
        for weight in WEIGHTS:
            rows, columns = (HIDDEN, width) if weight == "down_proj" else (width, HIDDEN)
            at = f"base_model.model.model.{place}.{weight}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(RANK, columns)
            tensors[f"{at}.lora_B.weight"] = torch.randn(rows, RANK)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 4,
        "target_modules": list(WEIGHTS),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def changed():
    """Return which kinds of feed-forward differ from the base after an old adapter is merged."""
    old_adapter(Path("adapter"))
    base = fresh("deepseek_v3").state_dict()
    merged = PeftModel.from_pretrained(fresh("deepseek_v3"), "adapter").merge_and_unload().state_dict()
    names = [n for n, w in merged.items() if not torch.equal(w, base[n])]
    return {place for place, part in PLACES.items() if any(part in n for n in names)}


seen = {f"all-linear on {family}": adapted(family) for family in CONFIGS}
seen["old adapter of all three on deepseek_v3"] = changed()
for what, places in seen.items():
    print(f"{what}: {', '.join(sorted(places))} (of dense, routed, shared)")
stated = [{"routed"}, {"dense", "shared"}, {"routed"}]
raise SystemExit(0 if list(seen.values()) == stated else 1)
P
env/bin/python -W default show.py
