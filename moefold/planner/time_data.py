"""Seconds of what copies of weights exchange in a step, as ``parallel/data`` sends it and when.

Parameters of a unit whose copies live on the same ranks, and that products take in the same format,
are one bucket. Its weights are gathered once a step, or under ZeRO 3 for each forward and each
backward of a micro-batch; its gradients are summed once a step, or from ZeRO 2 on after each pass.
``tests/traffic`` counts the same bytes on its own, and real ranks record them.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Literal, NamedTuple, cast

from moefold.mesh.config import ORDERS
from moefold.mesh.share import aligned
from moefold.model.config import Decoder
from moefold.planner.case import Case, Held, settled
from moefold.planner.curves import Rates
from moefold.planner.memory_state import GATHERED, Part, Split, inner_parts, part_weights
from moefold.planner.memory_steps import fullest_steps
from moefold.planner.network import Reach, lying, reach, ring_seconds
from moefold.planner.remember import remembered
from moefold.spec.codes import CodedWeight
from moefold.spec.layer import Weight

Kind = Literal["dp_cp", "edp", "tp", "stages"]
HIDDEN_ONCE = 0.8
"""Share of a micro-batch's pass under which what is sent once a step hides."""


class Collective(NamedTuple):
    """One collective over copies of weights."""

    kind: Kind
    across: bool
    """Whether it runs over equal runs of a bucket, of which each rank saw other tokens."""
    op: Literal["all_gather", "reduce_scatter", "all_reduce"]
    bytes: float
    """Of a whole bucket, or of what is summed."""
    beside: Literal["forward", "backward", "sums", "between", "end"]
    """What it runs beside: a pass, whose gradients ``sums`` are of; nothing, ``between`` passes; or
    nothing, at the end of the step."""

    def each(self, zero: int) -> bool:
        """Return whether a ZeRO stage sends it for each micro-batch, not once a step."""
        return self.beside != "end" and zero >= (2 if self.beside == "sums" else 3)


class DataWork(NamedTuple):
    """Seconds of collectives over copies by what they run beside, of a micro-batch where they are
    sent for each.
    """

    forward: float = 0.0
    backward: float = 0.0
    sums: float = 0.0
    between: float = 0.0
    end: float = 0.0

    def scaled(self, part: float) -> "DataWork":
        """Return those of a part of the layers."""
        return DataWork(*(part * seconds for seconds in self))


class WeightCopies:
    """What ranks of a layout hold copies of, by what a rank computes; equal parts are counted."""

    def __init__(self, decoder: Decoder, split: Split) -> None:
        self.decoder, self.split = decoder, split
        self._parts: dict[Part, PartCopies] = {}
        self._known: dict[Held, Counter[Collective]] = {}

    def collectives(self, held: Held) -> Counter[Collective]:
        """Return the collectives of a rank with their number, of a micro-batch where they are sent
        for each; those of a group of one rank send nothing. Not to be changed.
        """
        if held in self._known:
            return self._known[held]
        found, joined = Counter[Collective](), dict[tuple[Kind, bool], float]()
        for part, number, once in self.uses(held):
            for one in part.buckets:
                found[one] += number if one.each(self.split.zero) else once
            for group, elements in part.joined.items():
                joined[group] = joined.get(group, 0.0) + once * elements
        size = self.split.numbers.gradient_bytes
        for group, elements in joined.items():
            if elements:
                found[Collective(*group, "all_reduce", elements * size, "end")] += 1
        self._known[held] = found
        return found

    def trained(self, held: Held) -> tuple[float, float]:
        """Return the trained elements that a rank computes with, and those of them it updates."""
        parts = [(once, part) for part, _, once in self.uses(held)]
        return sum(n * one.trained for n, one in parts), sum(n * one.own for n, one in parts)

    def uses(self, held: Held) -> Iterator[tuple["PartCopies", int, int]]:
        """Yield parts, how often a micro-batch uses them, and how many of them there are.

        A tied table is the head too, and each further token looks up rows of it.
        """
        tied = self.decoder.tied
        table = held.embedding + held.multi_token + (held.loss and tied)
        parts: list[tuple[Part, int]] = [*inner_parts(held), ("embedding", table)]
        parts.append(("head", int(held.loss and not tied)))
        for part, number in parts:
            if number:
                if part not in self._parts:
                    self._parts[part] = PartCopies.of(self.decoder, part, self.split)
                yield self._parts[part], number, 1 if part == "embedding" else number


copies_of = remembered(1 << 10)(WeightCopies)


class PartCopies(NamedTuple):
    """What one part of a model makes ranks exchange."""

    buckets: tuple[Collective, ...]
    joined: dict[tuple[Kind, bool], float]
    """Elements by the group over which all of a rank's are summed at once: of copies that nothing
    shares out, of what tensor ranks hold whole, and of a table on two stages."""
    trained: float
    """Elements that a rank computes with."""
    own: float
    """Those of them that it updates."""

    @classmethod
    def of(cls, decoder: Decoder, part: Part, split: Split) -> "PartCopies":
        """Return that of a part."""
        joined, trained, own = dict[tuple[Kind, bool], float](), 0.0, 0.0
        for weight in part_weights(decoder, part):
            inner = split.levels(weight.expert)[0]
            here = round(weight.part(*split.sizes)) * (not weight.frozen)
            trained, own = trained + here, own + here / inner
            kinds: dict[Kind, float] = {
                "edp" if weight.expert else "dp_cp": here * (inner == 1),
                "tp": here / inner * (not weight.cuts),
                "stages": here / inner * (part == "embedding"),
            }
            for kind, elements in kinds.items():
                group = kind, kind in ("dp_cp", "edp")
                joined[group] = joined.get(group, 0.0) + elements
        return cls(tuple(_buckets(decoder, part, split)), joined, trained, own)


def _buckets(decoder: Decoder, part: Part, split: Split) -> Iterator[Collective]:
    """Yield the collectives of a part's buckets."""
    buckets = Counter[tuple[bool, bool, bool, float]]()
    for weight in part_weights(decoder, part):
        if split.levels(weight.expert)[0] > 1 and (split.zero == 3 or not weight.frozen):
            elements = aligned(round(weight.part(*split.sizes)))
            buckets[weight.expert, weight.frozen, *_read(weight, split)] += elements
    for (expert, frozen, _, width), elements in buckets.items():
        (inner, outer), kind = split.levels(expert), cast("Kind", "edp" if expert else "dp_cp")
        length = aligned(-(-elements // inner))
        whole = length * inner
        ends = split.zero == 3 and part in ("embedding", "head")
        way = "between" if ends else "forward"
        yield Collective(kind, False, "all_gather", whole * width, way)
        if split.zero == 3 and not ends:
            yield Collective(kind, False, "all_gather", whole * width, "backward")
        if not frozen:
            size = split.numbers.gradient_bytes
            yield Collective(kind, False, "reduce_scatter", whole * size, "sums")
            if outer > 1:
                yield Collective(kind, True, "all_reduce", length * size, "end")


def _read(weight: Weight, split: Split) -> tuple[bool, float]:
    """Return whether a weight is gathered as codes, and the bytes of an element."""
    numbers = split.numbers
    wide, narrow = numbers.master_bytes, numbers.weight_bytes or numbers.master_bytes
    codes = GATHERED.get(weight.codes.kind) if isinstance(weight, CodedWeight) else None
    if codes is not None:
        return True, codes
    if weight.frozen and weight.narrow:
        return False, narrow
    return False, wide if weight.master or len(weight.shape) < 2 else narrow


def reach_of(case: Case, one: Collective) -> Reach:
    """Return how the group of a collective lies over domains."""
    sizes, folding, cluster = case.sizes, case.folding, case.cluster
    if one.kind == "tp":
        return reach(cluster, sizes.tp, 1)
    if one.kind == "stages":  # those that hold the table of tokens
        tied, stages = case.decoder.tied, enumerate(case.held)
        holds = [n for n, h in stages if h.embedding or h.multi_token or (h.loss and tied)]
        return lying(cluster, [folding.on_stage(0, stage) for stage in holds])
    inner, outer = Split.of(case).levels(one.kind == "edp")
    if case.order != ORDERS[0]:  # a pipeline lies between data ranks
        ranks = folding.group(one.kind, 0)
        return lying(cluster, ranks[::inner] if one.across else ranks[:inner])
    stride = sizes.ep * sizes.etp if one.kind == "edp" else sizes.tp
    return reach(cluster, *((outer, stride * inner) if one.across else (inner, stride)))


def data_work(case: Case, held: Held, rates: Rates) -> DataWork:
    """Return the seconds of a rank's collectives over copies by what it holds."""
    found: dict[str, float] = dict.fromkeys(DataWork._fields, 0.0)
    for one, number in copies_of(case.decoder, Split.of(case)).collectives(held).items():
        ways = 2 if one.op == "all_reduce" else 1
        group = reach_of(case, one)
        found[one.beside] += number * ways * ring_seconds(one.bytes, group, case.cluster, rates)
    return DataWork(**found)


def shown(
    case: Case, work: DataWork, held: Held, passes: tuple[float, float], rates: Rates
) -> tuple[float, float]:
    """Return the seconds of a step's collectives over copies: what shows, and what hides.

    Weights of a unit come while the one before computes, so that those of a chunk's first do not
    hide. Gradients go while the next unit's backward runs; where products of weights wait, all are
    complete at once, when nothing of their chunk is left to hide under.

    Args:
        work: what is sent.
        held: what the rank computes.
        passes: seconds of its forward and its backward of a micro-batch.
    """
    zero, v = case.keeping.zero, case.sizes.vpp
    gathers, sums = _times(zero, case.micro_batches)
    once, each = HIDDEN_ONCE, rates.hidden_shards
    layers = held.number + held.multi_token
    ahead = 1 - min(1.0, v / max(layers, 1)) if zero == 3 else 1.0
    if case.software.cuda_graphs == "full":
        ahead = 0.0  # a step that is one graph begins when all weights are there
    schedule, pp = case.schedule, case.sizes.pp
    lines = fullest_steps(schedule, pp, v, settled(schedule, pp, case.micro_batches))
    waits = schedule.paired or any(step.kind == "W" for line in lines for step in line)
    going = 1.0 if not waits else 1 - 1 / v if sums == 1 else 0.0
    free = (each if zero == 3 else once) * passes[0], (each if zero > 1 else once) * passes[1]
    hidden = gathers * min(ahead * work.forward, free[0])
    hidden += sums * min(ahead * work.backward + going * work.sums, free[1])
    sent = gathers * (work.forward + work.backward + work.between) + sums * work.sums + work.end
    return sent - hidden, hidden


def least(work: DataWork, zero: int, m: int, seconds: float, rates: Rates) -> float:
    """Return the least of them that shows beside passes of so many seconds for a micro-batch."""
    gathers, sums = _times(zero, m)
    moved = gathers * (work.forward + work.backward) + sums * work.sums
    free = max(gathers, sums) * max(HIDDEN_ONCE, rates.hidden_shards) * seconds
    return gathers * work.between + work.end + max(0.0, moved - free)


def _times(zero: int, m: int) -> tuple[int, int]:
    """Return how often a step gathers for passes, and sums."""
    return m if zero == 3 else 1, m if zero > 1 else 1
