"""The state of a run between two steps, and its form in a checkpoint.

No state of random generators is stored: initial values are a function of (seed, name), data and
draws of (seed, step). Statistics such as expert counts are reset at each step.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from moefold.checkpoint.errors import MismatchError
from moefold.checkpoint.load import Reader, describe_mismatch
from moefold.checkpoint.tensors import DTYPES, TensorSlice
from moefold.comm.collectives import sum_
from moefold.data.config import BatchSizes
from moefold.data.order import OrderStart
from moefold.layers.placement import slices
from moefold.optim.base import Optimizer
from moefold.optim.config import matches
from moefold.optim.rates import RatePhase
from moefold.parallel.data.sharding import LocalSlice, ShardedState
from moefold.spec.decoder import known_weights
from moefold.training.model_checkpoint import MODEL_PREFIX

MIN_WRITE_BYTES = 16 * 2**20
"""Minimum bytes that each rank writes if several ranks split a box that they all hold."""
FROM_THE_START = OrderStart()
"""The data order of a run that no fork changed."""


@dataclass
class Progress:
    """Progress of a run."""

    step: int = 0
    """Optimizer steps done, skipped ones included: each has its batch of the data order."""
    tokens: int = 0
    """Valid tokens trained on."""
    excluded: tuple[int, ...] = ()
    """Indices of batches in the data order that rewinds excluded, ascending."""
    strikes: int = 0
    """Consecutive skipped steps, or rewinds since the run last passed the offending step."""
    struck_at: int = 0
    """Number of steps done before the newest step that was skipped or rewound."""
    sequence_offset: int = 0
    """Sequences read beyond those of the batches before, if a fork changed the batch size."""
    order: OrderStart = FROM_THE_START
    """Where the data order began: at the start of the run, or where a fork changed it."""
    rate: tuple[RatePhase, ...] = ()
    """Phases of the learning rate; empty before a run has said its number of steps."""
    skipped: int = 0
    """Steps that updated nothing."""

    @property
    def updates(self) -> int:
        """Steps that updated the weights: the place in the learning-rate schedule."""
        return self.step - self.skipped

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "Progress":
        """Read from a checkpoint's JSON data, of versions with fewer or more fields too."""
        values = {spec.name: stored[spec.name] for spec in fields(cls) if spec.name in stored}
        values["excluded"] = tuple(stored["excluded"])
        if "order" in values:
            values["order"] = OrderStart.from_dict(values["order"])
        values["rate"] = tuple(map(RatePhase.from_dict, stored.get("rate", ())))
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON data."""
        return json.loads(json.dumps(asdict(self)))

    def next_batch_index(self) -> int:
        """Return the index of the next step's batch in the data order."""
        index = self.step
        for excluded in self.excluded:
            index += excluded <= index
        return index

    def first_sequence(self, sizes: BatchSizes) -> int:
        """Return the number of the next step's first sequence, counted over the whole run."""
        return sizes.before(self.next_batch_index()) + self.sequence_offset

    def rebatched(self, sizes: BatchSizes, new: BatchSizes) -> "Progress":
        """Return the progress to continue with ``new`` sizes of batches instead of ``sizes``."""
        if sizes == new:
            return self
        offset = self.first_sequence(sizes) - new.before(self.step)
        return replace(self, excluded=(), sequence_offset=offset)


def iter_state(
    state: ShardedState, optimizer: Optimizer | None
) -> Iterator[tuple[str, LocalSlice]]:
    """Yield every box of the state on this rank, not copied, with its tensor's checkpoint name.

    Without an optimizer, yield the model's boxes only.
    """
    yield from ((MODEL_PREFIX + part.name, part) for part in state.weights())
    if optimizer is None:
        return
    yield from ((part.name, part) for part in state.optimizer_state(optimizer))


def full_weights(state: ShardedState, pattern: str) -> dict[str, Tensor]:
    """Return the parameters whose global names match a pattern, such as ``*.router.weight``.

    They are unsharded and on the host of each rank. All ranks call it.
    """
    model = state.parts.model
    ranks = state.parts.world.on_host
    matching = (w for w in known_weights(model.record) if matches(w.name, (pattern,)))
    weights = {
        w.name: torch.zeros(w.shape, dtype=model.precision_policy.master_dtype) for w in matching
    }
    for part in state.weights():
        if part.is_first and part.name in weights:
            weights[part.name][slices(part.box)] = part.tensor.detach()
    state.flush()
    return {name: sum_(weight, ranks) for name, weight in weights.items()}


def signature(state: ShardedState, optimizer: Optimizer) -> str:
    """Return a digest of name, box, shape and dtype of this rank's state, in order."""
    facts = [
        [name, part.box, part.shape, str(part.tensor.dtype)]
        for name, part in iter_state(state, optimizer)
    ]
    return sha256(json.dumps(facts).encode()).hexdigest()


def assigned_state(state: ShardedState, optimizer: Optimizer) -> dict[str, list[TensorSlice]]:
    """Return the slices of the state that this rank writes; each element is written by one rank."""
    assigned: dict[str, list[TensorSlice]] = {}
    for name, part in iter_state(state, optimizer):
        written = list(assigned_slices(name, part))
        if written:
            assigned.setdefault(name, []).extend(written)
    return assigned


def assigned_slices(
    name: str, part: LocalSlice, min_bytes: int = MIN_WRITE_BYTES
) -> Iterator[TensorSlice]:
    """Yield the slices that this rank writes of a box that it holds.

    If several ranks hold copies of a box, a hash of its name selects the writer; a large box is
    split along its first dim among some of them, at least ``min_bytes`` each.
    """
    origin = tuple(start for start, _ in part.box)
    tensor = part.tensor.detach()
    size = tensor.numel() * tensor.element_size()
    rows = len(tensor) if tensor.dim() else 1
    pieces = max(1, min(part.copies, rows, size // min_bytes))
    first_writer = crc32(f"{name}{origin}".encode())
    for piece in range(pieces):
        if (first_writer + piece * part.copies // pieces) % part.copies != part.copy:
            continue
        if pieces == 1:
            yield TensorSlice(tensor, part.shape, origin)
        else:
            begin = piece * rows // pieces
            end = (piece + 1) * rows // pieces
            yield TensorSlice(tensor[begin:end], part.shape, (origin[0] + begin, *origin[1:]))


def restore(path: Path, state: ShardedState, optimizer: Optimizer | None) -> Progress:
    """Fill this rank's state from a checkpoint of any layout; return the run's progress.

    Without an optimizer only the model is filled, and the progress is that of a new run.
    Once all ranks have succeeded, call ``state.refresh_weights()`` to refresh the compute weights.

    Raises:
        DamagedError: if data are damaged; the state is then partly overwritten.
        MismatchError: if names, shapes or dtypes differ; the state is then unchanged.
    """
    with Reader(path) as reader, torch.no_grad():
        own_slices = list(iter_state(state, optimizer))
        stored = reader.manifest.tensors
        if optimizer is None:
            stored = {n: tensor for n, tensor in stored.items() if n.startswith(MODEL_PREFIX)}
        names = dict(own_slices)
        # Frozen parameters have their compute dtype here, whatever the stored dtype.
        frozen = {MODEL_PREFIX + n for n, param in state.params.items() if not param.requires_grad}
        missing = [name for name in names if name not in stored]
        is_single_rank = state.parts.world.size == 1  # else the rest is on other ranks
        unexpected = [name for name in stored if name not in names] if is_single_rank else []
        mismatched = {}
        for name, part in names.items():
            if name in stored:
                dtype = DTYPES[stored[name].dtype] if name in frozen else part.tensor.dtype
                if reason := describe_mismatch(stored[name], part.shape, dtype):
                    mismatched[name] = reason
        if missing or unexpected or mismatched:
            raise MismatchError(path, missing, unexpected, mismatched)
        reader.check_sizes(names)
        for name, part in own_slices:
            if state.has_values:
                values = part.tensor.to(DTYPES[stored[name].dtype])
                reader.read_into(name, values, tuple(start for start, _ in part.box))
                if values is not part.tensor:
                    part.tensor.copy_(values)
        if optimizer is None:
            return Progress()
        meta = reader.manifest.meta
        progress = Progress.from_dict(meta["progress"])
        # A checkpoint of an earlier version: the schedule as it was stated.
        if not progress.rate and "run" in meta:
            progress.rate = (RatePhase(meta["run"]["train"]["steps"]),)
        return progress
