"""The kernel of a looked-up table's gradient as code: 4096 rows of Qwen3's table."""

import torch

from moefold.kernels.lookup import fused
from tests.triton.compiled import budget_test, meta

T, D, V = 4096, 2048, 151_936
IDS = meta(T, dtype=torch.int64)
LAUNCHES = {
    "gradient": lambda: fused.gradient.launch(
        meta(T, D, dtype=torch.float32), IDS, IDS, meta(V, D, dtype=torch.float32)
    )
}
test_code_is_as_recorded = budget_test("lookup", LAUNCHES)
