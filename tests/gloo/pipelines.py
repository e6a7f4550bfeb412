"""Runs steps of small decoders under pipelines, each against the same step on one rank."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from moefold.comm.world import World
from moefold.data.batch import MicroBatch, pack
from moefold.layers.kinds.dense import Dense
from moefold.mesh.folding import Folding
from moefold.model.config import Decoder
from moefold.model.init import initialise
from moefold.moe.config import Shared
from moefold.parallel import apply
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.parallel.pipeline import executor
from moefold.parallel.pipeline.executor import Executor, StepResult
from moefold.parallel.pipeline.lanes import Chain
from moefold.schedule.table import Action
from moefold.training import step
from moefold.training.step import StepFigures
from tests.cpu import small
from tests.gloo.harness import Reference, run_ranks
from tests.schedule_checker import peak_in_flight

LENGTHS = ((9, 5, 8), (16,), (3, 4), (12, 20), (8, 1, 6))
"""Documents of micro-batches: no two neighbours have as many rows."""


@dataclass(frozen=True)
class Case:
    """One layout, and what is run in it."""

    sizes: str
    schedule: str
    model: str = "deep"
    micro_batches: int = 4
    """On each data rank."""
    layout: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        """Return a name for a test's parameter."""
        more = "-".join(str(part) for part in self.layout.values() if isinstance(part, str))
        words = (*self.sizes.split(), self.schedule, self.model, f"m{self.micro_batches}", more)
        return "-".join(word for word in words if word)

    def data(self, world: World) -> ShardedState:
        """Build this rank's parts, with values."""
        return build(self.model, self.where, world)

    @property
    def where(self) -> Layout:
        """The layout's record."""
        given = {"sizes": self.sizes, "schedule": {"kind": self.schedule}, **self.layout}
        return Layout.model_validate(given)


@dataclass(frozen=True)
class Outcome:
    """What one rank saw of a case."""

    error: float
    """Largest relative error of a gradient here against one rank's."""
    smallest: float
    """Smallest norm of a gradient of the whole model; what is zero would prove nothing."""
    figures: StepFigures
    alone: StepFigures
    follows_table: bool
    """Whether the steps executed are those of the table."""
    peak: tuple[int, int]
    """Most chunks in flight, executed and by the table."""


def decoder(kind: str) -> Decoder:
    """Return a decoder of several layers, so that each stage has some."""
    shared = small.moe(shared=Shared(width=16, gate=True))
    deep = (Dense(width=24), shared, small.moe(), small.moe())
    if kind == "mla":
        return small.decoder(small.MLA, Dense(width=24), small.moe(router=small.DEEP), shared)
    return small.decoder(small.GQA, *deep, tied=kind == "tied")


def build(kind: str, layout: Layout, world: World) -> ShardedState:
    """Return this rank's parts of a decoder in fp64."""
    record = decoder(kind).model_copy(update={"init_std": 0.3, "init_out_scale": 1.0})
    parts = apply.build_parts(record, "fp64", layout, world)
    initialise(parts.model, record, 1, parts.shards)
    return ShardedState(parts)


@lru_cache
def batches(count: int) -> tuple[MicroBatch, ...]:
    """Return the micro-batches of a step, of different lengths."""
    drawn = torch.Generator().manual_seed(7)
    packed, first = [], 0
    for micro in range(count):
        lengths = LENGTHS[micro % len(LENGTHS)]
        texts = [torch.randint(0, small.VOCAB, (n,), generator=drawn).tolist() for n in lengths]
        packed.append(pack(texts, pad_to=8, first_token=first))
        first += sum(lengths)
    return tuple(packed)


@Reference
def alone(kind: str, count: int) -> tuple[StepFigures, dict[str, Tensor]]:
    """Return figures and gradients of the step on one rank, without any schedule."""
    data = build(kind, Layout(), World.single())
    figures = step.gradients(data, batches(count), 16)
    return figures, {held.name: held.tensor for held in data.gradients()}


class Recording(Executor):
    """Keeps the last executor that ran."""

    last: "Recording"
    peak = 0

    def run(self) -> StepResult:
        """Run, and be found afterwards."""
        Recording.last = self
        return super().run()

    def _start_action(self, action: Action) -> Chain:
        chain = super()._start_action(action)
        self.peak = max(self.peak, len(self._in_flight))
        return chain


@contextmanager
def recording(kind: type[Executor] = Recording) -> Iterator[None]:
    """Let training steps be run by another executor."""
    with mock.patch.object(executor, "Executor", kind):
        yield


def run_case(case: Case, ranks: int) -> Outcome:
    """Run a case on this rank, with the others."""
    folding = Folding(Layout(sizes=case.sizes).split, ranks)
    world = World.open(folding, "cpu", 30) if ranks > 1 else World.single()
    data = case.data(world)
    whole = batches(case.micro_batches * folding.dp)
    mine = whole[world.attention.dp :: folding.dp]
    with recording():
        figures = step.gradients(data, mine, 16)
    expected, gradients = alone(case.model, len(whole))
    errors = [0.0]
    for held in data.gradients():
        theirs = gradients[held.name]
        piece = theirs[tuple(slice(start, end) for start, end in held.box)]
        errors.append(float((held.tensor - piece).norm() / theirs.norm()))
    table, rank = data.parts.layout.table(len(mine)), world.attention.pp
    follows = tuple(Recording.last.executed) == table.lines[rank]
    peak = Recording.last.peak, peak_in_flight(table)[rank]
    least = min(float(gradient.norm()) for gradient in gradients.values())
    return Outcome(max(errors), least, figures, expected, follows, peak)


def run_cases(rank: int, cases: Sequence[Case], ranks: int) -> list[Outcome]:
    """Run cases one after another; called on every rank."""
    return [run_case(case, ranks) for case in cases]


@cache
def outcomes(cases: tuple[Case, ...], ranks: int) -> list[list[Outcome]]:
    """Return what each rank saw of each case: ``[case][rank]``."""
    for case in cases:
        alone(case.model, case.micro_batches * Folding(case.where.split, ranks).dp)
    by_rank = run_ranks(run_cases, ranks, cases, ranks, references=[alone])
    return [list(seen) for seen in zip(*by_rank, strict=True)]
