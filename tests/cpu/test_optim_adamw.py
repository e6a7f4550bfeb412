"""AdamW: equal to torch's own, in place, with named state that goes out and comes back exactly."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from moefold.config.slot import build
from moefold.optim.adamw import AdamWOptimizer
from moefold.optim.base import Optimizer
from moefold.optim.config import AdamW

SHAPES = {
    "embedding.weight": (50, 12),
    "layers.0.norm.weight": (12,),
    "layers.0.attention.qkv.weight": (36, 12),
    "layers.0.moe.experts.w_in": (4, 10, 12),
    "layers.0.moe.experts.bias_in": (4, 10),
    "layers.0.moe.experts.none": (0, 10, 12),
}
DECAYED = ("embedding.weight", "layers.0.attention.qkv.weight", "layers.0.moe.experts.w_in")


@pytest.fixture(autouse=True)
def seed() -> None:
    """Draw the same in whatever order tests run."""
    torch.manual_seed(0)


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    """Return the same drawn parameters on every call."""
    draw = torch.Generator().manual_seed(1)
    return {
        name: nn.Parameter(torch.randn(shape, generator=draw).to(dtype))
        for name, shape in SHAPES.items()
    }


def give_gradients(params: Mapping[str, Tensor], step: int, times: float = 1.0) -> None:
    """Set each gradient to the draw that belongs to the step."""
    draw = torch.Generator().manual_seed(100 + step)
    for p in params.values():
        p.grad = (torch.randn(p.shape, generator=draw) * times).to(p.dtype)


def run(optimizer: Optimizer, steps: range, scale: float = 1.0) -> None:
    """Take the steps, with a learning rate that changes."""
    for step in steps:
        give_gradients(optimizer.params, step, 1 / scale)
        optimizer.step(scale=scale, lr_factor=1 / (1 + step))


def run_torch(params: Mapping[str, nn.Parameter], record: AdamW, steps: int, **how: bool) -> None:
    """Take the same steps with ``torch.optim.AdamW``."""
    groups = [
        {"params": [p for n, p in params.items() if n in DECAYED], "weight_decay": 0.1},
        {"params": [p for n, p in params.items() if n not in DECAYED], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, lr=record.lr, betas=record.betas, eps=record.eps, **how)
    for step in range(steps):
        for group in theirs.param_groups:
            group["lr"] = record.lr * (1 / (1 + step))
        give_gradients(params, step)
        theirs.step()


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return whether both hold the same tensors bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reference_equals_torch_bit_for_bit(dtype: torch.dtype) -> None:
    """Ten steps, decayed and undecayed parameters, a changing rate."""
    record = AdamW(lr=0.01, backend="reference")
    ours, theirs = parameters(dtype), parameters(dtype)
    run(AdamWOptimizer(record, ours), range(10))
    run_torch(theirs, record, 10, foreach=False, fused=False)
    assert equal(ours, theirs)


def test_fused_equals_torch_bit_for_bit_and_the_reference_closely() -> None:
    """The fused path is torch's kernel with our state around it."""
    record = AdamW(lr=0.01, backend="fused")
    ours, theirs, plain = parameters(), parameters(), parameters()
    run(AdamWOptimizer(record, ours), range(10))
    run_torch(theirs, record, 10, fused=True)
    assert equal(ours, theirs)
    run(AdamWOptimizer(record.model_copy(update={"backend": "reference"}), plain), range(10))
    for name in ours:
        torch.testing.assert_close(ours[name], plain[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["fused", "reference"])
def test_scale_is_a_factor_on_the_gradient(backend: str) -> None:
    """Gradients 8 times too large with scale 1/8 give the same bits; with 1/10, nearly."""
    record = AdamW(lr=0.01, backend=backend)
    plain, eighth, tenth = parameters(), parameters(), parameters()
    run(AdamWOptimizer(record, plain), range(5))
    run(AdamWOptimizer(record, eighth), range(5), scale=1 / 8)
    run(AdamWOptimizer(record, tenth), range(5), scale=1 / 10)
    assert equal(plain, eighth)
    for name in plain:
        torch.testing.assert_close(tenth[name], plain[name], rtol=1e-5, atol=1e-6)


def test_bfloat16_parameters_keep_float32_state() -> None:
    """The update is computed in float32 and rounded once."""
    record = AdamW(lr=0.01)
    half, wide = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer = AdamWOptimizer(record, half)
    assert {t.dtype for n, t in optimizer.state().items() if not n.endswith(".step")} == {
        torch.float32
    }
    wide = {n: nn.Parameter(p.detach().float()) for n, p in wide.items()}
    give_gradients(half, 0)
    for name, p in wide.items():
        p.grad = half[name].grad.float()
    optimizer.step()
    AdamWOptimizer(record.model_copy(update={"backend": "reference"}), wide).step()
    assert equal(half, {n: p.detach().bfloat16() for n, p in wide.items()})


def test_only_what_the_rule_names_decays() -> None:
    """With zero gradients, what decays shrinks by lr * weight_decay, and the rest stays."""
    params, before = parameters(), parameters()
    give_gradients(params, 0, times=0.0)
    AdamWOptimizer(AdamW(lr=0.5, weight_decay=0.2), params).step(lr_factor=0.5)
    for name, p in params.items():
        factor = 1 - 0.25 * 0.2 if name in DECAYED else 1.0
        torch.testing.assert_close(p, before[name] * factor, rtol=1e-6, atol=0)


def test_a_zero_gradient_is_a_gradient() -> None:
    """Counters and moments of a parameter that no token reached go on as everywhere."""
    params = parameters()
    optimizer = AdamWOptimizer(AdamW(), params)
    for step in range(3):
        give_gradients(params, step)
        if step:
            params["layers.0.moe.experts.w_in"].grad.zero_()
        optimizer.step()
    state = optimizer.state()
    assert {int(t) for n, t in state.items() if n.endswith(".step")} == {3}
    assert state["optim.layers.0.moe.experts.w_in.exp_avg"].abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rate_zero_changes_no_weight(dtype: torch.dtype) -> None:
    """Decay is decoupled, yet scaled by the rate."""
    params = parameters(dtype)
    optimizer = AdamWOptimizer(AdamW(), params)
    give_gradients(params, 0)
    optimizer.step(lr_factor=0.0)
    assert equal(params, parameters(dtype))


def test_frozen_parameters_have_no_state_and_stay() -> None:
    """Freezing is read once, when the optimizer is built."""
    params = parameters()
    params["embedding.weight"].requires_grad_(False)
    optimizer = AdamWOptimizer(AdamW(lr=0.1), params)
    assert not any("embedding" in name for name in optimizer.state())
    run(optimizer, range(2))
    assert torch.equal(params["embedding.weight"], parameters()["embedding.weight"])
    assert not torch.equal(params["layers.0.norm.weight"], parameters()["layers.0.norm.weight"])


@pytest.mark.parametrize("backend", ["fused", "reference"])
def test_updates_are_in_place_and_announced(backend: str) -> None:
    """Same memory, higher version: caches keyed by ``_version`` notice; torch's kernel is mute."""
    params = {n: p for n, p in parameters().items() if p.numel()}
    optimizer = AdamWOptimizer(AdamW(backend=backend), params)
    tensors = {**params, **optimizer.state()}
    before = {n: (t.data_ptr(), t._version) for n, t in tensors.items()}
    give_gradients(params, 0)
    optimizer.step()
    for name, tensor in tensors.items():
        where, version = before[name]
        assert tensor.data_ptr() == where
        assert tensor._version > version, name
    assert optimizer.state().keys() == tensors.keys() - params.keys()


def test_a_parameter_of_another_memory_layout_is_updated_rightly() -> None:
    """torch's fused kernel would read it in the wrong order."""
    turned = nn.Parameter(torch.randn(12, 5).t())
    plain = nn.Parameter(turned.detach().clone(memory_format=torch.contiguous_format))
    grad = torch.randn(5, 12)
    for p in (turned, plain):
        p.grad = grad.clone()
        AdamWOptimizer(AdamW(lr=0.1), {"w": p}).step()
    torch.testing.assert_close(turned, plain, rtol=1e-6, atol=1e-7)
    with pytest.raises(ValueError, match=r"contiguous float32.*: w"):
        AdamWOptimizer(AdamW(backend="fused"), {"w": turned})


def test_a_gradient_of_another_memory_layout_is_read_rightly() -> None:
    """The gradient alone is turned, the weight is not."""
    one, other = (nn.Parameter(torch.ones(5, 12)) for _ in range(2))
    grad = torch.randn(12, 5).t()
    one.grad, other.grad = grad, grad.contiguous()
    for p in (one, other):
        AdamWOptimizer(AdamW(lr=0.1, backend="fused"), {"w": p}).step()
    assert torch.equal(one, other)


@pytest.mark.parametrize("backend", ["fused", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_state_goes_out_and_comes_back_exactly(backend: str, dtype: torch.dtype) -> None:
    """Six steps at once are three, saved and loaded, and three more."""
    record = AdamW(lr=0.01, backend="reference" if dtype == torch.float64 else backend)
    whole, broken = parameters(dtype), parameters(dtype)
    unbroken = build(record, whole)
    run(unbroken, range(6), scale=0.7)
    first = build(record, broken)
    run(first, range(3), scale=0.7)
    saved = {name: tensor.clone() for name, tensor in first.state().items()}
    resumed = {name: nn.Parameter(p.detach().clone()) for name, p in broken.items()}
    second = build(record, resumed)
    assert second.state().keys() == saved.keys()
    for name, tensor in second.state().items():
        tensor.copy_(saved[name])
    run(second, range(3, 6), scale=0.7)
    assert equal(whole, resumed)
    assert equal(unbroken.state(), second.state())


def test_counters_are_whole_numbers_per_parameter() -> None:
    """A parameter thawed later starts its own count, and gets its own bias correction."""
    params = parameters()
    late = "layers.0.norm.weight"
    run(AdamWOptimizer(AdamW(), {n: p for n, p in params.items() if n != late}), range(0))
    optimizer = AdamWOptimizer(AdamW(lr=0.1, weight_decay=0.0), params)
    for name in params.keys() - {late}:
        optimizer.state()[f"optim.{name}.step"].fill_(1000)
    give_gradients(params, 0)
    before = {n: p.detach().clone() for n, p in params.items()}
    optimizer.step()
    counts = {n: t for n, t in optimizer.state().items() if n.endswith(".step")}
    assert {t.dtype for t in counts.values()} == {torch.int64}
    assert int(counts[f"optim.{late}.step"]) == 1
    moved = {n: (params[n] - before[n]).abs() for n in params}
    torch.testing.assert_close(moved[late], torch.full((12,), 0.1), rtol=1e-3, atol=0)
    grad = params["embedding.weight"].grad.abs()
    expected = 0.1 * (0.1 * grad) / (0.05 * grad * grad).sqrt()  # corrections have died out
    torch.testing.assert_close(moved["embedding.weight"], expected, rtol=1e-3, atol=1e-5)


def test_a_missing_gradient_is_refused_before_anything_changes() -> None:
    """All names at once; the counters stand still."""
    params = parameters()
    optimizer = AdamWOptimizer(AdamW(), params)
    give_gradients(params, 0)
    params["embedding.weight"].grad = params["layers.0.norm.weight"].grad = None
    with pytest.raises(ValueError, match=r"embedding\.weight, layers\.0\.norm\.weight"):
        optimizer.step()
    assert equal(params, parameters())
    assert {int(t) for n, t in optimizer.state().items() if n.endswith(".step")} == {0}


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_senseless_scale_is_refused(scale: float) -> None:
    """A non-finite factor would poison every weight."""
    params = parameters()
    give_gradients(params, 0)
    with pytest.raises(ValueError, match="gradient scale"):
        AdamWOptimizer(AdamW(), params).step(scale=scale)
    assert equal(params, parameters())


def test_one_tensor_under_two_names_is_refused() -> None:
    """A tied weight would be updated twice."""
    tied = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(ValueError, match=r"head\.weight and embedding\.weight are the same"):
        AdamWOptimizer(AdamW(), {"head.weight": tied, "embedding.weight": tied})


def test_state_of_another_shape_than_the_parameters_is_refused() -> None:
    """Nothing would say which part of it a rank has that has a part of the parameter."""
    optimizer = AdamWOptimizer(AdamW(), parameters())
    with pytest.raises(ValueError, match=r"rows of embedding.weight has .*\[50\]; .* \[50, 12\]"):
        optimizer._add_state("embedding.weight", "rows", torch.zeros(50))
    assert "optim.embedding.weight.rows" not in optimizer.state()


def test_what_is_shown() -> None:
    """The rate of the group, and the live path."""
    optimizer = AdamWOptimizer(AdamW(lr=0.25), parameters())
    assert optimizer.lr(0.5) == {"adamw": 0.125}
    assert optimizer.describe() == {"adamw": "6 tensors fused"}
    optimizer = AdamWOptimizer(AdamW(), parameters(torch.float64))
    assert optimizer.describe() == {"adamw": "6 tensors unfused"}


def test_nothing_to_train_is_no_error() -> None:
    """All frozen: a step does nothing."""
    optimizer = AdamWOptimizer(AdamW(), {"w": torch.ones(2)})
    optimizer.step()
    assert optimizer.state() == {}
