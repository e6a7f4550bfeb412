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
    LATENT_DIMS,
    DenseFirst,
    DenseListed,
    FamilySizes,
    FreeGqaSizes,
    GqaSizes,
    LatentDims,
    SharedSizes,
    WindowSizes,
    first_attention,
)

Taps = Annotated[int, Field(ge=2)]


class TwoKindSizes(WindowSizes, DenseListed):
    """Sizes of a family whose windowed layers have sinks and twice the key-value heads (MiMo)."""

    v_dim: Size
    """Dims of values per head."""
    window_rope: Rope | None = None
    """Rotary positions of windowed layers; None: the same as in full layers."""

    def attention(self, layer: int, rope: Rope | None, extra: Mapping[str, Any]) -> Record:
        """Return windowed or full attention."""
        sizes = self.head_sizes | {"v_dim": self.v_dim}
        if self.window is None or layer in self.full_layers:
            return Gqa(**sizes, rope=rope, **extra)
        sizes["kv_heads"] *= 2
        return Windowed(**sizes, rope=self.window_rope or rope, window=self.window, **extra)

    def rules(self) -> Iterator[Violation]:
        """Require that twice the key-value heads divide the heads; check ``window_rope``."""
        yield from super().rules()
        if self.window is not None and self.heads % (2 * self.kv_heads):
            rule = f"must divide heads ({self.heads}) when doubled, as in layers with a window"
            legal = (n for n in range(self.kv_heads, 0, -1) if self.heads % (2 * n) == 0)
            yield Violation(("kv_heads",), self.kv_heads, rule, next(legal, 1))
        if self.window_rope is not None:
            for violation in self.window_rope.fits(self.resolved_head_dim):
                path = ("window_rope", "fraction")
                yield Violation(path, violation.value, violation.rule, violation.nearest)
            if self.window is None:
                rule = "needs window: it applies to layers with a window only"
                yield Violation(("window_rope",), self.window_rope, rule, None)

    @classmethod
    def of(cls, decoder: Decoder) -> dict[str, Any]:
        """Infer the sizes of a decoder, with those of both kinds of layers."""
        layers: list[Any] = [block.attention for block in decoder.blocks]
        sliding = next((layer for layer in layers if isinstance(layer, Windowed)), None)
        full = next((layer for layer in layers if type(layer) is Gqa), None)
        kv_heads = full.kv_heads if full else layers[0].kv_heads // 2
        differs = sliding is not None and full is not None and sliding.rope != full.rope
        return super().of(decoder) | {
            "kv_heads": kv_heads,
            "v_dim": layers[0].value_dim,
            "window_rope": sliding.rope if differs and sliding else None,
        }


class ChunkedSizes(FreeGqaSizes, DenseListed):
    """Sizes of a family with chunked attention, and full layers without positions (Llama 4)."""

    chunk: Size
    """Tokens per chunk, counted from the start of a document."""
    full_layers: tuple[int, ...] = ()
    """Numbers of the layers, from 0, with full attention and without rotary positions."""
    unit_norm: bool = True
    """Whether heads of queries and keys are normed without a weight, in chunked layers."""
    temperature: Temperature | None = None
    """Factor on queries of full layers."""

    @property
    def resolved_shared_width(self) -> int:
        """``expert_width``: the shared expert is as wide as a routed expert."""
        return self.expert_width

    def attention(self, layer: int, rope: Rope | None, extra: Mapping[str, Any]) -> Record:
        """Return chunked or full attention."""
        if layer in self.full_layers:
            return Chunked(**self.head_sizes, rope=None, temperature=self.temperature, **extra)
        norm = {"qk_norm": "unit", "norm_after_rope": True} if self.unit_norm else {}
        return Chunked(**self.head_sizes, rope=rope, chunk=self.chunk, **norm, **extra)

    def rules(self) -> Iterator[Violation]:
        """Check the numbers of full layers, which ``temperature`` needs."""
        yield from super().rules()
        yield from self._check_layer_numbers("full_layers", "not all of them")
        if self.temperature is not None and not self.full_layers:
            rule = "needs full_layers: it applies to full layers only"
            yield Violation(("temperature",), self.temperature, rule, None)

    @classmethod
    def of(cls, decoder: Decoder) -> dict[str, Any]:
        """Infer the sizes of a decoder, with chunk and full layers."""
        layers: list[Any] = [block.attention for block in decoder.blocks]
        full = tuple(n for n, layer in enumerate(layers) if layer.chunk is None)
        chunked = next((layer for layer in layers if layer.chunk is not None), layers[0])
        return super().of(decoder) | {
            "chunk": chunked.chunk,
            "full_layers": full,
            "unit_norm": chunked.qk_norm == "unit",
            "temperature": layers[full[0]].temperature if full else None,
        }


class MixedSizes(FamilySizes):
    """Base of sizes of families with attention in some layers and another mixer in others."""

    full_layers: tuple[int, ...]
    """Numbers of the layers, from 0, with attention."""

    def rules(self) -> Iterator[Violation]:
        """Check the numbers of layers with attention; there must be at least one."""
        yield from super().rules()
        yield from self._check_layer_numbers("full_layers", "at least one", allow_all=True)

    @classmethod
    def of(cls, decoder: Decoder) -> dict[str, Any]:
        """Infer the sizes of a decoder, with the numbers of layers with attention."""
        mixers: list[Any] = [block.attention for block in decoder.blocks]
        full = tuple(n for n, mixer in enumerate(mixers) if getattr(mixer, "heads", None))
        return super().of(decoder) | {"full_layers": full}


class ConvolutionSizes(MixedSizes, GqaSizes, DenseFirst):
    """Sizes of a family with short convolutions in place of attention in some layers (LFM2)."""

    taps: Taps = 3
    """Kernel size of convolutions."""

    def attention(self, layer: int, rope: Rope | None, extra: Mapping[str, Any]) -> Record:
        if layer in self.full_layers:
            return super().attention(layer, rope, extra)
        return ShortConvolution(taps=self.taps)

    @classmethod
    def of(cls, decoder: Decoder) -> dict[str, Any]:
        """Infer the sizes of a decoder, with ``taps``."""
        mixers: list[Any] = [block.attention for block in decoder.blocks]
        taps = next((m.taps for m in mixers if isinstance(m, ShortConvolution)), 3)
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


def first_delta_net(decoder: Decoder) -> DeltaNet:
    """Return the first delta net of a decoder.

    Raises:
        AttributeError: if no layer has one.
    """
    mixers = [block.attention for block in decoder.blocks]
    net = next((mixer for mixer in mixers if isinstance(mixer, DeltaNet)), None)
    if net is None:
        raise AttributeError("no layer has a delta net")
    return net


class DeltaSizes(MixedSizes, FreeGqaSizes):
    """Sizes of a family with delta nets in place of attention in some layers."""

    linear: LinearSizes

    def attention(self, layer: int, rope: Rope | None, extra: Mapping[str, Any]) -> Record:
        if layer in self.full_layers:
            return super().attention(layer, rope, extra)
        return DeltaNet(**dict(self.linear))

    @classmethod
    def of(cls, decoder: Decoder) -> dict[str, Any]:
        """Infer the sizes of a decoder, with those of delta nets."""
        net = first_delta_net(decoder)
        sizes = {name: getattr(net, name) for name in LinearSizes.model_fields}
        return super().of(decoder) | {"linear": sizes}


class ChannelDeltaNet(Record):
    """Sizes of delta nets with decays per channel."""

    head_dim: Size = 128
    taps: Taps = 4
    """Kernel size of the convolutions."""

    def build(self, heads: int, **extra: Any) -> DeltaNet:
        """Return the delta net with ``heads`` heads; ``extra`` are fields that subclasses add."""
        sizes: dict[str, Any] = {"key_heads": heads, "value_heads": heads, "taps": self.taps}
        sizes |= {"key_dim": self.head_dim, "value_dim": self.head_dim, **extra}
        return DeltaNet(**sizes, decay="channel", gate="sigmoid")

    @classmethod
    def of(cls, net: DeltaNet) -> dict[str, Any]:
        """Return the sizes of a delta net."""
        fields = {"head_dim": "key_dim", "heads": "key_heads"}
        return {name: getattr(net, fields.get(name, name)) for name in cls.model_fields}


class LowRankDeltaNet(ChannelDeltaNet):
    """Delta nets with low-rank projections of decays and gates, of rank ``head_dim`` (Kimi)."""

    heads: Size | None = None
    """Number of heads; None is the number of attention heads."""

    def build(self, heads: int, **extra: Any) -> DeltaNet:
        """Return the delta net, with ranks."""
        ranks = {"decay_rank": self.head_dim, "gate_rank": self.head_dim}
        return super().build(self.heads or heads, **ranks, **extra)


class BoundedDeltaNet(ChannelDeltaNet):
    """Delta nets whose decays may have a bound (Ling)."""

    decay_floor: Annotated[float, Field(lt=0)] | None = -5.0
    """Lower bound of the log decay; None is no bound."""

    def build(self, heads: int, **extra: Any) -> DeltaNet:
        """Return the delta net, with the bound."""
        return super().build(heads, decay_floor=self.decay_floor, **extra)


class ChannelSizes(MixedSizes, SharedSizes, DenseListed):
    """Sizes of a family with latent attention in some layers, and delta nets in others."""

    latent: LatentDims = LatentDims()
    linear: ChannelDeltaNet

    def attention(self, layer: int, rope: Rope | None, extra: Mapping[str, Any]) -> Record:
        """Return latent attention or a delta net."""
        if layer in self.full_layers:
            return Mla(heads=self.heads, rope=rope, **dict(self.latent), **extra)
        return self.linear.build(self.heads)

    @classmethod
    def of(cls, decoder: Decoder) -> dict[str, Any]:
        """Infer the sizes of a decoder, with those of both kinds of layers."""
        sizes = cls.model_fields["linear"].annotation.of(first_delta_net(decoder))  # type: ignore[union-attr]
        latent = {name: getattr(first_attention(decoder), name) for name in LATENT_DIMS}
        return super().of(decoder) | {"linear": sizes, "latent": latent}


class LowRankSizes(ChannelSizes):
    """Sizes of a Kimi-Linear."""

    linear: LowRankDeltaNet = LowRankDeltaNet()


class BoundedSizes(ChannelSizes):
    """Sizes of a Ling 3.0."""

    linear: BoundedDeltaNet = BoundedDeltaNet()
