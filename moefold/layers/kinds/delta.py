"""Gated linear attention, by the delta rule or without it: its record and what it is."""

import math
from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field

from moefold.config.errors import Violation
from moefold.layers.config import ATTENTION, Size
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
from moefold.spec.parts import saved_rows

CHUNK = 64


def _log_rate(place: float) -> float:
    """Return the log of a decay's rate before the first step: rates are spread from 1 to 16, as
    Mamba-2 draws them (arXiv 2405.21060)."""
    return math.log(1 + 15 * place)


def _step_bias(place: float) -> float:
    """Return what softplus makes a step of: steps are spread from 0.001 to 0.1 by their logs."""
    step = 1e-3 * 100**place
    return step + math.log(-math.expm1(-step))


@ATTENTION.register
class DeltaNet(LayerSpec):
    """Linear attention with decays: a state of each head in place of keys and values.

    With decays of each head it is the gated delta net (arXiv 2412.06464; Qwen3-Next), with those of
    each key channel Kimi Delta Attention (arXiv 2510.26692), and without the delta rule gated
    linear attention (arXiv 2312.06635).
    """

    kind: Literal["delta_net"] = "delta_net"
    key_heads: Size
    value_heads: Size
    """Heads of values and states; neighbouring ones share a query and key."""
    key_dim: Size = 128
    value_dim: Size = 128
    taps: Annotated[int, Field(ge=2)] = 4
    """Rows that the convolution of queries, keys and values sees."""
    delta: bool = True
    """Whether a value is written less what the state has for its key, at a rate of each row."""
    decay: Literal["head", "channel"] = "head"
    decay_rank: Size | None = None
    """Rank of the decays' projection; None projects rows directly."""
    decay_floor: Annotated[float, Field(lt=0)] | None = None
    """Least log decay: then a sigmoid of the rates bounds it; None is a softplus."""
    gate: Literal["silu", "sigmoid"] = "silu"
    """Activation of the gate on normed outputs."""
    gate_rank: Size | None = None
    """Rank of the gate's projection; None projects rows directly."""

    owner = "moefold.layers.delta:DeltaMixer"
    caches = True

    def rules(self) -> Iterator[Violation]:
        """Key heads divide value heads."""
        yield from super().rules()
        if self.value_heads % self.key_heads:
            below = range(1, min(self.key_heads, self.value_heads) + 1)
            nearest = max(n for n in below if self.value_heads % n == 0)
            rule = f"must divide value_heads ({self.value_heads})"
            yield Violation(("key_heads",), self.key_heads, rule, nearest)

    @property
    def words(self) -> str:
        """The kind, its heads and what they decay by."""
        rule = "delta net" if self.delta else "linear attention"
        return f"{rule} ({self.value_heads} heads, decays of each {self.decay})"

    @property
    def keys(self) -> int:
        """Features of queries, and of keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Features of values, of the gate and of the output."""
        return self.value_heads * self.value_dim

    @property
    def decays(self) -> int:
        """Decays of a row."""
        return self.value_heads * (self.key_dim if self.decay == "channel" else 1)

    @property
    def head_units(self) -> Units:
        """What tensor ranks share: key heads, each with its value heads."""
        return Units("tp", self.key_heads, "key heads of linear attention")

    def _projections(self) -> Iterator[tuple[str, int, int | None]]:
        """Yield projections of rows to heads: name, outputs and rank."""
        yield from (("q", self.keys, None), ("k", self.keys, None), ("v", self.values, None))
        if self.delta:
            yield "beta", self.value_heads, None
        yield "decay", self.decays, self.decay_rank
        yield "gate", self.values, self.gate_rank

    def weights(self, hidden: int) -> Iterator[Weight]:
        """Yield taps, decays, projections, all cut by heads but to latents, norm and output."""
        cut, given = ((0, self.head_units),), list(self._projections())
        for name, width, _ in given[:3]:
            yield Weight(f"{name}_taps", (width, 1, self.taps), cut, product=False, summed=True)
        yield Weight("a_log", (self.value_heads,), cut, product=False, start=_log_rate)
        yield Weight("dt_bias", (self.decays,), cut, product=False, start=_step_bias)
        for name, width, rank in given:
            if rank is not None:
                yield Weight(f"{name}_down.weight", (rank, hidden))
            yield Weight(f"{name}_in.weight", (width, rank or hidden), cut)
        yield norm("norm.weight", self.value_dim)
        yield Weight("out.weight", (hidden, self.values), ((1, self.head_units),), added=True)

    def operations(self, hidden: int) -> Iterator[Operation]:
        """Yield the projections with convolutions and gate, and the scan."""
        given = list(self._projections())
        products = [Matmul(tuple(f"{name}_in.weight" for name, _, rank in given if rank is None))]
        for name, _, rank in given:
            if rank is not None:
                products += [Matmul((f"{name}_down.weight",)), Matmul((f"{name}_in.weight",))]
        mixed, width = 2 * self.keys + self.values, sum(width for _, width, _ in given)
        traffic = (
            Traffic(mixed, 2 + 2 * self.taps, 4 + 4 * self.taps, units=self.head_units),
            Traffic(self.values, 8, 14, units=self.head_units),
        )
        products.append(Matmul(("out.weight",)))
        launches = 20 + 6 * self.taps
        yield Operation("attention", tuple(products), traffic=traffic, launches=launches)
        each = 2 * CHUNK + 3 * self.key_dim if self.delta else CHUNK + 2 * self.key_dim
        moved, state = 2 * (width + self.values), self.values * self.key_dim
        yield Operation("core", core=Scan(self.values * each, moved, CHUNK, state), launches=12)

    def saved(self, shape: Shape) -> Iterator[Saved]:
        """Yield normed rows, projected and convolved ones, decays, and the output at its gate.

        The scan keeps what it reads alone and runs again in backward.
        """
        given = list(self._projections())
        read = tuple(f"{n}_{'in' if rank is None else 'down'}.weight" for n, _, rank in given)
        yield from saved_rows(read, shape)
        rows, width = shape.piece, shape.width
        for name, features, rank in given:
            part = features // shape.tp
            if rank is not None:
                size = rows * rank * width
                by = (f"{name}_in.weight",)
                yield Saved(f"{name}_down", size, module="attention", operand=by)
            if (name, self.gate) != ("gate", "sigmoid"):  # of which what it gives is enough
                yield Saved(name, rows * part * width, module="attention")
            if name in "qkv":
                yield Saved(f"{name}.convolved", rows * part * width, module="attention")
        heads, small = self.value_heads // shape.tp, self.value_heads + self.decays
        yield Saved("decays", small // shape.tp * STATISTIC, module="attention")
        values = rows * self.values // shape.tp * width
        yield Saved("scanned", values, module="attention")
        yield Saved("norm.statistic", rows * heads * STATISTIC, module="norms")
        yield Saved("norm.output", values, frozenset(("norms",)), module="norms")
        yield Saved("gate.active", values, module="attention")
        yield Saved("gated", values, module="attention", operand=("out.weight",))
        if shape.cp > 1:
            reach = 2 * (self.taps - 1) * (2 * self.keys + self.values) // shape.tp
            yield Saved("before", reach * width, module="attention")

    def shrunk(self, by: Sizes) -> Self:
        """Return at most two value heads for each of few key heads, of few dims and ranks."""
        heads = small_heads(self.key_heads, by)
        ranks = {n: SMALL_HEAD for n in ("decay_rank", "gate_rank") if getattr(self, n) is not None}
        shared = min(self.value_heads // self.key_heads, 2)
        sizes = {"key_heads": heads, "value_heads": heads * shared, "key_dim": SMALL_HEAD}
        return self.model_copy(update=sizes | ranks | {"value_dim": SMALL_HEAD + 2})
