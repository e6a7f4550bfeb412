#!/usr/bin/env bash
# The Trainer decays norms, attention sinks and decay rates whose names do not sound like it.
#
# Versions: transformers 5.24.0 (accelerate 1.15.0), torch 2.13.0 (CPU).
#
# Input: small models of five families; the optimizer that Trainer makes with `weight_decay=0.1`, and one step
#   with gradients of zero, which moves just what is decayed.
# Expected: matrices are decayed, vectors are not: TrainingArguments excepts biases and LayerNorm weights,
#   get_decay_parameter_names says it goes by type and by variations of "norm".
# Seen: the type is torch.nn.LayerNorm alone, which no family here uses; the rest is the name. Nemotron-H's
#   last norm, `norm_f`, is decayed as the only one of its norms. So are the attention sinks of gpt-oss and
#   MiMo, the `A_log` of Qwen3-Next's delta nets and Nemotron-H's Mamba layers, and Mamba's `D`; of the
#   same layers `dt_bias` is not. qwen3_moe has no such vector, and all of its vectors stay.
# For users: decay pulls the norm before the head towards 0, sinks towards a logit of 0 and the rates
#   exp(A_log) towards 1, in some families and not in others. Pass an optimizer with groups of your own.
#
# Exit status: 0 while this is so, 1 when it is not.
source "$(dirname "$0")/install.sh"
install env torch==2.13.0 transformers==5.24.0 accelerate==1.15.0
cat > show.py <<'P'
import re

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

# What each family needs besides the common sizes, and its vectors that are decayed.
FAMILIES = {
    "qwen3_moe": ({}, set()),
    "gpt_oss": ({}, {"self_attn.sinks"}),
    "mimo_v2_flash": ({"v_head_dim": 16}, {"self_attn.sinks"}),
    "qwen3_next": ({}, {"linear_attn.A_log"}),
    "nemotron_h": ({"mamba_num_heads": 2, "mamba_head_dim": 32}, {"mixer.A_log", "mixer.D", "norm_f.weight"}),
}
as_stated = True
for family, (sizes, due) in FAMILIES.items():
    config = AutoConfig.for_model(
        family,
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_local_experts=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        pad_token_id=0,
        **sizes,
    )
    model = AutoModelForCausalLM.from_config(config).float()
    settings = TrainingArguments("run", weight_decay=0.1, learning_rate=0.1, report_to=[], use_cpu=True)
    optimizer = Trainer(model=model, args=settings).create_optimizer()
    before = {}
    for name, p in model.named_parameters():
        torch.nn.init.ones_(p)
        p.grad = torch.zeros_like(p)
        before[name] = p.detach().clone()
    optimizer.step()
    vectors = {name: p for name, p in model.named_parameters() if p.ndim == 1}
    moved = {name for name, p in vectors.items() if not torch.equal(p, before[name])}
    kinds = {re.sub(r"model\.(layers\.\d+\.)?", "", name) for name in moved}
    norms = sum("norm" in name for name in vectors)
    print(f"{family}: {len(vectors)} vectors, {norms} of norms;", end=" ")
    print(f"decayed: {', '.join(sorted(kinds)) or 'none'}")
    as_stated &= kinds == due
raise SystemExit(0 if as_stated else 1)
P
env/bin/python -W ignore show.py 2>log || { status=$?; tail -5 log; exit $status; }
