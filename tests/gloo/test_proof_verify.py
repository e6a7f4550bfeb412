"""Every block and what crosses layers passes on real ranks; what is broken on purpose does not."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from tempfile import gettempdir

import pytest

from moefold.api import verify
from moefold.comm.recorder import CallSite
from moefold.layers.config import Full, Offload, OffloadToDisk, OffloadToHost, Selective
from moefold.mesh.config import ORDERS
from moefold.model.config import to_stacks
from moefold.moe.dispatch.config import Clones
from moefold.parallel.config import Layout, StatePlacement
from moefold.proof.case import BOUND, MAX_BOUND, ProofCase, Subject, micro_batch_count
from moefold.proof.matrix import matrix
from moefold.proof.negative_controls import choose_covering, faults_of, run_faults, yields_gradients
from moefold.proof.pool import run_cases
from moefold.proof.rank_run import InjectedFault
from moefold.proof.subjects import (
    BIASED,
    DENSE,
    GQA,
    MLA,
    SUBJECTS,
    decoder,
    router_kinds,
    subject,
    terms,
)
from moefold.proof.verify import (
    cases_of,
    low_precision_case,
    prove,
    prove_as_run,
    prove_low_precision,
)
from moefold.run import load_run
from moefold.schedule.config import Interleaved, Merged


def of(name: str, subject: Subject, sizes: str, world: int, **layout: object) -> ProofCase:
    record = Layout(sizes=sizes, **layout)  # type: ignore[arg-type]
    subject = replace(subject, micro_batches=micro_batch_count(record, world))
    return ProofCase(f"{name}: {sizes or 'dp'} on {world}", subject, record, world)


def case(name: str, sizes: str, world: int, **layout: object) -> ProofCase:
    return of(name, SUBJECTS[name], sizes, world, **layout)


def together() -> Iterator[ProofCase]:
    """Yield models of many layers, in which each block of the matrix's models stands: each other
    attention over tensor and over context ranks, each other feed-forward over one of them.

    Models that are more than their blocks stand by themselves. Skewed turns leave experts of deep
    layers without rows; so do some seeds, which is found out after a whole run on one rank.
    """
    named = SUBJECTS | dict([*router_kinds(), *terms()])
    made = [subject for name, subject in named.items() if "skewed" not in name]
    plain = SUBJECTS["dense"]

    def bare(subject: Subject) -> Subject:
        same = subject.decoder.model_copy(update={"stacks": plain.decoder.stacks})
        return replace(subject, decoder=same)

    blocks = dict.fromkeys(
        block
        for subject in made
        if bare(subject) == plain
        for block in subject.decoder.blocks
        if block.multi_token is None
    )
    apart = [block for block in blocks if block.attention != GQA]
    alike = [block for block in blocks if block.attention == GQA]
    for turn, sizes in enumerate(("tp2 etp2", "cp2 ep2")):
        here = [*apart, *alike[turn::2]]
        for part in range(PARTS):
            stacks = to_stacks(here[part::PARTS])
            decoder = plain.decoder.model_copy(update={"stacks": stacks})
            yield of(f"blocks {part}", replace(plain, decoder=decoder, seed=SEEDS[turn]), sizes, 2)


def few() -> list[ProofCase]:
    """Return a layout for each block, and for what crosses layers: what other files of this folder
    do not compare with one rank.
    """
    (frozen,) = (c for c in matrix()["frozen_parts"] if c.name.startswith(FROZEN))
    again = Selective(modules=("norms", "attention", "experts"))
    moved = Selective(modules=("experts", "attention", "gather"))
    host = StatePlacement.model_validate({"at": "host", "step": "host"})
    disk = OffloadToDisk(modules=("experts", "attention"), folder=gettempdir())
    away = Offload(host=OffloadToHost(modules=("block", "norms")), disk=disk, in_flight=1)
    latent = subject(decoder(MLA, *(DENSE, BIASED) * 2))
    interleaved = {"schedule": Interleaved(), "state": host, "zero": 1}
    cloned = {"schedule": Merged(), "zero": 2, "clones": Clones(slots=2)}
    return [
        *together(),
        frozen,
        case("scaled", "tp2", 2),
        case("normed", "tp2 etp2", 2),
        case("idle experts", "tp2", 2),
        case("idle ranks", "ep2", 2),
        case("multi token tied", "tp2 pp2", 4, recompute=again),
        case("gqa", "tp2 cp2 ep2 etp2", 4, recompute=Full()),
        case("gqa", "tp2 pp2 ep2", 4, order=ORDERS[-1]),
        case("deep", "pp2 vpp2", 4, **interleaved),
        case("mla", "pp2 ep2", 4, **cloned),
        of("latent", latent, "tp2 ep4", 4, offload=away, recompute=moved),
    ]


PARTS, MANY = 2, 10
"""Models for each layout of blocks; layers over which roundings grow tenfold."""
SEEDS = (2, 1)
"""By which experts of all their layers have rows, for each layout of blocks."""
FROZEN = "centred without layer 0: tp2 ep2 on 2"


@pytest.mark.slow
def test_blocks_and_what_crosses_layers_compute_over_ranks_what_one_rank_does() -> None:
    cases = few()
    assert len({block for c in cases for block in c.subject.decoder.blocks}) > 50
    proof = prove(cases)
    growth = [1 if len(made.subject.decoder.blocks) < MANY else 10 for made in cases]
    verdicts = [
        replace(verdict, bound=BOUND * times)
        for verdict, times in zip(proof.verdicts, growth, strict=True)
    ]
    failed = {
        verdict.layout: (verdict.problems, verdict.worst)
        for verdict in verdicts
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


def test_one_gradient_scaled_by_a_hundred_millionth_is_named_on_each_axis() -> None:
    """Parameters take turns."""
    faults = [InjectedFault(parameter=name, factor=SCALE) for name in SCALED]
    found = run_faults(list(zip(AXES.values(), cycle(faults), strict=False)))
    assert len(found) == len(AXES)
    assert not [(c.case, c.fault.text, c.evidence) for c in found if not c.noticed]


@pytest.mark.slow
def test_each_exchange_of_a_folded_layout_is_needed() -> None:
    cases = [case("gqa", "tp2 ep2", 2)]
    outcomes = run_cases(cases)
    sites = [CallSite(*site) for site in outcomes[0].sites]
    assert {"embed", "loss", "gradients", "layers.*.attention", "layers.*.moe.dispatch"} <= {
        site.label for site in sites
    }
    planned = faults_of([(cases[0], sites)])
    # Gradients are halved here; `moefold verify --controls` takes them away altogether too.
    planned = [(c, b) for c, b in planned if b.how == "half" or not yields_gradients(b.site)]  # type: ignore[arg-type]
    found = run_faults(planned)
    assert len(found) > 20
    assert not [c.fault.text for c in found if not c.noticed]


def test_few_cases_cover_every_call_site_at_each_number_of_ranks() -> None:
    a, b, c, d = (CallSite(label, "all_reduce", "tp") for label in "abcd")
    few, many = AXES["tp"], AXES["ep"]
    wide = replace(few, name="four ranks", world=4)
    recorded = [(few, (a, b)), (many, (b, c, d)), (AXES["dp"], (c,)), (wide, (a,))]
    assert choose_covering(recorded) == [(many, (b, c, d)), (few, (a,)), (wide, (a,))]


def test_what_breaks_nothing_is_reported_as_unnoticed() -> None:
    """Without this, a control that never ran would look like one that was noticed.

    Nor is it noticed by the roundings of a run that is proved in its own format.
    """
    nowhere = InjectedFault(site=CallSite("no such module", "all_reduce", "tp"))
    as_run = replace(AXES["tp"], subject=replace(AXES["tp"].subject, precision="fp32"))
    noise = prove_as_run([as_run]).noise
    found = run_faults([(AXES["tp"], nowhere), (as_run, nowhere)], noise=noise)
    assert [c.noticed for c in found] == [False, False]


def test_a_case_that_fails_is_named_and_the_others_still_run() -> None:
    wrong = replace(AXES["dp"], name="dp of odd rows", subject=replace(AXES["dp"].subject, rows=31))
    broken = replace(AXES["tp"], name="tp of odd rows", subject=replace(wrong.subject, rows=31))
    proof = prove([AXES["ep"], broken, AXES["dp"]])
    assert [verdict.passed for verdict in proof.verdicts] == [True, False, True]
    (problem,) = proof.verdicts[1].problems
    assert "AssertionError" in problem


def test_a_reference_that_fails_is_told_of_its_own_case() -> None:
    none = replace(AXES["dp"], name="no such seed", subject=replace(AXES["dp"].subject, seed=-1))
    proof = prove([AXES["ep"], none])
    assert [verdict.passed for verdict in proof.verdicts] == [True, False]
    assert "ValueError" in proof.verdicts[1].problems[0]


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


IN_BF16 = [
    ("gradients", "reduce_scatter", "forward", "half"),
    ("embed", "all_gather", "backward", "half"),
    ("layers.*.attention", "reduce_scatter", "backward", "half"),
    ("evaluation", "all_gather", "forward", "alone"),
]
"""Exchanges whose breaks a bound of ten times the worst tensor's roundings, 1.2, let pass."""


def test_a_missing_exchange_is_noticed_in_16_bits() -> None:
    cases = cases_of(load_run("tiny", ["train.precision=bf16"]), ["tp2"], as_run=True)
    proof = prove_as_run(cases)
    assert proof.passed, proof.verdicts
    assert {row.quantity for row in proof.rows} >= {"gradients", "lm_loss", "optimizer/exp_avg"}
    assert max(row.bound for row in proof.rows) <= MAX_BOUND
    planned = faults_of([(cases[0], proof.verdicts[0].sites)])
    sites = [(made, broken, broken.site) for made, broken in planned if broken.site is not None]
    planned = [
        (made, broken)
        for made, broken, site in sites
        if (site.label, site.op, site.direction, broken.how) in IN_BF16
    ]
    assert len(planned) == len(IN_BF16)
    found = run_faults(planned, noise=proof.noise)
    assert not [(c.fault.text, c.evidence) for c in found if not c.noticed]


def test_a_run_on_codes_is_proved_as_it_runs() -> None:
    """Where a number is rounded otherwise its code is another: shuffled sums are to show it."""
    codes = ["train.precision=bf16", "train.quantise={kind: fp8_tensor, rows: micro_batch}"]
    # One layer: over two many a draw is too coarse, and is drawn again.
    run = load_run("tiny", ["model.shape.layers=1", *codes])
    proof = verify(run, layouts=["tp2 ep2"], as_run=True)
    assert proof.passed, proof.verdicts
