#!/usr/bin/env bash
# Under reentrant checkpointing the balance term of a mixture is reported and added, but has no gradient.
#
# Versions: transformers 5.24.0 and 4.57.6, torch 2.13.0 (CPU).
#
# Input: one training step of small qwen3_moe and mixtral models with `output_router_logits: true`
#   and a `router_aux_loss_coef`, with gradient checkpointing as each release sets it up and as its argument
#   `use_reentrant` says.
# Expected: checkpointing changes memory and time, not gradients.
# Seen: with `use_reentrant: True`, which release 4.57.6 takes where nothing is said, loss and `aux_loss` are
#   the same numbers, and no gradient has a part of the balance term: the gradients are those of a coefficient
#   of 0. Router logits are picked up by hooks while the layers run without a graph; they are no outputs of
#   the checkpointed function, and the second run's are thrown away. Release 5.24 takes
#   `use_reentrant: False` by itself, which is right. No message mentions it.
# For users: routers train without balancing, and the curve of `aux_loss` shows that only by not falling.
#   Set `gradient_checkpointing_kwargs={"use_reentrant": False}` wherever an auxiliary loss counts.
#
# Exit status: 0 while this is so, 1 when it is not.
source "$(dirname "$0")/install.sh"
install old torch==2.13.0 transformers==4.57.6
install new torch==2.13.0 transformers==5.24.0
cat > show.py <<'P'
import sys

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

DEFAULT_IS_REENTRANT = sys.argv[1] == "old"
# What `gradient_checkpointing_enable` is given, and whether the balance term loses its gradient.
CASES = {
    "no checkpointing": (None, False),
    "checkpointing": ({}, DEFAULT_IS_REENTRANT),
    "use_reentrant=True": ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, True),
    "use_reentrant=False": ({"gradient_checkpointing_kwargs": {"use_reentrant": False}}, False),
}


def step(family, coefficient, checkpointing):
    """Return the loss, the balance term in it, and the gradients."""
    config = AutoConfig.for_model(
        family,
        vocab_size=32,
        hidden_size=16,
        intermediate_size=8,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        pad_token_id=0,
        output_router_logits=True,
        router_aux_loss_coef=coefficient,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable(**checkpointing)
    ids = torch.arange(24).view(2, 12)
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return out.loss.item(), out.aux_loss.item(), gradients


as_stated = True
for family in ("qwen3_moe", "mixtral"):
    for name, (checkpointing, lost) in CASES.items():
        loss, term, gradients = step(family, 1.0, checkpointing)
        without = step(family, 0.0, checkpointing)
        added = loss - without[0]
        change = (gradients - without[2]).norm().item()
        print(f"{transformers.__version__} {family:9} {name:20}", end=" ")
        print(f"term {term:.3f}, adds {added:.3f} to the loss and {change:.1e} to the gradients")
        as_stated &= 1.9 < term < 2.1 and abs(added - term) < 1e-4
        as_stated &= change == 0 if lost else change > 1e-2
raise SystemExit(0 if as_stated else 1)
P
for env in old new; do
    $env/bin/python -W default show.py $env 2>log || { status=$?; tail -5 log; exit $status; }
    ! grep -iwE "router\w*|aux\w*|reentrant" log
done
