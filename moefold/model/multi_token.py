"""Multi-token prediction: blocks that predict the token after the next, and those after that.

Each joins the normed embedding of the token that the rows before it predict with those rows,
normed, by one matrix, in this order, as DeepSeek-V3 does (arXiv 2412.19437, section 2.2). Embedding
and head are the model's own. T rows, D hidden.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moefold.config.base import Record
from moefold.layers.flow import Flow, scaled
from moefold.layers.linear import Linear
from moefold.layers.norm import NORMS
from moefold.layers.unshard import begin_unit, end_unit
from moefold.model.block import DecoderBlock
from moefold.model.config import Block


class MultiTokenBlock(DecoderBlock):
    """A block behind the join of two rows, with a norm before the head; arguments as for others."""

    def __init__(
        self,
        record: Block,
        hidden: int,
        epsilon: float,
        layer: int,
        dispatch: Record,
        expert_kernel: str,
        norm: str = "rms",
    ) -> None:
        super().__init__(record, hidden, epsilon, layer, dispatch, expert_kernel, norm)
        assert record.multi_token is not None
        self.reads = record.multi_token.reads
        self.embed_norm = NORMS[norm](hidden, epsilon)
        self.row_norm = NORMS[norm](hidden, epsilon)
        self.join = Linear(2 * hidden, hidden)
        self.norm = NORMS[norm](hidden, epsilon)
        if self.moe is not None:
            self.moe.balance.weight = record.multi_token.weight

    def predict(self, x_TD: Tensor, next_TD: Tensor, flow: Flow) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows, the router's terms, and the normed rows, from rows and embeddings."""
        with flow.world.recorder.module(f"{self._name}.join"):
            # The released weights take the embedding first.
            both_TD = torch.cat([self.embed_norm(next_TD, flow), self.row_norm(x_TD, flow)], 1)
            x_TD = self.join(both_TD, flow)
        x_TD, terms_N = self(x_TD, flow)
        return x_TD, terms_N, self.norm(x_TD, flow)


def make_block(record: Block, *given: object) -> DecoderBlock:
    """Return the block of a description; further arguments as :class:`DecoderBlock` takes them."""
    kind = DecoderBlock if record.multi_token is None else MultiTokenBlock
    return kind(record, *given)  # type: ignore[arg-type]


def look_ahead(
    blocks: Sequence[tuple[str, MultiTokenBlock]],
    embed: Callable[[Flow], Tensor],
    flow: Flow,
    rows: tuple[Tensor, Tensor],
    factor: float,
) -> tuple[list[Tensor], dict[int, Tensor]]:
    """Return the rows that the head takes for each further token, and router terms [N] by layer.

    Args:
        blocks: with their numbers.
        embed: returns the embedded rows of a pass.
        flow: the pass.
        rows: those behind the last of the other blocks, and the same as the head takes them.
        factor: on normed rows.
    """
    found, terms, (x_TD, normed_TD) = list[Tensor](), dict[int, Tensor](), rows
    for later, (number, layer) in enumerate(blocks, 1):
        here = flow.at(later)

        def predict(
            x_TD: Tensor, next_TD: Tensor, layer: MultiTokenBlock = layer, flow: Flow = here
        ) -> tuple[Tensor, Tensor, Tensor]:
            return layer.predict(x_TD, next_TD, flow)

        given = (x_TD if layer.reads == "residual" else normed_TD), embed(here)
        with flow.keeper.keeping():
            given = begin_unit(flow.unshard, f"layers.{number}", *given)
            outputs = flow.keeper.run("block", predict, *given)
            x_TD, terms_N, normed_TD = end_unit(flow.unshard, f"layers.{number}", *outputs)
        found.append(normed_TD := scaled(normed_TD, factor))
        if terms_N.numel():
            terms[int(number)] = terms_N
    return found, terms
