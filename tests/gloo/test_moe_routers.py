"""Routers that look at other rows, and what is drawn by chance, on ranks that share rows."""

from moefold.proof.matrix import matrix
from moefold.proof.verify import prove


def test_routers_are_the_same_on_ranks() -> None:
    """Context ranks: the matrix has all axes, and the others."""
    names = "sinkhorn", "jitter and drops by chance", "expert choice of few"
    some = [f"{name}: cp2 on 2" for name in (*names, "idle experts and quantiles")]
    proof = prove([case for case in matrix()["routers"] if case.name in some])
    assert len(proof.verdicts) == len(some) and proof.passed, proof.verdicts
