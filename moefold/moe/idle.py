"""Zero-computation experts, whose rows are not dispatched.

T token rows, D hidden, K experts per token, E experts, C constants.
"""

from dataclasses import replace

import torch
from torch import nn

from moefold.kernels.linear.product import linear
from moefold.layers.flow import Flow, scaled
from moefold.layers.linear import Adaptable
from moefold.moe.config import Router
from moefold.moe.router import Routed
from moefold.moe.rows import MoeInput


class IdleExperts(Adaptable):
    """Outputs of choices numbered from E on: identities first, then constants, then zeros.

    ``constant_bias`` [D, C] has a column for each constant; None without constants.
    """

    def __init__(self, record: Router, hidden: int) -> None:
        super().__init__()
        assert record.idle_experts is not None
        self.experts = record.experts
        self.record = record.idle_experts
        constants = self.record.constant
        self.constant_bias = nn.Parameter(torch.empty(hidden, constants)) if constants else None

    def forward(
        self, rows: MoeInput, routed: Routed, flow: Flow, factor: float
    ) -> tuple[MoeInput, Routed]:
        """Return rows with the idle experts' output added, and the routing without idle choices."""
        sent_TK = routed.sent_TK
        weights_TK = routed.weights_TK
        ids_TK = sent_TK - self.experts
        record = self.record
        residual_TD, x_TD = rows
        if record.identity:
            kept_TK = (ids_TK >= 0) & (ids_TK < record.identity)
            weight_T1 = torch.where(kept_TK, weights_TK, 0).sum(1, keepdim=True)
            residual_TD = residual_TD + scaled(x_TD * weight_T1.to(x_TD.dtype), factor)
        if self.constant_bias is not None:
            place_TK = ids_TK - record.identity
            kept_TK = (place_TK >= 0) & (place_TK < record.constant)
            place_TK = torch.where(kept_TK, place_TK, record.constant)
            weight_TC = weights_TK.new_zeros(len(x_TD), record.constant + 1)
            weight_TC = weight_TC.scatter_add(1, place_TK, weights_TK)[:, :-1]
            constant_DC = self.operand("constant_bias", flow, weight_TC.dtype)
            added_TD = linear(weight_TC, constant_DC, n_valid=flow.n_valid, sink=flow.sink)
            residual_TD = residual_TD + scaled(added_TD.to(x_TD.dtype), factor)
        routed_TK = ids_TK < 0
        sent_TK = torch.where(routed_TK, sent_TK, self.experts)
        weights_TK = torch.where(routed_TK, weights_TK, 0)
        without_idle = replace(routed, sent_TK=sent_TK, weights_TK=weights_TK)
        return MoeInput(residual_TD, x_TD), without_idle
