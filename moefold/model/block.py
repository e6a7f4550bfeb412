"""One decoder layer: norm, attention, norm, feed-forward, each half added to the residual rows."""

from torch import Tensor, nn

from moefold.config.base import Record
from moefold.config.slot import build
from moefold.layers.flow import BlockOutput, Flow, Segment, scaled
from moefold.layers.norm import RmsNorm
from moefold.model.config import Block
from moefold.moe.layer import MoeFfn, MoeInput
from moefold.spec.decoder import has_routing


class DecoderBlock(nn.Module):
    """Block number ``layer``. T rows, D hidden.

    Its feed-forward is ``moe`` (a MoE layer, kinds from outside that inherit from it among them) or
    ``ffn``, which is how parameters get their global names.

    Args:
        record: the block's description.
        hidden: D.
        epsilon: of its norms.
        layer: its number.
        dispatch: how rows travel between the ranks of experts; a record of the slot DISPATCH.
        expert_kernel: ``auto``, ``grouped``, ``triton`` or ``loop``.
    """

    def __init__(
        self,
        record: Block,
        hidden: int,
        epsilon: float,
        layer: int,
        dispatch: Record,
        expert_kernel: str,
    ) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(hidden, epsilon)
        self.attention = build(record.attention, hidden, epsilon)
        self.ffn_norm = RmsNorm(hidden, epsilon)
        self.moe: MoeFfn | None = None
        if has_routing(record.ffn):
            self.moe = build(record.ffn, hidden, layer, dispatch, expert_kernel)
        else:
            self.ffn = build(record.ffn, hidden)
        self._scale = record.residual_scale
        if self.moe is not None:
            self.moe.residual_scale = record.residual_scale
        self._name = f"layers.{layer}"

    def forward(self, x_TD: Tensor, flow: Flow) -> BlockOutput:
        """Return the rows after both halves, and the router's terms."""
        attended_TD = self._attend(x_TD, flow)
        with flow.world.recorder.module(f"{self._name}.{'ffn' if self.moe is None else 'moe'}"):
            x_TD, normed_TD = self.ffn_norm.summed(x_TD, attended_TD, flow)
            if self.moe is not None:
                return self.moe(MoeInput(x_TD, normed_TD), flow)
            added_TD = scaled(self.ffn(normed_TD, flow), self._scale)
            return BlockOutput(x_TD + added_TD, x_TD.new_zeros(0))

    def segments(self) -> tuple[Segment, ...]:
        """Return the steps of ``forward``, from rows to :class:`BlockOutput`; dense: one step."""
        if self.moe is None:
            return (self.forward,)
        route, *rest = self.moe.segments()

        def start(x_TD: Tensor, flow: Flow) -> Tensor:
            attended_TD = self._attend(x_TD, flow)
            with flow.world.recorder.module(f"{self._name}.moe"):
                return route(MoeInput(*self.ffn_norm.summed(x_TD, attended_TD, flow)), flow)

        return (start, *rest)

    def _attend(self, x_TD: Tensor, flow: Flow) -> Tensor:
        with flow.world.recorder.module(f"{self._name}.attention"):
            normed_TD = self.attention_norm(x_TD, flow)
            with flow.keeper.scope("attention"):
                return scaled(self.attention(normed_TD, flow), self._scale)
