"""The measured rate of a machine: of the right order, and without a trace."""

import time

import pytest
import torch

from moefold.observe import machine
from moefold.observe.machine import Machine

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_rate_is_measured_and_says_how(dtype: torch.dtype) -> None:
    found = Machine.measured(dtype, CPU, seconds=0.02)
    assert 1e8 < found.flops_per_s < 1e15
    name = str(dtype).removeprefix("torch.")
    assert found.source == f"measured at start: 768^3 in {name}, 1 threads"


def test_the_rate_is_operations_over_the_best_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own: products that take 3, 1 and 2 seconds."""
    ticks = iter([0.0, 3.0, 3.0, 4.0, 4.0, 6.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(machine, "SIZE", 10)
    assert Machine.measured(torch.float32, CPU, seconds=5.5).flops_per_s == 2 * 10**3 / 1.0


def test_measuring_draws_nothing_from_the_common_generator() -> None:
    before = torch.get_rng_state()
    Machine.measured(torch.float32, CPU, seconds=0.001)
    assert torch.equal(torch.get_rng_state(), before)
