"""Sizes of families: what users write under ``shape``, in parts that families put together.

Each part knows its rules, what it makes of a layer, and how it is read off a decoder again.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from moefold.config.base import Record
from moefold.config.errors import Violation
from moefold.layers.config import Rope, Size
from moefold.layers.kinds.dense import Dense
from moefold.layers.kinds.gqa import Gqa, Windowed
from moefold.layers.kinds.mla import Mla
from moefold.model.config import Decoder, Layers
from moefold.moe.config import Moe


class FamilySizes(Record):
    """Sizes that every family with routed experts has."""

    hidden: Size
    layers: Layers
    heads: Size
    experts: Size
    top_k: Size
    expert_width: Size
    vocab: Annotated[int, Field(ge=2)] | None = None
    """Rows of the embedding; None is the tokenizer's number of tokens."""

    @property
    def dense(self) -> Collection[int]:
        """Numbers of the layers, from 0, whose feed-forward is dense."""
        return ()

    @property
    def width_of_shared(self) -> int | None:
        """Width of the expert that sees every token; None without one."""
        return None

    @property
    def width_of_dense(self) -> int:
        """Width of a dense feed-forward."""
        return self.top_k * self.expert_width + (self.width_of_shared or 0)

    def attention(self, layer: int, rope: Rope | None, own: Mapping[str, Any]) -> Record:
        """Return the attention of a layer, ``own`` being what its family says of it."""
        raise NotImplementedError(f"{type(self).__name__} does not say which attention it sizes")

    def _rule_of_numbers(
        self, key: str, said: str, some: bool = True, every: bool = False
    ) -> Iterator[Violation]:
        """Yield where numbers of layers do not increase, or are not among the layers.

        They leave a layer out, and there are none without ``some``. With ``every`` they may be all
        layers, and there is at least one.
        """
        given, last = getattr(self, key), self.layers - 1
        legal = sorted({n for n in given if 0 <= n <= last and some})
        legal = (legal or [0]) if every else legal[:last]
        if list(given) != legal:
            rule = f"must be increasing numbers from 0 to {last}, {said}"
            yield Violation((key,), given, rule, tuple(legal))

    @classmethod
    def of(cls, decoder: Decoder) -> dict[str, Any]:
        """Return the fields that a decoder's blocks show.

        Raises:
            AttributeError: where its blocks are of another kind.
            StopIteration: where no block has experts.
        """
        moe = first_moe(decoder)
        return {
            "vocab": decoder.vocab,
            "hidden": decoder.hidden,
            "layers": decoder.layers,
            "heads": first_heads(decoder).heads,
            "experts": moe.router.experts,
            "top_k": moe.router.top_k,
            "expert_width": moe.width,
        }


def first_heads(decoder: Decoder) -> Any:
    """Return the first attention with heads; the first mixer where none has any."""
    mixers = [block.attention for block in decoder.blocks]
    return next((one for one in mixers if getattr(one, "heads", None)), mixers[0])


def first_moe(decoder: Decoder) -> Moe:
    """Return the first feed-forward with experts.

    Raises:
        StopIteration: where there is none.
    """
    return next(b.ffn for b in decoder.blocks if isinstance(b.ffn, Moe))


def dense_of(decoder: Decoder) -> dict[int, Dense]:
    """Return the dense feed-forwards of a decoder by their layers' numbers."""
    return {n: b.ffn for n, b in enumerate(decoder.blocks) if isinstance(b.ffn, Dense)}


class GqaSizes(FamilySizes):
    """Sizes of a family with grouped-query attention, heads together as wide as ``hidden``."""

    kv_heads: Size

    @property
    def dims_per_head(self) -> int:
        """Dims of one head."""
        return self.hidden // self.heads

    def attention(self, layer: int, rope: Rope | None, own: Mapping[str, Any]) -> Record:
        """Return the same attention for each layer."""
        return Gqa(**self.head_sizes, rope=rope, **own)

    @property
    def head_sizes(self) -> dict[str, int]:
        """Numbers of heads and their dims, as records of attention call them."""
        return {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.dims_per_head}

    def rules(self) -> Iterator[Violation]:
        """Heads fit the hidden size, and key-value heads the heads."""
        yield from super().rules()
        yield from self._head_rules()
        if self.heads % self.kv_heads:
            below = range(1, min(self.heads, self.kv_heads) + 1)
            nearest = max(d for d in below if self.heads % d == 0)
            yield Violation(
                ("kv_heads",), self.kv_heads, f"must divide heads ({self.heads})", nearest
            )

    def _head_rules(self) -> Iterator[Violation]:
        if self.dims_per_head * self.heads != self.hidden or self.dims_per_head % 2:
            nearest = max(1, round(self.hidden / (2 * self.heads))) * 2 * self.heads
            rule = f"hidden / heads ({self.heads}) must be a whole, even number of dims per head"
            yield Violation(("hidden",), self.hidden, rule, nearest)

    @classmethod
    def of(cls, decoder: Decoder) -> dict[str, Any]:
        """Return the sizes that a decoder shows, dims per head where they are not natural."""
        attention = first_heads(decoder)
        natural = attention.head_dim * attention.heads == decoder.hidden
        sizes = {} if natural else {"head_dim": attention.head_dim}
        return super().of(decoder) | sizes | {"kv_heads": attention.kv_heads}


class FreeGqaSizes(GqaSizes):
    """Sizes of a family whose heads may be of any width."""

    head_dim: Annotated[int, Field(ge=2)] | None = None
    """Dims per head; None is hidden / heads."""

    @property
    def dims_per_head(self) -> int:
        """Dims of one head."""
        return self.head_dim or self.hidden // self.heads

    def _head_rules(self) -> Iterator[Violation]:
        if self.head_dim is None:
            yield from super()._head_rules()
        elif self.head_dim % 2:
            rule = "must be even, for rotary pairs"
            yield Violation(("head_dim",), self.head_dim, rule, self.head_dim + 1)


class WindowSizes(FreeGqaSizes):
    """Sizes of a family some of whose layers see a window."""

    window: Size | None = None
    """Tokens that a token sees, itself among them; None is all before it, in every layer."""
    full_layers: tuple[int, ...] = ()
    """Numbers of the layers, from 0, that see all before them whatever the window."""

    full_turn: ClassVar[bool] = True
    """Whether full layers have positions beside a window."""

    def turns(self, layer: int) -> bool:
        """Return whether a full layer has positions beside a window."""
        return self.full_turn

    def attention(self, layer: int, rope: Rope | None, own: Mapping[str, Any]) -> Record:
        """Return attention within the window, or to all before."""
        if self.window is None or layer in self.full_layers:
            placed = rope if self.window is None or self.turns(layer) else None
            return Gqa(**self.head_sizes, rope=placed, **own)
        return Windowed(**self.head_sizes, rope=rope, window=self.window, sinks=False, **own)

    def rules(self) -> Iterator[Violation]:
        """Full layers exist and stand once."""
        yield from super().rules()
        said = "not all, beside a window"
        yield from self._rule_of_numbers("full_layers", said, some=self.window is not None)

    @classmethod
    def of(cls, decoder: Decoder) -> dict[str, Any]:
        """Return the sizes that a decoder shows, the window and who sees past it too."""
        windows = [getattr(block.attention, "window", None) for block in decoder.blocks]
        window = next((w for w in windows if w), None)
        full = tuple(n for n, w in enumerate(windows) if w is None) if window else ()
        return super().of(decoder) | {"window": window, "full_layers": full}


class SinkSizes(WindowSizes):
    """Sizes of a family with a sink of each head in every layer, windows in some."""

    def attention(self, layer: int, rope: Rope | None, own: Mapping[str, Any]) -> Record:
        """Return attention with sinks, within the window or to all before."""
        window = None if layer in self.full_layers else self.window
        return Windowed(**self.head_sizes, rope=rope, window=window, **own)


class LatentDims(Record):
    """Sizes of latent attention."""

    q_rank: Size | None = None
    """Rank of the query's latent; None projects queries directly."""
    kv_rank: Size = 512
    nope_dim: Size = 128
    """Dims per head without position."""
    rope_dim: Annotated[int, Field(ge=2)] = 64
    """Dims per head with rotary position."""
    v_dim: Size = 128

    def rules(self) -> Iterator[Violation]:
        """Rotary dims are even."""
        yield from super().rules()
        yield from Mla(heads=1, **{name: getattr(self, name) for name in LATENTS}).rules()


LATENTS = tuple(LatentDims.model_fields)


class LatentSizes(LatentDims, FamilySizes):
    """Sizes of a family with latent attention."""

    def attention(self, layer: int, rope: Rope | None, own: Mapping[str, Any]) -> Record:
        """Return the same attention for each layer."""
        return Mla(heads=self.heads, rope=rope, **{n: getattr(self, n) for n in LATENTS}, **own)

    @classmethod
    def of(cls, decoder: Decoder) -> dict[str, Any]:
        """Return the sizes that a decoder shows, those of its latents too."""
        latent = {n: getattr(first_heads(decoder), n) for n in LATENTS}
        return super().of(decoder) | latent


class DenseWidth(FamilySizes):
    """Sizes of a family some of whose layers may be dense."""

    dense_width: Size | None = None
    """Width of those; None is as wide as the experts a token sees, together."""

    @property
    def width_of_dense(self) -> int:
        """``dense_width``, or what it follows from."""
        return self.dense_width or super().width_of_dense

    @classmethod
    def of(cls, decoder: Decoder) -> dict[str, Any]:
        """Return the sizes that a decoder shows, the dense layers' width too."""
        width = next((ffn.width for ffn in dense_of(decoder).values()), None)
        return super().of(decoder) | {"dense_width": width}


class DenseFirst(DenseWidth):
    """Sizes of a family whose first layers may be dense."""

    dense_layers: Annotated[int, Field(ge=0)] = 0
    """How many of the first layers have a dense feed-forward."""

    @property
    def dense(self) -> Collection[int]:
        """The first layers."""
        return range(self.dense_layers)

    def rules(self) -> Iterator[Violation]:
        """A layer keeps experts."""
        yield from super().rules()
        if self.dense_layers >= self.layers:
            rule = f"must be less than layers ({self.layers}): a layer keeps experts"
            yield Violation(("dense_layers",), self.dense_layers, rule, self.layers - 1)

    @classmethod
    def of(cls, decoder: Decoder) -> dict[str, Any]:
        """Return the sizes that a decoder shows, and how many layers are dense."""
        return super().of(decoder) | {"dense_layers": len(dense_of(decoder))}


class DenseListed(DenseWidth):
    """Sizes of a family any of whose layers may be dense."""

    dense_layers: tuple[int, ...] = ()
    """Numbers of the layers, from 0, whose feed-forward is dense."""

    @property
    def dense(self) -> Collection[int]:
        """The layers that are named."""
        return frozenset(self.dense_layers)

    def rules(self) -> Iterator[Violation]:
        """Dense layers exist, stand once, and leave a layer with experts."""
        yield from super().rules()
        yield from self._rule_of_numbers("dense_layers", "not all: a layer keeps experts")

    @classmethod
    def of(cls, decoder: Decoder) -> dict[str, Any]:
        """Return the sizes that a decoder shows, and which layers are dense."""
        return super().of(decoder) | {"dense_layers": tuple(dense_of(decoder))}


class SharedWidth(FamilySizes):
    """Sizes of a family with a shared expert, or with one or none."""

    shared_width: Size | None = None

    @property
    def width_of_shared(self) -> int | None:
        """``shared_width``, or what it follows from."""
        return self.shared_width

    @classmethod
    def of(cls, decoder: Decoder) -> dict[str, Any]:
        """Return the sizes that a decoder shows, the shared expert's too."""
        width = getattr(first_moe(decoder).shared, "width", None)
        return super().of(decoder) | {"shared_width": width}


class SharedSizes(SharedWidth):
    """Sizes of a family with an expert that sees every token, some routed experts wide."""

    shared_width: Size | None = None
    """Width of the shared expert; None is that of one routed expert."""

    @property
    def width_of_shared(self) -> int:
        """``shared_width``, or what it follows from."""
        return self.shared_width or self.expert_width

    def rules(self) -> Iterator[Violation]:
        """The shared expert is some routed experts wide."""
        yield from super().rules()
        if self.width_of_shared % self.expert_width:
            nearest = max(1, round(self.width_of_shared / self.expert_width)) * self.expert_width
            rule = f"must be a multiple of expert_width ({self.expert_width})"
            yield Violation(("shared_width",), self.shared_width, rule, nearest)


class GatedSharedSizes(SharedWidth):
    """Sizes of a family with a shared expert of any width, whose output a sigmoid scales."""

    # It has to be stated here, and has a default in the base: pyright takes that for a mistake.
    shared_width: Size  # type: ignore[reportGeneralTypeIssues]


class AnySharedSizes(SharedWidth):
    """Sizes of a family that may have a shared expert, of any width."""

    shared_width: Size | None = None
    """Width of the shared expert; None is no such expert."""


class DenseTurnSizes(WindowSizes, AnySharedSizes, DenseListed):
    """Sizes of a family whose full layers have no positions, unless they are dense."""

    # It has to be stated here, and has a default in the base: pyright takes that for a mistake.
    window: Size  # type: ignore[reportGeneralTypeIssues]
    dense_turn: bool = True
    """Whether dense layers have positions whatever they see."""

    full_turn = False

    def turns(self, layer: int) -> bool:
        """Return whether a full layer has positions beside a window."""
        return self.dense_turn and layer in self.dense

    @classmethod
    def of(cls, decoder: Decoder) -> dict[str, Any]:
        """Return the sizes that a decoder shows, and whether dense layers turn."""
        attention: Any = [decoder.blocks[n].attention for n in dense_of(decoder)]
        turn = all(one.rope is not None for one in attention)
        return super().of(decoder) | {"dense_turn": turn}
