"""What a run is between two steps, and its form in a checkpoint.

Nothing random is stored: initial values are a function of (seed, name), the data of (seed, step),
and no step draws anything else. Counters start anew with each step.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from moefold.checkpoint.errors import MismatchError
from moefold.checkpoint.load import Reader, difference
from moefold.checkpoint.tensors import DTYPES, TensorSlice
from moefold.optim.base import Optimizer
from moefold.parallel.data.sharding import LocalSlice, ShardedState
from moefold.training.model_checkpoint import MODEL

SHARE_BYTES = 16 * 2**20
"""Bytes from which on a box that several ranks hold is written by more than one of them."""


@dataclass
class Progress:
    """How far a run is."""

    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Valid tokens trained on."""
    excluded: tuple[int, ...] = ()
    """Places in the data's order that a rewind left out, ascending."""
    strikes: int = 0
    """Steps that were not finite in a row, or rewinds since the run last got past one."""
    struck_at: int = 0
    """Steps done before the newest of them."""
    sequence_offset: int = 0
    """Sequences that were read beyond the place times the batch: a fork's source had another."""

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> "Progress":
        """Read it from JSON data of any version: with fewer fields, or more."""
        known = {each.name: said[each.name] for each in fields(cls) if each.name in said}
        return cls(**{**known, "excluded": tuple(said["excluded"])})

    def place(self) -> int:
        """Return the place in the data's order of the next step."""
        place = self.step
        for excluded in self.excluded:
            place += excluded <= place
        return place

    def rebatched(self, batch: int, new: int) -> "Progress":
        """Return the progress of a run that reads on, ``new`` sequences a step for ``batch``."""
        if batch == new:
            return self
        offset = self.sequence_offset + self.place() * batch - self.step * new
        return replace(self, excluded=(), sequence_offset=offset)


def held_by(data: ShardedState, optimizer: Optimizer | None) -> Iterator[tuple[str, LocalSlice]]:
    """Yield every box of the state that is here, live, with its tensor's name in a checkpoint.

    Without an optimizer: the model's alone.
    """
    yield from ((MODEL + held.name, held) for held in data.weights())
    if optimizer is None:
        return
    yield from ((held.name, held) for held in data.states(optimizer))


def form(data: ShardedState, optimizer: Optimizer) -> str:
    """Return a digest of the names, places and types of what is here of the state, in its order."""
    facts = [
        [name, held.box, held.shape, str(held.tensor.dtype)]
        for name, held in held_by(data, optimizer)
    ]
    return sha256(json.dumps(facts).encode()).hexdigest()


def contents(data: ShardedState, optimizer: Optimizer) -> dict[str, list[TensorSlice]]:
    """Return what this rank writes of the state: each element stands on one rank alone."""
    found: dict[str, list[TensorSlice]] = {}
    for name, held in held_by(data, optimizer):
        written = list(written_here(name, held))
        if written:
            found.setdefault(name, []).extend(written)
    return found


def written_here(
    name: str, held: LocalSlice, share_bytes: int = SHARE_BYTES
) -> Iterator[TensorSlice]:
    """Yield what this rank writes of a box that it holds.

    Boxes of which there are copies are dealt out by a hash over the ranks that hold them; a large
    one is cut along its first dim, a share of at least ``share_bytes`` for each of some ranks.
    """
    at, tensor = tuple(start for start, _ in held.box), held.tensor.detach()
    size = tensor.numel() * tensor.element_size()
    rows = len(tensor) if tensor.dim() else 1
    shares = max(1, min(held.copies, rows, size // share_bytes))
    start = crc32(f"{name}{at}".encode())
    for share in range(shares):
        if (start + share * held.copies // shares) % held.copies != held.copy:
            continue
        if shares == 1:
            yield TensorSlice(tensor, held.shape, at)
        else:
            first, end = share * rows // shares, (share + 1) * rows // shares
            yield TensorSlice(tensor[first:end], held.shape, (at[0] + first, *at[1:]))


def restore(path: Path, data: ShardedState, optimizer: Optimizer | None) -> Progress:
    """Fill what is here of the state from a checkpoint of any layout; return how far it is.

    Without an optimizer the model alone is filled, and the run is at its beginning.
    Once all ranks have succeeded, ``data.renew()`` brings the weights up to date.

    Raises:
        DamagedError: where a byte is not as written; the state then holds a mixture.
        MismatchError: where the tensors are not these; nothing is changed then.
    """
    with Reader(path) as reader, torch.no_grad():
        wanted = list(held_by(data, optimizer))
        stored = reader.manifest.tensors
        if optimizer is None:
            stored = {name: held for name, held in stored.items() if name.startswith(MODEL)}
        names = dict(wanted)
        # A frozen parameter has the format that it is read in, whatever that of what is taken.
        frozen = {MODEL + name for name, held in data.params.items() if not held.requires_grad}
        missing = [name for name in names if name not in stored]
        whole = data.placed.world.size == 1  # else others hold what is not here
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
            if data.valued:
                values = held.tensor.to(DTYPES[stored[name].dtype])
                reader.read_into(name, values, tuple(start for start, _ in held.box))
                if values is not held.tensor:
                    held.tensor.copy_(values)
        return Progress() if optimizer is None else Progress.of(reader.manifest.meta["progress"])
