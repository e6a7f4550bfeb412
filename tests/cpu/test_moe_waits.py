"""The mixture reads no value on the host: it runs where tensors have no values at all."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from moefold.layers.precision import PrecisionPolicy
from moefold.moe.dispatch.config import LocalExperts
from moefold.moe.layer import MoeFfn
from tests.cpu.mixtures import MIXTURES, run_mixture
from tests.cpu.small import HIDDEN, padded_rows

TENSORS = ("ids_T", "labels_T", "positions_T", "valid_T", "token_T")


def run_without_values(kind: str, pads: int, experts: str) -> None:
    rows, mode = padded_rows((40, 16), pads), FakeTensorMode(allow_non_fake_inputs=True)
    rows = replace(rows, **{name: mode.from_tensor(getattr(rows, name)) for name in TENSORS})
    with mode:
        mixture = MoeFfn(MIXTURES[kind], HIDDEN, 0, LocalExperts(), experts)  # type: ignore[arg-type]
        x_TD = torch.randn(rows.rows, HIDDEN, dtype=torch.bfloat16)
        assert run_mixture(mixture, PrecisionPolicy("bf16"), rows, x_TD).shape == x_TD.shape
        assert all(p.grad is not None for p in mixture.parameters())


@pytest.mark.parametrize("pads", [0, 8])
@pytest.mark.parametrize("kind", MIXTURES)
def test_the_mixture_runs_without_values(kind: str, pads: int) -> None:
    """Forward, backward, counters and every term: sizes never depend on what was routed."""
    run_without_values(kind, pads, "grouped")


def test_reading_a_value_is_noticed() -> None:
    """The loop over experts reads the offsets, as it says."""
    with pytest.raises(DataDependentOutputException):
        run_without_values("dropless", 0, "loop")
