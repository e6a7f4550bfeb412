"""Record of where a run's parts live: read by every room that builds a part.

The room itself stands above the model and is applied to it from outside.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from moefold.config.base import Record
from moefold.config.problems import Violation
from moefold.mesh.config import Sizes, SizesText
from moefold.moe.config import DISPATCH, Local
from moefold.policies.config import RECOMPUTE


class Layout(Record):
    """Where the run's parts live and what is kept; never changes the maths."""

    sizes: SizesText = ""
    """Axis sizes such as ``tp2 pp2 ep4``; an axis left out is 1."""
    dispatch: Annotated[Record, DISPATCH] = Local()
    recompute: Annotated[Record, RECOMPUTE] | None = None
    experts: Literal["auto", "grouped", "loop"] = "auto"
    """Kernel of the experts' products."""

    def rules(self) -> Iterator[Violation]:
        """Each axis is named once."""
        words = self.sizes.split()
        axes = [w.rstrip("0123456789") for w in words]
        if len(set(axes)) < len(axes):
            kept = dict(zip(axes, words, strict=True))
            yield Violation(
                ("sizes",), self.sizes, "each axis is named once", " ".join(kept.values())
            )

    @property
    def split(self) -> Sizes:
        """The sizes as numbers."""
        return Sizes.parse(self.sizes)
