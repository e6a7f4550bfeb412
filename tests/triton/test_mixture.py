"""A mixture layer, forward and backward, through own kernels alone and without them."""

import pytest
import torch
from torch import Tensor

from moefold.kernels.fused import force_triton
from moefold.kernels.grouped import fused
from moefold.kernels.grouped.fused import ProductTile
from moefold.layers.precision import PrecisionPolicy
from moefold.moe.dispatch.config import LocalExperts
from moefold.moe.layer import MoeFfn
from tests.cpu.mixtures import MIXTURES, run_mixture
from tests.cpu.small import HIDDEN, padded_rows
from tests.triton.values import nan_where_unwritten
from tests.triton.watch import Watch


def run(kind: str, pads: int, experts: str) -> dict[str, Tensor]:
    """Return the gradients of rows and parameters, and the counters; drawn alike each time."""
    torch.manual_seed(0)
    mixture, rows = (
        MoeFfn(MIXTURES[kind], HIDDEN, 0, LocalExperts(), experts),
        padded_rows((9, 5), pads),
    )
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x_TD = torch.randn(rows.rows, HIDDEN)
    with nan_where_unwritten():
        found = {"rows": run_mixture(mixture, PrecisionPolicy("fp32"), rows, x_TD)[: rows.n_valid]}
    for name, parameter in mixture.named_parameters():
        assert parameter.grad is not None
        found[name] = parameter.grad
    counters = mixture.balance.counters
    return found | {"load": counters.load_E, "sent": counters.sent_E}


CASES = [("dropless", 0), *zip(MIXTURES, (3, 0, 3, 3), strict=True)]
"""Each kind of mixture, some of them with rows behind the last document."""


@pytest.mark.parametrize(("kind", "pads"), CASES)
def test_a_mixture_is_the_same_through_kernels_and_without(
    kind: str, pads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "TILES", {4: ProductTile(16, 32, 16, 4, 2)})
    with force_triton(False):
        want = run(kind, pads, "loop")
    with force_triton(True), Watch(seed=pads) as watch:
        got = run(kind, pads, "triton")
    assert watch.launches > 10
    assert got.keys() == want.keys()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
