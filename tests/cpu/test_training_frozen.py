"""Frozen weights: no gradient, no optimizer state, no master; in memory and on disk."""

from pathlib import Path

import pytest
import torch

from moefold.checkpoint import manifest
from moefold.comm.world import World
from moefold.config.errors import RunError, dotted
from moefold.moe.config import Bias
from moefold.optim.config import AdamW
from moefold.parallel.apply import build_parts, single_rank_parts
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.planner.case import NumberFormats
from moefold.planner.count import count
from moefold.planner.memory_state import StateSharding
from moefold.spec.decoder import model_weights
from moefold.spec.tuning import freeze
from moefold.training.banner import banner_rows, state_bytes
from moefold.training.fork import fork
from moefold.training.step import gradients
from tests.cpu.runs import equal, job_of, run_of, weights
from tests.cpu.small import DEEP, GQA, MLA, decoder, model_of, moe, padded_rows

SOME = ("embed.weight", "*.router.*", "*.experts.*", "layers.0.*", "norm.weight")
ONE = (1, 1, 1)


def test_frozen_weights_have_no_gradient_and_others_the_same() -> None:
    described = decoder(MLA)
    found = []
    for record in (described, freeze(described, SOME)):
        data = ShardedState(single_rank_parts(model_of(record)))
        gradients(data, [padded_rows((7, 9), 3)], loss_chunk=16)
        found.append({name: p.grad for name, p in data.params.items()})
    whole, part = found
    held = {weight.name for weight in model_weights(freeze(described, SOME)) if weight.frozen}
    assert held and held == {name for name, grad in part.items() if grad is None}
    assert all(torch.equal(whole[name], grad) for name, grad in part.items() if grad is not None)


def test_bytes_of_frozen_weights_are_those_of_the_compute_format() -> None:
    """On the meta device, where nothing is allocated: what a step has, tensor by tensor."""
    record = freeze(decoder(), ("*.experts.*", "*.attention.*", "*.router.*", "embed.weight"))
    data = ShardedState(
        build_parts(record, "bf16", Layout(), World.single(), "meta"), has_values=False
    )
    optimizer = data.optimizer(AdamW(lr=0.1))
    state = {name.split(".", 1)[1].rpartition(".")[0] for name in optimizer.state()}
    for weight in model_weights(record):
        parameter = data.params[weight.name]
        planned = StateSharding(ONE, 1, 1, NumberFormats(), 1, None, 1.0, "moefold").local_state(
            (weight,)
        )
        if weight.frozen:
            # The router's product is wider, and so are norms.
            narrow = "router" not in weight.name and parameter.dim() > 1
            assert parameter.element_size() == (2 if narrow else 4)
            assert planned.total == parameter.numel() * parameter.element_size()
            # Products read the parameter itself: no copy of it is made.
            dtype = parameter.dtype
            assert data.parts.model.precision_policy.operand(parameter, dtype).value.is_set_to(
                parameter
            )
            assert weight.name not in state and not parameter.requires_grad
        else:
            assert parameter.element_size() == planned.master / weight.elements == 4
            assert weight.name in state


def test_frozen_weights_cost_one_product_less() -> None:
    record = decoder()
    experts = [w for w in model_weights(record) if w.is_expert]
    passed = sum(w.elements // 8 * 2 for w in experts)
    saved = count(record).flops([16]) - count(freeze(record, ("*.experts.*",))).flops([16])
    assert saved == 2 * passed * 16


def test_the_bias_of_a_frozen_router_stays() -> None:
    free = decoder(GQA, moe(router=DEEP, balance=(Bias(rate=0.01),)))
    for record, moves in ((free, True), (freeze(free, ("*.router.*",)), False)):
        model = model_of(record)
        ((_, mixture),) = model.moe_layers()
        before = mixture.router.selection_bias.clone()
        gradients(ShardedState(single_rank_parts(model)), [padded_rows((7, 9), 3)], loss_chunk=16)
        mixture.balance.finish_step(mixture.router)
        assert torch.equal(before, mixture.router.selection_bias) != moves


def test_a_run_with_frozen_weights_resumes_to_the_bit_and_saves_them_once(tmp_path: Path) -> None:
    how = {"freeze": ["*.experts.*", "embed.weight"], "precision": "bf16"}
    with job_of(tmp_path, "whole", train=how | {"steps": 4}) as job:
        begun = {name: p.clone() for name, p in job.state.params.items() if not p.requires_grad}
        job.train()
        ended = weights(job)
        assert all(torch.equal(begun[name], job.state.params[name]) for name in begun)
        assert any(said.startswith("trained: ") for _, said in banner_rows(job))
        sizes = sum(p.numel() * p.element_size() for p in begun.values())
        trained = sum(p.numel() for p in job.state.params.values() if p.requires_grad)
        moments = 2 * 4 * trained + 8 * sum(p.requires_grad for p in job.state.params.values())
        assert state_bytes(job) == sizes + 8 * trained + moments
    stored = manifest.read(next((tmp_path / "whole").glob("step-*4"))).tensors
    assert stored["model.layers.0.moe.experts.w_in"].dtype == "BF16"
    assert not any("experts" in name for name in stored if name.startswith("optim."))
    with job_of(tmp_path, "cut", train=how | {"steps": 4}) as job:
        job.step()
        job.step()
        job.save()
    with job_of(tmp_path, "cut", train=how | {"steps": 4}) as job:
        assert job.step_number == 2
        job.train()
        assert not equal(ended, weights(job))


def test_a_fork_takes_weights_that_it_freezes_in_their_format(tmp_path: Path) -> None:
    with job_of(tmp_path, "first", train={"steps": 3, "precision": "bf16"}) as job:
        job.train()
        master = job.state.params["layers.0.moe.experts.w_in"].clone()
    how = {"freeze": ["*.experts.*"], "precision": "bf16"}
    with job_of(tmp_path, "second", train=how) as job:
        fork(job, tmp_path / "first", weights_only=True)
        held = job.state.params["layers.0.moe.experts.w_in"]
        assert torch.equal(held, master.to(torch.bfloat16))


def test_patterns_that_match_nothing_are_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught:
        run_of(tmp_path, train={"freeze": ["*.routr.weight", "embed.weight", "*"]})
    found = {dotted(violation.path): violation for violation in caught.value.violations}
    assert found["train.freeze[0]"].nearest == "*.router.weight"
    assert "must leave a parameter to train" in str(caught.value)
