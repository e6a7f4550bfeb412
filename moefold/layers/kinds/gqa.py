"""Grouped-query attention, also windowed or chunked: records and descriptions."""

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
from moefold.spec.parts import saved_attention, saved_attention_rows

SMALL_WINDOW = 4
"""Window in the small models of ``verify``: shorter than their documents."""


@ATTENTION.register
class Gqa(LayerSpec):
    """Grouped-query attention; ``kv_heads`` equal to ``heads`` is plain multi-head attention."""

    kind: Literal["gqa"] = "gqa"
    heads: Size
    kv_heads: Size
    head_dim: Annotated[int, Field(ge=2)]
    v_dim: Size | None = None
    """Dims of values per head; None is ``head_dim``."""
    value_scale: Positive = 1.0
    """Factor on values."""
    qk_norm: Literal["none", "head", "projection", "unit", "zero_centred"] = "none"
    """RMSNorm on queries and keys: per head, over the whole projection, per head without a weight,
    or per head with factors ``1 + weight``."""
    norm_after_rope: bool = False
    """Whether these norms follow rotation (Hunyuan)."""
    rope: Rope | None = Rope()
    """Rotary positions; None is a layer without positions (NoPE)."""
    scale: Positive | None = None
    """Factor on the scores; None is ``1 / sqrt(head_dim)``."""
    bias: Literal["none", "qkv", "all"] = "none"
    """Projections with a bias: none, queries, keys and values, or also the output."""
    gate: bool = False
    """Whether a learned sigmoid gate of the row scales each feature of the heads' output."""

    widths = ("head_dim", "v_dim")
    owner = "moefold.layers.attention:GroupedQueryAttention"
    caches = True

    def rules(self) -> Iterator[Violation]:
        """Check that key-value heads divide heads, that ``head_dim`` is even, and the norms."""
        if self.heads % self.kv_heads:
            nearest = max(d for d in range(1, self.kv_heads + 1) if self.heads % d == 0)
            rule = f"must divide heads ({self.heads})"
            yield Violation(("kv_heads",), self.kv_heads, rule, nearest)
        if self.head_dim % 2:
            rule = "must be even, for rotary pairs"
            yield Violation(("head_dim",), self.head_dim, rule, self.head_dim + 1)
        elif self.rope is not None:
            yield from self.rope.fits(self.head_dim)
        if self.norm_after_rope and self.qk_norm == "projection":
            rule = "must be off: qk_norm projection normalises before rotation"
            yield Violation(("norm_after_rope",), True, rule, False)
        if self.qk_norm == "unit" and not self.norm_after_rope:
            rule = "must be on: qk_norm unit normalises after rotation"
            yield Violation(("norm_after_rope",), False, rule, True)

    @property
    def softmax_scale(self) -> float:
        """``scale``, or its default, times the factor due to context extension."""
        factor = 1.0 if self.rope is None else self.rope.softmax_factor
        return (self.scale or self.head_dim**-0.5) * factor

    @property
    def value_dim(self) -> int:
        """``v_dim``, or its default."""
        return self.v_dim or self.head_dim

    @property
    def core(self) -> Attention:
        """Description of the attention core."""
        dims = (self.head_dim, self.value_dim)
        normed = self.qk_norm != "none"
        return Attention(self.heads, self.kv_heads, *dims, head_norms=normed)

    @property
    def logits(self) -> tuple[LogitRows, ...]:
        """Query and key projections; none with norms, which undo any factor on their weights."""
        if self.qk_norm != "none":
            return ()
        ends = ("weight",) if self.bias == "none" else ("weight", "bias")
        dim = self.head_dim
        queries = (LogitRows(f"q.{end}", self.heads, ((dim, "query"),)) for end in ends)
        keys = (LogitRows(f"k.{end}", self.kv_heads, ((dim, "key"),)) for end in ends)
        return (*queries, *keys)

    @property
    def head_units(self) -> tuple[Units, Units]:
        """Units that tp divides: query heads, and key-value heads."""
        return (
            Units("tp", self.heads, "the number of attention heads", heads=True),
            Units("tp", self.kv_heads, "the number of key-value heads", heads=True),
        )

    def weights(self, hidden: int) -> Iterator[Weight]:
        """Yield the projections, cut by heads, and the norms of queries and keys."""
        heads, groups = self.head_units
        dim = self.head_dim
        out = self.heads * self.value_dim
        projections = (("q", heads, dim), ("k", groups, dim), ("v", groups, self.value_dim))
        for name, units, dims in projections:
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
        for name, units, _ in projections[:2]:
            if self.qk_norm == "projection":
                yield norm(f"{name}_norm.weight", units.number * self.head_dim, units)
            else:
                start: Start = "zeros" if self.qk_norm == "zero_centred" else "ones"
                yield norm(f"{name}_norm.weight", self.head_dim, start=start)

    def operations(self, hidden: int) -> Iterator[Operation]:
        """Yield the projections, with rotation and norms, and the attention core."""
        heads, groups = self.head_units
        # The projection writes each feature; rotation and a norm each read and write it.
        rotation_passes = 2 if self.qk_norm == "none" else 4
        value_passes = 1 if self.value_scale == 1 else 3
        projected = (
            (heads, self.head_dim, rotation_passes + 1),
            (groups, self.head_dim, rotation_passes + 1),
            (groups, self.value_dim, value_passes),
        )
        traffic = tuple(
            Traffic(units.number * dims, passes, 1.5 * passes, units=units)
            for units, dims, passes in projected
        )
        products = (Matmul(("q.weight", "k.weight", "v.weight")), Matmul(("o.weight",)))
        if self.gate:
            products += (Matmul(("out_gate.weight",)),)
            gated = heads.number * self.value_dim
            traffic += (Traffic(gated, 4, 6, units=heads),)
        yield Operation("attention", products, traffic=traffic, launches=12)
        yield Operation("core", core=self.core, launches=1)

    def saved(self, shape: Shape) -> Iterator[Saved]:
        """Yield normed or gathered rows, inputs of query and key norms, and the core's tensors."""
        read = ("q.weight", "k.weight", "v.weight", *(["out_gate.weight"] if self.gate else []))
        yield from saved_attention_rows(read, shape)
        if self.qk_norm != "none":
            for name, number in (("q", self.heads), ("k", self.kv_heads)):
                heads = number // shape.tp
                per_row = 1 if self.qk_norm == "projection" else heads
                # A norm over the whole projection under tp saves rows in fp32 or wider.
                wide = shape.tp > 1 and self.qk_norm == "projection"
                width = max(shape.width, STATISTIC) if wide else shape.width
                projected = shape.piece * heads * self.head_dim * width
                yield Saved(f"{name}.projected", projected, module="attention")
                statistic = shape.piece * per_row * STATISTIC
                yield Saved(f"{name}_norm.statistic", statistic, module="norms")
        # Outputs of a last norm are recomputed with norms; no product reads an ungated output.
        last = ("q", "k") if self.norm_after_rope and self.qk_norm != "none" else ()
        for tensor in saved_attention(self.core, shape):
            dropped = tensor.freed_by | NORMS if tensor.name in last else tensor.freed_by
            yield replace(
                tensor, freed_by=dropped, operand_of=() if self.gate else tensor.operand_of
            )
        if not self.gate:
            return
        heads = self.heads // shape.tp
        size = shape.piece * heads * self.value_dim * shape.width
        yield Saved("out_gate", size, module="attention")
        yield Saved("gated", size, module="attention", operand_of=("o.weight",))

    def shrink(self, by: Sizes) -> Self:
        """Return a record with few key-value heads of four dims, each with at most two query heads.

        A separate ``v_dim`` becomes two; a ``fraction`` below 1 becomes a half.
        """
        kv_heads = small_heads(self.kv_heads, by)
        shared = min(self.heads // self.kv_heads, 2)
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
    """Grouped-query attention to the last ``window`` tokens, with a learned sink per head.

    A sink is a logit that takes part in the softmax, with value zero (gpt-oss, arXiv 2508.10925).
    """

    kind: Literal["windowed"] = "windowed"
    window: Size | None = None
    """Number of tokens that a token attends to, including itself; None is no limit."""
    sinks: bool = True

    widths = (*Gqa.widths, "window")
    owner = "moefold.layers.attention:WindowedAttention"
    caches = True

    @property
    def core(self) -> Attention:
        """Description of the core, with the window."""
        return replace(super().core, window=self.window)

    def weights(self, hidden: int) -> Iterator[Weight]:
        """Yield the sinks, cut by heads, and the weights of grouped-query attention."""
        if self.sinks:
            by_head = ((0, self.head_units[0]),)
            yield Weight("sinks", (self.heads,), by_head, product=False)
        yield from super().weights(hidden)

    def saved(self, shape: Shape) -> Iterator[Saved]:
        """Yield what grouped-query attention saves, and the sinks."""
        yield from super().saved(shape)
        if self.sinks:
            yield Saved("sinks", self.heads // shape.tp * STATISTIC, module="attention")

    def shrink(self, by: Sizes) -> Self:
        """Return a small record with a window shorter than documents."""
        window = None if self.window is None else min(self.window, SMALL_WINDOW)
        return super().shrink(by).model_copy(update={"window": window})


@ATTENTION.register
class Chunked(Gqa):
    """Grouped-query attention within chunks of a document (Llama 4)."""

    kind: Literal["chunked"] = "chunked"
    chunk: Size | None = None
    """Tokens per chunk, from the start of a document; None is the whole document."""
    temperature: Temperature | None = None
    """Factor on queries that grows with the position."""

    widths = (*Gqa.widths, "chunk")
    owner = "moefold.layers.attention:ChunkedAttention"
    caches = True

    @property
    def core(self) -> Attention:
        """Description of the core, with the chunk length."""
        return replace(super().core, chunk=self.chunk)

    def saved(self, shape: Shape) -> Iterator[Saved]:
        """Yield what grouped-query attention saves, and each row's temperature."""
        if self.temperature is None:
            yield from super().saved(shape)
            return
        for tensor in super().saved(shape):
            if tensor.name == "q":  # scaled by temperature, so that a norm cannot recompute it
                tensor = replace(tensor, freed_by=tensor.freed_by - NORMS)
            yield tensor
        yield Saved("temperature", shape.piece * shape.width, module="attention")

    def shrink(self, by: Sizes) -> Self:
        """Return a small record with chunks and temperature steps shorter than documents."""
        changed: dict[str, Any] = {}
        if self.chunk is not None:
            changed["chunk"] = min(self.chunk, SMALL_WINDOW)
        if self.temperature is not None:
            every = min(self.temperature.every, SMALL_WINDOW)
            changed["temperature"] = self.temperature.model_copy(update={"every": every})
        return super().shrink(by).model_copy(update=changed)
