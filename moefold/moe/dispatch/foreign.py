"""Dispatchers from other packages: found when chosen, and what all of them ask for."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from moefold.moe.config import Foreign

DEVICE = "cuda"
"""Where the back ends run."""


def load(record: Foreign) -> Any:
    """Import the package of a back end.

    Raises:
        ValueError: where it cannot be imported or is another version; says how to get it.
    """
    try:
        module = import_module(record.module)
        missing = [name for name in record.names if getattr(module, name, None) is None]
        why = f"it has no {', '.join(missing)}" if missing else ""
    except (ImportError, OSError) as error:
        why = str(error).partition("\n")[0]
    if why:
        raise ValueError(
            f"layout.dispatch: {record.kind} needs {record.module}, and {why}. {record.remedy}, "
            "or choose dispatch: alltoall_once, which sends the same rows"
        )
    return module


def ends_of(counts_E: Tensor, device: torch.device) -> Tensor:
    """Return int32 end rows of experts on a device from counts, which may be on the host."""
    return counts_E.to(device).cumsum(0, dtype=torch.int64).to(torch.int32)


def check_rows(record: Foreign, x_TD: Tensor) -> None:
    """Refuse rows that the back ends do not send.

    Raises:
        ValueError: where rows are not bf16 on a GPU.
    """
    if x_TD.dtype != torch.bfloat16 or x_TD.device.type != DEVICE:
        raise ValueError(
            f"layout.dispatch: {record.kind} sends bf16 rows of GPUs, and these are {x_TD.dtype} "
            f"on {x_TD.device.type}. Set train.precision: bf16, or choose dispatch: alltoall_once"
        )
