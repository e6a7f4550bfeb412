"""Makes any run small enough to prove on a laptop, and keeps what kinds of parts it is made of.

Kept: the pattern of layers, kinds of attention and feed-forward, norms on queries and keys, biases,
groups of experts, shared experts, capacity, tied embeddings, every router term. Made small: sizes.
Torch-free.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from moefold.config.base import Record
from moefold.layers.config import Dense, Gqa, Mla, Precision
from moefold.mesh.config import Sizes
from moefold.model.config import Block, Decoder, Stack
from moefold.moe.config import Groups, Moe, Router
from moefold.parallel.config import Layout
from moefold.proof.case import Subject
from moefold.run import Run

HIDDEN, HEAD, WIDTH, VOCAB, ROWS = 16, 4, 16, 64, 32
EXPERTS, TOP_K, GROUPS = 8, 4, 4
CLIP = 0.05
"""Largest gradient norm of a shrunk run that clips: always exceeded, so that the factor is seen."""
RATE = 0.01


@dataclass(frozen=True)
class Asked:
    """What some layouts ask a model's dims to be divisible by."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    stages: int = 1
    """Stages of the longest pipeline."""
    named_layers: int | None = None
    """Layers, where a layout names each stage's."""

    @classmethod
    def by(cls, layouts: Sequence[Layout]) -> "Asked":
        """Return what several layouts ask together."""
        sizes: list[Sizes] = [layout.split for layout in layouts]
        axes = {a: math.lcm(*(getattr(s, a) for s in sizes)) for a in ("tp", "cp", "ep", "etp")}
        named = [layout.stages_of(0).layers for layout in layouts if layout.stages is not None]
        stages = max(size.pp * size.vpp for size in sizes)
        return cls(**axes, stages=stages, named_layers=max(named, default=None))


def shrink(run: Run, layouts: Sequence[Layout], precision: Precision = "fp64") -> Subject:
    """Return what a proof of a run computes, small and of the same kinds.

    Args:
        run: the run.
        layouts: layouts that must be legal for the result.
        precision: number format of the proof.
    """
    asked = Asked.by(layouts)
    return Subject(
        small_decoder(run.decoder(), asked),
        small_optimizer(run.optim),
        rows=_up(ROWS, asked.tp * 2 * asked.cp),
        precision=precision,
    )


def small_optimizer(optim: Record) -> Record:
    """Return an optimizer that moves weights visibly, and clips where it ever does."""
    clips = getattr(optim, "clip_norm", None) is not None
    return optim.model_copy(update={"lr": RATE} | ({"clip_norm": CLIP} if clips else {}))


def small_decoder(decoder: Decoder, asked: Asked) -> Decoder:
    """Return a small decoder with each kind of layer that the given one has."""
    blocks = _some(decoder.blocks, asked)
    small = tuple(
        Block(attention=small_part(b.attention, asked), ffn=small_part(b.ffn, asked))
        for b in blocks
    )
    stacks = tuple(Stack(repeat=len(list(same)), blocks=(b,)) for b, same in groupby(small))
    changed = {
        "vocab": _up(VOCAB, asked.tp),
        "hidden": HIDDEN,
        "stacks": stacks,
        # Large enough that every part of the model matters to the loss.
        "init_std": 0.3,
        "init_out_scale": 1.0,
    }
    return decoder.model_copy(update=changed)


def _some(blocks: tuple[Block, ...], asked: Asked) -> tuple[Block, ...]:
    """Return as many layers as layouts ask, in order, each kind among them."""
    if asked.named_layers is not None:
        return blocks[: asked.named_layers]
    wanted = max(asked.stages, len(set(blocks)), min(len(blocks), 2))
    if wanted >= len(blocks):
        return blocks + blocks[-1:] * (wanted - len(blocks))
    kept = {blocks.index(kind) for kind in set(blocks)}
    rest = [i for i in range(len(blocks)) if i not in kept]
    step = len(rest) / max(wanted - len(kept), 1)
    kept |= {rest[int(n * step)] for n in range(wanted - len(kept))}
    return tuple(blocks[i] for i in sorted(kept))


def small_part(record: Record, asked: Asked) -> Record:
    """Return a layer's record with small sizes; of a kind that is not in ``SMALL``, itself."""
    make = next((SMALL[kind] for kind in type(record).__mro__ if kind in SMALL), None)
    return record if make is None else make(record, asked)


def _gqa(record: Gqa, asked: Asked) -> Gqa:
    shared = min(record.heads // record.kv_heads, 2)
    # Context ranks may share heads that tensor ranks share already.
    kv_heads = _up(min(record.kv_heads, 2), math.gcd(asked.tp * asked.cp, record.kv_heads))
    kv_heads = _up(kv_heads, asked.tp)
    changed = {"heads": kv_heads * shared, "kv_heads": kv_heads, "head_dim": HEAD}
    return record.model_copy(update=changed)


def _mla(record: Mla, asked: Asked) -> Mla:
    heads = _up(_up(2, math.gcd(asked.tp * asked.cp, record.heads)), asked.tp)
    changed = {"heads": heads, "kv_rank": 8, "nope_dim": HEAD, "rope_dim": HEAD, "v_dim": 6}
    if record.q_rank is not None:
        changed["q_rank"] = 8
    return record.model_copy(update=changed)


def _dense(record: Dense, asked: Asked) -> Dense:
    return record.model_copy(update={"width": _up(WIDTH, asked.tp)})


def _moe(record: Moe, asked: Asked) -> Moe:
    changed: dict[str, Any] = {"width": _up(WIDTH, asked.etp)}
    changed["router"] = _router(record.router, asked)
    if record.shared is not None:
        width = _up(WIDTH, asked.tp)
        changed["shared"] = record.shared.model_copy(update={"width": width})
    return record.model_copy(update=changed)


def _router(record: Router, asked: Asked) -> Router:
    """Return a small router: of as many experts as ranks ask, half of them chosen at most."""
    top_k = min(record.top_k, TOP_K)
    count = min(record.groups.count, GROUPS) if record.groups else 1
    if record.groups and record.experts % count:
        count = record.groups.count
    experts = max(_up(min(record.experts, EXPERTS), math.lcm(asked.ep, count)), top_k)
    experts = _up(experts, math.lcm(asked.ep, count))
    changed: dict[str, Any] = {"experts": experts, "top_k": top_k}
    if record.groups is not None:
        changed["groups"] = _groups(record.groups, count, experts, top_k)
    return record.model_copy(update=changed)


def _groups(record: Groups, count: int, experts: int, top_k: int) -> Groups:
    size = experts // count
    keep = max(1, record.keep * count // record.count, -(-top_k // size))
    best = min(record.best, size)
    return record.model_copy(update={"count": count, "keep": min(keep, count), "best": best})


def _up(number: int, multiple: int) -> int:
    """Return the least multiple that is not below a number."""
    return -(-number // multiple) * multiple


SMALL: dict[type, Callable[[Any, Asked], Record]] = {
    Gqa: _gqa,
    Mla: _mla,
    Dense: _dense,
    Moe: _moe,
}
"""How a kind of layer is made small. A kind from outside adds its own, or is taken as it is."""
