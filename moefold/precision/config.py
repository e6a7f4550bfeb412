"""Records of number formats: what products are computed in, what parameters are kept in."""

from typing import Literal

Precision = Literal["bf16", "fp32", "fp64"]
"""``bf16`` computes in bfloat16 from fp32 master weights; ``fp64`` is for proofs."""
