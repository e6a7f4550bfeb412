"""Kernels that bring rows to pages and back as code: room for 65,536 rows of 2,048 columns."""

import torch

from moefold.kernels.pages import fused
from tests.triton.compiled import budget_test, meta

R, D, PAGE = 65536, 2048, 64
NUMBERS, COUNT, PAGES = meta(R // PAGE, dtype=torch.int64), meta(1, dtype=torch.int32), meta(R, D)
LAUNCHES = {
    "put": lambda: fused.put.launch(meta(R, D), NUMBERS, COUNT, PAGES, PAGE),
    "take": lambda: fused.take.launch(PAGES, NUMBERS, COUNT, R, PAGE),
}
test_code_is_as_recorded = budget_test("pages", LAUNCHES)
