"""Time and peak memory of a LoRA step beside PEFT on transformers: same base, adapter, data, dtype.

A step is forward, backward, gradient norm with clipping, and AdamW of adapters of rank 16 on
attention and all experts. PEFT (eager and grouped_mm experts of Qwen3-MoE) reads the adapter and
the base that we write; both train fp32 adapters, in bf16 over a base of bf16. Steps alternate in
one process, so that a drifting machine moves all alike; each round gives one ratio against the
faster of theirs, of wall time and of processor time, which other programs move less. Peaks are of
one process each, as in `peak_memory.py`. Linux; needs `peft`.

    python bench/finetune.py --rounds 9 --threads 2 --save
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import moefold  # noqa: F401  (before torch: it says how threads wait)

# isort: split
import torch
from one_device import BATCH, CLIP, LR, RESULTS, SEQ, SHAPE, Step
from peak_memory import highest
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from moefold.comm.world import World
from moefold.convert.adapter import write_adapter
from moefold.convert.exporter import export_folder
from moefold.convert.importer import import_folder, open_adapter
from moefold.data.batch import from_ids
from moefold.model.config import LowRank
from moefold.model.decoder import DecoderModel
from moefold.model.init import initialise
from moefold.optim.config import AdamW
from moefold.optim.norm import clip_scale
from moefold.parallel.apply import build_parts
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.spec.tuning import adapt, adapter_scales
from moefold.training.config import Lora
from moefold.training.machine import cpu_name
from moefold.training.model_checkpoint import fill_from_folder
from moefold.training.step import gradients

LORA = Lora(rank=16, alpha=32.0)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CLOCKS = ("wall", "processor")
THEIRS = {"peft eager": "eager", "peft grouped_mm": "grouped_mm"}


def ids() -> Tensor:
    """Return the batch [B, S] of every step."""
    return torch.randint(0, SHAPE.vocab, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))


def write_both(at: Path) -> None:
    """Write a base with drawn weights, and an adapter of it whose B is not zero."""
    decoder = adapt(SHAPE, LORA)
    model = DecoderModel(decoder, "fp32")
    initialise(model, decoder, seed=1)
    draws, held = torch.Generator().manual_seed(2), dict[str, Tensor]()
    for name, parameter in model.named_parameters():
        if "_lora_" in name:
            held[name] = torch.randn(parameter.shape, generator=draws) * 0.02
    base = {name: value for name, value in model.state_dict().items() if name not in held}
    export_folder(SHAPE, base, at / "base")
    scales = adapter_scales(decoder).items()
    rank = LORA.rank
    assert rank != "stored", "LORA states a number"
    adapters = {n: LowRank(weight=n, rank=rank, scale=scale) for n, scale in scales}
    with import_folder(at / "base") as found:
        said = found.tensors.identity()
    write_adapter(SHAPE, adapters, held, at / "adapter", (str(at / "base"), said))


def ours(at: Path, precision: Any) -> Step:
    """Return our step."""
    parts = build_parts(adapt(SHAPE, LORA), precision, Layout(), World.single(), "meta")
    data = ShardedState(parts)
    optimizer = data.optimizer(AdamW(lr=LR, weight_decay=0.0))
    with import_folder(at / "base") as base:
        first = open_adapter(at / "adapter", at / "base", base.decoder, base.tensors)
        with closing(first):
            fill_from_folder(base, data, lambda piece: piece.slice_of(first[piece.name]))
    rows = from_ids(ids())

    def step() -> float:
        figures = gradients(data, [rows], loss_chunk=1024)
        optimizer.step(clip_scale(figures.grad_norm, CLIP))
        data.refresh_weights()
        return figures.lm_loss

    return step


def theirs(at: Path, precision: str, experts: str) -> Step:
    """Return PEFT's step."""
    from peft import PeftModel

    how = {"dtype": DTYPES[precision], "experts_implementation": experts}
    base = AutoModelForCausalLM.from_pretrained(at / "base", **how)
    model = PeftModel.from_pretrained(base, str(at / "adapter"), is_trainable=True).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0, fused=True)
    ids_BS = ids()

    def step() -> float:
        loss = model(input_ids=ids_BS, labels=ids_BS, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def step_of(name: str, at: Path, precision: str) -> Step:
    """Return a program's step."""
    return ours(at, precision) if name == "moefold" else theirs(at, precision, THEIRS[name])


def peak(name: str, at: Path, precision: str, threads: int) -> int:
    """Return the most bytes of a program's steps, in this process."""
    torch.set_num_threads(threads)
    return highest(lambda: step_of(name, at, precision))[0]


def compared(precision: str, rounds: int, threads: int) -> dict[str, Any]:
    """Alternate the steps for some rounds, measure peaks, and return what was seen."""
    names = ["moefold", *THEIRS]
    with tempfile.TemporaryDirectory() as scratch:
        write_both(at := Path(scratch))
        peaks = {}
        for name in names:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                peaks[name] = pool.apply(peak, (name, at, precision, threads))
        steps = {name: step_of(name, at, precision) for name in names}
    losses = {name: [step() for _ in range(3)] for name, step in steps.items()}
    spread = max(max(found) - min(found) for found in zip(*losses.values(), strict=True))
    assert spread < (2e-2 if precision == "bf16" else 1e-4), f"not the same computation: {losses}"
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            wall, processor = time.perf_counter(), time.process_time()
            steps[name]()
            wall, processor = time.perf_counter() - wall, time.process_time() - processor
            seconds[name].append((wall, processor))
    figures: dict[str, Any] = {}
    for place, clock in enumerate(CLOCKS):
        took = {name: [pair[place] for pair in found] for name, found in seconds.items()}
        rounds_of = zip(took["moefold"], *(took[name] for name in THEIRS), strict=True)
        ratios = [mine / min(best) for mine, *best in rounds_of]
        each = {n: statistics.median(found) * 1e6 / (BATCH * SEQ) for n, found in took.items()}
        median = statistics.median(ratios)
        figures[clock] = {"us_per_token": each, "to_theirs": ratios, "median_to_theirs": median}
    return {
        "precision": precision,
        "first_losses": losses,
        **figures,
        "peak_bytes": peaks,
        "peak_to_theirs": peaks["moefold"] / min(peaks[name] for name in THEIRS),
    }


def main() -> None:
    """Measure and print; ``--save`` writes the figures beside this machine's name."""
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--precision", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--save", action="store_true", help="write bench/results/finetune.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    found = [compared(precision, args.rounds, args.threads) for precision in args.precision]
    versions = {name: version(name) for name in ("torch", "transformers", "peft")}
    for part in found:
        print(f"\n{part['precision']}, {args.threads} threads")
        for name, size in part["peak_bytes"].items():
            wall, processor = (part[clock]["us_per_token"][name] for clock in CLOCKS)
            print(
                f"  {name:18} {wall:6.0f} us a token, {processor:6.0f} of processors' time,", end=""
            )
            print(f" {size / 1e6:6.0f} MB")
        for clock in CLOCKS:
            low, *_, high = sorted(part[clock]["to_theirs"])
            said = f"{part[clock]['median_to_theirs']:.2f} (rounds {low:.2f} to {high:.2f})"
            print(f"  {clock} time to the better of theirs: {said}")
        print(f"  peak to the better of theirs: {part['peak_to_theirs']:.2f}")
    if args.save:
        shape = {"batch": BATCH, "seq": SEQ, "decoder": SHAPE.model_dump(mode="json")}
        facts = {"machine": cpu_name(), "threads": args.threads, "versions": versions}
        text = json.dumps(
            facts | {"adapter": LORA.model_dump(), "shape": shape, "found": found}, indent=1
        )
        (RESULTS / "finetune.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
