"""Grouped-query attention, within a window or in chunks too: its records and what they are."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from moefold.config.errors import Violation
from moefold.layers.config import ATTENTION, Positive, Rope, Size, Temperature
from moefold.mesh.config import Sizes
from moefold.spec.layer import (
    NORMS,
    SMALL_HEAD,
    STATISTIC,
    Attention,
    LayerSpec,
    LogitRows,
    Matmul,
    Operation,
    Saved,
    Shape,
    Start,
    Traffic,
    Units,
    Weight,
    norm,
    small_heads,
)
from moefold.spec.parts import saved_attention, saved_rows

SMALL_WINDOW = 4
"""Window of the small models that ``verify`` computes: shorter than their documents."""


@ATTENTION.register
class Gqa(LayerSpec):
    """Grouped-query attention; ``kv_heads`` equal to ``heads`` is plain multi-head attention."""

    kind: Literal["gqa"] = "gqa"
    heads: Size
    kv_heads: Size
    head_dim: Annotated[int, Field(ge=2)]
    v_dim: Size | None = None
    """Dims of a head's values; None is ``head_dim``."""
    value_scale: Positive = 1.0
    """Factor on values."""
    qk_norm: Literal["none", "head", "projection", "unit", "zero_centred"] = "none"
    """RMSNorm on queries and keys: per head, over the whole projection, per head without a weight,
    or per head with factors that are one more than the weight."""
    norm_after_rope: bool = False
    """Whether those norms come after rotation (Hunyuan)."""
    rope: Rope | None = Rope()
    """None is a layer without positions."""
    scale: Positive | None = None
    """Factor on the scores; None is one over the root of ``head_dim``."""
    bias: Literal["none", "qkv", "all"] = "none"
    """Which projections have one: none, those to heads, or the output's too."""
    gate: bool = False
    """Whether a sigmoid of the row scales each feature of the heads' output."""

    owner = "moefold.layers.attention:GroupedQueryAttention"
    caches = True

    def rules(self) -> Iterator[Violation]:
        """Key-value heads divide the heads; rotary pairs need an even head."""
        if self.heads % self.kv_heads:
            nearest = max(d for d in range(1, self.kv_heads + 1) if self.heads % d == 0)
            yield Violation(
                ("kv_heads",), self.kv_heads, f"must divide heads ({self.heads})", nearest
            )
        if self.head_dim % 2:
            yield Violation(
                ("head_dim",), self.head_dim, "must be even, for rotary pairs", self.head_dim + 1
            )
        elif self.rope is not None:
            yield from self.rope.fits(self.head_dim)
        if self.norm_after_rope and self.qk_norm == "projection":
            rule = "must be off: norms over whole projections come before heads are cut"
            yield Violation(("norm_after_rope",), True, rule, False)
        if self.qk_norm == "unit" and not self.norm_after_rope:
            rule = "must be on: norms without a weight come after rotation"
            yield Violation(("norm_after_rope",), False, rule, True)

    @property
    def softmax_scale(self) -> float:
        """``scale``, or what it is by default, times the factor of a stretched context."""
        factor = 1.0 if self.rope is None else self.rope.softmax_factor
        return (self.scale or self.head_dim**-0.5) * factor

    @property
    def value_dim(self) -> int:
        """``v_dim``, or what it is by default."""
        return self.v_dim or self.head_dim

    @property
    def core(self) -> Attention:
        """Attention itself."""
        dims, normed = (self.head_dim, self.value_dim), self.qk_norm != "none"
        return Attention(self.heads, self.kv_heads, *dims, head_norms=normed)

    @property
    def logits(self) -> tuple[LogitRows, ...]:
        """Queries and keys of heads; norms on them undo any factor."""
        if self.qk_norm != "none":
            return ()
        ends = ("weight",) if self.bias == "none" else ("weight", "bias")
        queries = (LogitRows(f"q.{e}", self.heads, ((self.head_dim, "query"),)) for e in ends)
        keys = (LogitRows(f"k.{e}", self.kv_heads, ((self.head_dim, "key"),)) for e in ends)
        return (*queries, *keys)

    @property
    def head_units(self) -> tuple[Units, Units]:
        """What tensor ranks share: query heads, and heads of keys and values."""
        return (
            Units("tp", self.heads, "attention heads", heads=True),
            Units("tp", self.kv_heads, "key-value heads", heads=True),
        )

    def weights(self, hidden: int) -> Iterator[Weight]:
        """Yield the projections, cut by heads, and norms of queries and keys."""
        heads, groups = self.head_units
        dim, out = self.head_dim, self.heads * self.value_dim
        each = (("q", heads, dim), ("k", groups, dim), ("v", groups, self.value_dim))
        for name, units, dims in each:
            width = units.number * dims
            yield Weight(f"{name}.weight", (width, hidden), ((0, units),))
            if self.bias != "none":
                yield Weight(f"{name}.bias", (width,), ((0, units),), product=False)
        yield Weight("o.weight", (hidden, out), ((1, heads),), added=True)
        if self.bias == "all":
            yield Weight("o.bias", (hidden,), product=False)
        if self.gate:
            yield Weight("out_gate.weight", (out, hidden), ((0, heads),))
        if self.qk_norm in ("none", "unit"):
            return
        for name, units, _ in each[:2]:
            if self.qk_norm == "projection":
                yield norm(f"{name}_norm.weight", units.number * self.head_dim, units)
            else:
                start: Start = "zeros" if self.qk_norm == "zero_centred" else "ones"
                yield norm(f"{name}_norm.weight", self.head_dim, start=start)

    def operations(self, hidden: int) -> Iterator[Operation]:
        """Yield the projections with rotary positions and norms, and attention."""
        heads, groups = self.head_units
        # The projection writes a feature, rotation reads and writes it, and so does a norm.
        turned = 2 if self.qk_norm == "none" else 4
        traffic = tuple(
            Traffic(units.number * dims, passes, 1.5 * passes, units=units)
            for units, dims, passes in (
                (heads, self.head_dim, turned + 1),
                (groups, self.head_dim, turned + 1),
                (groups, self.value_dim, 1 if self.value_scale == 1 else 3),
            )
        )
        products = (Matmul(("q.weight", "k.weight", "v.weight")), Matmul(("o.weight",)))
        if self.gate:
            products += (Matmul(("out_gate.weight",)),)
            traffic += (Traffic(heads.number * self.value_dim, 4, 6, units=heads),)
        yield Operation("attention", products, traffic=traffic, launches=12)
        yield Operation("core", core=self.core, launches=1)

    def saved(self, shape: Shape) -> Iterator[Saved]:
        """Yield the normed rows of the tensor group, normed queries and keys, and attention's."""
        read = ("q.weight", "k.weight", "v.weight", *(["out_gate.weight"] if self.gate else []))
        yield from saved_rows(read, shape)
        if self.qk_norm != "none":
            for name, number in (("q", self.heads), ("k", self.kv_heads)):
                heads = number // shape.tp
                per_row = 1 if self.qk_norm == "projection" else heads
                # Over the whole projection, which tensor ranks share, in the statistic's format.
                wide = shape.tp > 1 and self.qk_norm == "projection"
                width = max(shape.width, STATISTIC) if wide else shape.width
                projected = shape.piece * heads * self.head_dim * width
                yield Saved(f"{name}.projected", projected, module="attention")
                statistic = shape.piece * per_row * STATISTIC
                yield Saved(f"{name}_norm.statistic", statistic, module="norms")
        # What a norm makes last is made again by it, and what a gate scales no product reads.
        last = ("q", "k") if self.norm_after_rope and self.qk_norm != "none" else ()
        for part in saved_attention(self.core, shape):
            dropped = part.dropped | NORMS if part.name in last else part.dropped
            yield replace(part, dropped=dropped, operand=() if self.gate else part.operand)
        if not self.gate:
            return
        size = shape.piece * self.heads // shape.tp * self.value_dim * shape.width
        yield Saved("out_gate", size, module="attention")
        yield Saved("gated", size, module="attention", operand=("o.weight",))

    def shrunk(self, by: Sizes) -> Self:
        """Return at most two query heads for each of few key-value heads, of four dims.

        Values that are narrower are half as wide; half of a head turns where not all of it does.
        """
        kv_heads, shared = small_heads(self.kv_heads, by), min(self.heads // self.kv_heads, 2)
        changed = {"heads": kv_heads * shared, "kv_heads": kv_heads, "head_dim": SMALL_HEAD}
        if self.v_dim is not None:
            changed["v_dim"] = SMALL_HEAD // 2
        small = self.model_copy(update=changed)
        if self.rope is None or self.rope.fraction == 1:
            return small
        half = self.rope.model_copy(update={"fraction": 0.5})
        return small.model_copy(update={"rope": half})


@ATTENTION.register
class Windowed(Gqa):
    """Grouped-query attention to the last ``window`` tokens, with a learned sink of each head.

    A sink is a logit that takes part in the softmax and has no value (gpt-oss, arXiv 2508.10925).
    """

    kind: Literal["windowed"] = "windowed"  # type: ignore[assignment]
    window: Size | None = None
    """Tokens that a token sees, itself among them; None is all before it."""
    sinks: bool = True

    owner = "moefold.layers.attention:WindowedAttention"
    caches = True

    @property
    def core(self) -> Attention:
        """Attention within the window."""
        return replace(super().core, window=self.window)

    def weights(self, hidden: int) -> Iterator[Weight]:
        """Yield the sinks, cut by heads, and the weights of grouped-query attention."""
        if self.sinks:
            yield Weight("sinks", (self.heads,), ((0, self.head_units[0]),), product=False)
        yield from super().weights(hidden)

    def saved(self, shape: Shape) -> Iterator[Saved]:
        """Yield what grouped-query attention saves, and the sinks."""
        yield from super().saved(shape)
        if self.sinks:
            yield Saved("sinks", self.heads // shape.tp * STATISTIC, module="attention")

    def shrunk(self, by: Sizes) -> Self:
        """Return a small one of the same kind whose window ends within documents."""
        window = None if self.window is None else min(self.window, SMALL_WINDOW)
        return super().shrunk(by).model_copy(update={"window": window})


@ATTENTION.register
class Chunked(Gqa):
    """Grouped-query attention in which each ``chunk`` of a document is by itself (Llama 4)."""

    kind: Literal["chunked"] = "chunked"  # type: ignore[assignment]
    chunk: Size | None = None
    """Tokens, counted from a document's first; None is the whole document."""
    temperature: Temperature | None = None
    """Factor on queries that grows with the position."""

    owner = "moefold.layers.attention:ChunkedAttention"
    caches = True

    @property
    def core(self) -> Attention:
        """Attention within a chunk."""
        return replace(super().core, chunk=self.chunk)

    def saved(self, shape: Shape) -> Iterator[Saved]:
        """Yield what grouped-query attention saves, and each row's temperature."""
        if self.temperature is None:
            yield from super().saved(shape)
            return
        for part in super().saved(shape):
            last = part.name == "q"  # not what a norm made
            yield replace(part, dropped=part.dropped - NORMS) if last else part
        yield Saved("temperature", shape.piece * shape.width, module="attention")

    def shrunk(self, by: Sizes) -> Self:
        """Return a small one of the same kind whose chunks and steps end within documents."""
        few: dict[str, Any] = {
            "chunk": None if self.chunk is None else min(self.chunk, SMALL_WINDOW)
        }
        if self.temperature is not None:
            every = min(self.temperature.every, SMALL_WINDOW)
            few["temperature"] = self.temperature.model_copy(update={"every": every})
        return super().shrunk(by).model_copy(update=few)
