"""Executes a pipeline schedule: the steps of this rank's line in the table, in order.

T rows on this rank, D hidden. One rank without a pipeline is a table of one line.

The head's loss, its weight gradient and the gradient of its rows are computed together at the end
of the last stage's F, so that logits are never stored. I and W of that stage compute the rest.
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
from moefold.parallel.pipeline.p2p import P2PMessages, RankPlan, plan_rank
from moefold.parallel.pipeline.partial import GraphedPass, PartGraphs
from moefold.parallel.pipeline.passes import ChunkPass, Loss
from moefold.schedule.table import Action, ActionResult, Line, Step, actions_of
from moefold.spec.layer import Shape
from moefold.spec.pages import ChunkBlocks, count_pages


class Factors(NamedTuple):
    """Factors of a step's summed losses and router terms, on the device."""

    scale_L: Tensor
    """For the loss: 1 / labels; for each further token's loss: its weight / its labels."""
    fraction_M: Tensor
    """For each micro-batch's router terms: its fraction of the step's valid rows."""


ScaledLoss = Callable[[Tensor, Flow, Tensor], tuple[Tensor, Tensor]]
"""``loss(x_TD, flow, scale)``: this rank's part of the summed loss, and the gradient of x_TD times
the scale."""


@dataclass
class StepResult:
    """Losses and router terms of a step on this rank."""

    losses: list[Tensor] = field(default_factory=list)
    """This rank's part of each micro-batch's summed loss, on the last stage."""
    terms: list[tuple[int, int, Tensor]] = field(default_factory=list)
    """Micro-batch, layer, and its router terms [N], without gradient."""


StepExecutor = Callable[[ModelParts, Sequence[Flow], Factors, ScaledLoss], StepResult]
"""Runs this rank's part of a step's forward and backward, as :func:`run_step` does."""


@dataclass
class InFlight:
    """State of one micro-batch in one chunk, from F until the last backward action."""

    chunk_pass: ChunkPass
    flow: Flow
    sink: DeferredSink | AccumulatingSink
    hooks: UnshardHooks
    graphs: GraphedPass | None
    gradients: State = ()
    """Gradients of the output rows, if the chunk ends with the loss."""


class Executor:
    """Runs one training step on one rank.

    Args:
        parts: this rank's parts of the model.
        flows: one per micro-batch, without a gradient sink.
        factors: of the loss and of router terms.
        loss: computes the loss at the end of the last stage.
        graphs: CUDA graphs of parts of blocks, for ``layout.graphs: partial``.
    """

    def __init__(
        self,
        parts: ModelParts,
        flows: Sequence[Flow],
        factors: Factors,
        loss: ScaledLoss,
        graphs: PartGraphs | None = None,
    ) -> None:
        self._parts = parts
        self._flows = flows
        self._graphs = graphs
        self._fractions = factors.fraction_M.unbind()
        scales = factors.scale_L.unbind()
        self._loss: Loss = lambda x_TD, flow, later: loss(x_TD, flow, scales[later])
        rank = parts.world.attention.pp
        self.plan: RankPlan = plan_rank(parts.layout, rank, len(flows))  # type: ignore[arg-type]
        self._chunk_of_stage = {
            self.plan.table.stage_of(rank, number): chunk
            for number, chunk in enumerate(parts.chunks)
        }
        self.executed: list[Step] = []
        """Completed steps."""
        self._secondary = parts.secondary if self.plan.table.has_pairs else None
        self._messages = P2PMessages(self.plan, parts.world.group("pp"), self._buffer)
        self._in_flight: dict[tuple[int, int], InFlight] = {}
        self._result = StepResult()

    def run(self) -> StepResult:
        """Run every step of this rank's line."""
        stash = None if self._parts.offload is None else self._parts.offload.stash
        if stash is not None:
            rows = max(flow.rows.rows for flow in self._flows)
            pages = partial(pages_of, self._parts, self.plan.line, rows)
            stash.begin_step((len(self._flows), rows), pages)
        if self._graphs is not None:
            self._graphs.begin_step(self._parts, self._flows)
        with Lanes(self._parts.world.device) as lanes:
            for index, step in enumerate(self.plan.line):
                self._messages.post(index)
                # Before a step without backward; otherwise after the fetches of that backward.
                has_backward = any(action.kind in "BI" for action in actions_of(step))
                if not has_backward:
                    self._prefetch(index + 1)
                self._step(step, lanes)
                self.executed.append(step)
                self._prefetch(index + 1)
        self._messages.close()
        assert not self._in_flight, "forward passes without their backward"
        return self._result

    def _prefetch(self, index: int) -> None:
        """Start to fetch the offloaded activations that a step's backward reads first."""
        for step in self.plan.line[index : index + 1]:
            for action in actions_of(step):
                in_flight = self._in_flight.get(self._stage_and_micro(action))
                if in_flight is not None and action.kind in "BI":
                    in_flight.flow.saved_tensors.prefetch()

    def _step(self, step: Step, lanes: Lanes) -> None:
        """Run one action, or a pair concurrently, beginning with the backward."""
        actions = actions_of(step)
        chains = {action: self._start_action(action) for action in reversed(actions)}
        results = dict(zip(chains, lanes.run(*chains.values()), strict=True))
        for action in actions:
            self._finish_action(action, results[action])

    def _start_action(self, action: Action) -> Chain:
        """Wait for an action's inputs, and return its tasks."""
        stage, micro = self._stage_and_micro(action)
        if action.kind == "F":
            in_flight = self._in_flight[stage, micro] = self._start_pass(action)
            needs = self.plan.table.action_inputs(self.plan.rank, action)
            sends_gradient = self._parts.chunks[action.chunk].sends_gradient
            inputs = [self._messages.wait_for(need) for need in needs]
            inputs = [rows_TD.requires_grad_(sends_gradient) for rows_TD in inputs]
            return Chain(tuple(inputs), in_flight.chunk_pass.forward())
        in_flight = self._in_flight[stage, micro]
        if action.kind == "W":
            assert isinstance(in_flight.sink, DeferredSink)
            in_flight.hooks.pre_weight_gradients()
            in_flight.sink.drain()
            return Chain((), ())
        inputs = in_flight.gradients
        in_flight.gradients = ()
        if not inputs:
            inputs = (self._messages.wait_for(ActionResult("gradient", stage + 1, micro)),)
        drain = in_flight.sink.drain if isinstance(in_flight.sink, DeferredSink) else None
        if drain is not None and action.kind == "B":
            in_flight.hooks.pre_weight_gradients()
        return Chain(inputs, in_flight.chunk_pass.backward(drain if action.kind == "B" else None))

    def _start_pass(self, action: Action) -> InFlight:
        """Prepare a micro-batch's pass through a chunk."""
        # Without W or pairs, weight gradients are computed at once, which frees their rows.
        deferred = self.plan.splits_backward or self._secondary is not None
        sink = DeferredSink() if deferred else AccumulatingSink()
        parts = self._parts
        micro = action.micro
        chunk = parts.chunks[action.chunk]
        fraction = self._fractions[micro]
        hooks = parts.hooks_for(chunk, training=True, deferred=deferred)
        flow = self._flows[micro].for_chunk(sink, hooks, chunk.has_head)
        graphs = self._graphs and self._graphs.acquire(action.chunk, micro, flow)
        if graphs is not None:
            flow = replace(flow, rows=graphs.flow.rows, piece=graphs.flow.piece)
        chunk_pass = ChunkPass(
            parts.model, chunk, flow, fraction, self._loss, self._secondary, graphs
        )
        return InFlight(chunk_pass, flow, sink, hooks, graphs)

    def _finish_action(self, action: Action, state: State) -> None:
        """Record or send an action's result; free what later actions do not need."""
        stage, micro = self._stage_and_micro(action)
        in_flight = self._in_flight[stage, micro]
        if action.kind == "F":
            chunk_pass = in_flight.chunk_pass
            in_flight.flow.saved_tensors.end_forward()
            self._result.terms += [(micro, layer, values) for layer, values in chunk_pass.terms]
            if chunk_pass.summed_loss is not None:
                self._result.losses.append(chunk_pass.summed_loss)
                in_flight.gradients = state
        if action.kind == "I":
            in_flight.flow.end_backward()
        if action.kind in "BW":
            in_flight.hooks.post_weight_gradients()
            if self._graphs is not None and in_flight.graphs is not None:
                self._graphs.release(in_flight.graphs)
            del self._in_flight[stage, micro]
        result = self.plan.table.action_result(self.plan.rank, action)
        if result is not None and self.plan.table.reader_rank(result) is not None:
            (rows_TD,) = state
            if rows_TD is None:
                chunk = self._parts.chunks[action.chunk]
                assert not chunk.sends_gradient, "no gradient reaches the chunk's input"
                # Nothing reads it, but by its arrival the peer knows what has been read.
                rows_TD = self._new_rows(micro, chunk.receives).zero_()
            self._messages.send(result, rows_TD.detach())

    def _stage_and_micro(self, action: Action) -> tuple[int, int]:
        return self.plan.table.stage_of(self.plan.rank, action.chunk), action.micro

    def _buffer(self, result: ActionResult) -> Tensor:
        """Allocate a tensor for a result of another stage: rows [T, D], several after one another
        where multi-token layers have run.
        """
        if result.kind == "output":
            times = self._chunk_of_stage[result.stage + 1].receives
        else:
            times = self._chunk_of_stage[result.stage - 1].sends
        return self._new_rows(result.micro, times)

    def _new_rows(self, micro: int, times: int) -> Tensor:
        """Allocate a tensor for a micro-batch's rows [T, D], ``times`` after one another."""
        model = self._parts.model
        rows = self._flows[micro].rows
        shape = (times * rows.rows, model.record.hidden)
        return torch.empty(shape, dtype=model.precision_policy.dtype, device=rows.ids_T.device)


def run_step(
    parts: ModelParts,
    flows: Sequence[Flow],
    factors: Factors,
    loss: ScaledLoss,
    graphs: PartGraphs | None = None,
) -> StepResult:
    """Run this rank's line of a step; the arguments are those of :class:`Executor`."""
    return Executor(parts, flows, factors, loss, graphs).run()


def pages_of(parts: ModelParts, line: Line, rows: int) -> Pages:
    """Return the page pools that a step needs, with ``rows`` per micro-batch on this rank."""
    layout = parts.layout
    decoder = parts.model.record
    sizes = parts.layout.split
    assert isinstance(layout.dispatch, FixedShape)
    shape = Shape(
        hidden=decoder.hidden,
        rows=rows,
        tp=sizes.tp,
        etp=sizes.etp,
        width=parts.model.precision_policy.dtype.itemsize,
        cp=sizes.cp,
        ep=sizes.ep,
        room=layout.dispatch.buffer_rows(sizes),
    )

    def blocks(numbers: tuple[str, ...]) -> list[Block]:
        return [decoder.blocks[int(number)] for number in numbers]

    chunks = [
        ChunkBlocks(blocks(chunk.layers), blocks(chunk.multi_token), chunk.has_head)
        for chunk in parts.chunks
    ]
    return Pages(*count_pages(chunks, shape, layout.recomputed, layout.offload, line))
