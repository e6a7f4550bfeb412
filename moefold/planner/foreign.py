"""Kinds of layers that can be planned though training cannot execute them yet.

They stand in a description like any other kind; :func:`block` puts them there. What recurrences
save is what Megatron-Core's do.
"""

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field

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


class Recurrent(LayerSpec):
    """A mixer that scans the sequence: one projection in, a convolution, the scan, one out."""

    groups_name: ClassVar[str]
    """What tensor ranks share, in words."""
    launches: ClassVar[tuple[int, int]]
    """Kernels beside the scan, and of the scan."""
    state_bytes: ClassVar[int | None] = None
    """Bytes of an element of a state; None is those of the compute dtype."""

    def scan(self) -> Scan:
        """Return the recurrence itself."""
        raise NotImplementedError

    def widths(self) -> tuple[int, int, int, int]:
        """Return the features of the projection in, what is convolved, what the scan gives, and
        the groups that tensor ranks share.
        """
        raise NotImplementedError

    def _units(self) -> Units:
        return Units("tp", self.widths()[3], self.groups_name)

    def weights(self, hidden: int) -> Iterator[Weight]:
        """Yield both projections, the convolution of four taps, and a norm before the last."""
        into, mixed, out, _ = self.widths()
        cut = ((0, self._units()),)
        yield Weight("in.weight", (into, hidden), cut)
        yield Weight("conv.weight", (mixed, 4), cut)
        yield self.norm_weight()
        yield Weight("out.weight", (hidden, out), ((1, self._units()),))

    def norm_weight(self) -> Weight:
        """Return the weight of the norm on what the scan gives."""
        raise NotImplementedError

    def operations(self, hidden: int) -> Iterator[Operation]:
        """Yield both projections and the scan."""
        into, _, out, _ = self.widths()
        # Kernels pass over both projections, and twice so backward.
        traffic = Traffic(into + out, 1, 2, units=self._units())
        products = (Matmul(("in.weight",)), Matmul(("out.weight",)))
        beside, own = self.launches
        yield Operation("attention", products, traffic=(traffic,), launches=beside)
        yield Operation("core", core=self.scan(), launches=own)

    def saved(self, shape: Shape) -> Iterator[Saved]:
        """Yield projected and convolved rows, states between chunks, output before and after its
        gate.
        """
        rows, width = shape.piece / shape.tp, shape.width
        _, mixed, out, _ = self.widths()
        scan, each = self.scan(), self.state_bytes or width
        yield Saved("projected", round(rows * self.projected_features * width))
        yield Saved("convolved", round(rows * mixed * width))
        yield Saved("states", round(rows / scan.chunk * scan.state * each))
        yield Saved("scanned", round(2 * rows * out * width))

    @property
    def projected_features(self) -> int:
        """Features of the projection in that backward reads again."""
        return self.widths()[0]


class Mamba2(Recurrent):
    """A state-space mixer in Mamba-2's form (arXiv 2405.21060)."""

    heads: Size
    head_dim: Size
    state: Size = 128
    groups: Size = 8
    """Heads of one group share their input and output maps of the state."""
    chunk: Size = 128
    """Tokens between which products are quadratic."""

    untrained = "Mamba-2 layers"
    groups_name = "groups of state-space heads"
    launches = (12, 6)
    state_bytes = STATISTIC

    def widths(self) -> tuple[int, int, int, int]:
        """Return the features before, within and after the scan, and the groups.

        Before it are a gate, its input, both maps of the state, and time steps.
        """
        width = self.heads * self.head_dim
        mixed = width + 2 * self.groups * self.state
        return mixed + width + self.heads, mixed, width, self.groups

    def scan(self) -> Scan:
        """Return the recurrence: products within a chunk, and with the state."""
        into, _, width, _ = self.widths()
        products = width * (self.chunk + 2 * self.state)
        return Scan(products, 2 * (into + width), self.chunk, width * self.state)

    def norm_weight(self) -> Weight:
        """Return the weight of the norm on all heads' output."""
        return norm("norm.weight", self.widths()[2], self._units())


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
    """Experts of two matrices without a gate, which may work in a narrower space."""

    latent: Annotated[int, Field(ge=1)] | None = None
    """Width of the space that routed experts work in; None is the model's."""

    untrained = "experts without a gate"
    gates = 1

    @property
    def inner(self) -> int | None:
        """Width of that space."""
        return self.latent


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
