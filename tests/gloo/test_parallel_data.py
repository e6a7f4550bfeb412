"""Ranks that share weights, gradients and state train as one rank does, in fp64."""

import math
from collections import defaultdict

import pytest

from tests.gloo.shares import KINDS, Case, Told, outcomes, wanted

BOUND = 1e-10
HYBRID = (("zero_ranks", 2),)


def scheduled(kind: str) -> tuple[tuple[str, str], ...]:
    """Return the field of a schedule."""
    return (("schedule", kind),)


CASES: dict[int, tuple[Case, ...]] = {
    2: (
        Case(zero=1),
        Case(zero=2, optim="sgd"),
        Case(zero=3, optim="muon", model="tied"),
        Case("ep2", 3, "lion", "latent"),
    ),
    4: (
        Case(zero=1, optim="muon", more=HYBRID),
        Case("tp2", 2, "muon"),
        Case("ep2 etp2", 1, "muon"),
        Case("pp2 vpp2", 3, model="tied", micro_batches=8),
    ),
}
WIDE: dict[int, tuple[Case, ...]] = {
    2: (
        *(Case(zero=zero) for zero in (0, 2, 3)),
        Case("ep2", 3, model="latent"),
        Case(zero=1, optim="muon", model="tied"),
        Case("tp2", 0, "muon", "latent"),
    ),
    4: (
        Case(zero=1, model="latent"),
        Case(zero=3, model="tied"),
        Case(zero=3, more=HYBRID),
        Case("tp2", 1),
        Case("tp2", 3, model="tied"),
        Case("cp2", 3),
        Case("ep2", 2),
        Case("pp2", 1, "muon", "tied", 8),
        Case("pp2", 2, model="tied", micro_batches=8),
        Case("pp2", 3, micro_batches=8, more=scheduled("zb_h1")),
        Case("pp2 ep2", 3, micro_batches=8, more=scheduled("merged")),
        Case("pp2 vpp2", 2, micro_batches=8, more=scheduled("dualpipe_v")),
    ),
}
"""Those of the matrix."""
ALL = [
    pytest.param(ranks, case, id=str(case), marks=[] if cases is CASES else pytest.mark.matrix)
    for cases in (CASES, WIDE)
    for ranks in cases
    for case in cases[ranks]
]


def found(ranks: int, case: Case) -> list[Told]:
    """Return what each rank told of a case."""
    cases = CASES if case in CASES[ranks] else WIDE
    return outcomes(cases[ranks], ranks)[case]


@pytest.mark.parametrize(("ranks", "case"), ALL)
def test_three_steps_are_those_of_one_rank(ranks: int, case: Case) -> None:
    for rank in found(ranks, case):
        for have, want in zip(rank["figures"], rank["wanted"], strict=True):
            assert have == pytest.approx(want, rel=BOUND)
        assert all(scale < 1 for *_, scale in rank["figures"][:-1]), "the clip is part of the test"
        errors = {place: error for place, (error, *_) in rank["pieces"].items()}
        assert not {place: error for place, error in errors.items() if not error <= BOUND}


@pytest.mark.parametrize(("ranks", "case"), ALL)
def test_ranks_with_the_same_have_the_same_bits(ranks: int, case: Case) -> None:
    told = found(ranks, case)
    assert len({tuple(rank["figures"]) for rank in told}) == 1
    digests = defaultdict(set)
    for rank in told:
        for place, (_, _, digest) in rank["pieces"].items():
            digests[place].add(digest)
    assert not [place for place, seen in digests.items() if len(seen) > 1]


@pytest.mark.parametrize(("ranks", "case"), ALL)
def test_each_element_is_stated_by_one_rank(ranks: int, case: Case) -> None:
    """What checkpoints write: boxes that make up every tensor and do not overlap."""
    told = found(ranks, case)
    stated = [place for rank in told for place, (_, first, _) in rank["pieces"].items() if first]
    assert len(stated) == len(set(stated))
    elements: defaultdict[tuple[str, str], int] = defaultdict(int)
    for kind, name, box in stated:
        elements[kind, name] += math.prod(end - start for start, end in box)
    _, tensors = wanted(case.alone)
    whole = {place: tensor.numel() for place, tensor in tensors.items()}
    assert {kind for kind, _ in whole} == set(KINDS)
    assert dict(elements) == whole
