"""Numbers that quantisers are compared on, the same wherever they are made."""

import numpy as np
import torch
from torch import Tensor

ROWS, COLUMNS = 16, 160
"""Of each family: one block of 128 whole and one of 32, ten of 16."""
SQUARE = 130
"""Rows and columns of the matrix for blocks of 128 x 128: four, three of them cut short."""


def families(rows: int = ROWS, columns: int = COLUMNS) -> dict[str, Tensor]:
    """Return fp32 matrices by what is hard about them; ``RandomState``'s streams never change."""
    drawn = np.random.RandomState(7)
    shape = (rows, columns)
    normal = drawn.standard_normal(shape).astype(np.float32)
    positive = normal > 0
    wide = normal * np.exp2(drawn.randint(-20, 21, shape)).astype(np.float32)
    outliers = normal.copy()
    outliers[::7, ::13] *= 1e4
    zeros = normal.copy()
    zeros[: rows // 2] = 0
    zeros[:, : columns // 4] = 0
    subnormal = drawn.randint(1, 1 << 22, shape).astype(np.int32).view(np.float32)
    subnormal = np.where(positive, subnormal, -subnormal)
    powers = np.exp2(drawn.randint(-10, 10, shape)).astype(np.float32)
    above = np.exp2(drawn.randint(-10, 10, (rows, 1))).astype(np.float32) * np.float32(448)
    above = above * np.where(drawn.rand(*shape) > 0.5, 1, 1 + 2.0**-23).astype(np.float32)
    above = above * np.where(positive, 1, 0.25).astype(np.float32)
    ties = drawn.randint(-32, 33, shape).astype(np.float32) / 16
    made = {
        "normal": normal,
        "wide": wide,
        "outliers": outliers,
        "zeros": zeros,
        "subnormal": subnormal,
        "powers": powers,
        "above": above,
        "huge": normal * np.float32(7e37),
        "ties": ties,
    }
    numbers = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in made.items()}
    return {"bf16": numbers["normal"].bfloat16().float(), **numbers}
