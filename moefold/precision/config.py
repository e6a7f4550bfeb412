"""Records of number formats: what products are computed in, what parameters are kept in."""

from collections.abc import Mapping
from typing import Literal

Precision = Literal["bf16", "fp32", "fp64"]
"""``bf16`` computes in bfloat16 from fp32 master weights; ``fp64`` is for proofs."""
Asked = Literal["auto", "bf16", "fp32", "fp64"]
"""What a run may ask for. ``auto``: the faster of bf16 and fp32, settled when the run begins."""
PAYS = 1.2
"""How much faster bf16's products must be: a step casts, too, and does more than multiply."""
SLOW = 2.0
"""How much slower than another format one is warned of."""


def faster(rates: Mapping[str, float]) -> Precision:
    """Return what ``auto`` stands for where products of bf16 and fp32 have these rates."""
    return "bf16" if rates["bf16"] > PAYS * rates["fp32"] else "fp32"


def slowness(precision: str, rates: Mapping[str, float]) -> tuple[str, float] | None:
    """Return the fastest format and by how much it is faster; None where that is below twice."""
    best = max(rates, key=lambda name: rates[name])
    factor = rates[best] / rates[precision]
    return (best, factor) if factor >= SLOW else None
