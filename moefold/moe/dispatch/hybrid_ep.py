"""Dispatch by HybridEP, the ``HybridEPBuffer`` of DeepEP's branch of that name. Needs GPUs.

``dispatch_with_permute`` takes a bool routing map [T, E] and fp32 weights of that shape, and
returns rows sorted by local expert; ``combine_with_unpermute`` sums them. Each is the gradient of
the other. The maps of all ranks are gathered, so that ranks must have equally many rows.

T rows, D hidden, K experts per token, E experts, R rows after dispatch.
"""

from typing import Any

import torch
from torch import Tensor

from moefold.comm.world import World
from moefold.moe.dispatch.base import Dispatched, Handle
from moefold.moe.dispatch.config import HybridEp
from moefold.moe.dispatch.routing_plan import RoutedTokens
from moefold.moe.dispatch.third_party import (
    NativeArrival,
    NativeExchange,
    ThirdPartyDispatch,
    check_rows,
    native_handle,
    row_ends,
)


class HybridEpDispatch(ThirdPartyDispatch[HybridEp]):
    """Sends tokens over ``ep``, sorted by expert on the way."""

    def send(self, tokens: RoutedTokens, world: World) -> Dispatched:
        """Send rows with the routing map and their weights in its shape."""
        x_TD, weights_TK, experts_TK, _ = tokens
        check_rows(self._record, x_TD)
        rows = x_TD.shape[0]
        buffer = self._buffer(x_TD, world)
        chosen_TE = torch.zeros(rows, self._experts + 1, dtype=torch.bool, device=x_TD.device)
        chosen_TE = chosen_TE.scatter(1, experts_TK, True)[:, :-1].contiguous()
        probs_TE = weights_TK.new_zeros(rows, self._experts + 1, dtype=torch.float32)
        probs_TE = probs_TE.scatter(1, experts_TK, weights_TK.float())[:, :-1].contiguous()
        per_rank = self._experts // world.group("ep").size

        def send(x_TD: Tensor, probs_TE: Tensor) -> NativeArrival:
            x_RD, probs_R, _, counts_E, native = buffer.dispatch_with_permute(
                hidden=x_TD,
                routing_map=chosen_TE,
                probs=probs_TE,
                num_of_experts_per_rank=per_rank,
            )
            return (x_RD, probs_R), (counts_E,), native

        def reverse(native: Handle, dx_RD: Tensor, dprobs_R: Tensor, *_: Any) -> Handle:
            dx_RD = dx_RD.contiguous()
            dprobs_R = dprobs_R.float().contiguous()
            return buffer.combine_with_unpermute(hidden=dx_RD, probs=dprobs_R, handle=native)

        sent = NativeExchange.apply(send, reverse, x_TD.contiguous(), probs_TE)
        x_RD, probs_R, counts_E, *handle = sent
        return Dispatched(x_RD, row_ends(counts_E, x_TD.device), probs_R, tuple(handle))

    def fetch(self, y_RD: Tensor, handle: Handle, no_drop: bool, world: World) -> Tensor:
        """Send each copy's result back, and sum the results of each token."""
        buffer = self._buffer(y_RD, world)
        native = native_handle(*handle)
        copies = y_RD.shape[0]

        def send(y_RD: Tensor) -> NativeArrival:
            out_TD, _ = buffer.combine_with_unpermute(hidden=y_RD.contiguous(), handle=native)
            return (out_TD,), (), native

        def reverse(native: Handle, dout_TD: Tensor, *_: Any) -> Handle:
            return buffer.dispatch_with_permute(
                hidden=dout_TD.contiguous(), handle=native, num_permuted_tokens=copies
            )[:1]

        return NativeExchange.apply(send, reverse, y_RD)[0]

    def _buffer(self, x_XD: Tensor, world: World) -> Any:
        """Return the buffer for rows of this width, sized for the first call.

        It accepts fewer rows, and grows for more.
        """
        buffer_type = self._module.HybridEPBuffer
        group = world.group("ep")
        hidden = x_XD.shape[1]
        key = (buffer_type, hidden, self._experts)

        def make() -> Any:
            return buffer_type(
                group=group.handle,
                hidden_dim=hidden,
                max_num_of_tokens_per_rank=x_XD.shape[0],
                num_local_experts=self._experts // group.size,
                use_fp8=False,
            )

        return world.cached(key, make)
