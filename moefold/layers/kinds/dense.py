"""The dense SwiGLU feed-forward: its record and what it is."""

from collections.abc import Iterator
from typing import Literal, Self

from moefold.layers.config import FFN, Size
from moefold.mesh.config import Sizes
from moefold.spec.layer import (
    NOTHING,
    SMALL_WIDTH,
    LayerSpec,
    Matmul,
    Modules,
    Operation,
    Saved,
    Shape,
    Units,
    Weight,
    gated_traffic,
    rounded_up,
    saved_feed_forward,
    saved_norm,
)


@FFN.register
class Dense(LayerSpec):
    """A dense SwiGLU feed-forward of ``width``."""

    kind: Literal["dense"] = "dense"
    width: Size

    owner = "moefold.layers.ffn:dense_ffn"
    caches = True

    @property
    def words(self) -> str:
        """The kind and its width."""
        return f"dense (width {self.width})"

    def _units(self) -> Units:
        return Units("tp", self.width, "the feed-forward's width")

    def weights(self, hidden: int) -> Iterator[Weight]:
        """Yield gate and up projection as one weight, and the down projection."""
        units = ((1, self._units()),)
        yield Weight("w_in", (2, self.width, hidden), units, "ffn")
        yield Weight("w_out", (hidden, self.width), units, "ffn")

    def operations(self, hidden: int) -> Iterator[Operation]:
        """Yield both products and the activation between them."""
        products = (Matmul(("w_in",)), Matmul(("w_out",)))
        traffic = gated_traffic(self.width, units=self._units())
        yield Operation("ffn", products, traffic=(traffic,), launches=4)

    def saved(self, shape: Shape) -> Iterator[Saved]:
        """Yield the residual, normed rows and the pre-activation."""
        yield Saved("residual", shape.row)
        # Under tp the product reads gathered rows, and the norm's output is an input of recompute.
        only: Modules = frozenset(("ffn", "gather")) if shape.tp > 1 else NOTHING
        yield from saved_norm(
            "ffn_norm", shape.rows, shape.hidden, shape, ("w_in",), only, frozenset(("ffn",))
        )
        yield from saved_feed_forward("ffn", self.width // shape.tp, shape)

    def shrunk(self, by: Sizes) -> Self:
        """Return a small width that tp divides."""
        return self.model_copy(update={"width": rounded_up(SMALL_WIDTH, by.tp)})
