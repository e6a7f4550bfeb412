"""Proves that layouts compute what one rank computes, for a run or for the whole matrix.

A layout passes if every error relative to one rank's run is within its bound: 1e-10 in fp64; in a
run's own number format, a few times the differences that reordered sums cause on one rank; in a
narrow format against fp64, what its rounding explains.
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
from moefold.model.config import Decoder, to_stacks
from moefold.parallel.config import Layout
from moefold.proof.case import BOUND, ProofCase, Subject, micro_batch_count
from moefold.proof.compare import Outcome
from moefold.proof.negative_controls import Control, choose_covering, faults_of, run_faults
from moefold.proof.pool import run_cases
from moefold.proof.rounding_noise import RoundingNoise, measure_noise
from moefold.proof.shrink import for_proof, shrink
from moefold.run import Run
from moefold.spec.layer import Shape, as_layer_spec
from moefold.spec.quantised import cut_violations
from moefold.training.machine import resolve_precision

ALIGNMENT = 16
"""Rows of the grouped product must be a multiple of this many bytes."""


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
    """The outcome of one layout, with the bounds of its errors."""

    layout: str = ""
    world: int = 1
    bound: float = BOUND
    bounds: Mapping[str, float] = field(default_factory=dict)
    """Bounds by quantity, where they differ from ``bound``."""
    coarse: tuple[str, ...] = ()
    """Quantities that were not compared, because the number format is too coarse for them."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """One row for each compared quantity."""
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
        """The row with the largest ratio of error to bound."""

        def excess(row: Row) -> float:
            error = row.max_relative_error
            return math.inf if math.isnan(error) else error / (row.bound or 1e-300)

        return max(self.rows, key=excess, default=None)


@dataclass(frozen=True)
class Proof:
    """The outcomes of several layouts."""

    verdicts: tuple[LayoutVerdict, ...]
    noise: Mapping[Subject, RoundingNoise] = field(default_factory=dict)
    """Measured rounding noise of each subject that was proved in its own format."""

    @property
    def passed(self) -> bool:
        """Whether every layout passed."""
        return bool(self.verdicts) and all(verdict.passed for verdict in self.verdicts)

    @property
    def rows(self) -> tuple[Row, ...]:
        """Every compared quantity of every layout."""
        return tuple(row for verdict in self.verdicts for row in verdict.rows)


OnVerdict = Callable[[LayoutVerdict], None]


def cases_of(
    run: Run, layouts: Sequence[str] | None = None, world: int | None = None, as_run: bool = False
) -> list[ProofCase]:
    """Return a run's layouts as cases of its shrunk model.

    Args:
        run: the run, whose layout is used except for its axis sizes.
        layouts: axis sizes such as ``tp2 ep2``; default: the run's own.
        world: number of ranks; default: the fewest that each layout needs, at least two.
        as_run: keep the run's number format instead of fp64.

    Raises:
        RunError: if a layout is illegal for the run on ``world`` ranks; names the nearest legal.
    """
    records = [_layout(run, sizes) for sizes in layouts or [run.layout.sizes]]
    precision = resolve_precision(run.train.precision, torch.device("cpu")) if as_run else "fp64"
    model = run.needs
    cases = []
    for record in records:
        ranks = max(2, record.split.smallest_world) if world is None else world
        broken = list(record.violations(model))
        broken = broken or size_violations(record.split, model, ranks, record.order, record.stages)
        broken = broken or list(cut_violations(for_proof(run.decoder), record, run.data.seq))
        if broken:
            raise RunError(broken, source=f"layout {str(record.split)!r} on {ranks} ranks")
        subject = replace(
            shrink(run, records, precision), micro_batches=micro_batch_count(record, ranks)
        )
        cases.append(ProofCase(record.split.text or f"dp{ranks}", subject, record, ranks))
    return cases


def _layout(run: Run, sizes: str) -> Layout:
    """Return the run's layout with other sizes; explicit stages are dropped if they do not fit."""
    layout = run.layout.model_copy(update={"sizes": sizes})
    stages = layout.stated_stages
    if stages is not None and layout.split.pp * layout.split.vpp != len(stages.letters):
        layout = layout.model_copy(update={"stages": None})
    return layout


def prove(cases: Sequence[ProofCase], on_verdict: OnVerdict | None = None) -> Proof:
    """Run cases and compare each with one rank in its subject's number format."""
    verdicts: dict[int, LayoutVerdict] = {}

    def record(number: int, outcome: Outcome) -> None:
        case = cases[number]
        quantities = outcome.errors if case.precision else ()
        bounds = {quantity: case.rounding_bound(quantity) for quantity in quantities}
        named = {"layout": case.name, "world": case.world}
        verdicts[number] = LayoutVerdict(**vars(outcome), **named, bounds=bounds)
        if on_verdict is not None:
            on_verdict(verdicts[number])

    run_cases(cases, on_outcome=record)
    return Proof(tuple(verdicts[number] for number in range(len(cases))))


def run_controls(
    cases: Sequence[ProofCase], proof: Proof, on_control: Callable[[Control], None] | None = None
) -> list[Control]:
    """Break each recorded exchange of the cases, once for each number of ranks."""
    recorded = [(case, verdict.sites) for case, verdict in zip(cases, proof.verdicts, strict=True)]
    return run_faults(faults_of(choose_covering(recorded)), on_control, proof.noise)


def prove_as_run(cases: Sequence[ProofCase], on_verdict: OnVerdict | None = None) -> Proof:
    """Run cases in their own format, with bounds from shuffled sums on one rank.

    Quantities for which the format is too coarse are named; one before an update fails the case.
    """
    noise = measure_noise(case.subject for case in cases)
    verdicts: dict[int, LayoutVerdict] = {}

    def record(number: int, outcome: Outcome) -> None:
        case = cases[number]
        measured = noise[case.subject]
        bounded, bounds = measured.apply_bounds(outcome)
        bounded.problems += measured.problems
        coarse = tuple(f"{quantity} of {item}" for quantity, item in measured.coarse)
        named = {"layout": case.name, "world": case.world, "bound": measured.least}
        verdicts[number] = LayoutVerdict(**vars(bounded), **named, bounds=bounds, coarse=coarse)
        if on_verdict is not None:
            on_verdict(verdicts[number])

    run_cases(
        [replace(case, subject=noise[case.subject].subject) for case in cases], on_outcome=record
    )
    return Proof(tuple(verdicts[number] for number in range(len(cases))), noise)


def prove_low_precision(
    cases: Sequence[ProofCase],
    precision: Precision,
    on_verdict: OnVerdict | None = None,
    experts: str = "grouped",
) -> Proof:
    """Run one step of cases in a narrow format, and compare with one rank in fp64.

    A rounding could change a token's experts and thereby everything else. So tokens go to all
    experts, nothing is dropped, and weights have a scale that magnifies little.
    """
    return prove([low_precision_case(case, precision, experts) for case in cases], on_verdict)


def low_precision_case(
    case: ProofCase, precision: Precision, experts: str = "grouped"
) -> ProofCase:
    """Return a case in a narrow format with the grouped product ``experts``.

    The library's, ``grouped``, is used only if it supports the widths.
    """
    decoder = steady(case.subject.decoder)
    etp = case.layout.split.etp
    subject = replace(case.subject, decoder=decoder, idle=())
    bytes_each = DTYPES[precision].itemsize
    shape = Shape(decoder.hidden, rows=1, etp=etp)
    moe_specs = [spec for b in decoder.blocks if (spec := as_layer_spec(b.ffn)).routing is not None]
    rows = [int(spec.activation_width(shape)) * bytes_each for spec in moe_specs]
    rows.append(decoder.hidden * bytes_each)
    fits = experts != "grouped" or all(row % ALIGNMENT == 0 for row in rows)
    layout = case.layout.model_copy(update={"experts": experts}) if fits else case.layout
    return replace(case, subject=subject, layout=layout, precision=precision)


def steady(decoder: Decoder) -> Decoder:
    """Return a decoder without choices that a rounding could change."""
    blocks = []
    for block in decoder.blocks:
        attention = as_layer_spec(block.attention).without_discrete_choices()
        ffn = as_layer_spec(block.ffn).without_discrete_choices()
        blocks.append(block.model_copy(update={"attention": attention, "ffn": ffn}))
    return decoder.model_copy(update={"stacks": to_stacks(blocks), "init_std": 0.1})
