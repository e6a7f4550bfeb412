"""Shares of the machine's rate: never above one, of the right rate, and what they leave out."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moefold.config.slot import build
from moefold.model.config import Decoder
from moefold.model.init import initialise
from moefold.optim.config import AdamW, Muon
from moefold.planner.time import newton_schulz_flops
from moefold.run import load_run_with_origins
from moefold.training import machine as utilisation
from moefold.training.banner import banner_rows, min_step_time
from moefold.training.hooks.progress import format_metrics
from moefold.training.machine import NUM_REMEASURES, MatrixRate, Utilisation
from tests.cpu.hubs import decoder_of, on_disk, weights_of, write_hub
from tests.cpu.runs import job_of
from tests.cpu.small import model_of
from tests.cpu.test_observe_measured import DECODERS, Products

CPU, GPU = torch.device("cpu"), torch.device("cuda")
BENCH = Path(__file__).parents[2] / "bench"


def of(device: torch.device, ranks: int) -> Any:
    """Return what stands for so many ranks."""
    return SimpleNamespace(device=device, size=ranks)


def measuring(monkeypatch: pytest.MonkeyPatch, rate: float) -> list[float]:
    """Let every further measurement find ``rate``; return a list of the seconds asked for."""
    asked: list[float] = []

    def measure(dtypes: list[torch.dtype], device: torch.device, seconds: float) -> object:
        asked.append(seconds)
        return {dtypes[0]: MatrixRate(rate, "again")}

    monkeypatch.setattr(utilisation, "measure_rates", measure)
    return asked


def test_a_rate_that_steps_exceed_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = measuring(monkeypatch, 10e9)
    use = Utilisation(MatrixRate(1e9, "under load"), torch.float32, of(CPU, 2))
    assert use.figures(1e9) == {"mfu": 0.5} and not asked
    assert use.figures(5e9) == {"mfu": 0.25} and len(asked) == 1
    assert use.machine.source == "again"


def test_no_share_is_above_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """337 % was shown: a step made more FLOP/s than one size of product, on slow bf16.

    Plant: give the share whatever it is.
    """
    asked = measuring(monkeypatch, 1.1e9)
    use = Utilisation(MatrixRate(1.1e9, "slow"), torch.bfloat16, of(CPU, 1))
    assert use.figures(3.7e9) == {} and use.figures(3.7e9) == {}
    assert len(asked) == NUM_REMEASURES
    assert use.figures(0.55e9) == {"mfu": pytest.approx(0.5)}


def test_on_a_gpu_both_shares_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    use = Utilisation(MatrixRate(700e12, "measured"), torch.bfloat16, of(GPU, 8))
    assert use.figures(8 * 350e12) == {"mfu": 0.5, "mfu_of_peak": pytest.approx(350 / 989)}
    said = format_metrics(use.figures(8 * 350e12))
    assert said == "MFU 35 % of the chip's peak, 50 % of the measured rate"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 PCIe")
    assert Utilisation(MatrixRate(1e15, ""), torch.bfloat16, of(GPU, 1)).figures(5e14) == {
        "mfu": 0.5
    }


@pytest.mark.parametrize("name", ["top-3 of 5, width 7", "gated shared expert", "tied"])
def test_newton_schulz_is_counted_as_it_multiplies(name: str) -> None:
    """Plant: count the cubes of the larger side."""
    record: Decoder = DECODERS[name]
    model = model_of(record, "fp32")
    initialise(model, record, seed=1)
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    rule = Muon()
    optimizer = build(rule, dict(model.named_parameters()))
    with Products() as products:
        optimizer.step()
    assert products.others == set()
    assert 2 * products.multiply_adds == newton_schulz_flops(record, rule) > 0
    assert newton_schulz_flops(record, AdamW()) == 0


def test_the_banner_counts_ranks_and_the_epochs_of_the_steps_to_go(tmp_path: Path) -> None:
    muon = {"kind": "muon", "lr": 0.01}
    with job_of(tmp_path, optim=muon) as job:
        alone, said = min_step_time(job), dict(banner_rows(job))
        assert said["ranks"] == "one" and f"in {job.last_step} steps" in said["data"]
        texts = [text for _, text in banner_rows(job)]
        assert any("Newton-Schulz" in text and "not counted" in text for text in texts)
        job.progress.step = job.last_step - 2
        (read,) = (text for what, text in banner_rows(job) if what == "data")
        per_step = job.loader.epoch(2)["text"]
        assert f"read {per_step:.2g} times in 2 steps" in read
        world: Any = job.world
        four: Any = SimpleNamespace(size=4, folding=world.folding)
        job.world = four
        assert min_step_time(job) == alone / 4
        said = dict(banner_rows(job))
        assert said["ranks"] == "4, layout of data-parallel ranks only, over gloo"
        assert "on all 4 ranks" in said["time"]
        job.world = world


@pytest.mark.parametrize(("first", "spins"), [("moefold", False), ("torch", True)])
def test_waiting_threads_sleep_where_moefold_comes_before_torch(first: str, spins: bool) -> None:
    """By what the OpenMP library says of itself when torch loads it: they soon stop spinning."""
    ours = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    clean = {key: value for key, value in os.environ.items() if key not in ours}
    done = subprocess.run(
        [sys.executable, "-c", f"import {first}, moefold, torch"],
        env={**clean, "OMP_DISPLAY_ENV": "verbose"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("this build of torch has another OpenMP library")
    assert ("GOMP_SPINCOUNT = '1000'" not in done.stderr) == spins


def test_the_banner_says_where_threads_spin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with job_of(tmp_path) as job:
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        assert "2 threads that spin" in dict(banner_rows(job))["device"]
        monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
        assert "spin" not in dict(banner_rows(job))["device"]


def test_a_hub_folder_goes_by_its_family_and_place(tmp_path: Path) -> None:
    decoder, hub = decoder_of("mixtral").model_copy(update={"vocab": 300}), tmp_path / "hub"
    write_hub(hub, decoder, on_disk(decoder, weights_of(decoder, torch.float32)))
    loaded = load_run_with_origins(hub, ["data.tokenizer={kind: bpe, vocab: 300}"])
    assert str(loaded.origins["optim", "lr"]) == f"given fine-tuning of {hub}"
    with job_of(tmp_path) as job:
        job.run = job.run.model_copy(update={"model": loaded.record.model})
        said = dict(banner_rows(job))["model"]
    assert said.startswith(f"mixtral of {hub}: ")


@pytest.mark.parametrize("file", sorted(BENCH.glob("*.py")), ids=lambda file: file.stem)
def test_benchmarks_import_moefold_before_torch(file: Path) -> None:
    found = [
        name.split(".")[0]
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else
                     [one.name for one in node.names])
    ]  # fmt: skip
    heavy = [found.index(name) for name in ("torch", "transformers") if name in found]
    assert not heavy or found.index("moefold") < min(heavy)
