"""Balancing's kernels as code: 8,192 tokens, 128 experts and 256, eight data ranks."""

import torch

from moefold.kernels.routing import balance
from tests.triton.compiled import budget_test, meta

T, P = 8192, 64


def numbers(*shape: int) -> torch.Tensor:
    """Return int64."""
    return meta(*shape, dtype=torch.int64)


def wide(*shape: int) -> torch.Tensor:
    """Return fp32."""
    return meta(*shape, dtype=torch.float32)


def counting(experts: int, ranks: int | None) -> None:
    """Count a micro-batch."""
    counts_E = numbers(experts)
    by_rank_DE = None if ranks is None else numbers(ranks, experts)
    given = (wide(P, experts), counts_E, counts_E, by_rank_DE, counts_E, counts_E, numbers())
    balance.update_counters.launch(*given, counts_E, wide(experts), T, 3)


LAUNCHES = {
    "sums": lambda: balance.partial_row_sums.launch(wide(T, 128)),
    "sums of 256": lambda: balance.partial_row_sums.launch(wide(T, 256)),
    "counters": lambda: counting(256, None),
    "counters of data ranks": lambda: counting(128, 8),
    "value": lambda: balance._load_value.launch(wide(P, 256), numbers(256), 8, T),
    "squares": lambda: balance._z_loss_value.launch(wide(T, 128), T),
    "their gradient": lambda: balance._z_loss_gradient.launch(wide(), wide(T, 128), wide(T), T),
    "over their sum": lambda: balance._normalised.launch(wide(T, 256)),
    "its gradient": lambda: balance._normalised_backward.launch(
        wide(1, 256).expand(T, 256), wide(T, 256)
    ),
}
test_code_is_as_recorded = budget_test("balance", LAUNCHES)
