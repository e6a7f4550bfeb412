"""Sizes of families with two kinds of token mixers: windows, chunks, convolutions, delta nets."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field

from moefold.config.base import Record
from moefold.config.errors import Violation
from moefold.layers.config import Rope, Size, Temperature
from moefold.layers.kinds.convolution import ShortConvolution
from moefold.layers.kinds.delta import DeltaNet
from moefold.layers.kinds.gqa import Chunked, Gqa, Windowed
from moefold.layers.kinds.mla import Mla
from moefold.model.config import Decoder
from moefold.model.families.sizes import (
    LATENTS,
    DenseFirst,
    DenseListed,
    FamilySizes,
    FreeGqaSizes,
    GqaSizes,
    LatentDims,
    SharedSizes,
    WindowSizes,
    first_heads,
)

Taps = Annotated[int, Field(ge=2)]


class TwoKindSizes(WindowSizes, DenseListed):
    """Sizes of a family whose windowed layers have sinks and twice the key-value heads (MiMo)."""

    v_dim: Size
    """Dims of values per head."""
    window_rope: Rope | None = None
    """Rotary positions of windowed layers; None is those of full layers."""

    def attention(self, layer: int, rope: Rope | None, own: Mapping[str, Any]) -> Record:
        """Return windowed or full attention."""
        sizes = self.head_sizes | {"v_dim": self.v_dim}
        if self.window is None or layer in self.full_layers:
            return Gqa(**sizes, rope=rope, **own)
        sizes["kv_heads"] *= 2
        return Windowed(**sizes, rope=self.window_rope or rope, window=self.window, **own)

    def rules(self) -> Iterator[Violation]:
        """Require that twice the key-value heads divide the heads; check ``window_rope``."""
        yield from super().rules()
        if self.window is not None and self.heads % (2 * self.kv_heads):
            rule = f"must divide heads ({self.heads}) when doubled, as in layers with a window"
            half = (n for n in range(self.kv_heads, 0, -1) if self.heads % (2 * n) == 0)
            yield Violation(("kv_heads",), self.kv_heads, rule, next(half, 1))
        if self.window_rope is not None:
            for broken in self.window_rope.fits(self.dims_per_head):
                path = ("window_rope", "fraction")
                yield Violation(path, broken.value, broken.rule, broken.nearest)
            if self.window is None:
                rule = "needs window: it applies to layers with a window only"
                yield Violation(("window_rope",), self.window_rope, rule, None)

    @classmethod
    def of(cls, decoder: Decoder) -> dict[str, Any]:
        """Return the sizes of a decoder, with those of both kinds of layers."""
        both: list[Any] = [block.attention for block in decoder.blocks]
        sliding = next((one for one in both if isinstance(one, Windowed)), None)
        full = next((one for one in both if one is not sliding and type(one) is Gqa), None)
        kv_heads = full.kv_heads if full else both[0].kv_heads // 2
        differs = sliding is not None and full is not None and sliding.rope != full.rope
        return super().of(decoder) | {
            "kv_heads": kv_heads,
            "v_dim": both[0].value_dim,
            "window_rope": sliding.rope if differs and sliding else None,
        }


class ChunkedSizes(FreeGqaSizes, DenseListed):
    """Sizes of a family with chunked attention, and full layers without positions (Llama 4)."""

    chunk: Size
    """Tokens per chunk, from the start of a document."""
    full_layers: tuple[int, ...] = ()
    """Numbers of the layers, from 0, with full attention and without positions."""
    unit_norm: bool = True
    """Whether heads of queries and keys are normed without a weight, in layers with positions."""
    temperature: Temperature | None = None
    """Factor on queries of full layers."""

    @property
    def width_of_shared(self) -> int:
        """``expert_width``: the shared expert is as wide as a routed one."""
        return self.expert_width

    def attention(self, layer: int, rope: Rope | None, own: Mapping[str, Any]) -> Record:
        """Return chunked or full attention."""
        if layer in self.full_layers:
            return Chunked(**self.head_sizes, rope=None, temperature=self.temperature, **own)
        norm = {"qk_norm": "unit", "norm_after_rope": True} if self.unit_norm else {}
        return Chunked(**self.head_sizes, rope=rope, chunk=self.chunk, **norm, **own)

    def rules(self) -> Iterator[Violation]:
        """Check the numbers of full layers, which ``temperature`` needs."""
        yield from super().rules()
        yield from self._rule_of_numbers("full_layers", "not all of them")
        if self.temperature is not None and not self.full_layers:
            rule = "needs full_layers: it applies to full layers only"
            yield Violation(("temperature",), self.temperature, rule, None)

    @classmethod
    def of(cls, decoder: Decoder) -> dict[str, Any]:
        """Return the sizes of a decoder, with chunk and full layers."""
        both: list[Any] = [block.attention for block in decoder.blocks]
        full = tuple(n for n, one in enumerate(both) if one.chunk is None)
        chunked = next((one for one in both if one.chunk is not None), both[0])
        return super().of(decoder) | {
            "chunk": chunked.chunk,
            "full_layers": full,
            "unit_norm": chunked.qk_norm == "unit",
            "temperature": both[full[0]].temperature if full else None,
        }


class MixedSizes(FamilySizes):
    """Base of sizes of families with attention in some layers and another mixer in others."""

    full_layers: tuple[int, ...]
    """Numbers of the layers, from 0, with attention."""

    def rules(self) -> Iterator[Violation]:
        """Check the numbers of layers with attention, of which there must be one."""
        yield from super().rules()
        yield from self._rule_of_numbers("full_layers", "at least one", every=True)

    @classmethod
    def of(cls, decoder: Decoder) -> dict[str, Any]:
        """Return the sizes of a decoder, with the numbers of layers with attention."""
        both: list[Any] = [block.attention for block in decoder.blocks]
        full = tuple(n for n, one in enumerate(both) if getattr(one, "heads", None))
        return super().of(decoder) | {"full_layers": full}


class ConvolvedSizes(MixedSizes, GqaSizes, DenseFirst):
    """Sizes of a family with short convolutions in place of attention in some layers (LFM2)."""

    taps: Taps = 3
    """Kernel size of convolutions."""

    def attention(self, layer: int, rope: Rope | None, own: Mapping[str, Any]) -> Record:
        """Return attention or a convolution."""
        if layer in self.full_layers:
            return super().attention(layer, rope, own)
        return ShortConvolution(taps=self.taps)

    @classmethod
    def of(cls, decoder: Decoder) -> dict[str, Any]:
        """Return the sizes of a decoder, with ``taps``."""
        mixers: list[Any] = [block.attention for block in decoder.blocks]
        taps = next((one.taps for one in mixers if isinstance(one, ShortConvolution)), 3)
        return super().of(decoder) | {"taps": taps}


class LinearSizes(Record):
    """Sizes of delta nets with a decay per head."""

    key_heads: Size
    value_heads: Size
    key_dim: Size = 128
    value_dim: Size = 128
    taps: Taps = 4
    """Kernel size of the convolutions."""

    def rules(self) -> Iterator[Violation]:
        """Require that key heads divide value heads."""
        yield from super().rules()
        yield from DeltaNet(**dict(self)).rules()


def first_net(decoder: Decoder) -> DeltaNet:
    """Return the first delta net of a decoder.

    Raises:
        AttributeError: if no layer has one.
    """
    mixers = [block.attention for block in decoder.blocks]
    one = next((mixer for mixer in mixers if isinstance(mixer, DeltaNet)), None)
    if one is None:
        raise AttributeError("no layer has a delta net")
    return one


class DeltaSizes(MixedSizes, FreeGqaSizes):
    """Sizes of a family with delta nets in place of attention in some layers."""

    linear: LinearSizes

    def attention(self, layer: int, rope: Rope | None, own: Mapping[str, Any]) -> Record:
        """Return attention or a delta net."""
        if layer in self.full_layers:
            return super().attention(layer, rope, own)
        return DeltaNet(**dict(self.linear))

    @classmethod
    def of(cls, decoder: Decoder) -> dict[str, Any]:
        """Return the sizes of a decoder, with those of delta nets."""
        one = first_net(decoder)
        sizes = {name: getattr(one, name) for name in LinearSizes.model_fields}
        return super().of(decoder) | {"linear": sizes}


class ChannelNet(Record):
    """Sizes of delta nets with decays per channel."""

    head_dim: Size = 128
    taps: Taps = 4
    """Kernel size of the convolutions."""

    def made(self, heads: int, **own: Any) -> DeltaNet:
        """Return the delta net with ``heads`` heads and the fields ``own`` that subclasses add."""
        given: dict[str, Any] = {"key_heads": heads, "value_heads": heads, "taps": self.taps}
        given |= {"key_dim": self.head_dim, "value_dim": self.head_dim, **own}
        return DeltaNet(**given, decay="channel", gate="sigmoid")

    @classmethod
    def of(cls, net: DeltaNet) -> dict[str, Any]:
        """Return the sizes of a delta net."""
        ours = {"head_dim": "key_dim", "heads": "key_heads"}
        return {name: getattr(net, ours.get(name, name)) for name in cls.model_fields}


class LowRankNet(ChannelNet):
    """Delta nets with low-rank projections of decays and gates, of rank ``head_dim`` (Kimi)."""

    heads: Size | None = None
    """Number of heads; None is that of attention."""

    def made(self, heads: int, **own: Any) -> DeltaNet:
        """Return the delta net, with ranks."""
        ranks = {"decay_rank": self.head_dim, "gate_rank": self.head_dim}
        return super().made(self.heads or heads, **ranks, **own)


class BoundedNet(ChannelNet):
    """Delta nets whose decays may have a bound (Ling)."""

    decay_floor: Annotated[float, Field(lt=0)] | None = -5.0
    """Lower bound of the log decay; None is no bound."""

    def made(self, heads: int, **own: Any) -> DeltaNet:
        """Return the delta net, with the bound."""
        return super().made(heads, decay_floor=self.decay_floor, **own)


class ChannelSizes(MixedSizes, SharedSizes, DenseListed):
    """Sizes of a family with latent attention in some layers, and delta nets in others."""

    latent: LatentDims = LatentDims()
    linear: ChannelNet

    def attention(self, layer: int, rope: Rope | None, own: Mapping[str, Any]) -> Record:
        """Return latent attention or a delta net."""
        if layer in self.full_layers:
            return Mla(heads=self.heads, rope=rope, **dict(self.latent), **own)
        return self.linear.made(self.heads)

    @classmethod
    def of(cls, decoder: Decoder) -> dict[str, Any]:
        """Return the sizes of a decoder, with those of both kinds of layers."""
        sizes = cls.model_fields["linear"].annotation.of(first_net(decoder))  # type: ignore[union-attr]
        latent = {name: getattr(first_heads(decoder), name) for name in LATENTS}
        return super().of(decoder) | {"linear": sizes, "latent": latent}


class LowRankSizes(ChannelSizes):
    """Sizes of a Kimi-Linear."""

    linear: LowRankNet = LowRankNet()


class BoundedSizes(ChannelSizes):
    """Sizes of a Ling 3.0."""

    linear: BoundedNet = BoundedNet()
