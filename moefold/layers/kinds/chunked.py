"""Grouped-query attention in chunks, or with a temperature: its record and what it is."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, Self

from moefold.layers.config import ATTENTION, Size, Temperature
from moefold.layers.kinds.gqa import Gqa
from moefold.layers.kinds.windowed import SMALL_WINDOW
from moefold.mesh.config import Sizes
from moefold.spec.layer import NORMS, Attention, Saved, Shape


@ATTENTION.register
class Chunked(Gqa):
    """Grouped-query attention in which each ``chunk`` of a document is by itself (Llama 4)."""

    kind: Literal["chunked"] = "chunked"  # type: ignore[assignment]
    chunk: Size | None = None
    """Tokens, counted from a document's first; None is the whole document."""
    temperature: Temperature | None = None
    """Factor on queries that grows with the position."""

    owner = "moefold.layers.attention:ChunkedAttention"
    caches = True

    @property
    def core(self) -> Attention:
        """Attention within a chunk."""
        return replace(super().core, chunk=self.chunk)

    def saved(self, shape: Shape) -> Iterator[Saved]:
        """Yield what grouped-query attention saves, and each row's temperature."""
        if self.temperature is None:
            yield from super().saved(shape)
            return
        for part in super().saved(shape):
            last = part.name == "q"  # not what a norm made
            yield replace(part, dropped=part.dropped - NORMS) if last else part
        yield Saved("temperature", shape.piece * shape.width, module="attention")

    def shrunk(self, by: Sizes) -> Self:
        """Return a small one of the same kind whose chunks and steps end within documents."""
        few: dict[str, Any] = {
            "chunk": None if self.chunk is None else min(self.chunk, SMALL_WINDOW)
        }
        if self.temperature is not None:
            every = min(self.temperature.every, SMALL_WINDOW)
            few["temperature"] = self.temperature.model_copy(update={"every": every})
        return super().shrunk(by).model_copy(update=few)
