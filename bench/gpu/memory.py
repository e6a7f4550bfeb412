"""A step's bytes on a device beside those planned: by part after each action, and at its peak.

Writes ``CHIP_memory.json``. Each row is one model under one policy: for each part the bytes planned
and executed at the action where they differ most, what the allocator has beyond all parts together,
and the most that it had allocated and reserved in a step. ``off`` is executed over planned, less
one; ``within`` says whether parts and peaks are planned to 5 %. A CPU has no such allocator: there
the parts alone are compared.
"""

import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gpu.device import Bench
from gpu.steps import LOSS_CHUNK, OPTIMIZER, Trial, cut, drawn_rows, gpt_oss, small
from no_values import data_of

from moefold.model.init import initial_values
from moefold.optim.norm import clip_scale
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.planner.case import Case, NumberFormats, Software
from moefold.planner.memory import estimate_memory
from moefold.planner.task import TrainingTask
from moefold.training.memory import cluster_of
from moefold.training.memory_bench import PARTS, planned_bytes
from moefold.training.memory_probe import Bytes, MemoryProbe, state_bytes
from moefold.training.step import gradients

BOUND = 0.05
"""How far from what is planned a part or a peak may be, of what is planned in all."""
POLICIES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "norms, experts": {"recompute": {"kind": "selective", "modules": ["norms", "experts"]}},
    "norms, permute": {"recompute": {"kind": "selective", "modules": ["norms", "permute"]}},
    "blocks": {"recompute": {"kind": "full"}},
    "host": {"offload": {"host": {"modules": ["experts", "attention"]}}},
    "state": {"state": {"at": "host"}},
}


@dataclass(frozen=True)
class Policed(Trial):
    """A trial under a policy."""

    policy: str = "nothing"

    @property
    def layout(self) -> Layout:
        """Where its parts live."""
        return Layout.model_validate(POLICIES[self.policy])


class Allocating(MemoryProbe):
    """Asks a device's allocator too."""

    def _measure(self) -> Bytes:
        there = torch.cuda.memory_allocated() if self._parts.world.device.type == "cuda" else 0
        return super()._measure() | {"allocated": there}


def run(bench: Bench) -> int:
    """Weigh each model under each policy; returns 1 where one failed."""
    models = {
        "qwen3": cut("qwen3_30b_a3b", 3),
        "olmoe": cut("olmoe_1b_7b", 4),
        "deepseek": cut("deepseek_v3", 2, first=2, experts=32, vocab=32768),
        "gpt_oss": gpt_oss(),
    }
    for name, model in models.items():
        few = name == "gpt_oss" or (bench.smoke and name != "qwen3")
        for policy in ("nothing", "blocks") if few else POLICIES:
            trial = Policed(name, model, policy=policy)
            trial = small(trial) if bench.smoke else trial
            bench.tried(
                f"{name} {policy}", partial(measured, bench, trial), layers=len(model.blocks)
            )
            if bench.device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()
    return bench.end()


def case_of(trial: Trial, data: ShardedState) -> Case:
    """Return a trial's step as the planner takes it, on the device that it runs on."""
    task = TrainingTask(
        trial.name, trial.decoder, trial.rows, trial.micro_batches, cluster_of(data.parts.world),
        NumberFormats("bf16", OPTIMIZER), load=1.0, software=Software(loss_chunk=LOSS_CHUNK),
    )  # fmt: skip
    return task.case(trial.layout)


def measured(bench: Bench, trial: Trial) -> Mapping[str, Any]:
    """Return the bytes of a trial's step beside those planned."""
    before = torch.cuda.memory_allocated() if bench.device.type == "cuda" else 0
    data = data_of(trial.decoder, trial.layout, 1, device=bench.device)
    data.fill(initial_values(trial.decoder, 1))
    optimizer, batches = data.optimizer(OPTIMIZER), drawn_rows(trial)
    left: list[Bytes] = []

    def step(**executor: Any) -> None:
        figures = gradients(data, batches, LOSS_CHUNK, **executor)
        optimizer.step(clip_scale(figures.grad_norm, 1.0))
        data.refresh_weights()

    step()
    moments = state_bytes(data, optimizer)["moments"]
    peaks = dict(peaks_of(step)) if bench.device.type == "cuda" else {}
    step(executor=lambda *given: Allocating(data, left, (), *given).run())
    case = case_of(trial, data)
    plan = estimate_memory(case)[0]
    wanted = [values for values, _ in planned_bytes(case, trial.layout, 0)]
    parts = {
        part: worst([(want[part], had[part]) for want, had in zip(wanted, left, strict=True)])
        for part in (*PARTS, "host", "disk")
        if part in left[0]
    }
    parts["moments"] = compared(wanted[0]["moments"], moments)
    found: dict[str, Any] = {"parts": parts}
    offs = [abs(one["executed"] - one["planned"]) for one in parts.values()]
    within = max(offs) <= BOUND * plan.peak_allocated
    if peaks:
        allocated = compared(plan.peak_allocated, peaks["allocated"] - before)
        reserved = compared(plan.peak_allocated * (1 + plan.fragmentation), peaks["reserved"])
        within &= max(abs(allocated["off"]), abs(reserved["off"])) <= BOUND
        beyond = [
            one["allocated"] - before - moments - sum(one.get(part, 0) for part in PARTS)
            for one in left
        ]
        found |= {"allocated": allocated, "reserved": reserved, "beyond_parts": max(beyond)}
    return {"within": within, **found}


def peaks_of(step: Any) -> Iterator[tuple[str, int]]:
    """Yield the most bytes that the allocator had given out, and had taken, in a step."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    yield "allocated", torch.cuda.max_memory_allocated()
    yield "reserved", torch.cuda.max_memory_reserved()


def worst(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """Return the pair of planned and executed bytes that are furthest apart, else the largest."""
    return compared(*max(pairs, key=lambda pair: (abs(pair[1] - pair[0]), pair[0])))


def compared(want: float, had: float) -> dict[str, float]:
    """Return bytes planned and executed, and how far off the plan is."""
    return {"planned": want, "executed": had, "off": had / want - 1 if want else float(had > 0)}
