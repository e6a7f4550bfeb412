"""Dispatch by NCCL EP, through Transformer Engine's ``transformer_engine.pytorch.ep``. Needs GPUs.

Uses ``ep_bootstrap`` once per process, an ``EpBuffer`` per call, and the differentiable functions
``ep_dispatch`` and ``ep_combine``. Rows arrive sorted by local expert, with space for the most
possible: all copies of all ranks. Nothing is read on the host.

T rows, D hidden, K experts per token, E experts, R rows after dispatch.
"""

from inspect import signature
from typing import Any

from torch import Tensor

from moefold.comm.world import World
from moefold.moe.dispatch.base import Dispatched, Handle
from moefold.moe.dispatch.config import NcclEp
from moefold.moe.dispatch.routing_plan import RoutedTokens
from moefold.moe.dispatch.third_party import ThirdPartyDispatch, check_rows, row_ends


class NcclEpDispatch(ThirdPartyDispatch[NcclEp]):
    """Sends tokens over ``ep``, sorted by expert on the way, in fixed shapes."""

    def send(self, tokens: RoutedTokens, world: World) -> Dispatched:
        """Send rows with their weights and experts.

        Raises:
            ValueError: if there are more rows than ``max_rows``, or entries that are "none".
        """
        x_TD, weights_TK, experts_TK, no_drop = tokens
        check_rows(self._record, x_TD)
        rows, top_k = experts_TK.shape
        if rows > self._record.max_rows:
            raise ValueError(
                f"layout.dispatch.max_rows is {self._record.max_rows}, but a rank has {rows} rows: "
                f"set it to {rows} or more"
            )
        if not no_drop:
            raise ValueError(
                "layout.dispatch: nccl_ep must send every row to top_k experts: pack sequences "
                "without padding and remove capacity, or choose dispatch: padded"
            )
        buffer = self._buffer(x_TD.shape[1], top_k, world)
        x_RD, probs_R, counts_E = self._module.ep_dispatch(
            buffer=buffer,
            tokens=x_TD.contiguous(),
            topk_idx=experts_TK,
            topk_weights=weights_TK.float(),
        )
        handle = (rows, top_k, buffer.handle_mem)
        return Dispatched(x_RD, row_ends(counts_E, x_TD.device), probs_R, handle)

    def fetch(self, y_RD: Tensor, handle: Handle, no_drop: bool, world: World) -> Tensor:
        """Send each copy's result back, and sum the results of each token."""
        rows, top_k, memory = handle
        buffer = self._buffer(y_RD.shape[1], top_k, world)
        buffer.handle_mem = memory
        return self._module.ep_combine(
            buffer=buffer, expert_out=y_RD.contiguous(), num_local_tokens=rows
        )

    def _buffer(self, hidden: int, top_k: int, world: World) -> Any:
        ep = self._module
        group = world.group("ep")
        sizes = {
            "max_tokens_per_rank": self._record.max_rows,
            "recv_capacity_per_rank": group.size * self._record.max_rows * top_k,
            "hidden_dim": hidden,
        }

        def start() -> None:
            """Initialise the back end once per process; all layers must have equal sizes."""
            accepted = signature(ep.ep_bootstrap).parameters
            more = {"num_topk": top_k} if "num_topk" in accepted else {}
            ep.ep_bootstrap(ep_group=group.handle, num_experts=self._experts, **sizes, **more)

        world.cached((ep, self._experts, top_k, *sizes.values()), start, ep.ep_finalize)
        per_rank = self._experts // group.size
        return ep.EpBuffer(top_k=top_k, num_local_experts=per_rank, **sizes)
