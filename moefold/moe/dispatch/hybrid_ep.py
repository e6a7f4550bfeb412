"""Dispatch by HybridEP, the ``HybridEPBuffer`` of DeepEP's branch of that name. Needs GPUs.

``dispatch_with_permute`` takes a map [T, E] of the routing and fp32 weights of its form, and gives
rows sorted by local expert; ``combine_with_unpermute`` adds them up. Either is the other's
gradient. It gathers the map of all ranks, which must have the same number of rows.

T rows, D hidden, K experts per token, E experts, R rows after dispatch.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from moefold.comm.world import World
from moefold.moe.config import HybridEp
from moefold.moe.dispatch.base import Dispatched, Handle
from moefold.moe.dispatch.routing_plan import RoutedTokens
from moefold.moe.dispatch.third_party import ThirdPartyDispatch, check_rows, row_ends


class HybridEpDispatch(ThirdPartyDispatch[HybridEp]):
    """Sends tokens over ``ep``, sorted by expert on the way."""

    def send(self, tokens: RoutedTokens, world: World) -> Dispatched:
        """Send rows with a map of the routing and their weights in its form."""
        x_TD, weights_TK, experts_TK, _ = tokens
        check_rows(self._record, x_TD)
        rows, buffer = x_TD.shape[0], self._buffer(x_TD, world)
        chosen_TE = torch.zeros(rows, self._experts + 1, dtype=torch.bool, device=x_TD.device)
        chosen_TE = chosen_TE.scatter(1, experts_TK, True)[:, :-1].contiguous()
        probs_TE = weights_TK.new_zeros(rows, self._experts + 1, dtype=torch.float32)
        probs_TE = probs_TE.scatter(1, experts_TK, weights_TK.float())[:, :-1].contiguous()
        here = self._experts // world.group("ep").size
        sent = _Send.apply(x_TD.contiguous(), probs_TE, chosen_TE, buffer, here)
        x_RD, probs_R, counts_E, *handle = sent  # type: ignore[misc]
        return Dispatched(x_RD, row_ends(counts_E, x_TD.device), probs_R, tuple(handle))

    def fetch(self, y_RD: Tensor, handle: Handle, no_drop: bool, world: World) -> Tensor:
        """Send each copy's result back, where a token's are added up."""
        return _Return.apply(y_RD, self._buffer(y_RD, world), *handle)  # type: ignore[return-value]

    def _buffer(self, x_XD: Tensor, world: World) -> Any:
        """Return the one buffer for rows of a width, made for the first that come.

        It takes fewer too, and grows by itself where there are more.
        """
        kind, group, hidden = self._module.HybridEPBuffer, world.group("ep"), x_XD.shape[1]
        return world.kept(
            (kind, hidden, self._experts),
            lambda: kind(
                group=group.handle,
                hidden_dim=hidden,
                max_num_of_tokens_per_rank=x_XD.shape[0],
                num_local_experts=self._experts // group.size,
                use_fp8=False,
            ),
        )


def _split(native: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return settings and tensors of the back end's handle; settings have None for each tensor."""
    settings = tuple(None if isinstance(part, Tensor) else (part,) for part in native)
    return settings, *(part for part in native if isinstance(part, Tensor))


def _join(settings: tuple[Any, ...], tensors: Iterable[Tensor]) -> tuple[Any, ...]:
    """Return the handle that ``_split`` took apart."""
    left = iter(tensors)
    return tuple(next(left) if part is None else part[0] for part in settings)


class _Send(Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, probs_TE: Tensor, chosen_TE: Tensor, buffer: Any, here: int
    ) -> tuple[Any, ...]:
        x_RD, probs_R, _, counts_E, native = buffer.dispatch_with_permute(
            hidden=x_TD,
            routing_map=chosen_TE,
            probs=probs_TE,
            num_of_experts_per_rank=here,
        )
        settings, *tensors = _split(native)
        ctx.buffer, ctx.settings = buffer, settings
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(counts_E, *tensors)
        return x_RD, probs_R, counts_E, settings, *tensors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_RD: Tensor, dprobs_R: Tensor, *_: Any) -> tuple[Any, ...]:
        dx_TD, dprobs_TE = ctx.buffer.combine_with_unpermute(
            hidden=dx_RD.contiguous(),
            probs=dprobs_R.float().contiguous(),
            handle=_join(ctx.settings, ctx.saved_tensors),
        )
        return dx_TD, dprobs_TE, None, None, None


class _Return(Function):
    @staticmethod
    def forward(
        ctx: Any, y_RD: Tensor, buffer: Any, settings: tuple[Any, ...], *tensors: Tensor
    ) -> Tensor:
        ctx.buffer, ctx.settings, ctx.copies = buffer, settings, y_RD.shape[0]
        ctx.save_for_backward(*tensors)
        handle = _join(settings, tensors)
        out_TD, _ = buffer.combine_with_unpermute(hidden=y_RD.contiguous(), handle=handle)
        return out_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TD: Tensor) -> tuple[Any, ...]:
        dy_RD, *_ = ctx.buffer.dispatch_with_permute(
            hidden=dout_TD.contiguous(),
            handle=_join(ctx.settings, ctx.saved_tensors),
            num_permuted_tokens=ctx.copies,
        )
        return (dy_RD, None, None, *[None] * len(ctx.saved_tensors))
