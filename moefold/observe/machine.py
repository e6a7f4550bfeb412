"""What this machine is, and how fast it multiplies: the denominator of FLOPs utilisation."""

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

SIDES = {"cpu": (128, 256, 512, 768, 1024)}
SIDES_ELSEWHERE = (512, 1024, 2048, 4096, 8192)
"""Of the square products that are timed: the best rate counts, whichever has it."""


@dataclass(frozen=True)
class Machine:
    """A device's sustained matrix rate in one number format."""

    flops_per_s: float
    source: str
    """How the rate is known."""


def measure(
    dtypes: Sequence[torch.dtype], device: torch.device, seconds: float = 0.08
) -> dict[torch.dtype, Machine]:
    """Time square products, as a linear layer makes them, and return the best rate of each type.

    The types take turns, so that a machine which others use is alike to all. A size whose product
    would not fit in the time that is left is passed over: of a slow type only small ones run.

    Args:
        dtypes: number formats of both factors.
        device: where.
        seconds: for each type, and a first product of it more.
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
    count = torch.get_num_threads()
    threads = f", {count} thread{'s' * (count != 1)}" if device.type == "cpu" else ""
    return {
        dtype: Machine(rate, f"measured at start: {side}^3 in {_name(dtype)}{threads}")
        for dtype, (rate, side) in best.items()
    }


def _product_seconds(values: Tensor, side: int) -> float:
    a, b = values[: 2 * side * side].view(2, side, side)
    started = time.perf_counter()
    (a @ b.T)[0, 0].item()
    return time.perf_counter() - started


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def measured(dtypes: tuple[torch.dtype, ...], device: torch.device) -> dict[torch.dtype, Machine]:
    """Return what ``measure`` finds, the first time it is asked for in this process."""
    return measure(dtypes, device)


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
