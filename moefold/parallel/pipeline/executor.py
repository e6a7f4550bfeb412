"""Executes a pipeline schedule's table: the steps of this rank's line, one after another.

T rows on this rank, D hidden. One rank without a pipeline is a table of one line.

The head's loss, its weight gradient and the gradient of its rows are computed together at the end
of the last stage's F, so that logits are never stored. I and W of that stage do the rest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.kernels.gradients import AccumulatingSink, DeferredSink
from moefold.layers.flow import Flow
from moefold.layers.stash import Pages
from moefold.layers.unshard import UnshardHooks
from moefold.model.config import Block
from moefold.moe.dispatch.config import FixedShape
from moefold.parallel.apply import ModelParts
from moefold.parallel.pipeline.lanes import Chain, Lanes, State
from moefold.parallel.pipeline.p2p import P2PMessages, RankPlan, plan
from moefold.parallel.pipeline.partial import GraphedPass, PartGraphs
from moefold.parallel.pipeline.passes import ChunkPass, Loss
from moefold.planner.case import Keeping, offloaded, recomputed
from moefold.planner.memory_pages import ChunkBlocks, pages
from moefold.schedule.table import Action, ActionResult, Line, Step, actions_of
from moefold.spec.layer import Shape


class Factors(NamedTuple):
    """Factors of a step's summed losses and router terms, on the device."""

    scale_L: Tensor
    """For the loss: 1 / labels; for each further token's loss: its weight / its labels."""
    share_M: Tensor
    """For each micro-batch's router terms: its share of the step's valid rows."""


ScaledLoss = Callable[[Tensor, Flow, Tensor], tuple[Tensor, Tensor]]
"""``loss(x_TD, flow, scale)``: this rank's share of the summed loss, and the gradient of x_TD times
the scale."""


@dataclass
class StepResult:
    """Losses and router terms of a step on this rank."""

    losses: list[Tensor] = field(default_factory=list)
    """This rank's share of each micro-batch's summed loss, on the last stage."""
    terms: list[tuple[int, int, Tensor]] = field(default_factory=list)
    """Micro-batch, layer, and its router terms [N], without gradient."""


@dataclass
class InFlight:
    """State of one micro-batch in one chunk, from its F until its last backward action."""

    way: ChunkPass
    flow: Flow
    sink: DeferredSink | AccumulatingSink
    hooks: UnshardHooks
    graphs: GraphedPass | None
    gradients: State = ()
    """Gradients of the output rows, where the chunk ends with the loss."""


class Executor:
    """One step of training on one rank.

    Args:
        placed: this rank's parts of the model.
        flows: one per micro-batch, without a gradient sink.
        factors: of the loss and of router terms.
        loss: computes the loss at the end of the last stage.
        graphs: CUDA graphs of parts of blocks, with ``layout.graphs: partial``.
    """

    def __init__(
        self,
        placed: ModelParts,
        flows: Sequence[Flow],
        factors: Factors,
        loss: ScaledLoss,
        graphs: PartGraphs | None = None,
    ) -> None:
        self._placed, self._flows, self._graphs = placed, flows, graphs
        self._shares, scales = factors.share_M.unbind(), factors.scale_L.unbind()
        self._loss: Loss = lambda x_TD, flow, later: loss(x_TD, flow, scales[later])
        rank = placed.world.attention.pp
        self.plan: RankPlan = plan(placed.layout, rank, len(flows))  # type: ignore[arg-type]
        self.executed: list[Step] = []
        """Completed steps."""
        self._beside = placed.beside if self.plan.table.has_pairs else None
        self._messages = P2PMessages(self.plan, placed.world.group("pp"), self._buffer)
        self._held: dict[tuple[int, int], InFlight] = {}
        self._ran = StepResult()

    def run(self) -> StepResult:
        """Run every step of this rank's line."""
        stash = None if self._placed.offload is None else self._placed.offload.stash
        if stash is not None:
            rows = max(flow.rows.rows for flow in self._flows)
            pages = partial(pages_of, self._placed, self.plan.line, rows)
            stash.begin_step((len(self._flows), rows), pages)
        if self._graphs is not None:
            self._graphs.begin_step(self._placed, self._flows)
        with Lanes(self._placed.world.device) as lanes:
            for at, step in enumerate(self.plan.line):
                self._messages.post(at)
                # Before a step without backward; otherwise after that backward's own fetches.
                takes = any(action.kind in "BI" for action in actions_of(step))
                if not takes:
                    self._fetch_for(at + 1)
                self._step(step, lanes)
                self.executed.append(step)
                self._fetch_for(at + 1)
        self._messages.close()
        assert not self._held, "forward passes without their backward"
        return self._ran

    def _fetch_for(self, at: int) -> None:
        """Start to fetch the offloaded activations that a step's backward takes first."""
        for step in self.plan.line[at : at + 1]:
            for action in actions_of(step):
                held = self._held.get(self._spot(action))
                if held is not None and action.kind in "BI":
                    held.flow.keeper.fetch()

    def _step(self, step: Step, lanes: Lanes) -> None:
        """Run one action, or a pair concurrently, of which the backward has the first turn."""
        actions = actions_of(step)
        chains = {action: self._chain(action) for action in reversed(actions)}
        left = dict(zip(chains, lanes.run(*chains.values()), strict=True))
        for action in actions:
            self._end(action, left[action])

    def _chain(self, action: Action) -> Chain:
        """Wait for an action's inputs, and return its tasks."""
        stage, micro = self._spot(action)
        if action.kind == "F":
            held = self._held[stage, micro] = self._start(action)
            needs = self.plan.table.needs(self.plan.rank, action)
            given = [self._messages.take(need).requires_grad_() for need in needs]
            return Chain(tuple(given), held.way.forward())
        held = self._held[stage, micro]
        if action.kind == "W":
            assert isinstance(held.sink, DeferredSink)
            held.hooks.pre_weight_gradients()
            held.sink.drain()
            return Chain((), ())
        given, held.gradients = held.gradients, ()
        if not given:
            given = (self._messages.take(ActionResult("gradient", stage + 1, micro)),)
        drain = held.sink.drain if isinstance(held.sink, DeferredSink) else None
        if drain is not None and action.kind == "B":
            held.hooks.pre_weight_gradients()
        return Chain(given, held.way.backward(drain if action.kind == "B" else None))

    def _start(self, action: Action) -> InFlight:
        """Prepare a micro-batch's pass through a chunk."""
        # Without W or pairs, weight gradients are computed at once and their rows are freed.
        apart = self.plan.splits or self._beside is not None
        sink = DeferredSink() if apart else AccumulatingSink()
        placed, micro = self._placed, action.micro
        chunk, share = placed.chunks[action.chunk], self._shares[micro]
        hooks = placed.hooks_for(chunk, training=True, deferred=apart)
        flow = self._flows[micro].begun(sink, hooks, chunk.scores)
        graphs = self._graphs and self._graphs.take(action.chunk, micro, flow)
        if graphs is not None:
            flow = replace(flow, rows=graphs.flow.rows, piece=graphs.flow.piece)
        way = ChunkPass(placed.model, chunk, flow, share, self._loss, self._beside, graphs)
        return InFlight(way, flow, sink, hooks, graphs)

    def _end(self, action: Action, left: State) -> None:
        """Record or send an action's result, and free what later actions do not need."""
        stage, micro = self._spot(action)
        held = self._held[stage, micro]
        if action.kind == "F":
            way = held.way
            held.flow.keeper.end_forward()
            self._ran.terms += [(micro, layer, values) for layer, values in way.terms]
            if way.summed is not None:
                self._ran.losses.append(way.summed)
                held.gradients = left
        if action.kind == "I":
            held.flow.end_backward()
        if action.kind in "BW":
            held.hooks.post_weight_gradients()
            if self._graphs is not None and held.graphs is not None:
                self._graphs.give(held.graphs)
            del self._held[stage, micro]
        given = self.plan.table.gives(self.plan.rank, action)
        if given is not None and self.plan.table.reader(given) is not None:
            (rows_TD,) = left
            assert rows_TD is not None, "no gradient reaches the chunk's input"
            self._messages.give(given, rows_TD.detach())

    def _spot(self, action: Action) -> tuple[int, int]:
        return self.plan.table.stage(self.plan.rank, action.chunk), action.micro

    def _buffer(self, micro: int) -> Tensor:
        """Allocate a tensor for a micro-batch's rows [T, D] from another stage."""
        model, rows = self._placed.model, self._flows[micro].rows
        shape = (rows.rows, model.record.hidden)
        return torch.empty(shape, dtype=model.recipe.dtype, device=rows.ids_T.device)


def run_step(
    placed: ModelParts,
    flows: Sequence[Flow],
    factors: Factors,
    loss: ScaledLoss,
    graphs: PartGraphs | None = None,
) -> StepResult:
    """Run this rank's line of a step; the arguments are those of :class:`Executor`."""
    return Executor(placed, flows, factors, loss, graphs).run()


def pages_of(placed: ModelParts, line: Line, rows: int) -> Pages:
    """Return the page pools that a step needs, with ``rows`` per micro-batch on this rank."""
    layout, decoder, sizes = placed.layout, placed.model.record, placed.layout.split
    assert isinstance(layout.dispatch, FixedShape)
    width = placed.model.recipe.dtype.itemsize
    room = layout.dispatch.buffer_rows(sizes)
    shape = Shape(
        decoder.hidden, rows, sizes.tp, sizes.etp, 1.0, width, sizes.cp, ep=sizes.ep, room=room
    )
    keeping = Keeping(recompute=recomputed(layout.recompute), **offloaded(layout.offload))

    def blocks(numbers: tuple[str, ...]) -> list[Block]:
        return [decoder.blocks[int(number)] for number in numbers]

    chunks = [
        ChunkBlocks(blocks(one.layers), blocks(one.ahead), one.scores) for one in placed.chunks
    ]
    return Pages(*pages(chunks, shape, keeping, line))
