"""The dense SwiGLU feed-forward: record and description."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, Self

from moefold.config.errors import Violation
from moefold.layers.config import FFN, Size
from moefold.mesh.config import Sizes
from moefold.spec.layer import (
    GATHER,
    NOTHING,
    SMALL_WIDTH,
    LayerSpec,
    Matmul,
    Modules,
    Operation,
    Saved,
    SavedKind,
    Shape,
    Units,
    Weight,
    round_up,
)
from moefold.spec.parts import gated_traffic, saved_feed_forward, saved_norm


@FFN.register
class Dense(LayerSpec):
    """A dense SwiGLU feed-forward of ``width``."""

    kind: Literal["dense"] = "dense"
    width: Size
    latent: Size | None = None
    """Rank of both projections: width between an additional product before them and one after
    (low-rank feed-forwards, arXiv 2406.16450)."""
    blocks: Size = 1
    """Number of equal diagonal blocks of both projections, which are zero elsewhere."""

    widths = ("width", "latent")
    owner = "moefold.layers.ffn:dense_ffn"
    caches = True

    @property
    def summary(self) -> str:
        """Description of kind and width for the banner."""
        rank = f", rank {self.latent}" if self.latent else ""
        blocks = f", {self.blocks} blocks" if self.blocks > 1 else ""
        return f"dense (width {self.width}{rank}{blocks})"

    def rules(self) -> Iterator[Violation]:
        """Require that ``blocks`` divides ``width``, and ``latent``."""
        if self.width % self.blocks:
            rule = f"must be a multiple of blocks ({self.blocks})"
            yield Violation(("width",), self.width, rule, round_up(self.width, self.blocks))
        if self.latent is not None:
            yield from self._violations(self.latent)

    def violations(self, hidden: int) -> Iterator[Violation]:
        """Require that ``blocks`` divides the hidden size, if there is no ``latent``."""
        if self.latent is None:
            yield from self._violations(hidden)

    def _violations(self, features: int) -> Iterator[Violation]:
        if features % self.blocks:
            nearest = max(n for n in range(1, self.blocks) if features % n == self.width % n == 0)
            rule = f"must divide the input features ({features})"
            yield Violation(("blocks",), self.blocks, rule, nearest)

    def _units(self) -> Units:
        return Units("tp", self.width // self.blocks, "the feed-forward width")

    def weights(self, hidden: int) -> Iterator[Weight]:
        """Yield gate and up projection as one weight, down projection, and latent projections."""
        inner = self.latent or hidden
        lead = (self.blocks,) * (self.blocks > 1)
        width = self.width // self.blocks
        read = inner // self.blocks
        width_dim = len(lead) + 1
        units = ((width_dim, self._units()),)
        stacked = bool(lead)
        residual = self.latent is None
        yield Weight("w_in", (*lead, 2, width, read), units, "ffn", stacked=stacked)
        shape = (*lead, read, width)
        yield Weight("w_out", shape, units, "ffn", stacked=stacked, start="output", added=residual)
        if self.latent is not None:
            yield Weight("down.weight", (inner, hidden), (), "ffn")
            yield Weight("up.weight", (hidden, inner), (), "ffn", start="normal", added=True)

    def operations(self, hidden: int) -> Iterator[Operation]:
        """Yield both products with the activation, and the latent projections."""
        products = (Matmul(("w_in",)), Matmul(("w_out",)))
        traffic = gated_traffic(self.width, units=self._units())
        yield Operation("ffn", products, traffic=(traffic,), launches=4)
        if self.latent is not None:
            narrow = (Matmul(("down.weight",), "own"), Matmul(("up.weight",), "own"))
            yield Operation("latent", narrow, launches=4)

    def saved(self, shape: Shape) -> Iterator[Saved]:
        """Yield residual, normed and latent rows, and the pre-activation."""
        yield Saved("residual", shape.hidden_bytes, kind=SavedKind.RESIDUAL)
        # Under tp the product reads gathered rows; the norm's output is saved for recompute only.
        gathered: Modules = GATHER if shape.tp > 1 else NOTHING
        recomputed: Modules = frozenset(("ffn",))
        read = ("w_in",)
        only = gathered | recomputed if gathered else NOTHING
        if self.latent is not None:
            read = ("down.weight",)
            only = NOTHING
        yield from saved_norm("ffn_norm", shape.hidden, shape, read, only, recomputed)
        if self.latent is not None:
            size = shape.rows * self.latent * shape.width
            latent = Saved("ffn.latent", size, recomputed, gathered, module="ffn")
            yield latent if gathered else replace(latent, operand_of=("w_in",))
            yield Saved("ffn.combined", size, recomputed, module="ffn", operand_of=("up.weight",))
            shape = shape._replace(hidden=self.latent)
        yield from saved_feed_forward("ffn", self.width // shape.tp, shape)

    def shrink(self, by: Sizes) -> Self:
        """Return a record with a small width, which tp divides, and a small latent."""
        blocks = min(self.blocks, 2)
        width = blocks * round_up(SMALL_WIDTH // blocks, by.tp)
        latent = self.latent and SMALL_WIDTH // 2
        return self.model_copy(update={"width": width, "latent": latent, "blocks": blocks})
