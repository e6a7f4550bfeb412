"""Seconds of data-parallel collectives in a step, by the rules of ``parallel/data``.

Parameters of a unit with copies on the same ranks, read by products in the same format, form one
bucket. Its weights are gathered once per step, or under ZeRO 3 for each forward and each backward
of a micro-batch; its gradients are summed once per step, or from ZeRO 2 on after each pass.
``tests/traffic`` counts these bytes independently and compares them with those of real ranks.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import chain
from typing import Literal, NamedTuple

from moefold.mesh.config import ORDERS
from moefold.mesh.partition import aligned
from moefold.model.config import Decoder
from moefold.planner.case import Case, StageContents, distinct_blocks
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
from moefold.spec.forward_only import num_passes
from moefold.spec.layer import Weight

CopyGroup = Literal["dp_cp", "edp", "tp", "stages"]
"""Ranks with copies of a weight: ``stages`` are those with the embedding table."""
ONCE_HIDDEN_SHARE = 0.8
"""Share of a micro-batch's pass behind which collectives that run once per step can be hidden."""


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
        stage = 2 if self.overlaps_with == "gradients" else 3
        return self.overlaps_with != "end" and zero >= stage


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

    def __init__(self, decoder: Decoder, sharding: StateSharding) -> None:
        self.decoder = decoder
        self.sharding = sharding
        self._by_part: dict[Part, PartCollectives] = {}
        self._by_content: dict[StageContents, Counter[Collective]] = {}

    def collectives(self, stage: StageContents) -> Counter[Collective]:
        """Return the collectives of a rank and their numbers, per micro-batch for those that run in
        each. Those of groups of one rank send nothing. A cached object: do not modify.
        """
        if stage in self._by_content:
            return self._by_content[stage]
        counts = Counter[Collective]()
        sums = defaultdict[tuple[CopyGroup, bool], float](float)
        for part, uses, copies in self.part_uses(stage):
            for bucket in part.buckets:
                counts[bucket] += uses if bucket.per_micro_batch(self.sharding.zero) else copies
            for group, elements in part.all_reduced.items():
                sums[group] += copies * elements
        size = self.sharding.numbers.gradient_bytes
        for group, elements in sums.items():
            if elements:
                counts[Collective(*group, "all_reduce", elements * size, "end")] += 1
        self._by_content[stage] = counts
        return counts

    def trained_elements(self, stage: StageContents) -> tuple[float, float]:
        """Return the trained elements in a rank's passes, and those that the rank updates."""
        parts = [(copies, part) for part, _, copies in self.part_uses(stage)]
        trained = sum(copies * part.trained for copies, part in parts)
        return trained, sum(copies * part.updated for copies, part in parts)

    def part_uses(self, stage: StageContents) -> Iterator[tuple["PartCollectives", int, int]]:
        """Yield parts, the number of uses of each in a micro-batch, and the number of such parts.

        A tied table is also the head, and each multi-token layer looks up rows of it.
        """
        tied = self.decoder.tied
        lookups = stage.embedding + stage.multi_token + (stage.loss and tied)
        heads = stage.loss and not tied
        ends: list[tuple[Part, int]] = [("embedding", lookups), ("head", heads)]
        for part, count in (*layers_and_norm(stage), *ends):
            if count:
                if part not in self._by_part:
                    self._by_part[part] = PartCollectives.of(self.decoder, part, self.sharding)
                yield self._by_part[part], count, 1 if part == "embedding" else count


collective_counter = memoize(1 << 10)(CollectiveCounter)
"""Return the cached :class:`CollectiveCounter` of a model and a sharding."""


class PartCollectives(NamedTuple):
    """Data-parallel collectives of one part of a model."""

    buckets: tuple[Collective, ...]
    all_reduced: dict[tuple[CopyGroup, bool], float]
    """Gradient elements that are all-reduced together, by group and ``across_shards``: of unsharded
    copies, of parameters that tp does not cut, and of a table on two stages."""
    trained: float
    """Trained elements on a rank."""
    updated: float
    """Trained elements that the rank updates."""

    @classmethod
    def of(cls, decoder: Decoder, part: Part, sharding: StateSharding) -> "PartCollectives":
        """Return the collectives of a part."""
        sums = defaultdict[tuple[CopyGroup, bool], float](float)
        trained = 0.0
        updated = 0.0
        for weight in part_weights(decoder, part):
            shards, _ = sharding.shards_and_replicas(weight.is_expert)
            local = round(weight.local_elements(*sharding.tp_ep_etp)) * (not weight.frozen)
            trained += local
            updated += local / shards
            sums["edp" if weight.is_expert else "dp_cp", True] += local * (shards == 1)
            sums["tp", False] += local / shards * (not weight.cuts)
            sums["stages", False] += local / shards * (part == "embedding")
        buckets = tuple(_buckets(decoder, part, sharding))
        if isinstance(part, int) and num_passes(distinct_blocks(decoder)[0][part]) == 1:
            buckets = tuple(b for b in buckets if b.overlaps_with != "backward")
        return cls(buckets, sums, trained, updated)


def _buckets(decoder: Decoder, part: Part, sharding: StateSharding) -> Iterator[Collective]:
    """Yield the collectives of a part's buckets."""
    buckets = Counter[tuple[bool, bool, bool, float]]()
    zero3 = sharding.zero == 3
    for weight in part_weights(decoder, part):
        shards, _ = sharding.shards_and_replicas(weight.is_expert)
        if shards > 1 and (zero3 or not weight.frozen):
            elements = aligned(round(weight.local_elements(*sharding.tp_ep_etp)))
            buckets[weight.is_expert, weight.frozen, *_gather_format(weight, sharding)] += elements
    for (expert, frozen, _, width), elements in buckets.items():
        shards, replicas = sharding.shards_and_replicas(expert)
        group: CopyGroup = "edp" if expert else "dp_cp"
        shard = aligned(-(-elements // shards))
        bucket = shard * shards
        ends = zero3 and part in ("embedding", "head")
        overlap = "between" if ends else "forward"
        yield Collective(group, False, "all_gather", bucket * width, overlap)
        if zero3 and not ends:
            yield Collective(group, False, "all_gather", bucket * width, "backward")
        if not frozen:
            size = sharding.numbers.gradient_bytes
            yield Collective(group, False, "reduce_scatter", bucket * size, "gradients")
            if replicas > 1:
                yield Collective(group, True, "all_reduce", shard * size, "end")


def _gather_format(weight: Weight, sharding: StateSharding) -> tuple[bool, float]:
    """Return whether a weight is gathered as codes, and the bytes per element."""
    numbers = sharding.numbers
    wide = numbers.master_bytes
    narrow = numbers.weight_bytes or numbers.master_bytes
    codes = (
        GATHERED_CODE_BYTES.get(weight.quantise.kind) if isinstance(weight, CodedWeight) else None
    )
    if codes is not None:
        return True, codes
    if weight.frozen and weight.reads_compute_dtype:
        return False, narrow
    return False, wide if weight.is_master_matrix or len(weight.shape) < 2 else narrow


def collective_reach(case: Case, collective: Collective) -> GroupReach:
    """Return the distribution of a collective's group over domains."""
    sizes = case.sizes
    folding = case.folding
    cluster = case.cluster
    if collective.group == "tp":
        return strided_reach(cluster, sizes.tp, 1)
    if collective.group == "stages":
        tied = case.decoder.tied
        stages = enumerate(case.contents.ranks)
        holds = [n for n, h in stages if h.embedding or h.multi_token or (h.loss and tied)]
        return listed_reach(cluster, [folding.rank_on_stage(0, stage) for stage in holds])
    expert = collective.group == "edp"
    across = collective.across_shards
    shards, replicas = StateSharding.of(case).shards_and_replicas(expert)
    if case.layout.order != ORDERS[0]:  # pipeline ranks lie between data ranks
        ranks = folding.group(collective.group, 0)
        return listed_reach(cluster, ranks[::shards] if across else ranks[:shards])
    stride = sizes.ep * sizes.etp if expert else sizes.tp
    return strided_reach(cluster, *((replicas, stride * shards) if across else (shards, stride)))


def collective_seconds(case: Case, stage: StageContents, rates: Rates) -> DataSeconds:
    """Return the seconds of a rank's collectives over copies."""
    seconds: dict[str, float] = dict.fromkeys(DataSeconds._fields, 0.0)
    counter = collective_counter(case.decoder, StateSharding.of(case))
    for collective, count in counter.collectives(stage).items():
        group = collective_reach(case, collective)
        runs = count
        runs *= 2 if collective.op == "all_reduce" else 1
        ring = ring_seconds(collective.bytes, group, case.cluster, rates.nic_gather)
        seconds[collective.overlaps_with] += runs * ring
    return DataSeconds(**seconds)


def exposed_seconds(
    case: Case, data: DataSeconds, stage: StageContents, passes: tuple[float, float], rates: Rates
) -> tuple[float, float]:
    """Return exposed and hidden seconds of a step's collectives over copies.

    Weights of a unit are gathered while the unit before computes, so that those of a chunk's first
    unit are exposed. Gradients are reduced during the next unit's backward; deferred weight
    gradients are complete together, when no compute of their chunk is left to overlap with.

    Args:
        data: seconds of collectives.
        stage: layers of the rank.
        passes: seconds of a micro-batch's forward and backward on the rank.
    """
    zero = case.layout.zero
    v = case.sizes.vpp
    gathers, reductions = _runs_per_step(zero, case.num_micro_batches)
    once = ONCE_HIDDEN_SHARE
    each = rates.hidden_shards
    layers = stage.num_layers + stage.multi_token
    ahead = 1 - min(1.0, v / max(layers, 1)) if zero == 3 else 1.0
    if case.software.cuda_graphs == "full":
        ahead = 0.0  # a step in one graph begins when all weights are gathered
    actions = chain.from_iterable(peak_candidates(case))
    defers = case.schedule.overlaps_passes or any(action.kind == "W" for action in actions)
    during = 1.0 if not defers else 1 - 1 / v if reductions == 1 else 0.0
    forward, backward = passes
    forward *= each if zero == 3 else once
    backward *= each if zero > 1 else once
    hidden = gathers * min(ahead * data.forward, forward)
    hidden += reductions * min(ahead * data.backward + during * data.gradients, backward)
    total = gathers * (data.forward + data.backward + data.between) + reductions * data.gradients
    total += data.end
    return total - hidden, hidden


def min_exposed_seconds(
    data: DataSeconds, zero: int, m: int, seconds: float, rates: Rates
) -> float:
    """Return a lower bound of the exposed seconds; a micro-batch computes for ``seconds``."""
    gathers, reductions = _runs_per_step(zero, m)
    total = gathers * (data.forward + data.backward) + reductions * data.gradients
    hiding = max(gathers, reductions) * max(ONCE_HIDDEN_SHARE, rates.hidden_shards) * seconds
    return gathers * data.between + data.end + max(0.0, total - hiding)


def _runs_per_step(zero: int, m: int) -> tuple[int, int]:
    """Return how often a step gathers weights for passes, and reduces gradients."""
    return m if zero == 3 else 1, m if zero > 1 else 1
