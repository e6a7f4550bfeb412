"""Sends an MoE layer's rows to experts or their clones and the results back, by the layout's
dispatcher or in rounds.

T rows, D hidden, R rows after dispatch.
"""

from functools import cached_property

import torch
from torch import Tensor

from moefold.config.base import Record
from moefold.config.slot import build
from moefold.kernels.quantise.rows import BlockCodec
from moefold.kernels.scaled.rows import encode_row_ids
from moefold.layers.flow import Flow
from moefold.moe.clones import ClonePlan, plan_clones
from moefold.moe.dispatch.base import Dispatched, Dispatcher, Handle
from moefold.moe.dispatch.config import Clones, FixedShape
from moefold.moe.dispatch.routing_plan import RoutedTokens
from moefold.moe.experts import Experts
from moefold.moe.rounds import Rounds


class LayerDispatch:
    """Dispatch, experts and combine of the layer ``name``, by the layout's dispatcher ``record``.

    ``experts_module``, if given, states whether rows are sent as codes.
    """

    def __init__(
        self, record: Record, experts: int, name: str, experts_module: Experts | None = None
    ) -> None:
        self._record = record
        self._experts = experts
        self._experts_module = experts_module
        self._dispatcher: Dispatcher = build(record, experts)
        self._clones: Clones | None = None
        self._name = f"{name}.moe"
        bounded = isinstance(record, FixedShape)
        self._rounds = Rounds(record, experts, self._name) if bounded else None

    @cached_property
    def _wire(self) -> BlockCodec | None:
        """Codes in which rows are sent, if any; row numbers are never sent as codes."""
        return None if self._experts_module is None else self._experts_module.wire

    @cached_property
    def _row_dispatcher(self) -> Dispatcher:
        if self._wire is None:
            return self._dispatcher
        dispatcher = build(self._record, self._experts)
        dispatcher.wire = self._wire
        return dispatcher

    def enable_clones(self, record: Clones, ranks: int) -> None:
        """Give each of the ``ep`` ranks slots for clones of other ranks' experts."""
        self._clones = record
        self._dispatcher = build(self._record, self._experts + ranks * record.slots)

    def send(
        self, tokens: RoutedTokens, flow: Flow, numbered: bool = False, draws: bool = False
    ) -> Dispatched | RoutedTokens:
        """Send copies of rows to the ranks of their experts; rounds defer that to ``run``.

        Row numbers are sent too if the experts draw random numbers (``draws``: dropout), or if
        ``numbered`` (blocks and scales of codes follow the rows of a micro-batch) on several ranks.
        """
        if self._wire is not None:
            tokens = tokens._replace(x_TD=self._wire.fake_quantise(tokens.x_TD))
        single_rank = flow.world.group("tp_ep").size == 1
        if self._rounds is not None and flow.exact and not single_rank:
            return tokens
        clones = None
        if self._clones is not None:  # planned once per micro-batch, and stored with its decisions
            key = f"{self._name}.clones"
            if key not in flow.decisions:
                inputs = tokens.experts_TK, self._experts, self._clones, flow.world
                with flow.world.recorder.module(key):
                    flow.decisions[key] = plan_clones(*inputs)
            plan: ClonePlan = flow.decisions[key]
            tokens = tokens._replace(experts_TK=plan.physical_TK)
            clones = plan.expert_Ps
        with flow.world.recorder.module(f"{self._name}.dispatch"):
            sent = self._row_dispatcher.dispatch(*tokens, flow.world)
        if sent.overflow is not None:
            flow.overflow.append(sent.overflow)
        if sent.source is not None:
            rows_TD, copy_rows = sent.source
            flow.saved_tensors.discard_outputs("permute", (sent.x_RD,), copy_rows, rows_TD)
        with_numbers = draws or (numbered and not single_rank)
        number_R = self._send_row_numbers(tokens, flow) if with_numbers else None
        return sent._replace(overflow=None, source=None, row_number_R=number_R, clones=clones)

    def run(
        self, sent: Dispatched | RoutedTokens, experts: Experts, flow: Flow
    ) -> tuple[Tensor, Handle]:
        """Return the experts' results and the handle for ``fetch``, which is empty after rounds."""

        def run_experts(sent: Dispatched, flow: Flow) -> Tensor:
            return experts(
                sent.x_RD, sent.offs_E, sent.probs_R, flow, sent.row_number_R, sent.clones
            )

        if isinstance(sent, Dispatched):
            return run_experts(sent, flow), sent.handle
        assert self._rounds is not None
        return self._rounds.run(sent, run_experts, flow), ()

    def fetch(self, y_RD: Tensor, handle: Handle, no_drop: bool, flow: Flow) -> Tensor:
        """Send results back and sum them by token, unless rounds already did."""
        out_TD = y_RD
        if handle:
            with flow.world.recorder.module(f"{self._name}.combine"):
                out_TD = self._row_dispatcher.combine(y_RD, handle, no_drop, flow.world)
        return out_TD if self._wire is None else self._wire.fake_quantise_gradient(out_TD)

    def _send_row_numbers(self, tokens: RoutedTokens, flow: Flow) -> Tensor:
        """Dispatch the rows' numbers in the step like the rows; return those received."""
        number_T1 = encode_row_ids(flow.rows.first, flow.rows.full_row_T)[:, None]
        numbers = tokens._replace(x_TD=number_T1, weights_TK=tokens.weights_TK.detach())
        with torch.no_grad(), flow.world.recorder.module(f"{self._name}.dispatch"):
            return self._dispatcher.dispatch(*numbers, flow.world).x_RD[:, 0]
