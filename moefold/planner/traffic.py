"""What one rank sends in a step: each collective with its group, bytes and number.

T rows of a rank, P rows of its tensor group, D hidden, K experts per token, E experts. Bytes are
what the rank sends in the cheapest form of the operation, as ``comm/`` records them: a ring for
sums and gathers, rows for other ranks in an exchange. Where they depend on routing they are what
balanced routing gives on average.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import comb

from moefold.layers.config import Gqa, Mla
from moefold.model.config import Block
from moefold.moe.config import Moe
from moefold.planner.case import Case
from moefold.planner.foreign import Nothing
from moefold.planner.memory_kept import INDEX, STATISTIC, Shape
from moefold.planner.memory_state import Weight, place_weights
from moefold.schedule.transfers import Transfer, with_transfers

FORWARD, BACKWARD = "forward", "backward"
LOSS_CHUNK = 1024
MASTER = 4
"""Bytes of an element of the embedding's rows and of gradients that tensor ranks add: fp32."""


@dataclass(frozen=True)
class Call:
    """Equal operations of one rank in a step."""

    group: str
    """Kind of group, as :data:`moefold.mesh.folding.KINDS` names it."""
    op: str
    bytes: float
    """Sent to others in one operation."""
    count: int
    """Operations in the step."""
    direction: str = FORWARD
    part: str = ""
    """What it is for."""

    @property
    def total(self) -> float:
        """Bytes sent in the step."""
        return self.bytes * self.count


def traffic(case: Case, rank: int) -> tuple[Call, ...]:
    """Return everything that a rank of pipeline rank ``rank`` sends in a step."""
    parts = (tensor, context, expert, pipeline, data, statistics)
    return tuple(call for part in parts for call in part(case, rank) if call.total)


def gathers(size: float, ranks: int) -> float:
    """Return what a rank sends so that all have every rank's ``size`` bytes."""
    return size * (ranks - 1)


def sums(size: float, ranks: int) -> float:
    """Return what a rank sends so that all have the sum of ``size`` bytes."""
    return 2 * size * (ranks - 1) / ranks


def both(group: str, size: float, ranks: int, count: int, again: int, part: str) -> Iterator[Call]:
    """Yield a gather of ``size`` bytes per rank and its mirror, a scattered sum of all of them.

    Either sends the same; ``again`` says how often forward runs.
    """
    moved = gathers(size, ranks)
    yield Call(group, "all_gather", moved, count * again, FORWARD, part)
    yield Call(group, "reduce_scatter", moved, count, BACKWARD, part)


def scattered(
    group: str, size: float, ranks: int, count: int, again: int, part: str
) -> Iterator[Call]:
    """Yield a scattered sum that leaves ``size`` bytes on each rank, and its mirror, a gather."""
    moved = gathers(size, ranks)
    yield Call(group, "reduce_scatter", moved, count * again, FORWARD, part)
    yield Call(group, "all_gather", moved, count, BACKWARD, part)


def blocks_of(case: Case, rank: int) -> Iterator[tuple[Block, int]]:
    """Yield each different block of a pipeline rank, and how often it runs in a step."""
    found: dict[int, tuple[Block, int]] = {}
    for chunk in case.places[rank]:
        for place in chunk:
            if place.kind in ("layer", "multi_token"):
                block = case.blocks[place.index if place.kind == "layer" else -1]
                known = found.get(id(block), (block, 0))[1]
                found[id(block)] = block, known + case.micro_batches
    yield from found.values()


def runs(case: Case, *modules: str) -> int:
    """Return how often forward of a module runs for one micro-batch: again where recomputed."""
    return 2 if case.keeping.recompute & {"block", *modules} else 1


def tensor(case: Case, rank: int) -> Iterator[Call]:
    """Yield what tensor ranks exchange: rows into each half, sums out of it, and at both ends."""
    tp, shape = case.sizes.tp, Shape.of(case)
    if tp == 1:
        return
    row = shape.rows * shape.hidden * shape.width
    for block, count in blocks_of(case, rank):
        again = runs(case)
        yield from _attention_rows(block, shape, count, again)
        if isinstance(block.ffn, Nothing):
            continue
        part = "shared" if isinstance(block.ffn, Moe) else "ffn"
        if not isinstance(block.ffn, Moe) or block.ffn.shared is not None:
            again = runs(case, part)
            yield from both("tp", row, tp, count, again, part)
            yield from scattered("tp", row, tp, count, again, part)
    kinds = {place.kind for chunk in case.places[rank] for place in chunk}
    if "embedding" in kinds:
        size = shape.rows * shape.hidden * MASTER
        yield from scattered("tp", size, tp, case.micro_batches, 1, "embedding")
    if "loss" in kinds:
        yield Call("tp", "all_gather", gathers(row, tp), case.micro_batches, part="loss")
        yield Call("tp", "reduce_scatter", gathers(row, tp), case.micro_batches, part="loss")
        chunks = -(-shape.piece // LOSS_CHUNK)
        each = min(LOSS_CHUNK, shape.piece) * STATISTIC
        for width in (1, 2):
            # The largest logit of a row, then its normaliser and its label's logit.
            yield Call("tp", "all_reduce", sums(each * width, tp), case.micro_batches * chunks)


def _attention_rows(block: Block, shape: Shape, count: int, again: int) -> Iterator[Call]:
    record, tp = block.attention, shape.tp
    if isinstance(record, Nothing):
        return
    width = shape.hidden
    if isinstance(record, Mla):
        width = (record.q_rank or shape.hidden) + record.kv_rank + record.rope_dim
    size = shape.rows * width * shape.width
    yield from both("tp", size, tp, count, again, "attention")
    out = shape.rows * shape.hidden * shape.width
    yield from scattered("tp", out, tp, count, again, "attention")
    if isinstance(record, Gqa) and record.qk_norm == "projection":
        moved = sums(shape.piece * STATISTIC, tp)
        yield Call("tp", "all_reduce", moved, 2 * count * again, FORWARD, "norms")
        yield Call("tp", "all_reduce", moved, 2 * count, BACKWARD, "norms")


def context(case: Case, rank: int) -> Iterator[Call]:
    """Yield what context ranks exchange in attention: keys and values, or heads for rows."""
    cp, shape = case.sizes.cp, Shape.of(case)
    if cp == 1:
        return
    for block, count in blocks_of(case, rank):
        sizes = _heads(block, shape)
        if sizes is None:
            continue
        keys, all_heads = sizes
        again = runs(case, "attention")
        if case.context == "ring":
            # Forward passes keys and values on; backward passes them and their gradients.
            yield Call("cp", "send", keys, (cp - 1) * count * again, FORWARD, "attention")
            yield Call("cp", "send", 2 * keys, (cp - 1) * count, BACKWARD, "attention")
        elif case.context == "allgather":
            yield from both("cp", keys, cp, count, again, "attention")
        else:
            moved = all_heads * (cp - 1) / cp
            yield Call("cp", "all_to_all", moved, count * again, FORWARD, "attention")
            yield Call("cp", "all_to_all", moved, count, BACKWARD, "attention")


def _heads(block: Block, shape: Shape) -> tuple[float, float] | None:
    """Return bytes of keys and values, and of queries, keys, values and outputs of all heads."""
    record, one = block.attention, shape.piece * shape.width / shape.tp
    if isinstance(record, Mla):
        qk_dim = record.nope_dim + record.rope_dim
        keys = one * record.heads * (qk_dim + record.v_dim)
        return keys, keys + one * record.heads * (qk_dim + record.v_dim)
    if isinstance(record, Gqa):
        keys = one * 2 * record.kv_heads * record.head_dim
        return keys, keys + one * 2 * record.heads * record.head_dim
    return None


def expert(case: Case, rank: int) -> Iterator[Call]:
    """Yield what dispatch and combine exchange."""
    if case.sizes.ep * case.sizes.etp == 1 or case.dispatch == "local":
        return
    for block, count in blocks_of(case, rank):
        if isinstance(block.ffn, Moe):
            yield from _exchanges(case, block.ffn, count)


def _exchanges(case: Case, record: Moe, count: int) -> Iterator[Call]:
    again, shape = runs(case, "moe"), Shape.of(case)
    hidden = getattr(record, "latent", None) or shape.hidden
    row = hidden * shape.width
    for group, op, rows, extra in _ways(case, record, shape):
        moved = rows * (row + extra)
        yield Call(group, op, moved, count * again, FORWARD, "dispatch")
        yield Call(group, op, moved, count, BACKWARD, "dispatch")
        yield Call(group, op, rows * row, count * again, FORWARD, "combine")
        yield Call(group, op, rows * row, count, BACKWARD, "combine")


def _ways(case: Case, record: Moe, shape: Shape) -> Iterator[tuple[str, str, float, float]]:
    """Yield group, operation, rows that a rank sends and bytes that go with each, in dispatch."""
    sizes, router = case.sizes, record.router
    copies, ranks = shape.rows * router.top_k, sizes.ep
    remote = (ranks - 1) / ranks
    choices = router.top_k * (INDEX + STATISTIC)
    if case.dispatch == "allgather":
        rows = shape.rows * (sizes.ep * sizes.etp - 1)
        yield "tp_ep", "all_gather", rows, choices
        return
    if case.dispatch == "alltoall":
        yield "ep", "all_to_all", copies * remote, STATISTIC
    elif case.dispatch == "padded":
        yield "ep", "all_to_all", copies * case.load * remote, STATISTIC + INDEX
    elif case.dispatch == "deduplicated":
        yield "ep", "all_to_all", shape.rows * spread(record, ranks) * remote, choices
    else:
        domains = _domains(case)
        nodes, inside = spread(record, domains), spread(record, ranks)
        yield "ep", "between_nodes", shape.rows * nodes * (domains - 1) / domains, choices
        each = ranks / domains
        yield "ep", "within_node", shape.rows * inside * (each - 1) / each, choices
    if sizes.etp > 1:
        yield "etp", "gather_rows", copies * (sizes.etp - 1), STATISTIC


def _domains(case: Case) -> int:
    """Return over how many domains of fast links the ranks of an expert group lie."""
    ranks = case.folding.group("ep", 0)
    return len({one // case.cluster.domain for one in ranks})


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


def pipeline(case: Case, rank: int) -> Iterator[Call]:
    """Yield the rows and gradients that go to neighbouring stages, from the schedule's table."""
    shape = Shape.of(case)
    row = shape.rows * shape.hidden * shape.width
    sent = {"output": 0, "gradient": 0}
    for part in with_transfers(case.table)[rank]:
        if isinstance(part, Transfer) and part.way == "send":
            sent[part.result.what] += 1
    yield Call("pp", "send", row, sent["output"], FORWARD, "rows")
    yield Call("pp", "send", row, sent["gradient"], BACKWARD, "rows")


def data(case: Case, rank: int) -> Iterator[Call]:
    """Yield what copies of weights exchange: sums of gradients, and weights that are shared."""
    weights = [one for chunk in case.places[rank] for p in chunk for one in place_weights(case, p)]
    kinds = [place.kind for chunk in case.places[rank] for place in chunk]
    matrix = Weight("embed.weight", (case.decoder.vocab, case.decoder.hidden), 0)
    ends = ("loss" in kinds) + ("embedding" in kinds)
    weights += [matrix] * (1 if case.decoder.tied and ends else ends)
    whole = sum(w.local(case) for w in weights if w.cut is None and not w.expert)
    if case.sizes.tp > 1:
        moved = sums(whole * case.numbers.gradient_bytes, case.sizes.tp)
        yield Call("tp", "all_reduce", moved, 1, BACKWARD, "gradients")
    folding = case.folding
    shares = (("dp_cp", folding.dp * case.sizes.cp, False), ("edp", folding.edp, True))
    for group, ranks, expert in shares:
        elements = sum(w.local(case) for w in weights if w.expert == expert)
        if ranks > 1 and elements:
            yield from _copies(case, group, ranks, elements)


def _copies(case: Case, group: str, ranks: int, elements: float) -> Iterator[Call]:
    numbers, zero, m = case.numbers, case.keeping.zero, case.micro_batches
    gradients = elements * numbers.gradient_bytes
    if zero == 0:
        yield Call(group, "all_reduce", sums(gradients, ranks), 1, BACKWARD, "gradients")
        return
    reductions = 1 if zero == 1 else m
    share = gathers(gradients / ranks, ranks)
    yield Call(group, "reduce_scatter", share, reductions, BACKWARD, "gradients")
    width = numbers.weight_bytes or numbers.master_bytes
    share = gathers(elements * width / ranks, ranks)
    if zero < 3:
        yield Call(group, "all_gather", share, 1, FORWARD, "weights")
        return
    yield Call(group, "all_gather", share, m, FORWARD, "weights")
    yield Call(group, "all_gather", share, m, BACKWARD, "weights")


def statistics(case: Case, rank: int) -> Iterator[Call]:
    """Yield counts of rows before an exchange, and the routers' counters at the end of a step."""
    sizes, folding = case.sizes, case.folding
    stage = folding.world // sizes.pp
    members = sizes.ep * sizes.etp
    for block, count in blocks_of(case, rank):
        if not isinstance(block.ffn, Moe):
            continue
        experts, layers = block.ffn.router.experts, count // case.micro_batches
        if members > 1 and case.dispatch == "alltoall":
            moved = gathers(experts * INDEX, members)
            yield Call("tp_ep", "all_gather", moved, count * runs(case, "moe"), part="counts")
        if stage > 1:
            # Load, sent, and tokens in int64, probabilities in fp32.
            size = layers * (2 * experts * INDEX + INDEX + experts * STATISTIC)
            yield Call("stage", "all_reduce", sums(size, stage), 1, part="counters")
