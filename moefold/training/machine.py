"""Measured matrix-product rates of this machine, and model FLOPs utilisation (MFU) against them."""

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from moefold.comm.world import World
from moefold.layers.config import Asked, Precision, faster
from moefold.layers.precision import DTYPES
from moefold.planner.hardware import Format, sold_as
from moefold.training.hooks.base import Figures
from moefold.training.words import plural

HOST_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
"""Memory of this machine."""
SIDES = {"cpu": (128, 256, 512, 768, 1024)}
SIDES_ELSEWHERE = (512, 1024, 2048, 4096, 8192)
"""Of the square products that are timed: the best rate counts, whichever has it."""
PEAK_FORMATS: dict[torch.dtype, Format] = {torch.bfloat16: "bf16", torch.float32: "fp32"}
"""Formats that chips' peaks are published for."""
AGAIN, AGAIN_S = 3, 0.5
"""How often, and for how long, the machine's rate is measured again where steps exceed it."""


@dataclass(frozen=True)
class MatrixRate:
    """A device's sustained matrix rate in one number format."""

    flops_per_s: float
    source: str
    """How the rate is known."""


def measure(
    dtypes: Sequence[torch.dtype], device: torch.device, seconds: float = 0.08
) -> dict[torch.dtype, MatrixRate]:
    """Time square products, as a linear layer makes them, and return the best rate of each type.

    The types take turns, so that a machine which others use is alike to all. A size whose product
    would not fit in the time that is left is passed over: of a slow type only small ones run. Each
    type is given ``seconds``, and a first product more.
    """
    sides = SIDES.get(device.type, SIDES_ELSEWHERE)
    own = torch.Generator(device).manual_seed(0)
    # Drawn, since a device multiplies zeros faster, and from a generator apart.
    drawn = torch.rand(2 * max(sides) ** 2, device=device, generator=own)
    values = {dtype: drawn.to(dtype) for dtype in dtypes}
    best = dict.fromkeys(dtypes, (0.0, sides[0]))
    spent, fits = dict.fromkeys(dtypes, 0.0), True
    for given in values.values():
        _product_seconds(given, sides[0])  # what the first one sets up is not its own time
    while fits:
        fits = False
        for side, dtype in product(sides, dtypes):
            work, rate = 2 * side**3, best[dtype][0]
            if rate and spent[dtype] + work / rate > seconds:
                continue
            fits, taken = True, _product_seconds(values[dtype], side)
            spent[dtype] += taken
            best[dtype] = max(best[dtype], (work / taken, side))
    threads = f", {plural(torch.get_num_threads(), 'thread')}" if device.type == "cpu" else ""
    return {
        dtype: MatrixRate(
            rate, f"measured at start: {side}^3 in {str(dtype).removeprefix('torch.')}{threads}"
        )
        for dtype, (rate, side) in best.items()
    }


def _product_seconds(values: Tensor, side: int) -> float:
    a, b = values[: 2 * side * side].view(2, side, side)
    started = time.perf_counter()
    (a @ b.T)[0, 0].item()
    return time.perf_counter() - started


measured = cache(measure)
"""What ``measure`` finds, the first time it is asked for in this process."""


def machines(device: torch.device, *more: Precision) -> dict[Precision, MatrixRate]:
    """Return the measured rates of bf16, fp32 and ``more``; once measured, at no cost."""
    wanted: tuple[Precision, ...] = ("bf16", "fp32", *more)
    names = tuple(dict.fromkeys(wanted))
    found = measured(tuple(DTYPES[name] for name in names), device)
    return {name: found[DTYPES[name]] for name in names}


def settled(asked: Asked, device: torch.device) -> Precision:
    """Return the number format that a run asks for; for ``auto`` the faster one on this device."""
    if asked != "auto":
        return asked
    return faster({name: one.flops_per_s for name, one in machines(device).items()})


def device_name(device: torch.device) -> str:
    """Return what a device calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def cpu_name() -> str:
    """Return what the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


class Utilisation:
    """Model FLOPs per second as shares of what devices can do; no share above one is given.

    The ranks of ``world`` compute, on devices of one kind, and products in ``dtype``.
    """

    def __init__(self, machine: MatrixRate, dtype: torch.dtype, world: World) -> None:
        device = world.device
        self._dtype, self._device, self._ranks, self._left = dtype, device, world.size, AGAIN
        self.machine = machine
        """The measured rate of one rank's device, or the best one since."""
        self.peak: float | None = None
        """FLOP/s that the chip is sold with, None where that is not known."""
        chip = sold_as(device_name(device)) if device.type == "cuda" else None
        if chip is not None and dtype in PEAK_FORMATS:
            self.peak = chip.peak(PEAK_FORMATS[dtype])

    def figures(self, flops_per_s: float) -> Figures:
        """Return ``mfu``, the share of the measured rate, and ``mfu_of_peak`` where it is known.

        A rate that steps exceed was taken while the machine was busy: it is measured again.
        """
        each = flops_per_s / self._ranks
        while each > self.machine.flops_per_s and self._left:
            self._left -= 1
            again = measure([self._dtype], self._device, AGAIN_S)[self._dtype]
            self.machine = max(self.machine, again, key=lambda one: one.flops_per_s)
        shares = {"mfu": each / self.machine.flops_per_s}
        if self.peak is not None:
            shares["mfu_of_peak"] = each / self.peak
        return {name: share for name, share in shares.items() if share <= 1}
