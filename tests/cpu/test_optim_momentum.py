"""SGD beside torch's own, Lion beside its formulas in a loop over numbers; state and its bytes."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moefold.config.slot import build
from moefold.optim import lists
from moefold.optim.config import Lion, MomentumRule, Sgd
from tests.cpu.test_optim_adamw import DECAYED, SHAPES, equal, give_gradients, parameters, run

STEPS = 4


def groups(params: Mapping[str, nn.Parameter], decay: float) -> list[dict[str, Any]]:
    """Return torch's parameter groups: with weight decay and without."""
    decayed = [p for n, p in params.items() if n in DECAYED]
    rest = [p for n, p in params.items() if n not in DECAYED]
    return [{"params": decayed, "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_equals_torch_bit_for_bit(
    dtype: torch.dtype, momentum: float, nesterov: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without decay, at a changing rate, in pieces that cut the tensors."""
    monkeypatch.setitem(lists.PIECE, "cpu", 16)
    nesterov = nesterov and momentum > 0
    record = Sgd(lr=0.05, momentum=momentum, nesterov=nesterov, weight_decay=0.3)
    ours, theirs = parameters(dtype), parameters(dtype)
    run(build(record, ours), range(STEPS), scale=1 / 8)
    how = {"momentum": momentum, "nesterov": nesterov}
    reference = torch.optim.SGD(groups(theirs, 0.3), lr=record.lr, foreach=False, **how)
    for step in range(STEPS):
        for group in reference.param_groups:
            group["lr"] = record.lr * (1 / (1 + step))
        give_gradients(theirs, step)
        reference.step()
    for name, p in ours.items():
        torch.testing.assert_close(
            p, theirs[name], rtol=1e-6 if dtype.itemsize == 4 else 1e-14, atol=1e-15
        )
    assert dtype != torch.float32 or equal(ours, theirs)


def looped_lion(record: Lion, params: Mapping[str, Tensor], steps: int) -> dict[str, list[float]]:
    """Lion as its paper's algorithm 2 states it, in Python's numbers."""
    newest, kept = record.betas
    values = {n: p.flatten().tolist() for n, p in params.items()}
    momenta = {n: [0.0] * len(x) for n, x in values.items()}
    for step in range(steps):
        give_gradients(params, step)
        rate = record.lr / (1 + step)
        for name, p in params.items():
            decay = record.weight_decay if name in DECAYED else 0.0
            for i, g in enumerate(p.grad.flatten().tolist()):
                m = momenta[name][i]
                c = newest * m + (1 - newest) * g
                sign = math.copysign(1.0, c) if c else 0.0
                values[name][i] -= rate * (sign + decay * values[name][i])
                momenta[name][i] = kept * m + (1 - kept) * g
    return values


def test_lion_is_what_its_paper_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(lists.PIECE, "cpu", 100)
    record = Lion(lr=0.02, betas=(0.8, 0.95), weight_decay=0.7)
    ours = parameters(torch.float64)
    run(build(record, ours), range(STEPS), scale=1 / 8)
    for name, values in looped_lion(record, parameters(torch.float64), STEPS).items():
        expected = torch.tensor(values, dtype=torch.float64)
        torch.testing.assert_close(ours[name].detach().flatten(), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("record", "kept"), [(Sgd(), ["momentum"]), (Sgd(momentum=0.0), []), (Lion(), ["momentum"])]
)
def test_state_is_what_the_record_states_and_comes_back(
    record: MomentumRule, kept: list[str]
) -> None:
    """What a plan counts; a run of four steps is two, saved and loaded, and two more."""
    whole, broken = parameters(), parameters()
    run(build(record, whole), range(4), scale=0.7)
    first = build(record, broken)
    run(first, range(2), scale=0.7)
    assert all(record.state_names(n, shape) == tuple(kept) for n, shape in SHAPES.items())
    assert first.state().keys() == {f"optim.{n}.{what}" for n in SHAPES for what in kept}
    second = build(record, broken)
    for name, tensor in second.state().items():
        tensor.copy_(first.state()[name])
    run(second, range(2, 4), scale=0.7)
    assert equal(whole, broken)


@pytest.mark.parametrize("record", [Sgd(lr=0.5), Lion(lr=0.5)])
def test_narrow_parameters_and_other_memory_layouts(record: MomentumRule) -> None:
    """The update is computed in float32 and rounded once; what is turned is read rightly."""
    start = torch.randn(12, 5, generator=torch.Generator().manual_seed(3)).bfloat16()
    turned = nn.Parameter(start.t())
    wide = nn.Parameter(start.t().float().contiguous())
    for p in (turned, wide):
        p.grad = torch.linspace(-1, 1, 60).view(5, 12).bfloat16().to(p.dtype)
        build(record, {"w": p}).step()
    assert torch.equal(turned.detach(), wide.detach().bfloat16())


def test_nesterov_needs_a_momentum() -> None:
    (found,) = Sgd(momentum=0.0, nesterov=True).rules()
    assert (found.path, found.nearest) == (("nesterov",), False)
