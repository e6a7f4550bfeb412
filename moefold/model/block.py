"""One decoder layer: norm, attention, norm, feed-forward, with a residual around both sublayers."""

import torch
from torch import Tensor, nn

from moefold.config.base import Record
from moefold.config.slot import build
from moefold.layers.flow import BlockOutput, Flow, Segment, scaled
from moefold.layers.linear import Linear
from moefold.layers.norm import NORMS, RmsNorm
from moefold.model.config import Block, Decoder
from moefold.moe.layer import MoeFfn
from moefold.moe.rows import MoeInput, SeparateOutput
from moefold.spec.decoder import has_routing


class DecoderBlock(nn.Module):
    """Block number ``layer``. T rows, D hidden.

    The feed-forward is the attribute ``moe`` (an MoE layer, or a plug-in that inherits from it) or
    ``ffn`` (dense); parameter names contain the attribute's name.

    Args:
        record: description of the block.
        decoder: description of the model.
        layer: number of the block.
        dispatch: how rows reach the ranks of their experts; a record of the slot DISPATCH.
        expert_kernel: ``auto``, ``grouped``, ``triton`` or ``loop``.
    """

    def __init__(
        self, record: Block, decoder: Decoder, layer: int, dispatch: Record, expert_kernel: str
    ) -> None:
        super().__init__()
        hidden = decoder.hidden
        epsilon = decoder.norm_epsilon
        kind = NORMS[decoder.norm]

        def norms(sublayer: str) -> list[RmsNorm | None]:
            present = record.norm_positions(sublayer)
            return [kind(hidden, epsilon) if normed else None for normed in present]

        self.attention_norm, self.attention_out_norm = norms("attention")
        self.attention = build(record.attention, hidden, epsilon)
        self.ffn_norm, self.ffn_out_norm = norms("ffn")
        self.moe: MoeFfn | None = None
        if has_routing(record.ffn):
            self.moe = build(record.ffn, hidden, layer, dispatch, expert_kernel)
        else:
            self.ffn = build(record.ffn, hidden)
        self._residual_scale = record.residual_scale
        self._shared_norm = record.shares_norm
        if self.moe is not None:
            self.moe.separate_output = self.ffn_out_norm is not None
            self.moe.residual_scale *= 1.0 if self.moe.separate_output else record.residual_scale
        self._name = f"layers.{layer}"
        self._ffn_name = f"{self._name}.{'ffn' if self.moe is None else 'moe'}"

    def forward(self, x_TD: Tensor, flow: Flow) -> BlockOutput:
        """Return the residual rows after both sublayers, and the router's loss terms."""
        rows = self._attend(x_TD, flow)
        with flow.world.recorder.module(self._ffn_name):
            if self.moe is None:
                added_TD = self._scale_output(self.ffn_out_norm, self.ffn(rows.x_TD, flow), flow)
                return BlockOutput(rows.residual_TD + added_TD, x_TD.new_zeros(0))
            return self._finish(self.moe(rows, flow), flow)

    def segments(self) -> tuple[Segment, ...]:
        """Return ``forward`` as segments, from rows to :class:`BlockOutput`; one if dense."""
        if self.moe is None:
            return (self.forward,)
        route, *rest = self.moe.segments()

        def start(x_TD: Tensor, flow: Flow) -> Tensor:
            rows = self._attend(x_TD, flow)
            with flow.world.recorder.module(self._ffn_name):
                return route(rows, flow)

        return (start, *rest, self._finish) if self.moe.separate_output else (start, *rest)

    def _attend(self, x_TD: Tensor, flow: Flow) -> MoeInput:
        """Return the residual rows after attention, and the rows that the feed-forward reads."""
        with flow.world.recorder.module(f"{self._name}.attention"):
            normed_TD = x_TD if self.attention_norm is None else self.attention_norm(x_TD, flow)
            with flow.saved_tensors.scope("attention"):
                attended_TD = self.attention(normed_TD, flow)
            attended_TD = self._scale_output(self.attention_out_norm, attended_TD, flow)
        if self.ffn_norm is not None:
            with flow.world.recorder.module(self._ffn_name):
                return MoeInput(*self.ffn_norm.add_and_norm(x_TD, attended_TD, flow))
        total_TD = x_TD + attended_TD
        return MoeInput(total_TD, normed_TD if self._shared_norm else total_TD)

    def _scale_output(self, norm: RmsNorm | None, out_TD: Tensor, flow: Flow) -> Tensor:
        """Return a sublayer's output, normed if ``norm`` is given, and scaled for the residual."""
        return scaled(out_TD if norm is None else norm(out_TD, flow), self._residual_scale)

    def _finish(self, rows: BlockOutput | SeparateOutput, flow: Flow) -> BlockOutput:
        if isinstance(rows, BlockOutput):
            return rows
        added_TD = self._scale_output(self.ffn_out_norm, rows.added_TD, flow)
        return BlockOutput(rows.residual_TD + added_TD, rows.terms_N)


class MultiTokenBlock(DecoderBlock):
    """A multi-token prediction block, as in DeepSeek-V3 (arXiv 2412.19437, section 2.2).

    Its input rows predict a token; the block predicts the one after it. A matrix projects the
    concatenation of that token's embedding and the rows, both normed, in this order. The block has
    its own norm before the head, and shares embedding and head with the model.
    """

    def __init__(
        self, record: Block, decoder: Decoder, layer: int, dispatch: Record, expert_kernel: str
    ) -> None:
        super().__init__(record, decoder, layer, dispatch, expert_kernel)
        assert record.multi_token is not None
        self.reads = record.multi_token.reads
        hidden = decoder.hidden
        epsilon = decoder.norm_epsilon
        norm = NORMS[decoder.norm]
        self.embed_norm = norm(hidden, epsilon)
        self.row_norm = norm(hidden, epsilon)
        self.join = Linear(2 * hidden, hidden)
        self.norm = norm(hidden, epsilon)
        if self.moe is not None:
            self.moe.balance.weight = record.multi_token.weight

    def predict(self, x_TD: Tensor, next_TD: Tensor, flow: Flow) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output rows, the router's loss terms, and the normed rows for the head."""
        with flow.world.recorder.module(f"{self._name}.join"):
            # DeepSeek's released weights take the embedding first.
            inputs = [self.embed_norm(next_TD, flow), self.row_norm(x_TD, flow)]
            x_TD = self.join(torch.cat(inputs, 1), flow)
        x_TD, terms_N = self(x_TD, flow)
        return x_TD, terms_N, self.norm(x_TD, flow)
