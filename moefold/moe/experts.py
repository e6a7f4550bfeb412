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
from moefold.kernels.quantise.rows import BlockCodec
from moefold.kernels.rows import expert_of_rows
from moefold.kernels.scaled.ffn import scaled_ffn
from moefold.kernels.scaled.rows import RowRuns
from moefold.kernels.swiglu.ffn import gated_ffn, grouped_products
from moefold.kernels.swiglu.variant import ExpertVariant
from moefold.layers.config import Activation
from moefold.layers.flow import Flow
from moefold.layers.linear import Adaptable
from moefold.moe.clone_weights import CloneGradients, append_clones, leaf_operands
from moefold.moe.config import Moe

EXPERT_BIT = 53
"""First bit of the expert's number in dropout's numbers, above the bits of the row's number."""


class Experts(Adaptable):
    """E experts of width F, computed by a grouped product or in a loop."""

    def __init__(self, record: Moe, hidden: int, kernel: str) -> None:
        super().__init__()
        experts = record.router.experts
        width = record.width
        self.w_in = nn.Parameter(torch.empty(experts, 2, width, hidden))
        self.w_out = nn.Parameter(torch.empty(experts, hidden, width))
        self.in_bias = self.out_bias = None
        if record.expert_bias:
            self.in_bias = nn.Parameter(torch.empty(experts, 2, width))
            self.out_bias = nn.Parameter(torch.empty(experts, hidden))
        self._kernel = kernel
        self._activation = record.activation
        self._has_variant = record.has_expert_variant
        self._on_input = record.weigh == "input"

    def kernel(self, dtype: torch.dtype, device: torch.device) -> GroupedKernel:
        """Return the kernel that runs for rows of ``dtype`` on ``device``, and why."""
        dims = self.w_in.shape[-1], self.w_out.shape[-1]
        return choose_kernel(self._kernel, dtype, *dims, device=device)

    @property
    def shares_scales(self) -> bool:
        """Whether an expert's rows of a micro-batch share blocks and scales across ranks."""
        return any(not narrow.by_rank for narrow in self.narrow.values())

    @property
    def wire(self) -> BlockCodec | None:
        """Codes for dispatched rows and gradients of their results; None sends them unquantised."""
        narrow = self.narrow.get("w_in")
        return BlockCodec(narrow.recipe.format("rows")) if narrow and narrow.recipe.wire else None

    def _dropout_numbers(self, offs_E: Tensor, row_number_R: Tensor | None) -> Tensor | None:
        """Return a number for each pair of row and expert, if adapters have dropout."""
        if row_number_R is None or not self.dropout_positions:
            return None
        expert_R = expert_of_rows(offs_E, row_number_R.shape[0])
        (first,) = {place.first_expert for place in self.dropout_positions.values()}
        return row_number_R.to(torch.int64) + ((expert_R + first) << EXPERT_BIT)

    def forward(
        self,
        x_RD: Tensor,
        offs_E: Tensor,
        probs_R: Tensor,
        flow: Flow,
        row_number_R: Tensor | None = None,
        clones: Tensor | None = None,
    ) -> Tensor:
        """Return ``y_RD``, weighted by ``probs_R``; rows past the last offset are unspecified.

        ``row_number_R`` are the rows' numbers in the step, if they were sent. With ``clones`` (see
        :class:`Dispatched`), the rows after those of this rank's experts belong to the clones.
        Saves for backward: ``x_RD``, the routing and, unless recomputed, the pre-activation.
        """
        if self.narrow:
            parameters = [(getattr(self, name), narrow) for name, narrow in self.narrow.items()]
            codes_in, codes_out = (
                flow.narrow_operand(parameter, narrow, groups=1) for parameter, narrow in parameters
            )
            narrow = self.narrow["w_in"]
            hidden = narrow.recipe.hidden_format
            first_expert = narrow.first_expert or 0
            rows = RowRuns.of_groups(offs_E, flow.rows.first, first_expert, row_number_R)

            def experts(x_RD: Tensor, probs_R: Tensor) -> Tensor:
                return scaled_ffn(x_RD, codes_in, codes_out, rows, flow.sink, probs_R, hidden)

            return flow.saved_tensors.run("experts", experts, x_RD, probs_R)
        number_R = self._dropout_numbers(offs_E, row_number_R)
        sink = flow.sink
        w_in = self.operand("w_in", flow, None, number_R)
        w_out = self.operand("w_out", flow, None, number_R)
        present = [bias for bias in (self.in_bias, self.out_bias) if bias is not None]
        biases = [flow.operand(bias, bias.dtype) for bias in present]
        if clones is not None:
            w_in, w_out, *biases = self._with_clones(clones, biases, flow)
            sink = AUTOGRAD_SINK
        products = grouped_products(self.kernel(x_RD.dtype, x_RD.device), offs_E)
        recompute = flow.saved_tensors.recomputes("experts")
        # The library's product may not support the adapter's rank as a width.
        name = "auto" if self._kernel == "grouped" else self._kernel
        low_ranks = [low for low in (w_in.low_rank, w_out.low_rank) if low]
        dims = [size for low in low_ranks for size in low.a.value.shape[1:]]
        adapters = None
        if dims:
            kernel = choose_kernel(name, x_RD.dtype, *dims, device=x_RD.device)
            adapters = grouped_products(kernel, offs_E)
        form = self._form(offs_E, biases, flow)
        with flow.saved_tensors.scope("experts", row_ends=offs_E):
            return gated_ffn(x_RD, w_in, w_out, products, sink, probs_R, recompute, adapters, form)

    def _form(self, offs_E: Tensor, biases: Sequence[Operand], flow: Flow) -> ExpertVariant | None:
        """Return biases, activation and weighting around the products; None for plain SwiGLU."""
        if not self._has_variant:
            return None
        b_in, b_out = biases or (None, None)
        form = self._activation or Activation()
        # Outputs are summed over etp: each of its ranks adds a part of the output bias.
        share = 1 / flow.world.group("etp").size
        constants = form.alpha, form.limit, form.offset
        return ExpertVariant(offs_E, *constants, b_in, b_out, share, self._on_input)

    def _with_clones(
        self, expert_Ps: Tensor, biases: Sequence[Operand], flow: Flow
    ) -> list[Operand]:
        """Return weights and biases with those of clones appended, which backward fetches again."""
        ranks = flow.world.group("ep")
        label = ranks.recorder.label

        def read_weights() -> list[Operand]:
            return leaf_operands([self.operand("w_in", flow), self.operand("w_out", flow)])

        def fetch_again() -> tuple[Tensor, ...]:
            return append_clones([w.value for w in read_weights()], expert_Ps, ranks, label)

        local = read_weights()
        with torch.no_grad():
            values = append_clones([w.value for w in local], expert_Ps, ranks)
            added = append_clones([b.value for b in biases], expert_Ps, ranks) if biases else ()
        saved = flow.saved_tensors
        if not (saved.recomputing or saved.block):  # Recomputation fetches them anyway.
            saved.discard_outputs("clones", values, fetch_again)
        masters = [operand.master for operand in (*local, *biases)]
        stand_ins = CloneGradients.apply(expert_Ps, ranks, flow.sink, *masters)
        operands = iter(map(Operand, stand_ins, (*values, *added)))
        weights = []
        for own in (self.operand("w_in", flow), self.operand("w_out", flow)):
            weight = next(operands)
            low = own.low_rank
            if low is not None:
                low = replace(low, a=next(operands), b=next(operands))
                weight = replace(weight, low_rank=low)
            weights.append(weight)
        return [*weights, *operands]
