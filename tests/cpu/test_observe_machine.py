"""The measured rates of a machine: of the right order, short, and without a trace."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from moefold.training import machine
from moefold.training.machine import MatrixRate, measure_rates

CPU = torch.device("cpu")
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_rate_is_measured_and_says_how(dtype: torch.dtype) -> None:
    found = measure_rates([dtype], CPU, seconds=0.02)[dtype]
    assert 1e8 < found.flops_per_s < 1e15
    start, _, end = found.source.partition("^3 in ")
    assert int(start.removeprefix("measured at start: ")) in machine.CPU_SIDES
    assert end == f"{str(dtype).removeprefix('torch.')}, 1 thread"


Timed = list[tuple[torch.dtype, int, float]]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Timed]:
    """Return what gives products the time that a rate by type and side says, and notes them."""

    def give(rate: Callable[[torch.dtype, int], float]) -> Timed:
        made: Timed = []

        def seconds(values: torch.Tensor, side: int) -> float:
            taken = 2 * side**3 / rate(values.dtype, side)
            made.append((values.dtype, side, taken))
            return taken

        monkeypatch.setattr(machine, "_product_seconds", seconds)
        return made

    return give


def test_the_rate_is_the_best_of_several_sizes(timed: Callable[..., Timed]) -> None:
    """Plant: time one size alone."""
    timed(lambda dtype, side: {256: 70e9, 1024: 50e9}.get(side, 20e9))
    assert measure_rates([FP32], CPU) == {
        FP32: MatrixRate(70e9, "measured at start: 256^3 in float32, 1 thread")
    }


def test_a_slow_format_is_measured_as_short_as_a_fast_one(timed: Callable[..., Timed]) -> None:
    """By the rates of two cores without bf16 units, 1.1 against 61 GFLOP/s.

    Plant: time each size whatever it takes; one product of 768^3 takes 0.8 s there.
    """
    rates = {BF16: 1.1e9, FP32: 61e9}
    made = timed(lambda dtype, side: rates[dtype])
    found = measure_rates([BF16, FP32], CPU)
    assert {dtype: one.flops_per_s for dtype, one in found.items()} == pytest.approx(rates)
    assert sum(taken for _, _, taken in made) < 0.2
    assert max(side for dtype, side, _ in made if dtype is BF16) == 256
    assert max(side for dtype, side, _ in made if dtype is FP32) == 1024


def test_a_slow_first_product_does_not_count(timed: Callable[..., Timed]) -> None:
    """What a library sets up at its first product may take longer than all that is timed."""
    made: Timed = []
    made = timed(lambda dtype, side: 50e9 if made else 1e6)
    assert measure_rates([FP32], CPU)[FP32].flops_per_s == pytest.approx(50e9)


def test_measuring_draws_nothing_from_the_common_generator() -> None:
    before = torch.get_rng_state()
    measure_rates([FP32], CPU, seconds=0.001)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="this CPU has no bf16 units to hide"
)
def test_auto_is_bf16_with_its_units_and_fp32_where_they_are_hidden() -> None:
    """A real measurement, in processes of their own; and what Newton-Schulz takes unmeasured."""
    code = (
        "import torch; from moefold.training.machine import resolve_precision; "
        "from moefold.optim.muon import choose_arithmetic; "
        "cpu, matrix = torch.device('cpu'), torch.ones(64, 64); "
        "print(resolve_precision('auto', cpu), choose_arithmetic('auto', matrix))"
    )
    hidden = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    shown = {name: value for name, value in os.environ.items() if name not in hidden}
    said = [
        subprocess.run(
            [sys.executable, "-c", code], env={**shown, **more},
            capture_output=True, text=True, check=True,
        ).stdout.strip()
        for more in ({}, hidden)
    ]  # fmt: skip
    assert said == ["bf16 torch.bfloat16", "fp32 torch.float32"]
