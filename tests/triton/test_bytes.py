"""Each memory-bound kernel moves what it is given once: 1.05 of those bytes at most."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from proof_kernels import every_kernel
from torch import Tensor
from triton.runtime.interpreter import GridExecutor

from moefold.kernels.cross_entropy import fused as cross_entropy
from moefold.kernels.fused import force_triton
from moefold.kernels.lookup import fused as lookup
from moefold.kernels.norm import fused as norm
from moefold.kernels.norm import rotated
from moefold.kernels.pages import fused as pages
from moefold.kernels.permute import fused as permute
from moefold.kernels.rope import fused as rope
from moefold.kernels.routing import balance, exchange
from moefold.kernels.routing import fused as routing
from moefold.kernels.swiglu import fused as swiglu
from tests.triton.watch import Shadow, Watch

CACHED = 4 << 10
"""Bytes of an operand that many programs read, such as a norm's weight or counts of experts: where
rows are as many as in training it comes from a cache, so that it counts once. Angles are larger."""
PRODUCTS = {
    "moefold.kernels.grouped.fused:_product",
    "moefold.kernels.grouped.fused:_weight_gradient",
}
F32, T = torch.float32, 16


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).to(dtype)


def ids(most: int, *shape: int) -> Tensor:
    return torch.randint(most, shape)


def norms() -> Iterator[Any]:
    x_ND, w_D, heads, w_d = drawn(T, 512), drawn(512, dtype=F32), drawn(T, 8, 128), drawn(128)
    turn = drawn(T, 64), drawn(T, 64)
    yield norm.forward(x_ND, w_D, 1e-6, x_ND.clone())
    yield norm.backward(x_ND, x_ND.clone(), w_D, drawn(T, dtype=F32), T, x_ND.clone())
    yield norm.sum_partials(drawn(64, 512, dtype=F32), w_D)
    yield rotated.forward(heads, w_d, *turn, 1e-6, False)
    yield rotated.backward(heads, heads.clone(), w_d, *turn, drawn(T, 8, dtype=F32), T, False)
    yield rope.rotate(heads, *turn, False, False)
    yield rope.expand(drawn(T, 4, 128), drawn(T, 128), *turn, 64, True)
    yield rope.expand_backward(drawn(T, 4, 192), drawn(T, 4, 64), *turn, 64, True)


def rows() -> Iterator[Any]:
    x_ND, p_N = drawn(T, 512), drawn(T, dtype=F32)
    yield swiglu.forward(x_ND, p_N)
    yield swiglu.backward(x_ND, p_N, drawn(T, 256))
    yield permute.take(x_ND, torch.randperm(T))
    yield permute.add(x_ND, torch.randperm(T).view(-1, 4))
    page_M, count, pages_SD = torch.randperm(8), torch.tensor([T]), drawn(T + 8, 512)
    yield pages.put(x_ND, page_M, count, pages_SD, 8)
    yield pages.copy(pages_SD, page_M, page_M.flip(0), count, drawn(T + 8, 512), 8)
    yield lookup.gradient(x_ND, *ids(20, T).sort(stable=True), drawn(40, 512, dtype=F32))
    logits_CV, labels_C = drawn(8, 5000), ids(5000, 8)
    yield cross_entropy.statistics(logits_CV, labels_C, 0)
    yield cross_entropy.gradient(logits_CV, labels_C, *drawn(2, 8, dtype=F32), 0)


def routers() -> Iterator[Any]:
    scores_TE, ids_TK, e_E = drawn(256, 64, dtype=F32), ids(64, 256, 8), drawn(64, dtype=F32)
    yield routing.select(scores_TE, e_E, None, 8, 1, 1, 1)
    yield routing.order(ids(16, 128, 4), 16)
    weights_TK = routing._chosen_weights(scores_TE, ids_TK, 1, 0.0, 1.0)
    yield routing._chosen_weights_backward(weights_TK, scores_TE, ids_TK, 1, 0.0, 1.0)
    yield exchange.exchange_counts(ids(9, 8, 1, 64).cumsum(2).int(), torch.arange(64).int(), 8, 1)
    yield exchange.sort_received(torch.full((8, 8), 4).int(), 256)
    shares_PE, counts = balance.partial_row_sums(scores_TE), [ids(9, 64) for _ in range(5)]
    given = *counts[:2], ids(9, 2, 64), *counts[2:4], torch.tensor(3), counts[4], e_E
    yield balance.update_counters(shares_PE, *given, 9, 1)
    yield balance._load_value(shares_PE, counts[0], 8, 256)
    _, lse_T = balance._z_loss_value(scores_TE, 256)
    yield balance._z_loss_gradient(torch.tensor(1.0), scores_TE, lse_T, 256)
    yield balance._normalised_backward(balance._normalised(scores_TE), scores_TE)


class Moved(Watch):
    """Notes of each launch how often bytes are moved, against each once."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, float] = {}
        self._moved: dict[int, int] = {}

    def began(self, kernel: str, launch: Callable[[], None]) -> None:
        """Run a kernel alone and note it."""
        self._shadows.clear()
        self._moved.clear()
        launch()
        moved = once = 0
        for start, shadow in self._shadows.items():
            own = int(shadow.loaded.sum() + shadow.stored.sum())
            once += own
            moved += own if shadow.storage.nbytes() <= CACHED else self._moved.get(start, 0)
        self.found[kernel] = max(self.found.get(kernel, 0.0), moved / once)

    def _mark(self, shadow: Shadow, at: np.ndarray, kind: str) -> None:
        super()._mark(shadow, at, kind)
        start = shadow.storage.data_ptr()
        self._moved[start] = self._moved.get(start, 0) + len(at)


def test_every_memory_bound_kernel_moves_its_operands_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch, launch = Moved(), GridExecutor.__call__

    def run(self: GridExecutor, *args: Any, **options: Any) -> None:
        name = f"{self.fn.__module__}:{self.fn.__name__}"
        watch.began(name, lambda: launch(self, *args, **options))

    monkeypatch.setattr(GridExecutor, "__call__", run)
    torch.manual_seed(0)
    with force_triton(True), watch:
        for each in (norms, rows, routers):
            list(each())
    assert set(watch.found) == every_kernel() - PRODUCTS
    assert {name: ratio for name, ratio in watch.found.items() if ratio > 1.05} == {}
