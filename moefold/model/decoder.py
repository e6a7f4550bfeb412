"""The decoder: embedding, blocks, norm, head; written for one device.

``parallel/`` removes the parts of other pipeline stages and cuts weights; the remaining parts keep
their global names and run by the same code.

T rows, D hidden, V vocabulary, B sequences of S tokens, N router terms of a layer.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from moefold.config.base import Record
from moefold.data.batch import MicroBatch, from_ids, pack
from moefold.kernels.cross_entropy.chunked import cross_entropy_sum
from moefold.kernels.linear.product import linear
from moefold.kernels.operand import Operand
from moefold.layers.attention import SoftmaxAttention
from moefold.layers.cache import KeyValueCache
from moefold.layers.config import Precision
from moefold.layers.flow import Flow, scaled
from moefold.layers.linear import Embedding, Linear, adapted_operand
from moefold.layers.norm import NORMS, RmsNorm
from moefold.layers.precision import PrecisionPolicy, quantise_products
from moefold.layers.unshard import EMBEDDING, begin_unit, end_unit
from moefold.model.block import DecoderBlock, MultiTokenBlock
from moefold.model.config import Decoder
from moefold.model.tuning import prepare_tuning
from moefold.moe.dispatch.config import AllToAll
from moefold.moe.layer import MoeFfn

DISPATCH = AllToAll()
LOSS_CHUNK = 1024
"""Rows in a chunk of :meth:`DecoderModel.loss`: logits exist for one chunk at a time."""


@dataclass(frozen=True)
class LossOutput:
    """The differentiable loss of one micro-batch, and its parts."""

    lm_loss: Tensor
    """Mean cross-entropy over labels, without any router term."""
    router_terms: dict[str, Tensor]
    """Value of each balancing term, averaged over layers, without its coefficient."""
    loss: Tensor
    """``lm_loss`` plus each term times its coefficient, summed over layers, plus the losses of
    multi-token prediction times their weights."""


class DecoderModel(nn.Module):
    """A decoder-only transformer, built from its declarative description.

    Args:
        record: the description.
        precision: number format of matrix products; parameters have its master dtype.
        dispatch: how rows reach the ranks of their experts; a record of the slot DISPATCH.
        expert_kernel: ``auto``, ``grouped``, ``triton`` or ``loop``.
        device: device of the uninitialised parameters; ``meta`` allocates nothing.
    """

    def __init__(
        self,
        record: Decoder,
        precision: Precision = "fp32",
        dispatch: Record = DISPATCH,
        expert_kernel: str = "auto",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.record = record
        self.precision_policy = PrecisionPolicy(precision)
        with torch.device(device or torch.get_default_device()):
            self.embed: Embedding | None = Embedding(record.vocab, record.hidden)
            self.layers = nn.ModuleDict()
            for i, block in enumerate(record.blocks):
                kind = DecoderBlock if block.multi_token is None else MultiTokenBlock
                self.layers[str(i)] = kind(block, record, i, dispatch, expert_kernel)
            norm = NORMS[record.norm]
            self.norm: RmsNorm | None = norm(record.hidden, record.norm_epsilon)
            self.head = None if record.tied else Linear(record.hidden, record.vocab)
        self.to(self.precision_policy.master_dtype)
        prepare_tuning(self, record, self.precision_policy.dtype)
        quantise_products(self, record)

    @property
    def head_weight(self) -> nn.Parameter:
        """The head's matrix [V, D], which is the embedding's if tied."""
        owner = self.head or self.embed
        assert owner is not None
        return owner.weight

    @property
    def head_unit(self) -> str:
        """Name of the sharded unit that holds the head's matrix."""
        return EMBEDDING if self.head is None else "head"

    @property
    def main_blocks(self) -> tuple[str, ...]:
        """Numbers of this rank's blocks, without those of multi-token prediction."""
        return tuple(n for n, b in self.layers.items() if not isinstance(b, MultiTokenBlock))

    def moe_layers(self) -> Iterator[tuple[int, MoeFfn]]:
        """Yield the number and the MoE layer of each block that has one."""
        for number, block in self.layers.items():
            if isinstance(block, DecoderBlock) and block.moe is not None:
                yield int(number), block.moe

    def start_step(self) -> None:
        """Reset the statistics that layers collected in the last step or an abandoned attempt."""
        for _, moe in self.moe_layers():
            moe.balance.start_step()
        for attention in (block.attention for block in self.layers.values()):
            if isinstance(attention, SoftmaxAttention):
                attention.start_step()

    def forward(self, flow: Flow) -> tuple[Tensor, dict[int, Tensor]]:
        """Return the rows ``x_TD`` for the head, and the router terms [N] by layer number."""
        x_TD, terms = self.run(flow, self.start(flow), self.main_blocks)
        return self.finish(flow, x_TD), terms

    def start(self, flow: Flow) -> Tensor:
        """Return the embedded rows ``x_TD``."""
        assert self.embed is not None, "the embedding is not on this rank"
        begin_unit(flow.unshard, EMBEDDING)
        with flow.world.recorder.module("embed"):
            (x_TD,) = end_unit(flow.unshard, EMBEDDING, self.embed(flow))
        return scaled(x_TD, self.record.embed_scale)

    def run(
        self, flow: Flow, x_TD: Tensor, numbers: Iterable[str]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run blocks ``numbers``; return the rows, and the router terms [N] by layer number."""
        terms = dict[int, Tensor]()
        numbers = tuple(numbers)
        for index, number in enumerate(numbers):

            def block(x_TD: Tensor, layer: nn.Module = self.layers[number]) -> Any:
                return layer(x_TD, flow)

            with flow.saved_tensors.layer_hooks(index, len(numbers)):
                (x_TD,) = begin_unit(flow.unshard, f"layers.{number}", x_TD)
                outputs = flow.saved_tensors.run("block", block, x_TD)
                x_TD, terms_N = end_unit(flow.unshard, f"layers.{number}", *outputs)
            if terms_N.numel():
                terms[int(number)] = terms_N
        return x_TD, terms

    def finish(self, flow: Flow, x_TD: Tensor) -> Tensor:
        """Return the rows ``x_TD`` for the head: normed, and divided by ``logits_divisor``."""
        assert self.norm is not None, "the last norm is not on this rank"
        (x_TD,) = begin_unit(flow.unshard, "norm", x_TD)
        with flow.saved_tensors.layer_hooks(num_layers=0):
            (x_TD,) = end_unit(flow.unshard, "norm", self.norm(x_TD, flow))
        return scaled(x_TD, 1 / self.record.logits_divisor)

    def run_multi_token(
        self, flow: Flow, x_TD: Tensor, normed_TD: Tensor
    ) -> tuple[list[Tensor], dict[int, Tensor]]:
        """Run the multi-token prediction blocks for which the pass has labels.

        Returns the head's input rows for each of them, and the router terms [N] by layer number.

        Args:
            flow: the pass.
            x_TD: residual rows after the last main block.
            normed_TD: these rows as :meth:`finish` returns them.
        """
        rows = list[Tensor]()
        terms = dict[int, Tensor]()
        factor = 1 / self.record.logits_divisor
        blocks = [(n, b) for n, b in self.layers.items() if isinstance(b, MultiTokenBlock)]
        for depth, (number, layer) in enumerate(blocks[: len(flow.shifted_rows)], 1):
            shifted = flow.shifted(depth)
            inputs = (x_TD if layer.reads == "residual" else normed_TD), self.start(shifted)
            with flow.saved_tensors.layer_hooks(num_layers=0):
                inputs = begin_unit(flow.unshard, f"layers.{number}", *inputs)
                predict = partial(layer.predict, flow=shifted)
                outputs = flow.saved_tensors.run("block", predict, *inputs)
                x_TD, terms_N, normed_TD = end_unit(flow.unshard, f"layers.{number}", *outputs)
            rows.append(normed_TD := scaled(normed_TD, factor))
            if terms_N.numel():
                terms[int(number)] = terms_N
        return rows, terms

    def head_operand(self, flow: Flow | None = None) -> Operand:
        """Return the head's weight as an operand, its adapter with dropout if ``flow`` trains."""
        if self.head is not None:
            operand = adapted_operand(self.head, "weight", self.precision_policy, flow=flow)
            return replace(operand, first_row=self.head.first_row)
        assert self.embed is not None, "the tied embedding is not on this rank"
        operand = self.precision_policy.operand(self.embed.weight)
        return replace(operand, first_row=self.embed.first_row)

    def sum_router_terms(self, terms: dict[int, Tensor]) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return the mean of each term over layers, and the weighted sum to add to the loss."""
        values: dict[str, list[Tensor]] = {}
        total: Tensor | None = None
        for i, moe in self.moe_layers():
            if i not in terms or not terms[i].numel():
                continue
            for (name, coefficient), value in zip(
                moe.terms.items(), terms[i].unbind(), strict=True
            ):
                values.setdefault(name, []).append(value)
                weighted = value * coefficient
                total = weighted if total is None else total + weighted
        return {name: torch.stack(of_layers).mean() for name, of_layers in values.items()}, total

    def logits(self, ids_BS: Tensor) -> Tensor:
        """Return next-token logits [B, S, V] for token ids [B, S]."""
        x_TD, _ = self(Flow(from_ids(ids_BS), self.precision_policy, training=False))
        return linear(x_TD, self.head_operand()).unflatten(0, ids_BS.shape)

    def next_logits(
        self, texts: Sequence[Sequence[int]], cache: KeyValueCache | None = None
    ) -> Tensor:
        """Return the next-token logits [B, V] of B texts, given as token ids; none may be empty.

        Capacity is ignored: no row is dropped. With ``cache``, if every text extends one of the
        last call by one token, only the new tokens' rows are computed.
        """
        rows = pack(texts) if cache is None else cache.next_rows(texts)
        rows = rows.to(self.head_weight.device)
        flow = Flow(rows, self.precision_policy, training=False, cache=cache, dropless=True)
        x_TD, _ = self(flow)
        return linear(rows.gather_last(x_TD), self.head_operand())

    def loss(self, ids_BS: Tensor, labels: Tensor | None = None) -> LossOutput:
        """Return the differentiable loss of B sequences of S tokens.

        Args:
            ids_BS: int64 token ids.
            labels: int64 [B, S], not shifted (as in Hugging Face): position s is predicted from
                positions before s; -100 is ignored. Default: ``ids_BS``.
        """
        if labels is not None:  # shifted to the left: row s holds the label of token s + 1
            ignored = torch.full_like(labels[:, :1], -100)
            labels = torch.cat([labels[:, 1:], ignored], 1)
        return self.micro_batch_loss(from_ids(ids_BS, labels))

    def micro_batch_loss(self, rows: MicroBatch) -> LossOutput:
        """Return the differentiable loss of one micro-batch, treated as the whole batch."""
        self.start_step()
        records = self.record.multi_token
        depths = range(1, len(records) + 1)
        ahead = tuple((rows.shift(depth), None) for depth in depths)
        flow = Flow(rows, self.precision_policy, shifted_rows=ahead)
        x_TD, terms = self.run(flow, self.start(flow), self.main_blocks)
        normed_TD = self.finish(flow, x_TD)
        outputs, further_terms = self.run_multi_token(flow, x_TD, normed_TD)
        values, weighted = self.sum_router_terms(terms | further_terms)
        lm_loss = self._mean_loss(normed_TD, rows)
        loss = lm_loss if weighted is None else lm_loss + weighted
        for record, x_TD, (rows, _) in zip(records, outputs, ahead, strict=True):
            loss = loss + record.weight * self._mean_loss(x_TD, rows)
        return LossOutput(lm_loss, values, loss)

    def _mean_loss(self, x_TD: Tensor, rows: MicroBatch) -> Tensor:
        """Return the mean cross-entropy of normed rows over valid labels."""
        head = self.head_operand()
        if head.low_rank is None:
            summed = cross_entropy_sum(x_TD, head, rows.labels_T, chunk=LOSS_CHUNK)
        else:
            summed = cross_entropy(linear(x_TD, head), rows.labels_T, reduction="sum")
        return summed / max(rows.n_labels, 1)
