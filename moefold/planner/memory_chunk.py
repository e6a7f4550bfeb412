"""Memory of a pipeline chunk for one micro-batch: saved, offloaded and temporary bytes."""

from collections.abc import Iterable
from itertools import zip_longest
from typing import NamedTuple

from moefold.layers.config import offloaded_layers
from moefold.model.config import Block, Decoder
from moefold.planner.case import Held, Keeping, kinds
from moefold.planner.memoize import memoize
from moefold.planner.memory_pages import unpaged
from moefold.planner.memory_saved import (
    INPUT_CODE_BYTES,
    deferred_operands,
    local_expert_elements,
    saved_tensors,
)
from moefold.planner.memory_state import StateSharding, state_estimator
from moefold.planner.time_data import collective_counter
from moefold.spec.layer import INDEX, STATISTIC, Saved, Shape, described


class ChunkBytes(NamedTuple):
    """Bytes of a chunk of a pipeline rank for one micro-batch."""

    saved: float
    """Activations saved on the device."""
    deferred: float
    """Operands of deferred weight-gradient products."""
    forward: float
    """Temporaries of its forward."""
    backward: float
    fullest_layer: float
    """Activations saved by its fullest layer."""
    first_gradients: float
    """Gradients allocated by its first backward."""
    offloaded: tuple[float, float]
    """Activations on the host and on disk between its forward and its backward."""
    prefetched: float
    """Offloaded activations fetched before its backward begins."""
    in_transfer: float
    """Peak of offloaded activations on the device while they are transferred."""
    gathered_weights: float
    """Gathered weights during a pass, where data ranks shard them."""
    unsharded_gradients: float
    """Unsharded gradients of all its units, where data ranks reduce them after each pass."""


def offloaded_tensors(parts: Iterable[Saved], keeping: Keeping) -> tuple[list[Saved], list[Saved]]:
    """Return the saved tensors of an offloaded block that go to the host and to disk."""
    stays = [part for part in parts if part.stays(keeping.recompute) and part.saved]
    host, disk = (
        [part for part in stays if part.module in modules]
        for modules in (keeping.offload, keeping.disk)
    )
    return host, disk


class ChunkEstimator:
    """Bytes of chunks for one micro-batch, cached for all cases with equal inputs."""

    def __init__(
        self,
        decoder: Decoder,
        shape: Shape,
        split: StateSharding,
        keeping: Keeping,
        graphs: float,
        rows: int,
        logit: int,
    ) -> None:
        """Store the inputs; a chunk of logits has ``rows`` rows and ``logit`` bytes per element."""
        self.decoder, self.shape, self.keeping, self.graphs = decoder, shape, keeping, graphs
        self.blocks, _ = kinds(decoder)
        self.loss_rows, self.logit = min(rows, shape.piece), logit
        self.stack, self.recipe = split.stack, split.numbers.recipe
        self.split, self.states = split, state_estimator(decoder, split)
        self._known: dict[tuple[Held, tuple[int, ...]], ChunkBytes] = {}

    def chunk_bytes(self, held: Held, order: tuple[int, ...] = ()) -> ChunkBytes:
        """Return the bytes of a chunk; ``order`` lists its kinds of layers if any are offloaded."""
        if (held, order) not in self._known:
            self._known[held, order] = self._compute(held, order)
        return self._known[held, order]

    def _compute(self, held: Held, order: tuple[int, ...]) -> ChunkBytes:
        shape, columns = self.shape, self.decoder.vocab / self.shape.tp
        # Other stacks save all logits between forward and backward, and a second time in fp32.
        whole = shape.piece * columns * (shape.width + 4)
        logits = shape.row if self.stack == "moefold" else whole
        how = shape, self.stack, self.recipe, self.keeping
        layers = [(_block_bytes(self.blocks[kind], *how), count) for kind, count in held.layers]
        widest = (max((one[i] for one, _ in layers), default=0.0) for i in range(3))
        layer, forward, backward = widest
        total = sum(one[0] * count for one, count in layers)
        gone = offloaded_layers(self.keeping.spill, len(order), held.loss)
        total += sum(map(self._page_index_bytes, order[:gone]))
        waiting = sum(one[3] * count for one, count in layers)
        if looked_up := held.embedding + held.multi_token:
            # Under tp: indices into the rank's share, a mask of its rows, and all rows' gradients.
            places = shape.piece * INDEX if shape.tp > 1 else 0
            total += looked_up * (places + (shape.piece if shape.tp > 1 else 0))
            waiting += looked_up * (places + shape.piece * shape.hidden * STATISTIC)
        # The gradient of the last norm's weight.
        waiting += shape.hidden * STATISTIC if held.loss else 0.0
        total += held.multi_token * logits
        if self.stack != "moefold":
            # The joined pair of rows and the norms before and after it.
            total += held.multi_token * 5 * shape.row
        elif "block" in self.keeping.recompute:
            # Without recompute, the norm of the block before saves the input of each but the first.
            reads = [one.reads for one in self.decoder.multi_token[1:]] if held.loss else []
            total += reads.count("residual") * shape.row
        if held.loss:
            total += shape.row + shape.rows * STATISTIC + logits
        if held.loss and self.stack == "moefold":
            forward = max(forward, self.loss_rows * columns * self.logit)
        weights, gradients = unsharded_units(self.decoder, self.split, held)
        gathered = two_largest(weights)
        forward, backward = forward + gathered, backward + gathered + two_largest(gradients)
        away, ahead, moving = self._offload_bytes(held, order)
        kept = (total - sum(away)) * (1 + self.graphs)
        coming = self._first_gradients(held)
        made = kept, waiting, forward, backward, layer, coming, away, ahead, moving
        return ChunkBytes(*made, gathered, sum(gradients))

    def _offload_bytes(
        self, held: Held, order: tuple[int, ...]
    ) -> tuple[tuple[float, float], float, float]:
        """Return bytes offloaded to host and disk, bytes fetched ahead, and bytes in transfer.

        Other stacks offload a share of each layer.
        """
        keeping = self.keeping
        shares = keeping.offload_share, keeping.disk_share
        if self.stack != "moefold" or not order:
            sent = [(self._block_offload(kind), count) for kind, count in held.layers]
            host, disk = (
                share * sum(one[i] * count for one, count in sent) for i, share in enumerate(shares)
            )
            return (host, disk), 0.0, 0.0
        gone = [offloaded_layers(share, len(order), held.loss) for share in shares]
        sent = [self._block_offload(kind) for kind in order]
        host, disk = ([one[i] for one in sent[: gone[i]]] for i in range(2))
        sizes = [sum(pair) for pair in zip_longest(host, disk, fillvalue=0.0)]
        ahead = sum(sizes[max(len(sizes) - keeping.in_flight, 0) :])
        moving = min(keeping.in_flight + 1, len(sizes)) * max(sizes, default=0.0)
        return (sum(host), sum(disk)), ahead, moving

    def _block_offload(self, kind: int) -> tuple[float, float]:
        """Return the bytes that an offloaded block sends to host and disk."""
        parts = saved_tensors(self.blocks[kind], self.shape, self.stack, self.recipe)
        host, disk = (
            sum(part.bytes for part in to) for to in offloaded_tensors(parts, self.keeping)
        )
        return host, disk

    def _page_index_bytes(self, kind: int) -> float:
        """Return the extra bytes on the device of a block whose pages are offloaded to the host."""
        parts = saved_tensors(self.blocks[kind], self.shape, self.stack, self.recipe)
        there = [part for part in parts if part.stays(self.keeping.recompute)]
        return sum(
            unpaged(p, self.keeping, True).bytes - unpaged(p, self.keeping).bytes for p in there
        )

    def _first_gradients(self, held: Held) -> float:
        """Return the bytes of gradients that a chunk's first backward allocates.

        Moefold frees gradients when a step begins; other stacks keep their buffers.
        """
        if self.stack != "moefold" or self.keeping.zero > 1:
            return 0.0
        embeds = held.embedding and not self.decoder.tied
        found = self.states.part_state("embedding").gradients if embeds else 0.0
        return found + self.states.layers_state(held).gradients


def unsharded_units(
    decoder: Decoder, split: StateSharding, held: Held
) -> tuple[list[float], list[float]]:
    """Return the unsharded bytes of each unit during a pass: weights under ZeRO 3, and gradients
    from ZeRO 2 on; both are empty for other stacks.
    """
    weights, gradients = list[float](), list[float]()
    if split.stack != "moefold" or split.zero < 2:
        return weights, gradients
    for part, _, times in collective_counter(decoder, split).part_uses(held):
        once = [one for one in part.buckets if one.overlaps_with != "backward"]
        gathered, summed = (
            sum(one.bytes for one in once if one.op == op)
            for op in ("all_gather", "reduce_scatter")
        )
        weights += [gathered] * (times if split.zero == 3 else 0)
        gradients += [summed] * times
    return weights, gradients


def two_largest(sizes: list[float]) -> float:
    """Return the bytes of the two largest units: one computes, one is in a collective."""
    return sum(sorted(sizes)[-2:])


@memoize(1 << 12)
def _block_bytes(
    block: Block, shape: Shape, stack: str, recipe: str, keeping: Keeping
) -> tuple[float, float, float, float]:
    """Return a block's saved activations, the temporaries of its forward and its backward
    (activation and output, gradients in a feed-forward, recomputed tensors), and the operands of
    its deferred weight-gradient products.
    """
    parts = saved_tensors(block, shape, stack, recipe)
    stays = [part for part in parts if part.stays(keeping.recompute)]
    left = sum(unpaged(part, keeping).bytes for part in stays)
    again = sum(part.bytes for part in parts) - left
    spec = described(block.ffn)
    rows, features = shape.piece, shape.hidden
    if spec.routing is not None:
        rows, features = shape.received(spec.routing), spec.routing.width or shape.hidden
    sent = rows * features * shape.width
    inner = rows * spec.activation_width(shape) * shape.width
    forward, backward = inner + sent + shape.row, 4 * inner + 2 * sent + 2 * shape.row
    forward += sum(part.bytes for part in stays) - left
    if shape.clones and spec.routing is not None:
        # Weights followed by those of clones; in backward also their gradients, twice in fp32.
        both = local_expert_elements(spec, shape) * (
            1 + shape.clones * shape.ep / spec.routing.experts
        )
        forward += both * shape.width
        backward += both * (shape.width + 2 * STATISTIC)
    waiting = sum(part.bytes for part in deferred_operands(block, shape, keeping.recompute))
    if stack != "moefold":
        waiting *= INPUT_CODE_BYTES.get(recipe, shape.width) / shape.width
    return left, forward, backward + max(again, 0), waiting
