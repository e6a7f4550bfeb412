"""How much of what its devices can do a run does."""

import torch

from moefold.comm.world import World
from moefold.observe.machine import Machine, device_name, measure
from moefold.planner.hardware import Format, sold_as
from moefold.training.hooks.base import Figures

FORMATS: dict[torch.dtype, Format] = {torch.bfloat16: "bf16", torch.float32: "fp32"}
"""Formats that peaks are published for."""
AGAIN, AGAIN_S = 3, 0.5
"""How often, and for how long, the machine's rate is measured again where steps exceed it."""


class Utilisation:
    """Model FLOPs per second as shares of what devices can do; no share above one is given.

    Args:
        machine: the measured rate of one rank's device.
        dtype: what products are computed in.
        world: the ranks that compute, on devices of one kind.

    Attributes:
        machine: the same, or the best rate since.
        peak: FLOP/s that the chip is sold with, None where that is not known.
    """

    def __init__(self, machine: Machine, dtype: torch.dtype, world: World) -> None:
        device = world.device
        self.machine, self._dtype, self._device, self._ranks = machine, dtype, device, world.size
        self._left = AGAIN
        self.peak: float | None = None
        chip = sold_as(device_name(device)) if device.type == "cuda" else None
        if chip is not None and dtype in FORMATS:
            self.peak = chip.peak(FORMATS[dtype])

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
