#!/usr/bin/env bash
# mlx-lm runs mixtures without settings of their config.json that it has fields for, and says nothing.
#
# Versions: mlx-lm 0.32.2, mlx 0.32.4 (CPU); transformers 5.24.0 and torch 2.13.0 for the logits due.
#
# Input: folders of small models whose config.json has one of these settings, in the keys of the models on
#   the hub: `rope_scaling` in qwen3_moe (YaRN, as the cards of Qwen3's mixtures say to write it for long
#   texts) and qwen2_moe (linear), `norm_topk_prob: true` in qwen2_moe, `clip_qkv` in olmoe.
# Expected: the logits of transformers, or a refusal. mlx-lm refuses some: qwen2_moe says of a YaRN that
#   it supports linear scaling alone, and `norm_topk_prob` works in its qwen3_moe and olmoe.
# Seen: the logits are those of the same weights without the setting. The two rope_scaling are fields of the
#   arguments that no line uses (linear passes the check and is dropped then); the others are not read.
# For users: a long context that was asked for is not there, and weights of experts that add up to 1 in
#   training do not when served. Compare the logits of one text before you serve or quantise a model.
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
from transformers import AutoModelForCausalLM, OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig

MIXTURE = COMMON | {"num_experts": 4, "num_experts_per_tok": 2}
QWEN2 = MIXTURE | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}
QWEN3 = MIXTURE | {"moe_intermediate_size": 16, "head_dim": 8}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "type": "linear", "factor": 4.0}
CASES = [
    (Qwen3MoeConfig, QWEN3, "rope_scaling", YARN),
    (Qwen2MoeConfig, QWEN2, "rope_scaling", LINEAR),
    (Qwen2MoeConfig, QWEN2, "norm_topk_prob", True),
    (OlmoeConfig, MIXTURE, "clip_qkv", 0.5),
    (OlmoeConfig, MIXTURE, "norm_topk_prob", True),  # this one is read
]


def model(kind, fields):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(kind(**fields), dtype=torch.float32).eval()


@torch.no_grad()
def logits(kind, fields):
    return model(kind, fields)(ids).logits[0].numpy()


def peer(kind, fields, folder):
    """Return mlx-lm's logits for the model, with the keys in config.json that the hub's models have."""
    model(kind, fields).save_pretrained(folder)
    described = json.loads((folder / "config.json").read_text())
    theta = described.pop("rope_parameters")["rope_theta"]
    described |= fields | {"rope_theta": theta}
    (folder / "config.json").write_text(json.dumps(described))
    return logits_of(folder)


as_stated = True
for i, (kind, fields, name, value) in enumerate(CASES):
    got = peer(kind, fields | {name: value}, Path(f"model-{i}"))
    due, without = logits(kind, fields | {name: value}), logits(kind, fields)
    off, same = np.abs(got - due).max(), np.abs(got - without).max()
    family = kind.model_type
    print(f"{family:9} {name:14} largest difference {off:.1e}; from a model without it {same:.1e}")
    wrong = (kind, name) != (OlmoeConfig, "norm_topk_prob")
    as_stated &= bool(same < 1e-3 < 0.1 < off) if wrong else bool(off < 1e-3 < 0.1 < same)
raise SystemExit(0 if as_stated else 1)
P
TQDM_DISABLE=1 PYTHONPATH=$here env/bin/python -W ignore show.py 2>log || { status=$?; tail -5 log; exit $status; }
