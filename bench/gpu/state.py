"""Steps whose masters and moments lie on the host or on disk, beside one with all on the device.

Writes ``CHIP_state.json``: seconds of a step and of its update, the most bytes on the device, bytes
on the host and on disk.
"""

import gc
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from gpu.device import Bench
from gpu.steps import LOSS_CHUNK, MICRO_BATCHES, OPTIMIZER, ROWS, Trial, cut, drawn_rows, small
from no_values import data_of

from moefold.model.init import initial_values
from moefold.optim.config import Muon, Optim
from moefold.optim.norm import clip_scale
from moefold.parallel.config import Layout
from moefold.training.step import gradients

LONG = 4
"""Times the tokens of a usual step: the host's update is worth its time where steps are long."""


def run(bench: Bench) -> int:
    """Measure AdamW's steps in every place, Muon's on the device; returns 1 where one failed."""
    with tempfile.TemporaryDirectory(prefix="moefold-state-") as folder:
        disk = {"at": "disk", "folder": folder}
        places: dict[str, dict[str, Any]] = {
            "device": {},
            "host": {"at": "host"},
            "host, half": {"at": "host", "share": 0.5},
            "host, host's step": {"at": "host", "step": "host"},
            "disk": disk,
            "disk, host's step": {**disk, "step": "host"},
        }
        for rule in (OPTIMIZER, Muon(lr=1e-4)):
            for times in (1,) if bench.smoke else (1, LONG):
                for name, state in places.items():
                    if state.get("step") == "host" and not rule.elementwise:
                        continue
                    title = f"{rule.kind} {times * MICRO_BATCHES * ROWS} tokens {name}"
                    bench.tried(title, partial(measured, bench, rule, times, state))
                    if bench.device.type == "cuda":
                        gc.collect()
                        torch.cuda.empty_cache()
    return bench.end()


def measured(bench: Bench, rule: Optim, times: int, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a step with its state in a place."""
    trial = Trial("qwen3", cut("qwen3_30b_a3b", 3), micro_batches=times * MICRO_BATCHES)
    trial = small(trial) if bench.smoke else trial
    data = data_of(trial.decoder, Layout.model_validate({"state": state}), 1, device=bench.device)
    data.fill(initial_values(trial.decoder, 1))
    optimizer, batches, updates = data.optimizer(rule), drawn_rows(trial), list[float]()
    settle: Callable[[], Any] = torch.cuda.synchronize if bench.device.type == "cuda" else int

    def step() -> None:
        figures = gradients(data, batches, LOSS_CHUNK)
        settle()
        began = time.perf_counter()
        optimizer.step(clip_scale(figures.grad_norm, 1.0))
        data.refresh_weights()
        settle()
        updates.append(time.perf_counter() - began)

    took = bench.timed({"step": step})["step"]
    peak = None
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        peak = torch.cuda.max_memory_allocated()
    offload = data.offload
    return {
        **took._asdict(),
        "update_s": min(updates),
        "peak_bytes": peak,
        "host_bytes": offload.pool.bytes if offload else 0,
        "disk_bytes": offload.file.bytes if offload and offload.file else 0,
    }
