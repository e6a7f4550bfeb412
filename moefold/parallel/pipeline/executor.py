"""Runs a pipeline's table: the passes of each chunk in order, and what crosses between ranks.

T rows here, D hidden. One rank without a pipeline is a table of one line.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moefold.comm.collectives import Pending, receive, send
from moefold.kernels.gradients import Accumulated, Deferred
from moefold.layers.flow import Flow
from moefold.parallel.apply import Placed
from moefold.schedule.table import Action, Result, actions_of
from moefold.schedule.transfers import Transfer, with_transfers

Loss = Callable[[Tensor, Flow], tuple[Tensor, Tensor]]
"""``loss(x_TD, flow)``: this rank's share of the summed loss, and the scaled gradient of x_TD."""


@dataclass
class Forward:
    """What a forward pass of one chunk leaves for its backward."""

    start: Tensor | None
    """Its input rows, which collect their gradient; None where it embedded them itself."""
    roots: list[Tensor]
    gradients: list[Tensor | None]
    """Of the roots; None for the output rows until the next stage's gradient comes."""


@dataclass
class Ran:
    """What a step left on this rank."""

    losses: list[Tensor] = field(default_factory=list)
    """Share of the summed loss of each micro-batch whose last stage is here."""
    terms: list[tuple[int, int, Tensor]] = field(default_factory=list)
    """Micro-batch, layer, and its router terms [N], without gradient."""


class Executor:
    """One step of a table on one rank.

    Args:
        placed: this rank's parts.
        flows: one pass per micro-batch, without a sink.
        shares: of each micro-batch in the step's valid rows, the weight of its router terms.
        loss: what the last stage ends with.
    """

    def __init__(
        self, placed: Placed, flows: Sequence[Flow], shares: Sequence[float], loss: Loss
    ) -> None:
        self.placed, self.flows, self.shares, self.loss = placed, flows, shares, loss
        self.table = placed.table(len(flows))
        self.rank = placed.world.attention.pp
        self.ran = Ran()
        self._splits = any(a.kind == "W" for a in self.table.actions(self.rank))
        self._passes: dict[tuple[int, int], Forward] = {}
        self._sinks: dict[tuple[int, int], Deferred | Accumulated] = {}
        self._inbox: dict[Result, Tensor] = {}
        self._coming: dict[Result, tuple[Tensor, Pending]] = {}
        self._sent: list[Pending] = []

    def run(self) -> Ran:
        """Run every action of this rank's line."""
        for step in with_transfers(self.table)[self.rank]:
            if isinstance(step, Transfer):
                self._transfer(step)
                continue
            for action in actions_of(step):
                getattr(self, f"_{action.kind}")(action)
        for pending in self._sent:
            pending.wait()
        assert not (self._passes or self._sinks or self._inbox or self._coming)
        return self.ran

    def _transfer(self, transfer: Transfer) -> None:
        """Start a receive, or send a result that this rank has just computed."""
        ranks = self.placed.world.group("pp")
        peer = ranks.ranks[transfer.peer]
        if transfer.way == "send":
            self._sent.append(send(self._inbox.pop(transfer.result), peer, ranks))
            return
        model, flow = self.placed.model, self.flows[transfer.result.micro]
        shape = (flow.rows.rows, model.record.hidden)
        buffer = torch.empty(shape, dtype=model.recipe.dtype, device=flow.rows.ids_T.device)
        self._coming[transfer.result] = buffer, receive(buffer, peer, ranks)

    def _take(self, result: Result) -> Tensor:
        """Return a result of another stage, waiting for it if it is still on its way."""
        if result in self._coming:
            buffer, pending = self._coming.pop(result)
            pending.wait()
            return buffer
        return self._inbox.pop(result)

    def _give(self, result: Result | None, tensor: Tensor | None) -> None:
        """Lay a result down for another stage, here or elsewhere, if one reads it."""
        if result is not None and self.table.reader(result) is not None:
            assert tensor is not None
            self._inbox[result] = tensor

    def _F(self, action: Action) -> None:
        """Run a chunk forward and keep what its backward needs."""
        model, chunk = self.placed.model, self.placed.chunks[action.chunk]
        stage, micro = self.table.stage(self.rank, action.chunk), action.micro
        # Where no action drains a queue, products run at once and their rows are let go.
        sink = self._sinks[stage, micro] = Deferred() if self._splits else Accumulated()
        flow = replace(self.flows[micro], sink=sink)
        start = None
        if stage:
            start = self._take(Result("output", stage - 1, micro)).requires_grad_()
        x_TD = model.start(flow) if chunk.embeds else start
        assert x_TD is not None
        x_TD, terms = model.run(flow, x_TD, chunk.layers)
        done = Forward(start, [x_TD], [None])
        if chunk.scores:
            x_TD = model.finish(flow, x_TD)
            loss, dx_TD = self.loss(x_TD.detach(), flow)
            self.ran.losses.append(loss)
            done = Forward(start, [x_TD], [dx_TD])
        self.ran.terms += [(micro, layer, values.detach()) for layer, values in terms.items()]
        _, weighted = model.router_terms(terms)
        if weighted is not None and weighted.requires_grad:
            done.roots.append(weighted)
            done.gradients.append(torch.full_like(weighted, self.shares[micro]))
        self._passes[stage, micro] = done
        self._give(self.table.gives(self.rank, action), x_TD.detach())

    def _I(self, action: Action) -> None:
        """Run a chunk backward as far as its inputs; weights' products wait in the sink."""
        stage, micro = self.table.stage(self.rank, action.chunk), action.micro
        done = self._passes.pop((stage, micro))
        if done.gradients[0] is None:
            done.gradients[0] = self._take(Result("gradient", stage + 1, micro))
        pairs = [(r, g) for r, g in zip(done.roots, done.gradients, strict=True) if r.requires_grad]
        if pairs:
            roots, gradients = zip(*pairs, strict=True)
            torch.autograd.backward(roots, gradients)
        given = None if done.start is None else done.start.grad
        self._give(self.table.gives(self.rank, action), given)

    def _B(self, action: Action) -> None:
        """Run a chunk backward: inputs, then weights."""
        self._I(action)
        self._W(action)

    def _W(self, action: Action) -> None:
        """Run the weights' products that a chunk's backward has left waiting."""
        sink = self._sinks.pop((self.table.stage(self.rank, action.chunk), action.micro))
        if isinstance(sink, Deferred):
            sink.drain()
