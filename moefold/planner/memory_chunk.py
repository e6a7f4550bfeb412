"""Memory of a pipeline chunk for one micro-batch: saved, offloaded and temporary bytes."""

from collections.abc import Iterable
from itertools import zip_longest
from typing import NamedTuple

from moefold.layers.config import Offload, OffloadToPages, offloaded_layers
from moefold.mesh.shares import largest_share
from moefold.model.config import Block, Decoder
from moefold.planner.case import StageContents, distinct_blocks
from moefold.planner.memoize import memoize
from moefold.planner.memory_saved import (
    INPUT_CODE_BYTES,
    SHARED_AGAIN,
    deferred_operands,
    local_expert_elements,
    saved_tensors,
)
from moefold.planner.memory_state import StateSharding, state_estimator
from moefold.planner.time_data import collective_counter
from moefold.spec.decoder import embedding_weight
from moefold.spec.forward_only import ForwardOnlyBlock
from moefold.spec.layer import INDEX, STATISTIC, Modules, Saved, Shape, as_layer_spec
from moefold.spec.pages import unpaged


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
    head_gradients: float
    """Gradients allocated by its first forward: the loss computes those of the head."""
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


def offloaded_tensors(
    tensors: Iterable[Saved], recompute: Modules, offload: Offload
) -> tuple[list[Saved], list[Saved]]:
    """Return the saved tensors of an offloaded block that go to the host and to disk."""
    movable = [t for t in tensors if t.is_saved_under(recompute) and t.saved]
    (to_host, _), (to_disk, _) = offload.tiers
    host = [tensor for tensor in movable if tensor.module in to_host]
    return host, [tensor for tensor in movable if tensor.module in to_disk]


class ChunkEstimator:
    """Bytes of chunks for one micro-batch, cached for all cases with equal inputs."""

    def __init__(
        self,
        decoder: Decoder,
        shape: Shape,
        sharding: StateSharding,
        recompute: Modules,
        offload: Offload,
        graphs: float,
        rows: int | None,
        logit: int,
        saved_logit: int,
    ) -> None:
        """Store the inputs; a chunk of logits has ``rows`` rows and ``logit`` bytes per element.

        Without ``rows`` there are no chunks, and ``saved_logit`` bytes per element are saved.
        """
        self.decoder = decoder
        self.shape = shape
        self.recompute = recompute
        self.offload = offload
        self.graphs = graphs
        self.blocks, _ = distinct_blocks(decoder)
        self.loss_rows = None if rows is None else min(rows, shape.piece)
        self.logit = logit
        self.saved_logit = saved_logit
        self.stack = sharding.stack
        self.recipe = sharding.numbers.recipe
        self.sharding = sharding
        self.states = state_estimator(decoder, sharding)
        self._by_content: dict[tuple[StageContents, tuple[int, ...]], ChunkBytes] = {}

    def chunk_bytes(self, stage: StageContents, order: tuple[int, ...] = ()) -> ChunkBytes:
        """Return the bytes of a chunk; ``order`` lists its kinds of layers if any are offloaded."""
        if (stage, order) not in self._by_content:
            self._by_content[stage, order] = self._compute(stage, order)
        return self._by_content[stage, order]

    def _compute(self, stage: StageContents, order: tuple[int, ...]) -> ChunkBytes:
        shape = self.shape
        columns = largest_share(self.decoder.vocab, shape.tp)
        # Without chunks all logits are saved between forward and backward.
        all_logits = shape.piece * columns * self.saved_logit
        logits = all_logits if self.loss_rows is None else shape.hidden_bytes
        pages = self.offload.pages
        inputs = shape, self.stack, self.recipe, self.recompute, pages
        layers = [(_block_bytes(self.blocks[kind], *inputs), count) for kind, count in stage.layers]
        fullest, forward, backward = (
            max((layer[part] for layer, _ in layers), default=0.0) for part in range(3)
        )
        saved = sum(layer[0] * count for layer, count in layers)
        if pages is not None:
            num_offloaded = offloaded_layers(pages.spill, len(order), stage.loss)
            saved += sum(self._page_index_bytes(kind, pages) for kind in order[:num_offloaded])
        deferred = sum(layer[3] * count for layer, count in layers)
        # A look-up in a table without a gradient saves nothing.
        trained = not embedding_weight(self.decoder).frozen
        if lookups := trained * (stage.embedding + stage.multi_token):
            # Under tp: indices into the rank's share, a mask of its rows, and all rows' gradients.
            indices = shape.piece * INDEX if shape.tp > 1 else 0
            saved += lookups * (indices + (shape.piece if shape.tp > 1 else 0))
            deferred += lookups * (indices + shape.piece * shape.hidden * STATISTIC)
        # The gradient of the last norm's weight.
        deferred += shape.hidden * STATISTIC if stage.has_norm else 0.0
        saved += stage.losses * logits
        if self.stack != "moefold":
            # The joined pair of rows and the norms before and after it.
            saved += stage.multi_token * 5 * shape.hidden_bytes
        elif "block" in self.recompute:
            # Without recompute, the norm of the block before saves the input of each but the first.
            reads = [r.reads for r in self.decoder.multi_token[1:]] if stage.multi_token else []
            saved += reads.count("residual") * shape.hidden_bytes
        if stage.has_norm:
            saved += shape.hidden_bytes + shape.rows * STATISTIC
        if stage.loss and self.loss_rows is not None:
            forward = max(forward, self.loss_rows * columns * self.logit)
        weights, gradients = unsharded_units(self.decoder, self.sharding, stage)
        gathered = two_largest(weights)
        forward = forward + gathered
        backward = backward + gathered + two_largest(gradients)
        offloaded, prefetched, in_transfer = self._offload_bytes(stage, order)
        return ChunkBytes(
            (saved - sum(offloaded)) * (1 + self.graphs), deferred, forward, backward, fullest,
            *self._first_gradients(stage), offloaded, prefetched, in_transfer, gathered,
            sum(gradients),
        )  # fmt: skip

    def _offload_bytes(
        self, stage: StageContents, order: tuple[int, ...]
    ) -> tuple[tuple[float, float], float, float]:
        """Return bytes offloaded to host and disk, bytes fetched ahead, and bytes in transfer.

        Other stacks offload a share of each layer.
        """
        shares = [share for _, share in self.offload.tiers]
        in_flight = self.offload.in_flight
        if self.stack != "moefold" or not order:
            sent = [(self._block_offload(kind), count) for kind, count in stage.layers]
            host, disk = (
                share * sum(block[to] * count for block, count in sent)
                for to, share in enumerate(shares)
            )
            return (host, disk), 0.0, 0.0
        blocks = [self._block_offload(kind) for kind in order]
        host, disk = (
            [block[to] for block in blocks[: offloaded_layers(share, len(order), stage.loss)]]
            for to, share in enumerate(shares)
        )
        sizes = [sum(pair) for pair in zip_longest(host, disk, fillvalue=0.0)]
        prefetched = sum(sizes[max(len(sizes) - in_flight, 0) :])
        in_transfer = min(in_flight + 1, len(sizes)) * max(sizes, default=0.0)
        return (sum(host), sum(disk)), prefetched, in_transfer

    def _block_offload(self, kind: int) -> tuple[float, float]:
        """Return the bytes that an offloaded block sends to host and disk."""
        tensors = saved_tensors(self.blocks[kind], self.shape, self.stack, self.recipe)
        tiers = offloaded_tensors(tensors, self.recompute, self.offload)
        host, disk = (sum(tensor.bytes for tensor in tier) for tier in tiers)
        return host, disk

    def _page_index_bytes(self, kind: int, pages: OffloadToPages) -> float:
        """Return the extra bytes on the device of a block whose pages are offloaded to the host."""
        tensors = saved_tensors(self.blocks[kind], self.shape, self.stack, self.recipe)
        saved = (tensor for tensor in tensors if tensor.is_saved_under(self.recompute))
        return sum(unpaged(t, pages, True).bytes - unpaged(t, pages).bytes for t in saved)

    def _first_gradients(self, stage: StageContents) -> tuple[float, float]:
        """Return the bytes of gradients that a chunk's first backward and forward allocate.

        Moefold frees gradients when a step begins; other stacks keep their buffers.
        """
        if self.stack != "moefold" or self.sharding.zero > 1:
            return 0.0, 0.0
        head = "embedding" if self.decoder.tied else "head"
        return (
            self.table_gradients(stage) + self.states.layers_state(stage).gradients,
            self.states.part_state(head).gradients if stage.loss else 0.0,
        )

    def table_gradients(self, stage: StageContents) -> float:
        """Return the bytes of the embedding's gradient, if the backward of a chunk allocates it."""
        if self.stack != "moefold" or self.sharding.zero > 1 or (stage.loss and self.decoder.tied):
            return 0.0
        lookups = stage.embedding or stage.multi_token
        return self.states.part_state("embedding").gradients if lookups else 0.0


def unsharded_units(
    decoder: Decoder, sharding: StateSharding, stage: StageContents
) -> tuple[list[float], list[float]]:
    """Return the unsharded bytes of each unit during a pass: weights under ZeRO 3, and gradients
    from ZeRO 2 on; both are empty for other stacks.
    """
    weights = list[float]()
    gradients = list[float]()
    if sharding.stack != "moefold" or sharding.zero < 2:
        return weights, gradients
    for part, _, count in collective_counter(decoder, sharding).part_uses(stage):
        # The all-gathers for backward have the bytes of those for forward.
        buckets = [bucket for bucket in part.buckets if bucket.overlaps_with != "backward"]
        gathered = sum(bucket.bytes for bucket in buckets if bucket.op == "all_gather")
        weights += [gathered] * (count if sharding.zero == 3 else 0)
        gradients += [sum(b.bytes for b in buckets if b.op == "reduce_scatter")] * count
    return weights, gradients


def two_largest(sizes: list[float]) -> float:
    """Return the bytes of the two largest units: one computes, one is in a collective."""
    return sum(sorted(sizes)[-2:])


@memoize(1 << 12)
def _block_bytes(
    block: Block,
    shape: Shape,
    stack: str,
    recipe: str,
    recompute: Modules,
    pages: OffloadToPages | None,
) -> tuple[float, float, float, float]:
    """Return a block's saved activations, the temporaries of its forward and its backward
    (activation and output, gradients in a feed-forward, recomputed tensors), and the operands of
    its deferred weight-gradient products.
    """
    tensors = saved_tensors(block, shape, stack, recipe)
    stored = [tensor for tensor in tensors if tensor.is_saved_under(recompute)]
    saved = sum(unpaged(tensor, pages).bytes for tensor in stored)
    recomputed = sum(tensor.bytes for tensor in tensors) - saved
    spec = as_layer_spec(block.ffn)
    rows = shape.piece
    features = shape.hidden
    if spec.routing is not None:
        rows = shape.received_rows(spec.routing)
        features = spec.routing.width or shape.hidden
    output = rows * features * shape.width
    inner = rows * spec.activation_width(shape) * shape.width
    row = shape.hidden_bytes
    forward = inner + output + row
    backward = 4 * inner + 2 * output + 2 * row
    if isinstance(block, ForwardOnlyBlock):
        backward = 0.0
    forward += sum(tensor.bytes for tensor in stored) - saved
    if shape.clones and spec.routing is not None:
        # Weights followed by those of clones; in backward also their gradients, twice in fp32.
        clones = shape.clones * shape.ep / spec.routing.experts
        elements = local_expert_elements(spec, shape) * (1 + clones)
        forward += elements * shape.width
        backward += elements * (shape.width + 2 * STATISTIC)
    operands = deferred_operands(block, shape, recompute & SHARED_AGAIN)
    deferred = sum(tensor.bytes for tensor in operands)
    if stack != "moefold":
        deferred *= INPUT_CODE_BYTES.get(recipe, shape.width) / shape.width
    return saved, forward, backward + max(recomputed, 0), deferred
