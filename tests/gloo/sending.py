"""What a step of a layout really sends, by group and operation, beside what the planner says."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch

from moefold.comm.world import World
from moefold.data.batch import MicroBatch, from_ids
from moefold.kernels.quantise.config import QUANTISE
from moefold.layers.kinds.dense import Dense
from moefold.layers.kinds.gqa import Gqa
from moefold.layers.saved_tensors import RoutingDecisions
from moefold.mesh.folding import Folding
from moefold.model.config import Decoder
from moefold.model.init import initialise
from moefold.moe.clones import ClonePlan
from moefold.moe.config import Capacity, Shared
from moefold.moe.dispatch.config import TwoLevel
from moefold.optim.config import AdamW, Muon, Optim
from moefold.parallel import apply
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.parallel.pipeline.executor import Executor, InFlight
from moefold.planner.case import (
    Case,
    NumberFormats,
    Recipe,
    Software,
)
from moefold.planner.hardware import Cluster, cpu_device
from moefold.schedule.table import Action
from moefold.training import step
from tests.cpu import small
from tests.gloo.pipelines import Recording, recording
from tests.traffic.calls import Choices, Step, by_group
from tests.traffic.step import traffic

SEQ, SEQUENCES, LOSS_CHUNK = 16, 2, 12
"""Tokens of a sequence, sequences of a micro-batch, rows whose logits exist at once: none divides
the rows of another."""
Totals = dict[tuple[str, str], tuple[int, int]]


def decoder(kind: str) -> Decoder:
    """Return a decoder with the parts that exchange something: named by what is unusual."""
    shared = small.moe(shared=Shared(width=16, gate=True))
    deep = (Dense(width=24), shared, small.moe(), small.moe())
    match kind:
        case "mla":
            return small.decoder(small.MLA, Dense(width=24), small.moe(router=small.DEEP), shared)
        case "across":
            across = Gqa(heads=4, kv_heads=2, head_dim=8, qk_norm="projection")
            return small.decoder(across, *deep)
        case "capacity":
            bound = (Capacity(factor=0.9), Capacity(factor=1.1, drop="position"))
            return small.decoder(small.GQA, *(small.moe(capacity=one) for one in bound))
        case _:
            return small.decoder(small.GQA, *deep, tied=kind == "tied")


@dataclass(frozen=True)
class Sending:
    """One layout, and what is run in it."""

    sizes: str
    ranks: int
    model: str = "deep"
    micro_batches: int = 2
    """On each data rank."""
    precision: Recipe = "fp32"
    layout: dict[str, Any] = field(default_factory=dict, hash=False)
    optimizer: Optim = field(default_factory=lambda: AdamW(lr=1e-3))
    quantise: dict[str, Any] | None = field(default=None, hash=False)

    def __str__(self) -> str:
        """Return a name for a test's parameter."""
        words = (f"{key} {_said(value)}" for key, value in self.layout.items())
        muon = ("muon",) if isinstance(self.optimizer, Muon) else ()
        codes = (_said(self.quantise),) if self.quantise else ()
        return ", ".join((self.sizes or "dp", self.model, *codes, *muon, *words))

    @property
    def decoder(self) -> Decoder:
        """What is run."""
        record, given = decoder(self.model), self.quantise
        made = None if given is None else QUANTISE.kinds[given["kind"]].model_validate(given)
        return record.model_copy(update={"quantise": made})

    @property
    def where(self) -> Layout:
        """The layout's record."""
        return Layout.model_validate({"sizes": self.sizes, **self.layout})

    @property
    def case(self) -> Case:
        """This case as the planner takes it."""
        where, record = self.where, self.decoder
        sizes = where.split
        node = self.ranks
        if isinstance(where.dispatch, TwoLevel):
            node = where.dispatch.node * sizes.etp
        folding = Folding(sizes, self.ranks)
        wide = self.precision == "fp32"
        return Case(
            decoder=record,
            seq=SEQ,
            batch=SEQUENCES * self.micro_batches * folding.dp,
            micro_batch=SEQUENCES,
            cluster=Cluster(cpu_device(1e11, 1e10, 2**34), self.ranks, node, node),
            layout=where,
            load=1.0,
            number_formats=NumberFormats(
                self.precision, self.optimizer, weight_bytes=0 if wide else 2
            ),
            software=Software(loss_chunk=LOSS_CHUNK),
        )

    def planned(self, rank: int, choices: Choices) -> Totals:
        """Return what the planner says that a rank sends."""
        case = self.case
        calls = traffic(case, rank, Step(choices))
        found = by_group(calls, case, rank)
        return {site: (round(n), round(sent)) for site, (n, sent) in found.items()}


@dataclass(frozen=True)
class Sent:
    """What one rank saw of a step."""

    totals: Totals
    chosen: dict[tuple[int, int], list[list[int]]]
    """Experts of each row by layer and micro-batch."""
    follows_table: bool
    """Whether the actions executed are those of the planner's table."""


def batches(count: int) -> list[MicroBatch]:
    """Return the micro-batches of a step."""
    each = SEQUENCES * SEQ
    ids = [small.ids_of(SEQUENCES, SEQ, seed=micro) for micro in range(count)]
    return [replace(from_ids(one), first=micro * each) for micro, one in enumerate(ids)]


def send(rank: int, sending: Sending) -> Sent:
    """Run a whole step of a layout, update and renewal included."""
    folding = Folding(sending.where.split, sending.ranks)
    world = World.open(folding, "cpu", 30)
    record = sending.decoder.model_copy(update={"init_std": 0.3})
    parts = apply.build_parts(record, sending.precision, sending.where, world)  # type: ignore[arg-type]
    initialise(parts.model, record, 1, parts.shards)
    data = ShardedState(parts)
    optimizer = data.optimizer(sending.optimizer)
    whole = batches(sending.micro_batches * folding.dp)
    world.recorder.clear()
    with recording(), kept_decisions() as kept:
        step.gradients(data, whole[world.attention.dp :: folding.dp], LOSS_CHUNK)
    optimizer.step(1.0, 1.0)
    data.refresh_weights()
    lines = sending.case.table.lines[world.attention.pp]
    return Sent(totals(world), chosen(kept), tuple(Recording.last.executed) == lines)


Kept = list[tuple[int, RoutingDecisions]]


@contextmanager
def kept_decisions() -> Iterator[Kept]:
    """While open, what passes decide is kept in the list, with the micro-batch's number."""
    sound, kept = Executor._start_pass, Kept()

    def start(executor: Executor, action: Action) -> InFlight:
        held = sound(executor, action)
        kept.append((action.micro, held.chunk_pass._flow.decisions))
        return held

    # A schedule whose weights' gradients wait lets go of what passes decided.
    stays = mock.patch.object(RoutingDecisions, "clear", lambda decisions: None)
    with mock.patch.object(Executor, "_start_pass", start), stays:
        yield kept


def chosen(kept: Kept) -> dict[tuple[int, int], list[list[int]]]:
    """Return where rows went: the number of experts stands for nowhere."""
    found = {}
    for micro, decisions in kept:
        for key, decision in decisions.items():
            if isinstance(decision, ClonePlan):
                continue
            experts_TK, kept_TK = decision.experts_TK, decision.kept_TK
            if kept_TK is not None:
                experts_TK = torch.where(kept_TK, experts_TK, small.ROUTER.experts)
            found[int(key.removeprefix("layers.")), micro] = experts_TK.tolist()
    return found


def totals(world: World) -> Totals:
    """Return operations and bytes by group and operation, without the first words of new groups."""
    calls: Counter[tuple[str, str]] = Counter()
    sent: Counter[tuple[str, str]] = Counter()
    for site, total in world.recorder.totals.items():
        if site.label != "warm-up":
            calls[site.group, site.op] += total.calls
            sent[site.group, site.op] += total.bytes
    return {site: (calls[site], sent[site]) for site in calls}


def differences(sending: Sending, seen: Sequence[Sent]) -> dict[int, dict[Any, Any]]:
    """Return for each rank what was sent and what was planned, where they differ."""
    places = {place for one in seen for place in one.chosen}
    choices = {
        place: {rank: one.chosen[place] for rank, one in enumerate(seen) if place in one.chosen}
        for place in places
    }
    found = {}
    for rank, one in enumerate(seen):
        planned = sending.planned(rank, choices)
        sites = {*planned, *one.totals}
        wrong = {
            site: (one.totals.get(site), planned.get(site))
            for site in sorted(sites)
            if one.totals.get(site) != planned.get(site)
        }
        if wrong:
            found[rank] = wrong
    return found


def send_all(rank: int, sendings: Sequence[Sending]) -> list[Sent]:
    """Run one layout after another; called on every rank."""
    return [send(rank, sending) for sending in sendings]


def _said(value: Any) -> str:
    return " ".join(map(str, value.values())) if isinstance(value, dict) else str(value)
