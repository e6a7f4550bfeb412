"""What dispatch and combine send, there and back, for every way of sending rows.

D hidden, K experts per token, E experts, P ranks of ep, S of etp. A forward exchange of n rows is
followed, in backward, by one of n rows the other way, so that what counts is what leaves a rank
(``out``) and what arrives (``come``): either leaves it once. Routed as a step was, numbers are
exact; else they are what balanced routing gives on average.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb

from moefold.kernels.quantise.config import Quantise
from moefold.moe.config import Moe
from moefold.planner.case import Case
from moefold.planner.memory_saved import layer_shape
from moefold.spec.layer import INDEX, STATISTIC
from tests.traffic import calls
from tests.traffic.calls import (
    BACKWARD,
    BALANCED,
    FORWARD,
    Call,
    Step,
    gathers,
    layers_of,
    paired,
    runs,
)

NUMBER = 8
"""Bytes of a row's number."""
ONCE = ("alltoall_once", "two_level", "deep_ep", "hybrid_ep", "nccl_ep")
"""Ways that send a row once to each of its ranks, and with it all its choices."""


@dataclass(frozen=True)
class Hop:
    """Rows of one exchange, seen from one rank."""

    group: str
    out: float
    """To other ranks."""
    come: float
    """From other ranks."""


def expert(case: Case, rank: int, step: Step = BALANCED) -> Iterator[Call]:
    """Yield what dispatch and combine of a rank exchange in a step, and the counts before."""
    if case.sizes.ep * case.sizes.etp == 1 or case.dispatch == "local":
        return
    again = runs(case, "moe")
    for number, block in layers_of(case, rank):
        record = block.ffn
        if not isinstance(record, Moe):
            continue
        if step.choices is None:
            yield from _layer(
                case, record, step, _mean(case, record), case.num_micro_batches, again
            )
            continue
        for micro in range(case.num_micro_batches):
            routed = _Routed(case, record, rank, step.choices[number, micro])
            yield from _layer(case, record, step, routed.flow(), 1, again)


@dataclass(frozen=True)
class _Flow:
    """One layer's exchanges of one micro-batch."""

    hops: tuple[Hop, ...]
    slices: float
    """Rows that come to this rank's place among the slices of its experts."""
    others: float
    """Rows that come to the other slices."""
    rows: float
    """Rows of this rank."""
    elsewhere: float
    """Rows of all other ranks that share the experts."""


def _layer(
    case: Case, record: Moe, step: Step, flow: _Flow, count: int, again: int
) -> Iterator[Call]:
    """Yield the calls of one layer in so many micro-batches like this one."""
    sizes, shape = case.sizes, layer_shape(case)
    hidden, k = getattr(record, "latent", None) or shape.hidden, record.router.top_k
    row, members = hidden * shape.width, sizes.ep * sizes.etp
    if case.clones and sizes.ep > 1:
        yield from _clones(case, record, count, again)
    beside = paired(case)
    extras = (k * STATISTIC, k * INDEX) if case.dispatch in (*ONCE, "allgather") else (STATISTIC,)
    make = _Maker(count, again, beside)
    thin = _coded(case, hidden) or row
    there = [(thin, *extras)] + [(NUMBER, *extras)] * _numbered(case)
    for parts in there:
        told = gathers(_told(case, record) * INDEX, members)
        for _ in range(bool(told) * (2 if case.dispatch == "spread" else 1)):
            yield make("tp_ep", "all_gather", told, "counts")
        yield from _sent(case, record, flow, make, parts)
    if case.dispatch in ("padded", "spread"):
        yield from _fixed(case, record, row, thin, make)
        return
    grads = (row, extras[0])  # ids have no gradient
    if case.dispatch == "allgather":
        # A second run ends with what backward reads, and nothing reads these sums.
        yield make("tp_ep", "scatter_rows", flow.elsewhere * row, "combine", last=True)
        yield make("tp_ep", "gather_rows", flow.rows * (members - 1) * thin, "combine", True)
        for size in grads:
            yield make("tp_ep", "scatter_rows", flow.elsewhere * size, "dispatch", True)
        return
    for hop in flow.hops:
        yield make(hop.group, "all_to_all", hop.come * row, "combine", last=beside)
        yield make(hop.group, "all_to_all", hop.out * thin, "combine", True)
        for size in grads:
            yield make(hop.group, "all_to_all", hop.come * size, "dispatch", True)
    if sizes.etp > 1:
        mine, theirs = flow.slices * (sizes.etp - 1), flow.others
        yield make("etp", "scatter_rows", theirs * row, "combine", last=beside)
        yield make("etp", "gather_rows", mine * thin, "combine", True)
        for size in grads:
            yield make("etp", "scatter_rows", theirs * size, "dispatch", True)


def _clones(case: Case, record: Moe, count: int, again: int) -> Iterator[Call]:
    """Yield the counts that plan clones, their weights in pieces, and their gradients.

    The plan is made once; weights come again in backward, with the block or by themselves.
    """
    sizes, shape, experts = case.sizes, layer_shape(case), record.router.experts
    counts = gathers(experts * INDEX, sizes.ep * sizes.etp)
    yield Call("tp_ep", "all_gather", counts, count, part="clones", beside=paired(case))
    elements = 3 * shape.hidden * record.width // sizes.etp
    piece = -(-elements // sizes.ep)
    for number in (experts // sizes.ep, case.clones):
        sent = number * (sizes.ep - 1) * piece
        weights, sums = sent * shape.width, sent * STATISTIC
        yield Call("ep", "all_to_all", weights, count * again, part="experts")
        if again == 1:
            yield Call("ep", "all_to_all", weights, count, BACKWARD, "experts")
        yield Call("ep", "all_to_all", sums, count, BACKWARD, "experts")


@dataclass(frozen=True)
class _Maker:
    """Makes the calls of one layer."""

    count: int
    again: int
    beside: bool

    def __call__(
        self, group: str, op: str, size: float, part: str, back: bool = False, last: bool = False
    ) -> Call:
        """Return a call; ``last`` says that a second run stops before it.

        One that runs in pieces leaves out its last piece, the combine.
        """
        times = 1 if back or last else self.again
        way = BACKWARD if back else FORWARD
        return Call(group, op, size, self.count * times, way, part, self.beside)


def _sent(
    case: Case, record: Moe, flow: _Flow, make: _Maker, parts: Sequence[float]
) -> Iterator[Call]:
    """Yield a dispatch forward, of which ``parts`` are the bytes of a row and what goes with it."""
    sizes = case.sizes
    if case.dispatch == "allgather":
        for size in parts:
            moved = flow.rows * (sizes.ep * sizes.etp - 1) * size
            yield make("tp_ep", "gather_rows", moved, "dispatch")
    elif case.dispatch in ("padded", "spread"):
        dealt, moved, gathered = _rooms(case, record)
        for size in parts:
            if sizes.ep > 1:
                yield make("ep", "all_to_all", moved * size, "dispatch")
            if sizes.ep > 1 and dealt:
                yield make("ep", "all_to_all", dealt * size, "dispatch")
            if sizes.etp > 1:
                yield make("etp", "all_gather", gathered * size, "dispatch")
    else:
        for size in parts:
            for hop in flow.hops:
                yield make(hop.group, "all_to_all", hop.out * size, "dispatch")
            if sizes.etp > 1:
                yield make("etp", "gather_rows", flow.slices * (sizes.etp - 1) * size, "dispatch")


def _rooms(case: Case, record: Moe) -> tuple[float, float, float]:
    """Return rows of equal splits: dealt in a hop before, sent over ep, and gathered over etp."""
    sizes, needed = case.sizes, layer_shape(case).rows * record.router.top_k * case.load
    dealt = 0.0
    stated = case.fixed_dispatch.max_rows if case.fixed_dispatch else None
    if case.dispatch == "padded":
        room = stated or needed / sizes.ep
    else:
        dealt = -(-(stated or needed) // sizes.ep)
        room = dealt + sizes.ep
    others = sizes.ep - 1
    return dealt * others, room * others, room * sizes.ep * (sizes.etp - 1)


def _fixed(case: Case, record: Moe, row: float, thin: float, make: _Maker) -> Iterator[Call]:
    """Yield the rest of equal splits: what is sent does not depend on the routing."""
    sizes, (dealt, moved, gathered) = case.sizes, _rooms(case, record)
    for rows in (moved, dealt) if sizes.ep > 1 else ():
        if rows:
            for size in (row, STATISTIC):
                yield make("ep", "all_to_all", rows * size, "dispatch", True)
            yield make("ep", "all_to_all", rows * row, "combine", last=make.beside)
            yield make("ep", "all_to_all", rows * thin, "combine", True)
    if sizes.etp > 1:
        for size in (row, STATISTIC):
            yield make("etp", "reduce_scatter", gathered * size, "dispatch", True)
        yield make("etp", "reduce_scatter", gathered * row, "combine", last=make.beside)
        yield make("etp", "all_gather", gathered * thin, "combine", True)


def _numbered(case: Case) -> bool:
    """Return whether numbers of rows follow these: codes of a micro-batch's rows, in its order."""
    return isinstance(case.decoder.quantise, Quantise) and case.decoder.quantise.scales_per_run


def _coded(case: Case, hidden: int) -> int | None:
    """Return the bytes of a row's codes and scales, where they travel in its place."""
    record = case.decoder.quantise
    if not isinstance(record, Quantise) or record.wire != "codes":
        return None
    blocks = -(-hidden // (record.block or record.block_length or hidden))
    return hidden + blocks * (1 if record.kind == "mxfp8" else STATISTIC)


def _told(case: Case, record: Moe) -> int:
    """Return how many counts a rank tells the others before rows are sent."""
    ranks = case.sizes.ep
    nodes, seats = case.num_expert_domains, record.router.experts + ranks * case.clones
    return {
        "alltoall": seats,
        "padded": seats,
        "spread": seats,
        "alltoall_once": 2 * ranks,
        "two_level": nodes + 2 * ranks,
        "allgather": 1 + ranks,
    }.get(case.dispatch, 0)


def _mean(case: Case, record: Moe) -> _Flow:
    """Return the rows of balanced routing."""
    sizes, shape = case.sizes, layer_shape(case)
    copies, ranks = shape.rows * record.router.top_k, sizes.ep
    members = ranks * sizes.etp
    hops: tuple[Hop, ...] = ()
    taken = float(copies)
    if case.dispatch in ("alltoall", "alltoall_once"):
        taken = copies if case.dispatch == "alltoall" else shape.rows * spread(record, ranks)
        sent = taken * (ranks - 1) / ranks
        hops = (Hop("ep", sent, sent),) if ranks > 1 else ()
    elif case.dispatch in ONCE:
        nodes = case.num_expert_domains
        each = ranks // nodes
        across = shape.rows * spread(record, nodes) * (nodes - 1) / nodes
        taken = shape.rows * spread(record, ranks)
        inside = taken * (each - 1) / each
        hops = _named(each, ranks, (across, across), (inside, inside))
    others = taken * (sizes.etp - 1)
    return _Flow(hops, taken, others, shape.rows, shape.rows * (members - 1))


def _named(
    inner: int, ranks: int, outward: tuple[float, float], inward: tuple[float, float]
) -> tuple[Hop, ...]:
    """Return two hops, the one between nodes first, of those that have several ranks."""
    hops = []
    if inner < ranks:
        hops.append(Hop(calls.across("ep", inner), *outward))
    if inner > 1:
        hops.append(Hop(calls.inside("ep", inner, ranks), *inward))
    return tuple(hops)


class _Routed:
    """One layer's routing in one micro-batch, on all ranks that share its experts."""

    def __init__(
        self, case: Case, record: Moe, rank: int, choices: Mapping[int, Sequence[Sequence[int]]]
    ) -> None:
        self._case, self._each = case, record.router.experts // case.sizes.ep
        folding = case.folding
        spot = folding.expert_coordinates(rank)
        self._ep, self._etp = spot.ep, spot.etp
        self._by_spot: dict[tuple[int, int], Sequence[Sequence[int]]] = {}
        for other in folding.group("tp_ep", rank):
            there = folding.expert_coordinates(other)
            self._by_spot[there.ep, there.etp] = choices[other]

    def flow(self) -> _Flow:
        """Return this rank's rows."""
        case, here = self._case, (self._ep, self._etp)
        rows = {spot: len(tokens) for spot, tokens in self._by_spot.items()}
        if case.dispatch == "allgather":
            hops, slices = (), [0] * case.sizes.etp
        elif case.dispatch in ("alltoall", "alltoall_once"):
            hops, slices = self._one_level(case.dispatch == "alltoall_once")
        else:
            hops, slices = self._two_levels()
        others = sum(slices) - slices[self._etp]
        elsewhere = sum(rows.values()) - rows[here]
        return _Flow(hops, slices[self._etp], others, rows[here], elsewhere)

    def _needs(self, source: tuple[int, int], target: int, each: int, once: bool) -> int:
        """Return rows that a rank has for the ``target``-th stretch of ``each`` experts."""
        first = target * each
        hits = (sum(first <= e < first + each for e in token) for token in self._by_spot[source])
        return sum(map(bool, hits) if once else hits)

    def _one_level(self, once: bool) -> tuple[tuple[Hop, ...], list[int]]:
        p, i, ranks, each = self._ep, self._etp, self._case.sizes.ep, self._each
        out = sum(self._needs((p, i), q, each, once) for q in range(ranks) if q != p)
        come = sum(self._needs((q, i), p, each, once) for q in range(ranks) if q != p)
        slices = [
            sum(self._needs((q, j), p, each, once) for q in range(ranks))
            for j in range(self._case.sizes.etp)
        ]
        return ((Hop("ep", out, come),) if ranks > 1 else ()), slices

    def _two_levels(self) -> tuple[tuple[Hop, ...], list[int]]:
        """A row goes to the rank of its place on the other node, and from there to its ranks."""
        i, nodes = self._etp, self._case.num_expert_domains
        inner = self._case.sizes.ep // nodes
        here, place = divmod(self._ep, inner)

        def across(source: int, to: int) -> int:
            return self._needs((source, i), to, self._each * inner, True)

        def inside(relay: int, target: int, slice_: int) -> int:
            sources = [(node * inner + relay, slice_) for node in range(nodes)]
            return sum(self._needs(s, here * inner + target, self._each, True) for s in sources)

        away = [node for node in range(nodes) if node != here]
        near = [one for one in range(inner) if one != place]
        outward = (
            sum(across(self._ep, node) for node in away),
            sum(across(node * inner + place, here) for node in away),
        )
        inward = (
            sum(inside(place, one, i) for one in near),
            sum(inside(one, place, i) for one in near),
        )
        hops = _named(inner, inner * nodes, outward, inward)
        slices = [
            sum(inside(one, place, j) for one in range(inner)) for j in range(self._case.sizes.etp)
        ]
        return hops, slices


def spread(record: Moe, places: int) -> float:
    """Return over how many of ``places`` the experts of a token lie on average.

    Places hold equal shares of the experts; choices are alike and free, or limited to groups.
    """
    router = record.router
    experts, chosen = router.experts, router.top_k
    if router.groups is not None:
        experts = experts // router.groups.count * router.groups.keep
        places = min(places, max(1, places * router.groups.keep // router.groups.count))
    each = experts / places
    if each >= 1 and each == int(each):
        missed = comb(experts - int(each), chosen) / comb(experts, chosen)
    else:
        missed = max(0.0, 1 - chosen * each / experts)
    return places * (1 - missed)
