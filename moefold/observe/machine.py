"""What this machine is, and how fast it multiplies: the denominator of FLOPs utilisation."""

import platform
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

SIZE = 768
"""Side of the square product that is timed on a CPU: large enough to be bound by arithmetic."""


@dataclass(frozen=True)
class Machine:
    """A device's sustained matrix rate in one number format."""

    flops_per_s: float
    source: str
    """How the rate is known."""

    @classmethod
    def measured(cls, dtype: torch.dtype, device: torch.device, seconds: float = 0.25) -> "Machine":
        """Time square products for about ``seconds`` and take the best.

        The numbers are drawn, since a device multiplies zeros faster, and from a generator apart.
        """
        side = SIZE if device.type == "cpu" else 8192
        own = torch.Generator(device).manual_seed(0)
        a, b = (torch.randn(side, side, device=device, generator=own).to(dtype) for _ in range(2))
        best, spent = float("inf"), 0.0
        while spent < seconds:
            started = time.perf_counter()
            (a @ b)[0, 0].item()
            taken = time.perf_counter() - started
            best, spent = min(best, taken), spent + taken
        threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
        return cls(
            2 * side**3 / best,
            f"measured at start: {side}^3 in {dtype}{threads}".replace("torch.", ""),
        )


@cache
def measured(dtype: torch.dtype, device: torch.device) -> Machine:
    """Return what ``Machine.measured`` finds, the first time it is asked for in this process."""
    return Machine.measured(dtype, device)


def cpu_name() -> str:
    """Return what the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
