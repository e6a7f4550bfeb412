"""Activations on host and on disk beside none: what a step costs, what of the copies it hides.

Writes ``CHIP_offload.json``. Each row is one step of one model on one device: seconds, peak bytes
beside those planned, bytes that left, takes that found their block there, and the share of the
seconds of copies that the step hides, which is one less the longer step over what copies take by
themselves.
"""

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpu.device import Bench, timed
from gpu.steps import MICRO_BATCHES, Trial, cut, drawn, small, stepping

from moefold.layers.offload import HostStore
from moefold.parallel.config import Layout

ROUNDS = 5
BLOCK = 64 << 20
"""Bytes of a copy whose rate is measured."""
HOST = {"modules": ["experts", "attention"]}
DISK = {"modules": ["experts"]}


@dataclass(frozen=True)
class AwayTrial(Trial):
    """A trial some of whose activations lie elsewhere."""

    away: str = ""
    """``host``, ``disk``, or nothing."""

    @property
    def layout(self) -> Layout:
        """Where its parts live."""
        to = HOST if self.away == "host" else DISK | {"folder": tempfile.gettempdir()}
        return Layout.model_validate({"offload": {self.away: to} if self.away else None})


def run(bench: Bench) -> int:
    """Measure each model with nothing away first; returns 1 where one failed."""
    models = {"qwen3": cut("qwen3_30b_a3b", 4), "olmoe": cut("olmoe_1b_7b", 6)}
    plain: dict[str, float] = {}
    for name, model in [*models.items()][: 1 if bench.smoke else None]:
        for away in ("", "host", "disk"):
            trial = AwayTrial(name, model, away=away, micro_batches=MICRO_BATCHES)

            def measure(trial: AwayTrial = trial) -> Mapping[str, Any]:
                found = measured(bench, trial, plain.get(trial.name))
                plain.setdefault(trial.name, found["median"])
                return found

            bench.tried(f"{name} {away or 'nothing'}", measure, layers=len(model.blocks))
    return bench.end()


def measured(bench: Bench, trial: AwayTrial, plain: float | None) -> dict[str, Any]:
    """Return the figures of a trial's step, beside the seconds of one with nothing away."""
    if bench.smoke:
        trial = replace(trial, **vars(small(trial)) | {"micro_batches": MICRO_BATCHES})
    data = drawn(trial, 1, bench.device)
    step, offload = stepping(trial, data), data.parts.offload
    took = timed({"step": step}, bench.device, 1 if bench.smoke else ROUNDS)["step"]
    places = {} if offload is None else offload.stores
    before = {name: place.stats.moved for name, place in places.items()}
    on_device = bench.device.type == "cuda"
    if on_device:
        torch.cuda.reset_peak_memory_stats()
    step()
    found: dict[str, Any] = took._asdict()
    found["peak_bytes"] = torch.cuda.max_memory_allocated() if on_device else None
    if offload is None:
        return found
    moved = {name: place.stats.moved - before[name] for name, place in places.items()}
    most = {name: place.stats.peak for name, place in places.items()}
    alone = sum(copying(place, bench.device) * moved[name] for name, place in places.items())
    takes = sum(place.stats.reads for place in places.values())
    return found | {
        "moved_bytes": moved,
        "away_bytes": most,
        "present": sum(place.stats.prefetched for place in places.values()) / takes,
        "copies_s": alone,
        "hidden": None if plain is None else 1 - max(took.median - plain, 0.0) / alone,
    }


def copying(place: HostStore, device: torch.device) -> float:
    """Return the seconds that a byte takes to a place and back, with nothing beside it."""
    data_N = torch.zeros(BLOCK, dtype=torch.uint8, device=device)
    into_N, began = torch.empty_like(data_N), time.perf_counter()
    sent = place.write(data_N)
    place.read(sent, into_N).result()
    seconds = time.perf_counter() - began
    place.free(sent, BLOCK)
    return seconds / BLOCK
