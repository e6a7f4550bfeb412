"""How a layer's rows go to its experts and back: by the layout's dispatcher, or in rounds.

T rows, D hidden, R rows after dispatch.
"""

from torch import Tensor

from moefold.config.base import Record
from moefold.config.slot import build
from moefold.layers.flow import Flow
from moefold.moe.config import FixedRoom
from moefold.moe.dispatch.base import Dispatched, Dispatcher, Handle
from moefold.moe.dispatch.routing_plan import RoutedTokens
from moefold.moe.experts import Experts
from moefold.moe.rounds import Rounds


class LayerDispatch:
    """The three parts of a layer that a dispatcher is asked for.

    Args:
        record: the layout's dispatcher.
        experts: their number in the layer.
        name: of the layer.
    """

    def __init__(self, record: Record, experts: int, name: str) -> None:
        self._dispatcher: Dispatcher = build(record, experts)
        self._name = f"{name}.moe"
        fixed = isinstance(record, FixedRoom)
        self._rounds = Rounds(record, experts, self._name) if fixed else None

    def send(self, tokens: RoutedTokens, flow: Flow) -> Dispatched | RoutedTokens:
        """Send copies of rows to the ranks of their experts; rounds send theirs in ``run``."""
        if self._rounds is not None and self._rounds.wanted(flow):
            return tokens
        with flow.world.recorder.module(f"{self._name}.dispatch"):
            sent = self._dispatcher.dispatch(*tokens, flow.world)
        if sent.overflow is not None:
            flow.overflow.append(sent.overflow)
        if sent.source is not None:
            rows_TD, copied = sent.source
            flow.keeper.discard("permute", (sent.x_RD,), copied, rows_TD)
        return sent._replace(overflow=None, source=None)

    def run(
        self, sent: Dispatched | RoutedTokens, experts: Experts, flow: Flow
    ) -> tuple[Tensor, Handle]:
        """Return the experts' results, and what brings them back: nothing after rounds."""

        def here(sent: Dispatched, flow: Flow) -> Tensor:
            return experts(sent.x_RD, sent.offs_E, sent.probs_R, flow)

        if isinstance(sent, Dispatched):
            return here(sent, flow), sent.handle
        assert self._rounds is not None
        return self._rounds.run(sent, here, flow), ()

    def fetch(self, y_RD: Tensor, handle: Handle, no_drop: bool, flow: Flow) -> Tensor:
        """Bring results back to their rows, and add up each token's; rounds have done so."""
        if not handle:
            return y_RD
        with flow.world.recorder.module(f"{self._name}.combine"):
            return self._dispatcher.combine(y_RD, handle, no_drop, flow.world)
