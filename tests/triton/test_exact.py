"""The interpreter of kernel tests: exact in narrow types, and it sees wrong accesses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.triton.values import assert_rounded, bits, watched
from tests.triton.watch import MemoryFault, Race, Watch

N = 64


@triton.jit
def _arithmetic(x, y, out, scale, LENGTH: tl.constexpr):
    at = tl.arange(0, LENGTH)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, tl.where(a > b, a * b + a, tl.maximum(a - b, b)) / b)
    tl.store(out + LENGTH + at, (a.to(tl.float32) * scale).to(a.dtype))
    tl.store(out + 2 * LENGTH, tl.sum(a, 0))


@triton.jit
def _product(x, y, out, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at)))


@triton.jit
def _copy(x, out, n, EXTRA: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0)
    tl.store(out + (at % SHARED), value, mask=at < n + EXTRA)


@triton.jit
def _in_place(x, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at + BLOCK, tl.load(x + at))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_each_operation_is_rounded_once(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(N, generator=g).to(dtype) for _ in range(2))
    out = torch.empty(2 * N + 1, dtype=dtype)
    _arithmetic[(1,)](a, b, out, 1.1, N)
    want = torch.where(a > b, a * b + a, torch.maximum(a - b, b)) / b
    assert torch.equal(bits(out[:N]), bits(want))
    assert torch.equal(bits(out[N:-1]), bits((a.float() * 1.1).to(dtype)))
    assert_rounded(out[-1:], a.double().sum()[None])


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_products_are_summed_in_fp32(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, 16, generator=g).to(dtype) for _ in range(2))
    out = torch.empty(16, 16)
    _product[(1,)](a, b, out, 16)
    error = (out - a.double() @ b.double()).norm() / out.norm()
    # fp32 operands lose their last 13 bits, as on a device.
    assert 1e-5 < error < 1e-3 if dtype == torch.float32 else error < 1e-6


def copied(n: int, extra: int = 0, shared: int = 1 << 20, room: int = N) -> Callable[[], Tensor]:
    """Return a launch that copies ``n`` elements in blocks of 16 into ``room``."""

    def call() -> Tensor:
        x, out = torch.ones(n), torch.empty(room)
        _copy[(triton.cdiv(n, 16),)](x, out, n, extra, shared, 16)
        return out

    return call


def test_a_sound_kernel_passes() -> None:
    assert torch.equal(watched(copied(N)), torch.ones(N))


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (copied(N - 5, extra=9, room=N - 5), MemoryFault, "store outside of float32"),
        (copied(N, shared=N // 2), Race, "another program has a part"),
        (copied(16, shared=8), Race, "twice"),
        (copied(N - 3), AssertionError, "3 elements not written"),
    ],
    ids=("beyond the end", "same place", "twice in one store", "not written"),
)
def test_wrong_accesses_are_noticed(call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        watched(call)


def test_reading_what_another_program_writes_is_noticed() -> None:
    with pytest.raises(Race, match="another program"), Watch():
        _in_place[(3,)](torch.ones(N), 16)


def test_columns_between_those_of_a_view_are_not_its_own() -> None:
    whole = torch.ones(2, N)
    with pytest.raises(MemoryFault, match="load outside"), Watch():
        _copy[(4,)](whole[:, :16], torch.empty(N), N, 0, N, 16)


def test_every_program_runs_once_in_any_order() -> None:
    first = watched(copied(N))
    with Watch(seed=5) as watch:
        again = copied(N)()
    assert torch.equal(first, again) and watch.loads == watch.stores == 4 * N
