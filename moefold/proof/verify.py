"""Proves that layouts do not change the maths of a run, or of the whole matrix.

A layout passes where every error beside one rank's run is within its bound: 1e-10 in fp64; in a
run's own number format a few times what orders of the same sums differ by on one rank; in a narrow
format beside fp64 what its rounding explains.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from moefold.config.errors import RunError
from moefold.layers.config import Precision
from moefold.layers.precision import DTYPES
from moefold.mesh.legality import size_violations
from moefold.model.config import Decoder, patterns
from moefold.parallel.config import Layout
from moefold.proof.case import BOUND, ProofCase, Subject, enough
from moefold.proof.compare import Outcome
from moefold.proof.negative_controls import Control, control, cover, faults_of
from moefold.proof.pool import run_cases
from moefold.proof.rounding_noise import RoundingNoise, noise_of
from moefold.proof.shrink import as_proved, shrink
from moefold.run import Run
from moefold.spec.decoder import needs
from moefold.spec.layer import Shape, described
from moefold.spec.quantised import cut_violations
from moefold.training.machine import settled

ALIGNMENT = 16
"""Bytes that divide a row which the grouped product takes."""


class Row(NamedTuple):
    """One compared quantity of one layout."""

    layout: str
    quantity: str
    max_relative_error: float
    bound: float
    worst: str
    """The tensor, step or rank of the largest error."""


@dataclass
class LayoutVerdict(Outcome):
    """What one layout came to, beside the bounds of its errors."""

    layout: str = ""
    world: int = 1
    bound: float = BOUND
    bounds: Mapping[str, float] = field(default_factory=dict)
    """Of quantities that have one of their own."""
    coarse: tuple[str, ...] = ()
    """What the number format is too coarse for, and was not compared."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """Each compared quantity."""
        return tuple(
            Row(self.layout, name, error, self.bounds.get(name, self.bound), self.where[name])
            for name, error in self.errors.items()
        )

    @property
    def passed(self) -> bool:
        """Whether every error is within its bound (NaN is not) and nothing else is wrong."""
        within = all(row.max_relative_error <= row.bound for row in self.rows)
        return bool(self.rows) and within and not self.problems

    @property
    def worst(self) -> Row | None:
        """The row furthest beyond, or nearest to, its bound."""

        def excess(row: Row) -> float:
            error = row.max_relative_error
            return math.inf if math.isnan(error) else error / (row.bound or 1e-300)

        return max(self.rows, key=excess, default=None)


@dataclass(frozen=True)
class Proof:
    """What several layouts came to."""

    verdicts: tuple[LayoutVerdict, ...]
    noise: Mapping[Subject, RoundingNoise] = field(default_factory=dict)
    """What errors in a run's own format were held against."""

    @property
    def passed(self) -> bool:
        """Whether every layout passed."""
        return bool(self.verdicts) and all(verdict.passed for verdict in self.verdicts)

    @property
    def rows(self) -> tuple[Row, ...]:
        """Every compared quantity of every layout."""
        return tuple(row for verdict in self.verdicts for row in verdict.rows)


Told = Callable[[LayoutVerdict], None]


def cases_of(
    run: Run, layouts: Sequence[str] | None = None, world: int | None = None, as_run: bool = False
) -> list[ProofCase]:
    """Return a run's layouts as cases of its shrunk model.

    Args:
        run: the run; schedule, dispatcher and all else of its layout but the sizes are kept.
        layouts: axis sizes such as ``tp2 ep2``; those of the run where left out.
        world: number of ranks; default the fewest of each layout, and two at least.
        as_run: keep the run's number format instead of fp64.

    Raises:
        RunError: for a layout that is not legal for the run on so many ranks, with the nearest.
    """
    records = [_layout(run, sizes) for sizes in layouts or [run.layout.sizes]]
    precision = settled(run.train.precision, torch.device("cpu")) if as_run else "fp64"
    model, cases = needs(run.decoder(), run.data.seq), []
    for record in records:
        ranks = max(2, record.split.smallest_world) if world is None else world
        found = list(record.violations(model))
        found = found or size_violations(record.split, model, ranks, record.order, record.stages)
        found = found or list(cut_violations(as_proved(run.decoder()), record, run.data.seq))
        if found:
            raise RunError(found, source=f"layout {str(record.split)!r} on {ranks} ranks")
        subject = replace(shrink(run, records, precision), micro_batches=enough(record, ranks))
        cases.append(ProofCase(record.split.text or f"dp{ranks}", subject, record, ranks))
    return cases


def _layout(run: Run, sizes: str) -> Layout:
    """Return the run's layout with other sizes; named stages go where they fit no longer."""
    asked = run.layout.model_copy(update={"sizes": sizes})
    if asked.stages is not None and asked.split.pp * asked.split.vpp != len(
        asked.stages_of(0).letters
    ):
        asked = asked.model_copy(update={"stages": None})
    return asked


def prove(cases: Sequence[ProofCase], told: Told | None = None) -> Proof:
    """Run cases against one rank in fp64."""
    found: dict[int, LayoutVerdict] = {}

    def tell(number: int, outcome: Outcome) -> None:
        case = cases[number]
        quantities = outcome.errors if case.precision else ()
        bounds = {quantity: case.bound_of(quantity) for quantity in quantities}
        named = {"layout": case.name, "world": case.world}
        found[number] = LayoutVerdict(**vars(outcome), **named, bounds=bounds)
        if told is not None:
            told(found[number])

    run_cases(cases, told=tell)
    return Proof(tuple(found[number] for number in range(len(cases))))


def controls_of(
    cases: Sequence[ProofCase], proof: Proof, told: Callable[[Control], None] | None = None
) -> list[Control]:
    """Break every exchange that cases recorded, once at each number of ranks."""
    recorded = [(case, found.sites) for case, found in zip(cases, proof.verdicts, strict=True)]
    return control(faults_of(cover(recorded)), told, proof.noise)


def within_spread(cases: Sequence[ProofCase], told: Told | None = None) -> Proof:
    """Hold cases in their own format against what shuffled sums on one rank differ by.

    What the format is too coarse for is named; before an update nothing may be.
    """
    noise = noise_of(case.subject for case in cases)
    found: dict[int, LayoutVerdict] = {}

    def tell(number: int, outcome: Outcome) -> None:
        case = cases[number]
        of_it = noise[case.subject]
        held, bounds = of_it.held(outcome)
        held.problems += of_it.problems
        coarse = tuple(f"{quantity} of {what}" for quantity, what in of_it.coarse)
        named = {"layout": case.name, "world": case.world, "bound": of_it.least}
        found[number] = LayoutVerdict(**vars(held), **named, bounds=bounds, coarse=coarse)
        if told is not None:
            told(found[number])

    run_cases([replace(case, subject=noise[case.subject].subject) for case in cases], told=tell)
    return Proof(tuple(found[number] for number in range(len(cases))), noise)


def prove_low_precision(
    cases: Sequence[ProofCase],
    precision: Precision,
    told: Told | None = None,
    experts: str = "grouped",
) -> Proof:
    """Run one step of cases in a narrow format against one rank in fp64, fast forms forced.

    A rounding may change which experts a token takes, and then everything. So tokens go to all
    experts here, nothing is dropped, and values are of a size that magnifies little.
    """
    return prove([low_precision_case(case, precision, experts) for case in cases], told)


def low_precision_case(
    case: ProofCase, precision: Precision, experts: str = "grouped"
) -> ProofCase:
    """Return a case in a narrow format, its grouped product forced.

    The library's, ``grouped``, is forced where it takes the widths.
    """
    decoder, etp = steady(case.subject.decoder), case.layout.split.etp
    subject = replace(case.subject, decoder=decoder, idle=())
    bytes_each = DTYPES[precision].itemsize
    shape = Shape(decoder.hidden, rows=1, etp=etp)
    mixtures = [spec for b in decoder.blocks if (spec := described(b.ffn)).routing is not None]
    rows = [int(spec.activation_width(shape)) * bytes_each for spec in mixtures]
    rows.append(decoder.hidden * bytes_each)
    fits = experts != "grouped" or all(row % ALIGNMENT == 0 for row in rows)
    layout = case.layout.model_copy(update={"experts": experts}) if fits else case.layout
    return replace(case, subject=subject, layout=layout, precision=precision)


def steady(decoder: Decoder) -> Decoder:
    """Return a decoder none of whose choices hangs on a rounding."""
    stacks = patterns(
        b.model_copy(
            update={"attention": described(b.attention).steady(), "ffn": described(b.ffn).steady()}
        )
        for b in decoder.blocks
    )
    return decoder.model_copy(update={"stacks": stacks, "init_std": 0.1})
