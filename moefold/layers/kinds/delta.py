"""Gated linear attention, with or without the delta rule: record and description."""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from moefold.config.errors import Violation
from moefold.layers.config import ATTENTION, CHECKPOINTING, Size
from moefold.mesh.config import Sizes
from moefold.spec.layer import (
    SMALL_HEAD,
    STATISTIC,
    LayerSpec,
    Matmul,
    Operation,
    Saved,
    Scan,
    Shape,
    Traffic,
    Units,
    Weight,
    norm,
    small_heads,
)
from moefold.spec.parts import saved_attention_rows

CHUNK = 64


def _log_rate(fraction: float) -> float:
    """Return the initial log of a decay rate: rates are evenly spaced from 1 to 16, the range from
    which Mamba-2 draws them (arXiv 2405.21060)."""
    return math.log(1 + 15 * fraction)


def _step_bias(fraction: float) -> float:
    """Return the inverse softplus of a time step; steps are log-spaced from 0.001 to 0.1."""
    step = 1e-3 * 100**fraction
    return step + math.log(-math.expm1(-step))


@ATTENTION.register
class DeltaNet(LayerSpec):
    """Linear attention with decays: a state per head in place of cached keys and values.

    With a decay per head it is Gated DeltaNet (arXiv 2412.06464; Qwen3-Next), with one per key
    channel Kimi Delta Attention (arXiv 2510.26692), and without the delta rule gated linear
    attention (arXiv 2312.06635).
    """

    kind: Literal["delta_net"] = "delta_net"
    key_heads: Size
    value_heads: Size
    """Number of heads of values and states; neighbouring ones share a query and key."""
    key_dim: Size = 128
    value_dim: Size = 128
    taps: Annotated[int, Field(ge=2)] = 4
    """Kernel size of the convolutions of queries, keys and values, in rows."""
    delta: bool = True
    """Delta rule: whether the state's value for a key is subtracted from a value before writing."""
    decay: Literal["head", "channel"] = "head"
    decay_rank: Size | None = None
    """Rank of the decay projection; None is full rank."""
    decay_floor: Annotated[float, Field(lt=0)] | None = None
    """Lower bound of the log decay, by a sigmoid; None is unbounded, by a softplus."""
    gate: Literal["silu", "sigmoid"] = "silu"
    """Activation of the gate on normed outputs."""
    gate_rank: Size | None = None
    """Rank of the gate projection; None is full rank."""

    widths = ("key_dim", "value_dim", "decay_rank", "gate_rank")
    owner = "moefold.layers.delta:DeltaMixer"
    preloads = CHECKPOINTING
    caches = True

    def rules(self) -> Iterator[Violation]:
        """Require that key heads divide value heads."""
        yield from super().rules()
        if self.value_heads % self.key_heads:
            below = range(1, min(self.key_heads, self.value_heads) + 1)
            nearest = max(n for n in below if self.value_heads % n == 0)
            rule = f"must divide value_heads ({self.value_heads})"
            yield Violation(("key_heads",), self.key_heads, rule, nearest)

    @property
    def summary(self) -> str:
        """Description of kind, heads and decays for the banner."""
        rule = "delta net" if self.delta else "linear attention"
        return f"{rule} ({self.value_heads} heads, decays of each {self.decay})"

    @property
    def keys(self) -> int:
        """Features of a row's queries, and of its keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Features of a row's values, gate and output."""
        return self.value_heads * self.value_dim

    @property
    def decays(self) -> int:
        """Number of decays of a row."""
        return self.value_heads * (self.key_dim if self.decay == "channel" else 1)

    @property
    def head_units(self) -> Units:
        """Units that tp divides: key heads, each with its value heads."""
        return Units("tp", self.key_heads, "the number of key heads of linear attention")

    def _projections(self) -> Iterator[tuple[str, int, int | None]]:
        """Yield name, outputs and rank of each input projection."""
        yield from (("q", self.keys, None), ("k", self.keys, None), ("v", self.values, None))
        if self.delta:
            yield "beta", self.value_heads, None
        yield "decay", self.decays, self.decay_rank
        yield "gate", self.values, self.gate_rank

    def weights(self, hidden: int) -> Iterator[Weight]:
        """Yield taps, decays and projections, cut by heads unless to latents; norm; output."""
        cut = ((0, self.head_units),)
        projections = list(self._projections())
        for name, width, _ in projections[:3]:
            yield Weight(f"{name}_taps", (width, 1, self.taps), cut, product=False, summed=True)
        yield Weight("a_log", (self.value_heads,), cut, product=False, start=_log_rate)
        yield Weight("dt_bias", (self.decays,), cut, product=False, start=_step_bias)
        for name, width, rank in projections:
            if rank is not None:
                yield Weight(f"{name}_down.weight", (rank, hidden))
            yield Weight(f"{name}_in.weight", (width, rank or hidden), cut)
        yield norm("norm.weight", self.value_dim)
        yield Weight("out.weight", (hidden, self.values), ((1, self.head_units),), added=True)

    def operations(self, hidden: int) -> Iterator[Operation]:
        """Yield the projections, with convolutions and gate, and the scan."""
        projections = list(self._projections())
        full_rank = [name for name, _, rank in projections if rank is None]
        low_rank = [name for name, _, rank in projections if rank is not None]
        products = [Matmul(tuple(f"{name}_in.weight" for name in full_rank))]
        for name in low_rank:
            products.append(Matmul((f"{name}_down.weight",)))
            products.append(Matmul((f"{name}_in.weight",)))
        mixed = 2 * self.keys + self.values
        width = sum(width for _, width, _ in projections)
        passes = 2 + 2 * self.taps
        convolutions = Traffic(mixed, passes, 2 * passes, units=self.head_units)
        gate = Traffic(self.values, 8, 14, units=self.head_units)
        products.append(Matmul(("out.weight",)))
        launches = 20 + 6 * self.taps
        traffic = (convolutions, gate)
        yield Operation("attention", tuple(products), traffic=traffic, launches=launches)
        flops_per_value = CHUNK + 2 * self.key_dim
        if self.delta:
            flops_per_value += CHUNK + self.key_dim
        moved = 2 * (width + self.values)
        state = self.values * self.key_dim
        scan = Scan(self.values * flops_per_value, moved, CHUNK, state)
        yield Operation("core", core=scan, launches=12)

    def saved(self, shape: Shape) -> Iterator[Saved]:
        """Yield normed, projected and convolved rows, decays, and the output around its gate.

        The scan saves only its inputs, and is recomputed in backward.
        """
        projections = list(self._projections())
        first = [name + ("_in" if rank is None else "_down") for name, _, rank in projections]
        yield from saved_attention_rows(tuple(f"{name}.weight" for name in first), shape)
        rows = shape.piece
        width = shape.width
        for name, features, rank in projections:
            size = rows * (features // shape.tp) * width
            if rank is not None:
                low_size = rows * rank * width
                up = (f"{name}_in.weight",)
                yield Saved(f"{name}_down", low_size, module="attention", operand_of=up)
            if (name, self.gate) != ("gate", "sigmoid"):  # whose output suffices for backward
                yield Saved(name, size, module="attention")
            if name in "qkv":
                yield Saved(f"{name}.convolved", size, module="attention")
        heads = self.value_heads // shape.tp
        small = self.value_heads + self.decays
        yield Saved("decays", small // shape.tp * STATISTIC, module="attention")
        values = rows * self.values // shape.tp * width
        yield Saved("scanned", values, module="attention")
        yield Saved("norm.statistic", rows * heads * STATISTIC, module="norms")
        yield Saved("norm.output", values, frozenset(("norms",)), module="norms")
        yield Saved("gate.active", values, module="attention")
        yield Saved("gated", values, module="attention", operand_of=("out.weight",))
        if shape.cp > 1:
            mixed = 2 * self.keys + self.values
            reach = 2 * (self.taps - 1) * mixed // shape.tp
            yield Saved("before", reach * width, module="attention")

    def shrink(self, by: Sizes) -> Self:
        """Return a record with few key heads of few dims, each with at most two value heads."""
        heads = small_heads(self.key_heads, by)
        shared = min(self.value_heads // self.key_heads, 2)
        changed: dict[str, Any] = {"key_heads": heads, "value_heads": heads * shared}
        changed["key_dim"] = SMALL_HEAD
        changed["value_dim"] = SMALL_HEAD + 2
        for name in ("decay_rank", "gate_rank"):
            if getattr(self, name) is not None:
                changed[name] = SMALL_HEAD
        return self.model_copy(update=changed)
