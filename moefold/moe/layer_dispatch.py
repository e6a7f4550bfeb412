"""Sends the rows of an MoE layer to its experts or their clones, and the results back: by the
layout's dispatcher, or in rounds.

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
    """Dispatch, experts and combine of the layer ``name``, by the layout's dispatcher ``record``.

    The experts ``of`` the layer, if given, state whether rows are sent as codes.
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
        """Codes that rows are sent as, if any; row numbers are never sent as codes."""
        return None if self._of is None else self._of.wire

    @cached_property
    def _of_rows(self) -> Dispatcher:
        if self._wire is None:
            return self._dispatcher
        made = build(self._record, self._experts)
        made.wire = self._wire
        return made

    def open_slots(self, record: Clones, ranks: int) -> None:
        """Enable clones: each of the ``ep`` ranks gets slots for other ranks' experts."""
        self._clones = record
        self._dispatcher = build(self._record, self._experts + ranks * record.slots)

    def send(
        self, tokens: RoutedTokens, flow: Flow, numbered: bool = False, draws: bool = False
    ) -> Dispatched | RoutedTokens:
        """Send copies of rows to the ranks of their experts; rounds defer that to ``run``.

        Row numbers are sent too if it ``draws`` (dropout), or if it is ``numbered`` (blocks and
        scales of codes follow the rows of a micro-batch) and there are other ranks.
        """
        if self._wire is not None:
            tokens = tokens._replace(x_TD=self._wire.rounded(tokens.x_TD))
        alone = flow.world.group("tp_ep").size == 1
        if self._rounds is not None and flow.exact and not alone:
            return tokens
        clones = None
        if self._clones is not None:  # planned once per micro-batch, and stored with its decisions
            key = f"{self._name}.clones"
            if key not in flow.decisions:
                given = tokens.experts_TK, self._experts, self._clones, flow.world
                with flow.world.recorder.module(key):
                    flow.decisions[key] = plan_clones(*given)
            plan: ClonePlan = flow.decisions[key]
            tokens, clones = tokens._replace(experts_TK=plan.seats_TK), plan.expert_Ps
        with flow.world.recorder.module(f"{self._name}.dispatch"):
            sent = self._of_rows.dispatch(*tokens, flow.world)
        if sent.overflow is not None:
            flow.overflow.append(sent.overflow)
        if sent.source is not None:
            rows_TD, copied = sent.source
            flow.keeper.discard("permute", (sent.x_RD,), copied, rows_TD)
        sent_R = self._numbers(tokens, flow) if draws or (numbered and not alone) else None
        return sent._replace(overflow=None, source=None, sent_R=sent_R, clones=clones)

    def run(
        self, sent: Dispatched | RoutedTokens, experts: Experts, flow: Flow
    ) -> tuple[Tensor, Handle]:
        """Return the experts' results, and the handle for ``fetch``, which is empty for rounds."""

        def here(sent: Dispatched, flow: Flow) -> Tensor:
            return experts(sent.x_RD, sent.offs_E, sent.probs_R, flow, sent.sent_R, sent.clones)

        if isinstance(sent, Dispatched):
            return here(sent, flow), sent.handle
        assert self._rounds is not None
        return self._rounds.run(sent, here, flow), ()

    def fetch(self, y_RD: Tensor, handle: Handle, no_drop: bool, flow: Flow) -> Tensor:
        """Return results to their rows and sum them by token, unless rounds have done so."""
        out_TD = y_RD
        if handle:
            with flow.world.recorder.module(f"{self._name}.combine"):
                out_TD = self._of_rows.combine(y_RD, handle, no_drop, flow.world)
        return out_TD if self._wire is None else self._wire.rounded_gradient(out_TD)

    def _numbers(self, tokens: RoutedTokens, flow: Flow) -> Tensor:
        """Dispatch the rows' numbers in the step as the rows are, and return those received."""
        number_T1 = sent_numbers(flow.rows.first, flow.rows.full_row_T)[:, None]
        numbers = tokens._replace(x_TD=number_T1, weights_TK=tokens.weights_TK.detach())
        with torch.no_grad(), flow.world.recorder.module(f"{self._name}.dispatch"):
            return self._dispatcher.dispatch(*numbers, flow.world).x_RD[:, 0]
