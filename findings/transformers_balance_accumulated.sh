#!/usr/bin/env bash
# The Trainer counts the balance term of a mixture once for each micro-batch that it accumulates.
#
# Versions: transformers 5.24.0 (accelerate 1.15.0), torch 2.13.0 (CPU).
#
# Input: one step of SGD on the same eight rows, as one batch of 8, 4 of 2 and 8 of 1
#   (`gradient_accumulation_steps`), for small qwen3_moe and mixtral models with
#   `output_router_logits: true`. The rows are equal, so that each micro-batch's balance term is the whole's.
# Expected: the same step and the same logged loss; the part of cross entropy is so to the last digits.
# Seen: the balance term's part in gradients and loss is 4 and 8 times as large. Cross entropy is divided by
#   the number of tokens in all micro-batches (`num_items_in_batch`), so that the Trainer no longer divides
#   by their number; the model adds the term after that, undivided. No message mentions it.
# For users: `router_aux_loss_coef` means another thing for each number of accumulation steps, and a run moved
#   to fewer devices at the same batch size balances harder. Divide the coefficient by the number of
#   steps; TRL's SFTTrainer adds the term by itself and divides it.
#
# Exit status: 0 while this is so, 1 when it is not.
source "$(dirname "$0")/install.sh"
install env torch==2.13.0 transformers==5.24.0 accelerate==1.15.0
cat > show.py <<'P'
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

ROWS = 8
ROW = torch.tensor([3, 14, 15, 9, 2, 6, 5, 30])


def step(family, coefficient, accumulated):
    """Return the logged loss, and the change of the first layer's router by a step of SGD."""
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
        output_router_logits=True,
        router_aux_loss_coef=coefficient,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    router = model.model.layers[0].mlp.gate.weight
    before = router.detach().clone()
    settings = TrainingArguments(
        output_dir="run",
        per_device_train_batch_size=ROWS // accumulated,
        gradient_accumulation_steps=accumulated,
        max_steps=1,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=settings, train_dataset=[{"input_ids": ROW, "labels": ROW}] * ROWS)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer.state.log_history[0]["loss"], router.detach() - before


as_stated = True
for family in ("qwen3_moe", "mixtral"):
    for accumulated in (1, 4, 8):
        plain, without = step(family, 0.0, accumulated)
        loss, change = step(family, 1.0, accumulated)
        term, part = loss - plain, (change - without).norm().item()
        if accumulated == 1:
            first = plain, without, term, part
        terms, parts = term / first[2], part / first[3]
        print(f"{family:9} {accumulated} x {ROWS // accumulated} rows: cross entropy {plain:.4f},", end=" ")
        print(f"term {term:.3f} ({terms:.2f} times), in the router's step {part:.4f} ({parts:.2f} times)")
        as_stated &= abs(plain - first[0]) < 1e-4 and torch.allclose(without, first[1], atol=1e-6)
        as_stated &= abs(terms / accumulated - 1) < 0.01 and abs(parts / accumulated - 1) < 0.01
raise SystemExit(0 if as_stated else 1)
P
env/bin/python -W default show.py 2>log || { status=$?; tail -5 log; exit $status; }
! grep -iwE "router\w*|aux\w*" log
