"""Kinds of layers that can be planned, but that training cannot execute yet.

:func:`block` puts them into a model description like other kinds. Recurrences save for backward
what those of Megatron-Core save.
"""

from collections.abc import Iterator

from moefold.config.base import Record
from moefold.layers.config import Size
from moefold.model.config import Block
from moefold.moe.config import Moe
from moefold.spec.forward_only import ForwardOnlyBlock
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
    """Mamba-2's state-space mixer (arXiv 2405.21060): input projection, convolution, scan, output
    projection.
    """

    heads: Size
    head_dim: Size
    state: Size = 128
    groups: Size = 8
    """Number of groups; heads of a group share the state's input and output maps (B and C)."""
    chunk: Size = 128
    """Tokens of a chunk, within which products are quadratic."""

    untrained = "Mamba-2 layers"

    @property
    def _units(self) -> Units:
        return Units("tp", self.groups, "groups of state-space heads")

    @property
    def _widths(self) -> tuple[int, int, int]:
        """Widths of the input projection, of the convolved features, and of the scan's output.

        The input projection has a gate, the scan's input, both maps of the state, and time steps.
        """
        width = self.heads * self.head_dim
        mixed = width + 2 * self.groups * self.state
        return mixed + width + self.heads, mixed, width

    def weights(self, hidden: int) -> Iterator[Weight]:
        """Yield both projections, the convolution of width four, and the norm before the last."""
        into, mixed, out = self._widths
        cut = ((0, self._units),)
        yield Weight("in.weight", (into, hidden), cut)
        yield Weight("conv.weight", (mixed, 4), cut)
        yield norm("norm.weight", out, self._units)
        yield Weight("out.weight", (hidden, out), ((1, self._units),))

    def operations(self, hidden: int) -> Iterator[Operation]:
        """Yield both projections, and the scan: products within a chunk, and with the state."""
        into, _, out = self._widths
        # Kernels read or write both projections once, in backward twice.
        traffic = Traffic(into + out, 1, 2, units=self._units)
        products = (Matmul(("in.weight",)), Matmul(("out.weight",)))
        yield Operation("attention", products, traffic=(traffic,), launches=12)
        flops = out * (self.chunk + 2 * self.state)
        moved = 2 * (into + out)
        core = Scan(flops, moved, self.chunk, out * self.state)
        yield Operation("core", core=core, launches=6)

    def saved(self, shape: Shape) -> Iterator[Saved]:
        """Yield projected rows, convolved rows, fp32 states between chunks, and the output before
        and after its gate.
        """
        rows = shape.piece / shape.tp
        width = shape.width
        into, mixed, out = self._widths
        yield Saved("projected", round(rows * into * width))
        yield Saved("convolved", round(rows * mixed * width))
        chunks = rows / self.chunk
        yield Saved("states", round(chunks * out * self.state * STATISTIC))
        yield Saved("scanned", round(2 * rows * out * width))


class AbsentLayer(LayerSpec):
    """No layer in this half of a block."""

    absent = True
    untrained = "blocks without attention or without feed-forward"

    def weights(self, hidden: int) -> Iterator[Weight]:
        """Yield nothing."""
        yield from ()

    def operations(self, hidden: int) -> Iterator[Operation]:
        """Yield nothing."""
        yield from ()

    def saved(self, shape: Shape) -> Iterator[Saved]:
        """Yield nothing."""
        yield from ()


class UngatedMoe(Moe):
    """Experts with two matrices and no gate."""

    untrained = "experts without a gate"
    gates = 1


class BiasedMoe(Moe):
    """Gated experts with biases; routing weights are applied after the second product."""

    untrained = "experts with biases"

    def _unfused_traffic(self, hidden: int) -> tuple[Traffic, ...]:
        """Return the traffic of separate kernels for biases, clamped gates and scaled rows."""
        columns = self._expert_units()[1]
        return (
            Traffic(self.width, 16, 24, "routed", columns),
            Traffic(hidden, 6, 8, "routed"),
        )


def without_feed_forward(block: Block) -> Block:
    """Return a block's attention as a block of its own."""
    kind = ForwardOnlyBlock if isinstance(block, ForwardOnlyBlock) else Block
    fields = {"attention": block.attention, "ffn": AbsentLayer(), "frozen": block.frozen}
    return kind.model_construct(**fields)


def make_block(attention: Record, ffn: Record, frozen: tuple[str, ...] = ()) -> Block:
    """Return a block of any two kinds of layers, including those of this file; ``frozen`` names
    weights that are not trained.
    """
    return Block.model_construct(attention=attention, ffn=ffn, frozen=frozen)
