"""Dispatch by DeepEP's ``Buffer``: tokens once per rank, over NVLink and RDMA. Needs GPUs.

Uses the normal kernels, as documented at github.com/deepseek-ai/DeepEP: ``get_dispatch_layout``,
then ``dispatch`` with ids (-1 for none) and fp32 weights; ``combine`` sums a token's rows. Each is
the gradient of the other. DeepEP itself waits for counts on the host.

T rows, D hidden, K experts per token, E experts, N rows received, R rows after dispatch.
"""

from typing import Any

import torch
from torch import Tensor

from moefold.comm.world import World
from moefold.kernels.permute.gather import unpermute_rows
from moefold.moe.dispatch.base import Dispatched, Handle, permute
from moefold.moe.dispatch.config import DeepEp
from moefold.moe.dispatch.routing_plan import RoutedTokens
from moefold.moe.dispatch.third_party import (
    NativeArrival,
    NativeExchange,
    ThirdPartyDispatch,
    check_rows,
    native_handle,
)

LEAST_BYTES = 2
"""Least bytes per element: buffers are sized for bf16."""


class DeepEpDispatch(ThirdPartyDispatch[DeepEp]):
    """Sends a token once to each rank; copies are made there."""

    def send(self, tokens: RoutedTokens, world: World) -> Dispatched:
        """Send rows with their weights and ids; copy and sort the received rows."""
        x_TD, weights_TK, experts_TK, _ = tokens
        check_rows(self._record, x_TD)
        buffer = self._buffer(x_TD, world)
        per_rank = self._experts // world.group("ep").size
        ids_TK = torch.where(experts_TK < self._experts, experts_TK, -1)

        def send(x_TD: Tensor, weights_TK: Tensor) -> NativeArrival:
            by_rank, by_node, by_expert, is_in_rank, _ = buffer.get_dispatch_layout(
                topk_idx=ids_TK, num_experts=self._experts
            )
            x_ND, ids_NK, weights_NK, counts, native, _ = buffer.dispatch(
                x=x_TD,
                topk_idx=ids_TK,
                topk_weights=weights_TK,
                num_tokens_per_rank=by_rank,
                num_tokens_per_rdma_rank=by_node,
                is_token_in_rank=is_in_rank,
                num_tokens_per_expert=by_expert,
            )
            return (x_ND, weights_NK), (ids_NK, sum(counts)), native

        def reverse(native: Handle, dx_ND: Tensor, dweights_NK: Tensor, *_: Any) -> Handle:
            dweights_NK = dweights_NK.float().contiguous()
            sums = buffer.combine(x=dx_ND.contiguous(), handle=native, topk_weights=dweights_NK)
            return sums[:2]

        sent = NativeExchange.apply(send, reverse, x_TD.contiguous(), weights_TK.float())
        x_ND, weights_NK, ids_NK, copies, *native = sent
        slots_NK = torch.where(ids_NK < 0, per_rank, ids_NK.to(torch.int64))
        dispatched = permute(RoutedTokens(x_ND, weights_NK, slots_NK), per_rank, copies)
        return dispatched._replace(handle=(*dispatched.handle, *native))

    def fetch(self, y_RD: Tensor, handle: Handle, no_drop: bool, world: World) -> Tensor:
        """Sum a token's results on each rank; ``combine`` sums these over ranks."""
        token_R, row_NK, *parts = handle
        y_ND = unpermute_rows(y_RD, token_R, row_NK)
        buffer = self._buffer(y_ND, world)
        native = native_handle(*parts)

        def send(y_ND: Tensor) -> NativeArrival:
            out_TD, *_ = buffer.combine(x=y_ND.contiguous(), handle=native)
            return (out_TD,), (), native

        def reverse(native: Handle, dout_TD: Tensor, *_: Any) -> Handle:
            return buffer.dispatch(x=dout_TD.contiguous(), handle=native)[:1]

        return NativeExchange.apply(send, reverse, y_ND)[0]

    def _buffer(self, x_TD: Tensor, world: World) -> Any:
        """Return the buffer shared by all rows of this size; it holds no rows between calls."""
        buffer_type = self._module.Buffer
        group = world.group("ep")
        ranks = group.size
        row_bytes = x_TD.shape[1] * max(x_TD.element_size(), LEAST_BYTES)

        def make() -> Any:
            """Make a buffer of the size that DeepEP's configurations suggest."""
            getters = buffer_type.get_dispatch_config, buffer_type.get_combine_config
            configs = [get(num_ranks=ranks) for get in getters]
            nvlink = max(c.get_nvl_buffer_size_hint(row_bytes, ranks) for c in configs)
            rdma = max(c.get_rdma_buffer_size_hint(row_bytes, ranks) for c in configs)
            return buffer_type(group=group.handle, num_nvl_bytes=nvlink, num_rdma_bytes=rdma)

        return world.cached((buffer_type, row_bytes), make)
