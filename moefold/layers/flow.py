"""What one forward pass carries besides its tensors. Passed from layer to layer, never ambient.

Where the rows are: at a block's boundary each row lives on one rank. Context ranks hold pieces of
the micro-batch, and the tensor ranks of one such piece each hold a band of it. A layer whose
weights are cut over tp sees all rows of the piece: it gathers them, computes its share of heads,
width or vocabulary, and gives back the sum of the shares, each rank its band.

T rows, D hidden.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.comm.collectives import all_gather, max_, reduce_scatter
from moefold.comm.group import ALONE
from moefold.comm.world import World
from moefold.config.base import Record
from moefold.data.batch import MicroBatch, band, zigzag
from moefold.kernels.gradients import RETURNED, GradientSink
from moefold.kernels.operand import Operand
from moefold.kernels.quantise.blocks import Role
from moefold.kernels.scaled.products import NarrowOperand
from moefold.kernels.scaled.rows import RowRuns, sent_numbers
from moefold.layers.cache import KeyValueCache
from moefold.layers.config import Rope
from moefold.layers.keeper import Decisions, Keeper
from moefold.layers.precision import Narrow, PrecisionPolicy
from moefold.layers.rope import Angles
from moefold.layers.unshard import RESIDENT, UnshardHooks

SINGLE_RANK = World.single()
"""Made once: a pass a token would make one a token."""


@dataclass(frozen=True)
class Flow:
    """One pass of one micro-batch through the model.

    Args:
        rows: the rows of the micro-batch that are here.
        recipe: number formats; makes operands of weights.
        sink: where weight gradients go.
        keeper: what is kept for backward, and where.
        decisions: routing decisions of this micro-batch; a second run of a layer replays them.
        training: whether counters count.
        world: the groups of ranks that share the micro-batch, the experts and the global batch.
        context: how attention sees rows of other context ranks; a record of the slot CONTEXT.
        overflow: int64 rows beyond the room of each dispatch that has one; checked by the step.
        exact: whether rows go to experts without a bound on room, whatever the layout says.
        piece: the rows that this rank's tensor group holds together; None where they are ``rows``.
        unshard: hooks that gather weights which are shared out over data ranks.
        cache: keys and values of texts that are being written.
        dropless: whether experts take all rows: texts that are written do not compete.
        known: what the loss knows of the micro-batch beside its rows.
        ahead: rows and piece with ids and labels of one token later, of two, and so on.
    """

    rows: MicroBatch
    recipe: PrecisionPolicy
    sink: GradientSink = RETURNED
    keeper: Keeper = field(default_factory=Keeper)
    decisions: Decisions = field(default_factory=Decisions)
    training: bool = True
    world: World = SINGLE_RANK
    context: Record | None = None
    overflow: list[Tensor] = field(default_factory=list)
    exact: bool = False
    piece: MicroBatch | None = None
    unshard: UnshardHooks = RESIDENT
    cache: KeyValueCache | None = None
    dropless: bool = False
    known: Any = None
    ahead: tuple[tuple[MicroBatch, MicroBatch | None], ...] = ()
    _angles: dict[tuple[Rope, int], Angles] = field(default_factory=dict)

    def begun(self, sink: GradientSink, unshard: UnshardHooks, ends: bool) -> "Flow":
        """Return the pass through one chunk, which may end in the loss.

        Its decisions and angles are let go with it.
        """
        keeper, decisions = self.keeper.begun(ends), self.decisions.begun()
        mine = {"keeper": keeper, "decisions": decisions, "_angles": {}}
        return replace(self, sink=sink, unshard=unshard, **mine)

    def end_backward(self) -> None:
        """Let go of decisions and angles: products of weights that still wait read neither."""
        self.decisions.clear()
        self._angles.clear()

    @property
    def shared(self) -> list[Tensor]:
        """What all layers of the pass read: rotary angles, and rows' numbers where any asked."""
        found = [one for angles in self._angles.values() for one in angles]
        found += [self.number_T] if "number_T" in vars(self) else []
        held = [vars(one) for one in (self, vars(self).get("_whole", self))]
        numbers = [one["run"].number_N for one in held if "run" in one]
        return found + [one for one in numbers if one is not None]

    @property
    def n_valid(self) -> int | None:
        """How many rows count, all of them first; None where all do."""
        return None if self.rows.n_valid == self.rows.rows else self.rows.n_valid

    @property
    def valid_T(self) -> Tensor | None:
        """bool mask of rows that count, None where all do (known on the host)."""
        return None if self.n_valid is None else self.rows.valid_T

    @property
    def whole(self) -> "Flow":
        """Return the pass for a layer that sees all rows of the tensor group."""
        # Kept apart: a pass that held itself would wait for the garbage collector, rows and all.
        return self if self.piece is None else self._whole

    @cached_property
    def _whole(self) -> "Flow":
        assert self.piece is not None
        return replace(self, rows=self.piece, piece=None)

    def at(self, later: int) -> "Flow":
        """Return the pass with ids and labels of so many tokens later."""
        if not later:
            return self
        rows, piece = self.ahead[later - 1]
        return replace(self, rows=rows, piece=piece)

    def with_rows(self, change: Callable[[MicroBatch], MicroBatch]) -> "Flow":
        """Return the pass with all its rows changed, those of later tokens too."""
        (rows, piece), *ahead = (
            (change(rows), piece and change(piece))
            for rows, piece in ((self.rows, self.piece), *self.ahead)
        )
        return replace(self, rows=rows, piece=piece, ahead=tuple(ahead))

    def chunked(self, length: int) -> "Flow":
        """Return the pass of attention in which segments end at every ``length`` rows too."""
        cut = (
            min(length, rows - at) for rows in self.rows.lengths for at in range(0, rows, length)
        )
        return replace(self, rows=replace(self.rows, lengths=tuple(cut)))

    def gather(self, x_TD: Tensor) -> Tensor:
        """Return the rows of the whole tensor group; backward returns each rank its own, summed."""
        return self._gathered(x_TD) if self.piece is not None else x_TD

    def gather_all(self, *parts_TX: Tensor) -> tuple[Tensor, ...]:
        """Gather several tensors of the same rows in one exchange."""
        if self.piece is None:
            return parts_TX
        return self._gathered(*parts_TX).split([part.shape[1] for part in parts_TX], 1)

    def _gathered(self, *parts_TX: Tensor) -> Tensor:
        def gather(*parts_TX: Tensor) -> Tensor:
            rows = parts_TX[0] if len(parts_TX) == 1 else torch.cat(parts_TX, 1)
            return all_gather(rows, self.world.group("tp"))

        return self.keeper.run("gather", gather, *parts_TX)

    def scatter(self, y_TD: Tensor) -> Tensor:
        """Sum the tensor group's shares of all its rows, and return this rank's rows of them."""
        return reduce_scatter(y_TD, self.world.group("tp"))

    def operand(self, weight: Tensor, dtype: torch.dtype | None = None) -> Operand:
        """Return a parameter as products take it, or in ``dtype``: no layer opens one itself."""
        operand = self.recipe.operand(weight, dtype)
        self.keeper.stays(*operand.tensors)
        return operand

    def narrow_operand(self, weight: Tensor, narrow: Narrow, groups: int = 0) -> NarrowOperand:
        """Return a parameter as products on codes take it; see :class:`PrecisionPolicy`."""
        world, label = self.world, self.world.recorder.label
        own = self.piece is not None

        def largest(amax: Tensor, role: Role, matrices: Sequence[int]) -> Tensor:
            if narrow.history is not None:
                return narrow.delayed(amax, role, matrices, self.training)
            axes = narrow.sharing(role, own)
            group = world.group("_".join(axes)) if axes else ALONE
            return max_(amax, group, label if role == "gradient" else None)

        found = self.recipe.narrow_operand(weight, narrow, largest, groups)
        return found._replace(once=self.keeper.once)

    @cached_property
    def run(self) -> RowRuns:
        """The rows that count, as products on codes take them."""
        return RowRuns.dense(self.rows.n_valid, self.rows.place_T + self.rows.first)

    @cached_property
    def number_T(self) -> Tensor:
        """int64 number of each row in the step, by which dropout draws."""
        return sent_numbers(self.rows.first, self.rows.place_T).to(torch.int64)

    def angles(self, rope: Rope, dim: int) -> Angles:
        """Return the rows' rotary angles, computed once per pass and kind."""
        key = (rope, dim)
        if key not in self._angles:
            self._angles[key] = Angles.of(self.rows.positions_T, rope, dim, self.recipe.dtype)
        angles = self._angles[key]
        self.keeper.stays(*angles)
        return angles


def scaled(x: Tensor, factor: float) -> Tensor:
    """Return rows times a factor, themselves where that is 1."""
    return x if factor == 1.0 else x * factor


def cut(batch: MicroBatch, world: World) -> tuple[MicroBatch, MicroBatch | None]:
    """Return this rank's rows of a micro-batch and, under tp, those of its tensor group."""
    spot, sizes = world.attention, world.folding.sizes
    piece = batch
    if sizes.cp > 1:
        piece = batch.part(zigzag(batch.rows, spot.cp, sizes.cp))
    if sizes.tp == 1:
        return piece, None
    return piece.part(band(piece.rows, spot.tp, sizes.tp)), piece


def in_order(x_RX: Tensor, ranks: int) -> Tensor:
    """Return pieces in the micro-batch's order, of rows that lie one context rank after another."""
    pieces = x_RX.unflatten(0, (ranks, 2, -1))
    # A rank has piece r, and piece 2 n - 1 - r.
    return torch.cat([pieces[:, 0], pieces[:, 1].flip(0)])


class BlockOutput(NamedTuple):
    """What a decoder layer returns."""

    x_TD: Tensor
    """The residual rows."""
    terms_N: Tensor
    """Values of the router's loss terms, without coefficients; empty where there are none."""


Segment = Callable[[Any, Flow], Any]
"""A piece of a block: ``segment(state, flow) -> state``, where a state is a tensor or a NamedTuple
of tensors, such tuples and values of the host. Running a block's segments one after another is its
forward; a schedule may run other work between them."""


@dataclass(frozen=True)
class Exchange:
    """A segment that mostly waits for other ranks, so that a schedule may run it beside the
    computing of another micro-batch. It has no weights and reaches ranks through ``flow.world``."""

    run: Segment

    def __call__(self, state: Any, flow: Flow) -> Any:
        """Run the segment."""
        return self.run(state, flow)
