"""Training speed of one device beside other stacks: same shape, data, threads and dtype.

A step is forward, backward, gradient norm with clipping, and AdamW. Ours and theirs (``peers.py``)
have a process each, as one has who trains with it, and alternate, so that a drifting machine moves
all alike; each round gives one ratio against the fastest that runs eagerly, and one against the
fastest that is compiled. Threads wait in all as ``moefold`` has them wait. In bf16 others train
bf16 weights, we train fp32 masters. Needs `transformers`; a stack that is not installed or cannot
run here is named with its error.

    python bench/one_device.py --shape small narrow --rounds 9 --threads 2 --save
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python bench/one_device.py --precision fp32
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import moefold  # noqa: F401  (before torch: it says how threads wait)

# isort: split
import torch
from peers import CLIP, LR, PEERS, Step
from torch import Tensor
from transformers.utils import logging

from moefold.config.slot import build
from moefold.convert.exporter import export_folder
from moefold.data.batch import from_ids
from moefold.layers.config import Precision, Rope
from moefold.layers.kinds.gqa import Gqa
from moefold.layers.precision import DTYPES
from moefold.model.config import Block, Decoder, Stack
from moefold.model.decoder import DecoderModel
from moefold.model.init import initialise
from moefold.moe.config import Moe, Router
from moefold.optim.config import AdamW
from moefold.optim.norm import clip_scale
from moefold.parallel.apply import single_rank_parts
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.planner.count import count
from moefold.training.machine import cpu_name, measure_rates
from moefold.training.step import gradients

RESULTS = Path(__file__).parent / "results"
ATTENTION = Gqa(heads=8, kv_heads=4, head_dim=32, qk_norm="head", rope=Rope(theta=1e6))


def _shape(width: int, experts: int, top_k: int) -> Decoder:
    ffn = Moe(width=width, router=Router(experts=experts, top_k=top_k))
    block = Block(attention=ATTENTION, ffn=ffn)
    return Decoder(vocab=8192, hidden=256, stacks=(Stack(repeat=4, blocks=(block,)),), context=4096)


SHAPES = {"small": _shape(512, 8, 2), "narrow": _shape(128, 64, 8)}
SHAPE = SHAPES["small"]
BATCH, SEQ = 8, 512
ROUNDED = ("torchtitan",)
"""Whose experts are products of bf16, whatever the rest is in."""
OTHER = ("megatron-core",)
"""On weights of their own."""


def ours(
    ids_BS: Tensor, precision: Any, again: Any = None, shape: Decoder = SHAPE
) -> tuple[Step, DecoderModel]:
    """Return our step, on fresh weights; ``again`` is what it recomputes."""
    model = DecoderModel(shape, precision)
    initialise(model, shape, seed=1)
    optimizer = build(AdamW(lr=LR, weight_decay=0.0), dict(model.named_parameters()))
    rows, data = from_ids(ids_BS), ShardedState(single_rank_parts(model, Layout(recompute=again)))

    def step() -> float:
        figures = gradients(data, [rows], loss_chunk=1024)
        optimizer.step(clip_scale(figures.grad_norm, CLIP))
        return figures.lm_loss

    return step, model


def be_stack(
    link: Connection, name: str, folder: Path, ids_BS: Tensor, shape: Decoder,
    precision: Precision, threads: int,
) -> None:  # fmt: skip
    """Send the first step's loss or what went wrong; then make a step for each message."""
    torch.set_num_threads(threads)
    try:
        if name == "moefold":
            step, _ = ours(ids_BS, precision, shape=shape)
        else:
            step = PEERS[name](folder, ids_BS, DTYPES[precision])
        link.send(step())
    except Exception as error:
        said, *_ = [*str(error).strip().splitlines(), ""]
        link.send(f"{type(error).__name__}: {said}")
        return
    while link.recv():
        started = time.perf_counter()
        step()
        link.send(time.perf_counter() - started)


def compared(
    shape: Decoder, precision: Precision, rounds: int, names: list[str], threads: int
) -> dict[str, Any]:
    """Alternate the steps for some rounds and return what was seen."""
    ids_BS = torch.randint(0, shape.vocab, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
    links, first, cannot = dict[str, Connection](), dict[str, float](), dict[str, str]()
    fresh = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        model = DecoderModel(shape, precision)
        initialise(model, shape, seed=1)
        export_folder(shape, model.state_dict(), folder)
        for name in ("moefold", *names):
            links[name], end = fresh.Pipe()
            given = (end, name, folder, ids_BS, shape, precision, threads)
            fresh.Process(target=be_stack, args=given, daemon=True).start()
            end.close()
            try:
                said = links[name].recv()
            except EOFError:
                said = "its process ended"
            if isinstance(said, str):
                cannot[name] = said
                del links[name]
            else:
                first[name] = said
    for name, loss in first.items():
        bound = 2e-2 if precision == "bf16" or name in ROUNDED else 1e-4
        assert abs(loss - first["moefold"]) < bound or name in OTHER, f"not the same: {first}"
    rates: dict[str, list[float]] = {name: [] for name in links}
    for turn in range(-1, rounds):  # what the first round sets up is not its own time
        order = list(links)
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            links[name].send(True)
            seconds = links[name].recv()
            if turn >= 0:
                rates[name].append(BATCH * SEQ / seconds)
    for link in links.values():
        link.send(False)
    dtype = DTYPES[precision]
    torch.set_num_threads(threads)
    machine = measure_rates([dtype], torch.device("cpu"), seconds=1.0)[dtype]
    flops = count(shape).flops_per_token(SEQ)
    alike = [name for name in links if name != "moefold"]
    if precision == "fp32":
        alike = [name for name in alike if name not in ROUNDED]
    kinds = {
        "eager": [name for name in alike if "compiled" not in name],
        "compiled": [name for name in alike if "compiled" in name],
    }
    return {
        "precision": precision,
        "cannot_run": cannot,
        "first_loss": first,
        "tokens_per_s": {name: statistics.median(found) for name, found in rates.items()},
        "ratios": {
            kind: [
                mine / max(best)
                for mine, *best in zip(*(rates[name] for name in ("moefold", *names)), strict=True)
            ]
            for kind, names in kinds.items()
            if names
        },
        "matmul_flops_per_s": machine.flops_per_s,
        "share_of_matmul_rate": {
            name: statistics.median(found) * flops / machine.flops_per_s
            for name, found in rates.items()
        },
    }


def show(name: str, found: dict[str, Any]) -> None:
    """Print the table of one shape and precision."""
    rate = found["matmul_flops_per_s"] / 1e9
    print(f"\n{name} {found['precision']}  matrix rate {rate:.0f} GFLOP/s")
    for stack, rate in found["tokens_per_s"].items():
        share = found["share_of_matmul_rate"][stack]
        print(f"  {stack:34} {rate:8.0f} tokens/s  {share:6.1%} of the matrix rate")
    for stack, error in found["cannot_run"].items():
        print(f"  {stack:34} cannot run: {error}")
    for kind, ratios in found["ratios"].items():
        print(
            f"  ratio to the fastest {kind} peer, round by round: median "
            f"{statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f} over "
            f"{len(ratios)} rounds"
        )


def main() -> None:
    """Measure and print; ``--save`` writes the figures beside this machine's name."""
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    both = ["bf16", "fp32"]
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--precision", nargs="+", choices=both, default=both)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", action="store_true", help="write bench/results/one_device.json")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    found = {
        shape: [
            compared(SHAPES[shape], kind, args.rounds, args.peers, args.threads)
            for kind in args.precision
        ]
        for shape in args.shape
    }
    report = {
        "machine": cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": args.threads,
        "torch": torch.__version__,
        "batch": BATCH,
        "seq": SEQ,
        "shapes": {shape: SHAPES[shape].model_dump(mode="json") for shape in args.shape},
        "found": found,
    }
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        print(f"{report['machine']}, {args.threads} threads, torch {torch.__version__}")
        for shape, parts in found.items():
            for part in parts:
                show(shape, part)
    if args.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "one_device.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
