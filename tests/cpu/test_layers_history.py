"""Scales of matrices by steps before: the rule, and that nothing of the present step enters it."""

from pathlib import Path

import pytest
import torch

from moefold.config.base import Record
from moefold.kernels.quantise.blocks import encode, format_of
from moefold.kernels.quantise.config import Fp8Tensor
from moefold.layers.config import Full
from moefold.layers.history import AmaxHistory
from moefold.moe.config import Router
from moefold.optim.config import AdamW
from moefold.parallel.apply import single_rank_parts
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.planner.case import NumberFormats
from moefold.planner.hardware import Cluster, cpu_device
from moefold.planner.memory import estimate_memory
from moefold.planner.task import TrainingTask
from moefold.training import step
from moefold.training.memory_probe import state_bytes
from tests.cpu.runs import job_of
from tests.cpu.small import GQA, decoder, model_of, moe, padded_rows, relative

DELAYED = Fp8Tensor(scaling="delayed", history=2)


@pytest.mark.parametrize("latest", [False, True])
def test_scales_follow_from_steps_before_by_the_rule(latest: bool) -> None:
    """TransformerEngine's in a loop: 57,344 over the largest of some steps, or of the last one; a
    matrix that had nothing keeps its scale, and begins with 1.

    Plants: the step itself counts; one step too many counts.
    """
    history, form = (
        AmaxHistory(2, 3, latest, torch.device("cpu")),
        format_of("fp8_tensor", "gradient"),
    )
    noted, scale = list[float](), torch.tensor(1.0)
    for most in (4.0, 1.0, 0.5, 0.25, 0.0, 0.0, 0.0, 0.0, 3e-40, 8.0, 2.0):
        x = torch.tensor([[most, -most / 3]])
        amax = history.scaling_amax(torch.tensor([[[most]]]), "gradient", [1], record=True)
        expected = (x * scale).clamp(-57344, 57344).to(torch.float8_e5m2)
        assert torch.equal(encode(x, form, amax=amax[0]).codes.float(), expected.float()), most
        assert history.scaling_amax(torch.ones(1), "gradient", [0], record=False) == 0
        history.advance()
        history.seen_RM.zero_()
        noted = [most, *noted][:3]
        chosen = noted[0] if latest else max(noted)
        if chosen > 0:
            largest = torch.finfo(torch.float32).max
            scale = torch.div(torch.tensor(57344.0), torch.tensor(chosen)).clamp(max=largest)


def test_what_is_beyond_a_scale_is_its_largest_number_and_what_is_not_finite_is_nan() -> None:
    history, form = AmaxHistory(1, 2, False, torch.device("cpu")), format_of("fp8_tensor", "rows")
    history.seen_RM.fill_(2.0)
    history.advance()
    for most, read in ((100.0, [2.0, 1.0]), (torch.inf, [torch.nan, torch.nan])):
        amax = history.scaling_amax(torch.tensor([[most]]), "rows", [0], record=True)
        found = encode(torch.tensor([[most, 1.0]]), form, amax=amax).dequantise()
        torch.testing.assert_close(found, torch.tensor([read]), rtol=0, atol=0, equal_nan=True)
    history.advance()
    assert history.past_RMH[0, 0].tolist() == [2.0, 0.0, 2.0], "what is not finite is not noted"


def after_steps(quantise: Record, again: Record | None = None) -> dict[str, torch.Tensor]:
    """Gradients of a second step whose weights are those of the first."""
    every = moe(router=Router(experts=8, top_k=8))  # whose choice no rounding changes
    model = model_of(decoder(GQA, every, every, quantise=quantise), "fp32")
    data = ShardedState(single_rank_parts(model, Layout(recompute=again)))
    for number in range(2):
        step.gradients(data, [padded_rows((9, 17), 6, number), padded_rows((20,), 0)], 16)
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        data.end_step()
    return found


def test_gradients_by_steps_before_are_near_and_the_same_where_made_again() -> None:
    """Plant: codes stay as they were where scales change and weights do not."""
    delayed, own = after_steps(DELAYED), after_steps(Fp8Tensor())
    for name in ("layers.1.moe.experts.w_in", "layers.0.attention.q.weight"):
        # Start values as large as these magnify roundings fivefold; both differ from wide products.
        assert 0.01 < relative(delayed[name], own[name]) < 0.45, name
    again = after_steps(DELAYED, Full())
    assert all(torch.equal(again[name], delayed[name]) for name in delayed)


@pytest.mark.parametrize("zero", [0, 2])
def test_bytes_of_histories_and_of_codes_are_the_planned_ones(zero: int) -> None:
    """To the byte, whatever data ranks share. Plants: largest numbers of weights, or histories, are
    forgotten."""
    narrow = decoder(GQA, moe(), quantise=DELAYED)
    model = model_of(narrow, "fp32")
    data = ShardedState(single_rank_parts(model, Layout(zero=zero)))
    step.gradients(data, [padded_rows((20,), 0)], 16)
    cluster = Cluster(cpu_device(1e11, 1e10, 2**34), 1, 1, 1)
    task = TrainingTask(
        "delayed", narrow, 20, 1, cluster, NumberFormats("fp8_tensor", AdamW(lr=1e-3), 0)
    )
    (found,) = estimate_memory(task.case(Layout(zero=zero)))
    assert state_bytes(data)["weights"] == found.state.weights


def test_a_step_that_is_given_up_leaves_no_trace_in_histories(tmp_path: Path) -> None:
    """Plant: it enters them."""
    train = {"quantise": dict(DELAYED), "on_nonfinite": {"kind": "skip", "limit": 2}}
    with job_of(tmp_path, train=train) as job:
        job.step()
        (table,) = [p for n, p in job.model.named_parameters() if n == "embed.weight"]
        before = [one.past_RMH.clone() for one in job.state.histories.values()]
        assert all((one[..., 0] > 0).any() for one in before)
        kept = table.detach().clone()
        with torch.no_grad():
            table[:, 0] = torch.inf
        assert job.step()["skipped"] == 1
        after = [one.past_RMH for one in job.state.histories.values()]
        assert all(map(torch.equal, before, after))
        with torch.no_grad():
            table.copy_(kept)
        job.step()
        assert not all(map(torch.equal, before, after))
