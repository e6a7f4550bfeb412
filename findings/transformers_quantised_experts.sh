#!/usr/bin/env bash
# Quantised loading of a mixture leaves its experts as they are.
#
# Versions: transformers 5.24.0 (accelerate 1.15.0) with bitsandbytes 0.50.2, optimum-quanto 0.2.7 and
#   torchao 0.18.0; torch 2.13.0 (CPU).
#
# Input: a small qwen3_moe model in bfloat16, nearly all of it experts, loaded with
#   BitsAndBytesConfig(load_in_4bit=True), QuantoConfig(weights="int8") or TorchAoConfig(Int8WeightOnlyConfig()).
# Expected: a model of about a quarter of the bytes, or half; releases 4 of transformers had a linear layer
#   per expert and quantised it. Or a refusal, or at least a warning.
# Seen: attention is quantised, the experts stay in bfloat16 and the model nearly as large as it was. Each
#   tool replaces torch.nn.Linear; the stacked experts of release 5 are parameters of another class.
#   No message mentions them (bitsandbytes has issue 1849 of this).
# For users: a mixture that should fit in memory does not, and an evaluation of "4 bit" evaluates
#   experts of 16 bit. Look at the dtype of the experts before you believe the setting.
#
# Exit status: 0 while this is so, 1 when it is not.
source "$(dirname "$0")/install.sh"
install env torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 bitsandbytes==0.50.2 optimum-quanto==0.2.7 \
    torchao==0.18.0
cat > show.py <<'P'
import torch
from torchao.quantization import Int8WeightOnlyConfig
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    QuantoConfig,
    Qwen3MoeConfig,
    TorchAoConfig,
)

CONFIG = Qwen3MoeConfig(
    vocab_size=64,
    hidden_size=128,
    moe_intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=64,
    num_experts=16,
    num_experts_per_tok=2,
)
HOW = {
    "as stored": None,
    "bitsandbytes, 4 bit": BitsAndBytesConfig(load_in_4bit=True),
    "quanto, 8 bit": QuantoConfig(weights="int8"),
    "torchao, 8 bit": TorchAoConfig(Int8WeightOnlyConfig()),
}
torch.manual_seed(0)
AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16).save_pretrained("model")
as_stated, stored = True, None
for name, how in HOW.items():
    model = AutoModelForCausalLM.from_pretrained(
        "model", quantization_config=how, device_map="cpu", dtype=torch.bfloat16
    )
    layer = model.model.layers[0]
    experts = layer.mlp.experts.gate_up_proj
    plain = type(experts) is torch.nn.Parameter and experts.dtype == torch.bfloat16
    query = layer.self_attn.q_proj
    kept = type(query) is torch.nn.Linear and type(query.weight) is torch.nn.Parameter
    footprint = model.get_memory_footprint()
    stored = stored or footprint
    print(f"{name}: {footprint} bytes, {footprint / stored:.0%}; attention", end=" ")
    print(f"{'as stored' if kept else 'quantised'}, experts {'as stored' if plain else 'quantised'}")
    as_stated &= plain and kept == (how is None) and footprint > 0.85 * stored
raise SystemExit(0 if as_stated else 1)
P
env/bin/python -W default show.py 2>log || { status=$?; tail -5 log; exit $status; }
! grep -i expert log
