"""Own grouped products as code: 64 groups, matrices of 1,024 x 2,048, 65,536 rows."""

import torch

from moefold.kernels.grouped import fused
from tests.triton.compiled import Launches, budget_test, meta

ROWS, GROUPS, WIDTH, OUT = 65_536, 64, 2048, 1024
OFFS = meta(GROUPS, dtype=torch.int32)


def launches(name: str, dtype: torch.dtype) -> Launches:
    """Return the three products in one number format."""
    x_RI, dy_RO = meta(ROWS, WIDTH, dtype=dtype), meta(ROWS, OUT, dtype=dtype)
    w_EOI, into_EOI = (
        meta(GROUPS, OUT, WIDTH, dtype=dtype),
        meta(GROUPS, OUT, WIDTH, dtype=torch.float32),
    )
    return {
        f"product, {name}": lambda: fused.product.launch(x_RI, w_EOI, OFFS),
        f"input gradient, {name}": lambda: fused.product.launch(dy_RO, w_EOI.mT, OFFS),
        f"weight gradient, {name}": lambda: fused.gradient_.launch(into_EOI, dy_RO, x_RI, OFFS),
    }


LAUNCHES = {**launches("bf16", torch.bfloat16), **launches("fp32", torch.float32)}
test_code_is_as_recorded = budget_test("grouped", LAUNCHES)
