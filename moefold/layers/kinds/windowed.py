"""Grouped-query attention within a window and with sinks: its record and what it is."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, Self

from moefold.layers.config import ATTENTION, Size
from moefold.layers.kinds.gqa import Gqa
from moefold.mesh.config import Sizes
from moefold.spec.layer import STATISTIC, Attention, Saved, Shape, Weight

SMALL_WINDOW = 4
"""Window of the small models that ``verify`` computes: shorter than their documents."""


@ATTENTION.register
class Windowed(Gqa):
    """Grouped-query attention to the last ``window`` tokens, with a learned sink of each head.

    A sink is a logit that takes part in the softmax and has no value (gpt-oss, arXiv 2508.10925).
    """

    kind: Literal["windowed"] = "windowed"  # type: ignore[assignment]
    window: Size | None = None
    """Tokens that a token sees, itself among them; None is all before it."""
    sinks: bool = True

    owner = "moefold.layers.attention:WindowedAttention"
    caches = True

    @property
    def core(self) -> Attention:
        """Attention within the window."""
        return replace(super().core, window=self.window)

    def weights(self, hidden: int) -> Iterator[Weight]:
        """Yield the sinks, cut by heads, and the weights of grouped-query attention."""
        if self.sinks:
            yield Weight("sinks", (self.heads,), ((0, self.head_units[0]),), product=False)
        yield from super().weights(hidden)

    def saved(self, shape: Shape) -> Iterator[Saved]:
        """Yield what grouped-query attention saves, and the sinks."""
        yield from super().saved(shape)
        if self.sinks:
            yield Saved("sinks", self.heads // shape.tp * STATISTIC, module="attention")

    def shrunk(self, by: Sizes) -> Self:
        """Return a small one of the same kind whose window ends within documents."""
        window = None if self.window is None else min(self.window, SMALL_WINDOW)
        return super().shrunk(by).model_copy(update={"window": window})
