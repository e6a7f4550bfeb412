"""One rank's part of a case: gradients of a step, an evaluation, and three updates.

What it finds is kept by *kind*: ``gradients``, ``weights`` (what three steps changed) and
``optimizer/<state>``, each a tensor's piece and its place in the whole tensor.
"""

import re
from contextlib import nullcontext
from dataclasses import dataclass, field

from torch import Tensor

from moefold.comm.recorder import Record as Operation
from moefold.comm.recorder import Site
from moefold.comm.world import World
from moefold.config.slot import build
from moefold.data.batch import MicroBatch
from moefold.layers.placement import Box
from moefold.optim.base import Optimizer
from moefold.optim.norm import clip_scale
from moefold.parallel.apply import Placed
from moefold.parallel.apply import build as build_parts
from moefold.proof.case import Case
from moefold.proof.narrow import NarrowWatch
from moefold.proof.rows import fill, micro_batches
from moefold.proof.shuffle import Shuffled
from moefold.training.step import evaluate, gradients

STEPS = 3
LOSS_CHUNK = 24
"""Rows whose logits exist at once: less than a micro-batch, so that there are several chunks."""


@dataclass(frozen=True)
class Break:
    """Something done wrong on purpose, to show that a proof notices."""

    site: Site | None = None
    """The call-site, in its plain form, whose result is replaced on every rank each time."""
    how: str = "alone"
    """``alone``: by what it were had no other rank taken part; ``half``: by its half."""
    parameter: str = ""
    """The parameter whose first gradient is scaled on one rank."""
    rank: int = 0
    factor: float = 1.0

    @property
    def words(self) -> str:
        """What is wrong, in words."""
        if self.site is None:
            return f"gradient of {self.parameter} on rank {self.rank} times {self.factor!r}"
        label, op, group, direction = self.site
        return f"{op} over {group} in {label or 'the step'}, {direction}: {self.how}"

    def alter(self, record: Operation, result: Tensor, alone: Tensor) -> Tensor:
        """Return the wrong result of an operation at the site, the right one of all others."""
        if plain(record.site) != self.site:
            return result
        return alone if self.how == "alone" else result / 2


def plain(site: Site) -> Site:
    """Return a call-site without the layer's number and other names of the same ranks."""
    label, group = re.sub(r"\d+", "*", site.label), site.group.partition("+")[0]
    return site._replace(label=label, group=group)


@dataclass(frozen=True)
class Piece:
    """Part of a tensor."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box
    values: Tensor


@dataclass
class Findings:
    """What one rank saw."""

    figures: dict[str, list[float]] = field(default_factory=dict)
    """Loss, norm, clip factor and router terms of each step; those of an evaluation."""
    counts: dict[str, list[int]] = field(default_factory=dict)
    """Tokens by expert of each layer here, over the whole first step."""
    pieces: dict[str, dict[str, Piece]] = field(default_factory=dict)
    narrow: tuple[str, ...] = ()
    """Operations that made a narrower tensor in an fp64 step."""
    sites: tuple[Site, ...] = ()
    """Call-sites whose result a proof can replace."""


def try_out(case: Case, world: World, broken: Break | None = None) -> Findings:
    """Run a case on this rank and return what came of it."""
    trial = Trial(case, world)
    world.recorder.alter = None if broken is None or broken.site is None else broken.alter
    try:
        with nullcontext() if case.shuffle is None else Shuffled(case.shuffle):
            return trial.run(broken)
    finally:
        world.recorder.alter = None


class Trial:
    """A case's parts on this rank."""

    def __init__(self, case: Case, world: World) -> None:
        self.subject, self.world = case.subject, world
        self.precision = case.precision or case.subject.precision
        self.updates = STEPS if case.precision is None else 0
        decoder = case.subject.decoder
        self.placed: Placed = build_parts(decoder, self.precision, case.layout, world)
        fill(self.placed.model, case.subject, self.placed.shards)
        spot, dp = world.attention, world.folding.dp
        self.batches: list[MicroBatch] = micro_batches(case.subject)[spot.dp :: dp]
        parameters = dict(self.placed.model.named_parameters())
        self.optimizer: Optimizer = build(case.subject.optim, parameters)
        self.found = Findings()

    def run(self, broken: Break | None) -> Findings:
        """Make the steps; the first one is looked at closely."""
        before = {name: tensor.clone() for name, tensor in self._weights().items()}
        found = self.found
        watch = NarrowWatch() if self.precision == "fp64" else None
        with watch or nullcontext():
            scale = self._gradients(broken)
        found.narrow = tuple(sorted(watch.found)) if watch else ()
        self._note_first_step()
        total, labels, _ = evaluate(self.placed, self.batches, LOSS_CHUNK)
        found.figures["evaluation"] = [total / max(labels, 1)]
        for step in range(self.updates):
            scale = scale if step == 0 else self._gradients(None)
            self.optimizer.step(scale)
            for _, mixture in self.placed.model.mixtures():
                mixture.balance.finish_step(mixture.router)
        if self.updates:
            self._note_changes(before)
        found.sites = tuple(sorted({plain(site) for site in self.world.recorder.totals}))
        return found

    def _note_changes(self, before: dict[str, Tensor]) -> None:
        """Note what the steps changed, and the optimizer's state after them."""
        pieces = self.found.pieces
        changed = {name: after - before[name] for name, after in self._weights().items()}
        pieces["weights"] = {name: self._piece(name, values) for name, values in changed.items()}
        for name, values in self.optimizer.state().items():
            parameter, _, what = name.removeprefix("optim.").rpartition(".")
            held = pieces.setdefault(f"optimizer/{what}", {})
            held[parameter] = self._piece(parameter, values)

    def _gradients(self, broken: Break | None) -> float:
        """Compute a step's gradients, note its figures, and return the clipping factor."""
        figures = gradients(self.placed, self.batches, LOSS_CHUNK)
        if broken is not None and broken.parameter and broken.rank == self.world.rank:
            parameter = dict(self.placed.model.named_parameters()).get(broken.parameter)
            if parameter is not None and parameter.grad is not None:
                parameter.grad.mul_(broken.factor)
        scale = clip_scale(figures.grad_norm, self.subject.optim.clip_norm)  # type: ignore[attr-defined]
        told = {"lm_loss": figures.lm_loss, "grad_norm": figures.grad_norm, "clip": scale}
        told |= {f"router/{name}": value for name, value in figures.router_terms.items()}
        for name, value in told.items():
            self.found.figures.setdefault(name, []).append(value)
        return scale

    def _note_first_step(self) -> None:
        grads = {n: p.grad for n, p in self.placed.model.named_parameters() if p.requires_grad}
        self.found.pieces["gradients"] = {
            name: self._piece(name, grad.clone())
            for name, grad in grads.items()
            if grad is not None
        }
        for number, mixture in self.placed.model.mixtures():
            counters = mixture.balance.counters
            for what in ("load_E", "sent_E", "tokens"):
                key = f"layers.{number}.{what}"
                self.found.counts[key] = getattr(counters, what).reshape(-1).tolist()

    def _weights(self) -> dict[str, Tensor]:
        """Return parameters, and the buffers that a checkpoint would hold."""
        model = self.placed.model
        kept = model.state_dict()
        return {name: tensor.detach() for name, tensor in kept.items()}

    def _piece(self, name: str, values: Tensor) -> Piece:
        shard = self.placed.shards[name]
        if values.dim() == 0:
            return Piece((), (), values)
        return Piece(shard.shape, shard.box, values)
