"""Training speed of one device beside transformers: same shape, weights, data, threads and dtype.

A step is forward, backward, gradient norm with clipping, and AdamW. Ours and theirs (Qwen3-MoE
with eager and with grouped_mm experts) alternate in one process, so that a drifting machine moves
all alike; each round gives one ratio against the faster of theirs. In bf16 transformers trains
bf16 weights, we train fp32 masters. Needs `transformers`.

    python bench/one_device.py --rounds 9 --save
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moefold  # noqa: F401  (before torch: it says how threads wait)

# isort: split
import torch
from torch import Tensor
from transformers import Qwen3MoeForCausalLM
from transformers.utils import logging

from moefold.config.slot import build
from moefold.convert.exporter import export_folder
from moefold.data.batch import from_ids
from moefold.layers.config import Rope
from moefold.layers.kinds.gqa import Gqa
from moefold.model.config import Block, Decoder, Stack
from moefold.model.decoder import DecoderModel
from moefold.model.init import initialise
from moefold.moe.config import Moe, Router
from moefold.optim.config import AdamW
from moefold.optim.norm import clip_scale
from moefold.parallel.apply import alone
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.planner.count import count
from moefold.training.machine import cpu_name, measure
from moefold.training.step import gradients

RESULTS = Path(__file__).parent / "results"
ATTENTION = Gqa(heads=8, kv_heads=4, head_dim=32, qk_norm="head", rope=Rope(theta=1e6))
SHAPE = Decoder(
    vocab=8192,
    hidden=256,
    stacks=(
        Stack(
            repeat=4,
            blocks=(
                Block(attention=ATTENTION, ffn=Moe(width=512, router=Router(experts=8, top_k=2))),
            ),
        ),
    ),
    context=4096,
)
BATCH, SEQ, LR, CLIP = 8, 512, 1e-4, 1.0
Step = Callable[[], float]
"""Makes one optimizer step and returns its loss."""


def ours(ids_BS: Tensor, precision: Any, again: Any = None) -> tuple[Step, DecoderModel]:
    """Return our step, on fresh weights; ``again`` is what it recomputes."""
    model = DecoderModel(SHAPE, precision)
    initialise(model, SHAPE, seed=1)
    optimizer = build(AdamW(lr=LR, weight_decay=0.0), dict(model.named_parameters()))
    rows, data = from_ids(ids_BS), ShardedState(alone(model, Layout(recompute=again)))

    def step() -> float:
        figures = gradients(data, [rows], loss_chunk=1024)
        optimizer.step(clip_scale(figures.grad_norm, CLIP))
        return figures.lm_loss

    return step, model


def theirs(folder: Path, ids_BS: Tensor, dtype: torch.dtype, experts: str) -> Step:
    """Return transformers' step, on the exported weights."""
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation=experts)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)

    def step() -> float:
        loss = model(input_ids=ids_BS, labels=ids_BS, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def compared(precision: str, rounds: int) -> dict[str, Any]:
    """Alternate the steps for some rounds and return what was seen."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    ids_BS = torch.randint(0, SHAPE.vocab, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
    mine, model = ours(ids_BS, precision)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        export_folder(SHAPE, model.state_dict(), folder)
        steps = {"moefold": mine} | {
            f"transformers {kind}": theirs(folder, ids_BS, dtype, kind)
            for kind in ("eager", "grouped_mm")
        }
    first = {name: step() for name, step in steps.items()}
    spread = max(first.values()) - min(first.values())
    assert spread < (2e-2 if precision == "bf16" else 1e-4), f"not the same computation: {first}"
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        names = list(steps)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            started = time.perf_counter()
            steps[name]()
            rates[name].append(BATCH * SEQ / (time.perf_counter() - started))
    machine = measure([dtype], torch.device("cpu"), seconds=1.0)[dtype]
    peers = [rates[name] for name in rates if name != "moefold"]
    ratios = [mine / max(best) for mine, *best in zip(rates["moefold"], *peers, strict=True)]
    flops = count(SHAPE).flops_per_token(SEQ)
    return {
        "precision": precision,
        "first_loss": first,
        "tokens_per_s": {name: statistics.median(found) for name, found in rates.items()},
        "ratios": ratios,
        "median_ratio": statistics.median(ratios),
        "matmul_flops_per_s": machine.flops_per_s,
        "share_of_matmul_rate": {
            name: statistics.median(found) * flops / machine.flops_per_s
            for name, found in rates.items()
        },
    }


def show(found: dict[str, Any]) -> None:
    """Print one precision's table."""
    low, high = min(found["ratios"]), max(found["ratios"])
    print(f"\n{found['precision']}  matrix rate {found['matmul_flops_per_s'] / 1e9:.0f} GFLOP/s")
    for name, rate in found["tokens_per_s"].items():
        share = found["share_of_matmul_rate"][name]
        print(f"  {name:26} {rate:8.0f} tokens/s  {share:6.1%} of the matrix rate")
    print(
        f"  ratio to the faster peer, round by round: median {found['median_ratio']:.3f}, "
        f"from {low:.3f} to {high:.3f} over {len(found['ratios'])} rounds"
    )


def main() -> None:
    """Measure and print; ``--save`` writes the figures beside this machine's name."""
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    both = ["bf16", "fp32"]
    parser.add_argument("--precision", nargs="+", choices=both, default=both)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", action="store_true", help="write bench/results/one_device.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    found = [compared(precision, args.rounds) for precision in args.precision]
    report = {
        "machine": cpu_name(),
        "threads": args.threads,
        "torch": torch.__version__,
        "shape": {"batch": BATCH, "seq": SEQ, "decoder": SHAPE.model_dump(mode="json")},
        "found": found,
    }
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        print(f"{report['machine']}, {args.threads} threads, torch {torch.__version__}")
        for part in found:
            show(part)
    if args.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "one_device.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
