"""Forward passes through all stages without gradients: for evaluation and for generation.

T rows on this rank, D hidden, P texts, V vocabulary.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from moefold.comm.collectives import broadcast_, gather, receive, send, sum_
from moefold.comm.group import Group
from moefold.data.batch import MicroBatch, pack
from moefold.kernels.linear.product import linear
from moefold.layers.cache import KeyValueCache
from moefold.layers.flow import Flow, local_rows
from moefold.layers.saved_tensors import RoutingDecisions
from moefold.mesh.shares import largest_share, share
from moefold.parallel.apply import ModelParts

Score = Callable[..., Tensor]
"""``score(x_TD, head, flow, chunk=...)``: a function of the logits, computed ``chunk`` rows at a
time."""
RecordPass = Callable[[Sequence[Sequence[int]], MicroBatch], RoutingDecisions]
"""``record(texts, rows)``: the decisions of a pass through this rank's rows of texts."""


@torch.no_grad()
def score(parts: ModelParts, flow: Flow, score_fn: Score, chunk: int) -> Tensor | None:
    """Run a micro-batch through all stages; return its score on the last stage, else None."""
    x_TD = forward(parts, flow)
    if x_TD is None:
        return None
    with unsharded_head(parts):
        return score_fn(x_TD, parts.model.head_operand(), flow, chunk=chunk)


@torch.no_grad()
def next_logits(
    parts: ModelParts,
    texts: Sequence[Sequence[int]],
    cache: KeyValueCache | None = None,
    record: RecordPass | None = None,
) -> Tensor:
    """Return the logits [P, V] of the token that follows each text, on every rank.

    A collective call with the same texts on all ranks, none of them empty. The distributed
    :meth:`DecoderModel.next_logits`; with context ranks the cache is not used. ``record`` returns
    the pass's routing decisions, which it is told as they are made.
    """
    model = parts.model
    world = parts.world
    sizes = world.folding.sizes
    cache = cache if sizes.cp == 1 else None
    pad_to = sizes.row_multiple
    batch = pack(texts, pad_to) if cache is None else cache.next_rows(texts, pad_to)
    rows, piece = local_rows(batch, world)
    flow = Flow(
        rows.to(world.device),
        model.precision_policy,
        training=False,
        world=world,
        context=parts.layout.context,
        piece=None if piece is None else piece.to(world.device),
        cache=cache,
        dropless=True,
    )
    if record is not None:
        flow = replace(flow, decisions=record(texts, flow.rows))
    x_TD = forward(parts, flow)
    last_P = (batch.cu_seqlens[1:] - 1).long().to(world.device)
    vocab = model.record.vocab
    logits_PV = torch.zeros(
        len(texts), vocab, dtype=model.precision_policy.dtype, device=world.device
    )
    if x_TD is not None:
        with unsharded_head(parts):
            logits_PV = linear(_gather_rows(x_TD, flow, last_P), model.head_operand())
        logits_PV = _gather_vocabulary(logits_PV, vocab, world.group("tp"))
    last_rank = parts.table.rank_of(parts.table.stages - 1)
    return broadcast_(logits_PV, world.group("pp"), last_rank)


def incremental_logits(
    parts: ModelParts, record: RecordPass | None = None
) -> Callable[[Sequence[Sequence[int]]], Tensor]:
    """Return ``next_logits`` for growing texts, with a key-value cache where possible."""
    cache = KeyValueCache.of(parts.model.record)
    return partial(next_logits, parts, cache=cache, record=record)


def forward(parts: ModelParts, flow: Flow) -> Tensor | None:
    """Run every stage; return the normed rows ``x_TD`` on the last one, elsewhere None."""
    model = parts.model
    ranks = parts.world.group("pp")
    table = parts.table
    rank = parts.world.attention.pp
    chunks = {table.stage_of(rank, number): chunk for number, chunk in enumerate(parts.chunks)}
    x_TD: Tensor | None = None
    for stage in range(table.stages):
        source = table.rank_of(max(stage - 1, 0))
        owner = table.rank_of(stage)
        if source != owner and rank == source:
            assert x_TD is not None
            send(x_TD, ranks.ranks[owner], ranks).wait()
            x_TD = None
        if rank != owner:
            continue
        if source != owner:
            shape = (flow.rows.rows, model.record.hidden)
            x_TD = torch.empty(shape, dtype=model.precision_policy.dtype, device=parts.world.device)
            receive(x_TD, ranks.ranks[source], ranks).wait()
        chunk = chunks[stage]
        flow = replace(flow, unshard=parts.hooks_for(chunk, training=False))
        x_TD = model.start(flow) if chunk.has_embedding else x_TD
        assert x_TD is not None
        x_TD, _ = model.run(flow, x_TD, chunk.layers)
        if chunk.has_norm:
            x_TD = model.finish(flow, x_TD)
    return x_TD if table.rank_of(table.stages - 1) == rank else None


def unsharded_head(parts: ModelParts) -> AbstractContextManager[None]:
    """Unshard the head's matrix in this context."""
    hooks = parts.hooks_for(parts.chunks[-1], training=False)
    return hooks.unsharded(parts.model.head_unit)


def _gather_vocabulary(logits_Pv: Tensor, vocab: int, ranks: Group) -> Tensor:
    """Return the logits [P, V] of all tensor ranks, whose shares may differ by one column."""
    widest = largest_share(vocab, ranks.size)
    logits_RPv = gather(pad(logits_Pv, (0, widest - logits_Pv.shape[1])), ranks)
    shares = [share(vocab, ranks.size, index) for index in range(ranks.size)]
    columns = [
        logits_Pv[:, : end - start]
        for logits_Pv, (start, end) in zip(logits_RPv, shares, strict=True)
    ]
    return torch.cat(columns, 1)


def _gather_rows(x_TD: Tensor, flow: Flow, positions_P: Tensor) -> Tensor:
    """Return rows [P, D] at given positions in the micro-batch, from the ranks that have them."""
    row_T = flow.rows.row_T
    if row_T is None:
        return x_TD[positions_P]
    match_PT = (positions_P[:, None] == row_T[None]).to(x_TD.dtype)
    return sum_(match_PT @ x_TD, flow.world.group("tp_cp"))
