"""Cases of a proof: a small model with its data, a layout, and a number of ranks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from moefold.config.base import Record
from moefold.config.errors import RunError, dotted, format_value
from moefold.layers.config import Precision
from moefold.mesh.folding import Folding
from moefold.mesh.legality import world_violations
from moefold.model.config import Decoder
from moefold.optim.config import Optim
from moefold.parallel.config import Layout
from moefold.spec.decoder import model_needs
from moefold.spec.quantised import cut_violations, moment_violations
from moefold.training.losses.config import CrossEntropy, LossRecord

SHARED_COUNTS = (2, 4, 8, 16, 32)
"""Numbers of micro-batches per step to try first, so that layouts share references."""
BOUND = 1e-10
"""Maximum relative error in fp64."""
BLOCK_OPERATIONS = 13
FINAL_OPERATIONS = 3
"""Numbers of consecutive operations: norm, projection, rotation, scores, softmax, values,
projection, sum, norm, projection, gate, projection, sum; and norm, head, loss."""
ROUNDING: Mapping[Precision, float] = {"fp32": 8 * 2.0**-23, "bf16": 4 * 2.0**-7}
"""Bound of an error in a narrow format at depth 0."""
MAX_BOUND = 0.4
"""Largest bound: a halved gradient, as when one of two ranks' terms is missing, errs by more."""
MEANS = ("lm_loss", "evaluation", "router/")
"""Quantities that are means over rows, in which roundings mostly cancel."""
EXACT = ("replicas", "counts")
"""Quantities that no rounding changes if every token goes to all experts."""


@dataclass(frozen=True)
class Subject:
    """Computation to prove in any layout; cases with equal subjects share a reference run."""

    decoder: Decoder
    optim: Record
    micro_batches: int = 8
    """Micro-batches of a step, over all data ranks."""
    rows: int = 32
    """Rows of each micro-batch, padding included."""
    padding: int = 3
    """Micro-batch j ends with ``(j % 3) * padding`` rows of padding."""
    empty: tuple[int, ...] = ()
    """Micro-batches without a valid row."""
    idle: tuple[int, ...] = ()
    """Experts that no token may choose; needs routers with a selection bias."""
    precision: Precision = "fp64"
    seed: int = 1
    loss: LossRecord = field(default_factory=CrossEntropy)
    masked: bool = False
    """Whether only the end of each document has labels, like an answer."""


@dataclass(frozen=True)
class ProofCase:
    """A subject in a layout over a number of ranks."""

    name: str
    subject: Subject
    layout: Layout
    world: int
    precision: Precision | None = None
    """Number format of the case if it differs from the reference's; then no update is made, since
    optimizers can magnify roundings without limit."""
    shuffle: int | None = None
    """Seed of a shuffled order of sums in products: equal maths, different last bits."""

    @property
    def folding(self) -> Folding:
        """Folding of the layout's axis sizes over the ranks."""
        return Folding(self.layout.split, self.world, self.layout.order)

    def rounding_bound(self, quantity: str) -> float:
        """Return the largest relative error of a quantity that rounding explains.

        ``c * 1.03^depth * eps``, and 0.4 at most; *depth* is the number of operations, forward and
        backward, before a gradient; c is 8 in fp32, which processors of different vector width sum
        in different orders, and 4 in bf16. For means over rows, an eighth of ``c * eps``.
        """
        rounding = ROUNDING.get(self.precision or "fp64")
        if rounding is None:
            return BOUND
        if quantity in EXACT:
            return 0.0
        if quantity.startswith(MEANS):
            return max(rounding / 8, 2.0**-21)
        operations = BLOCK_OPERATIONS * len(self.subject.decoder.blocks) + FINAL_OPERATIONS
        return min(rounding * 1.03 ** (2 * operations), MAX_BOUND)

    def broken_rules(self) -> Iterator[str]:
        """Yield the rules that the case breaks, with option and value; none if it can run."""
        layout = self.layout
        decoder = self.subject.decoder
        optim = self.subject.optim
        rows = self.subject.rows
        micro_batches = self.subject.micro_batches
        violations = [*layout.violations(model_needs(decoder, rows))]
        violations += cut_violations(decoder, layout, rows)
        if isinstance(optim, Optim):
            violations += moment_violations(decoder, optim, layout, rows)
        violations = [violation.under("layout") for violation in violations]
        violations += world_violations(layout.split, self.world)
        yield from (f"{dotted(v.path)} = {format_value(v.value)}: {v.rule}" for v in violations)
        if violations:
            return
        sizes = layout.split
        dp = self.folding.dp
        if rows % (sizes.tp * 2 * sizes.cp):
            yield f"tp * 2 * cp must divide the rows of a micro-batch ({rows})"
        if micro_batches % dp:
            yield f"dp {dp} must divide the number of micro-batches ({micro_batches})"
        elif not has_table(layout, micro_batches // dp):
            yield f"the schedule has no table for {micro_batches // dp} micro-batches"


def has_table(layout: Layout, micro_batches: int) -> bool:
    """Return whether a layout's schedule has a table for this many micro-batches per data rank."""
    try:
        layout.table(micro_batches)
    except RunError:
        return False
    return True


def micro_batch_count(layout: Layout, world: int) -> int:
    """Return the number of micro-batches of a step for a layout that is legal on ``world`` ranks.

    Data ranks get equally many, at least two and enough to fill a pipeline, for which the schedule
    has a table.

    Raises:
        RunError: if the schedule has no table for any number of micro-batches.
    """
    sizes = layout.split
    dp = world // (sizes.pp * sizes.cp * sizes.tp)
    least = 2 * sizes.pp * dp
    most = 8 * sizes.pp * sizes.vpp * dp
    for total in chain(SHARED_COUNTS, range(dp, most, dp)):
        if total >= least and total % dp == 0 and has_table(layout, total // dp):
            return total
    layout.table(most // dp)
    raise AssertionError("the largest number fills every schedule's domain, or is refused")
