"""The state of one forward pass besides its tensors, passed explicitly from layer to layer.

Placement of rows: at a block's boundary each row lives on one rank. Context ranks hold pieces of
the micro-batch, and the tensor ranks of a piece each hold a band of it (sequence parallelism). A
layer whose weights tp cuts gathers the rows of the piece, computes its heads, columns or part of
the vocabulary, and reduce-scatters the partial results, so that each rank has its band again.

T rows, D hidden.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.comm.collectives import all_gather, max_, reduce_scatter
from moefold.comm.group import SELF_GROUP
from moefold.comm.world import World
from moefold.config.base import Record
from moefold.data.batch import MicroBatch, contiguous_rows, zigzag_rows
from moefold.kernels.gradients import AUTOGRAD_SINK, GradientSink
from moefold.kernels.operand import Operand
from moefold.kernels.quantise.blocks import Role
from moefold.kernels.scaled.products import QuantisedOperand
from moefold.kernels.scaled.rows import RowRuns, encode_row_ids
from moefold.layers.cache import KeyValueCache
from moefold.layers.config import Rope
from moefold.layers.precision import Narrow, PrecisionPolicy
from moefold.layers.rope import Angles
from moefold.layers.saved_tensors import RoutingDecisions, SavedTensors
from moefold.layers.unshard import RESIDENT, UnshardHooks

SINGLE_RANK = World.single()
"""Default world, a constant because generation runs a pass for every token."""


@dataclass(frozen=True)
class Flow:
    """One pass of one micro-batch through the model.

    Args:
        rows: this rank's rows of the micro-batch.
        precision_policy: number formats; turns weights into operands.
        sink: receives weight gradients.
        saved_tensors: policy for tensors saved for backward.
        decisions: routing decisions of this micro-batch; a recomputed layer replays them.
        training: whether balance counters, dropout and random routing are active.
        world: the groups of ranks that share the micro-batch, the experts and the global batch.
        context: kind of context parallelism; a record of the slot CONTEXT.
        overflow: int64 rows beyond the capacity of each bounded dispatch; checked by the step.
        exact: whether dispatch is unbounded, even if the layout's dispatcher has a bound.
        piece: rows of this rank's tensor group; None if these are ``rows``.
        unshard: hooks that gather weights sharded over data ranks (ZeRO).
        cache: key-value cache of generation.
        dropless: whether capacity is ignored, as in generation, where texts must not compete.
        reference: data of the loss about the micro-batch, besides its rows.
        shifted_rows: (rows, piece) with ids and labels shifted by one token, by two, and so on.
    """

    rows: MicroBatch
    precision_policy: PrecisionPolicy
    sink: GradientSink = AUTOGRAD_SINK
    saved_tensors: SavedTensors = field(default_factory=SavedTensors)
    decisions: RoutingDecisions = field(default_factory=RoutingDecisions)
    training: bool = True
    world: World = SINGLE_RANK
    context: Record | None = None
    overflow: list[Tensor] = field(default_factory=list)
    exact: bool = False
    piece: MicroBatch | None = None
    unshard: UnshardHooks = RESIDENT
    cache: KeyValueCache | None = None
    dropless: bool = False
    reference: Any = None
    shifted_rows: tuple[tuple[MicroBatch, MicroBatch | None], ...] = ()
    _angles: dict[tuple[Rope, int], Angles] = field(default_factory=dict)

    def for_chunk(self, sink: GradientSink, unshard: UnshardHooks, computes_loss: bool) -> "Flow":
        """Return the pass through one pipeline chunk.

        It owns its decisions and rotary angles, which are freed with it.
        """
        own: dict[str, Any] = {
            "saved_tensors": self.saved_tensors.for_chunk(computes_loss),
            "decisions": self.decisions.for_chunk(),
            "_angles": {},
        }
        return replace(self, sink=sink, unshard=unshard, **own)

    def end_backward(self) -> None:
        """Free decisions and angles, which deferred weight gradients do not read."""
        self.decisions.clear()
        self._angles.clear()

    @property
    def shared_tensors(self) -> list[Tensor]:
        """Tensors that all layers of the pass read: rotary angles, and row ids if computed."""
        tensors = [tensor for angles in self._angles.values() for tensor in angles]
        if "row_id_T" in vars(self):
            tensors.append(self.row_id_T)
        whole = vars(self).get("_whole", self)
        fields = [vars(flow) for flow in (self, whole)]
        numbers = [cached["row_runs"].number_N for cached in fields if "row_runs" in cached]
        return tensors + [number_N for number_N in numbers if number_N is not None]

    @property
    def n_valid(self) -> int | None:
        """Number of valid rows, which come first; None if all are valid."""
        return None if self.rows.n_valid == self.rows.rows else self.rows.n_valid

    @property
    def valid_T(self) -> Tensor | None:
        """bool mask of valid rows; None if all are valid, which the host knows."""
        return None if self.n_valid is None else self.rows.valid_T

    @property
    def whole(self) -> "Flow":
        """Return the pass for a layer that sees all rows of the tensor group."""
        # Not cached if it is self: a reference cycle would keep the rows until garbage collection.
        return self if self.piece is None else self._whole

    @cached_property
    def _whole(self) -> "Flow":
        assert self.piece is not None
        return replace(self, rows=self.piece, piece=None)

    def shifted(self, tokens: int) -> "Flow":
        """Return the pass with ids and labels shifted by ``tokens``."""
        if not tokens:
            return self
        rows, piece = self.shifted_rows[tokens - 1]
        return replace(self, rows=rows, piece=piece)

    def with_rows(self, change: Callable[[MicroBatch], MicroBatch]) -> "Flow":
        """Return the pass with ``change`` applied to all its rows, shifted ones included."""

        def changed(rows: MicroBatch, piece: MicroBatch | None) -> tuple[Any, Any]:
            return change(rows), piece and change(piece)

        rows, piece = changed(self.rows, self.piece)
        ahead = tuple(changed(*shifted) for shifted in self.shifted_rows)
        return replace(self, rows=rows, piece=piece, shifted_rows=ahead)

    def chunked(self, length: int) -> "Flow":
        """Return the pass with segments cut into chunks of ``length`` rows, for attention."""
        cut: list[int] = []
        for rows in self.rows.lengths:
            cut += [min(length, rows - start) for start in range(0, rows, length)]
        return replace(self, rows=replace(self.rows, lengths=tuple(cut)))

    def gather(self, x_TD: Tensor) -> Tensor:
        """All-gather rows over the tensor group; backward is a reduce-scatter."""
        return self._gather(x_TD) if self.piece is not None else x_TD

    def gather_all(self, *parts_TX: Tensor) -> tuple[Tensor, ...]:
        """All-gather several tensors of the same rows in one collective."""
        if self.piece is None:
            return parts_TX
        widths = [part_TX.shape[1] for part_TX in parts_TX]
        return self._gather(*parts_TX).split(widths, 1)

    def _gather(self, *parts_TX: Tensor) -> Tensor:
        def gather(*parts_TX: Tensor) -> Tensor:
            rows = parts_TX[0] if len(parts_TX) == 1 else torch.cat(parts_TX, 1)
            return all_gather(rows, self.world.group("tp"))

        return self.saved_tensors.run("gather", gather, *parts_TX)

    def scatter(self, y_TD: Tensor) -> Tensor:
        """Reduce-scatter partial sums over the tensor group; return this rank's rows."""
        return reduce_scatter(y_TD, self.world.group("tp"))

    def operand(self, weight: Tensor, dtype: torch.dtype | None = None) -> Operand:
        """Return a parameter, which may be a sharded handle, as operand in the compute dtype."""
        operand = self.precision_policy.operand(weight, dtype)
        self.saved_tensors.keep_on_device(*operand.tensors)
        return operand

    def narrow_operand(self, weight: Tensor, narrow: Narrow, groups: int = 0) -> QuantisedOperand:
        """Return a parameter as the operand of a quantised product."""
        world = self.world
        label = self.world.recorder.label
        own = self.piece is not None

        def largest(amax: Tensor, role: Role, matrices: Sequence[int]) -> Tensor:
            if narrow.history is not None:
                return narrow.delayed(amax, role, matrices, self.training)
            axes = narrow.scale_axes(role, own)
            group = world.group("_".join(axes)) if axes else SELF_GROUP
            return max_(amax, group, label if role == "gradient" else None)

        operand = self.precision_policy.narrow_operand(weight, narrow, largest, groups)
        return operand._replace(cache=self.saved_tensors.cached)

    @cached_property
    def row_runs(self) -> RowRuns:
        """The valid rows, in the form that quantised products read."""
        return RowRuns.dense(self.rows.n_valid, self.rows.full_row_T + self.rows.first)

    @cached_property
    def row_id_T(self) -> Tensor:
        """int64 id of each row in the step, the key of its random numbers."""
        return encode_row_ids(self.rows.first, self.rows.full_row_T).to(torch.int64)

    def angles(self, rope: Rope, dim: int) -> Angles:
        """Return the rows' rotary angles, computed once per pass for each ``rope`` and ``dim``."""
        key = (rope, dim)
        if key not in self._angles:
            self._angles[key] = Angles.of(
                self.rows.positions_T, rope, dim, self.precision_policy.dtype
            )
        angles = self._angles[key]
        self.saved_tensors.keep_on_device(*angles)
        return angles


def scaled(x: Tensor, factor: float) -> Tensor:
    """Return ``x * factor``; ``x`` itself if the factor is 1."""
    return x if factor == 1.0 else x * factor


def local_rows(batch: MicroBatch, world: World) -> tuple[MicroBatch, MicroBatch | None]:
    """Return this rank's rows of a micro-batch and, if tp > 1, those of its tensor group."""
    coordinates = world.attention
    sizes = world.folding.sizes
    piece = batch
    if sizes.cp > 1:
        piece = batch.select_rows(zigzag_rows(batch.rows, coordinates.cp, sizes.cp))
    if sizes.tp == 1:
        return piece, None
    return piece.select_rows(contiguous_rows(piece.rows, coordinates.tp, sizes.tp)), piece


def undo_zigzag(x_RX: Tensor, ranks: int) -> Tensor:
    """Reorder rows from concatenation by context rank to the order of the micro-batch."""
    pieces = x_RX.unflatten(0, (ranks, 2, -1))
    # Zigzag: rank r of n has piece r and piece 2 n - 1 - r.
    return torch.cat([pieces[:, 0], pieces[:, 1].flip(0)])


class BlockOutput(NamedTuple):
    """Output of a decoder layer."""

    x_TD: Tensor
    """The residual rows."""
    terms_N: Tensor
    """Values of the router's loss terms, without coefficients; empty where there are none."""


Segment = Callable[[Any, Flow], Any]
"""A step of a block: ``segment(state, flow) -> state``, where a state is a tensor or a NamedTuple
of tensors, such tuples and host values. A block's segments run in order are its forward; a schedule
may run other work between them."""


@dataclass(frozen=True)
class Exchange:
    """A segment that mostly communicates, so that a schedule may overlap it with the compute of
    another micro-batch. It has no weights, and uses the groups of ``flow.world``."""

    run: Segment

    def __call__(self, state: Any, flow: Flow) -> Any:
        """Run the segment."""
        return self.run(state, flow)
