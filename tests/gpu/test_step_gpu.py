"""Steps on a device: its optimizers, attention by blocks, two lanes, one wait, the command line."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from gpu.device import Bench
from gpu.steps import Trial, drawn_rows, stepping, trials, waits
from gpu.steps import drawn as drawn_state
from no_values import apart, data_of
from torch import Tensor, nn

from moefold.cli.main import main
from moefold.config.slot import build
from moefold.kernels.attention.block import Tile, attention, causal_tiles
from moefold.layers.flow import Flow
from moefold.optim.base import Optimizer
from moefold.optim.config import AdamW, Muon, Optim
from moefold.parallel.apply import build_flow
from moefold.parallel.config import Layout
from moefold.parallel.pipeline.executor import Factors
from moefold.parallel.pipeline.graphs import PartialSteps, StepGraphs, build_executor
from moefold.parallel.pipeline.lanes import Lanes
from moefold.parallel.pipeline.recording import WARMUP_STEPS
from moefold.training.step import gradients
from tests import references
from tests.cpu.runs import raw_run
from tests.cpu.small import padded_rows, relative, same
from tests.gpu.stand_in import HAS_DEVICE

ROOT = Path(__file__).parents[2]
SHAPES = {
    "embedding.weight": (40, 24),
    "layers.0.norm.weight": (24,),
    "layers.0.attention.qkv.weight": (40, 24),
    "layers.0.moe.experts.w_in": (5, 2, 32, 24),
}


def drawn(seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Return tensors of all shapes, the same values for each seed."""
    draw = torch.Generator().manual_seed(seed)
    wide = {n: torch.randn(s, generator=draw, dtype=torch.float64) for n, s in SHAPES.items()}
    return {name: value.to(device, dtype) for name, value in wide.items()}


def updated(record: Optim, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Return parameters after three clipped updates."""
    params = {name: nn.Parameter(x) for name, x in drawn(0, dtype, device).items()}
    optimizer: Optimizer = build(record, params)
    for step in range(1, 4):
        for name, grad in drawn(step, dtype, device).items():
            params[name].grad = grad
        optimizer.step(scale=0.5, lr_factor=1 / step)
    return {name: p.detach().cpu() for name, p in params.items()}


@pytest.mark.parametrize(
    "record", [AdamW(lr=0.01), Muon(arithmetic="float32")], ids=["adamw", "muon"]
)
def test_an_update_is_that_of_fp64_on_a_cpu(record: Optim, device: torch.device) -> None:
    want = updated(record, torch.float64, torch.device("cpu"))
    same(updated(record, torch.float32, device), want, 2e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_attention_by_a_rings_blocks_is_that_of_fp64(
    dtype: torch.dtype, device: torch.device
) -> None:
    """Triangles on the diagonal, a rectangle below it: values and gradients."""
    draw = torch.Generator().manual_seed(0)
    shapes = ((96, 4, 32), (96, 2, 32), (96, 2, 32), (96, 4, 32))
    *qkv, grad = (torch.randn(s, generator=draw).to(dtype).double() for s in shapes)
    tiles = [*causal_tiles((32, 64)), Tile(slice(32, 96), slice(0, 32))]
    found: list[list[Tensor]] = []
    for kind, where in ((dtype, device), (torch.float64, torch.device("cpu"))):
        q, k, v = (x.to(where, kind).requires_grad_() for x in qkv)
        if not found:
            out = attention(q, k, v, tiles, 0.2)
        else:
            out = references.attention(q, k, v, (96,), 0.2)
        out.backward(grad.to(where, kind))
        found.append([x.cpu() for x in (out, q.grad, k.grad, v.grad) if x is not None])
    bound = 16 * torch.finfo(dtype).eps
    assert [relative(a, b) < bound for a, b in zip(*found, strict=True)] == [True] * 4


def small_trial(sizes: str = "", schedule: str | None = None) -> Trial:
    """Return a small step; with ``ep8`` that of one rank, whose exchanges are copies."""
    found = trials(Bench("test", Path("nowhere"), smoke=True))
    return next(t for t in found if (t.name, t.sizes, t.schedule) == ("qwen3", sizes, schedule))


def test_two_lanes_give_what_one_after_the_other_does(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four micro-batches, in fp64, twice: memory that one lane lets go the other takes."""
    found: list[dict[str, Tensor]] = []
    begun: list[int] = []
    begin = Lanes._submit

    def counted(self: Lanes, *given: Any) -> Any:
        begun.append(len(found))
        return begin(self, *given)

    monkeypatch.setattr(Lanes, "_submit", counted)
    for schedule in (None, "merged", "merged"):
        trial = small_trial("ep8", "merged")
        batches = drawn_rows(Trial(trial.name, trial.decoder, rows=trial.rows, micro_batches=4))
        layout = Trial(trial.name, trial.decoder, "ep8", schedule).layout
        with apart():
            data = data_of(trial.decoder, layout, 8, precision="fp64", device=device)
            for name, parameter in data.params.items():
                draw = torch.Generator().manual_seed(len(name))
                values = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
                parameter.data.copy_(values * 0.3)
            for buffer in data.parts.model.buffers():
                buffer.zero_()
            data.refresh_weights()
            figures = gradients(data, batches, 16)
            assert figures.finite
            grads = {n: p.grad for n, p in data.params.items() if p.grad is not None}
            found.append({name: grad.cpu().clone() for name, grad in grads.items()})
    first, *others = found
    assert len(first) > 10 and {*begun} == {1, 2}, "exchanges ran on the second lane"
    for other in others:
        same(other, first, 1e-9)


@pytest.mark.real_device
def test_cudas_sanitizer_finds_no_race_between_the_lanes() -> None:
    """Plant: let the second lane's stream wait for no event."""
    asked = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    asked += ["-k", "two_lanes and cuda and not sanitizer"]
    env = os.environ | {"TORCH_CUDA_SANITIZER": "1"}
    done = subprocess.run(asked, cwd=ROOT, env=env, capture_output=True, text=True)
    said = done.stdout[-6000:] + done.stderr[-2000:]
    assert done.returncode == 0 and "1 passed" in done.stdout, said
    assert "CSAN detected" not in done.stdout + done.stderr, said


def test_a_whole_step_waits_once_for_the_device() -> None:
    """Loss, norm and counts are read together; experts here are all on this rank."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("older devices run grouped products one by one, and read the offsets for it")
    trial = small_trial()
    step = stepping(trial, drawn_state(trial, 1, torch.device("cuda")))
    for _ in range(3):  # loads kernels, makes room
        step()
    found = waits(step)
    assert sum(found.values()) == 1, found


@pytest.mark.parametrize("by", ["partial", "step"])
@pytest.mark.parametrize("recompute", [None, "full"], ids=["kept", "again"])
def test_a_step_that_is_replayed_is_the_step(recompute: str | None, by: str) -> None:
    """Other rows in each step, and weights that move between them: losses, norms and weights."""
    found: list[list[float]] = []
    for graphs in ("none", by):
        trial = small_trial()
        chosen = {"graphs": graphs, "recompute": recompute and {"kind": recompute}}
        layout = Layout.model_validate({k: v for k, v in chosen.items() if v})
        data = drawn_state(trial, 1, torch.device("cuda"), layout)
        optimizer, executor = data.optimizer(AdamW(lr=0.01)), build_executor(data)
        figures: list[float] = []
        for step in range(6):
            rows = drawn_rows(trial, seed=step)
            said = gradients(data, rows, 16, executor=executor)
            optimizer.step(scale=0.5)
            data.refresh_weights()
            figures += [said.lm_loss, said.grad_norm, *said.router_terms.values()]
        weights = [float(p.detach().double().norm()) for p in data.params.values()]
        found.append(figures + weights)
        if graphs == "step":
            assert isinstance(executor, StepGraphs)
            assert len(executor.recorded) == 1, "steps of one shape are one graph"
        if graphs == "partial":
            assert isinstance(executor, PartialSteps)
            assert len(executor.graphs.passes) == 1, "one pass is in flight at once"
    # Sums of gradients of the embedding are made in another order.
    assert found[1] == pytest.approx(found[0], rel=2e-3)
    assert len({*found[0][:6]}) > 2


def test_another_shape_is_another_graph_and_a_wait_is_refused() -> None:
    trial = small_trial()
    data = drawn_state(trial, 1, torch.device("cuda"), Layout(graphs="step"))
    executor = build_executor(data)
    assert isinstance(executor, StepGraphs)
    for rows in (8, 16):
        other = replace(trial, rows=rows)
        for _ in range(WARMUP_STEPS + 2):
            gradients(data, drawn_rows(other), 16, executor=executor)
    assert len(executor.recorded) == 2

    def loss(x_TD: Tensor, flow: Flow, scale: Tensor) -> tuple[Tensor, Tensor]:
        return x_TD.sum() * float(scale), x_TD

    factors = Factors(*(torch.ones(n, device="cuda") for n in (1, trial.micro_batches)))
    with pytest.raises(RuntimeError, match="Use graphs: none"):
        flows = [build_flow(data.parts, rows) for rows in drawn_rows(trial)]
        executor.record_step(data.parts, flows, factors, loss)


def test_rows_come_to_the_device_as_they_are(device: torch.device) -> None:
    rows = padded_rows((5, 3), 2)
    moved = rows.to(device)
    assert {moved.ids_T.device.type, moved.labels_T.device.type} == {device.type}
    back = moved.to(device).to("cpu")
    assert torch.equal(back.ids_T, rows.ids_T) and torch.equal(back.labels_T, rows.labels_T)
    assert not rows.ids_T.is_cuda


def asked_of(folder: Path, *words: str) -> list[str]:
    """Return the words that let ``moefold`` train on a tiny corpus."""
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(raw_run(folder)))
    return ["train", str(file), "--folder", str(folder / "out"), *words]


def command(folder: Path, device: torch.device, *words: str) -> subprocess.CompletedProcess[str]:
    """Run ``moefold train`` on the first device or on none."""
    seen = {"CUDA_VISIBLE_DEVICES": "0" if device.type == "cuda" else "", "OMP_NUM_THREADS": "1"}
    asked = [sys.executable, "-m", "moefold", *asked_of(folder, *words)]
    env = os.environ | seen | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(asked, cwd=ROOT, env=env, capture_output=True, text=True)


def test_the_command_trains_three_steps(
    device: torch.device, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a process of its own where a device is to be hidden from it, or said by it."""
    if HAS_DEVICE:
        done = command(tmp_path, device, "train.steps=3")
        said = done.stdout + done.stderr
        assert done.returncode == 0, said[-8000:]
    else:
        assert main(asked_of(tmp_path, "train.steps=3")) == 0
        captured = capfd.readouterr()
        said = captured.out + captured.err
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    losses = [one["lm_loss"] for one in map(json.loads, lines) if "lm_loss" in one]
    assert len(losses) == 3 and 4 < losses[0] < 7 and losses[2] < losses[0]
    if device.type == "cuda":
        assert torch.cuda.get_device_name() in said


@pytest.mark.real_device
def test_two_ranks_on_one_device_are_refused(tmp_path: Path) -> None:
    done = command(tmp_path, torch.device("cuda"), "--nproc", "2", "train.steps=3")
    assert done.returncode == 2, done.stdout[-4000:] + done.stderr[-4000:]
    assert "2 ranks and 1 CUDA device" in done.stderr
