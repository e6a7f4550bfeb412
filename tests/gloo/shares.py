"""Three training steps on ranks that share weights, gradients and state, beside one rank's."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from moefold.comm.world import World
from moefold.data.batch import MicroBatch, pack
from moefold.layers.placement import Box
from moefold.layers.unshard import unit_of
from moefold.mesh.folding import Folding
from moefold.model.config import Decoder
from moefold.model.init import initial_values
from moefold.moe.config import Bias
from moefold.optim.base import Optimizer
from moefold.optim.config import AdamW, AdamWRule, Lion, Muon, Sgd
from moefold.optim.norm import clip_scale
from moefold.parallel import apply
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import LocalSlice, ShardedState
from moefold.training.evaluate import evaluate
from moefold.training.step import gradients
from tests.cpu import small
from tests.gloo.harness import Reference, run_ranks

CLIP, STEPS, CHUNK = 0.5, 3, 16
OPTIMIZERS = {
    "adamw": AdamW(lr=1e-2, clip_norm=CLIP),
    "adamw fp8": AdamW(lr=1e-2, clip_norm=CLIP, moments="fp8", moment_group=8),
    "muon": Muon(lr=1e-2, clip_norm=CLIP, rest=AdamWRule(lr=1e-2)),
    "lion": Lion(lr=1e-2, clip_norm=CLIP),
    "sgd": Sgd(lr=1e-1, clip_norm=CLIP, nesterov=True, weight_decay=0.1),
}
DECODERS = {
    "small": small.decoder(init_std=0.3),
    "tied": small.decoder(init_std=0.3, tied=True),
    "latent": small.decoder(
        small.MLA,
        small.Dense(width=24),
        small.moe(router=small.DEEP, balance=(*small.TERMS, Bias())),
        init_std=0.3,
    ),
}
KINDS = ("gradients", "weights", "states")


@dataclass(frozen=True)
class Case:
    """A layout, what is trained in it, and how."""

    sizes: str = ""
    zero: int = 1
    optim: str = "adamw"
    model: str = "small"
    micro_batches: int = 4
    more: tuple[tuple[str, Any], ...] = ()
    """Further fields of the layout."""

    def __str__(self) -> str:
        more = [str(value) for _, value in self.more]
        return "-".join([*self.sizes.split(), f"zero{self.zero}", self.optim, self.model, *more])

    @property
    def layout(self) -> Layout:
        """The layout's record."""
        given = {"sizes": self.sizes, "zero": self.zero, **dict(self.more)}
        if isinstance(given.get("schedule"), str):
            given["schedule"] = {"kind": given["schedule"]}
        return Layout.model_validate(given)

    @property
    def alone(self) -> "Case":
        """This case on one rank."""
        return Case("", 0, self.optim, self.model, self.micro_batches)


Place = tuple[str, str, Box]
"""Kind, name and box of a piece."""


@dataclass
class Seen:
    """What one rank saw of a case."""

    figures: list[tuple[float, ...]] = field(default_factory=list)
    """Loss, gradient norm and clipping factor of each step; the evaluation's loss."""
    pieces: dict[Place, tuple[Tensor, bool]] = field(default_factory=dict)
    """Values, and whether this rank states them."""

    def keep(self, kind: str, here: Iterable[LocalSlice]) -> None:
        """Keep copies of what is here."""
        for held in here:
            self.pieces[kind, held.name, held.box] = (
                held.tensor.detach().clone(),
                held.is_first,
            )


@lru_cache
def batches(count: int) -> list[MicroBatch]:
    """Return micro-batches of documents and padding rows, of unequal numbers of labels."""
    drawn = torch.Generator().manual_seed(0)
    found = []
    for number in range(count):
        lengths = ((9, 5, 8), (7, 3), (13, 8, 2))[number % 3]
        texts = [torch.randint(0, small.VOCAB, (n,), generator=drawn).tolist() for n in lengths]
        found.append(pack(texts, pad_to=24, first_token=24 * number))
    return found


def opened(
    case: Case, ranks: int, precision: Any = "fp64", frozen: Sequence[str] = ()
) -> ShardedState:
    """Build this rank's share of a model, with values; ``frozen`` units are not trained."""
    record: Decoder = DECODERS[case.model]
    folding = Folding(case.layout.split, ranks)
    world = World.open(folding, "cpu", 30) if ranks > 1 else World.single()
    parts = apply.build_parts(record, precision, case.layout, world, "meta")
    for name, parameter in parts.model.named_parameters():
        parameter.requires_grad_(unit_of(name) not in frozen)
    data = ShardedState(parts)
    data.fill(initial_values(record, 1))
    return data


def own(case: Case, data: ShardedState) -> Sequence[MicroBatch]:
    """Return the micro-batches of this data rank."""
    world = data.parts.world
    return batches(case.micro_batches)[world.attention.dp :: world.folding.dp]


def update(
    data: ShardedState, optimizer: Optimizer, norm: float, clip: float | None = CLIP
) -> float:
    """Make one update; returns the clipping factor."""
    scale = clip_scale(norm, clip)
    optimizer.step(scale)
    data.end_step()
    return scale


def train(case: Case, ranks: int) -> Seen:
    """Make three steps and return what this rank saw."""
    data = opened(case, ranks)
    optimizer, mine, seen = data.optimizer(OPTIMIZERS[case.optim]), own(case, data), Seen()
    for step in range(STEPS):
        figures = gradients(data, mine, CHUNK)
        if step == 0:
            seen.keep("gradients", data.gradients())
        scale = update(data, optimizer, figures.grad_norm)
        seen.figures.append((figures.lm_loss, figures.grad_norm, scale))
    (total,), labels, _ = evaluate(data.parts, mine, CHUNK)
    seen.figures.append((total / labels,))
    seen.keep("weights", data.weights())
    seen.keep("states", data.optimizer_state(optimizer))
    return seen


Told = dict[str, Any]
"""What a rank tells of a case: figures, and of each piece its error, whether this rank states it,
and a digest of its bits."""


def told(case: Case, ranks: int) -> Told:
    """Return what this rank saw beside one rank's run."""
    seen, reference = train(case, ranks), wanted(case.alone)
    pieces = {}
    for (kind, name, box), (values, first) in seen.pieces.items():
        whole = reference[1][kind, name]
        there = whole[tuple(slice(*ends) for ends in box)]
        error = float((values.double() - there.double()).norm() / whole.double().norm())
        raw = values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        pieces[kind, name, box] = error, first, hashlib.sha256(raw).hexdigest()
    return {"figures": seen.figures, "wanted": reference[0], "pieces": pieces}


@Reference
def wanted(case: Case) -> tuple[list[tuple[float, ...]], dict[tuple[str, str], Tensor]]:
    """Return figures and whole tensors of one rank's run."""
    seen = train(case, 1)
    return seen.figures, {place[:2]: values for place, (values, _) in seen.pieces.items()}


def of_cases(rank: int, cases: Sequence[Case], ranks: int) -> list[Told]:
    """Run cases one after another; called on every rank."""
    return [told(case, ranks) for case in cases]


@cache
def outcomes(cases: tuple[Case, ...], ranks: int) -> dict[Case, list[Told]]:
    """Return what each rank told of each case."""
    for case in cases:
        wanted(case.alone)
    by_rank = run_ranks(of_cases, ranks, cases, ranks, time_out_s=120, references=[wanted])
    return dict(zip(cases, zip(*by_rank, strict=True), strict=True))  # type: ignore[arg-type]
