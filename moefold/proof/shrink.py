"""Shrinks any run, keeping its kinds of parts, until it can be proved on a laptop.

Kept: the pattern of layers, kinds of attention and feed-forward, norms on queries and keys, biases,
groups of experts, shared experts, capacity, tied embeddings, every router term. Shrunk: sizes.
Imports no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moefold.config.base import Record
from moefold.data.config import Chat, Preferences
from moefold.kernels.quantise.config import Quantise
from moefold.layers.config import Precision
from moefold.mesh.config import Sizes
from moefold.model.config import Block, Decoder, to_stacks
from moefold.optim.config import Optim
from moefold.parallel.config import Layout
from moefold.proof.case import Subject
from moefold.run import Run
from moefold.spec.layer import LayerSpec, round_up
from moefold.spec.quantised import cut_violations, moment_violations

HIDDEN = 16
VOCAB = 64
ROWS = 32
BLOCKS = 4, 2
"""Elements of a quantised block, few enough for several per matrix; the second is a fallback."""
CLIP = 0.05
"""``clip_norm`` of a shrunk run that clips: always exceeded, so that the clip factor matters."""
LEARNING_RATE = 0.01
STD = 0.3
LOW_PRECISION_STD = 0.2
"""Scale of weights: large enough for every part of the model to affect the loss; and for narrow
formats, whose roundings larger weights magnify from layer to layer."""
LOW_PRECISION_EPS = 0.1
"""Adam's eps in narrow formats: if smaller, the first update is a sign, which a rounding flips."""


@dataclass(frozen=True)
class SizeRequirements:
    """Requirements of several layouts on model sizes."""

    divisors: Sizes
    """Least common multiple of each axis's sizes, by which dims must be divisible."""
    stages: int = 1
    """Number of stages of the longest pipeline."""
    named_layers: int | None = None
    """Number of layers, if a layout lists its stages explicitly."""

    @classmethod
    def of(cls, layouts: Sequence[Layout]) -> "SizeRequirements":
        """Return the joint requirements of several layouts."""
        sizes = [layout.split for layout in layouts]
        axes = {a: math.lcm(*(getattr(s, a) for s in sizes)) for a in ("tp", "cp", "ep", "etp")}
        stated = [layout.stated_stages for layout in layouts]
        named = [stages.layers for stages in stated if stages is not None]
        stages = max(size.pp * size.vpp for size in sizes)
        return cls(Sizes(**axes), stages, max(named, default=None))


def shrink(run: Run, layouts: Sequence[Layout], precision: Precision = "fp64") -> Subject:
    """Return the shrunk subject of a run's proof, for which all of ``layouts`` are legal."""
    needs = SizeRequirements.of(layouts)
    rows = round_up(ROWS, needs.divisors.tp * 2 * needs.divisors.cp)
    decoder = small_decoder(for_proof(run.decoder), needs)
    optim = small_optimizer(run.optim)
    # Use the first sizes of quantised blocks, and of groups of moments, that no layout cuts.
    quantise = decoder.quantise
    if isinstance(quantise, Quantise):
        for block in BLOCKS:
            changes = {"keep_first": 0, "keep_last": 0, "keep": (), "block": block}
            decoder = decoder.model_copy(update={"quantise": quantise.model_copy(update=changes)})
            if not any(True for layout in layouts for _ in cut_violations(decoder, layout, rows)):
                break
    for size in BLOCKS if isinstance(optim, Optim) and optim.group else ():
        optim = optim.model_copy(update={"moment_group": size})
        assert isinstance(optim, Optim)
        cut = (v for layout in layouts for v in moment_violations(decoder, optim, layout, rows))
        if not any(True for _ in cut):
            break
    if precision != "fp64":
        decoder = decoder.model_copy(update={"init_std": LOW_PRECISION_STD})
        if "eps" in type(optim).model_fields:
            optim = optim.model_copy(update={"eps": LOW_PRECISION_EPS})
    masked = any(isinstance(source, Chat | Preferences) for source in run.data.train)
    more = {"precision": precision, "loss": run.train.loss, "masked": masked}
    return Subject(decoder, optim, rows=rows, **more)


def for_proof(decoder: Decoder) -> Decoder:
    """Return a decoder whose quantisation does not depend on the layout, as proofs require."""
    if not isinstance(decoder.quantise, Quantise):
        return decoder
    changed = decoder.quantise.model_copy(update={"rows": "micro_batch"})
    return decoder.model_copy(update={"quantise": changed})


def small_optimizer(optim: Record) -> Record:
    """Return an optimizer with a high learning rate that, if it clips, always clips.

    Groups of parameters keep the ratio of their rate to the optimizer's.
    """
    changes: dict[str, Any] = {"lr": LEARNING_RATE}
    if getattr(optim, "clip_norm", None) is not None:
        changes["clip_norm"] = CLIP
    if isinstance(optim, Optim) and optim.groups and optim.lr:
        times = LEARNING_RATE / optim.lr
        changes["groups"] = tuple(
            group.model_copy(update={"lr": None if group.lr is None else group.lr * times})
            for group in optim.groups
        )
    return optim.model_copy(update=changes)


def small_decoder(decoder: Decoder, needs: SizeRequirements) -> Decoder:
    """Return a small decoder with all kinds of layers of the original."""
    main = decoder.blocks[: decoder.layers]
    later = decoder.blocks[decoder.layers :]
    blocks = (*_select_blocks(main, needs), *later)
    small = []
    for block in blocks:
        attention = small_part(block.attention, needs)
        ffn = small_part(block.ffn, needs)
        small.append(block.model_copy(update={"attention": attention, "ffn": ffn}))
    changed = {
        "vocab": small_vocabulary(decoder.vocab, needs.divisors.tp),
        "hidden": HIDDEN,
        "stacks": to_stacks(small),
        "init_std": STD,
        "init_out_scale": 1.0,
    }
    return decoder.model_copy(update=changed)


def small_vocabulary(vocab: int, tp: int) -> int:
    """Return a small number of tokens that tp divides if it divides ``vocab``, else one more."""
    small = round_up(VOCAB, tp)
    return small if vocab % tp == 0 else small + 1


def _select_blocks(blocks: tuple[Block, ...], needs: SizeRequirements) -> tuple[Block, ...]:
    """Return as many layers as the layouts require, in order, each kind among them."""
    if needs.named_layers is not None:
        return blocks[: needs.named_layers]
    count = max(needs.stages, len(set(blocks)), min(len(blocks), 2))
    if count >= len(blocks):
        return blocks + blocks[-1:] * (count - len(blocks))
    chosen = {blocks.index(kind) for kind in set(blocks)}
    rest = [i for i in range(len(blocks)) if i not in chosen]
    step = len(rest) / max(count - len(chosen), 1)
    chosen |= {rest[int(n * step)] for n in range(count - len(chosen))}
    return tuple(blocks[i] for i in sorted(chosen))


def small_part(record: Record, needs: SizeRequirements) -> Record:
    """Return a layer's record with small sizes; unchanged if it is not a ``LayerSpec``."""
    return record.shrink(needs.divisors) if isinstance(record, LayerSpec) else record
