"""Planned memory of one-process CPU steps beside the measured peak of the same steps.

Each recipe is built, trained for two steps and measured in a process of its own. The peak is that
of torch's allocator (every allocation and release, kernels' own included), and beside it what the
process took at most from the system over what it took before the model was built.

    python bench/planner_memory.py [WORD] [--json]
"""

import argparse
import json
import multiprocessing
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moefold.config.base import Record
from moefold.kernels.quantise.config import QUANTISE
from moefold.layers.config import Full, Precision, Selective
from moefold.layers.kinds.dense import Dense
from moefold.layers.kinds.gqa import Gqa, Windowed
from moefold.layers.kinds.mla import Mla
from moefold.model.config import Block, Decoder, Stack
from moefold.moe.config import Moe, Router, Shared
from moefold.optim.config import AdamW, Muon, Optim
from moefold.parallel.config import Layout
from moefold.planner.case import Case, NumberFormats
from moefold.planner.hardware import Cluster, cpu_device
from moefold.planner.memory import fullest_rank

LOSS_CHUNK = 1024
MIXTURE = Moe(width=128, router=Router(experts=8, top_k=2), shared=Shared(width=128))
ADAMW = AdamW(lr=1e-3)
GROUPED = Gqa(heads=4, kv_heads=2, head_dim=64)
LATENT = Mla(heads=4, q_rank=96, kv_rank=64, nope_dim=48, rope_dim=16, v_dim=48)


@dataclass(frozen=True)
class Recipe:
    """One run to plan and to measure."""

    name: str
    attention: Record = GROUPED
    ffn: Record = MIXTURE
    layers: int = 4
    vocab: int = 2048
    seq: int = 256
    micro_batch: int = 2
    micro_batches: int = 2
    precision: Precision = "fp32"
    recompute: Record | None = None
    optim: Optim = ADAMW
    quantise: str = ""
    """The kind of few bits that products run in, where not in ``precision``."""
    hidden: str = "wide"
    """What it keeps of pre-activations."""

    @property
    def decoder(self) -> Decoder:
        """The model."""
        blocks = (Block.model_validate({"attention": self.attention, "ffn": self.ffn}),)
        stack = Stack(repeat=self.layers, blocks=blocks)
        kept = {"hidden": self.hidden}
        codes = QUANTISE.kinds[self.quantise].model_validate(kept) if self.quantise else None
        return Decoder(vocab=self.vocab, hidden=256, stacks=(stack,), quantise=codes)

    @property
    def case(self) -> Case:
        """This case as the planner takes it."""
        wide = self.precision == "fp32"
        kind: Any = self.quantise or ("fp32" if wide else "bf16")
        numbers = NumberFormats(kind, self.optim, weight_bytes=0 if wide else 2)
        return Case(
            decoder=self.decoder,
            seq=self.seq,
            batch=self.micro_batch * self.micro_batches,
            micro_batch=self.micro_batch,
            cluster=Cluster(cpu_device(1e11, 1e10, 2**34), 1, 1, 1),
            layout=Layout(recompute=self.recompute),
            load=1.0,
            number_formats=numbers,
        )


RECIPES = (
    Recipe("mixture fp32"),
    Recipe("mixture bf16", precision="bf16"),
    Recipe("mixture, one micro-batch", micro_batches=1, micro_batch=4),
    Recipe("mixture, full recompute", recompute=Full(), micro_batch=4),
    Recipe("mixture, norms and experts", recompute=Selective(modules=("norms", "experts"))),
    Recipe("mixture, muon", optim=Muon()),
    Recipe("dense fp32", ffn=Dense(width=1024)),
    Recipe("dense bf16, ffn recomputed", ffn=Dense(width=1024), precision="bf16",
           recompute=Selective(modules=("ffn",))),
    Recipe("latents bf16", attention=LATENT, precision="bf16", micro_batch=4),
    Recipe("latents, up-projections", attention=LATENT, recompute=Selective(modules=("mla_up",))),
    Recipe("latents, attention and norms", attention=LATENT,
           recompute=Selective(modules=("attention", "norms", "mla_up"))),
    Recipe("latents bf16, full recompute", attention=LATENT, precision="bf16", recompute=Full(),
           micro_batch=4),
    Recipe("mixture, copies of rows", recompute=Selective(modules=("permute",)), micro_batch=4),
    Recipe("mixture bf16, most again", precision="bf16", micro_batch=4,
           recompute=Selective(modules=("norms", "experts", "permute", "shared"))),
    Recipe("window and sinks", precision="bf16", micro_batch=4,
           attention=Windowed(heads=4, kv_heads=2, head_dim=64, window=64)),
    Recipe("large vocabulary", vocab=16384, layers=2),
    Recipe("long sequence", seq=2048, micro_batch=1, layers=3),
    *(Recipe(f"{kind}{said}", quantise=kind, precision="bf16", micro_batch=4, recompute=again)
      for kind in QUANTISE.kinds
      for said, again in (("", None), (", full recompute", Full()),
                          (", norms and experts", Selective(modules=("norms", "experts"))))),
    *(Recipe(f"{kind}, dense", quantise=kind, precision="bf16", ffn=Dense(width=1024))
      for kind in QUANTISE.kinds),
    *(Recipe(f"fp8_block, {said}, hidden codes", quantise="fp8_block", hidden="codes",
             precision="bf16", ffn=ffn, micro_batch=4)
      for said, ffn in (("mixture", MIXTURE), ("dense", Dense(width=1024)))),
)  # fmt: skip


def measure(recipe: Recipe) -> dict[str, float]:
    """Return measured peaks of two steps, in bytes; meant for a process of its own."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from moefold.config.slot import build
    from moefold.data.batch import from_ids
    from moefold.model.decoder import DecoderModel
    from moefold.parallel.apply import single_rank_parts
    from moefold.parallel.config import Layout
    from moefold.parallel.data.sharding import ShardedState
    from moefold.training.step import gradients

    torch.set_num_threads(1)
    torch.manual_seed(0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    shape = (recipe.micro_batch, recipe.seq)
    batches = [from_ids(torch.randint(recipe.vocab, shape)) for _ in range(recipe.micro_batches)]
    layout = Layout(recompute=recipe.recompute)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        model = DecoderModel(recipe.decoder, recipe.precision)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        data = ShardedState(single_rank_parts(model, layout))
        optimizer = build(recipe.optim, dict(model.named_parameters()))
        for _ in range(2):
            gradients(data, batches, LOSS_CHUNK)
            optimizer.step()
    profiler: Any = seen.profiler
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"tensors": most, "process": taken * 1024}


def rows(word: str = "") -> Iterator[dict[str, Any]]:
    """Yield recipes whose names have a word, with what was planned and what was measured, in
    bytes.
    """
    context = multiprocessing.get_context("spawn")
    for recipe in (one for one in RECIPES if word in one.name):
        with context.Pool(1) as pool:
            measured = pool.apply(measure, (recipe,))
        plan = fullest_rank(recipe.case)
        yield {"name": recipe.name, "planned": plan.peak_allocated, **measured}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="planned against measured memory of CPU steps")
    parser.add_argument("word", nargs="?", default="", help="recipes whose names have it")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.json:
        print(json.dumps(list(rows(args.word)), indent=1))
        return
    print(f"{'recipe':32} {'planned':>9} {'tensors':>9} {'off':>7} {'process':>9}   MiB")
    for row in rows(args.word):
        planned, tensors, process = (row[k] / 2**20 for k in ("planned", "tensors", "process"))
        off = planned / tensors - 1
        print(
            f"{row['name']:32} {planned:9.1f} {tensors:9.1f} {off:+7.1%} {process:9.1f}", flush=True
        )


if __name__ == "__main__":
    main()
