"""Record of where a run's parts live: read by every room that builds a part.

The room itself stands above the model and is applied to it from outside.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from moefold.config.base import Record
from moefold.config.problems import Violation
from moefold.layers.config import CONTEXT, Context, Ring
from moefold.mesh.config import ORDERS, Order, Sizes, SizesText, StagesText
from moefold.mesh.legality import violations
from moefold.mesh.needs import Model
from moefold.mesh.pipeline import Stages, Way
from moefold.moe.config import DISPATCH, AllToAll, Dispatch
from moefold.policies.config import RECOMPUTE
from moefold.schedule.build import tabulate
from moefold.schedule.config import SCHEDULE, Interleaved, OneFOneB, Schedule, Vee
from moefold.schedule.table import Table


class Layout(Record):
    """Where the run's parts live and what is kept; never changes the maths."""

    sizes: SizesText = ""
    """Axis sizes such as ``tp2 pp2 ep4``; an axis left out is 1."""
    order: Order = ORDERS[0]
    """Which axis neighbouring ranks differ in first, next, and last."""
    stages: StagesText | None = None
    """What each stage of the pipeline holds, such as ``Et*3|(tt|)*29m|L``; None is balanced."""
    schedule: Annotated[Record, SCHEDULE] | None = None
    """Order of the pipeline's passes; None is 1f1b, or interleaved with virtual stages."""
    context: Annotated[Record, CONTEXT] = Ring()
    """How attention sees the rows of other context ranks."""
    zero: Annotated[int, Field(ge=0, le=3)] = 1
    """What data ranks share instead of copying: optimizer state, then gradients, then weights."""
    dispatch: Annotated[Record, DISPATCH] = AllToAll()
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
        """Yield what does not fit together or not the model."""
        yield from violations(self.split, model, order=self.order, stages=self.stages)
        if isinstance(self.context, Context):
            broken = self.context.misfits(self.split, model.heads)
            yield from (found.under("context") for found in broken)
        if isinstance(self.dispatch, Dispatch):
            yield from (broken.under("dispatch") for broken in self.dispatch.misfits(self.split))

    def table(self, micro_batches: int) -> Table:
        """Return what the ranks of a pipeline do in a step of so many micro-batches each.

        Raises:
            RunError: outside the schedule's domain, with the nearest legal values.
        """
        sizes = self.split
        schedule = self.schedule or (Interleaved() if sizes.vpp > 1 else OneFOneB())
        assert isinstance(schedule, Schedule)
        return tabulate(schedule, sizes.pp, sizes.vpp, micro_batches)

    def stages_of(self, layers: int) -> Stages:
        """Return what each stage holds of a model with so many layers."""
        if self.stages is not None:
            return Stages.parse(self.stages)
        way: Way = "v" if isinstance(self.schedule, Vee) else "round"
        return Stages.balanced(self.split.pp, self.split.vpp, layers, way=way)

    @property
    def split(self) -> Sizes:
        """The sizes as numbers."""
        return Sizes.parse(self.sizes)

    @property
    def split_groups(self) -> tuple[tuple[str, int], ...]:
        """Kinds of groups that are cut in two levels, and how many neighbours go together."""
        context = self.context.splits(self.split) if isinstance(self.context, Context) else ()
        return context + (self.dispatch.splits if isinstance(self.dispatch, Dispatch) else ())

    @property
    def is_split(self) -> bool:
        """Whether anything could misfit: an axis is split, or stages are named."""
        return bool(self.sizes.strip()) or self.stages is not None
