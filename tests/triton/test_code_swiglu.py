"""SwiGLU's kernels as code: 65,536 copies of rows, experts of 768 columns."""

import torch

from moefold.kernels.swiglu import fused
from tests.triton.compiled import budget_test, meta

N, F = 65_536, 768
LAUNCHES = {
    "forward": lambda: fused.forward.launch(meta(N, 2 * F), meta(N, dtype=torch.float32)),
    "backward": lambda: fused.backward.launch(
        meta(N, 2 * F), meta(N, dtype=torch.float32), meta(N, F)
    ),
    "without weights": lambda: fused.forward.launch(meta(N, 2 * F), None),
}
test_code_is_as_recorded = budget_test("swiglu", LAUNCHES)
