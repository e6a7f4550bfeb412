"""What a proof runs: a small model on some rows, one layout of it, and how many ranks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from moefold.config.base import Record
from moefold.config.errors import RunError
from moefold.layers.config import Precision
from moefold.mesh.folding import Folding
from moefold.mesh.legality import folding_violations
from moefold.model.config import Decoder
from moefold.optim.config import Optim
from moefold.parallel.config import Layout
from moefold.spec.decoder import needs
from moefold.spec.quantised import cut_violations, moment_violations
from moefold.training.losses.config import CrossEntropy, LossRecord

SHARED_COUNTS = (2, 4, 8, 16, 32)
"""Micro-batches of a step, tried first, so that many layouts share one reference."""
BOUND = 1e-10
"""Largest relative error in fp64."""
IN_A_BLOCK, AT_THE_END = 13, 3
"""Operations one after another: norm, projection, rotation, scores, softmax, values, projection,
sum, norm, projection, gate, projection, sum; and norm, head, loss."""
ROUNDING: Mapping[Precision, float] = {"fp32": 8 * 2.0**-23, "bf16": 4 * 2.0**-7}
"""Bound of an error in a narrow format, before any operation."""
LARGEST = 0.4
"""Largest bound: a gradient halved, as where one of two ranks' terms is missing, is off by more."""
MEANS = ("lm_loss", "evaluation", "router/")
"""Quantities that are means over rows, in which most of a rounding goes."""
EXACT = ("replicas", "counts")
"""Quantities of a step, no token of which can go elsewhere, that no rounding changes."""


@dataclass(frozen=True)
class Subject:
    """What is computed, whatever the layout: cases that agree in it share one reference run."""

    decoder: Decoder
    optim: Record
    micro_batches: int = 8
    """Of a step, over all data ranks."""
    rows: int = 32
    """Of each micro-batch, padding included."""
    padding: int = 3
    """Micro-batch j ends with ``(j % 3) * padding`` rows of padding."""
    empty: tuple[int, ...] = ()
    """Micro-batches without a valid row."""
    idle: tuple[int, ...] = ()
    """Experts that no token may choose; a router without a selection bias keeps them."""
    precision: Precision = "fp64"
    seed: int = 1
    loss: LossRecord = field(default_factory=CrossEntropy)
    masked: bool = False
    """Whether the end of each document alone has labels, as an answer has."""


@dataclass(frozen=True)
class ProofCase:
    """A subject in a layout over a number of ranks."""

    name: str
    subject: Subject
    layout: Layout
    world: int
    precision: Precision | None = None
    """Number format of the case where it is not the reference's; then no update is made, since
    an optimizer magnifies roundings as it pleases."""
    shuffle: int | None = None
    """Seed of another order in which products are summed: the same maths, other last bits."""

    @property
    def folding(self) -> Folding:
        """The layout's sizes laid over the ranks."""
        return Folding(self.layout.split, self.world, self.layout.order)

    def bound_of(self, quantity: str) -> float:
        """Return the largest relative error of a quantity that the number format explains.

        ``c * 1.03^depth * eps``, and 0.4 at most; *depth* is the operations that a gradient has
        behind it, forward and backward; c is 8 in fp32, whose sums processors of different vector
        width add up in another order, and 4 in bf16. Of means over rows an eighth of ``c * eps``.
        """
        rounding = ROUNDING.get(self.precision or "fp64")
        if rounding is None:
            return BOUND
        if quantity in EXACT:
            return 0.0
        if quantity.startswith(MEANS):
            return max(rounding / 8, 2.0**-21)
        operations = IN_A_BLOCK * len(self.subject.decoder.blocks) + AT_THE_END
        return min(rounding * 1.03 ** (2 * operations), LARGEST)

    def refused(self) -> Iterator[str]:
        """Yield, in words, what makes the case illegal; nothing where it can run."""
        model = needs(self.subject.decoder, self.subject.rows)
        layout = self.layout
        found = [*layout.violations(model)]
        found += folding_violations(layout.split, self.world, layout.order)
        found += cut_violations(self.subject.decoder, layout, self.subject.rows)
        optim, rows = self.subject.optim, self.subject.rows
        if isinstance(optim, Optim):
            found += moment_violations(self.subject.decoder, optim, layout, rows)
        yield from (violation.rule for violation in found)
        if found:
            return
        sizes, dp = layout.split, self.folding.dp
        if self.subject.rows % (sizes.tp * 2 * sizes.cp):
            yield f"tp * 2 * cp divides the rows of a micro-batch ({self.subject.rows})"
        if self.subject.micro_batches % dp:
            yield f"dp{dp} divides the micro-batches ({self.subject.micro_batches})"
        elif not fills(layout, self.subject.micro_batches // dp):
            yield f"the schedule has no table for {self.subject.micro_batches // dp} micro-batches"


def fills(layout: Layout, micro_batches: int) -> bool:
    """Whether a layout's schedule has a table for so many micro-batches on each data rank."""
    try:
        layout.table(micro_batches)
    except RunError:
        return False
    return True


def enough(layout: Layout, world: int) -> int:
    """Return micro-batches of a step for a layout that is legal on ``world`` ranks.

    Each data rank gets as many, at least two and enough to fill a pipeline, and the schedule has a
    table for them.

    Raises:
        RunError: where no number of micro-batches is inside the schedule's domain.
    """
    sizes = layout.split
    dp = world // (sizes.pp * sizes.cp * sizes.tp)
    least, most = 2 * sizes.pp * dp, 8 * sizes.pp * sizes.vpp * dp
    for total in chain(SHARED_COUNTS, range(dp, most, dp)):
        if total >= least and total % dp == 0 and fills(layout, total // dp):
            return total
    layout.table(most // dp)
    raise AssertionError("the largest number fills every schedule's domain, or is refused")
