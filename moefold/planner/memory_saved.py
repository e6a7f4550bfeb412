"""Activations that a block saves for backward, tensor by tensor.

They follow from the layers' descriptions (``moefold/spec/layer.py``). Weights and their copies are
not included, nor what a whole pass shares (rotary angles, token ids).

Moefold saves what its autograd functions save, as listed in each description;
``tests/cpu/test_planner_kept.py`` compares every line with what a pass really saves.

What Megatron-Core saves follows from the operations of a layer: inputs of products, inputs of
activations and attention, and outputs of norms. Under tp a rank saves its own band of gathered
rows and gathers them again in backward. Low-precision products save their inputs as codes. The
routing weight is applied before the experts' second product (arXiv 2603.07685, section 4.1.2), so
that its output is not saved. Section 4.1.4 there states what recompute of ``layernorm``,
``moe_act`` and ``mla_up_proj`` drops.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from moefold.model.config import Block
from moefold.planner.case import Case, bytes_per_activation
from moefold.planner.memoize import memoize
from moefold.spec.codes import CodedBlock, coded_saved, gradient_bytes, weight_products
from moefold.spec.decoder import norm_names, sublayers
from moefold.spec.forward_only import ForwardOnlyBlock
from moefold.spec.layer import (
    CORE,
    NORMS,
    NOTHING,
    STATISTIC,
    UP,
    Attention,
    LayerSpec,
    Modules,
    Saved,
    SavedKind,
    Scan,
    Shape,
)

INPUT_CODE_BYTES = {"fp8_tensor": 1.0, "fp8_block": 1.03125, "mxfp8": 1.03125, "nvfp4": 0.5625}
"""Bytes per element of a product's input that Megatron saves as codes, scales included."""
ACTIVATION: Modules = frozenset(("moe_act",))
MIXTURE: Modules = frozenset(("moe",))
SHARED_AGAIN: Modules = frozenset(("shared", "block"))
"""Kinds whose recompute repeats a shared expert."""


class Widths(NamedTuple):
    """Bytes per element of saved tensors by use."""

    code: float
    """Inputs of products."""
    hidden: float
    """Inputs of activation functions; DeepSeek's software saves these as codes too (arXiv
    2412.19437, section 3.3.3)."""


def layer_shape(case: Case) -> Shape:
    """Return the shape of a case's layers."""
    sizes = case.sizes
    width = bytes_per_activation(case.number_formats.recipe)
    # NCCL EP allocates room for all rows of all ranks.
    load = float(sizes.ep) if case.dispatch == "nccl_ep" else case.load
    room = case.fixed_dispatch
    return Shape(
        hidden=case.decoder.hidden,
        rows=case.rows,
        tp=sizes.tp,
        etp=sizes.etp,
        load=load,
        width=width,
        cp=sizes.cp,
        gathers=case.context.gathers,
        ranks_sharing_heads=case.context.sharing_heads(sizes.cp),
        ep=sizes.ep,
        room=None if room is None else room.buffer_rows(sizes),
        places=0 if room is None else room.saved_indices(sizes),
        separate_exchanges=case.schedule.overlaps_passes or case.has_partial_graphs,
        clones=case.clones,
    )


@memoize(1 << 12)
def saved_tensors(
    block: Block, shape: Shape, stack: str = "moefold", recipe: str = "bf16"
) -> tuple[Saved, ...]:
    """Return what one block saves for one micro-batch if nothing is recomputed.

    Raises:
        ValueError: a layer of a plugin has no description.
    """
    if isinstance(block, ForwardOnlyBlock):
        decisions = coded_saved(block, shape) if stack == "moefold" else ()
        return tuple(t for t in decisions if not t.saved and t.kind is SavedKind.OTHER)
    if stack == "moefold":
        # Inner rows of adapters; those of feed-forwards are recomputed.
        saved = [tensor for tensor in coded_saved(block, shape) if tensor.from_forward]
        for adapter in block.adapters:
            path = adapter.weight.split(".")
            size = shape.piece * shape.width * adapter.rank
            if path[-1] == "weight":
                module = "attention" if path[0] == "attention" else "moe"
                module = "shared" if "shared" in path else module
                name = f"{adapter.weight}.inner"
                weights = (adapter.weight,)
                saved.append(Saved(name, size, module=module, operand_of=weights))
        return tuple(saved)
    code = INPUT_CODE_BYTES.get(recipe, float(shape.width))
    wide = float(shape.width)
    widths = Widths(code, code if stack == "deepseek" else wide)
    saved = list[Saved]()
    for _, spec in sublayers(block):
        rows = Saved("input", shape.hidden_bytes, kind=SavedKind.BLOCK_INPUT)
        saved.append(Saved("residual", shape.hidden_bytes) if saved else rows)
        saved += _megatron_sublayer(spec, shape, widths)
    return tuple(saved)


def saved_tensors_of(case: Case, block: Block) -> tuple[Saved, ...]:
    """Return what one block of a case saves for one micro-batch if nothing is recomputed."""
    return saved_tensors(block, layer_shape(case), case.software.stack, case.number_formats.recipe)


def saved_bytes(parts: Iterable[Saved], recompute: Modules = NOTHING) -> int:
    """Return the bytes that are saved under a recompute policy."""
    return sum(part.bytes for part in parts if part.is_saved_under(recompute))


def saved_by_module(saved: Sequence[tuple[Saved, int]], recompute: Modules) -> Counter[str]:
    """Return the bytes by module of tensors, with their numbers, under a recompute policy."""
    sizes = Counter[str]()
    for tensor, number in saved:
        sizes[tensor.module] += tensor.bytes * number * tensor.is_saved_under(recompute)
    return sizes


@memoize(1 << 12)
def deferred_operands(
    block: Block, shape: Shape, recompute: Modules = NOTHING
) -> tuple[Saved, ...]:
    """Return what a block holds between I and W, where a schedule defers weight gradients.

    These are the inputs of products, saved or computed by backward; the gradients of products'
    outputs; and gradients of vectors, which are computed in I. A shared expert that is recomputed
    has its own copy of codes that other products read too; nothing else depends on ``recompute``.
    """
    if isinstance(block, ForwardOnlyBlock):
        return ()
    operands = [tensor for tensor in coded_saved(block, shape) if tensor.operand_of]
    if recompute & SHARED_AGAIN:
        codes = (tensor for tensor in operands if tensor.kind is SavedKind.CODES)
        operands += [t for t in codes if t.module == "moe" and "moe.shared.w_in" in t.operand_of]
    repeated = _sharing_one_gradient(block, shape)[1:]
    for name, product in weight_products(block, shape):
        if not (product.weight.is_expert and shape.clones) and name not in repeated:
            operands.append(_saved(f"{name}.gradient", gradient_bytes(block, name, product, shape)))
    for name, spec in sublayers(block):
        # With clones the experts' products run in I, and their sums are stored until W.
        if spec.routing is not None and shape.clones > 0:
            of_products = (t for t in operands if t.module != "experts")
            operands = [t for t in of_products if t.kind is not SavedKind.EXPERT_ENDS]
            operands.append(_saved("experts.sums", local_expert_elements(spec, shape) * STATISTIC))
        vectors = shape.hidden * len(norm_names(block, name))
        for weight in spec.weights(shape.hidden):
            if len(weight.shape) == 1 or weight.summed:
                vectors += round(weight.local_elements(shape.tp, shape.ep, shape.etp))
        operands.append(_saved("vectors", vectors * STATISTIC))
    if block.multi_token is not None:
        operands.append(_saved("join.gradient", shape.hidden_bytes))
        operands.append(_saved("join.vectors", 3 * shape.hidden * STATISTIC))
    return tuple(operands)


def _sharing_one_gradient(block: Block, shape: Shape) -> list[str]:
    """Return the products whose outputs are only summed, so that they share one gradient tensor.

    They do not under tp, whose ranks gather it for each product, nor with a factor, a norm or a
    border between graphs in between. Both sublayers count only if they share a norm.
    """
    scaled = block.residual_scale != 1 or block.norm_positions("ffn")[1]
    if shape.tp > 1 or shape.separate_exchanges or scaled:
        return []
    separate = set[str]()
    if isinstance(block, CodedBlock) and block.quantise.wgrad == "narrow":
        separate |= {*block.coded_names}
    return [
        name
        for sublayer, spec in sublayers(block)
        if sublayer != "attention" or block.shares_norm
        for weight in spec.weights(shape.hidden)
        if weight.added and (name := f"{spec.prefix or sublayer}.{weight.name}") not in separate
    ]


def local_expert_elements(spec: LayerSpec, shape: Shape) -> float:
    """Return the number of elements of routed experts' weights on a rank."""
    weights = (weight for weight in spec.weights(shape.hidden) if weight.is_expert)
    return sum(weight.local_elements(shape.tp, shape.ep, shape.etp) for weight in weights)


# ----------------------------------------------------------------------------- Megatron-Core


def _megatron_sublayer(spec: LayerSpec, shape: Shape, widths: Widths) -> Iterator[Saved]:
    """Yield what one sublayer of a block saves besides its residual."""
    routing = spec.routing
    # The router reads the norm's output too, in the compute dtype.
    code = shape.width if routing else widths.code
    yield _saved("norm.output", shape.rows * shape.hidden * code, NORMS, "norms")
    operations = tuple(spec.operations(shape.hidden))
    for operation in operations:
        if isinstance(operation.core, Attention):
            yield from _megatron_attention(spec, operation.core, shape, widths)
        elif isinstance(operation.core, Scan):
            yield from spec.saved(shape)
    if routing is not None:
        scores = shape.rows * routing.experts * (STATISTIC + STATISTIC + 1)
        yield _saved("router", scores, MIXTURE)
    for operation in operations:
        if operation.name in ("ffn", "experts", "shared"):
            yield from _megatron_feed_forward(operation.name, spec, shape, widths)


def _saved(name: str, size: float, dropped: Modules = NOTHING, module: Any = "block") -> Saved:
    return Saved(name, round(size), dropped, module=module)


def _megatron_attention(
    spec: LayerSpec, core: Attention, shape: Shape, widths: Widths
) -> Iterator[Saved]:
    """Yield latents before and after their norms, queries, keys and values, and the output rows."""
    rows = shape.piece / shape.tp
    latents = [w for w in spec.weights(shape.hidden) if w.latent]
    if latents:
        outputs = sum(n for n, _ in _product_widths(spec, shape, "attention", "own"))
        yield _saved("latents", shape.rows * outputs * shape.width)
        normed = sum(weight.elements for weight in latents)
        yield _saved("latents.normed", shape.rows * normed * widths.code, NORMS, "norms")
    if core.head_norms:
        width = (core.heads + core.kv_heads) * core.qk_dim
        yield _saved("qk.projected", rows * width * shape.width)
    features = core.heads * core.qk_dim + core.key_value_width
    yield _saved("qkv", rows * features * shape.width, UP if latents else NOTHING, "attention")
    rows *= core.heads
    yield _saved("attended", rows * core.v_dim * shape.width, module="attention")
    yield _saved("attended.statistic", rows * STATISTIC, CORE, "attention")
    if widths.code < shape.width:
        yield _saved("attended.codes", rows * core.v_dim * widths.code, module="attention")


def _megatron_feed_forward(
    name: str, spec: LayerSpec, shape: Shape, widths: Widths
) -> Iterator[Saved]:
    """Yield pre-activation and activation; for routed experts also their input and row weights."""
    (hidden, inputs), (_, features) = _product_widths(spec, shape, name)
    if name == "experts" and spec.routing is not None:
        rows = shape.received_rows(spec.routing)
        yield _saved("experts.input", rows * inputs * widths.code, MIXTURE, "experts")
        yield _saved("experts.hidden", rows * hidden * widths.hidden, MIXTURE, "experts")
        activation = rows * features * widths.code
        yield _saved("experts.activation", activation, MIXTURE | ACTIVATION, "moe_act")
        yield _saved("experts.weights", rows * STATISTIC, MIXTURE)
        return
    module: Any = name
    dropped: Modules = frozenset((module, "moe")) if name == "shared" else frozenset((module,))
    size = shape.piece * (hidden * widths.hidden + features * widths.code)
    yield _saved(name, size, dropped, module)


def _product_widths(
    spec: LayerSpec, shape: Shape, operation: str, rows: str | None = None
) -> list[tuple[float, float]]:
    """Return the output and input widths of an operation's products on a rank, in order."""
    return [
        weight.local_matrix(shape.tp, shape.ep, shape.etp)[:2]
        for op, matmul, weights in spec.products(shape.hidden)
        if op.name == operation and rows in (None, matmul.rows)
        for weight in weights
    ]
