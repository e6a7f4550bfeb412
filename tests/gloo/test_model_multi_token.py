"""Losses of further tokens in layouts, against one rank; the matrix has every schedule."""

from moefold.proof.matrix import matrix
from moefold.proof.verify import prove

FEW = (
    "multi token: cp2 on 2",
    "multi token: pp2 on 2",
    "multi token tied: pp2 vpp2 on 2, stages Et|t|m|L",
    "multi token: dp2 on 2, zero 3",
)


def test_ranks_compute_what_one_rank_computes() -> None:
    """Shifts cross the borders of ranks; the last stage has a share of the embedding's gradient."""
    every = matrix()
    cases = [case for name in ("models", "multi_token") for case in every[name]]
    proof = prove([case for case in cases if case.name in FEW])
    assert len(proof.verdicts) == len(FEW)
    assert not [(one.layout, one.problems, one.worst) for one in proof.verdicts if not one.passed]
    compared = {row.quantity for row in proof.rows}
    assert compared >= {"gradients", "weights", "multi_token/1", "multi_token/2"}
