"""One decoder layer: norm, attention, norm, feed-forward, each half added to the residual rows."""

from torch import Tensor, nn

from moefold.config.base import Record
from moefold.config.slot import build
from moefold.layers.flow import Exchange, Flow, Segment
from moefold.layers.norm import RmsNorm
from moefold.model.config import Block
from moefold.spec.decoder import half_name


class DecoderBlock(nn.Module):
    """Block number ``layer``. T rows, D hidden.

    Its second half is registered as ``moe`` (a mixture, kinds from outside that inherit from it
    among them) or ``ffn``, which is how parameters get their global names.
    """

    def __init__(
        self, record: Block, hidden: int, epsilon: float, layer: int, layout: Record
    ) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(hidden, epsilon)
        self.attention = build(record.attention, hidden, epsilon)
        self.ffn_norm = RmsNorm(hidden, epsilon)
        self._name, self._half = f"layers.{layer}", half_name(record.ffn, "ffn")
        self.add_module(self._half, build(record.ffn, hidden, layer, layout))

    def segments(self) -> tuple[Segment, ...]:
        """Return the block as functions from a flat tuple of tensors to a tuple.

        The first takes ``x_TD``; the last returns ``x_TD`` and, from a mixture, its router terms.
        """
        first, *rest = self.get_submodule(self._half).segments()  # type: ignore[operator]

        def attend(flow: Flow, x_TD: Tensor) -> tuple[Tensor, ...]:
            with flow.world.recorder.module(f"{self._name}.attention"):
                x_TD = x_TD + self.attention(self.attention_norm(x_TD, flow), flow)
            with flow.world.recorder.module(f"{self._name}.{self._half}"):
                return first(flow, x_TD, self.ffn_norm(x_TD, flow))

        return (attend, *(self._labelled(segment) for segment in rest))

    def _labelled(self, segment: Segment) -> Segment:
        """Let what a segment says to other ranks go by its name in records and reports."""
        inner = segment.run if isinstance(segment, Exchange) else segment
        label = f"{self._name}.{self._half}.{getattr(inner, '__name__', 'segment').strip('_')}"

        def run(flow: Flow, *state: Tensor) -> tuple[Tensor, ...]:
            with flow.world.recorder.module(label):
                return inner(flow, *state)

        return Exchange(run) if isinstance(segment, Exchange) else run

    def forward(self, x_TD: Tensor, flow: Flow) -> tuple[Tensor, ...]:
        """Run the segments in order."""
        state: tuple[Tensor, ...] = (x_TD,)
        for segment in self.segments():
            state = segment(flow, *state)
        return state
