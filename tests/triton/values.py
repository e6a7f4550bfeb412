"""Runs an operation of own kernels on a CPU, watched, and compares what it returns with fp64."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from moefold.kernels.fused import Op, force_triton
from tests.triton.watch import Watch

Out = TypeVar("Out", Tensor, tuple[Tensor, ...])
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEEDS = (1, None)
"""Of orders of programs; None is as they are numbered, the other never is."""
DEVICE = os.environ.get("KERNEL_TESTS_ON", "")
"""Where kernels run instead of the interpreter: ``cuda``. Watched they can be in it alone."""


@contextmanager
def nan_where_unwritten() -> Iterator[None]:
    """Fill what ``torch.empty`` gives with NaN."""
    torch.use_deterministic_algorithms(True)
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(False)


def watched(call: Callable[[], Out], whole: bool = True, waste: float | None = 1.05) -> Out:
    """Return what ``call`` returns, whatever the order of its programs.

    Where two programs meet in the same bytes a :class:`Watch` raises, but for atomics: these give
    the same bits in two orders.

    Args:
        call: runs operations; what it changes in place it has to copy first.
        whole: whether kernels have to write every element of every result.
        waste: how often bytes may be read and written at most, against each once; None for any.
    """
    out, meets = _run(call, SEEDS[0], whole, waste)
    if meets:
        other, _ = _run(call, SEEDS[1], whole, waste)
        for first, again in zip(_listed(out), _listed(other), strict=True):
            assert torch.equal(bits(first), bits(again)), "the order of programs changes the result"
    return out


def _run(
    call: Callable[[], Out], seed: int | None, whole: bool, waste: float | None
) -> tuple[Out, bool]:
    """Return the results, and whether programs may have met in atomics."""
    if DEVICE:
        with force_triton(True), nan_where_unwritten():
            return call(), True
    with force_triton(True), nan_where_unwritten(), Watch(seed) as watch:
        out = call()
    for tensor in _listed(out) if whole else []:
        assert watch.unwritten(tensor) == 0, f"{watch.unwritten(tensor)} elements not written"
    if waste is not None:
        assert watch.loads + watch.stores <= waste * watch.least, "memory is read again"
    return out, watch.atomics


@contextmanager
def on_device(device: str) -> Iterator[None]:
    """Run operations on copies of their arguments on a device; results and changes come back."""
    here = Op.__call__

    def there(op: Op, *args: Any) -> Any:
        if any(isinstance(arg, Tensor) and arg.is_meta for arg in args):
            return here(op, *args)
        moved = [arg.to(device, copy=True) if isinstance(arg, Tensor) else arg for arg in args]
        out = here(op, *moved)
        for arg, changed in zip(args, moved, strict=True):
            # What is written counts as changed for autograd.
            if isinstance(arg, Tensor) and not torch.equal(bits(arg), bits(changed.cpu())):
                arg.copy_(changed)
        if isinstance(out, Tensor):
            return out.to("cpu")
        return out and tuple(each.to("cpu") for each in out)

    Op.__call__ = there
    try:
        yield
    finally:
        Op.__call__ = here


def _listed(out: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else list(out)


def bits(x: Tensor) -> Tensor:
    """Return the elements as integers, which tell NaN from NaN and zero from zero."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(kinds[x.element_size()])


def assert_rounded(got: Tensor, want: Tensor) -> None:
    """Hold ``got`` to an fp64 result.

    bf16 and fp16: 99 of 100 elements are the result rounded once, and none is further off than its
    neighbour or a millionth of the root mean square. fp32: a relative error of 1e-6 as a whole.
    """
    assert got.shape == want.shape and want.dtype == torch.float64
    assert torch.equal(got.isnan(), want.isnan())
    got, want = got.nan_to_num(0.0), want.nan_to_num(0.0)
    if not got.numel():
        return
    error, size = (got.double() - want).abs(), want.square().mean().sqrt()
    if got.dtype in (torch.float32, torch.float64):
        assert error.square().mean().sqrt() <= 1e-6 * size
        return
    once = want.to(got.dtype)
    apart = (_ranked(got) - _ranked(once)).abs()
    assert ((apart <= 1) | (error <= 1e-6 * size)).all(), f"{apart.max()} units in the last place"
    assert (apart == 0).double().mean() >= 0.99, f"{(apart > 0).double().mean():.1%} are not equal"


def _ranked(x: Tensor) -> Tensor:
    """Number the values of a 16-bit type in their order."""
    number = bits(x).int()
    return torch.where(number < 0, -(number & 0x7FFF), number)
