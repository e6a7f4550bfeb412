"""Walls of steps on two ranks: parts add up to the step, and what is planted is named."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moefold.comm.world import World
from moefold.mesh.folding import Folding
from moefold.moe.experts import Experts
from moefold.optim.adamw import AdamWOptimizer
from moefold.run import Run, load_run
from moefold.training import random_step, walls_bench
from tests.gloo.harness import run_ranks

EXCHANGE_S = 0.08
HOST_S = 1.0
ROW_S = 0.0015
"""Seconds that each exchange, each update and each expert's row take longer."""
SHAPE = {
    "hidden": 16, "layers": 2, "heads": 2, "kv_rank": 8, "nope_dim": 8, "rope_dim": 4, "v_dim": 8,
    "experts": 4, "top_k": 1, "expert_width": 16, "shared_width": 16, "dense_layers": 0,
    "dense_width": 16,
}  # fmt: skip
MODEL = {
    "family": "deepseek_v3", "shape": SHAPE, "renormalise": False, "groups": None,
    "balance": [{"kind": "bias"}],
}  # fmt: skip


@torch.library.custom_op("walls::mm", mutates_args=())
def slow_product(x_RD: Tensor, seconds: float) -> Tensor:
    """Take as long as is said, in an operator whose name is that of a product."""
    time.sleep(seconds)
    return x_RD.new_empty(0)


@contextmanager
def slow_exchange() -> Iterator[None]:
    """Let each exchange of rows take longer, on all ranks alike."""
    exchange = dist.all_to_all_single

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(EXCHANGE_S)
        return exchange(*args, **kwargs)

    with patch.object(dist, "all_to_all_single", late):
        yield


@contextmanager
def slow_host() -> Iterator[None]:
    """Let the host do something else before each update, on all ranks alike."""
    update = AdamWOptimizer.step

    def late(*args: Any, **kwargs: Any) -> None:
        time.sleep(HOST_S)
        update(*args, **kwargs)

    with patch.object(AdamWOptimizer, "step", late):
        yield


@contextmanager
def long_experts(hot: bool) -> Iterator[None]:
    """Let experts take long for each row; with ``hot``, the first one has all rows."""
    forward = Experts.forward
    fill = random_step.initialise

    def slow(self: Experts, x_RD: Tensor, offs_E: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        slow_product(x_RD.detach(), ROW_S * int(offs_E[-1]))
        return forward(self, x_RD, offs_E, *args, **kwargs)

    def fill_and_heat(model: Any, *args: Any) -> None:
        fill(model, *args)
        for _, mixture in model.moe_layers() if hot else ():
            mixture.router.selection_bias[0] = 1e6

    slowed = patch.object(Experts, "forward", slow)
    heated = patch.object(random_step, "initialise", fill_and_heat)
    with slowed, heated:
        yield


def measured(run: Run) -> dict[str, Any]:
    """Return the walls of a traced step of a run, whose ranks have joined."""
    world = World.open(Folding(run.layout.split, 2, run.layout.order), "cpu", 30)
    batches = run.train.batch // run.train.micro_batch // world.folding.dp
    walls, _ = walls_bench.trace_steps(world, run, "fp32", batches, 1)
    world.forget_groups()
    return walls.to_json()


def planted_steps(rank: int, experts: Run, stages: Run) -> dict[str, dict[str, Any]]:
    """Return the walls of steps with one plant each."""
    answers = {}
    with slow_exchange():
        answers["exchange"] = measured(experts)
    with slow_host():
        answers["host"] = measured(experts)
    with long_experts(hot=True):
        answers["experts"] = measured(experts)
    with long_experts(hot=False):
        answers["stages"] = measured(stages)
    dist.destroy_process_group()
    return answers


def test_planted_walls_are_named() -> None:
    small = ["train.precision=fp32", "data.seq=32", f"model={json.dumps(MODEL)}"]
    experts = load_run("tiny", [*small, "layout.sizes=ep2"])
    stages = load_run("tiny", [*small, "layout.sizes=pp2", "layout.stages=Ett|L"])
    found, others = run_ranks(planted_steps, 2, experts, stages)
    assert found == others, "all ranks know the same"
    assert {plant: data["wall"] for plant, data in found.items()} == {
        plant: plant for plant in found
    }
    for data in found.values():
        assert sum(data["parts"].values()) == pytest.approx(data["seconds"], rel=0.03)
        for rank, parts in zip(data["ranks"], data["parts_by_rank"], strict=True):
            assert sum(parts.values()) == pytest.approx(rank["seconds"], rel=0.03)
    # Each of two layers sends numbers of rows, rows and results, and the gradients of both.
    assert found["exchange"]["parts"]["exchange"] >= 2 * 5 * EXCHANGE_S
    assert HOST_S <= found["host"]["parts"]["host"] < 2 * HOST_S
    assert "expert 0 of layer" in found["experts"]["evidence"]
    assert found["experts"]["load"] == 2, "one of two ranks has all rows"
    assert "stage 0 is the heaviest" in found["stages"]["evidence"]
