"""FLOPs per token as the sources count."""

from moefold.planner.case import Case
from moefold.planner.time import flops


def gflop_per_token(case: Case) -> float:
    """Return GFLOP per token of forward and backward, causal attention by half."""
    return flops(case) / (case.batch * case.seq) / 1e9
