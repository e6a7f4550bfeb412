"""The state of a run between two steps, and its form in a checkpoint.

No state of random generators is stored: initial values are a function of (seed, name), data and
draws of (seed, step). Statistics such as expert counts are reset at each step.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from moefold.checkpoint.errors import MismatchError
from moefold.checkpoint.load import Reader, difference
from moefold.checkpoint.tensors import DTYPES, TensorSlice
from moefold.comm.collectives import sum_
from moefold.layers.placement import slices
from moefold.optim.base import Optimizer
from moefold.optim.config import matches
from moefold.parallel.data.sharding import LocalSlice, ShardedState
from moefold.spec.decoder import known_weights
from moefold.training.model_checkpoint import MODEL

MIN_WRITE_BYTES = 16 * 2**20
"""Minimum bytes that each rank writes if several ranks split a box that they all hold."""


@dataclass
class Progress:
    """Progress of a run."""

    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Valid tokens trained on."""
    excluded: tuple[int, ...] = ()
    """Places of the data order that rewinds excluded, ascending."""
    strikes: int = 0
    """Consecutive non-finite steps, or rewinds since the run last passed the offending step."""
    struck_at: int = 0
    """Number of steps done before the newest non-finite step."""
    sequence_offset: int = 0
    """Sequences read beyond place times batch, if a fork changed the batch size."""

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> "Progress":
        """Read from a checkpoint's JSON data, of versions with fewer or more fields too."""
        known = {each.name: stored[each.name] for each in fields(cls) if each.name in stored}
        return cls(**{**known, "excluded": tuple(stored["excluded"])})

    def place(self) -> int:
        """Return the next step's place in the data order."""
        place = self.step
        for excluded in self.excluded:
            place += excluded <= place
        return place

    def rebatched(self, batch: int, new: int) -> "Progress":
        """Return the progress to continue with ``new`` sequences per step instead of ``batch``."""
        if batch == new:
            return self
        offset = self.sequence_offset + self.place() * batch - self.step * new
        return replace(self, excluded=(), sequence_offset=offset)


def iter_state(data: ShardedState, optimizer: Optimizer | None) -> Iterator[tuple[str, LocalSlice]]:
    """Yield every box of the state on this rank, not copied, with its tensor's checkpoint name.

    Without an optimizer, yield the model's boxes only.
    """
    yield from ((MODEL + held.name, held) for held in data.weights())
    if optimizer is None:
        return
    yield from ((held.name, held) for held in data.optimizer_state(optimizer))


def full_weights(data: ShardedState, pattern: str) -> dict[str, Tensor]:
    """Return the parameters whose global names match a pattern, such as ``*.router.weight``.

    They are unsharded and on the host of each rank. All ranks call it.
    """
    model, ranks = data.placed.model, data.placed.world.on_host
    known = (w for w in known_weights(model.record) if matches(w.name, (pattern,)))
    found = {w.name: torch.zeros(w.shape, dtype=model.recipe.master_dtype) for w in known}
    for held in data.weights():
        if held.is_first and held.name in found:
            found[held.name][slices(held.box)] = held.tensor.detach()
    data.flush()
    return {name: sum_(whole, ranks) for name, whole in found.items()}


def signature(data: ShardedState, optimizer: Optimizer) -> str:
    """Return a digest of name, box, shape and dtype of this rank's state, in order."""
    facts = [
        [name, held.box, held.shape, str(held.tensor.dtype)]
        for name, held in iter_state(data, optimizer)
    ]
    return sha256(json.dumps(facts).encode()).hexdigest()


def contents(data: ShardedState, optimizer: Optimizer) -> dict[str, list[TensorSlice]]:
    """Return the slices of the state that this rank writes; each element is written by one rank."""
    found: dict[str, list[TensorSlice]] = {}
    for name, held in iter_state(data, optimizer):
        written = list(assigned_slices(name, held))
        if written:
            found.setdefault(name, []).extend(written)
    return found


def assigned_slices(
    name: str, held: LocalSlice, min_bytes: int = MIN_WRITE_BYTES
) -> Iterator[TensorSlice]:
    """Yield the slices that this rank writes of a box that it holds.

    If several ranks hold copies of a box, a hash of its name selects the writer; a large box is
    split along its first dim among some of them, at least ``share_bytes`` each.
    """
    at, tensor = tuple(start for start, _ in held.box), held.tensor.detach()
    size = tensor.numel() * tensor.element_size()
    rows = len(tensor) if tensor.dim() else 1
    pieces = max(1, min(held.copies, rows, size // min_bytes))
    start = crc32(f"{name}{at}".encode())
    for piece in range(pieces):
        if (start + piece * held.copies // pieces) % held.copies != held.copy:
            continue
        if pieces == 1:
            yield TensorSlice(tensor, held.shape, at)
        else:
            first, end = piece * rows // pieces, (piece + 1) * rows // pieces
            yield TensorSlice(tensor[first:end], held.shape, (at[0] + first, *at[1:]))


def restore(path: Path, data: ShardedState, optimizer: Optimizer | None) -> Progress:
    """Fill this rank's state from a checkpoint of any layout; return the run's progress.

    Without an optimizer only the model is filled, and the progress is that of a new run.
    Once all ranks have succeeded, call ``data.refresh_weights()`` to refresh the compute weights.

    Raises:
        DamagedError: if data are damaged; the state is then partly overwritten.
        MismatchError: if names, shapes or dtypes differ; the state is then unchanged.
    """
    with Reader(path) as reader, torch.no_grad():
        wanted = list(iter_state(data, optimizer))
        stored = reader.manifest.tensors
        if optimizer is None:
            stored = {name: held for name, held in stored.items() if name.startswith(MODEL)}
        names = dict(wanted)
        # Frozen parameters have their compute dtype here, whatever the stored dtype.
        frozen = {MODEL + name for name, held in data.params.items() if not held.requires_grad}
        missing = [name for name in names if name not in stored]
        whole = data.placed.world.size == 1  # else the rest is on other ranks
        unexpected = [name for name in stored if name not in names] if whole else []
        mismatched = {}
        for name, held in names.items():
            if name in stored:
                here = DTYPES[stored[name].dtype] if name in frozen else held.tensor.dtype
                if what := difference(stored[name], held.shape, here):
                    mismatched[name] = what
        if missing or unexpected or mismatched:
            raise MismatchError(path, missing, unexpected, mismatched)
        reader.check_sizes(names)
        for name, held in wanted:
            if data.has_values:
                values = held.tensor.to(DTYPES[stored[name].dtype])
                reader.read_into(name, values, tuple(start for start, _ in held.box))
                if values is not held.tensor:
                    held.tensor.copy_(values)
        return Progress() if optimizer is None else Progress.of(reader.manifest.meta["progress"])
