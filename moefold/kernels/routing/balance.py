"""Sums, counters and values of load balancing over a router's rows, as Triton kernels.

T token rows, all valid; E experts, K per token, P programs, D data ranks. Arithmetic is fp32. A sum
over rows consists of partial sums of P programs, which are added in a fixed order, so that it is
deterministic.
"""

from typing import Any

import torch
from torch import Tensor

from moefold.kernels.function import Function
from moefold.kernels.fused import Op, cdiv, contiguous_in_rows, jit, next_power_of_2, tl

ELEMENTS = 1024
"""Elements of a program's block of rows."""
MAX_PROGRAMS = 64
"""Largest number of programs among which rows are divided."""
TINY = torch.finfo(torch.float32).tiny
"""Smallest divisor of scores."""


@jit
def _partial_sums(values, partials, rows, experts, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    """Sum every P-th block of rows."""
    program = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.float32)
    for tile in range(program, tl.cdiv(rows, ROWS), tl.num_programs(0)):
        t = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        inside = (t < rows)[:, None] & (e < experts)[None, :]
        value_ptrs = values + t[:, None] * experts + e[None, :]
        total += tl.sum(tl.load(value_ptrs, mask=inside, other=0.0), 0)
    tl.store(partials + program * experts + e, total, mask=e < experts)


@jit
def _sum_partials(partials, column, programs, width, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the sum over all partial sums, for some columns."""
    total = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, programs, CHUNK):
        p = first + tl.arange(0, CHUNK)
        inside = (p < programs)[:, None] & (column < width)[None, :]
        partial_ptrs = partials + p[:, None] * width + column[None, :]
        total += tl.sum(tl.load(partial_ptrs, mask=inside, other=0.0), 0)
    return total


@jit
def _update_counters(
    partials, load, sent, by_rank, load_sum, sent_sum, tokens, plain_sum, probability_sum, running,
    programs, experts, valid, ranks, last,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add a micro-batch to the counters of some experts."""
    e = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask = e < experts
    loads = tl.load(load_sum + e, mask=mask, other=0) + tl.load(load + e, mask=mask, other=0)
    tl.store(load_sum + e, loads, mask=mask)
    sends = tl.load(sent_sum + e, mask=mask, other=0) + tl.load(sent + e, mask=mask, other=0)
    tl.store(sent_sum + e, sends, mask=mask)
    probability = _sum_partials(partials, e, programs, experts, CHUNK, COLUMNS)
    probability += tl.load(probability_sum + e, mask=mask, other=0.0)
    tl.store(probability_sum + e, probability, mask=mask)
    if tl.program_id(0) < 1:
        tl.store(tokens, tl.load(tokens) + valid)
    if by_rank is not None:
        plain = tl.load(plain_sum + e, mask=mask, other=0)
        prefix = plain
        for rank in range(ranks):
            plain += tl.load(by_rank + rank * experts + e, mask=mask, other=0)
            prefix = tl.where(rank == last, plain, prefix)
        tl.store(plain_sum + e, plain, mask=mask)
        tl.store(running + e, prefix, mask=mask)


@jit
def _load_balance(
    partials, counts, value, weight,
    programs, experts, top_k, population,
    CHUNK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Compute the value and its derivative by each expert's probability."""
    e = tl.arange(0, EXPERTS)
    count = tl.load(counts + e, mask=e < experts, other=0)
    tokens = tl.maximum(tl.sum(count, 0) // top_k, 1)
    fraction = count.to(tl.float32) / tokens.to(tl.float32)
    total = _sum_partials(partials, e, programs, experts, CHUNK, EXPERTS)
    mean = tl.sum(fraction * total, 0) / population
    tl.store(value, mean * experts / top_k)
    tl.store(weight + e, fraction * experts / (top_k * population), mask=e < experts)


@jit
def _z_loss(logits, lse, partials, rows, experts, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    """Compute each row's log-sum-exp, and sum their squares over every P-th block of rows."""
    program = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    total = tl.zeros((ROWS,), tl.float32)
    for tile in range(program, tl.cdiv(rows, ROWS), tl.num_programs(0)):
        t = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        inside = (t < rows)[:, None] & (e < experts)[None, :]
        logit_ptrs = logits + t[:, None] * experts + e[None, :]
        value = tl.load(logit_ptrs, mask=inside, other=float("-inf"))
        # Rows past the end must not contain infinities.
        value = tl.where((t < rows)[:, None], value, 0.0)
        top = tl.max(value, 1)
        log_sum = tl.log(tl.sum(tl.exp(value - tl.expand_dims(top, 1)), 1)) + top
        tl.store(lse + t, log_sum, mask=t < rows)
        total += tl.where(t < rows, log_sum * log_sum, 0.0)
    tl.store(partials + program, tl.sum(total, 0))


@jit
def _mean(partials, value, programs, population, PROGRAMS: tl.constexpr):
    p = tl.arange(0, PROGRAMS)
    total = tl.sum(tl.load(partials + p, mask=p < programs, other=0.0), 0)
    tl.store(value, total / population)


@jit
def _z_loss_backward(
    dvalue, logits, lse, dlogits,
    rows, experts, population,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, EXPERTS)
    inside = (t < rows)[:, None] & (e < experts)[None, :]
    offsets = t[:, None] * experts + e[None, :]
    log_sum = tl.load(lse + t, mask=t < rows, other=0.0)
    prob = tl.exp(tl.load(logits + offsets, mask=inside, other=0.0) - log_sum[:, None])
    factor = tl.load(dvalue) * 2 / population * log_sum
    tl.store(dlogits + offsets, factor[:, None] * prob, mask=inside)


@jit
def _normalise(scores, out, rows, experts, tiny, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, EXPERTS)
    inside = (t < rows)[:, None] & (e < experts)[None, :]
    offsets = t[:, None] * experts + e[None, :]
    value = tl.load(scores + offsets, mask=inside, other=0.0)
    total = tl.maximum(tl.sum(value, 1, keep_dims=True), tiny)
    tl.store(out + offsets, value / total, mask=inside)


@jit
def _normalise_backward(
    dout, scores, dscores,
    rows, experts, row_stride, tiny,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, EXPERTS)
    inside = (t < rows)[:, None] & (e < experts)[None, :]
    offsets = t[:, None] * experts + e[None, :]
    value = tl.load(scores + offsets, mask=inside, other=0.0)
    grad = tl.load(dout + t[:, None] * row_stride + e[None, :], mask=inside, other=0.0)
    total = tl.sum(value, 1, keep_dims=True)
    divisor = tl.maximum(total, tiny)
    along = tl.sum(grad * (value / divisor), 1, keep_dims=True)
    # A sum below the bound is not the divisor and has no gradient.
    along = tl.where(total >= tiny, along, 0.0)
    tl.store(dscores + offsets, (grad - along) / divisor, mask=inside)


def sum_rows(values_TE: Tensor) -> Tensor:
    """Return partial sums over rows, fp32 [P, E]."""
    partials_PE = _empty_partials(values_TE)
    (rows, experts) = values_TE.shape
    block = _block(values_TE)
    _partial_sums[(partials_PE.shape[0],)](
        values_TE.contiguous(), partials_PE, rows, experts, *block
    )
    return partials_PE


def update_balance_counters(
    partials_PE: Tensor,
    load_E: Tensor,
    sent_E: Tensor,
    by_rank_DE: Tensor | None,
    load_sum_E: Tensor,
    sent_sum_E: Tensor,
    tokens: Tensor,
    plain_sum_E: Tensor,
    probability_sum_E: Tensor,
    valid: int,
    rank: int,
) -> Tensor:
    """Add a micro-batch to the counters of a step.

    Args:
        partials_PE: partial sums of the rows' distributions.
        load_E: int64 choices of each expert.
        sent_E: int64 choices that are sent, after drops.
        by_rank_DE: int64 plain choices on each data rank; None if they are not read.
        load_sum_E: counter of ``load_E``; like the next four updated in place.
        sent_sum_E: counter of ``sent_E``.
        tokens: int64 0-d, counter of rows.
        plain_sum_E: counter of plain choices on all data ranks.
        probability_sum_E: fp32 counter of distributions.
        valid: number of rows.
        rank: index of this rank in D.

    Returns:
        int64 plain choices before this micro-batch plus those on data ranks up to this one; no
        elements if ``by_rank_DE`` is None.
    """
    running_E = _empty_running_counts(partials_PE, load_E, sent_E, by_rank_DE)
    programs, experts = partials_PE.shape
    ranks = 0 if by_rank_DE is None else by_rank_DE.shape[0]
    columns = min(32, next_power_of_2(experts))
    blocks = cdiv(experts, columns)
    _update_counters[(blocks,)](
        partials_PE, load_E, sent_E, by_rank_DE, load_sum_E, sent_sum_E, tokens, plain_sum_E,
        probability_sum_E, running_E, programs, experts, valid, ranks, rank,
        next_power_of_2(MAX_PROGRAMS), columns,
    )  # fmt: skip
    return running_E


def load_balance_value(
    partials_PE: Tensor, counts_E: Tensor, top_k: int, population: int
) -> tuple[Tensor, Tensor]:
    """Return ``E / K * sum_i f_i P_i``, 0-d, and its derivative [E] by a row's probabilities.

    Args:
        partials_PE: partial sums of the rows' distributions.
        counts_E: int64 choices of each expert, K of each token.
        top_k: K.
        population: rows of the whole micro-batch, over which P is a mean.
    """
    value, weight_E = _empty_value(partials_PE)
    programs, experts = partials_PE.shape
    lanes = next_power_of_2(experts)
    chunk = max(1, min(next_power_of_2(MAX_PROGRAMS), 4096 // lanes))
    _load_balance[(1,)](
        partials_PE, counts_E, value, weight_E, programs, experts, top_k, population, chunk, lanes
    )
    return value, weight_E


def z_loss_value(logits_TE: Tensor, population: int) -> tuple[Tensor, Tensor]:
    """Return the z-loss, squared log-sum-exp over ``population``, 0-d, and log-sum-exp [T]."""
    value, lse_T = _empty_z_loss(logits_TE)
    (rows, experts) = logits_TE.shape
    block = _block(logits_TE)
    programs = _programs(rows, block[0])
    partials_P = logits_TE.new_empty(programs)
    _z_loss[(programs,)](logits_TE.contiguous(), lse_T, partials_P, rows, experts, *block)
    _mean[(1,)](partials_P, value, programs, population, next_power_of_2(MAX_PROGRAMS))
    return value, lse_T


def z_loss_backward(dvalue: Tensor, logits_TE: Tensor, lse_T: Tensor, population: int) -> Tensor:
    """Return ``dlogits_TE``."""
    dlogits_TE = torch.empty_like(logits_TE)
    (rows, experts) = logits_TE.shape
    block = _block(logits_TE)
    if rows:
        _z_loss_backward[(cdiv(rows, block[0]),)](
            dvalue, logits_TE, lse_T, dlogits_TE, rows, experts, population, *block
        )
    return dlogits_TE


def normalise_scores(scores_TE: Tensor) -> Tensor:
    """Return each row's scores divided by their sum, or by ``TINY`` if that is larger."""
    out_TE = scores_TE.new_empty(scores_TE.shape)
    (rows, experts) = scores_TE.shape
    block = _block(scores_TE)
    if rows:
        _normalise[(cdiv(rows, block[0]),)](
            scores_TE.contiguous(), out_TE, rows, experts, TINY, *block
        )
    return out_TE


def normalise_scores_backward(dout_TE: Tensor, scores_TE: Tensor) -> Tensor:
    """Return ``dscores_TE``; ``dout_TE`` may be an expanded row."""
    dscores_TE = scores_TE.new_empty(scores_TE.shape)
    (rows, experts) = scores_TE.shape
    block = _block(scores_TE)
    dout_TE = contiguous_in_rows(dout_TE)
    if rows:
        _normalise_backward[(cdiv(rows, block[0]),)](
            dout_TE, scores_TE.contiguous(), dscores_TE, rows, experts, dout_TE.stride(0), TINY,
            *block,
        )  # fmt: skip
    return dscores_TE


def _block(values_TE: Tensor) -> tuple[int, int]:
    """Return the rows and padded columns of a block."""
    lanes = next_power_of_2(values_TE.shape[1])
    return max(1, ELEMENTS // lanes), lanes


def _programs(rows: int, block: int) -> int:
    return max(1, min(MAX_PROGRAMS, cdiv(rows, block)))


def _empty_partials(values_TE: Tensor) -> Tensor:
    rows, experts = values_TE.shape
    return values_TE.new_empty(_programs(rows, _block(values_TE)[0]), experts)


def _empty_running_counts(
    partials_PE: Tensor, load_E: Tensor, sent_E: Tensor, by_rank_DE: Tensor | None, *_: Any
) -> Tensor:
    return load_E.new_empty(0 if by_rank_DE is None else load_E.shape)


def _empty_value(partials_PE: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return partials_PE.new_empty(()), partials_PE.new_empty(partials_PE.shape[1])


def _empty_z_loss(logits_TE: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return logits_TE.new_empty(()), logits_TE.new_empty(logits_TE.shape[0])


partial_row_sums = Op(sum_rows, _empty_partials)
update_counters = Op(
    update_balance_counters,
    _empty_running_counts,
    mutates_args=("load_sum_E", "sent_sum_E", "tokens", "plain_sum_E", "probability_sum_E"),
)
_load_value = Op(load_balance_value, _empty_value)
_z_loss_value = Op(z_loss_value, _empty_z_loss)
_z_loss_gradient = Op(z_loss_backward, lambda dvalue, logits_TE, *_: torch.empty_like(logits_TE))
_normalised = Op(normalise_scores, lambda scores_TE: scores_TE.new_empty(scores_TE.shape))
_normalised_backward = Op(
    normalise_scores_backward, lambda dout_TE, scores_TE: scores_TE.new_empty(scores_TE.shape)
)


def load_balance(
    probability_TE: Tensor, partials_PE: Tensor, counts_E: Tensor, top_k: int, population: int
) -> Tensor:
    """Return the value of :func:`load_balance_value`, differentiable in ``probability_TE``."""
    return _LoadBalance.apply(probability_TE, partials_PE, counts_E, top_k, population)


class _LoadBalance(Function):
    @staticmethod
    def forward(ctx: Any, probability_TE: Tensor, partials_PE: Tensor, *args: Any) -> Tensor:
        value, weight_E = _load_value(partials_PE, *args)
        ctx.save_for_backward(weight_E)
        ctx.shape = probability_TE.shape
        return value

    @staticmethod
    def backward(ctx: Any, dvalue: Tensor) -> tuple[Tensor | None, ...]:
        (weight_E,) = ctx.saved_tensors
        return (dvalue * weight_E).expand(ctx.shape), None, None, None, None


def z_loss(logits_TE: Tensor, population: int) -> Tensor:
    """Return the value of :func:`z_loss_value`, differentiable in ``logits_TE``."""
    return _ZLoss.apply(logits_TE, population)


class _ZLoss(Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, population: int) -> Tensor:
        logits_TE = logits_TE.contiguous()
        value, lse_T = _z_loss_value(logits_TE, population)
        ctx.save_for_backward(logits_TE, lse_T)
        ctx.population = population
        return value

    @staticmethod
    def backward(ctx: Any, dvalue: Tensor) -> tuple[Tensor, None]:
        return _z_loss_gradient(dvalue, *ctx.saved_tensors, ctx.population), None


def normalised(scores_TE: Tensor) -> Tensor:
    """Return the result of :func:`normalise_scores`, differentiable in ``scores_TE``."""
    return _Normalised.apply(scores_TE)


class _Normalised(Function):
    @staticmethod
    def forward(ctx: Any, scores_TE: Tensor) -> Tensor:
        ctx.save_for_backward(scores_TE)
        return _normalised(scores_TE)

    @staticmethod
    def backward(ctx: Any, dout_TE: Tensor) -> Tensor:
        return _normalised_backward(dout_TE, *ctx.saved_tensors)
