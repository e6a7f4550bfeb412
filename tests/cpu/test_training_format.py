"""``train.precision: auto``: settled when a run is opened, kept by its folder, said.

Rates are given by hand: what a machine without bf16 units measures, and one with them.
"""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from moefold.checkpoint import manifest
from moefold.checkpoint.folder import find_newest
from moefold.layers.config import faster_precision, slowdown
from moefold.training import precision as settling
from moefold.training.banner import banner_rows
from moefold.training.config import Train
from moefold.training.machine import MatrixRate
from moefold.training.trainer import Trainer
from tests.cpu.runs import job_of

WITHOUT = {"bf16": 1.1e9, "fp32": 61e9, "fp64": 30e9}
WITH = {"bf16": 200e9, "fp32": 98e9, "fp64": 49e9}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what makes this machine one that has the rates given."""

    def be(rates: dict[str, float]) -> None:
        def machines(device: torch.device, *more: str) -> dict[str, MatrixRate]:
            return {name: MatrixRate(rates[name], "given") for name in ("bf16", "fp32", *more)}

        monkeypatch.setattr(settling, "matrix_rates", machines)

    return be


def opened(folder: Path, precision: str = "auto", steps: int = 2) -> Trainer:
    optim = {"kind": "adamw", "lr": 0.01}
    return job_of(folder, "run", train={"steps": steps, "precision": precision}, optim=optim)


def trained(folder: Path, precision: str = "auto", steps: int = 2) -> dict[str, Any]:
    """Train and return the newest checkpoint's meta."""
    with opened(folder, precision, steps) as job:
        job.train()
    path = find_newest(folder / "run")
    assert path is not None
    return dict(manifest.read(path).meta)


@pytest.mark.parametrize(("rates", "chosen"), [(WITHOUT, "fp32"), (WITH, "bf16")])
def test_auto_is_the_faster_format_and_the_saved_run_says_why(
    here: Any, tmp_path: Path, rates: dict[str, float], chosen: str
) -> None:
    """Plant: leave ``auto`` in the saved run, so that a folder does not know its own format."""
    here(rates)
    meta = trained(tmp_path)
    assert meta["run"]["train"]["precision"] == chosen
    assert meta["precision"]["asked"] == "auto"
    assert meta["precision"]["flops_per_s"] == {name: rates[name] for name in ("bf16", "fp32")}
    with opened(tmp_path) as job:
        assert job.model.precision_policy.precision == chosen
        said = dict(banner_rows(job))["precision"]
        assert f"bf16 {rates['bf16'] / 1e9:,.0f}" in said and "kept from the run's start" in said


@pytest.mark.parametrize("begun", ["auto", "bf16"])
def test_a_run_goes_on_as_it_began_where_that_is_slow_and_says_so(
    here: Any, tmp_path: Path, begun: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A run with ``bf16`` in it is what was written before there was ``auto``."""
    here(WITH)
    before = trained(tmp_path, begun)
    here(WITHOUT)
    with caplog.at_level(logging.WARNING, "moefold.training"):
        after = trained(tmp_path, "auto", steps=3)
    assert after["run"]["train"]["precision"] == "bf16"
    assert after["precision"] == before["precision"]
    (said,) = caplog.messages
    assert "55.5 times slower here than those of fp32" in said and "the run's start" in said


def test_naming_the_format_that_auto_chose_is_the_same_run(here: Any, tmp_path: Path) -> None:
    here(WITH)
    trained(tmp_path, "auto")
    with opened(tmp_path, "bf16", steps=3) as job:
        assert job.step_number == 2
    with pytest.raises(ValueError, match=r"train\.precision: bf16 -> fp32"):
        opened(tmp_path, "fp32")


@pytest.mark.parametrize(
    ("rates", "asked", "said"),
    [
        (WITHOUT, "bf16", "bf16 (set explicitly): its matrix products are 55.5 times slower"),
        (WITH, "fp32", "fp32 (set explicitly): its matrix products are 2.0 times slower"),
        (WITH, "bf16", None),
        (WITHOUT, "fp32", None),
        (WITHOUT, "auto", None),
    ],
)
def test_a_format_half_as_fast_as_another_is_warned_of_before_the_first_step(
    here: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, rates: Any, asked: str, said: Any
) -> None:
    here(rates)
    with caplog.at_level(logging.WARNING, "moefold.training"), opened(tmp_path, asked):
        pass
    assert [said in message for message in caplog.messages] == [True] * (said is not None)


def test_the_rule() -> None:
    assert Train(steps=1, batch=1).precision == "auto"
    assert faster_precision({"bf16": 1.19, "fp32": 1.0}) == "fp32"
    assert faster_precision({"bf16": 1.21, "fp32": 1.0}) == "bf16"
    assert slowdown("fp32", {"bf16": 1.9, "fp32": 1.0}) is None
    assert slowdown("fp32", {"bf16": 3.0, "fp32": 1.0}) == ("bf16", 3.0)
