"""The kernels of arrivals as code: 128 experts on eight ranks, and 256 on 64."""

import torch

from moefold.kernels.routing import exchange
from tests.triton.compiled import budget_test, meta

COUNTS = torch.int32


def exchanged(ranks: int, experts: int) -> None:
    """Count what goes and comes."""
    ends_PSB, ends_B = meta(ranks, 1, experts, dtype=COUNTS), meta(experts, dtype=COUNTS)
    exchange.exchange_counts.launch(ends_PSB, ends_B, experts // ranks, 1)


LAUNCHES = {
    "counts": lambda: exchanged(8, 128),
    "counts of 64 ranks": lambda: exchanged(64, 256),
    "order": lambda: exchange.sort_received.launch(meta(8, 16, dtype=COUNTS), 65_536),
    "order of 64 ranks": lambda: exchange.sort_received.launch(meta(64, 4, dtype=COUNTS), 65_536),
}
test_code_is_as_recorded = budget_test("exchange", LAUNCHES)
