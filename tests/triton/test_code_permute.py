"""The permutation's kernels as code: 8,192 tokens of 2,048 columns, eight copies each."""

import torch

from moefold.kernels.permute import fused
from tests.triton.compiled import budget_test, meta

T, K, D = 8192, 8, 2048
ROWS = meta(T, K, dtype=torch.int64)
LAUNCHES = {
    "rows": lambda: fused.take.launch(meta(T, D), ROWS.view(-1)),
    "sums": lambda: fused.add.launch(meta(T * K, D), ROWS),
    "single values": lambda: fused.take.launch(meta(T * K, 1, dtype=torch.float32), ROWS.view(-1)),
}
test_code_is_as_recorded = budget_test("permute", LAUNCHES)
