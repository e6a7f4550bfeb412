"""The documented calls of DeepEP, HybridEP and NCCL EP, acted out over gloo in plain indexing.

T rows here, A rows of all ranks, K entries, E experts, N rows received, R copies received.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def everywhere(x: Tensor, group: Any) -> list[Tensor]:
    """Return every rank's tensor, whatever its number of rows."""
    shapes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(shapes, x.shape, group=group)
    parts = [x.new_zeros(shape) for shape in shapes]
    for part, source in zip(parts, dist.get_process_group_ranks(group), strict=True):
        if source == dist.get_rank():
            part.copy_(x)
        dist.broadcast(part, source, group=group)
    return parts


class Buffer:
    """``deep_ep.Buffer``: a token goes once to each rank; its rows come back added up."""

    def __init__(self, group: Any, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        assert num_nvl_bytes > 0
        self.group, self.ranks = group, dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Any:
        def hint(row_bytes: int, _: int) -> int:
            return row_bytes * num_ranks

        return SimpleNamespace(get_nvl_buffer_size_hint=hint, get_rdma_buffer_size_hint=hint)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        self.each = num_experts // self.ranks
        rank_TK = torch.where(topk_idx < 0, -1, topk_idx // self.each)
        is_in_rank = torch.stack([(rank_TK == r).any(1) for r in range(self.ranks)], 1)
        return is_in_rank.sum(0), None, topk_idx, is_in_rank, None

    def dispatch(
        self,
        x: Tensor,
        handle: Any = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        **_: Any,
    ) -> tuple[Any, ...]:
        assert x.dtype == torch.bfloat16
        (is_in,) = handle if handle is not None else (is_token_in_rank,)
        mine = [m[:, self.rank] for m in everywhere(is_in.int(), self.group)]
        pick = torch.cat(mine).bool()
        x_ND = torch.cat(everywhere(x, self.group))[pick]
        if topk_idx is None:
            return x_ND, None, None, None, None, None
        assert topk_weights is not None and topk_weights.dtype == torch.float32
        ids = torch.cat(everywhere(topk_idx, self.group))[pick] - self.rank * self.each
        ids = torch.where((ids >= 0) & (ids < self.each), ids, -1)
        weights = torch.cat(everywhere(topk_weights, self.group))[pick]
        counts = [int((ids == e).sum()) for e in range(self.each)]
        return x_ND, ids, torch.where(ids < 0, 0, weights), counts, (is_in,), None

    def combine(
        self, x: Tensor, handle: Any, topk_weights: Tensor | None = None
    ) -> tuple[Any, ...]:
        (is_in,) = handle
        masks = everywhere(is_in.int(), self.group)
        return (
            self._home(x, masks),
            (None if topk_weights is None else self._home(topk_weights, masks)),
            None,
        )

    def _home(self, rows: Tensor, masks: list[Tensor]) -> Tensor:
        total = rows.new_zeros(masks[self.rank].shape[0], rows.shape[1])
        for source, part in enumerate(everywhere(rows, self.group)):
            sizes = [int(mask[:, source].sum()) for mask in masks]
            own = part.split(sizes)[self.rank]
            total[masks[self.rank][:, source].bool()] += own
        return total


class HybridEPBuffer:
    """``deep_ep.HybridEPBuffer``: copies sorted by local expert; handles hold more than tensors."""

    def __init__(
        self,
        group: Any,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool,
    ) -> None:
        self.group, self.each, self.rank = group, num_local_experts, dist.get_rank(group)

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        handle: Any = None,
        num_permuted_tokens: int | None = None,
    ) -> tuple[Any, ...]:
        if handle is None:
            assert routing_map is not None and routing_map.dtype == torch.bool
            whole = torch.cat(everywhere(routing_map.int(), self.group)).bool()
            handle = (whole, hidden.shape[0], "settings")
        whole, rows, settings = handle
        assert settings == "settings" and rows == hidden.shape[0]
        row, column = self._copies(whole, self.rank)
        x_RD = torch.cat(everywhere(hidden, self.group))[row]
        probs_R = None
        if probs is not None:
            probs_R = torch.cat(everywhere(probs, self.group))[row, column]
        counts = torch.bincount(column - self.rank * self.each, minlength=self.each)
        return x_RD, probs_R, None, counts, handle

    def combine_with_unpermute(
        self, *, hidden: Tensor, probs: Tensor | None = None, handle: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        whole, rows, _ = handle
        out = hidden.new_zeros(whole.shape[0], hidden.shape[1])
        grads = None if probs is None else probs.new_zeros(whole.shape)
        for rank, part in enumerate(everywhere(hidden, self.group)):
            row, _ = self._copies(whole, rank)
            out.index_add_(0, row, part)
        if probs is not None and grads is not None:
            for rank, part in enumerate(everywhere(probs, self.group)):
                row, column = self._copies(whole, rank)
                grads[row, column] = part
        mine = slice(self.rank * rows, self.rank * rows + rows)
        return out[mine], None if grads is None else grads[mine]

    def _copies(self, whole: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Return rows and columns of a rank's copies, by expert and then by row."""
        first = rank * self.each
        column, row = whole[:, first : first + self.each].t().nonzero(as_tuple=True)
        return row, column + first


class EpBuffer:
    """``transformer_engine.pytorch.ep.EpBuffer``: memory of one call."""

    group: Any = None

    started: tuple[int, ...] = ()

    def __init__(
        self,
        top_k: int,
        max_tokens_per_rank: int,
        recv_capacity_per_rank: int,
        hidden_dim: int,
        num_local_experts: int,
    ) -> None:
        assert self.started == (max_tokens_per_rank, recv_capacity_per_rank, hidden_dim)
        self.room, self.hidden, self.here = recv_capacity_per_rank, hidden_dim, num_local_experts
        self.handle_mem = torch.empty(0, dtype=torch.bool)


def ep_bootstrap(
    ep_group: Any,
    num_experts: int,
    max_tokens_per_rank: int,
    recv_capacity_per_rank: int,
    hidden_dim: int,
    num_topk: int = 3,
) -> None:
    """Take the group that every call uses, once."""
    assert EpBuffer.group is None, "ep_bootstrap was already called in this process"
    assert num_topk == 3 and num_experts == 8
    EpBuffer.group = ep_group
    EpBuffer.started = (max_tokens_per_rank, recv_capacity_per_rank, hidden_dim)


def ep_finalize() -> None:
    """Let the group go."""
    EpBuffer.group = None


class _EpDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, ids: Tensor, buffer: EpBuffer) -> Any:
        experts = buffer.here * dist.get_world_size(EpBuffer.group)
        chosen = torch.zeros(x.shape[0], experts, dtype=torch.bool).scatter(1, ids, True)
        probs = torch.zeros(x.shape[0], experts).scatter(1, ids, weights)
        native = HybridEPBuffer(EpBuffer.group, 0, 0, buffer.here, False)
        x_RD, p_R, _, counts, handle = native.dispatch_with_permute(
            hidden=x, routing_map=chosen, probs=probs
        )
        buffer.handle_mem = handle[0]
        ctx.native, ctx.handle, ctx.copies = native, handle, x_RD.shape[0]
        ctx.save_for_backward(ids)
        tail = buffer.room - x_RD.shape[0]
        ctx.mark_non_differentiable(counts)
        x_RD = torch.cat([x_RD, x_RD.new_full((tail, x_RD.shape[1]), torch.nan)])
        return x_RD, torch.cat([p_R, p_R.new_full((tail,), torch.nan)]), counts.int()

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dp: Tensor, _: Any) -> Any:
        (ids,) = ctx.saved_tensors
        n = ctx.copies
        dx, dp = ctx.native.combine_with_unpermute(hidden=dx[:n], probs=dp[:n], handle=ctx.handle)
        return dx, dp.gather(1, ids), None, None


class _EpCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, buffer: EpBuffer, rows: int) -> Tensor:
        native = HybridEPBuffer(EpBuffer.group, 0, 0, buffer.here, False)
        ctx.native, ctx.handle = native, (buffer.handle_mem, rows, "settings")
        ctx.shape = y.shape
        copies = native._copies(buffer.handle_mem, native.rank)[0].shape[0]
        return native.combine_with_unpermute(hidden=y[:copies], handle=ctx.handle)[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        dy, *_ = ctx.native.dispatch_with_permute(hidden=dout, handle=ctx.handle)
        whole = dy.new_full(ctx.shape, torch.nan)
        whole[: dy.shape[0]] = dy
        return whole, None, None


def ep_dispatch(buffer: EpBuffer, tokens: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Any:
    """Send rows; what lies past the last is NaN."""
    assert tokens.shape[1] == buffer.hidden
    return _EpDispatch.apply(tokens, topk_weights, topk_idx, buffer)


def ep_combine(buffer: EpBuffer, expert_out: Tensor, *, num_local_tokens: int) -> Any:
    """Bring results back."""
    return _EpCombine.apply(expert_out, buffer, num_local_tokens)
