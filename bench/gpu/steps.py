"""Whole training steps of four models, cut down in depth, on one device; and one rank of ep8.

Writes ``CHIP_steps.json``: seconds, share of the measured rate of products, waits, kernels, busy
share and peak memory of each step. Of what one rank holds alone it makes ``CHIP_machine.json``, the
ceilings' constants adjusted to these steps: ``moefold plan --cluster bench/results/gpu/...json``.
"""

import gc
import json
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from gpu.device import Bench, timed
from no_values import apart, data_of
from torch.profiler import ProfilerActivity, profile

from moefold.data.batch import MicroBatch, assemble
from moefold.layers.kinds.gqa import Windowed
from moefold.model.config import Block, Decoder, Stack
from moefold.moe.config import Moe, Router
from moefold.optim.config import AdamW
from moefold.optim.norm import clip_scale
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.parallel.pipeline.graphs import build_executor
from moefold.planner.case import Case, NumberFormats
from moefold.planner.count import count
from moefold.planner.hardware import Machine
from moefold.planner.time import estimate_time
from moefold.proof.shrink import SizeRequirements, small_decoder
from moefold.run import load_run
from moefold.training.calibrate import LOSS_CHUNK, fit_machine
from moefold.training.step import gradients

OPTIMIZER = AdamW(lr=1e-4)
MICRO_BATCHES, ROWS, FEW_ROWS, MANY = 4, 4096, 64, 16
"""Of a step; with few rows the host is what binds. Many micro-batches hide the optimizer, as steps
of training do."""
ROUNDS = 3
KERNELS = 25
"""Kernels that are named, those that took longest."""


@dataclass(frozen=True)
class Trial:
    """A model in a layout, and how much it is given."""

    name: str
    decoder: Decoder
    sizes: str = ""
    schedule: str | None = None
    rows: int = ROWS
    micro_batches: int = MICRO_BATCHES
    graphs: str = "none"

    @property
    def copies(self) -> int:
        """Rows of a micro-batch that go to experts, of the last layer."""
        return self.rows * self.decoder.blocks[-1].ffn.routing.top_k  # type: ignore[attr-defined]

    @property
    def layout(self) -> Layout:
        """Where its parts live."""
        chosen = {} if self.schedule is None else {"schedule": {"kind": self.schedule}}
        return Layout.model_validate({"sizes": self.sizes, "graphs": self.graphs, **chosen})


def trials(bench: Bench) -> list[Trial]:
    """Return what is run: each model alone, with more and fewer rows; and as one rank of ep8."""
    models = {
        "qwen3": cut("qwen3_30b_a3b", 3),
        "olmoe": cut("olmoe_1b_7b", 4),
        "deepseek": cut("deepseek_v3", 2, first=2, experts=32, vocab=32768),
        "gpt_oss": gpt_oss(),
    }
    found = [
        Trial(name, model, micro_batches=MANY, graphs=graphs)
        for name, model in models.items()
        for graphs in ("step", "none")
        if not bench.smoke or graphs == "step"
    ]
    found += [
        Trial(name, model, rows=rows, micro_batches=micro)
        for name, model in models.items()
        for rows, micro in ((ROWS, 1), (FEW_ROWS, MICRO_BATCHES))
        if not bench.smoke or micro == 1 or name == "qwen3"
    ]
    wide = {
        "qwen3": cut("qwen3_30b_a3b", 12),
        "deepseek": cut("deepseek_v3", 2, first=2, vocab=32768),
    }
    found += [Trial(name, model, "ep8") for name, model in wide.items()]
    found.append(Trial("qwen3", wide["qwen3"], "ep8", "merged"))
    return list(dict.fromkeys(map(small, found))) if bench.smoke else found


def cut(
    recipe: str, layers: int, first: int = 0, experts: int | None = None, vocab: int | None = None
) -> Decoder:
    """Return a recipe's model with fewer layers, from ``first`` on, and fewer experts or tokens."""
    decoder = load_run(recipe).decoder
    blocks = [
        fewer(block, experts) if experts is not None and isinstance(block.ffn, Moe) else block
        for block in decoder.blocks[first : first + layers]
    ]
    stacks = (Stack(blocks=tuple(blocks)),)
    return decoder.model_copy(update={"stacks": stacks, "vocab": vocab or decoder.vocab})


def fewer(block: Block, experts: int) -> Block:
    """Return a block with fewer experts."""
    assert isinstance(block.ffn, Moe)
    router = block.ffn.router.model_copy(update={"experts": experts})
    return block.model_copy(update={"ffn": block.ffn.model_copy(update={"router": router})})


def gpt_oss() -> Decoder:
    """Return two layers as GPT-OSS-20B has them, without the biases of its projections."""
    attention = Windowed(heads=64, kv_heads=8, head_dim=64, window=128)
    ffn = Moe(width=2880, router=Router(experts=32, top_k=4, order="topk_first"))
    kinds = (attention, attention.model_copy(update={"window": None}))
    blocks = tuple(Block(attention=kind, ffn=ffn) for kind in kinds)
    return Decoder(vocab=201088, hidden=2880, stacks=(Stack(blocks=blocks),), context=ROWS)


def small(trial: Trial) -> Trial:
    """Return a trial of a smoke run: the same kinds of parts, small, and no more pairs than one."""
    decoder = small_decoder(trial.decoder, SizeRequirements.of([trial.layout]))
    micro = 1 if trial.schedule is None else 2
    return replace(trial, decoder=decoder, rows=max(8, trial.rows // 128), micro_batches=micro)


def run(bench: Bench) -> int:
    """Measure all trials, then adjust the machine; returns 1 where one failed."""
    file = bench.file.with_name(bench.file.name.replace("steps", "ceilings"))
    if not file.exists():
        raise ValueError(f"{file} is not there: python bench/on_gpu.py ceilings writes it")
    machine = Machine(**json.loads(file.read_text("utf-8"))["machine"])
    done: list[tuple[Trial, float]] = []
    for trial in trials(bench):
        name = " ".join(filter(None, (trial.name, trial.sizes, trial.schedule)))
        about = {
            "layers": len(trial.decoder.blocks), "rows": trial.rows,
            "micro_batches": trial.micro_batches, "graphs": trial.graphs,
        }  # fmt: skip

        def measure(trial: Trial = trial) -> Mapping[str, Any]:
            found = measured(bench, trial, machine)
            if not trial.sizes and trial.graphs == "none":
                done.append((trial, found["median"]))
            return found

        bench.tried(name, measure, **about)
        if bench.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
    if done:
        adjust(bench, machine, done)
    return bench.end()


def measured(bench: Bench, trial: Trial, machine: Machine) -> dict[str, Any]:
    """Return the figures of a trial's step."""
    ranks = trial.layout.split.smallest_world
    with apart() if ranks > 1 else nullcontext():
        step = stepping(trial, drawn(trial, ranks, bench.device))
        rounds = 1 if bench.smoke else ROUNDS
        took = timed({"step": step}, bench.device, rounds)["step"]
        on_device = bench.device.type == "cuda"
        if on_device:
            torch.cuda.reset_peak_memory_stats()
            step()
        tokens = trial.rows * trial.micro_batches
        rate = count(trial.decoder).flops_per_token(trial.rows, causal=True) * tokens / took.median
        # A graph's kernels are those of the step without one. In a smoke run one trace is enough:
        # to read it takes longer than the step.
        traced = trial.graphs == "none" and not (
            bench.smoke and any("kernels" in row for row in bench.rows)
        )
        return {
            **took._asdict(),
            "tokens_per_s": tokens / took.median,
            "flops_per_s": rate,
            "share_of_products": rate / machine.bf16,
            "peak_bytes": torch.cuda.max_memory_allocated() if on_device else None,
            "waits": waits(step) if on_device else None,
            **(profiled(step, bench.device, trial.micro_batches) if traced else {}),
        }


def drawn(
    trial: Trial, ranks: int, device: torch.device, layout: Layout | None = None
) -> ShardedState:
    """Return a trial's parts with drawn weights, in its layout or another."""
    torch.manual_seed(0)
    data = data_of(trial.decoder, layout or trial.layout, ranks, device=device)
    with torch.no_grad():
        for name, parameter in data.params.items():
            one = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.normal_(one, 0.0 if one else trial.decoder.init_std)
        for buffer in data.parts.model.buffers():
            buffer.zero_()
    data.refresh_weights()
    return data


def stepping(trial: Trial, data: ShardedState) -> Callable[[], None]:
    """Return a call that makes one optimizer step of a trial."""
    optimizer, batches = data.optimizer(OPTIMIZER), drawn_rows(trial)
    executor = build_executor(data)

    def step() -> None:
        figures = gradients(data, batches, LOSS_CHUNK, executor=executor)
        optimizer.step(clip_scale(figures.grad_norm, 1.0))
        data.refresh_weights()
        for _, mixture in data.parts.model.moe_layers():
            mixture.balance.finish_step(mixture.router)

    return step


def drawn_rows(trial: Trial, seed: int = 0) -> list[MicroBatch]:
    """Return a step's micro-batches, each one document of drawn tokens, on the host."""
    draw, shape = np.random.default_rng(seed), (trial.micro_batches, trial.rows)
    ids = draw.integers(0, trial.decoder.vocab, shape)
    return [assemble(row, row, [trial.rows]) for row in ids]


def waits(step: Callable[[], None]) -> dict[str, int]:
    """Return how often the host waits for the device in a step, by line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    lines = [
        f"{one.filename.rpartition('moefold/')[2]}:{one.lineno}"
        for one in caught
        if "called a synchronizing" in str(one.message)
    ]
    return dict(Counter(lines))


def profiled(step: Callable[[], None], device: torch.device, micro: int) -> dict[str, Any]:
    """Return what a step's trace says: kernels, share of the time when one runs, the longest.

    On a CPU, where there are no kernels, calls of torch stand for them.
    """
    kind = {"cuda": ProfilerActivity.CUDA, "cpu": ProfilerActivity.CPU}[device.type]
    with profile(activities=list({ProfilerActivity.CPU, kind}), acc_events=True) as trace:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    spans, took, times = list[tuple[float, float]](), Counter[str](), Counter[str]()
    for event in trace.events() or ():
        # An annotation spans kernels, and what is between them too.
        kernel = not getattr(event, "is_user_annotation", False)
        if kernel and event.device_type.name.lower() == device.type:
            spans.append((event.time_range.start, event.time_range.end))
            took[event.name[:90]] += event.time_range.end - event.time_range.start
            times[event.name[:90]] += 1
    longest = {
        name: {"ms": us / 1e3 / micro, "times": times[name] / micro}
        for name, us in took.most_common(KERNELS)
    }
    return {
        "kernels": len(spans), "busy_share": busy_share(spans), "per_micro_batch": longest
    }  # fmt: skip


def busy_share(spans: list[tuple[float, float]]) -> float:
    """Return the share of the time from first begin to last end in which any span lies."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered / (until - min(spans)[0]) if covered else 0.0


# ----------------------------------------------------------------------------- the planner's stack


def case_of(trial: Trial, machine: Machine) -> Case:
    """Return a trial's step as the planner takes it."""
    return Case(
        decoder=trial.decoder,
        seq=trial.rows,
        batch=trial.micro_batches,
        micro_batch=1,
        cluster=machine.cluster,
        layout=Layout(),
        load=1.0,
        number_formats=NumberFormats("bf16", OPTIMIZER),
    )


def adjust(bench: Bench, machine: Machine, done: list[tuple[Trial, float]]) -> None:
    """Write the machine as whole steps show it: the host by few rows, its kernels by many."""
    few, many = (
        [(trial, s) for trial, s in done if (trial.rows == min(t.rows for t, _ in done)) == least]
        for least in (True, False)
    )
    if not few or not many:
        return
    slow = with_rate(machine, launch_s=1.0)
    # With a second a launch the host is all there is of a step.
    launch_s = [s / estimate_time(case_of(trial, slow)).seconds for trial, s in few]
    hosted = with_rate(machine, launch_s=float(np.median(launch_s)))
    cases = [case_of(trial, hosted) for trial, _ in many]
    found = fit_machine(hosted, cases, [s for _, s in many])
    found.write(bench.folder / bench.file.name.replace("steps", "machine"))
    for trial, seconds in done:
        first, then = (estimate_time(case_of(trial, one)).seconds for one in (machine, found))
        bench.add(
            f"planned {trial.name}", rows=trial.rows, micro_batches=trial.micro_batches,
            measured_s=seconds, by_ceilings_s=first, adjusted_s=then,
        )  # fmt: skip
    bench.write(machine=asdict(found))


def with_rate(machine: Machine, **known: float) -> Machine:
    """Return a machine with other constants in every format."""
    rates = {form: {**rates, **known} for form, rates in machine.rates.items()}
    return replace(machine, rates=rates)
