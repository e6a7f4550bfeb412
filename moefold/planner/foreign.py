"""Kinds of layers that can be planned though training cannot execute them yet.

They stand in a description like any other kind; :func:`block` puts them there. What recurrences
save is what Megatron-Core's do.
"""

from collections.abc import Iterator

from moefold.config.base import Record
from moefold.layers.config import Size
from moefold.model.config import Block
from moefold.moe.config import Moe
from moefold.spec.layer import (
    STATISTIC,
    LayerSpec,
    Matmul,
    Operation,
    Saved,
    Scan,
    Shape,
    Traffic,
    Units,
    Weight,
    norm,
)


class Mamba2(LayerSpec):
    """A state-space mixer in Mamba-2's form (arXiv 2405.21060): one projection in, a convolution,
    the scan, one out.
    """

    heads: Size
    head_dim: Size
    state: Size = 128
    groups: Size = 8
    """Heads of one group share their input and output maps of the state."""
    chunk: Size = 128
    """Tokens between which products are quadratic."""

    untrained = "Mamba-2 layers"

    @property
    def _units(self) -> Units:
        return Units("tp", self.groups, "groups of state-space heads")

    @property
    def _widths(self) -> tuple[int, int, int]:
        """Features of the projection in, of what is convolved, and of what the scan gives.

        The first are a gate, the scan's input, both maps of the state, and time steps.
        """
        width = self.heads * self.head_dim
        mixed = width + 2 * self.groups * self.state
        return mixed + width + self.heads, mixed, width

    def weights(self, hidden: int) -> Iterator[Weight]:
        """Yield both projections, the convolution of four taps, and a norm before the last."""
        into, mixed, out = self._widths
        cut = ((0, self._units),)
        yield Weight("in.weight", (into, hidden), cut)
        yield Weight("conv.weight", (mixed, 4), cut)
        yield norm("norm.weight", out, self._units)
        yield Weight("out.weight", (hidden, out), ((1, self._units),))

    def operations(self, hidden: int) -> Iterator[Operation]:
        """Yield both projections and the scan: products within a chunk, and with the state."""
        into, _, out = self._widths
        # Kernels pass over both projections, and twice so backward.
        traffic = Traffic(into + out, 1, 2, units=self._units)
        products = (Matmul(("in.weight",)), Matmul(("out.weight",)))
        yield Operation("attention", products, traffic=(traffic,), launches=12)
        flops, moved = out * (self.chunk + 2 * self.state), 2 * (into + out)
        core = Scan(flops, moved, self.chunk, out * self.state)
        yield Operation("core", core=core, launches=6)

    def saved(self, shape: Shape) -> Iterator[Saved]:
        """Yield projected and convolved rows, fp32 states between chunks, output before and after
        its gate.
        """
        rows, width = shape.piece / shape.tp, shape.width
        into, mixed, out = self._widths
        yield Saved("projected", round(rows * into * width))
        yield Saved("convolved", round(rows * mixed * width))
        yield Saved("states", round(rows / self.chunk * out * self.state * STATISTIC))
        yield Saved("scanned", round(2 * rows * out * width))


class Nothing(LayerSpec):
    """No layer in this half of a block."""

    absent = True
    untrained = "blocks of one half"

    def weights(self, hidden: int) -> Iterator[Weight]:
        """Yield nothing."""
        yield from ()

    def operations(self, hidden: int) -> Iterator[Operation]:
        """Yield nothing."""
        yield from ()

    def saved(self, shape: Shape) -> Iterator[Saved]:
        """Yield nothing."""
        yield from ()


class PlainMoe(Moe):
    """Experts of two matrices without a gate."""

    untrained = "experts without a gate"
    gates = 1


class BiasedMoe(Moe):
    """Gated experts with biases: probabilities are then applied after the second product."""

    untrained = "experts with biases"

    def _unfused(self, hidden: int) -> tuple[Traffic, ...]:
        """Biases are added, gates clamped and rows scaled in kernels of their own."""
        columns = self._experts()[1]
        return (
            Traffic(self.width, 16, 24, "routed", columns),
            Traffic(hidden, 6, 8, "routed"),
        )


def block(attention: Record, ffn: Record) -> Block:
    """Return a block of any two kinds, those of this file too."""
    return Block.model_construct(attention=attention, ffn=ffn)
