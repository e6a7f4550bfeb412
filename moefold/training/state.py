"""What a run is between two steps, and its form in a checkpoint.

Nothing random is stored: initial values are a function of (seed, name), the data of (seed, step),
and no step draws anything else. Counters start anew with each step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moefold.checkpoint.load import load_into
from moefold.config.check import check
from moefold.config.problems import dotted
from moefold.config.records import plain
from moefold.model.decoder import DecoderModel
from moefold.optim.base import Optimizer
from moefold.run import FREE_IN_IDENTITY, IDENTITY, Run
from moefold.training.stored import model_tensors


@dataclass
class Progress:
    """How far a run is."""

    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Valid tokens trained on."""
    excluded: tuple[int, ...] = ()
    """Places in the data's order that a rewind left out, ascending."""

    def place(self) -> int:
        """Return the place in the data's order of the next step."""
        place = self.step
        for excluded in self.excluded:
            place += excluded <= place
        return place


def tensors_of(model: DecoderModel, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return every tensor of the state by its name in a checkpoint: live tensors, not copies."""
    return model_tensors(model) | optimizer.state()


def restore(path: Path, model: DecoderModel, optimizer: Optimizer) -> Progress:
    """Fill model and optimizer from a checkpoint, and return how far it is.

    Raises:
        DamagedError: where a byte is not as written; model and optimizer then hold a mixture.
        MismatchError: where the tensors are not these; nothing is changed then.
    """
    with torch.no_grad():
        progress = load_into(path, tensors_of(model, optimizer))["progress"]
    return Progress(progress["step"], progress["tokens"], tuple(progress["excluded"]))


def as_known_today(stored: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a stored run with the fields that were added since, at their defaults.

    A run that today's records no longer accept comes back as it is, and differs where it differs.
    """
    record = check(Run, stored).record
    return stored if record is None else plain(record)


def differences(
    stored: Mapping[str, Any], present: Mapping[str, Any], keys: Sequence[str] = IDENTITY
) -> list[str]:
    """Return, as ``path: stored -> present``, where two runs do not compute the same."""
    lines: list[str] = []
    for key in keys:
        _compare((key,), stored.get(key), present.get(key), lines)
    return lines


def _compare(path: tuple[str | int, ...], stored: Any, present: Any, lines: list[str]) -> None:
    if path in FREE_IN_IDENTITY or stored == present:
        return
    if isinstance(stored, Mapping) and isinstance(present, Mapping):
        for key in dict.fromkeys([*stored, *present]):
            _compare((*path, key), stored.get(key), present.get(key), lines)
    else:
        lines.append(f"{dotted(path)}: {stored} -> {present}")
