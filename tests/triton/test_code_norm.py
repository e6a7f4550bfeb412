"""RMSNorm's kernels as code: rows of 2,048, and 32 heads of 128 in each."""

import torch

from moefold.kernels.norm import fused, rotated
from tests.triton.compiled import budget_test, meta

T, H, D, d = 32_768, 32, 2048, 128
F32 = torch.float32
ROWS, HEADS, ANGLES = meta(T, D), meta(T, H, d), meta(T, d // 2)
LAUNCHES = {
    "forward": lambda: fused.forward.launch(ROWS, meta(D, dtype=F32), 1e-6, None),
    "forward of a sum": lambda: fused.forward.launch(ROWS, meta(D, dtype=F32), 1e-6, ROWS),
    "backward": lambda: fused.backward.launch(
        ROWS, ROWS, meta(D, dtype=F32), meta(T, dtype=F32), T, None
    ),
    "backward of a sum": lambda: fused.backward.launch(
        ROWS, ROWS, meta(D, dtype=F32), meta(T, dtype=F32), T, ROWS
    ),
    "shares": lambda: fused.sum_partials.launch(meta(512, D, dtype=F32), meta(D, dtype=F32)),
    "heads forward": lambda: rotated.forward.launch(
        HEADS, meta(d, dtype=F32), ANGLES, ANGLES, 1e-6, False
    ),
    "heads backward": lambda: rotated.backward.launch(
        HEADS, HEADS, meta(d, dtype=F32), ANGLES, ANGLES, meta(T, H, dtype=F32), T, False
    ),
}
test_code_is_as_recorded = budget_test("norm", LAUNCHES)
