"""The routed experts: grouped SwiGLU feed-forwards over rows sorted by expert.

R rows, D hidden, F expert width, E experts.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from moefold.kernels.gradients import AUTOGRAD_SINK
from moefold.kernels.grouped.choose import GroupedKernel, choose_kernel
from moefold.kernels.operand import Operand
from moefold.kernels.quantise.rows import RowCodes
from moefold.kernels.rows import expert_of_rows
from moefold.kernels.scaled.ffn import narrow_ffn
from moefold.kernels.scaled.rows import RowRuns
from moefold.kernels.swiglu.ffn import gated_ffn, grouped_products
from moefold.kernels.swiglu.variant import ExpertVariant
from moefold.layers.config import Activation
from moefold.layers.flow import Flow
from moefold.layers.linear import Adaptable
from moefold.moe.clone_weights import CloneGradients, bring, leaves
from moefold.moe.config import Moe

EXPERT = 53
"""Bit at which the expert's number starts, above the row's number, in dropout's numbers."""


class Experts(Adaptable):
    """E experts of width F, computed by a grouped product or one after another."""

    def __init__(self, record: Moe, hidden: int, kernel: str) -> None:
        super().__init__()
        experts, width = record.router.experts, record.width
        self.w_in = nn.Parameter(torch.empty(experts, 2, width, hidden))
        self.w_out = nn.Parameter(torch.empty(experts, hidden, width))
        self.in_bias = self.out_bias = None
        if record.expert_bias:
            self.in_bias = nn.Parameter(torch.empty(experts, 2, width))
            self.out_bias = nn.Parameter(torch.empty(experts, hidden))
        self._kernel, self._activation = kernel, record.activation
        self._formed, self._on_input = record.formed, record.weigh == "input"

    def kernel(self, dtype: torch.dtype, device: torch.device) -> GroupedKernel:
        """Return the kernel that runs for rows of ``dtype`` on ``device``, and why."""
        dims = self.w_in.shape[-1], self.w_out.shape[-1]
        return choose_kernel(self._kernel, dtype, *dims, device=device)

    @property
    def by_micro_batch(self) -> bool:
        """Whether an expert's rows of a micro-batch share blocks and scales across ranks."""
        return any(not narrow.by_rank for narrow in self.narrow.values())

    @property
    def wire(self) -> RowCodes | None:
        """Codes for dispatched rows, and for gradients of their results; None sends them wide."""
        narrow = self.narrow.get("w_in")
        return RowCodes(narrow.recipe.form("rows")) if narrow and narrow.recipe.wire else None

    def _numbers(self, offs_E: Tensor, sent_R: Tensor | None) -> Tensor | None:
        """Return a number for each pair of row and expert, if adapters have dropout."""
        if sent_R is None or not self.drops:
            return None
        expert_R = expert_of_rows(offs_E, sent_R.shape[0])
        (first,) = {place.first_expert for place in self.drops.values()}
        return sent_R.to(torch.int64) + ((expert_R + first) << EXPERT)

    def forward(
        self,
        x_RD: Tensor,
        offs_E: Tensor,
        probs_R: Tensor,
        flow: Flow,
        sent_R: Tensor | None = None,
        clones: Tensor | None = None,
    ) -> Tensor:
        """Return ``y_RD``, weighted by ``probs_R``; rows past the last offset are unspecified.

        ``sent_R`` are the rows' numbers in the step, if they were sent. With ``clones`` (see
        :class:`Dispatched`), the rows after those of this rank's experts belong to the clones.
        Saves for backward: ``x_RD``, the routing and, unless recomputed, the pre-activation.
        """
        if self.narrow:
            codes_in, codes_out = (
                flow.narrow_operand(getattr(self, name), narrow, groups=1)
                for name, narrow in self.narrow.items()
            )

            narrow = self.narrow["w_in"]
            hidden, first_expert = narrow.recipe.hidden_form, narrow.first_expert or 0
            rows = RowRuns.of_groups(offs_E, flow.rows.first, first_expert, sent_R)

            def experts(x_RD: Tensor, probs_R: Tensor) -> Tensor:
                return narrow_ffn(x_RD, codes_in, codes_out, rows, flow.sink, probs_R, hidden)

            return flow.keeper.run("experts", experts, x_RD, probs_R)
        number_R, sink = self._numbers(offs_E, sent_R), flow.sink
        w_in, w_out = (self.operand(name, flow, None, number_R) for name in ("w_in", "w_out"))
        biases = [flow.operand(b, b.dtype) for b in (self.in_bias, self.out_bias) if b is not None]
        if clones is not None:
            w_in, w_out, *biases = self._with_clones(clones, biases, flow)
            sink = AUTOGRAD_SINK
        products = grouped_products(self.kernel(x_RD.dtype, x_RD.device), offs_E)
        again = flow.keeper.wants("experts")
        # The library's product may not support the adapter's rank as a width.
        asked = "auto" if self._kernel == "grouped" else self._kernel
        dims = [
            size for low in (w_in.low_rank, w_out.low_rank) if low for size in low.a.value.shape[1:]
        ]
        slim = choose_kernel(asked, x_RD.dtype, *dims, device=x_RD.device) if dims else None
        low = None if slim is None else grouped_products(slim, offs_E)
        form = self._form(offs_E, biases, flow)
        with flow.keeper.scope("experts", ends=offs_E):
            return gated_ffn(x_RD, w_in, w_out, products, sink, probs_R, again, low, form)

    def _form(self, offs_E: Tensor, biases: Sequence[Operand], flow: Flow) -> ExpertVariant | None:
        """Return biases, activation and weighting around the products; None is plain SwiGLU."""
        if not self._formed:
            return None
        b_in, b_out = biases or (None, None)
        form = self._activation or Activation()
        # Outputs are summed over etp: each of its ranks adds a share of the output bias.
        share = 1 / flow.world.group("etp").size
        how = form.alpha, form.limit, form.offset
        return ExpertVariant(offs_E, *how, b_in, b_out, share, self._on_input)

    def _with_clones(
        self, expert_Ps: Tensor, biases: Sequence[Operand], flow: Flow
    ) -> list[Operand]:
        """Return weights and biases with the clones' appended; backward fetches these again."""
        ranks = flow.world.group("ep")
        label = ranks.recorder.label

        def read() -> list[Operand]:
            return leaves([self.operand("w_in", flow), self.operand("w_out", flow)])

        def bring_again() -> tuple[Tensor, ...]:
            return bring([one.value for one in read()], expert_Ps, ranks, label)

        here = read()
        with torch.no_grad():
            values = bring([one.value for one in here], expert_Ps, ranks)
            shifts = bring([one.value for one in biases], expert_Ps, ranks) if biases else ()
        if not (flow.keeper.again or flow.keeper.block):  # What is recomputed fetches them anyway.
            flow.keeper.discard("clones", values, bring_again)
        masters = [one.master for one in (*here, *biases)]
        stand_ins = CloneGradients.apply(expert_Ps, ranks, flow.sink, *masters)
        both = iter(map(Operand, stand_ins, (*values, *shifts)))
        found = []
        for one in (self.operand("w_in", flow), self.operand("w_out", flow)):
            made, low = next(both), one.low_rank
            if low is not None:
                made = replace(made, low_rank=replace(low, a=next(both), b=next(both)))
            found.append(made)
        return [*found, *both]
