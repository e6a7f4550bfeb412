"""Steps of fixed shapes: the host reads nothing in their passes, and what graphs of them give.

Writes ``CHIP_capture.json``. Each row is one way of sending rows, on one rank of ep8 whose
exchanges are copies, or on a device alone. Passes run
where torch raises at any wait of the host; ten steps as one graph, and ten whose blocks' parts are
graphs, are held to ten that run as they are. Seconds, kernels and peak memory of each. A CPU has no
graphs: there all run as they are.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from gpu.device import Bench
from gpu.steps import LOSS_CHUNK, OPTIMIZER, Trial, cut, drawn_rows, profiled, small
from gpu.steps import drawn as parts_of
from no_values import apart

from moefold.optim.norm import clip_scale
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.parallel.pipeline.executor import StepResult, run_step
from moefold.parallel.pipeline.graphs import build_executor
from moefold.training.step import gradients

STEPS, EP = 10, 8
ROOM = 2.0
"""Of a rank, over the mean."""


@dataclass(frozen=True)
class WayTrial(Trial):
    """A trial whose rows travel in some way."""

    way: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def layout(self) -> Layout:
        """Where its parts live."""
        given = {"graphs": self.graphs, **self.way}
        if kind := given.pop("dispatch", ""):
            rows = round(ROOM * self.copies) // (EP if kind == "padded" else 1)
            given |= {"sizes": f"ep{EP}", "zero": 0, "dispatch": {"kind": kind, "max_rows": rows}}
        return Layout.model_validate(given)


WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "padded": {"dispatch": "padded"},
    "spread": {"dispatch": "spread"},
    "clones": {"dispatch": "spread", "clones": {"slots": 2}},
    "pages": {"dispatch": "padded", "offload": {"pages": {"load": ROOM}}},
    "again": {"dispatch": "padded", "recompute": {"kind": "full"}},
}


def silent(*given: Any) -> StepResult:
    """Run this rank's line of a step where torch raises as the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        return run_step(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def run(bench: Bench) -> int:
    """Measure each way; returns 1 where one failed."""
    models = {"qwen3": cut("qwen3_30b_a3b", 4), "olmoe": cut("olmoe_1b_7b", 4)}
    for name, model in [*models.items()][: 1 if bench.smoke else None]:
        for way, given in WAYS.items():
            if bench.smoke and way not in ("alone", "clones", "pages"):
                continue
            trial: Trial = WayTrial(name, model, micro_batches=2, way=given)
            trial = small(trial) if bench.smoke else trial
            bench.tried(f"{name} {way}", partial(measured, bench, trial))
            if bench.device.type == "cuda":
                torch.cuda.empty_cache()
    return bench.end()


def measured(bench: Bench, trial: Trial) -> Mapping[str, Any]:
    """Return the figures of steps as they run and as a graph."""
    ranks, on_device = trial.layout.split.smallest_world, bench.device.type == "cuda"
    found: dict[str, Any] = {}
    with apart() if ranks > 1 else nullcontext():
        told: dict[str, list[float]] = {}
        for form in ("none", "partial", "step"):
            data = parts_of(replace(trial, graphs=form), ranks, bench.device)
            if on_device:
                torch.cuda.reset_peak_memory_stats()
            step, told[form] = stepping(data, trial)
            for _ in range(1 if bench.smoke else STEPS):
                step()
            figures = bench.timed({form: step})[form]._asdict()
            # In a smoke run one way is enough: to read a trace takes longer than the step.
            if not (bench.smoke and bench.rows):
                figures["kernels"] = profiled(step, bench.device, 1)["kernels"]
            figures["peak_bytes"] = torch.cuda.max_memory_allocated() if on_device else None
            found[form] = figures
        if on_device:
            gradients(data, drawn_rows(trial), LOSS_CHUNK, executor=silent)
    found["apart"] = max(
        abs(one - other) / abs(one)
        for form in ("partial", "step")
        for one, other in zip(told["none"], told[form], strict=True)
    )
    found["reads"] = 0 if on_device else None
    assert found["apart"] < 2e-3, f"steps of a graph are {found['apart']} off"
    return found


def stepping(data: ShardedState, trial: Trial) -> tuple[Callable[[], None], list[float]]:
    """Return a call that makes a step of other rows each time, and what the steps tell."""
    optimizer, told, executor = data.optimizer(OPTIMIZER), list[float](), build_executor(data)

    def step() -> None:
        rows = drawn_rows(trial, seed=len(told))
        figures = gradients(data, rows, LOSS_CHUNK, executor=executor)
        optimizer.step(clip_scale(figures.grad_norm, 1.0))
        data.refresh_weights()
        told.append(figures.lm_loss)

    return step, told
