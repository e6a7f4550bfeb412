"""The mixture-of-experts half of a block: route, dispatch, experts, combine.

T rows, D hidden, K experts per token, E experts, R rows after dispatch, N router terms.
"""

import torch
from torch import Tensor, nn

from moefold.config.slot import build
from moefold.layers.ffn import SwiGlu
from moefold.layers.flow import Exchange, Flow, Segment
from moefold.moe.balance import Balance
from moefold.moe.config import Moe
from moefold.moe.dispatch.base import Dispatcher
from moefold.moe.experts import Experts
from moefold.moe.router import Router
from moefold.parallel.config import Layout


class MoeFfn(nn.Module):
    """Routed experts and an optional shared one: four segments that a schedule can interleave."""

    router_type: type[Router] = Router
    """What a layer from outside replaces; ``docs/extending.md`` shows how."""

    def __init__(self, record: Moe, hidden: int, layer: int, layout: Layout) -> None:
        super().__init__()
        self.record = record
        self.router = self.router_type(record.router, hidden, record.capacity)
        self.experts = Experts(record.router.experts, hidden, record.width, layout.experts)
        self.shared = (
            None
            if record.shared is None
            else SwiGlu(hidden, record.shared.width, "shared", record.shared.gate)
        )
        self.balance = Balance(record)
        self._dispatcher: Dispatcher = build(layout.dispatch, record.router.experts)
        self._key = f"layers.{layer}"

    @property
    def terms(self) -> dict[str, float]:
        """Coefficient of each router term by its name, in the order of ``terms_N``."""
        return self.balance.coefficients

    def segments(self) -> tuple[Segment, ...]:
        """From residual and normed rows to (x_TD, terms_N)."""
        return (self._route, Exchange(self._dispatch), self._experts, Exchange(self._combine))

    def _route(self, flow: Flow, x_TD: Tensor, y_TD: Tensor) -> tuple[Tensor, ...]:
        routed = self.router(y_TD, flow, flow.decisions.get(self._key))
        flow.decisions[self._key], terms = self.balance(routed, flow)
        terms_N = torch.stack(list(terms.values())) if terms else y_TD.new_zeros(0)
        return x_TD, y_TD, terms_N, routed.routing.weights_TK, routed.routing.sent_TK

    def _dispatch(
        self,
        flow: Flow,
        x_TD: Tensor,
        y_TD: Tensor,
        terms_N: Tensor,
        weights_TK: Tensor,
        experts_TK: Tensor,
    ) -> tuple[Tensor, ...]:
        no_drop = self._no_drop(flow)
        sent = self._dispatcher.dispatch(y_TD, weights_TK, experts_TK, no_drop, flow.world)
        if sent.overflow is not None:
            flow.overflow.append(sent.overflow)
        return x_TD, y_TD, terms_N, sent.x_RD, sent.offs_E, sent.probs_R, *sent.handle

    def _experts(
        self,
        flow: Flow,
        x_TD: Tensor,
        y_TD: Tensor,
        terms_N: Tensor,
        x_RD: Tensor,
        offs_E: Tensor,
        probs_R: Tensor,
        *handle: Tensor,
    ) -> tuple[Tensor, ...]:
        y_RD = self.experts(x_RD, offs_E, probs_R, flow)
        if self.shared is not None:
            x_TD = x_TD + self.shared(y_TD, flow)
        return x_TD, terms_N, y_RD, *handle

    def _combine(
        self, flow: Flow, x_TD: Tensor, terms_N: Tensor, y_RD: Tensor, *handle: Tensor
    ) -> tuple[Tensor, ...]:
        out_TD = self._dispatcher.combine(y_RD, handle, self._no_drop(flow), flow.world)
        return x_TD + out_TD, terms_N

    def _no_drop(self, flow: Flow) -> bool:
        """Whether the host knows that every row goes to K experts."""
        return flow.valid_T is None and self.record.capacity is None
