"""What layers of Megatron-Core keep for backward, to plan runs that were made with it.

Letters as in ``memory_kept``. Under tp a rank keeps its own band of what it gathers, and gathers it
again in backward. Products in few bits keep their inputs in codes. The routing weight stands before
the experts' second product (arXiv 2603.07685, section 4.1.2), so that its output is not kept. What
``layernorm``, ``moe_act`` and ``mla_up_proj`` drop is in section 4.1.4 there.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from moefold.config.base import Record
from moefold.layers.config import Dense, Gqa, Mla
from moefold.model.config import Block
from moefold.moe.config import Moe
from moefold.planner.foreign import DeltaNet, Mamba2, Nothing, PlainMoe
from moefold.planner.memory_kept import CORE, NORMS, STATISTIC, UP, Kept, Modules, Shape

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


def kept(block: Block, shape: Shape, widths: Widths) -> tuple[Kept, ...]:
    """Return what one block keeps if nothing is recomputed."""
    row = shape.rows * shape.hidden * shape.width
    halves = [r for r in (block.attention, block.ffn) if not isinstance(r, Nothing)]
    found = [Kept("input", row)] if halves else []
    for i, record in enumerate(halves):
        if i:
            found.append(Kept("residual", row))
        found += _of(record)(record, shape, widths)
    return tuple(found)


def _of(record: Record) -> Callable[[Any, Shape, Widths], Iterator[Kept]]:
    for kind in type(record).__mro__:
        if kind in KINDS:
            return KINDS[kind]
    raise ValueError(f"{type(record).__name__}'s memory in Megatron is not planned")


def _part(name: str, size: float, dropped: Modules = frozenset(), module: Any = "block") -> Kept:
    return Kept(name, round(size), dropped, module=module)


def _gqa(record: Gqa, shape: Shape, widths: Widths) -> Iterator[Kept]:
    heads, groups = record.heads / shape.tp, record.kv_heads / shape.tp
    yield _part("norm.output", shape.rows * shape.hidden * widths.code, NORMS, "norms")
    if record.qk_norm != "none":
        size = shape.piece * (heads + groups) * record.head_dim * shape.width
        yield _part("qk.projected", size)
    qkv = shape.piece * (heads + 2 * groups) * record.head_dim * shape.width
    yield _part("qkv", qkv, module="attention")
    yield from _attended(heads, record.head_dim, shape, widths)


def _attended(heads: float, dim: int, shape: Shape, widths: Widths) -> Iterator[Kept]:
    rows = shape.piece * heads
    yield _part("attended", rows * dim * shape.width, module="attention")
    yield _part("attended.statistic", rows * STATISTIC, CORE, "attention")
    if widths.code < shape.width:
        yield _part("attended.codes", rows * dim * widths.code, module="attention")


def _mla(record: Mla, shape: Shape, widths: Widths) -> Iterator[Kept]:
    heads, rank = record.heads / shape.tp, record.q_rank or 0
    qk_dim = record.nope_dim + record.rope_dim
    yield _part("norm.output", shape.rows * shape.hidden * widths.code, NORMS, "norms")
    down = shape.rows * (rank + record.kv_rank + record.rope_dim) * shape.width
    yield _part("latents", down)
    yield _part(
        "latents.normed", shape.rows * (rank + record.kv_rank) * widths.code, NORMS, "norms"
    )
    qkv = shape.piece * heads * (2 * qk_dim + record.v_dim) * shape.width
    yield _part("qkv", qkv, UP, "attention")
    yield from _attended(heads, record.v_dim, shape, widths)


def _dense(record: Dense, shape: Shape, widths: Widths) -> Iterator[Kept]:
    yield _part("norm.output", shape.rows * shape.hidden * widths.code, NORMS, "norms")
    features = shape.piece * record.width / shape.tp
    yield _part("ffn.hidden", 2 * features * widths.hidden, frozenset(("ffn",)), "ffn")
    yield _part("ffn.activation", features * widths.code, frozenset(("ffn",)), "ffn")


def _moe(record: Moe, shape: Shape, widths: Widths) -> Iterator[Kept]:
    """A gate doubles the pre-activation; a latent space narrows what is sent."""
    plain = isinstance(record, PlainMoe)
    into = 1 if plain else 2
    inner = record.latent or shape.hidden if isinstance(record, PlainMoe) else shape.hidden
    router = record.router
    normed = shape.rows * shape.hidden * shape.width
    yield _part("norm.output", normed, NORMS, "norms")
    scores = shape.rows * router.experts * (STATISTIC + STATISTIC + 1)
    yield _part("router", scores, MIXTURE)
    received = shape.received(router.top_k)
    features = received * record.width / shape.etp
    yield _part("experts.input", received * inner * widths.code, MIXTURE, "experts")
    yield _part("experts.hidden", features * into * widths.hidden, MIXTURE, "experts")
    yield _part("experts.activation", features * widths.code, MIXTURE | ACTIVATION, "moe_act")
    yield _part("experts.weights", received * STATISTIC, MIXTURE)
    if record.shared is not None:
        wide = shape.piece * record.shared.width / shape.tp
        dropped: Modules = frozenset(("shared", "moe"))
        yield _part("shared", wide * (into * widths.hidden + widths.code), dropped, "shared")


def _mamba(record: Mamba2, shape: Shape, widths: Widths) -> Iterator[Kept]:
    """Projected rows before and after the convolution, states between chunks, gated output."""
    rows, width = shape.piece / shape.tp, shape.width
    yield _part("norm.output", shape.rows * shape.hidden * widths.code, NORMS, "norms")
    yield _part("projected", rows * record.projected * width)
    mixed = record.width + 2 * record.groups * record.state
    yield _part("convolved", rows * mixed * width)
    states = rows / record.chunk * record.width * record.state * STATISTIC
    yield _part("states", states)
    yield _part("scanned", 2 * rows * record.width * width)


def _delta(record: DeltaNet, shape: Shape, widths: Widths) -> Iterator[Kept]:
    """Projected and convolved rows, states between chunks, output before and after its gate."""
    rows, width = shape.piece / shape.tp, shape.width
    keys, values = record.key_heads * record.key_dim, record.value_heads * record.value_dim
    yield _part("norm.output", shape.rows * shape.hidden * widths.code, NORMS, "norms")
    yield _part("projected", rows * (2 * keys + 2 * values) * width)
    yield _part("convolved", rows * (2 * keys + values) * width)
    yield _part("states", rows / record.chunk * values * record.key_dim * width)
    yield _part("scanned", 2 * rows * values * width)


KINDS: dict[type[Record], Callable[[Any, Shape, Widths], Iterator[Kept]]] = {
    Gqa: _gqa,
    Mla: _mla,
    Dense: _dense,
    Moe: _moe,
    Mamba2: _mamba,
    DeltaNet: _delta,
}
"""What each kind of half keeps."""
