"""A short convolution in attention's place: its record and what it is."""

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
from moefold.spec.parts import saved_rows


@ATTENTION.register
class ShortConvolution(LayerSpec):
    """A causal convolution of few taps of each channel between two gates (LFM2)."""

    kind: Literal["convolution"] = "convolution"
    taps: Annotated[int, Field(ge=2)] = 3
    """Rows that a row sees, itself among them."""

    owner = "moefold.layers.convolution:ConvolutionMixer"
    caches = True

    @property
    def words(self) -> str:
        """The kind and how many rows a row sees."""
        return f"short convolution ({self.taps} taps)"

    def weights(self, hidden: int) -> Iterator[Weight]:
        """Yield the gates' and rows' projection, the taps, and the output's, cut by channels."""
        units = Units("tp", hidden, "the convolution's channels")
        yield Weight("w_in", (3, hidden, hidden), ((1, units),), stacked=True)
        yield Weight("taps", (hidden, 1, self.taps), ((0, units),), product=False, summed=True)
        yield Weight("out.weight", (hidden, hidden), ((1, units),), added=True)

    def operations(self, hidden: int) -> Iterator[Operation]:
        """Yield both products and the convolution between them."""
        units = Units("tp", hidden, "the convolution's channels")
        products = (Matmul(("w_in",)), Matmul(("out.weight",)))
        passes = 8 + 4 * self.taps
        traffic = (Traffic(hidden, passes, 2 * passes, units=units),)
        yield Operation("attention", products, traffic=traffic, launches=6 + 4 * self.taps)

    def saved(self, shape: Shape) -> Iterator[Saved]:
        """Yield the normed rows of the tensor group, gates and rows, and the mixed rows."""
        yield from saved_rows(("w_in",), shape)
        size = shape.piece * shape.hidden // shape.tp * shape.width
        yield Saved("gates", 3 * size, module="attention")
        if shape.cp > 1:
            channels = shape.hidden // shape.tp
            before = 2 * (self.taps - 1) * channels * shape.width
            yield Saved("before", before, module="attention")
        yield Saved("mixed", size, module="attention", operand=("out.weight",))

    def shrunk(self, by: Sizes) -> Self:
        """Return the record as it is: its width is the model's."""
        return self
