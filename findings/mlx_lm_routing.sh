#!/usr/bin/env bash
# mlx-lm routes ERNIE 4.5 without its trained selection bias, and Jamba with other weights of experts.
#
# Versions: mlx-lm 0.32.2, mlx 0.32.4 (CPU); transformers 5.24.0 and torch 2.13.0 for the logits due.
#
# Input: small models of ernie4_5_moe, with a selection bias per expert that is not zero
#   (`moe_statics.e_score_correction_bias`, which ERNIE-4.5's mixtures are trained with), and of jamba.
# Expected: the logits of transformers. ERNIE chooses the experts with the largest p + bias and weighs
#   them by p, as mlx-lm does with the bias of that name in its deepseek_v3, dots1 and glm4_moe. Jamba
#   weighs its chosen experts by the softmax over all experts, so that the weights add up to less than 1.
# Seen: mlx-lm's loader of ernie4_5_moe drops the bias: the logits are those of a bias of zero. Its jamba
#   takes the softmax over the chosen experts alone: the logits are those of weights that add up to 1.
#   Both load and answer without a message.
# For users: ERNIE's tokens go to other experts than in training, and Jamba's mixtures add too much to
#   the residual stream: with 2 of 16 experts and near even routing up to 8 times. Text stays fluent, so
#   compare logits rather than answers.
#
# Exit status: 0 while this is so, 1 when it is not.
source "$(dirname "$0")/install.sh"
install env torch==2.13.0 transformers==5.24.0 mlx-lm==0.32.2 "mlx[cpu]==0.32.4"
cat > show.py <<'P'
import json
from pathlib import Path

import numpy as np
import torch
from mlx_peer import COMMON, ids, logits_of
from transformers import AutoModelForCausalLM, Ernie4_5_MoeConfig, JambaConfig

ERNIE = Ernie4_5_MoeConfig(
    **COMMON,
    moe_intermediate_size=16,
    moe_num_experts=8,
    moe_k=2,
    moe_num_shared_experts=1,
    moe_layer_start_index=1,
    moe_layer_end_index=1,
    moe_layer_interval=1,
)
JAMBA = JambaConfig(
    **COMMON,
    num_experts=4,
    num_experts_per_tok=2,
    attn_layer_offset=0,
    attn_layer_period=2,
    mamba_d_state=8,
)


def biases(model):
    return [b for name, b in model.named_parameters() if name.endswith("e_score_correction_bias")]


def fresh(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for bias in biases(model):
        bias.data = torch.linspace(-0.5, 0.5, bias.numel()).view_as(bias)
    return model


@torch.no_grad()
def logits(model):
    return model(ids).logits[0].numpy()


def without_bias(model):
    for bias in biases(model):
        bias.data.zero_()


def normalised(model):
    """Let the weights of each token's experts add up to 1."""

    def route(_module, _inputs, output):
        scores, weights, chosen = output
        return scores, weights / weights.sum(-1, keepdim=True), chosen

    for name, module in model.named_modules():
        if name.endswith("feed_forward.router"):
            module.register_forward_hook(route)


def peer(model, folder):
    """Return mlx-lm's logits for the model, with the keys in config.json that the hub's models have."""
    model.save_pretrained(folder)
    described = json.loads((folder / "config.json").read_text())
    described["rope_theta"] = (described.get("rope_parameters") or {}).get("rope_theta")
    (folder / "config.json").write_text(json.dumps(described))
    return logits_of(folder)


as_stated = True
for config, change in ((ERNIE, without_bias), (JAMBA, normalised)):
    model = fresh(config)
    got, due = peer(model, Path(config.model_type)), logits(model)
    change(model)
    off, same = np.abs(got - due).max(), np.abs(got - logits(model)).max()
    print(f"{config.model_type}: differs by {off:.1e}; from the model changed ({change.__name__}) by {same:.1e}")
    as_stated &= bool(same < 1e-3 < 0.05 < off)
raise SystemExit(0 if as_stated else 1)
P
TQDM_DISABLE=1 PYTHONPATH=$here env/bin/python -W ignore show.py 2>log || { status=$?; tail -5 log; exit $status; }
