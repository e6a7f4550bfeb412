"""Dispatch by HybridEP, the ``HybridEPBuffer`` of DeepEP's branch of that name. Needs GPUs.

``dispatch_with_permute`` takes a map [T, E] of the routing and fp32 weights of its form, and gives
rows sorted by local expert; ``combine_with_unpermute`` adds them up. Either is the other's
gradient. It gathers the map of all ranks, which must have the same number of rows.

T rows, D hidden, K experts per token, E experts, R rows after dispatch.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from moefold.comm.group import Group
from moefold.comm.world import World
from moefold.moe.config import HybridEp
from moefold.moe.dispatch.across import Across
from moefold.moe.dispatch.base import Dispatched, Handle
from moefold.moe.dispatch.counts import everyone, host_counts, on_host
from moefold.moe.dispatch.foreign import check_rows, ends_of, load


class HybridEpDispatch(Across[HybridEp]):
    """Tokens over ``ep``, sorted by expert on the way."""

    def __init__(self, record: HybridEp, experts: int) -> None:
        super().__init__(record, experts)
        self._module = load(record)

    def send(
        self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, complete: bool, world: World
    ) -> Dispatched:
        """Send rows; see :class:`~moefold.moe.dispatch.across.Across`.

        Raises:
            ValueError: where ranks have different numbers of rows.
        """
        check_rows(self._record, x_TD)
        rows, group = x_TD.shape[0], world.group("ep")
        counts = host_counts(everyone(experts_TK.new_full((1,), rows), world).flatten())
        if len(set(counts)) > 1:
            raise ValueError(
                f"layout.dispatch: hybrid_ep needs as many rows on every rank, and they have "
                f"{counts}. Pack sequences to one length, or choose dispatch: alltoall_once"
            )
        buffer = self._buffer(rows, x_TD.shape[1], group)
        chosen_TE = torch.zeros(rows, self._experts + 1, dtype=torch.bool, device=x_TD.device)
        chosen_TE = chosen_TE.scatter(1, experts_TK, True)[:, :-1].contiguous()
        probs_TE = weights_TK.new_zeros(rows, self._experts + 1, dtype=torch.float32)
        probs_TE = probs_TE.scatter(1, experts_TK, weights_TK.float())[:, :-1].contiguous()
        sent = _Send.apply(x_TD.contiguous(), probs_TE, chosen_TE, buffer)
        x_RD, probs_R, counts_E, *native = sent  # type: ignore[misc]
        handle = (on_host([rows]), *native)
        return Dispatched(x_RD, ends_of(counts_E, x_TD.device), probs_R, handle)

    def fetch(self, y_RD: Tensor, handle: Handle, complete: bool, world: World) -> Tensor:
        """Bring results back; see :class:`~moefold.moe.dispatch.across.Across`."""
        rows, *native = handle
        (count,) = host_counts(rows)
        buffer = self._buffer(count, y_RD.shape[1], world.group("ep"))
        return _Return.apply(y_RD, buffer, count, *native)  # type: ignore[return-value]

    def _buffer(self, rows: int, hidden: int, group: Group) -> "_Buffer":
        return buffer_of(self._module.HybridEPBuffer, group, hidden, rows, self._experts)


class _Buffer:
    """The back end's buffer, and the fixed parts of its handles.

    A handle of its is a tuple of tensors and of settings that depend on shapes alone. Tensors go
    with the rows; the settings for each number of rows are kept here.
    """

    def __init__(self, native: Any, experts_here: int) -> None:
        self.native, self.experts_here = native, experts_here
        self._frames: dict[int, tuple[Any, ...]] = {}

    def take_apart(self, handle: tuple[Any, ...], rows: int) -> tuple[Tensor, ...]:
        """Return the tensors of a handle."""
        self._frames[rows] = tuple(None if isinstance(p, Tensor) else (p,) for p in handle)
        return tuple(part for part in handle if isinstance(part, Tensor))

    def put_together(self, tensors: tuple[Tensor, ...], rows: int) -> tuple[Any, ...]:
        """Return the handle that ``take_apart`` took apart."""
        left = iter(tensors)
        return tuple(next(left) if part is None else part[0] for part in self._frames[rows])


@cache
def buffer_of(kind: Any, group: Group, hidden: int, rows: int, experts: int) -> _Buffer:
    """Return the one buffer of a group for so many rows of one width."""
    here = experts // group.size
    native = kind(
        group=group.handle,
        hidden_dim=hidden,
        max_num_of_tokens_per_rank=rows,
        num_local_experts=here,
        use_fp8=False,
    )
    return _Buffer(native, here)


class _Send(Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, probs_TE: Tensor, chosen_TE: Tensor, buffer: _Buffer
    ) -> tuple[Tensor, ...]:
        x_RD, probs_R, _, counts_E, handle = buffer.native.dispatch_with_permute(
            hidden=x_TD,
            routing_map=chosen_TE,
            probs=probs_TE,
            num_of_experts_per_rank=buffer.experts_here,
        )
        ctx.buffer, ctx.rows = buffer, x_TD.shape[0]
        native = buffer.take_apart(handle, ctx.rows)
        ctx.save_for_backward(*native)
        ctx.mark_non_differentiable(counts_E, *native)
        return x_RD, probs_R, counts_E, *native

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_RD: Tensor, dprobs_R: Tensor, *_: Any) -> tuple[Any, ...]:
        handle = ctx.buffer.put_together(ctx.saved_tensors, ctx.rows)
        dx_TD, dprobs_TE = ctx.buffer.native.combine_with_unpermute(
            hidden=dx_RD.contiguous(), probs=dprobs_R.float().contiguous(), handle=handle
        )
        return dx_TD, dprobs_TE, None, None


class _Return(Function):
    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, buffer: _Buffer, rows: int, *native: Tensor) -> Tensor:
        ctx.buffer, ctx.rows, ctx.copies = buffer, rows, y_RD.shape[0]
        ctx.save_for_backward(*native)
        handle = buffer.put_together(native, rows)
        out_TD, _ = buffer.native.combine_with_unpermute(hidden=y_RD.contiguous(), handle=handle)
        return out_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TD: Tensor) -> tuple[Any, ...]:
        handle = ctx.buffer.put_together(ctx.saved_tensors, ctx.rows)
        dy_RD, *_ = ctx.buffer.native.dispatch_with_permute(
            hidden=dout_TD.contiguous(), handle=handle, num_permuted_tokens=ctx.copies
        )
        return (dy_RD, None, None, *[None] * len(ctx.saved_tensors))
