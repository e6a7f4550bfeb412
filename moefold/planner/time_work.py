"""What a micro-batch computes in one layer on one rank, before any rate: products, bytes, launches.

A kind of layer is described by one function per record class (``KINDS``), so that a new kind brings
its own. Bytes count each reading and writing of a tensor by an element-wise kernel, in bfloat16
unless a kernel works in fp32. Letters: t tokens of a micro-batch after cp, r = t / tp rows between
sub-layers, H hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any, NamedTuple

from moefold.config.base import Record
from moefold.layers.config import Dense, Gqa, Mla
from moefold.moe.config import Moe
from moefold.planner.case import Case
from moefold.planner.curves import Product
from moefold.planner.foreign import BiasedMoe, DeltaNet, Mamba2, Nothing, PlainMoe, Windowed
from moefold.planner.remember import remembered

BF16, FP32 = 2, 4
NORM_PASSES, NORM_PASSES_BACKWARD = 8, 12
"""Readings and writings of a row by two norms and two residual sums."""
PERMUTING = ("deep_ep", "hybrid_ep", "nccl_ep")
"""Dispatchers that permute rows themselves."""
ROUTER_PASSES = 25
"""The same of a row of scores: scores, top-k, map, counts, balance."""


class Core(NamedTuple):
    """Attention's own products."""

    flops: float
    length: float
    dim: int


@dataclass(frozen=True)
class Work:
    """One part of a layer, forward; backward repeats its products twice."""

    products: tuple[Product, ...] = ()
    cores: tuple[Core, ...] = ()
    moved: float = 0.0
    moved_backward: float = 0.0
    launches: float = 0.0
    weights: float = 0.0
    """Elements on this rank."""
    wide: bool = False
    """Whether products stay in bf16 whatever the recipe."""
    scanned: float = 0.0
    """Bytes that a scan over the sequence moves, at the least; the same backward, twice."""

    @cached_property
    def quantised(self) -> tuple[float, float]:
        """Elements that a narrow recipe quantises, forward and backward."""
        if self.wide:
            return 0.0, 0.0
        ins = sum(one.m * one.k * one.count for one in self.products)
        return ins, sum(one.m * one.n * one.count for one in self.products)


class Share(NamedTuple):
    """What of a micro-batch one rank has."""

    hidden: int
    seq: int
    sequences: int
    tp: int
    cp: int
    ep: int
    etp: int
    load: float
    fused: bool
    """Whether dispatch permutes rows itself."""

    @classmethod
    def of(cls, case: Case) -> "Share":
        """Return a case's."""
        sizes = case.sizes
        return cls(
            case.decoder.hidden, case.seq, case.micro_batch, sizes.tp, sizes.cp, sizes.ep,
            sizes.etp, case.load, case.dispatch in PERMUTING,
        )  # fmt: skip

    @property
    def dense(self) -> "Share":
        """The same for what is no mixture: where experts lie changes nothing."""
        return self._replace(ep=1, etp=1, load=1.0, fused=False)

    def of_half(self, record: Record) -> "Share":
        """Return what of it decides a half of a layer."""
        return self if isinstance(record, Moe) else self.dense

    @property
    def t(self) -> float:
        """Tokens of a micro-batch after cp."""
        return self.seq * self.sequences / self.cp

    @property
    def r(self) -> float:
        """Rows between sub-layers."""
        return self.t / self.tp


Parts = dict[str, Work]


@remembered(1 << 14)
def half(record: Record, share: Share) -> Parts:
    """Return the parts of a half of a block; not to be changed."""
    return _kind(record)(record, share)


def norms(share: Share, halves: int) -> Parts:
    """Return the norms of a block and its residual sums."""
    row = share.r * share.hidden * BF16 * halves / 2
    moved, back = NORM_PASSES * row, NORM_PASSES_BACKWARD * row
    return {"norms": Work(moved=moved, moved_backward=back, launches=2 * halves)}


def head(vocab: int, share: Share, chunk: int | None = None) -> Parts:
    """Return the head and the loss: logits in fp32, which softmax and its gradient pass over.

    Args:
        vocab: columns of the logits.
        share: what the rank has.
        chunk: rows whose logits exist at once; None is all.
    """
    logits = share.t * vocab / share.tp
    rows = min(chunk or share.t, share.t)
    product = Product(rows, vocab / share.tp, share.hidden, share.t / rows)
    weights = share.hidden * vocab / share.tp
    moved = 3 * logits * FP32
    return {"head": Work((product,), (), moved, moved, 8 * ceil(share.t / rows), weights, True)}


def joint(share: Share) -> Parts:
    """Return the projection that joins a multi-token layer's two inputs."""
    product = Product(share.r, share.hidden, 2 * share.hidden)
    return {"attention": Work((product,), launches=4, weights=2 * share.hidden**2)}


def _kind(record: Record) -> Callable[[Any, Share], Parts]:
    for kind in type(record).__mro__:
        if kind in KINDS:
            return KINDS[kind]
    raise ValueError(
        f"the time of {type(record).__name__} is not planned: inherit from a kind that is, or set "
        f"moefold.planner.time_work.KINDS[{type(record).__name__}]"
    )


def _gqa(record: Gqa, share: Share, length: float | None = None) -> Parts:
    d, tp, t, hidden = record.head_dim, share.tp, share.t, share.hidden
    kv = max(record.kv_heads, tp)
    into, out = (record.heads + 2 * kv) * d / tp, record.heads * d / tp
    pairs = share.seq / 2 if length is None else length
    core = Core(4 * t * pairs * out, 2 * pairs, d)
    turned = t * (record.heads + kv) * d / tp * BF16 * 2
    moved = turned * (1 if record.qk_norm == "none" else 2) + t * into * BF16
    products = (Product(t, into, hidden), Product(t, hidden, out))
    return {
        "attention": Work(
            products, (), moved, 1.5 * moved, 12, hidden * (into + out)
        ),
        "core": Work(cores=(core,), launches=1),
    }  # fmt: skip


def _windowed(record: Windowed, share: Share) -> Parts:
    window = min(record.window, share.seq)
    return _gqa(record, share, window - window**2 / (2 * share.seq))


def _mla(record: Mla, share: Share) -> Parts:
    hidden, t, r, heads = share.hidden, share.t, share.r, record.heads / share.tp
    qk, rank = record.nope_dim + record.rope_dim, record.q_rank
    down = record.kv_rank + record.rope_dim
    products = [Product(r, down, hidden), Product(t, hidden, heads * record.v_dim)]
    up = [Product(t, heads * (record.nope_dim + record.v_dim), record.kv_rank)]
    if rank is None:
        products.append(Product(t, heads * qk, hidden))
    else:
        products.append(Product(r, rank, hidden))
        up.append(Product(t, heads * qk, rank))
    turned = t * heads * (2 * qk + record.v_dim) * BF16 * 2
    latents = r * (down + (rank or 0)) * BF16 * 4
    pairs = share.seq / 2
    core = Core(2 * t * pairs * heads * (qk + record.v_dim), share.seq, min(128, record.v_dim))
    return {
        "attention": Work(tuple(products), (), latents, 1.5 * latents, 16, _weights(products)),
        "mla_up": Work(tuple(up), (), turned, turned, 8, _weights(up)),
        "core": Work(cores=(core,), launches=1),
    }


def _mamba(record: Mamba2, share: Share) -> Parts:
    t, hidden, tp = share.t, share.hidden, share.tp
    products = (
        Product(t, record.projected / tp, hidden),
        Product(t, hidden, record.width / tp),
    )
    mixed = t * (record.projected + record.width) / tp * BF16
    core = Core(2 * t * record.width / tp * (record.chunk + 2 * record.state), 4096, 64)
    return {
        "attention": Work(products, (), mixed, 2 * mixed, 12, _weights(products)),
        "core": Work(cores=(core,), launches=6, scanned=2 * mixed),
    }


def _delta(record: DeltaNet, share: Share) -> Parts:
    t, hidden, tp = share.t, share.hidden, share.tp
    keys, values = record.key_heads * record.key_dim, record.value_heads * record.value_dim
    into = (2 * keys + 2 * values + 2 * record.value_heads) / tp
    products = (Product(t, into, hidden), Product(t, hidden, values / tp))
    core = Core(2 * t * values / tp * (2 * record.chunk + 3 * record.key_dim), 4096, 64)
    moved = t * (into + values / tp) * BF16
    return {
        "attention": Work(products, (), moved, 2 * moved, 20, _weights(products)),
        "core": Work(cores=(core,), launches=12, scanned=2 * moved),
    }


def _ffn(name: str, width: float, rows: float, share: Share, gated: bool = True) -> Parts:
    wide = (2 if gated else 1) * width
    products = (Product(rows, wide, share.hidden), Product(rows, share.hidden, width))
    act = rows * BF16
    moved, back = act * (wide + width), act * (2 * wide + width)
    return {name: Work(products, (), moved, back, 4, _weights(products))}


def _dense(record: Dense, share: Share) -> Parts:
    return _ffn("ffn", record.width / share.tp, share.t, share)


def _moe(record: Moe, share: Share) -> Parts:
    plain = isinstance(record, PlainMoe)
    latent = record.latent if isinstance(record, PlainMoe) else None
    r, hidden, k = share.r, latent or share.hidden, record.router.top_k
    experts = record.router.experts
    local = experts / share.ep
    rows = r * k * share.etp * share.load
    width, gates = record.width / share.etp, 1 if plain else 2
    m = max(1.0, rows / local)
    products = (Product(m, gates * width, hidden, local), Product(m, hidden, width, local))
    act = rows * width * BF16
    scores = Product(r, experts, share.hidden)
    wide, back = act * (gates + 1), act * (2 * gates + 1)
    if isinstance(record, BiasedMoe):
        # Biases are added, gates clamped and rows scaled in kernels of their own.
        out = rows * hidden * BF16
        wide, back = wide + 16 * act + 6 * out, back + 24 * act + 8 * out
    copied = rows * hidden * BF16 * 2 * (2 if share.fused else 4)
    found = {
        "router": Work(
            (scores,), (), ROUTER_PASSES * r * experts * FP32, ROUTER_PASSES * r * experts * FP32,
            15, experts * share.hidden, True,
        ),
        "permute": Work((), (), copied, copied, 8 if share.fused else 20),
        "experts": Work(products, (), 0, 0, 2 * local, _weights(products)),
        "moe_act": Work((), (), wide, back, 2),
    }  # fmt: skip
    if latent:
        narrow = (Product(r, latent, share.hidden), Product(r, share.hidden, latent))
        found["latent"] = Work(narrow, (), 0, 0, 4, _weights(narrow))
    if record.shared is not None:
        width = record.shared.width / share.tp
        found |= _ffn("shared", width, share.t, share, not plain)
    return found


def _nothing(record: Nothing, share: Share) -> Parts:
    return {}


OFFLOADED = {
    "norms": ("attention",),
    "attention": ("attention", "mla_up", "core"),
    "mla_up": ("mla_up",),
    "ffn": ("ffn",),
    "shared": ("shared",),
    "experts": ("experts",),
    "moe": ("experts",),
    "moe_act": ("moe_act",),
    "block": ("attention", "mla_up", "ffn", "shared", "experts"),
}
"""Parts of the work whose inputs each module of an offload policy sends to the host."""


def offload_bytes(parts: Parts, modules: frozenset[str]) -> float:
    """Return the bytes of a layer that go to the host: inputs of products or activations."""
    names = {name for module in modules for name in OFFLOADED[module]} & set(parts)
    total = 0.0
    for name in names:
        work = parts[name]
        total += BF16 * work.quantised[0] if work.products else work.moved / 2
    return total


def _weights(products: tuple[Product, ...] | list[Product]) -> float:
    return sum(one.n * one.k * one.count for one in products)


KINDS: dict[type[Record], Callable[[Any, Share], Parts]] = {
    Gqa: _gqa,
    Windowed: _windowed,
    Mla: _mla,
    Mamba2: _mamba,
    DeltaNet: _delta,
    Dense: _dense,
    Moe: _moe,
    Nothing: _nothing,
}
"""How each kind of layer is described."""
