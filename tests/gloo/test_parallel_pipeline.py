"""Every schedule, executed: gradients equal one rank's, and the order is the table's."""

import math
from itertools import pairwise

import pytest

from tests.gloo.pipelines import Case, Outcome, batches, outcomes

BOUND = 1e-10
FULL = {"recompute": {"kind": "full"}}
SELECTIVE = {"recompute": {"kind": "selective", "modules": ["norms", "experts", "attention"]}}

ONE = (
    Case("", "merged"),
    Case("", "merged", "mla", 3, FULL),
    Case("", "merged", "tied", 2, SELECTIVE),
    Case("", "gpipe"),
)
TWO = (
    Case("pp2", "1f1b", "deep", 1),
    Case("pp2", "zb_h1", "deep", 4, FULL),
    Case("pp2", "merged", "tied", 5),
    Case("pp2 vpp2", "zb_v", "deep", 6, FULL),
    Case("pp2 vpp2", "dualpipe_v", "mla", 5),
    Case("pp2 vpp3", "interleaved", "deep", 4, {"stages": "E||tt|t|t|L"}),
    Case("ep2", "merged", "deep", 3, {"zero": 3, **FULL}),
    Case("tp2 ep2", "merged", "mla", 3, FULL),
)
FOUR = (
    Case("pp4", "1f1b", "tied", 3),
    Case("pp2 tp2 ep2", "zb_h1", "tied", 4),
    Case("pp2 ep2", "merged", "tied", 4, {"zero": 3}),
    Case("pp2 vpp2 ep2 tp2", "dualpipe_v", "mla", 4, {"stages": "E|t|t|tL"}),
)
WIDE = {
    2: (
        Case("pp2", "gpipe"),
        Case("pp2", "1f1b", "tied"),
        Case("pp2", "zb_h1", "mla", 5),
        Case("pp2", "merged", "mla", 4, FULL),
        Case("pp2", "merged", "deep", 3, {"stages": "Etttt|L"}),
        Case("pp2", "interleaved"),
        Case("pp2 vpp2", "interleaved", "tied"),
        Case("pp2 vpp2", "gpipe", "deep", 3),
        Case("pp2 vpp2", "zb_h1", "deep", 4),
        Case("pp2 vpp2", "zb_v", "tied"),
        Case("pp2 vpp2", "dualpipe_v", "tied", 4, FULL),
        Case("pp2 vpp2", "merged", "deep", 4, {"stages": "Ett|||ttL"}),
        Case("ep2", "merged", "deep", 4),
        Case("", "merged", "tied", 2, {"zero": 2}),
    ),
    4: (
        Case("pp4", "zb_h1", "deep", 6),
        Case("pp4", "merged", "deep", 9),
        Case("pp4", "gpipe", "mla", 2, {"stages": "Et|tt||L"}),
        Case("pp4 vpp2", "interleaved", "tied", 8, {"stages": "E|t||t|t||t|L"}),
        Case("pp4 vpp2", "zb_v", "tied", 8, {"stages": "E|tt|||t||t|L"}),
        Case("pp4 vpp2", "dualpipe_v", "deep", 9, {"stages": "Et|t|||||tt|L"}),
        Case("pp2 tp2", "merged", "deep", 4),
        Case("pp2 vpp2", "dualpipe_v", "tied", 4),
    ),
}
"""Those of the matrix, by their ranks."""


def check(seen: list[Outcome]) -> None:
    for rank in seen:
        assert rank.smallest > 1e-6, "a gradient that is nearly zero proves nothing"
        assert rank.error <= BOUND
        ours, theirs = rank.figures, rank.alone
        assert math.isclose(ours.lm_loss, theirs.lm_loss, rel_tol=BOUND)
        assert math.isclose(ours.grad_norm, theirs.grad_norm, rel_tol=BOUND)
        assert ours.router_terms.keys() == theirs.router_terms.keys()
        for name, value in theirs.router_terms.items():
            assert math.isclose(ours.router_terms[name], value, rel_tol=BOUND), name
        assert rank.follows_table
        executed, tabled = rank.peak
        assert executed == tabled, "chunks in flight"


@pytest.mark.parametrize("index", range(len(ONE)), ids=[str(case) for case in ONE])
def test_a_schedule_on_one_rank_changes_nothing(index: int) -> None:
    check(outcomes(ONE, 1)[index])


@pytest.mark.parametrize("index", range(len(TWO)), ids=[str(case) for case in TWO])
def test_two_ranks_compute_what_one_does(index: int) -> None:
    check(outcomes(TWO, 2)[index])


@pytest.mark.parametrize("index", range(len(FOUR)), ids=[str(case) for case in FOUR])
def test_four_ranks_compute_what_one_does(index: int) -> None:
    check(outcomes(FOUR, 4)[index])


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", WIDE)
def test_so_it_is_in_more_layouts(ranks: int) -> None:
    for seen in outcomes(WIDE[ranks], ranks):
        check(seen)


def test_interleaved_with_one_chunk_is_1f1b() -> None:
    one, other = Case("pp4", "1f1b").where, Case("pp4", "interleaved").where
    assert one.table(7) == other.table(7)


def test_neighbouring_micro_batches_differ_in_rows() -> None:
    rows = [batch.rows for batch in batches(10)]
    assert all(a != b for a, b in pairwise(rows))
