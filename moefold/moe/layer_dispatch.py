"""How a layer's rows go to its experts, or clones of these, and back: by the layout's dispatcher,
or in rounds.

T rows, D hidden, R rows after dispatch.
"""

from functools import cached_property

import torch
from torch import Tensor

from moefold.config.base import Record
from moefold.config.slot import build
from moefold.kernels.quantise.rows import RowCodes
from moefold.kernels.scaled.rows import sent_numbers
from moefold.layers.flow import Flow
from moefold.moe.clones import ClonePlan, plan_clones
from moefold.moe.dispatch.base import Dispatched, Dispatcher, Handle
from moefold.moe.dispatch.config import Clones, FixedRoom
from moefold.moe.dispatch.routing_plan import RoutedTokens
from moefold.moe.experts import Experts
from moefold.moe.rounds import Rounds


class LayerDispatch:
    """The three parts of a layer, of some name, that the layout's dispatcher is asked for.

    Experts, where there are any, say what rows travel as.
    """

    def __init__(self, record: Record, experts: int, name: str, of: Experts | None = None) -> None:
        self._record, self._experts, self._of = record, experts, of
        self._dispatcher: Dispatcher = build(record, experts)
        self._clones: Clones | None = None
        self._name = f"{name}.moe"
        fixed = isinstance(record, FixedRoom)
        self._rounds = Rounds(record, experts, self._name) if fixed else None

    @cached_property
    def _wire(self) -> RowCodes | None:
        """What rows travel as, beside which their numbers do as they are."""
        return None if self._of is None else self._of.wire

    @cached_property
    def _of_rows(self) -> Dispatcher:
        if self._wire is None:
            return self._dispatcher
        made = build(self._record, self._experts)
        made.wire = self._wire
        return made

    def open_slots(self, record: Clones, ranks: int) -> None:
        """Let each of the ranks of ``ep`` have clones of other ranks' experts."""
        self._clones = record
        self._dispatcher = build(self._record, self._experts + ranks * record.slots)

    def send(
        self, tokens: RoutedTokens, flow: Flow, numbered: bool = False, draws: bool = False
    ) -> Dispatched | RoutedTokens:
        """Send copies of rows to the ranks of their experts; rounds send theirs in ``run``.

        ``numbered``: codes ask which rows are of one micro-batch, and in which order; ``draws``:
        chance asks which each row is.
        """
        if self._wire is not None:
            tokens = tokens._replace(x_TD=self._wire.rounded(tokens.x_TD))
        if self._rounds is not None and self._rounds.wanted(flow):
            return tokens
        plan = self._plan(tokens, flow)
        if plan is not None:
            tokens = tokens._replace(experts_TK=plan.seats_TK)
        with flow.world.recorder.module(f"{self._name}.dispatch"):
            sent = self._of_rows.dispatch(*tokens, flow.world)
        if sent.overflow is not None:
            flow.overflow.append(sent.overflow)
        if sent.source is not None:
            rows_TD, copied = sent.source
            flow.keeper.discard("permute", (sent.x_RD,), copied, rows_TD)
        alone = flow.world.group("tp_ep").size == 1
        sent_R = self._numbers(tokens, flow) if draws or (numbered and not alone) else None
        clones = plan and plan.expert_Ps
        return sent._replace(overflow=None, source=None, sent_R=sent_R, clones=clones)

    def _plan(self, tokens: RoutedTokens, flow: Flow) -> ClonePlan | None:
        """Return where copies go, planned once for a micro-batch as its decision is."""
        if self._clones is None:
            return None
        key = f"{self._name}.clones"
        if key not in flow.decisions:
            with flow.world.recorder.module(key):
                flow.decisions[key] = plan_clones(
                    tokens.experts_TK, self._experts, self._clones, flow.world
                )
        return flow.decisions[key]

    def run(
        self, sent: Dispatched | RoutedTokens, experts: Experts, flow: Flow
    ) -> tuple[Tensor, Handle]:
        """Return the experts' results, and what brings them back: nothing after rounds."""

        def here(sent: Dispatched, flow: Flow) -> Tensor:
            return experts(sent.x_RD, sent.offs_E, sent.probs_R, flow, sent.sent_R, sent.clones)

        if isinstance(sent, Dispatched):
            return here(sent, flow), sent.handle
        assert self._rounds is not None
        return self._rounds.run(sent, here, flow), ()

    def fetch(self, y_RD: Tensor, handle: Handle, no_drop: bool, flow: Flow) -> Tensor:
        """Bring results back to their rows, and add up each token's; rounds have done so."""
        out_TD = y_RD
        if handle:
            with flow.world.recorder.module(f"{self._name}.combine"):
                out_TD = self._of_rows.combine(y_RD, handle, no_drop, flow.world)
        return out_TD if self._wire is None else self._wire.rounded_gradient(out_TD)

    def _numbers(self, tokens: RoutedTokens, flow: Flow) -> Tensor:
        """Send the rows' numbers the way of the rows; a rank alone has those of one micro-batch."""
        number_T1 = sent_numbers(flow.rows.first, flow.rows.place_T)[:, None]
        numbers = tokens._replace(x_TD=number_T1, weights_TK=tokens.weights_TK.detach())
        with torch.no_grad(), flow.world.recorder.module(f"{self._name}.dispatch"):
            return self._dispatcher.dispatch(*numbers, flow.world).x_RD[:, 0]
