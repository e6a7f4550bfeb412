"""What one rank sends in a step: each collective with its group, bytes and number.

T rows of a rank, P rows of its tensor group, D hidden, K experts per token, E experts. Bytes are
what the rank sends in the cheapest form of the operation, as ``comm/`` records them: a ring for
sums and gathers, rows for other ranks in an exchange. Where they depend on routing they are those
of the step's own routing if it is given, else what balanced routing gives on average.

Micro-batches are whole sequences of one length. Not counted is what the training loop says around
a step.
"""

from collections.abc import Iterator

from moefold.layers.config import Gathered
from moefold.layers.kinds.gqa import Gqa
from moefold.layers.kinds.mla import Mla
from moefold.model.config import Block
from moefold.moe.config import Aux, Moe, Z
from moefold.planner.case import Case
from moefold.planner.memory_saved import layer_shape
from moefold.planner.untrained import AbsentLayer
from moefold.spec.layer import INDEX, STATISTIC, Shape
from tests.schedule_checker import Transfer, with_transfers
from tests.traffic.amaxes import amaxes
from tests.traffic.calls import (
    BACKWARD,
    BALANCED,
    FORWARD,
    Call,
    Step,
    across,
    blocks_of,
    both,
    gathers,
    has,
    inside,
    layers_of,
    runs,
    scattered,
    stage_of,
    sums,
)
from tests.traffic.data import data
from tests.traffic.experts import expert
from tests.traffic.optimizer import optimizer
from tests.traffic.rings import lent

MASTER = 4
"""Bytes of an element of the embedding's rows: fp32."""
FIGURE = 8
"""Bytes of a number of the step's: fp64, or int64."""


def traffic(case: Case, rank: int, step: Step = BALANCED) -> tuple[Call, ...]:
    """Return every operation of a rank in a step."""
    parts = (tensor, context, expert, pipeline, data, amaxes, optimizer, router, control)
    return tuple(call for part in parts for call in part(case, rank, step) if call.count)


def tensor(case: Case, rank: int, step: Step = BALANCED) -> Iterator[Call]:
    """Yield what tensor ranks exchange: rows into each half, sums out of it, and at both ends."""
    tp, shape = case.sizes.tp, layer_shape(case)
    if tp == 1:
        return
    row = shape.rows * shape.hidden * shape.width
    for block, count in blocks_of(case, rank):
        yield from _attention_rows(case, block, shape, count)
        if isinstance(block.ffn, AbsentLayer):
            continue
        shared = block.ffn.shared if isinstance(block.ffn, Moe) else None
        if isinstance(block.ffn, Moe) and shared is None:
            continue
        part = "ffn" if shared is None else "shared"
        again = runs(case, part)
        yield from both("tp", row, tp, count, runs(case, part, "gather"), part)
        # A second run ends with the last thing that backward reads: the sum of shares is beyond
        # that where nothing reads it, as a gate does, and no more of the block follows.
        follows = shared is not None and (shared.gate or "block" in case.recompute)
        yield from scattered("tp", row, tp, count, again if follows else 1, part)
    if has(case, rank, "embedding"):
        size = shape.rows * shape.hidden * MASTER
        yield from scattered("tp", size, tp, case.num_micro_batches, 1, "embedding")
    if has(case, rank, "loss"):
        yield from _loss(case)


def _loss(case: Case) -> Iterator[Call]:
    """Yield what the loss over a shared vocabulary exchanges: rows, and statistics of chunks."""
    tp, shape, m = case.sizes.tp, layer_shape(case), case.num_micro_batches
    row = shape.rows * shape.hidden * shape.width
    yield Call("tp", "all_gather", gathers(row, tp), m, part="loss")
    yield Call("tp", "reduce_scatter", gathers(row, tp), m, part="loss")
    chunk = case.software.loss_chunk
    whole, rest = divmod(shape.piece, chunk)
    for rows, count in ((chunk, whole), (rest, min(rest, 1))):
        # Log-sum-exp of a row over a share, and its label's logit.
        moved = gathers(2 * rows * STATISTIC, tp)
        yield Call("tp", "all_gather", moved, m * count, part="loss")


def _attention_rows(case: Case, block: Block, shape: Shape, count: int) -> Iterator[Call]:
    record, tp, again = block.attention, shape.tp, runs(case)
    if isinstance(record, AbsentLayer):
        return
    width = shape.hidden
    if isinstance(record, Mla):
        width = (record.q_rank or shape.hidden) + record.kv_rank + record.rope_dim
    size = shape.rows * width * shape.width
    yield from both("tp", size, tp, count, runs(case, "gather"), "attention")
    out = shape.rows * shape.hidden * shape.width
    yield from scattered("tp", out, tp, count, again, "attention")
    if isinstance(record, Gqa) and record.qk_norm == "projection":
        moved = sums(shape.piece * STATISTIC, tp)
        # What is dropped of norms is made again for who keeps it; rotation keeps nothing.
        yield Call("tp", "all_reduce", moved, 2 * count * again, FORWARD, "norms")
        yield Call("tp", "all_reduce", moved, 2 * count, BACKWARD, "norms")


def context(case: Case, rank: int, step: Step = BALANCED) -> Iterator[Call]:
    """Yield what context ranks exchange in attention: keys and values, or heads for rows."""
    cp, shape = case.sizes.cp, layer_shape(case)
    if cp == 1:
        return
    for block, count in blocks_of(case, rank):
        sizes = _heads(block, shape)
        if sizes is None:
            continue
        keys, rest = sizes
        again = runs(case, "attention")
        if isinstance(case.context, Gathered):
            yield from both("cp", keys, cp, count, again, "attention")
            continue
        inner = case.context.sharing_heads(cp)
        if inner > 1:
            group = inside("cp", inner, cp)
            yield from _exchanged(case, group, keys, rest, inner, count)
        if inner < cp:
            yield from _ring(case, rank, keys, inner, count, again)


def _exchanged(
    case: Case, group: str, keys: float, rest: tuple[float, float], ranks: int, count: int
) -> Iterator[Call]:
    """Yield heads for rows: queries, keys and values in one exchange, outputs in another."""
    again = runs(case, "attention")
    # A second run of the attention alone ends before its outputs go back to their rows.
    ends = runs(case)
    queries, out = rest
    for size, times in ((keys + queries, again), (out, ends)):
        moved = size * (ranks - 1) / ranks
        yield Call(group, "all_to_all", moved, count * times, FORWARD, "attention")
        yield Call(group, "all_to_all", moved, count, BACKWARD, "attention")


def _ring(case: Case, rank: int, keys: float, inner: int, count: int, again: int) -> Iterator[Call]:
    """Yield the rounds of a ring: rows go to the ranks that see them, their gradients back home."""
    group = across("cp", inner)
    ranks = case.sizes.cp // inner
    place = case.folding.attention_coordinates(rank).cp // inner
    rows = case.micro_batch * case.seq // ranks
    each = keys / (case.micro_batch * case.seq // case.sizes.cp) / inner
    lengths = (case.seq,) * case.micro_batch
    for by in range(1, ranks):
        given = lent(lengths, rows, ranks, place, (place + by) % ranks) * each
        taken = lent(lengths, rows, ranks, (place - by) % ranks, place) * each
        yield Call(group, "shift", given, count * again, FORWARD, "attention")
        yield Call(group, "shift", given, count, BACKWARD, "attention")
        yield Call(group, "shift", taken, count, BACKWARD, "attention")


def _heads(block: Block, shape: Shape) -> tuple[float, tuple[float, float]] | None:
    """Return bytes of keys and values of a rank's rows, and of their queries and outputs."""
    record, one = block.attention, shape.piece * shape.width / shape.tp
    if isinstance(record, Mla):
        qk_dim = record.nope_dim + record.rope_dim
        queries, values = one * record.heads * qk_dim, one * record.heads * record.v_dim
        return queries + values, (queries, values)
    if isinstance(record, Gqa):
        keys, heads = one * record.kv_heads * record.head_dim, one * record.heads * record.head_dim
        return 2 * keys, (heads, heads)
    return None


def pipeline(case: Case, rank: int, step: Step = BALANCED) -> Iterator[Call]:
    """Yield the rows and gradients that neighbouring stages pass on, from the schedule's table."""
    shape = layer_shape(case)
    row = shape.rows * shape.hidden * shape.width
    ways = {"output": FORWARD, "gradient": BACKWARD}
    count = dict.fromkeys(((way, what) for way in ("send", "receive") for what in ways), 0)
    for part in with_transfers(case.table)[stage_of(case, rank)]:
        if isinstance(part, Transfer):
            count[part.way, part.result.kind] += 1
    for (way, what), times in count.items():
        yield Call("pp", way, row if way == "send" else 0, times, ways[what], "rows")


def router(case: Case, rank: int, step: Step = BALANCED) -> Iterator[Call]:
    """Yield what routers tell each other: who competes for capacity, and what terms count."""
    ranks = case.sizes.tp * case.sizes.cp
    rows = case.rows
    for _, block in layers_of(case, rank):
        record = block.ffn
        if not isinstance(record, Moe):
            continue
        m, k, experts = case.num_micro_batches, record.router.top_k, record.router.experts
        if record.capacity is not None and ranks > 1:
            competing = [rows * k * INDEX, rows * INDEX]
            if record.capacity.drop == "probs":
                competing.append(rows * k * STATISTIC)
            for size in competing:
                yield Call("tp_cp", "all_gather", gathers(size, ranks), m, part="capacity")
        over = {term.over for term in record.balance if isinstance(term, Aux) and term.coefficient}
        if over and ranks > 1:
            counts = experts * INDEX * (case.micro_batch if "sequence" in over else 1)
            yield Call("tp_cp", "all_reduce", sums(counts, ranks), m, part="balance")
        if "global_batch" in over and case.folding.dp > 1:
            told = gathers(experts * INDEX, case.folding.dp)
            yield Call("dp", "all_gather", told, m, part="balance")


def control(case: Case, rank: int, step: Step = BALANCED) -> Iterator[Call]:
    """Yield the step's own numbers: labels and rows, routers' counters, loss and norm."""
    folding = case.folding
    stage = folding.world // case.sizes.pp
    if folding.dp > 1:
        yield Call("dp", "all_reduce", sums(2 * FIGURE, folding.dp), 1, part="step")
    mixtures = [b.ffn for _, b in layers_of(case, rank) if isinstance(b.ffn, Moe)]
    if stage > 1 and mixtures:
        experts = sum(record.router.experts for record in mixtures)
        # Choices, those let through, tokens; then probabilities in fp32.
        for size in (experts * INDEX, experts * INDEX, len(mixtures) * INDEX, experts * STATISTIC):
            yield Call("stage", "all_reduce", sums(size, stage), 1, part="counters")
    if folding.world > 1:
        # Norm, loss, one for each term, whether rows lacked room, and whether to stop.
        size = (3 + len(_terms(case)) + (case.dispatch in ("padded", "spread"))) * FIGURE
        yield Call("world", "all_reduce", sums(size, folding.world), 1, part="figures")


def _terms(case: Case) -> set[str]:
    """Return the names of the routers' loss terms."""
    records = [block.ffn for block in case.decoder.blocks if isinstance(block.ffn, Moe)]
    terms = [term for record in records for term in record.balance]
    return {
        f"aux_{term.over}" if isinstance(term, Aux) else "z"
        for term in terms
        if isinstance(term, Aux | Z) and term.coefficient > 0
    }
