"""The global gradient norm: exact enough to be the same in every layout, and honest about NaN."""

import math

import pytest
import torch

from moefold.optim.norm import BLOCK, clip_scale, non_finite, read_scalars, squared_norm

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def seed() -> None:
    """Draw the same in whatever order tests run."""
    torch.manual_seed(0)


def exact(*tensors: torch.Tensor) -> float:
    """Return the sum of squares in float64."""
    return sum(float(t.double().square().sum()) for t in tensors)


def test_a_long_sum_stays_exact() -> None:
    """Over millions of elements a plain float32 sum is off by 1e-4; this one is not."""
    grad = torch.full((3_000_000,), 1e-3) + torch.randn(3_000_000) * 1e-4
    assert float(squared_norm([grad], CPU)) == pytest.approx(exact(grad), rel=2e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_every_element_counts_once(size: int, dtype: torch.dtype) -> None:
    """At and around the block's length."""
    grad = torch.randn(size).to(dtype)
    assert float(squared_norm([grad], CPU)) == pytest.approx(exact(grad), rel=1e-6)


def test_any_shape_any_layout_any_split() -> None:
    """Scalars, transposed, empty and cut tensors: the sum over shards is the sum over the whole."""
    grads = [torch.randn(()), torch.randn(70, 90).t(), torch.zeros(0, 4), torch.randn(3, 50, 60)]
    total = squared_norm(grads, CPU)
    assert total.dtype == torch.float64
    assert float(total) == pytest.approx(exact(*grads), rel=1e-6)
    shards = [piece for g in grads for piece in (g.reshape(-1)[::2], g.reshape(-1)[1::2])]
    assert float(squared_norm(shards, CPU)) == pytest.approx(float(total), rel=1e-6)
    assert float(squared_norm([], CPU)) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, BLOCK, 2 * BLOCK + 5])
def test_one_bad_element_makes_the_norm_not_finite(bad: float, where: int) -> None:
    """And the report names the tensor."""
    grads = {"a": torch.randn(10), "b": torch.randn(2 * BLOCK + 9), "c": torch.randn(10)}
    assert non_finite(grads) == []
    grads["b"][where] = bad
    (total,) = read_scalars(squared_norm(list(grads.values()), CPU))
    assert not math.isfinite(total)
    assert non_finite(grads) == ["b"]


def test_large_and_small_elements_neither_overflow_nor_vanish() -> None:
    """Sums of squares of 1e15 and of 1e-15 are held."""
    for size in (1e15, 1e-15):
        grad = torch.full((10_000,), size)
        assert float(squared_norm([grad], CPU)) == pytest.approx(1e4 * size**2, rel=1e-6)


def test_clipping_as_torch_does_it() -> None:
    """The factor brings the norm to the limit, and is exactly 1 below it."""
    grads = [torch.randn(40, 30), torch.randn(17)]
    norm = math.sqrt(read_scalars(squared_norm(grads, CPU))[0])
    factor = clip_scale(norm, 1.5)
    for grad in grads:
        grad.requires_grad_(False)
    holders = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    for holder, grad in zip(holders, grads, strict=True):
        holder.grad = grad.clone()
    theirs = torch.nn.utils.clip_grad_norm_(holders, 1.5)
    assert norm == pytest.approx(float(theirs), rel=1e-6)
    for holder, grad in zip(holders, grads, strict=True):
        torch.testing.assert_close(holder.grad, grad * factor, rtol=1e-5, atol=1e-8)
    clipped = math.sqrt(float(squared_norm([g * factor for g in grads], CPU)))
    assert clipped == pytest.approx(1.5, rel=1e-6)
    assert clip_scale(1.5, 1.5) == clip_scale(0.0, 1.5) == clip_scale(9.0, None) == 1.0


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_gives_no_factor(norm: float) -> None:
    """Even where nothing is clipped."""
    for limit in (1.0, None):
        with pytest.raises(ValueError, match="not finite"):
            clip_scale(norm, limit)


def test_scalars_come_in_order_and_exact() -> None:
    """Whatever their type; no gradient is needed."""
    loss = torch.tensor([1 / 3, 2.0], requires_grad=True)
    assert read_scalars(loss * 1) == loss.tolist()
    assert read_scalars(torch.tensor([2**40 + 1, 3])) == [float(2**40 + 1), 3.0]
    assert read_scalars(torch.tensor(0.1, dtype=torch.float64)) == [0.1]
