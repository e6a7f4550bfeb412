"""Record of where a run's parts live: read by every room that builds a part.

The room itself stands above the model and is applied to it from outside.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from moefold.config.base import Record
from moefold.config.problems import Violation
from moefold.mesh.config import ORDERS, Order, Sizes, SizesText, StagesText
from moefold.mesh.legality import violations
from moefold.mesh.needs import Model
from moefold.moe.config import DISPATCH, Local
from moefold.policies.config import RECOMPUTE


class Layout(Record):
    """Where the run's parts live and what is kept; never changes the maths."""

    sizes: SizesText = ""
    """Axis sizes such as ``tp2 pp2 ep4``; an axis left out is 1."""
    order: Order = ORDERS[0]
    """Which axis neighbouring ranks differ in first, next, and last."""
    stages: StagesText | None = None
    """What each stage of the pipeline holds, such as ``Et*3|(tt|)*29m|L``; None is balanced."""
    dispatch: Annotated[Record, DISPATCH] = Local()
    recompute: Annotated[Record, RECOMPUTE] | None = None
    experts: Literal["auto", "grouped", "loop"] = "auto"
    """Kernel of the experts' products."""

    def rules(self) -> Iterator[Violation]:
        """Each axis is named once; the rest is between the layout and the model."""
        words = self.sizes.split()
        axes = [w.rstrip("0123456789") for w in words]
        if len(set(axes)) < len(axes):
            kept = dict(zip(axes, words, strict=True))
            yield Violation(
                ("sizes",), self.sizes, "each axis is named once", " ".join(kept.values())
            )

    def misfits(self, model: Model) -> Iterator[Violation]:
        """Yield what of sizes, order and stages does not fit together or not the model."""
        yield from violations(self.split, model, order=self.order, stages=self.stages)

    @property
    def split(self) -> Sizes:
        """The sizes as numbers."""
        return Sizes.parse(self.sizes)

    @property
    def is_split(self) -> bool:
        """Whether anything could misfit: an axis is split, or stages are named."""
        return bool(self.sizes.strip()) or self.stages is not None
