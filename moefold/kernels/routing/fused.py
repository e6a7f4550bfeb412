"""Top-k choice of experts, routing weights, and sort of copies by expert, as Triton kernels.

T token rows, E experts, K experts per token, B buckets, C = T * K copies. Choices and order of
copies equal those of the plain functions in ``moe/`` exactly.
"""

from typing import Any

import torch
from torch import Tensor

from moefold.kernels.function import Function
from moefold.kernels.fused import Op, cdiv, jit, next_power_of_2, tl

ELEMENTS = 1024
"""Scores of a program's block of rows."""
ROWS = 64
"""Rows of a program's block of weights."""
COMPARISONS = 8192
WARPS = 8
"""Pairs of a copy and a bucket that a program compares at once; warps of a program."""
MAX_CHUNKS = 128
"""Largest number of programs among which copies are divided; each reads the counts of all."""
NONE = -(1 << 31)
"""Key below those of all scores, for absent or already chosen experts."""
MAX_BUCKETS = 1024
"""Largest number of buckets whose counts fit in a program."""
UNCHANGED, NORMALISED, SOFTMAX = range(3)
"""Rules from chosen scores to weights: unchanged, divided by their sum, or softmax."""


@jit
def _key(value):
    """Return an int32 ordered as the fp32: zeros are equal, NaN is largest, none is INT_MIN."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(value != value, 0x7FFFFFFF, ordered)


@jit
def _select(
    scores, bias, valid, ids,
    tokens, experts, groups,
    K: tl.constexpr, KEEP: tl.constexpr, BEST: tl.constexpr, ROWS: tl.constexpr,
    GROUPS: tl.constexpr, SLOTS: tl.constexpr, NONE: tl.constexpr,
):  # fmt: skip
    """Choose the experts of a block of rows; experts are arranged [GROUPS, SLOTS], both padded."""
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    g = tl.arange(0, GROUPS)
    s = tl.arange(0, SLOTS)
    size = experts // groups
    expert = g[:, None] * size + s[None, :]
    in_group = ((g < groups)[:, None] & (s < size)[None, :])[None]
    score_ptrs = scores + t[:, None, None] * experts + expert[None]
    value = tl.load(score_ptrs, mask=(t < tokens)[:, None, None] & in_group, other=0.0)
    if bias is not None:
        value += tl.load(bias + expert[None], mask=in_group, other=0.0)
    key = tl.where(in_group, _key(value), NONE)
    if GROUPS > 1:
        remaining = key
        rank = tl.zeros((ROWS, GROUPS), tl.float32)
        for _b in range(BEST):
            hit = s[None, None, :] == tl.argmax(remaining, 2, keep_dims=True)
            rank += tl.sum(tl.where(hit, value, 0.0), 2)
            remaining = tl.where(hit, NONE, remaining)
        group_key = tl.where((g < groups)[None, :], _key(rank), NONE)
        kept_groups = tl.zeros((ROWS, GROUPS), tl.int1)
        for _k in range(KEEP):
            hit_g = g[None, :] == tl.argmax(group_key, 1, keep_dims=True)
            kept_groups = kept_groups | hit_g
            group_key = tl.where(hit_g, NONE, group_key)
        key = tl.where(kept_groups[:, :, None], key, NONE)
    key = tl.reshape(key, (ROWS, GROUPS * SLOTS))
    lane = tl.arange(0, GROUPS * SLOTS)
    in_rows = (t < tokens)[:, None]
    for k in range(K):
        position = tl.argmax(key, 1, keep_dims=True)
        key = tl.where(lane[None, :] == position, NONE, key)
        choice = position // SLOTS * size + position % SLOTS
        if valid is not None:
            choice = tl.where(
                tl.load(valid + t[:, None], mask=in_rows, other=0) != 0, choice, experts
            )
        tl.store(ids + t[:, None] * K + k, choice.to(tl.int64), mask=in_rows)


@jit
def _count(bucket, counts, copies, chunk, LANES: tl.constexpr, CHUNK: tl.constexpr):
    """Count a chunk's copies by bucket."""
    number = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    total = tl.zeros((LANES,), tl.int32)
    for first in range(0, chunk, CHUNK):
        c = number * chunk + first + tl.arange(0, CHUNK)
        b = tl.load(bucket + c, mask=c < copies, other=-1)
        total += tl.sum((b[:, None] == lane[None, :]).to(tl.int32), 0)
    tl.store(counts + number * LANES + lane, total)


@jit
def _place(
    bucket, counts, token, copy, row, offs,
    copies, tokens, top_k, buckets, chunks, chunk,
    LANES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Compute the row of each copy of a chunk from the counts of all chunks."""
    number = tl.program_id(0)
    lane = tl.arange(0, LANES)
    p = tl.arange(0, CHUNK)
    total = tl.zeros((LANES,), tl.int32)
    before = tl.zeros((LANES,), tl.int32)
    for n in range(chunks):
        counts_n = tl.load(counts + n * LANES + lane)
        total += counts_n
        before += tl.where(n < number, counts_n, 0)
    ends = tl.cumsum(total, 0)
    if number < 1:
        tl.store(offs + lane, ends, mask=lane < buckets)
    starts = ends - total
    real = tl.sum(tl.where(lane < buckets, total, 0), 0)
    # Copies without a bucket come last; a padding lane may have counted some of them.
    unassigned = real + number * chunk - tl.sum(tl.where(lane < buckets, before, 0), 0)
    for first in range(0, chunk, CHUNK):
        c = number.to(tl.int64) * chunk + first + p
        b = tl.load(bucket + c, mask=c < copies, other=-1)
        earlier = (b[:, None] == b[None, :]) & (p[None, :] < p[:, None])
        rank = tl.sum(earlier.to(tl.int32), 1)
        hit = b[:, None] == lane[None, :]
        position = tl.sum(tl.where(hit, (starts + before)[None, :], 0), 1)
        position = (tl.where(b < buckets, position, unassigned) + rank).to(tl.int64)
        before += tl.sum(hit.to(tl.int32), 0)
        unassigned += tl.sum((b == buckets).to(tl.int32), 0)
        inside = c < copies
        tl.store(row + c, tl.where(b < buckets, position, copies), mask=inside)
        tl.store(copy + position, c, mask=inside)
        tl.store(token + position, tl.where(b < buckets, c // top_k, tokens), mask=inside)


@jit
def _apply_rule(value, mask, epsilon, RULE: tl.constexpr):
    """Return weights [ROWS, K] before scaling, and the divisor of the scores."""
    total = 1.0
    if RULE == 2:
        top = tl.max(tl.where(mask, value, float("-inf")), 1, keep_dims=True)
        value = tl.exp(value - top)
    if RULE > 0:
        total = tl.sum(tl.where(mask, value, 0.0), 1, keep_dims=True)
    if RULE == 1:
        total += epsilon
    return value / total, total


@jit
def _weights(
    scores, ids, weights,
    tokens, experts, top_k, epsilon, scale,
    RULE: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Compute the weights of the chosen experts of a block of rows."""
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, LANES)
    inside = (t < tokens)[:, None] & (k < top_k)[None, :]
    offsets = t[:, None] * top_k + k[None, :]
    chosen = tl.minimum(tl.load(ids + offsets, mask=inside, other=0), experts - 1)
    value = tl.load(scores + t[:, None] * experts + chosen, mask=inside, other=1.0)
    weight, _ = _apply_rule(value, (k < top_k)[None, :], epsilon, RULE)
    tl.store(weights + offsets, weight * scale, mask=inside)


@jit
def _weights_backward(
    dweights, scores, ids, dscores,
    tokens, experts, epsilon, scale,
    RULE: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, LANES: tl.constexpr,
    EXPERTS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of all scores of a block of rows from that of the weights."""
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, LANES)
    inside = (t < tokens)[:, None] & (k < K)[None, :]
    offsets = t[:, None] * K + k[None, :]
    chosen = tl.load(ids + offsets, mask=inside, other=experts)
    score_ptrs = scores + t[:, None] * experts + tl.minimum(chosen, experts - 1)
    value = tl.load(score_ptrs, mask=inside, other=1.0)
    weight, total = _apply_rule(value, (k < K)[None, :], epsilon, RULE)
    dweight = tl.load(dweights + offsets, mask=inside, other=0.0) * scale
    dchosen = dweight
    if RULE > 0:
        along = tl.sum(tl.where((k < K)[None, :], dweight * weight, 0.0), 1, keep_dims=True)
        dchosen = (dweight - along) * weight if RULE == 2 else (dweight - along) / total
    e = tl.arange(0, EXPERTS)
    grad = tl.zeros((ROWS, EXPERTS), tl.float32)
    for slot in range(K):
        selected = k[None, :] == slot
        expert = tl.sum(tl.where(selected, chosen, 0), 1, keep_dims=True)
        gradient = tl.sum(tl.where(selected, dchosen, 0.0), 1, keep_dims=True)
        grad += tl.where(e[None, :] == expert, gradient, 0.0)
    dscore_ptrs = dscores + t[:, None] * experts + e[None, :]
    tl.store(dscore_ptrs, grad, mask=(t < tokens)[:, None] & (e < experts)[None, :])


def select_experts(
    scores_TE: Tensor,
    bias_E: Tensor | None,
    valid_T: Tensor | None,
    top_k: int,
    groups: int,
    keep: int,
    best: int,
) -> Tensor:
    """Return int64 ids [T, K] of the best experts by score plus bias, ties by lowest id.

    Args:
        scores_TE: fp32 scores; NaN counts as the largest.
        bias_E: fp32, added to the scores for the choice only.
        valid_T: bool; other rows get the id E. None if all rows are valid.
        top_k: K.
        groups: number of equal groups of neighbouring experts; 1 is no groups.
        keep: number of groups whose experts can be chosen.
        best: number of a group's highest scores whose sum ranks the group.
    """
    ids_TK = _empty_ids(scores_TE, bias_E, valid_T, top_k, groups, keep, best)
    tokens, experts = scores_TE.shape
    padded = next_power_of_2(groups), next_power_of_2(experts // groups)
    rows = max(1, ELEMENTS // (padded[0] * padded[1]))
    if tokens:
        _select[(cdiv(tokens, rows),)](
            scores_TE.contiguous(), bias_E, valid_T, ids_TK, tokens, experts, groups,
            top_k, keep, best, rows, *padded, NONE,
        )  # fmt: skip
    return ids_TK


def sort_buckets(buckets_TK: Tensor, buckets: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``token_C``, ``copy_C``, ``row_TK`` and int32 ``offs_B`` of copies sorted by bucket.

    A bucket of B, one past the last, means "none". Copies are ordered by bucket, then by index: two
    launches, without atomics or a comparison sort.
    """
    results = token_C, copy_C, row_TK, offs_B = _empty_order(buckets_TK, buckets)
    (tokens, top_k) = buckets_TK.shape
    copies = buckets_TK.numel()
    if not copies:
        offs_B.zero_()
        return results
    chunk, chunks, block = _chunks(copies, buckets)
    counts = offs_B.new_empty(chunks, block[0])
    buckets_TK = buckets_TK.contiguous()
    _count[(chunks,)](buckets_TK, counts, copies, chunk, *block, num_warps=WARPS)
    _place[(chunks,)](
        buckets_TK, counts, token_C, copy_C, row_TK, offs_B, copies, tokens, top_k, buckets,
        chunks, chunk, *block, num_warps=WARPS,
    )  # fmt: skip
    return results


def count_buckets(buckets_TK: Tensor, buckets: int) -> Tensor:
    """Return the number of entries of each bucket, int64 [B], without entries of B."""
    copies = buckets_TK.numel()
    chunk, chunks, block = _chunks(copies, buckets)
    counts = torch.empty(chunks, block[0], dtype=torch.int32, device=buckets_TK.device)
    if copies:
        buckets_TK = buckets_TK.contiguous()
        _count[(chunks,)](buckets_TK, counts, copies, chunk, *block, num_warps=WARPS)
    return counts[:, :buckets].sum(0)


def chosen_weights(
    scores_TE: Tensor, ids_TK: Tensor, rule: int, epsilon: float, scale: float
) -> Tensor:
    """Return weights [T, K] of the chosen experts.

    Args:
        scores_TE: fp32 scores.
        ids_TK: int64 experts; E, one past the last, reads the last and has no gradient.
        rule: rule from chosen scores to weights.
        epsilon: added to the sum that divides scores with ``NORMALISED``.
        scale: final factor on the weights.
    """
    weights_TK = _empty_weights(scores_TE, ids_TK, rule, epsilon, scale)
    (tokens, experts) = scores_TE.shape
    top_k = ids_TK.shape[1]
    if tokens:
        _weights[(cdiv(tokens, ROWS),)](
            scores_TE.contiguous(), ids_TK.contiguous(), weights_TK, tokens, experts, top_k,
            epsilon, scale, rule, ROWS, next_power_of_2(top_k),
        )  # fmt: skip
    return weights_TK


def chosen_weights_backward(
    dweights_TK: Tensor, scores_TE: Tensor, ids_TK: Tensor, rule: int, epsilon: float, scale: float
) -> Tensor:
    """Return ``dscores_TE``, which is zero for experts that were not chosen."""
    dscores_TE = scores_TE.new_empty(scores_TE.shape)
    (tokens, experts) = scores_TE.shape
    top_k = ids_TK.shape[1]
    lanes = next_power_of_2(experts)
    rows = max(1, ELEMENTS // lanes)
    if tokens:
        _weights_backward[(cdiv(tokens, rows),)](
            dweights_TK.contiguous(), scores_TE.contiguous(), ids_TK.contiguous(), dscores_TE,
            tokens, experts, epsilon, scale, rule, rows, top_k, next_power_of_2(top_k), lanes,
        )  # fmt: skip
    return dscores_TE


def _empty_ids(
    scores_TE: Tensor, bias_E: Any, valid_T: Any, top_k: int, groups: int, keep: int, best: int
) -> Tensor:
    return scores_TE.new_empty(scores_TE.shape[0], top_k, dtype=torch.int64)


def _empty_order(buckets_TK: Tensor, buckets: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    copies = buckets_TK.numel()
    token_C = buckets_TK.new_empty(copies)
    copy_C = buckets_TK.new_empty(copies)
    row_TK = buckets_TK.new_empty(buckets_TK.shape)
    return token_C, copy_C, row_TK, buckets_TK.new_empty(buckets, dtype=torch.int32)


def _empty_weights(
    scores_TE: Tensor, ids_TK: Tensor, rule: int, epsilon: float, scale: float
) -> Tensor:
    return scores_TE.new_empty(ids_TK.shape)


def _chunks(copies: int, buckets: int) -> tuple[int, int, tuple[int, int]]:
    """Return copies per chunk, number of chunks, and (padded buckets, copies per iteration)."""
    lanes = next_power_of_2(buckets)
    step = max(8, min(64, COMPARISONS // lanes))
    chunk = step * max(1, cdiv(copies, step * MAX_CHUNKS))
    return chunk, cdiv(copies, chunk), (lanes, step)


select = Op(select_experts, _empty_ids)
order = Op(sort_buckets, _empty_order)
count = Op(count_buckets, lambda buckets_TK, buckets: buckets_TK.new_empty(buckets))
_chosen_weights = Op(chosen_weights, _empty_weights)
_chosen_weights_backward = Op(
    chosen_weights_backward, lambda dweights_TK, scores_TE, *_: scores_TE.new_empty(scores_TE.shape)
)


def routing_weights(
    scores_TE: Tensor, ids_TK: Tensor, rule: int, epsilon: float, scale: float
) -> Tensor:
    """Return the weights of :func:`chosen_weights`, differentiable in ``scores_TE``."""
    return _RoutingWeights.apply(scores_TE, ids_TK, rule, epsilon, scale)


class _RoutingWeights(Function):
    @staticmethod
    def forward(ctx: Any, scores_TE: Tensor, ids_TK: Tensor, *args: Any) -> Tensor:
        ctx.save_for_backward(scores_TE, ids_TK)
        ctx.args = args
        return _chosen_weights(scores_TE, ids_TK, *args)

    @staticmethod
    def backward(ctx: Any, dweights_TK: Tensor) -> tuple[Tensor | None, ...]:
        scores_TE, ids_TK = ctx.saved_tensors
        dscores_TE = _chosen_weights_backward(dweights_TK, scores_TE, ids_TK, *ctx.args)
        return dscores_TE, None, None, None, None
