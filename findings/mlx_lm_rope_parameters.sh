#!/usr/bin/env bash
# mlx-lm drops the rotary settings of folders saved by transformers 5, in some families without a word.
#
# Versions: mlx-lm 0.32.2, mlx 0.32.4 (CPU); transformers 5.24.0, torch 2.13.0.
#
# Input: small models saved with save_pretrained of transformers 5.24: deepseek_v3 with YaRN as DeepSeek-V3
#   has it, mixtral with rope_theta 1e4, and qwen3_moe.
# Expected: the logits of transformers, or an error in each family. config.json has `rope_parameters` in
#   place of `rope_theta` and `rope_scaling`; mlx-lm's qwen3 and a dozen other models read that name.
# Seen: deepseek_v3 gives the logits of the same weights without YaRN, and mixtral those of rope_theta 1e6,
#   the default of its arguments; qwen3_moe is refused, as `rope_theta` is missing. With the older names
#   written into config.json beside the new one, deepseek_v3 and mixtral are right.
# For users: a model fine-tuned with transformers 5 answers short prompts plausibly and loses its long
#   context, though the model it started from runs well. Look for `rope_parameters` in config.json.
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
from transformers import AutoModelForCausalLM, DeepseekV3Config, MixtralConfig, Qwen3MoeConfig

SIZES = COMMON | {"num_key_value_heads": 4, "num_experts_per_tok": 2, "eos_token_id": 1}
DEEPSEEK = SIZES | {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
PLAIN = {"rope_type": "default"}
# Each family's configuration, its fields, the rotary settings, and those that mlx-lm takes instead.
CASES = {
    "deepseek_v3": (DeepseekV3Config, DEEPSEEK, YARN | {"rope_theta": 1e4}, PLAIN | {"rope_theta": 1e4}),
    "mixtral": (MixtralConfig, SIZES, PLAIN | {"rope_theta": 1e4}, PLAIN | {"rope_theta": 1e6}),
}


def model(kind, fields, rope):
    torch.manual_seed(0)
    config = kind(**fields, rope_parameters=dict(rope))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@torch.no_grad()
def logits(*described):
    return model(*described)(ids).logits[0].numpy()


def with_older_names(folder):
    described = json.loads((folder / "config.json").read_text())
    rope = described["rope_parameters"]
    described["rope_theta"] = rope["rope_theta"]
    described["rope_scaling"] = rope if rope["rope_type"] == "yarn" else None
    (folder / "config.json").write_text(json.dumps(described))


as_stated = True
for family, (kind, fields, rope, instead) in CASES.items():
    folder = Path(family)
    model(kind, fields, rope).save_pretrained(folder)
    due, other = logits(kind, fields, rope), logits(kind, fields, instead)
    got = logits_of(folder)
    with_older_names(folder)
    mended = logits_of(folder)
    off, same, after = (float(np.abs(a - b).max()) for a, b in ((got, due), (got, other), (mended, due)))
    print(f"{family}: differs by {off:.1e}, from a model with {instead['rope_type']} positions and theta", end="")
    print(f" {instead['rope_theta']:g} by {same:.1e}; with the older names by {after:.1e}")
    as_stated &= max(same, after) < 1e-3 < 0.1 < off
qwen = SIZES | {"moe_intermediate_size": 16, "num_experts": 4, "head_dim": 8}
model(Qwen3MoeConfig, qwen, PLAIN | {"rope_theta": 1e4}).save_pretrained("qwen3_moe")
try:
    logits_of(Path("qwen3_moe"))
except TypeError as error:
    print(f"qwen3_moe: TypeError: {error}")
    as_stated &= "rope_theta" in str(error)
else:
    as_stated = False
raise SystemExit(0 if as_stated else 1)
P
TQDM_DISABLE=1 PYTHONPATH=$here env/bin/python -W ignore show.py 2>log || { status=$?; tail -5 log; exit $status; }
