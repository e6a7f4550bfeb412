"""Measured matrix-product rates of this machine, and model FLOPs utilisation (MFU) against them."""

import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import product
from operator import attrgetter
from pathlib import Path

import torch
from torch import Tensor

from moefold.comm.world import World
from moefold.layers.config import Precision, PrecisionSetting, faster_precision
from moefold.layers.precision import DTYPES
from moefold.planner.hardware import Format, find_device
from moefold.training.formatting import plural
from moefold.training.hooks.base import Figures

HOST_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
"""Memory of this machine in bytes."""
CPU_SIDES: tuple[int, ...] = (128, 256, 512, 768, 1024)
GPU_SIDES: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
"""Side lengths of the square products that are timed; the best rate counts."""
PEAK_FORMATS: dict[torch.dtype, Format] = {torch.bfloat16: "bf16", torch.float32: "fp32"}
"""Formats for which chips' peak rates are published."""
NUM_REMEASURES = 3
REMEASURE_S = 0.5
"""Number and seconds of new measurements of the machine's rate if steps exceed it."""


@dataclass(frozen=True)
class MatrixRate:
    """A device's sustained matrix rate in one number format."""

    flops_per_s: float
    source: str
    """How the rate was determined."""


def measure_rates(
    dtypes: Sequence[torch.dtype], device: torch.device, seconds: float = 0.08
) -> dict[torch.dtype, MatrixRate]:
    """Time square products, as in a linear layer, and return the best rate of each dtype.

    The dtypes alternate, so that other load on the machine affects all alike. Sizes whose product
    would exceed the remaining time are skipped: in a slow dtype only small ones run. Each dtype
    gets ``seconds``, plus one first product.
    """
    sides = CPU_SIDES if device.type == "cpu" else GPU_SIDES
    generator = torch.Generator(device).manual_seed(0)
    # Random, since devices multiply zeros faster; the global generator is left alone.
    random_values = torch.rand(2 * max(sides) ** 2, device=device, generator=generator)
    values = {dtype: random_values.to(dtype) for dtype in dtypes}
    best = dict.fromkeys(dtypes, (0.0, sides[0]))
    spent = dict.fromkeys(dtypes, 0.0)
    any_fits = True
    for operand in values.values():
        _product_seconds(operand, sides[0])  # warm-up: the first product includes set-up
    while any_fits:
        any_fits = False
        for side, dtype in product(sides, dtypes):
            flops = 2 * side**3
            rate = best[dtype][0]
            if rate and spent[dtype] + flops / rate > seconds:
                continue
            any_fits = True
            seconds_taken = _product_seconds(values[dtype], side)
            spent[dtype] += seconds_taken
            best[dtype] = max(best[dtype], (flops / seconds_taken, side))
    threads = f", {plural(torch.get_num_threads(), 'thread')}" if device.type == "cpu" else ""
    rates = {}
    for dtype, (rate, side) in best.items():
        name = str(dtype).removeprefix("torch.")
        rates[dtype] = MatrixRate(rate, f"measured at start: {side}^3 in {name}{threads}")
    return rates


def _product_seconds(values: Tensor, side: int) -> float:
    a, b = values[: 2 * side * side].view(2, side, side)
    started = time.perf_counter()
    (a @ b.T)[0, 0].item()
    return time.perf_counter() - started


measure_rates_cached = cache(measure_rates)
"""``measure_rates``, cached for the life of the process."""


def matrix_rates(device: torch.device, *more: Precision) -> dict[Precision, MatrixRate]:
    """Return the measured rates of bf16, fp32 and ``more``, cached after the first call."""
    names = tuple(dict.fromkeys(("bf16", "fp32", *more)))
    rates = measure_rates_cached(tuple(DTYPES[name] for name in names), device)
    return {name: rates[DTYPES[name]] for name in names}


def resolve_precision(setting: PrecisionSetting, device: torch.device) -> Precision:
    """Return the format of a setting: ``auto`` is the faster one on this device."""
    if setting != "auto":
        return setting
    return faster_precision({name: rate.flops_per_s for name, rate in matrix_rates(device).items()})


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread while open, as launched ranks do and rates of a CPU are measured."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def device_name(device: torch.device) -> str:
    """Return the name of a CUDA device, or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def cpu_name() -> str:
    """Return the processor's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        line = next(line for line in lines if "model name" in line)
        return line.split(":", 1)[1].strip()
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


class Utilisation:
    """Model FLOPs utilisation (MFU) of the ranks of ``world``, which compute in ``dtype``.

    All devices are of one kind. Utilisations above 1 are not reported.
    """

    def __init__(self, machine: MatrixRate, dtype: torch.dtype, world: World) -> None:
        device = world.device
        self._dtype = dtype
        self._device = device
        self._ranks = world.size
        self._remeasures_left = NUM_REMEASURES
        self.machine = machine
        """Best rate of one rank's device measured so far."""
        self.peak: float | None = None
        """The chip's published peak in FLOP/s, None if unknown."""
        chip = find_device(device_name(device)) if device.type == "cuda" else None
        if chip is not None and dtype in PEAK_FORMATS:
            self.peak = chip.peak(PEAK_FORMATS[dtype])

    def figures(self, flops_per_s: float) -> Figures:
        """Return ``mfu``, the share of the measured rate, and ``mfu_of_peak`` if that is known.

        If steps exceed the measured rate, the machine was busy then: it is measured again.
        """
        per_rank = flops_per_s / self._ranks
        while per_rank > self.machine.flops_per_s and self._remeasures_left:
            self._remeasures_left -= 1
            remeasured = measure_rates([self._dtype], self._device, REMEASURE_S)[self._dtype]
            self.machine = max(self.machine, remeasured, key=attrgetter("flops_per_s"))
        shares = {"mfu": per_rank / self.machine.flops_per_s}
        if self.peak is not None:
            shares["mfu_of_peak"] = per_rank / self.peak
        return {name: share for name, share in shares.items() if share <= 1}
