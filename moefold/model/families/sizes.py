"""Mix-in records of a family's sizes, which users write under ``shape``.

Each has rules, its contribution to the layers, and ``of``, which infers the sizes from a decoder.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from moefold.config.base import Record
from moefold.config.errors import Violation
from moefold.layers.config import Rope, Size, Vocab
from moefold.layers.kinds.dense import Dense
from moefold.layers.kinds.gqa import Gqa, Windowed
from moefold.layers.kinds.mla import Mla
from moefold.model.config import Decoder, Layers
from moefold.moe.config import MAX_EXPERTS, Moe


class FamilySizes(Record):
    """Sizes of every family with routed experts."""

    hidden: Size
    layers: Layers
    heads: Size
    experts: Annotated[int, Field(ge=1, le=MAX_EXPERTS)]
    top_k: Size
    expert_width: Size
    vocab: Vocab | None = None
    """Rows of the embedding; None is the tokenizer's number of tokens."""

    @property
    def dense(self) -> Collection[int]:
        """Numbers of the layers, from 0, whose feed-forward is dense."""
        return ()

    @property
    def resolved_shared_width(self) -> int | None:
        """Width of the shared expert; None if there is none."""
        return None

    @property
    def resolved_dense_width(self) -> int:
        """Width of a dense feed-forward."""
        return self.top_k * self.expert_width + (self.resolved_shared_width or 0)

    def attention(self, layer: int, rope: Rope | None, extra: Mapping[str, Any]) -> Record:
        """Return the attention record of a layer; ``extra`` are fields that the family adds."""
        raise NotImplementedError(f"{type(self).__name__} must define attention()")

    def _check_layer_numbers(
        self, key: str, condition: str, allow_any: bool = True, allow_all: bool = False
    ) -> Iterator[Violation]:
        """Yield a violation if the layer numbers in field ``key`` do not increase or exist.

        They must not name all layers, nor any unless ``allow_any``. With ``allow_all`` they must
        name at least one, and may name all.
        """
        value = getattr(self, key)
        last = self.layers - 1
        legal = sorted({n for n in value if 0 <= n <= last and allow_any})
        legal = (legal or [0]) if allow_all else legal[:last]
        if list(value) != legal:
            rule = f"must be increasing layer numbers from 0 to {last}, {condition}"
            yield Violation((key,), value, rule, tuple(legal))

    @classmethod
    def of(cls, decoder: Decoder) -> dict[str, Any]:
        """Infer the record's fields from a decoder's blocks.

        Raises:
            AttributeError: if the blocks are of another kind.
            StopIteration: if no block has experts.
        """
        moe = first_moe(decoder)
        return {
            "vocab": decoder.vocab,
            "hidden": decoder.hidden,
            "layers": decoder.layers,
            "heads": first_attention(decoder).heads,
            "experts": moe.router.experts,
            "top_k": moe.router.top_k,
            "expert_width": moe.width,
        }


def first_attention(decoder: Decoder) -> Any:
    """Return the first attention record with heads; if none has them, the first of any kind."""
    mixers = [block.attention for block in decoder.blocks]
    return next((mixer for mixer in mixers if getattr(mixer, "heads", None)), mixers[0])


def first_moe(decoder: Decoder) -> Moe:
    """Return the first MoE record.

    Raises:
        StopIteration: if there is none.
    """
    return next(b.ffn for b in decoder.blocks if isinstance(b.ffn, Moe))


def dense_ffns(decoder: Decoder) -> dict[int, Dense]:
    """Return the dense feed-forwards of a decoder by layer number."""
    return {n: b.ffn for n, b in enumerate(decoder.blocks) if isinstance(b.ffn, Dense)}


class GqaSizes(FamilySizes):
    """Sizes of a family with grouped-query attention and heads of ``hidden / heads`` dims."""

    kv_heads: Size

    @property
    def resolved_head_dim(self) -> int:
        """Dims of one head."""
        return self.hidden // self.heads

    def attention(self, layer: int, rope: Rope | None, extra: Mapping[str, Any]) -> Record:
        """Return grouped-query attention, the same in all layers."""
        return Gqa(**self.head_sizes, rope=rope, **extra)

    @property
    def head_sizes(self) -> dict[str, int]:
        """Numbers of heads and dims per head, as fields of attention records."""
        return {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.resolved_head_dim}

    def rules(self) -> Iterator[Violation]:
        """Require that heads divide the hidden size, and key-value heads the heads."""
        yield from super().rules()
        yield from self._head_rules()
        if self.heads % self.kv_heads:
            below = range(1, min(self.heads, self.kv_heads) + 1)
            nearest = max(d for d in below if self.heads % d == 0)
            yield Violation(
                ("kv_heads",), self.kv_heads, f"must divide heads ({self.heads})", nearest
            )

    def _head_rules(self) -> Iterator[Violation]:
        if self.resolved_head_dim * self.heads != self.hidden or self.resolved_head_dim % 2:
            nearest = max(1, round(self.hidden / (2 * self.heads))) * 2 * self.heads
            rule = f"must be an even multiple of heads ({self.heads})"
            yield Violation(("hidden",), self.hidden, rule, nearest)

    @classmethod
    def of(cls, decoder: Decoder) -> dict[str, Any]:
        """Infer the sizes of a decoder, with ``head_dim`` if it is not hidden / heads."""
        attention = first_attention(decoder)
        is_default = attention.head_dim * attention.heads == decoder.hidden
        sizes = {} if is_default else {"head_dim": attention.head_dim}
        return super().of(decoder) | sizes | {"kv_heads": attention.kv_heads}


class FreeGqaSizes(GqaSizes):
    """Sizes of a family with any number of dims per head."""

    head_dim: Annotated[int, Field(ge=2)] | None = None
    """Dims per head; None is hidden / heads."""

    @property
    def resolved_head_dim(self) -> int:
        """Dims of one head."""
        return self.head_dim or self.hidden // self.heads

    def _head_rules(self) -> Iterator[Violation]:
        if self.head_dim is None:
            yield from super()._head_rules()
        elif self.head_dim % 2:
            rule = "must be even, for rotary pairs"
            yield Violation(("head_dim",), self.head_dim, rule, self.head_dim + 1)


class WindowSizes(FreeGqaSizes):
    """Sizes of a family with sliding-window attention in some layers."""

    window: Size | None = None
    """Number of tokens that a token attends to, including itself; None: full attention only."""
    full_layers: tuple[int, ...] = ()
    """Numbers of the layers, from 0, with full attention although there is a window."""

    full_rope: ClassVar[bool] = True
    """Whether full layers have rotary positions if others have a window."""

    def has_rope(self, layer: int) -> bool:
        """Return whether a full layer has rotary positions if others have a window."""
        return self.full_rope

    def attention(self, layer: int, rope: Rope | None, extra: Mapping[str, Any]) -> Record:
        """Return windowed or full attention."""
        if self.window is None or layer in self.full_layers:
            rope = rope if self.window is None or self.has_rope(layer) else None
            return Gqa(**self.head_sizes, rope=rope, **extra)
        return Windowed(**self.head_sizes, rope=rope, window=self.window, sinks=False, **extra)

    def rules(self) -> Iterator[Violation]:
        """Check the numbers of full layers."""
        yield from super().rules()
        rule = "not all of them, and none without window"
        yield from self._check_layer_numbers("full_layers", rule, allow_any=self.window is not None)

    @classmethod
    def of(cls, decoder: Decoder) -> dict[str, Any]:
        """Infer the sizes of a decoder, with window and full layers."""
        windows = [getattr(block.attention, "window", None) for block in decoder.blocks]
        window = next((w for w in windows if w), None)
        full = tuple(n for n, w in enumerate(windows) if w is None) if window else ()
        return super().of(decoder) | {"window": window, "full_layers": full}


class SinkSizes(WindowSizes):
    """Sizes of a family with attention sinks in all layers, and windows in some."""

    def attention(self, layer: int, rope: Rope | None, extra: Mapping[str, Any]) -> Record:
        """Return windowed or full attention with sinks."""
        window = None if layer in self.full_layers else self.window
        return Windowed(**self.head_sizes, rope=rope, window=window, **extra)


class LatentDims(Record):
    """Sizes of latent attention."""

    q_rank: Size | None = None
    """Rank of the query latent; None: queries are projected directly."""
    kv_rank: Size = 512
    nope_dim: Size = 128
    """Dims per head without position."""
    rope_dim: Annotated[int, Field(ge=2)] = 64
    """Dims per head with rotary position."""
    v_dim: Size = 128

    def rules(self) -> Iterator[Violation]:
        """Require an even ``rope_dim``."""
        yield from super().rules()
        yield from Mla(heads=1, **{name: getattr(self, name) for name in LATENT_DIMS}).rules()


LATENT_DIMS = tuple(LatentDims.model_fields)


class LatentSizes(LatentDims, FamilySizes):
    """Sizes of a family with latent attention."""

    def attention(self, layer: int, rope: Rope | None, extra: Mapping[str, Any]) -> Record:
        """Return latent attention, the same in all layers."""
        dims = {name: getattr(self, name) for name in LATENT_DIMS}
        return Mla(heads=self.heads, rope=rope, **dims, **extra)

    @classmethod
    def of(cls, decoder: Decoder) -> dict[str, Any]:
        """Infer the sizes of a decoder, with those of latent attention."""
        latent = {n: getattr(first_attention(decoder), n) for n in LATENT_DIMS}
        return super().of(decoder) | latent


class DenseWidth(FamilySizes):
    """Base of sizes of families in which some layers may be dense."""

    dense_width: Size | None = None
    """Width of dense layers; None is the total width of the experts of a token."""

    @property
    def resolved_dense_width(self) -> int:
        """``dense_width`` or its default."""
        return self.dense_width or super().resolved_dense_width

    @classmethod
    def of(cls, decoder: Decoder) -> dict[str, Any]:
        """Infer the sizes of a decoder, with the dense layers' width."""
        width = next((ffn.width for ffn in dense_ffns(decoder).values()), None)
        return super().of(decoder) | {"dense_width": width}


class DenseFirst(DenseWidth):
    """Sizes of a family in which the first layers may be dense."""

    dense_layers: Annotated[int, Field(ge=0)] = 0
    """Number of leading layers with a dense feed-forward."""

    @property
    def dense(self) -> Collection[int]:
        """The first ``dense_layers`` layers."""
        return range(self.dense_layers)

    def rules(self) -> Iterator[Violation]:
        """Require at least one layer with experts."""
        yield from super().rules()
        if self.dense_layers >= self.layers:
            rule = f"must be less than layers ({self.layers}): one layer must have experts"
            yield Violation(("dense_layers",), self.dense_layers, rule, self.layers - 1)

    @classmethod
    def of(cls, decoder: Decoder) -> dict[str, Any]:
        """Infer the sizes of a decoder, with the number of dense layers."""
        return super().of(decoder) | {"dense_layers": len(dense_ffns(decoder))}


class DenseListed(DenseWidth):
    """Sizes of a family in which any layers may be dense."""

    dense_layers: tuple[int, ...] = ()
    """Numbers of the layers, from 0, whose feed-forward is dense."""

    @property
    def dense(self) -> Collection[int]:
        """The layers in ``dense_layers``."""
        return frozenset(self.dense_layers)

    def rules(self) -> Iterator[Violation]:
        """Check the numbers of dense layers; at least one layer must have experts."""
        yield from super().rules()
        yield from self._check_layer_numbers("dense_layers", "not all of them")

    @classmethod
    def of(cls, decoder: Decoder) -> dict[str, Any]:
        """Infer the sizes of a decoder, with the numbers of dense layers."""
        return super().of(decoder) | {"dense_layers": tuple(dense_ffns(decoder))}


class SharedWidth(FamilySizes):
    """Base of sizes of families that have, or may have, a shared expert."""

    shared_width: Size | None = None

    @property
    def resolved_shared_width(self) -> int | None:
        """``shared_width`` or its default."""
        return self.shared_width

    @classmethod
    def of(cls, decoder: Decoder) -> dict[str, Any]:
        """Infer the sizes of a decoder, with the shared expert's width."""
        width = getattr(first_moe(decoder).shared, "width", None)
        return super().of(decoder) | {"shared_width": width}


class SharedSizes(SharedWidth):
    """Sizes of a family with a shared expert whose width is a multiple of a routed expert's."""

    shared_width: Size | None = None
    """Width of the shared expert; None is that of one routed expert."""

    @property
    def resolved_shared_width(self) -> int:
        """``shared_width`` or its default."""
        return self.shared_width or self.expert_width

    def rules(self) -> Iterator[Violation]:
        """Require that ``expert_width`` divides the shared expert's width."""
        yield from super().rules()
        width = self.resolved_shared_width
        if width % self.expert_width:
            nearest = max(1, round(width / self.expert_width)) * self.expert_width
            rule = f"must be a multiple of expert_width ({self.expert_width})"
            yield Violation(("shared_width",), self.shared_width, rule, nearest)


class AlwaysSharedSizes(SharedWidth):
    """Sizes of a family that always has a shared expert, of any width."""

    # Required, although the base has a default, which pyright reports as an error.
    shared_width: Size  # type: ignore[reportGeneralTypeIssues]


class AnySharedSizes(SharedWidth):
    """Sizes of a family that may have a shared expert, of any width."""

    shared_width: Size | None = None
    """Width of the shared expert; None: no shared expert."""


class DenseRopeSizes(WindowSizes, AnySharedSizes, DenseListed):
    """Sizes of a family whose full layers have no rotary positions, unless they are dense."""

    # Required, although the base has a default, which pyright reports as an error.
    window: Size  # type: ignore[reportGeneralTypeIssues]
    dense_turn: bool = True
    """Whether dense layers have rotary positions even if they are full layers."""

    full_rope = False

    def has_rope(self, layer: int) -> bool:
        """Return whether a full layer has rotary positions: if dense, with ``dense_turn``."""
        return self.dense_turn and layer in self.dense

    @classmethod
    def of(cls, decoder: Decoder) -> dict[str, Any]:
        """Infer the sizes of a decoder, with ``dense_turn``."""
        dense: Any = [decoder.blocks[n].attention for n in dense_ffns(decoder)]
        has_rope = all(attention.rope is not None for attention in dense)
        return super().of(decoder) | {"dense_turn": has_rope}
