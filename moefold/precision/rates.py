"""What products of each number format run at on this machine."""

import torch

from moefold.observe.machine import Machine, measured
from moefold.precision.config import Asked, Precision, faster
from moefold.precision.recipe import DTYPES


def machines(device: torch.device, *more: Precision) -> dict[Precision, Machine]:
    """Return the measured rates of bf16, fp32 and ``more``; once measured, at no cost."""
    wanted: tuple[Precision, ...] = ("bf16", "fp32", *more)
    names = tuple(dict.fromkeys(wanted))
    found = measured(tuple(DTYPES[name] for name in names), device)
    return {name: found[DTYPES[name]] for name in names}


def settled(asked: Asked, device: torch.device) -> Precision:
    """Return the format that a run asks for; for ``auto`` the faster one on this device."""
    if asked != "auto":
        return asked
    return faster({name: one.flops_per_s for name, one in machines(device).items()})
