"""Seconds of data-parallel collectives in a step, by the rules of ``parallel/data``.

Parameters of a unit with copies on the same ranks, read by products in the same format, form one
bucket. Its weights are gathered once per step, or under ZeRO 3 for each forward and each backward
of a micro-batch; its gradients are summed once per step, or from ZeRO 2 on after each pass.
``tests/traffic`` counts these bytes independently and compares them with those of real ranks.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Literal, NamedTuple, cast

from moefold.mesh.config import ORDERS
from moefold.mesh.partition import aligned
from moefold.model.config import Decoder
from moefold.planner.case import Case, StageContents, equivalent_micro_batches
from moefold.planner.curves import Rates
from moefold.planner.memoize import memoize
from moefold.planner.memory_state import (
    GATHERED_CODE_BYTES,
    Part,
    StateSharding,
    layers_and_norm,
    part_weights,
)
from moefold.planner.memory_steps import peak_candidates
from moefold.planner.network import GroupReach, listed_reach, ring_seconds, strided_reach
from moefold.spec.codes import CodedWeight
from moefold.spec.layer import Weight

CopyGroup = Literal["dp_cp", "edp", "tp", "stages"]
ONCE_HIDDEN_SHARE = 0.8
"""Share of a micro-batch's pass behind which collectives of once per step can be hidden."""


class Collective(NamedTuple):
    """One collective over copies of weights."""

    group: CopyGroup
    across_shards: bool
    """Whether it runs between copies of a shard, not within the group that shards a bucket."""
    op: Literal["all_gather", "reduce_scatter", "all_reduce"]
    bytes: float
    """Bytes of the whole bucket, or of the summed run."""
    overlaps_with: Literal["forward", "backward", "gradients", "between", "end"]
    """What hides it: ``forward`` or ``backward``; ``gradients`` are reduced during backward;
    ``between`` passes and at the ``end`` of a step it overlaps with nothing."""

    def per_micro_batch(self, zero: int) -> bool:
        """Return whether a ZeRO stage runs it for each micro-batch, not once per step."""
        return self.overlaps_with != "end" and zero >= (
            2 if self.overlaps_with == "gradients" else 3
        )


class DataSeconds(NamedTuple):
    """Seconds of collectives over copies by what they overlap with, per micro-batch for those that
    run in each.
    """

    forward: float = 0.0
    backward: float = 0.0
    gradients: float = 0.0
    between: float = 0.0
    end: float = 0.0


class CollectiveCounter:
    """Data-parallel collectives of a layout's ranks by their layers; equal parts are counted."""

    def __init__(self, decoder: Decoder, split: StateSharding) -> None:
        self.decoder, self.split = decoder, split
        self._parts: dict[Part, PartCollectives] = {}
        self._known: dict[StageContents, Counter[Collective]] = {}

    def collectives(self, held: StageContents) -> Counter[Collective]:
        """Return the collectives of a rank and their numbers, per micro-batch for those that run in
        each. Those of groups of one rank send nothing. A cached object: do not modify.
        """
        if held in self._known:
            return self._known[held]
        found, joined = Counter[Collective](), dict[tuple[CopyGroup, bool], float]()
        for part, number, once in self.part_uses(held):
            for one in part.buckets:
                found[one] += number if one.per_micro_batch(self.split.zero) else once
            for group, elements in part.all_reduced.items():
                joined[group] = joined.get(group, 0.0) + once * elements
        size = self.split.numbers.gradient_bytes
        for group, elements in joined.items():
            if elements:
                found[Collective(*group, "all_reduce", elements * size, "end")] += 1
        self._known[held] = found
        return found

    def trained_elements(self, held: StageContents) -> tuple[float, float]:
        """Return the trained elements in a rank's passes, and those that the rank updates."""
        parts = [(once, part) for part, _, once in self.part_uses(held)]
        return sum(n * one.trained for n, one in parts), sum(n * one.updated for n, one in parts)

    def part_uses(self, held: StageContents) -> Iterator[tuple["PartCollectives", int, int]]:
        """Yield parts, the number of uses of each in a micro-batch, and the number of such parts.

        A tied table is also the head, and each multi-token layer looks up rows of it.
        """
        tied = self.decoder.tied
        table = held.embedding + held.multi_token + (held.loss and tied)
        parts: list[tuple[Part, int]] = [*layers_and_norm(held), ("embedding", table)]
        parts.append(("head", int(held.loss and not tied)))
        for part, number in parts:
            if number:
                if part not in self._parts:
                    self._parts[part] = PartCollectives.of(self.decoder, part, self.split)
                yield self._parts[part], number, 1 if part == "embedding" else number


collective_counter = memoize(1 << 10)(CollectiveCounter)


class PartCollectives(NamedTuple):
    """Data-parallel collectives of one part of a model."""

    buckets: tuple[Collective, ...]
    all_reduced: dict[tuple[CopyGroup, bool], float]
    """Gradient elements that are all-reduced together, by group: of unsharded copies, of parameters
    that tp does not cut, and of a table on two stages."""
    trained: float
    """Trained elements on a rank."""
    updated: float
    """Trained elements that the rank updates."""

    @classmethod
    def of(cls, decoder: Decoder, part: Part, split: StateSharding) -> "PartCollectives":
        """Return the collectives of a part."""
        joined, trained, own = dict[tuple[CopyGroup, bool], float](), 0.0, 0.0
        for weight in part_weights(decoder, part):
            inner = split.shards_and_replicas(weight.is_expert)[0]
            here = round(weight.local_elements(*split.tp_ep_etp)) * (not weight.frozen)
            trained, own = trained + here, own + here / inner
            kinds: dict[CopyGroup, float] = {
                "edp" if weight.is_expert else "dp_cp": here * (inner == 1),
                "tp": here / inner * (not weight.cuts),
                "stages": here / inner * (part == "embedding"),
            }
            for kind, elements in kinds.items():
                group = kind, kind in ("dp_cp", "edp")
                joined[group] = joined.get(group, 0.0) + elements
        return cls(tuple(_buckets(decoder, part, split)), joined, trained, own)


def _buckets(decoder: Decoder, part: Part, split: StateSharding) -> Iterator[Collective]:
    """Yield the collectives of a part's buckets."""
    buckets = Counter[tuple[bool, bool, bool, float]]()
    for weight in part_weights(decoder, part):
        if split.shards_and_replicas(weight.is_expert)[0] > 1 and (
            split.zero == 3 or not weight.frozen
        ):
            elements = aligned(round(weight.local_elements(*split.tp_ep_etp)))
            buckets[weight.is_expert, weight.frozen, *_gather_format(weight, split)] += elements
    for (expert, frozen, _, width), elements in buckets.items():
        (inner, outer), kind = (
            split.shards_and_replicas(expert),
            cast("CopyGroup", "edp" if expert else "dp_cp"),
        )
        length = aligned(-(-elements // inner))
        whole = length * inner
        ends = split.zero == 3 and part in ("embedding", "head")
        way = "between" if ends else "forward"
        yield Collective(kind, False, "all_gather", whole * width, way)
        if split.zero == 3 and not ends:
            yield Collective(kind, False, "all_gather", whole * width, "backward")
        if not frozen:
            size = split.numbers.gradient_bytes
            yield Collective(kind, False, "reduce_scatter", whole * size, "gradients")
            if outer > 1:
                yield Collective(kind, True, "all_reduce", length * size, "end")


def _gather_format(weight: Weight, split: StateSharding) -> tuple[bool, float]:
    """Return whether a weight is gathered as codes, and the bytes per element."""
    numbers = split.numbers
    wide, narrow = numbers.master_bytes, numbers.weight_bytes or numbers.master_bytes
    codes = GATHERED_CODE_BYTES.get(weight.recipe.kind) if isinstance(weight, CodedWeight) else None
    if codes is not None:
        return True, codes
    if weight.frozen and weight.reads_compute_dtype:
        return False, narrow
    return False, wide if weight.is_master_matrix or len(weight.shape) < 2 else narrow


def collective_reach(case: Case, one: Collective) -> GroupReach:
    """Return the distribution of a collective's group over domains."""
    sizes, folding, cluster = case.sizes, case.folding, case.cluster
    if one.group == "tp":
        return strided_reach(cluster, sizes.tp, 1)
    if one.group == "stages":  # stages that hold the embedding table
        tied, stages = case.decoder.tied, enumerate(case.rank_contents)
        holds = [n for n, h in stages if h.embedding or h.multi_token or (h.loss and tied)]
        return listed_reach(cluster, [folding.rank_on_stage(0, stage) for stage in holds])
    inner, outer = StateSharding.of(case).shards_and_replicas(one.group == "edp")
    if case.order != ORDERS[0]:  # pipeline ranks lie between data ranks
        ranks = folding.group(one.group, 0)
        return listed_reach(cluster, ranks[::inner] if one.across_shards else ranks[:inner])
    stride = sizes.ep * sizes.etp if one.group == "edp" else sizes.tp
    return strided_reach(
        cluster, *((outer, stride * inner) if one.across_shards else (inner, stride))
    )


def collective_seconds(case: Case, held: StageContents, rates: Rates) -> DataSeconds:
    """Return the seconds of a rank's collectives over copies."""
    found: dict[str, float] = dict.fromkeys(DataSeconds._fields, 0.0)
    for one, number in (
        collective_counter(case.decoder, StateSharding.of(case)).collectives(held).items()
    ):
        ways = 2 if one.op == "all_reduce" else 1
        group = collective_reach(case, one)
        found[one.overlaps_with] += (
            number * ways * ring_seconds(one.bytes, group, case.cluster, rates)
        )
    return DataSeconds(**found)


def exposed_seconds(
    case: Case, work: DataSeconds, held: StageContents, passes: tuple[float, float], rates: Rates
) -> tuple[float, float]:
    """Return exposed and hidden seconds of a step's collectives over copies.

    Weights of a unit are gathered while the unit before computes, so that those of a chunk's first
    unit are exposed. Gradients are reduced during the next unit's backward; deferred weight
    gradients are complete together, when no compute of their chunk is left to overlap with.

    Args:
        work: seconds of collectives.
        held: layers of the rank.
        passes: seconds of a micro-batch's forward and backward on the rank.
    """
    zero, v = case.memory_policy.zero, case.sizes.vpp
    gathers, sums = _runs_per_step(zero, case.num_micro_batches)
    once, each = ONCE_HIDDEN_SHARE, rates.hidden_shards
    layers = held.num_layers + held.multi_token
    ahead = 1 - min(1.0, v / max(layers, 1)) if zero == 3 else 1.0
    if case.software.cuda_graphs == "full":
        ahead = 0.0  # a step in one graph begins when all weights are gathered
    schedule, pp = case.schedule, case.sizes.pp
    lines = peak_candidates(
        schedule, pp, v, equivalent_micro_batches(schedule, pp, case.num_micro_batches)
    )
    waits = schedule.overlaps_passes or any(step.kind == "W" for line in lines for step in line)
    going = 1.0 if not waits else 1 - 1 / v if sums == 1 else 0.0
    free = (each if zero == 3 else once) * passes[0], (each if zero > 1 else once) * passes[1]
    hidden = gathers * min(ahead * work.forward, free[0])
    hidden += sums * min(ahead * work.backward + going * work.gradients, free[1])
    sent = (
        gathers * (work.forward + work.backward + work.between) + sums * work.gradients + work.end
    )
    return sent - hidden, hidden


def min_exposed_seconds(
    work: DataSeconds, zero: int, m: int, seconds: float, rates: Rates
) -> float:
    """Return a lower bound of the exposed seconds; a micro-batch computes for ``seconds``."""
    gathers, sums = _runs_per_step(zero, m)
    moved = gathers * (work.forward + work.backward) + sums * work.gradients
    free = max(gathers, sums) * max(ONCE_HIDDEN_SHARE, rates.hidden_shards) * seconds
    return gathers * work.between + work.end + max(0.0, moved - free)


def _runs_per_step(zero: int, m: int) -> tuple[int, int]:
    """Return how often a step gathers weights for passes, and reduces gradients."""
    return m if zero == 3 else 1, m if zero > 1 else 1
