"""A short convolution in place of attention: record and description."""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field

from moefold.layers.config import ATTENTION
from moefold.mesh.config import Sizes
from moefold.spec.layer import (
    LayerSpec,
    Matmul,
    Operation,
    Saved,
    Shape,
    Traffic,
    Units,
    Weight,
)
from moefold.spec.parts import saved_attention_rows


@ATTENTION.register
class ShortConvolution(LayerSpec):
    """A short causal convolution per channel, between two gates (LFM2)."""

    kind: Literal["convolution"] = "convolution"
    taps: Annotated[int, Field(ge=2)] = 3
    """Kernel size: rows that a row reads, including itself."""

    owner = "moefold.layers.convolution:ConvolutionMixer"
    caches = True

    @property
    def summary(self) -> str:
        """Description of kind and kernel size for the banner."""
        return f"short convolution ({self.taps} taps)"

    def weights(self, hidden: int) -> Iterator[Weight]:
        """Yield input projection (gates and rows), taps and output projection, cut by channels."""
        units = Units("tp", hidden, "the number of convolution channels")
        yield Weight("w_in", (3, hidden, hidden), ((1, units),), stacked=True)
        yield Weight("taps", (hidden, 1, self.taps), ((0, units),), product=False, summed=True)
        yield Weight("out.weight", (hidden, hidden), ((1, units),), added=True)

    def operations(self, hidden: int) -> Iterator[Operation]:
        """Yield both products, with the convolution between them."""
        units = Units("tp", hidden, "the number of convolution channels")
        products = (Matmul(("w_in",)), Matmul(("out.weight",)))
        passes = 8 + 4 * self.taps
        traffic = (Traffic(hidden, passes, 2 * passes, units=units),)
        yield Operation("attention", products, traffic=traffic, launches=6 + 4 * self.taps)

    def saved(self, shape: Shape) -> Iterator[Saved]:
        """Yield normed or gathered rows, projected rows, and the convolution's output."""
        yield from saved_attention_rows(("w_in",), shape)
        size = shape.piece * shape.hidden // shape.tp * shape.width
        yield Saved("gates", 3 * size, module="attention")
        if shape.cp > 1:
            channels = shape.hidden // shape.tp
            before = 2 * (self.taps - 1) * channels * shape.width
            yield Saved("before", before, module="attention")
        yield Saved("mixed", size, module="attention", operand_of=("out.weight",))

    def shrink(self, by: Sizes) -> Self:
        """Return the record itself: its width is that of the model."""
        return self
