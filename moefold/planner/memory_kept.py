"""What a layer keeps for backward, tensor by tensor, as its autograd functions save it.

T rows of a rank between sub-layers, P rows its tensor group holds together, R rows after dispatch,
D hidden, H query heads, G key-value heads, d and v dims per head, F width, E experts, K per token.

Weights and their copies are not among it, nor what a whole pass shares (rotary angles, token ids).
``tests/cpu/test_planner_kept.py`` holds every line against what a pass really leaves alive.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from moefold.config.base import Record
from moefold.layers.config import Context, Dense, Gathered, Gqa, Mla, Ulysses
from moefold.model.config import Block
from moefold.moe.config import Aux, Moe
from moefold.planner.case import RING, Case, Module, sharing_heads

STATISTIC = 4
"""Bytes of a statistic, score or weight of routing: fp32 whatever the compute dtype."""
INDEX = 8
"""Bytes of an expert's id, of a row's place and of a token's."""

Modules = frozenset[Module]
NOTHING: Modules = frozenset()
NORMS: Modules = frozenset(("norms",))
CORE: Modules = frozenset(("attention",))
UP: Modules = frozenset(("mla_up",))


@dataclass(frozen=True)
class Kept:
    """One tensor that stays alive between a layer's forward and its backward."""

    name: str
    bytes: int
    dropped: Modules = NOTHING
    """Recomputing one of these drops it; recomputing whole blocks drops all but the input."""
    held: Modules = NOTHING
    """Recomputing one of these keeps it all the same, as an input of what is made again."""
    only: Modules = NOTHING
    """It is kept only where one of these is recomputed, as its input; nothing: always."""
    saved: bool = True
    """Whether autograd saves it; what is not saved is a decision that any second run needs."""
    module: Module = "block"
    """What it belongs to, for offloading."""

    def stays(self, recompute: Modules) -> bool:
        """Return whether it is kept under a recompute policy."""
        if "block" in recompute:
            return self.name == "input" or not self.saved
        if self.only and not self.only & recompute:
            return False
        return bool(self.held & recompute) or not self.dropped & recompute


@dataclass(frozen=True)
class Shape:
    """Numbers of rows and of bytes on the fullest rank of a layer."""

    hidden: int
    rows: int
    """T."""
    tp: int = 1
    etp: int = 1
    load: float = 1.0
    """Rows of the most loaded expert rank over the mean."""
    width: int = 2
    """Bytes of an element of the compute dtype."""
    cp: int = 1
    context: Context = RING
    """How ``cp`` ranks see each other's rows."""

    @classmethod
    def of(cls, case: Case) -> "Shape":
        """Return the shape of a case's layers."""
        sizes, width = case.sizes, 4 if case.numbers.recipe == "fp32" else 2
        # NCCL EP has room for all rows of all ranks, filled or not.
        load = float(sizes.ep) if case.dispatch == "nccl_ep" else case.load
        return cls(
            case.decoder.hidden, case.rows, sizes.tp, sizes.etp, load, width, sizes.cp,
            case.context,
        )  # fmt: skip

    @property
    def piece(self) -> int:
        """P: rows that attention and a dense feed-forward see."""
        return self.rows * self.tp

    @property
    def gathered(self) -> int:
        """Context ranks whose keys and values each of them gathers."""
        return self.cp if isinstance(self.context, Gathered) else 1

    @property
    def exchanged(self) -> bool:
        """Whether context ranks attend with a share of the heads of more rows than their own."""
        return sharing_heads(self.context, self.cp) > 1

    @property
    def pads(self) -> bool:
        """Whether attention pads values that are narrower than keys: block by block it does not."""
        return self.cp == 1 or isinstance(self.context, Ulysses)

    def received(self, top_k: int) -> int:
        """R: rows that the most loaded rank's experts take."""
        return round(self.rows * top_k * self.etp * self.load)


def kept(block: Block, shape: Shape) -> tuple[Kept, ...]:
    """Return what one block keeps if nothing is recomputed, as Moefold's layers do."""
    first = Kept("input", shape.rows * shape.hidden * shape.width)
    return (first, *_of(block.attention, shape), *_of(block.ffn, shape))


def kept_bytes(parts: Iterable[Kept], recompute: Modules = NOTHING) -> int:
    """Return the bytes that stay under a recompute policy."""
    return sum(part.bytes for part in parts if part.stays(recompute))


def _of(record: Record, shape: Shape) -> Iterator[Kept]:
    """Yield what a half of a block keeps: as its kind says, or as the kind it inherits from."""
    for kind in type(record).__mro__:
        if kind in KINDS:
            return KINDS[kind](record, shape)
    name = type(record).__name__
    raise ValueError(
        f"{name}'s memory is not planned: inherit from a kind that is, or set "
        f"moefold.planner.memory_kept.KINDS[{name}]"
    )


def _norm(
    name: str, rows: int, width: int, shape: Shape, held: Modules = NOTHING
) -> Iterator[Kept]:
    """The statistic of a norm and its output, which what follows keeps as an input."""
    yield Kept(f"{name}.statistic", rows * STATISTIC, module="norms")
    output = rows * width * shape.width
    yield Kept(f"{name}.output", output, NORMS, held, module="norms")


def _gqa(record: Gqa, shape: Shape) -> Iterator[Kept]:
    heads, groups, dim = record.heads // shape.tp, record.kv_heads // shape.tp, record.head_dim
    yield Kept("attention_norm.statistic", shape.rows * STATISTIC, module="norms")
    dropped: Modules = frozenset(("norms",)) if shape.tp == 1 else NOTHING
    normed = shape.piece * shape.hidden * shape.width
    yield Kept("attention_norm.output", normed, dropped, module="norms")
    for name, count in (("q", heads), ("k", groups)):
        if record.qk_norm != "none":
            per_row = count if record.qk_norm == "head" else 1
            yield Kept(f"{name}.projected", shape.piece * count * dim * shape.width)
            yield Kept(f"{name}_norm.statistic", shape.piece * per_row * STATISTIC)
    for name, count in (("q", heads), ("k", groups), ("v", groups)):
        yield from _read(name, shape.piece * count * dim * shape.width, shape)
    yield from _attended(heads, dim, dim, shape)


def _read(
    name: str, size: int, shape: Shape, dropped: Modules = NOTHING, copied: bool = False
) -> Iterator[Kept]:
    """Queries, keys or values: where attention reads a copy (``copied``, or what context ranks
    gather or exchange), they stay only to make that again.
    """
    gathered = 1 if name == "q" else shape.gathered
    moved = gathered > 1 or shape.exchanged
    only = CORE if moved or copied else NOTHING
    yield Kept(name, size, dropped, only=only, module="attention")
    if moved:
        yield Kept(f"{name}.moved", size * gathered, CORE, module="attention")


def _attended(heads: int, qk_dim: int, v_dim: int, shape: Shape) -> Iterator[Kept]:
    """The output of attention and its statistics.

    Values narrower than keys are padded to their width, and so is the output, of which the
    projection then keeps a copy without padding; a copy too where heads go back for rows.
    """
    rows = shape.piece * heads
    yield Kept("attended", rows * v_dim * shape.width, module="attention")
    yield Kept("attended.statistic", rows * STATISTIC, CORE, module="attention")
    if v_dim < qk_dim and shape.pads:
        for name in ("v.padded", "attended.padded"):
            yield Kept(name, rows * qk_dim * shape.width, CORE, module="attention")
    elif shape.exchanged:
        yield Kept("attended.moved", rows * v_dim * shape.width, CORE, module="attention")


def _mla(record: Mla, shape: Shape) -> Iterator[Kept]:
    heads, qk_dim = record.heads // shape.tp, record.nope_dim + record.rope_dim
    piece, width = shape.piece, shape.width
    held = NOTHING if record.q_rank is not None else UP
    yield from _norm("attention_norm", shape.rows, shape.hidden, shape, held)
    yield Kept("kv_down", shape.rows * (record.kv_rank + record.rope_dim) * width)
    if record.q_rank is not None:
        yield Kept("q_down", shape.rows * record.q_rank * width)
    yield from _latents(record, shape)
    for name in ("q", "k"):
        yield from _read(name, piece * heads * qk_dim * width, shape, UP)
    padded = record.v_dim < qk_dim and shape.pads
    yield from _read("v", piece * heads * record.v_dim * width, shape, UP, copied=padded)
    yield from _attended(heads, qk_dim, record.v_dim, shape)


def _latents(record: Mla, shape: Shape) -> Iterator[Kept]:
    """The normed latents that the up-projections read: gathered under tp, all in one tensor."""
    ranks = {"q_norm": record.q_rank, "kv_norm": record.kv_rank}
    for name, rank in ranks.items():
        if rank is not None and shape.tp == 1:
            yield from _norm(name, shape.rows, rank, shape, UP)
        elif rank is not None:
            yield Kept(f"{name}.statistic", shape.rows * STATISTIC, module="norms")
    if shape.tp > 1:
        queries = record.q_rank or shape.hidden
        latent = queries + record.kv_rank + record.rope_dim
        yield Kept("latents.gathered", shape.piece * latent * shape.width)


def _dense(record: Dense, shape: Shape) -> Iterator[Kept]:
    yield Kept("residual", shape.rows * shape.hidden * shape.width)
    only: Modules = frozenset(("ffn",)) if shape.tp > 1 else NOTHING
    yield Kept("ffn_norm.statistic", shape.rows * STATISTIC, module="norms")
    normed = shape.rows * shape.hidden * shape.width
    yield Kept("ffn_norm.output", normed, NORMS, only=only, module="norms")
    yield from _gathered("ffn", shape)
    yield from _hidden("ffn", shape.piece, record.width // shape.tp, shape)


def _gathered(kind: Module, shape: Shape) -> Iterator[Kept]:
    """The tensor group's rows, which a feed-forward cut over tp reads."""
    if shape.tp > 1:
        size = shape.piece * shape.hidden * shape.width
        yield Kept(f"{kind}.gathered", size, frozenset((kind,)), module=kind)


def _hidden(kind: Module, rows: int, features: int, shape: Shape) -> Iterator[Kept]:
    """The pre-activation of a gated feed-forward; the activation is made again in any case."""
    size = rows * 2 * features * shape.width
    yield Kept(f"{kind}.hidden", size, frozenset((kind,)), module=kind)


def _moe(record: Moe, shape: Shape) -> Iterator[Kept]:
    yield Kept("residual", shape.rows * shape.hidden * shape.width)
    yield from _norm("ffn_norm", shape.rows, shape.hidden, shape)
    yield from _routing(record, shape)
    received = shape.received(record.router.top_k)
    rows_in = received * shape.hidden * shape.width
    yield Kept("experts.input", rows_in, module="experts")
    yield Kept("experts.weights", received * STATISTIC)
    yield from _hidden("experts", received, record.width // shape.etp, shape)
    if record.shared is not None:
        yield from _gathered("shared", shape)
        yield from _hidden("shared", shape.piece, record.shared.width // shape.tp, shape)
        if record.shared.gate:
            dropped: Modules = frozenset(("shared",))
            size = shape.rows * (shape.hidden + 1) * shape.width
            yield Kept("shared.gated", size, dropped, module="shared")
    yield Kept("combine.tokens", received * INDEX)
    yield Kept("dispatch.rows", shape.rows * record.router.top_k * INDEX)


def _routing(record: Moe, shape: Shape) -> Iterator[Kept]:
    """Scores, weights and choices of the router, and what its loss terms read."""
    router = record.router
    copies, scores = shape.rows * router.top_k, shape.rows * router.experts * STATISTIC
    yield Kept("router.scores", scores)
    yield Kept("router.chosen", copies * INDEX)
    if router.renormalise and router.order == "score_first":
        yield Kept("router.total", shape.rows * STATISTIC)
        yield Kept("router.weights", copies * STATISTIC)
    yield Kept("decision", copies * INDEX, saved=False)
    yield Kept("offsets", router.experts * 4, saved=False)
    if any(isinstance(term, Aux) for term in record.balance):
        yield Kept("balance.counts", router.experts * INDEX, saved=False)
        yield Kept("balance.share", router.experts * 8)


KINDS: dict[type[Record], Callable[[Any, Shape], Iterator[Kept]]] = {
    Gqa: _gqa,
    Mla: _mla,
    Dense: _dense,
    Moe: _moe,
}
"""What each kind of half keeps."""
