"""The mixture-of-experts layer: route, dispatch, experts, combine.

T rows, D hidden, L width of dispatched rows, K experts per token, E experts, R rows after dispatch,
N router terms. Records of :mod:`moefold.moe.rows` travel from one step to the next.
"""

import torch
from torch import Tensor, nn

from moefold.config.base import Record
from moefold.config.slot import build
from moefold.layers.ffn import SwiGlu
from moefold.layers.flow import BlockOutput, Exchange, Flow, Segment, scaled
from moefold.layers.linear import Linear
from moefold.moe.balance import Balance
from moefold.moe.config import Moe
from moefold.moe.dispatch.routing_plan import RoutedTokens
from moefold.moe.experts import Experts
from moefold.moe.idle import IdleExperts
from moefold.moe.layer_dispatch import LayerDispatch
from moefold.moe.router import TopKRouter
from moefold.moe.rows import DispatchedRows, ExpertRows, MoeInput, RoutedRows, SeparateOutput


class MoeFfn(nn.Module):
    """MoE feed-forward: routed experts and, optionally, a shared one and idle ones.

    Args:
        record: description of the layer.
        hidden: D.
        layer: number of the block.
        dispatch: how rows reach the ranks of their experts; a record of the slot DISPATCH.
        expert_kernel: ``auto``, ``grouped``, ``triton`` or ``loop``.
    """

    router_type: type[TopKRouter] | None = None
    """Router class that subclasses use in place of the one that the record names."""
    residual_scale = 1.0
    """Factor on the output before it is added to the residual; set by the block."""
    separate_output = False
    """Whether the output is returned without the residual, because the block norms it first."""

    def __init__(
        self, record: Moe, hidden: int, layer: int, dispatch: Record, expert_kernel: str
    ) -> None:
        super().__init__()
        self.record = record
        self.residual_scale = record.scale
        build_router = self.router_type or build
        self.router: TopKRouter = build_router(record.router, hidden, record.capacity)
        self.router.layer = layer
        inner = record.latent or hidden
        self.experts = Experts(record, inner, expert_kernel)
        self.down = self.up = None
        if record.latent is not None:
            self.down = Linear(hidden, inner)
            self.up = Linear(inner, hidden)
        self.shared: SwiGlu | None = None
        if record.shared is not None:
            self.shared = SwiGlu(hidden, record.shared.width, "shared", record.shared.gate)
        self._two_way = record.shared is not None and record.shared.two_way
        self.idle = IdleExperts(record.router, hidden) if record.router.idle_experts else None
        self.balance = Balance(record)
        self._key = f"layers.{layer}"
        self.dispatcher = LayerDispatch(dispatch, record.router.experts, self._key, self.experts)

    @property
    def terms(self) -> dict[str, float]:
        """Coefficient of each router term by name, in the order of ``terms_N``."""
        return self.balance.coefficients

    def forward(self, rows: MoeInput, flow: Flow) -> BlockOutput | SeparateOutput:
        """Return residual plus output (separate if ``separate_output``), and router terms."""
        routed = self.route(rows, flow)
        dispatched = self.dispatch(routed, flow)
        combined = self.combine(self.run_experts(dispatched, flow), flow)
        return self.finish(combined, flow) if isinstance(combined, ExpertRows) else combined

    def segments(self) -> tuple[Segment, ...]:
        """Return the steps of ``forward``, between which a schedule may run other work."""
        steps = (self.route, Exchange(self.dispatch), self.run_experts, Exchange(self.combine))
        return steps if self.up is None else (*steps, self.finish)

    def route(self, rows: MoeInput, flow: Flow) -> RoutedRows:
        """Route the rows, or replay the micro-batch's decision, and compute router terms."""
        with flow.saved_tensors.scope("moe", *rows):
            routed = self.router(rows.x_TD, flow, flow.decisions.lookup(self._key))
            flow.decisions[self._key], terms = self.balance(routed, flow)
            if self.idle is not None:
                rows, routed = self.idle(rows, routed, flow, self.residual_scale)
            weights_TK = routed.weights_TK
            inner_TL = None
            if self.shared is not None and self._two_way:
                gate_T1 = self.shared.gate_factors(rows.x_TD, flow)
                weights_TK = weights_TK * (1 - gate_T1).to(weights_TK)
            if self.down is not None:
                inner_TL = self.down(rows.x_TD, flow)
        values = [value.reshape(1) for value in terms.values()] or [rows.x_TD.new_zeros(0)]
        terms_N = values[0]
        if len(values) > 1:
            terms_N = torch.cat(values)
        return RoutedRows(*rows, terms_N, weights_TK, routed.sent_TK, inner_TL)

    def dispatch(self, rows: RoutedRows, flow: Flow) -> DispatchedRows:
        """Send copies of the rows to the ranks of their experts."""
        residual_TD, x_TD, terms_N, weights_TK, experts_TK, inner_TL = rows
        rows_TL = x_TD if inner_TL is None else inner_TL
        tokens = RoutedTokens(rows_TL, weights_TK, experts_TK, self._no_drop(flow))
        draws = flow.training and bool(self.experts.dropout_positions)
        sent = self.dispatcher.send(tokens, flow, self.experts.shares_scales, draws)
        return DispatchedRows(residual_TD, x_TD, terms_N, sent)

    def run_experts(self, rows: DispatchedRows, flow: Flow) -> ExpertRows:
        """Run this rank's experts on dispatched rows, and the shared expert on local rows."""
        residual_TD = rows.residual_TD
        shared_TD = None
        with flow.world.recorder.module(f"{self._key}.moe.experts"):
            y_RD, handle = self.dispatcher.run(rows.sent, self.experts, flow)
            if self.shared is not None:
                shared_TD = self.shared(rows.x_TD, flow)
                if not self.separate_output:
                    residual_TD = residual_TD + scaled(shared_TD, self.residual_scale)
                    shared_TD = None
        return ExpertRows(residual_TD, shared_TD, rows.terms_N, y_RD, handle)

    def combine(self, rows: ExpertRows, flow: Flow) -> BlockOutput | SeparateOutput | ExpertRows:
        """Send results back to the ranks of their tokens, and sum them by token."""
        out_TL = self.dispatcher.fetch(rows.y_RD, rows.handle, self._no_drop(flow), flow)
        if self.up is not None:
            return rows._replace(y_RD=out_TL, handle=())
        return self._add_to_residual(rows, out_TL)

    def finish(self, rows: ExpertRows, flow: Flow) -> BlockOutput | SeparateOutput:
        """Project the summed results from the latent width L to D."""
        assert self.up is not None
        with flow.saved_tensors.scope("moe"):
            out_TD = self.up(rows.y_RD, flow)
        return self._add_to_residual(rows, out_TD)

    def _add_to_residual(self, rows: ExpertRows, out_TD: Tensor) -> BlockOutput | SeparateOutput:
        out_TD = out_TD if rows.shared_TD is None else out_TD + rows.shared_TD
        added_TD = scaled(out_TD, self.residual_scale)
        if self.separate_output:
            return SeparateOutput(rows.residual_TD, added_TD, rows.terms_N)
        return BlockOutput(rows.residual_TD + added_TD, rows.terms_N)

    def _no_drop(self, flow: Flow) -> bool:
        """Whether the host knows that every row goes to exactly K experts."""
        return flow.valid_T is None and not self.record.drops
