"""Routers that look at other rows, and what is drawn by chance, on ranks that share rows."""

from moefold.proof.matrix import matrix
from moefold.proof.verify import prove


def test_b86_routers_are_the_same_on_ranks() -> None:
    """Context ranks: the matrix has all axes."""
    some = [case for case in matrix()["routers"] if case.name.endswith(": cp2 on 2")]
    proof = prove(some)
    assert len(some) >= 4 and proof.passed, proof.verdicts
