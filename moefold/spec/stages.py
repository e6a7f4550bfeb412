"""The pipeline stages of a run file that states none: those whose heaviest rank is lightest.

A part weighs the multiply-adds that training makes for one token, forward and backward, so that
training and plans choose the same stages without a measurement.
"""

from moefold.mesh.pipeline import StageMapping, Stages, StageWeights
from moefold.model.config import Block, Decoder
from moefold.spec.decoder import embedding_weight, head_weight, parts_below_trained, sublayers
from moefold.spec.layer import Attention, LayerSpec, Scan

SEQ = 4096
"""Tokens of the sequences for which attention is weighed."""


def default_stages(decoder: Decoder, pp: int, vpp: int, mapping: StageMapping) -> Stages:
    """Return the stages of a decoder on ``pp`` ranks with ``vpp`` virtual stages each."""
    ahead = len(decoder.multi_token)
    if pp == 1:  # one rank has all parts, whatever they weigh
        return Stages.balanced(pp, vpp, decoder.layers, ahead, mapping)
    return Stages.weighted(pp, vpp, stage_weights(decoder), ahead, mapping)


def stage_weights(decoder: Decoder) -> StageWeights:
    """Return multiply-adds per token of a decoder's parts, forward and backward.

    The embedding is looked up and weighs nothing. Each multi-token prediction layer reads the head
    once more. If a layer has no description, all layers weigh the same and the ends nothing.
    """
    blocks = decoder.blocks
    main = blocks[: decoder.layers]
    for block in blocks:
        if not isinstance(block.attention, LayerSpec) or not isinstance(block.ffn, LayerSpec):
            return StageWeights((1.0,) * len(main))
    below = parts_below_trained(decoder) - 1
    # Each block with whether it has a backward.
    passed = [(block, number >= below) for number, block in enumerate(blocks)]
    weights = {one: _block_weight(*one, decoder.hidden) for one in dict.fromkeys(passed)}
    matrix = embedding_weight(decoder) if decoder.tied else head_weight(decoder)
    head = _passes(matrix.frozen) * matrix.elements
    ahead = sum(weights[one] + head for one in passed[decoder.layers :])
    return StageWeights(tuple(weights[one] for one in passed[: decoder.layers]), last=ahead + head)


def _block_weight(block: Block, has_backward: bool, hidden: int) -> float:
    """Return the multiply-adds of a block: products, chosen experts only, and attention."""
    total = 0.0
    for name, spec in sublayers(block):
        routing = spec.routing
        for _, _, weights in spec.products(hidden):
            for weight in weights:
                full = f"{spec.prefix or name}.{weight.name}"
                used = float(weight.elements)
                if weight.is_expert and routing is not None:
                    used *= min(routing.top_k, routing.experts) / routing.experts
                total += used * (_passes(full in block.frozen) if has_backward else 1)
        for operation in spec.operations(hidden):
            total += (3 if has_backward else 1) * _core_products(operation.core)
    if block.multi_token is not None:
        # The matrix that joins rows and embeddings.
        total += _passes("join.weight" in block.frozen) * 2 * hidden**2
    return total


def _core_products(core: Attention | Scan | None) -> float:
    """Return the multiply-adds of attention or a scan in a forward, per token."""
    if isinstance(core, Attention):
        return core.query_width * core.pairs(SEQ)
    return 0.0 if core is None else core.products


def _passes(is_frozen: bool) -> int:
    """Return how many products a weight takes part in: without its own gradient, one less."""
    return 2 if is_frozen else 3
