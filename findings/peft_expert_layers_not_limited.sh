#!/usr/bin/env bash
# An adapter limited to some layers is limited in its linear layers, and adapts the experts of all layers.
#
# Versions: peft 0.21.2, transformers 5.24.0, torch 2.13.0 (CPU).
#
# Input: a qwen3_moe model of four layers; `target_modules=["q_proj"]` and both stacks of experts as
#   `target_parameters`, limited to the last layer by `layers_to_transform`, or to it by `exclude_modules`
#   (a pattern, or a list of modules).
# Expected: adapters in the last layer alone, or a refusal as PEFT has for dropout and DoRA of experts;
#   the reference says that `target_parameters` behaves similarly to `target_modules`.
# Seen: q_proj is adapted in the last layer, the experts in all four, without a message. The search for
#   parameters compares names alone; the search for modules before it obeys all three settings. A
#   `target_parameters` entry that names its layer ("layers.3.mlp.experts.down_proj") works.
# For users: four times the adapters of experts that were asked for here, in memory, in the optimizer and in
#   the file; layers that should stay as they are are trained. The saved configuration still says
#   `layers_to_transform`, by which a reader expects fewer adapters than the file has. Name the layers.
#
# Exit status: 0 while this is so, 1 when it is not.
source "$(dirname "$0")/install.sh"
install env torch==2.13.0 transformers==5.24.0 peft==0.21.2
cat > show.py <<'P'
import json
import re
from pathlib import Path

from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

LAYERS = 4
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
MODULES = "self_attn.q_proj", "mlp.experts"
OTHERS = [f"model.layers.{i}.{name}" for i in range(LAYERS - 1) for name in MODULES]
# Each limit, the parameters that are named, and the layers whose experts are adapted.
CASES = {
    "layers_to_transform": ({"layers_to_transform": [LAYERS - 1]}, STACKS, [0, 1, 2, 3]),
    "exclude_modules, a pattern": ({"exclude_modules": r".*layers\.[0-2]\..*"}, STACKS, [0, 1, 2, 3]),
    "exclude_modules, a list": ({"exclude_modules": OTHERS}, STACKS, [0, 1, 2, 3]),
    "named layers": (
        {"layers_to_transform": [LAYERS - 1]},
        [f"layers.{LAYERS - 1}.{name}" for name in STACKS],
        [3],
    ),
}


def layers(names, kind):
    """Return the layers with adapters of a kind."""
    return sorted({int(re.search(r"layers\.(\d+)", n)[1]) for n in names if kind in n})


as_stated = True
for number, (case, (limit, parameters, due)) in enumerate(CASES.items()):
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
    )
    lora = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=parameters, **limit)
    model = get_peft_model(Qwen3MoeForCausalLM(config), lora)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    folder = Path(f"adapter-{number}")
    model.save_pretrained(folder)
    stored = list(load_file(folder / "adapter_model.safetensors"))
    says = json.loads((folder / "adapter_config.json").read_text())["layers_to_transform"]
    queries, experts = layers(trained, "q_proj"), layers(trained, "experts")
    print(f"{case}: q_proj of layers {queries}, experts of layers {experts}; the configuration says {says}")
    as_stated &= queries == layers(stored, "q_proj") == [LAYERS - 1]
    as_stated &= experts == layers(stored, "experts") == due
raise SystemExit(0 if as_stated else 1)
P
env/bin/python -W default show.py 2>log || { status=$?; tail -5 log; exit $status; }
! grep -iE "expert|parameter|layers_to|exclude" log
