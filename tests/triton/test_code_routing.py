"""The router's kernels as code: 8,192 tokens, 128 experts of which eight, and 256 in groups."""

import torch

from moefold.kernels.routing import fused
from tests.triton.compiled import budget_test, meta

T, K = 8192, 8
IDS = meta(T, K, dtype=torch.int64)


def scores(experts: int, tokens: int = T) -> torch.Tensor:
    """Return fp32 scores."""
    return meta(tokens, experts, dtype=torch.float32)


LAUNCHES = {
    "choice": lambda: fused.select.launch(scores(128), None, None, K, 1, 1, 1),
    "choice in groups": lambda: fused.select.launch(
        scores(256), meta(256, dtype=torch.float32), meta(T, dtype=torch.bool), K, 8, 4, 2
    ),
    "order": lambda: fused.order.launch(IDS, 128),
    "order of 256": lambda: fused.order.launch(IDS, 256),
    "weights": lambda: fused._chosen_weights.launch(scores(128), IDS, 1, 0.0, 1.0),
    "their gradient": lambda: fused._chosen_weights_backward.launch(
        scores(K), scores(128), IDS, 1, 0.0, 1.0
    ),
}
test_code_is_as_recorded = budget_test("routing", LAUNCHES)
