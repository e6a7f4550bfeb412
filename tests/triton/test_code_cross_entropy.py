"""Cross-entropy's kernels as code: 1024 rows of Qwen3's vocabulary."""

import torch

from moefold.kernels.cross_entropy import fused
from tests.triton.compiled import budget_test, meta

C, V = 1024, 151_936
LABELS = meta(C, dtype=torch.int64)
LAUNCHES = {
    "statistics": lambda: fused.statistics.launch(meta(C, V), LABELS, 0),
    "gradient": lambda: fused.gradient.launch(
        meta(C, V), LABELS, meta(C, dtype=torch.float32), meta(C, dtype=torch.float32), 0
    ),
}
test_code_is_as_recorded = budget_test("cross_entropy", LAUNCHES)
