"""What copies of weights exchange: sums of gradients, and weights that data ranks share out.

As ``parallel/data`` lays them out: parameters of a unit whose copies live on the same ranks, and
that products take in the same dtype or as codes, are one row of elements, each at a multiple of
``ALIGN``, cut into equal runs. Tensor ranks sum what none of them cuts, end stages a tied
embedding.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, gcd, prod

from moefold.kernels.quantise.config import Quantise
from moefold.mesh.partition import aligned
from moefold.planner.case import Case
from moefold.spec.decoder import embedding_weight, final_norm_weight, head_weight
from moefold.spec.layer import Weight
from moefold.spec.quantised import quantised_weight_names
from tests.traffic.calls import (
    BACKWARD,
    BALANCED,
    FORWARD,
    Call,
    Step,
    across,
    elements_here,
    gathers,
    has,
    inside,
    place_weights,
    stage_of,
    sums,
)

TABLE = "embed.weight"
WIDE = (TABLE, "router.weight")
"""Matrices that layers read in the master's dtype; vectors are read so anyway."""
CODES = {"fp8_tensor": 1, "fp8_block": 1, "nvfp4": 0.5}
"""Bytes an element of weights that travel as codes; kinds with two sets of codes send the wide."""
AMAX = 4
"""Bytes of the largest magnitude of a block, or of a matrix."""


@dataclass(frozen=True)
class Bucket:
    """Parameters of one unit that ranks share out alike."""

    unit: str
    kind: str
    """The group over which copies of it run."""
    ranks: int
    """That share it."""
    wide: bool
    """Whether weights are gathered as masters."""
    coded: bool
    """Whether they are gathered as codes."""
    weights: tuple[tuple[Weight, int, int], ...]
    """With the elements here, and where they begin."""
    length: int
    """Elements of a rank's run."""

    def run(self, at: int) -> dict[str, tuple[int, int]]:
        """Return the first element of each parameter that the run at a place has, and the end."""
        start, stop = at * self.length, (at + 1) * self.length
        return {
            weight.name: (
                min(max(start - begin, 0), count),
                min(max(stop - begin, 0), count),
            )
            for weight, count, begin in self.weights
        }


def data(case: Case, rank: int, step: Step = BALANCED) -> Iterator[Call]:
    """Yield what a rank exchanges in a step so that gradients are whole and weights are new."""
    weights = held(case, rank)
    buckets = buckets_of(case, weights)
    yield from _whole(case, rank, weights, buckets)
    for kind in ("dp_cp", "edp"):
        inner, outer = levels(case, kind)
        if inner > 1:
            continue
        count = sum(round(elements_here(case, w)) for w in weights if copies_of(w) == kind)
        if outer > 1 and count:
            size = count * case.number_formats.gradient_bytes
            yield Call(kind, "all_reduce", sums(size, outer), 1, BACKWARD, "gradients")
    for bucket in buckets:
        yield from _shared(case, rank, bucket)


def held(case: Case, rank: int) -> list[Weight]:
    """Return the parameters that a rank has a piece of, in the order of the model."""
    places = case.contents.parts[stage_of(case, rank)]
    layers = [p for chunk in places for p in chunk if p.kind not in ("embedding", "loss")]
    found = [w for place in layers for w in place_weights(case, place)]
    ends = has(case, rank, "loss")
    if has(case, rank, "embedding") or (ends and case.decoder.tied):
        found.insert(0, embedding_weight(case.decoder))
    if ends:
        found.append(final_norm_weight(case.decoder))
        if not case.decoder.tied:
            found.append(head_weight(case.decoder))
    return found


def levels(case: Case, kind: str) -> tuple[int, int]:
    """Return how many ranks share one copy of a parameter, and how many copies there are."""
    folding = case.folding
    ranks = folding.edp if kind == "edp" else folding.dp * case.sizes.cp
    inner = gcd(case.layout.zero_ranks or ranks, ranks) if case.layout.zero else 1
    return inner, ranks // inner


def buckets_of(case: Case, weights: list[Weight]) -> list[Bucket]:
    """Return the rows of elements that data ranks share."""
    alike: dict[tuple[str, str, bool, bool], list[Weight]] = {}
    narrow = quantised_weight_names(case.decoder) if _kind(case) in CODES else {}
    for weight in weights:
        if levels(case, copies_of(weight))[0] > 1:
            wide = len(weight.shape) < 2 or weight.name.endswith(WIDE)
            wide = wide or case.number_formats.recipe == "fp32"
            key = _unit(weight.name), copies_of(weight), wide, weight.name in narrow
            alike.setdefault(key, []).append(weight)
    found = []
    for (unit, kind, wide, coded), members in alike.items():
        parts, end = [], 0
        for weight in members:
            count = round(elements_here(case, weight))
            parts.append((weight, count, end))
            end = aligned(end + count)
        ranks = levels(case, kind)[0]
        length = aligned(-(-end // ranks))
        found.append(Bucket(unit, kind, ranks, wide, coded, tuple(parts), length))
    return found


def _shared(case: Case, rank: int, bucket: Bucket) -> Iterator[Call]:
    """Yield the gathers and sums of one row of elements."""
    numbers, zero, m = case.number_formats, case.layout.zero, case.num_micro_batches
    outer = levels(case, bucket.kind)[1]
    group = inside(bucket.kind, bucket.ranks, bucket.ranks * outer)
    width = numbers.master_bytes if bucket.wide else numbers.weight_bytes or numbers.master_bytes
    if bucket.coded:
        width = CODES[_kind(case)]
        if case.decoder.quantise.scaling == "current":  # type: ignore[union-attr]
            yield from _amaxes(case, bucket, group)
    share = gathers(bucket.length * width, bucket.ranks)
    uses = _uses(case, rank, bucket.unit)
    if zero < 3:
        yield Call(group, "all_gather", share, 1, FORWARD, "weights")
    else:
        yield Call(group, "all_gather", share, m * uses, FORWARD, "weights")
        # The head's products and their gradients are one pass; a table's gradient reads no table.
        if bucket.unit not in ("embed", "head"):
            yield Call(group, "all_gather", share, m * uses, BACKWARD, "weights")
    size = bucket.length * numbers.gradient_bytes
    times = 1 if zero == 1 else m * uses
    yield Call(group, "reduce_scatter", gathers(size, bucket.ranks), times, BACKWARD, "gradients")
    if outer > 1:
        copies = across(bucket.kind, bucket.ranks)
        yield Call(copies, "all_reduce", sums(size, outer), 1, BACKWARD, "gradients")


def _kind(case: Case) -> str:
    """Return what products of weights run in, where that is few bits."""
    record = case.decoder.quantise
    return record.kind if isinstance(record, Quantise) else ""


def _amaxes(case: Case, bucket: Bucket, group: str) -> Iterator[Call]:
    """Yield the maxima, once a step, of blocks over who shares them and of matrices over slices."""
    record, sizes = case.decoder.quantise, dict(case.sizes)
    assert isinstance(record, Quantise)
    blocks = matrices = 0
    for weight, *_ in bucket.weights:
        shape, lead = list(weight.shape), int(weight.is_expert)
        for dim, units in weight.cuts:
            shape[dim] //= sizes[units.axis]
        count, rows, columns = prod(shape[:lead]), prod(shape[lead:-1]), shape[-1]
        block = record.block or record.block_length or max(rows, columns)
        blocks += count * ceil(rows / block) * ceil(columns / block)
        matrices += count
    size = sums(blocks * AMAX, bucket.ranks)
    yield Call(group, "all_reduce_max", size, 1, FORWARD, "weights")
    axis = "etp" if bucket.kind == "edp" else "tp"
    if record.has_matrix_scale and sizes[axis] > 1:
        size = sums(matrices * AMAX, sizes[axis])
        yield Call(axis, "all_reduce_max", size, 1, FORWARD, "weights")


def _whole(case: Case, rank: int, weights: list[Weight], buckets: list[Bucket]) -> Iterator[Call]:
    """Yield the sums of what tensor ranks hold whole, and of a tied table on both end stages."""
    own: dict[str, int] = {}
    for bucket in buckets:
        group = case.folding.group(bucket.kind, rank)
        run = bucket.run(group.index(rank) % bucket.ranks)
        own |= {name: end - first for name, (first, end) in run.items()}
    here = {w.name: own.get(w.name, round(elements_here(case, w))) for w in weights}
    bytes_each = case.number_formats.gradient_bytes
    tp = case.sizes.tp
    if tp > 1:
        count = sum(here[w.name] for w in weights if not w.cuts)
        if count:
            yield Call("tp", "all_reduce", sums(count * bytes_each, tp), 1, BACKWARD, "gradients")
    stages = embedding_stages(case)
    if len(stages) > 1 and stage_of(case, rank) in stages and here.get(TABLE):
        group = "stages " + ",".join(map(str, stages))
        size = here[TABLE] * bytes_each
        yield Call(group, "all_reduce", sums(size, len(stages)), 1, BACKWARD, "gradients")


def embedding_stages(case: Case) -> tuple[int, ...]:
    """Return the pipeline ranks that hold the table of tokens."""
    wanted = {"embedding", "loss"} if case.decoder.tied else {"embedding"}
    return tuple(
        stage
        for stage, chunks in enumerate(case.contents.parts)
        if any(place.kind in wanted for chunk in chunks for place in chunk)
    )


def _uses(case: Case, rank: int, unit: str) -> int:
    """Return how often one micro-batch passes a unit: a tied table as embedding and as head."""
    if unit != "embed" or not case.decoder.tied:
        return 1
    return has(case, rank, "embedding") + has(case, rank, "loss")


def copies_of(weight: Weight) -> str:
    """Return the kind of group over which copies of a parameter run."""
    return "edp" if weight.is_expert else "dp_cp"


def _unit(name: str) -> str:
    words = name.split(".")
    return ".".join(words[: 2 if words[0] == "layers" else 1])
