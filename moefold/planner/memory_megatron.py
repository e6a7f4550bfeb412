"""What layers of Megatron-Core keep for backward, to plan runs that were made with it.

It follows from the operations of a layer's description: Megatron keeps the inputs of products, what
activations and attention read, and outputs of norms. Under tp a rank keeps its own band of what it
gathers, and gathers it again in backward. Products in few bits keep their inputs in codes. The
routing weight stands before the experts' second product (arXiv 2603.07685, section 4.1.2), so that
its output is not kept. What ``layernorm``, ``moe_act`` and ``mla_up_proj`` drop is in section 4.1.4
there.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moefold.model.config import Block
from moefold.spec.decoder import halves
from moefold.spec.layer import (
    CORE,
    NORMS,
    NOTHING,
    STATISTIC,
    UP,
    Attention,
    Axis,
    LayerSpec,
    Modules,
    Saved,
    Scan,
    Shape,
)

CODES = {"fp8_tensor": 1.0, "fp8_block": 1.03125, "mxfp8": 1.03125, "nvfp4": 0.5625}
"""Bytes per element of a product's input that is kept in codes, their scales included."""
ACTIVATION: Modules = frozenset(("moe_act",))
MIXTURE: Modules = frozenset(("moe",))


@dataclass(frozen=True)
class Widths:
    """Bytes of an element by what becomes of it."""

    code: float
    """Inputs of products."""
    hidden: float
    """Inputs of an activation: DeepSeek's own software keeps them in codes too (arXiv 2412.19437,
    section 3.3.3)."""

    @classmethod
    def of(cls, recipe: str, stack: str, width: int) -> "Widths":
        """Return the widths of a recipe in a stack; ``width`` is the compute dtype's."""
        code = CODES.get(recipe, float(width))
        return cls(code, code if stack == "deepseek" else float(width))


def kept(block: Block, shape: Shape, widths: Widths) -> tuple[Saved, ...]:
    """Return what one block keeps if nothing is recomputed."""
    found: list[Saved] = []
    for _, spec in halves(block):
        found.append(Saved("residual" if found else "input", shape.row))
        found += _half(spec, shape, widths)
    return tuple(found)


def _half(spec: LayerSpec, shape: Shape, widths: Widths) -> Iterator[Saved]:
    """Yield what one half keeps beside its residual."""
    routing = spec.routing
    # The router reads normed rows too, in the compute dtype.
    code = shape.width if routing else widths.code
    yield _part("norm.output", shape.rows * shape.hidden * code, NORMS, "norms")
    operations = tuple(spec.operations(shape.hidden))
    for one in operations:
        if isinstance(one.core, Attention):
            yield from _attention(spec, one.core, shape, widths)
        elif isinstance(one.core, Scan):
            yield from spec.saved(shape)
    if routing is not None:
        scores = shape.rows * routing.experts * (STATISTIC + STATISTIC + 1)
        yield _part("router", scores, MIXTURE)
    for one in operations:
        if one.name in ("ffn", "experts", "shared"):
            yield from _feed_forward(one.name, spec, shape, widths)


def _part(name: str, size: float, dropped: Modules = NOTHING, module: Any = "block") -> Saved:
    return Saved(name, round(size), dropped, module=module)


def _attention(spec: LayerSpec, core: Attention, shape: Shape, widths: Widths) -> Iterator[Saved]:
    """Yield latents before and after their norms, queries, keys and values, and the output."""
    rows, latents = shape.piece / shape.tp, [w for w in spec.weights(shape.hidden) if w.latent]
    if latents:
        outputs = sum(n for n, _ in _products(spec, shape, "attention", "own"))
        yield _part("latents", shape.rows * outputs * shape.width)
        normed = sum(weight.elements for weight in latents)
        yield _part("latents.normed", shape.rows * normed * widths.code, NORMS, "norms")
    if core.head_norms:
        width = (core.heads + core.kv_heads) * core.qk_dim
        yield _part("qk.projected", rows * width * shape.width)
    features = core.heads * core.qk_dim + core.key_value_width
    yield _part("qkv", rows * features * shape.width, UP if latents else NOTHING, "attention")
    rows *= core.heads
    yield _part("attended", rows * core.v_dim * shape.width, module="attention")
    yield _part("attended.statistic", rows * STATISTIC, CORE, "attention")
    if widths.code < shape.width:
        yield _part("attended.codes", rows * core.v_dim * widths.code, module="attention")


def _feed_forward(name: str, spec: LayerSpec, shape: Shape, widths: Widths) -> Iterator[Saved]:
    """Yield the pre-activation, the activation, and what routed experts keep besides."""
    (into, inputs), (_, features) = _products(spec, shape, name)
    if name == "experts" and spec.routing is not None:
        rows = shape.received(spec.routing.top_k)
        yield _part("experts.input", rows * inputs * widths.code, MIXTURE, "experts")
        yield _part("experts.hidden", rows * into * widths.hidden, MIXTURE, "experts")
        activation = rows * features * widths.code
        yield _part("experts.activation", activation, MIXTURE | ACTIVATION, "moe_act")
        yield _part("experts.weights", rows * STATISTIC, MIXTURE)
        return
    module: Any = name
    dropped: Modules = frozenset((module, "moe")) if name == "shared" else frozenset((module,))
    size = shape.piece * (into * widths.hidden + features * widths.code)
    yield _part(name, size, dropped, module)


def _products(
    spec: LayerSpec, shape: Shape, operation: str, rows: str | None = None
) -> list[tuple[float, float]]:
    """Return outputs and inputs of an operation's products on a rank, in their order."""
    sizes: dict[Axis, int] = {"tp": shape.tp, "cp": 1, "ep": 1, "etp": shape.etp}
    weights = {weight.name: weight for weight in spec.weights(shape.hidden)}
    return [
        weights[name].matrix(sizes)[:2]
        for one in spec.operations(shape.hidden)
        if one.name == operation
        for matmul in one.matmuls
        if rows in (None, matmul.rows)
        for name in matmul.weights
    ]
