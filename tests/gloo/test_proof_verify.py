"""A selection of the matrix passes on real ranks; what is broken on purpose does not."""

from dataclasses import replace
from functools import cache
from itertools import cycle

import pytest
from proof_selection import selection

from moefold.api import verify
from moefold.comm.recorder import Site
from moefold.parallel.config import Layout
from moefold.proof.case import ProofCase, enough
from moefold.proof.matrix import matrix
from moefold.proof.negative_controls import control, cover, faults_of, halves
from moefold.proof.pool import run_cases
from moefold.proof.rank_run import InjectedFault
from moefold.proof.subjects import SUBJECTS
from moefold.proof.verify import (
    BOUND,
    LayoutVerdict,
    low_precision_case,
    prove,
    prove_low_precision,
)
from moefold.run import load_run


def case(name: str, sizes: str, world: int, **layout: object) -> ProofCase:
    record = Layout(sizes=sizes, **layout)  # type: ignore[arg-type]
    subject = replace(SUBJECTS[name], micro_batches=enough(record, world))
    return ProofCase(f"{name}: {sizes or 'dp'} on {world}", subject, record, world)


SOME = {
    **dict.fromkeys(("schedules", "zero_stages", "contexts"), 99),
    **dict.fromkeys(("clones", "routers", "multi_token", "precisions", "dispatchers"), 3),
    **dict.fromkeys(("offloads", "states", "recomputes", "foldings"), 2),
}
"""Rules each of whose choices other files of this folder compare with one rank: each so manieth
stands here."""


def few() -> list[ProofCase]:
    """Return the selection without what other files hold."""
    chosen, every = selection(), matrix()
    left = set()
    for rule, step in SOME.items():
        held = [case for case in every[rule] if case in chosen]
        left |= set(held) - set(held[::step])
    models = {replace(SUBJECTS[name], micro_batches=0) for name in FEW}
    left |= {
        case
        for case in every["models"]
        if replace(case.subject, micro_batches=0) in models and not case.layout.recompute
    }
    return [case for case in chosen if case not in left]


@pytest.mark.slow
def test_a_selection_of_the_matrix_computes_what_one_rank_computes() -> None:
    cases = few()
    assert 40 < len(cases) < 2 / 3 * len(selection())
    proof = prove(cases)
    failed = {
        verdict.layout: (verdict.problems, verdict.worst)
        for verdict in proof.verdicts
        if not verdict.passed
    }
    assert not failed
    compared = {row.quantity for row in proof.rows}
    assert compared >= {"lm_loss", "grad_norm", "clip", "counts", "gradients", "weights"}
    assert compared >= {"router/aux_sequence", "router/z", "evaluation", "replicas"}
    assert compared >= {"optimizer/exp_avg", "optimizer/exp_avg_sq", "optimizer/step"}


AXES = {
    "tp": case("gqa", "tp2", 2),
    "cp": case("gqa", "cp2", 2),
    "pp": case("gqa", "pp2", 2),
    "dp": case("gqa", "", 2),
    "ep": case("gqa", "ep2", 2),
    "etp": case("gqa", "etp2", 2),
}
SCALE = 1 + 1e-8
SCALED = ("layers.1.moe.experts.w_in", "layers.1.attention.k.weight", "norm.weight")


FEW = dict.fromkeys(("biased", "scaled", "normed"), "tp2") | {
    "formed": "tp2 etp2",
    "entered": "tp2 etp2",
    "convolved": "cp2",
    "delta": "tp2",
    "channels": "cp2",
    "gated latents": "tp2",
}
"""Models of parts that few families have, each over what it may break."""


@cache
def parts_of_few_families() -> dict[str, LayoutVerdict]:
    """Return what each of them came to."""
    proof = prove([case(name, sizes, 2) for name, sizes in FEW.items()])
    return dict(zip(FEW, proof.verdicts, strict=True))


@pytest.mark.parametrize("name", FEW)
def test_b23_parts_of_few_families_compute_over_ranks_what_one_rank_does(name: str) -> None:
    verdict = parts_of_few_families()[name]
    assert verdict.passed, (verdict.problems, verdict.worst)


def test_one_gradient_scaled_by_a_hundred_millionth_is_named_on_each_axis() -> None:
    """Parameters take turns."""
    faults = [InjectedFault(parameter=name, factor=SCALE) for name in SCALED]
    found = control(list(zip(AXES.values(), cycle(faults), strict=False)), BOUND)
    assert len(found) == len(AXES)
    assert not [(c.case, c.broken.words, c.said) for c in found if not c.noticed]


@pytest.mark.slow
def test_each_exchange_of_a_folded_layout_is_needed() -> None:
    cases = [case("gqa", "tp2 ep2", 2)]
    outcomes = run_cases(cases)
    sites = [Site(*site) for site in outcomes[0].sites]
    assert {"embed", "loss", "gradients", "layers.*.attention", "layers.*.moe.dispatch"} <= {
        site.label for site in sites
    }
    planned = faults_of([(cases[0], sites)])
    # Gradients are halved here; `moefold verify --controls` takes them away altogether too.
    planned = [(c, b) for c, b in planned if b.how == "half" or not halves(b.site)]  # type: ignore[arg-type]
    found = control(planned, BOUND)
    assert len(found) > 20
    assert not [c.broken.words for c in found if not c.noticed]


def test_few_cases_cover_every_call_site_at_each_number_of_ranks() -> None:
    a, b, c, d = (Site(label, "all_reduce", "tp") for label in "abcd")
    few, many = AXES["tp"], AXES["ep"]
    wide = replace(few, name="four ranks", world=4)
    recorded = [(few, (a, b)), (many, (b, c, d)), (AXES["dp"], (c,)), (wide, (a,))]
    assert cover(recorded) == [(many, (b, c, d)), (few, (a,)), (wide, (a,))]


def test_what_breaks_nothing_is_reported_as_unnoticed() -> None:
    """Without this, a control that never ran would look like one that was noticed."""
    nowhere = InjectedFault(site=Site("no such module", "all_reduce", "tp"))
    found = control([(AXES["tp"], nowhere)], BOUND)
    assert [c.noticed for c in found] == [False]


def test_a_case_that_fails_is_named_and_the_others_still_run() -> None:
    wrong = replace(AXES["dp"], name="dp of odd rows", subject=replace(AXES["dp"].subject, rows=31))
    broken = replace(AXES["tp"], name="tp of odd rows", subject=replace(wrong.subject, rows=31))
    proof = prove([AXES["ep"], broken, AXES["dp"]])
    assert [verdict.passed for verdict in proof.verdicts] == [True, False, True]
    (problem,) = proof.verdicts[1].problems
    assert "AssertionError" in problem


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_narrow_formats_stay_within_their_rounding(precision: str) -> None:
    cases = [case("gqa", "tp2 ep2", 2), case("mla", "cp2 ep2", 2), case("tied", "pp2", 2)]
    proof = prove_low_precision(cases, precision)  # type: ignore[arg-type]
    assert {low_precision_case(c, precision).layout.experts for c in cases} == {"grouped"}  # type: ignore[arg-type]
    assert not [(v.layout, v.problems, v.worst) for v in proof.verdicts if not v.passed]
    largest = max(row.max_relative_error for row in proof.rows)
    assert largest > 1e-9, "nothing was computed in a narrow format"


def test_a_run_is_proved_as_it_runs() -> None:
    run = load_run("tiny", ["train.precision=fp32"])
    proof = verify(run, layouts=["tp2 ep2"], as_run=True)
    assert proof.passed, proof.verdicts
    errors = {row.quantity: row.max_relative_error for row in proof.rows}
    assert 1e-9 < errors["gradients"] < 1e-4
