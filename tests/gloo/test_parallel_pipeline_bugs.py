"""Bugs of pipelines by the class they belong to; each is shown to be noticed by planting it."""

import threading
from collections import defaultdict

from moefold.comm.recorder import Recorder
from moefold.comm.world import World
from moefold.mesh.folding import Folding
from moefold.training import step
from tests.gloo.harness import run_ranks
from tests.gloo.pipelines import Case, Outcome, batches, run_cases

BOUND = 1e-10


def wrong(*cases: Case, ranks: int = 2) -> dict[str, float]:
    """Return the largest relative error of each case whose gradients or figures are not right."""
    by_rank: list[list[Outcome]] = run_ranks(run_cases, ranks, cases, ranks)
    found: dict[str, float] = {}
    for case, outcomes in zip(cases, zip(*by_rank, strict=True), strict=True):
        errors = [outcome.error for outcome in outcomes]
        for outcome in outcomes:
            ours, theirs = outcome.figures, outcome.alone
            errors.append(abs(ours.grad_norm / theirs.grad_norm - 1))
            errors += [abs(ours.router_terms[n] / v - 1) for n, v in theirs.router_terms.items()]
        if not max(errors) <= BOUND:
            found[str(case)] = max(errors)
    return found


def test_a_tied_embedding_is_summed_over_stages_and_counts_once() -> None:
    assert not wrong(Case("pp2", "1f1b", "tied"), Case("pp2 vpp2", "zb_v", "tied"))


def test_router_terms_of_every_stage_reach_its_routers() -> None:
    stages = {"stages": "Et|t|t|tL"}
    cases = [Case("pp2 vpp2", kind, "deep", 4, stages) for kind in ("interleaved", "merged")]
    assert not wrong(*cases)


def test_every_chunk_takes_its_own_micro_batch() -> None:
    cases = [Case("pp2 vpp2", kind, "deep", 5) for kind in ("zb_v", "dualpipe_v")]
    assert not wrong(*cases, Case("pp2 vpp2", "zb_h1", "deep", 4), Case("pp2", "gpipe"))


def test_each_weight_gradient_is_added_once() -> None:
    full = {"recompute": {"kind": "full"}}
    cases = [Case("pp2", kind, "deep", 4, full) for kind in ("zb_h1", "merged", "1f1b")]
    assert not wrong(*cases)


def threads(rank: int, case: Case, ranks: int) -> list[list[str]]:
    """Run a case; returns for each channel the threads whose operations it carried, by name."""
    world = World.open(Folding(case.where.split, ranks), "cpu", 30)
    data = case.data(world)
    used: defaultdict[str, set[str]] = defaultdict(set)
    sound = Recorder.begin

    def begin(self: Recorder, site: object, channel: str, *rest: object) -> object:
        used[channel].add("exchange" if threading.current_thread().name != "MainThread" else "main")
        return sound(self, site, channel, *rest)  # type: ignore[arg-type]

    Recorder.begin = begin  # type: ignore[method-assign, assignment]
    try:
        step.gradients(data, batches(case.micro_batches), 16)
    finally:
        Recorder.begin = sound  # type: ignore[method-assign]
    return [sorted(names) for names in used.values()]


def test_no_group_carries_operations_of_two_lanes() -> None:
    # One layout's tensor ranks are its expert ranks, so that they share their group.
    for used in run_ranks(threads, 2, Case("tp2 ep2", "merged", "deep", 3), 2):
        assert ["exchange"] in used and ["main"] in used
        assert ["exchange", "main"] not in used
