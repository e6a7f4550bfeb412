"""Own grouped products against fp64, on ragged groups, in memory full of NaN."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from moefold.kernels.fused import force_triton
from moefold.kernels.grouped import fused, loop
from moefold.kernels.grouped.choose import choose_kernel
from moefold.kernels.grouped.fused import ProductTile
from tests.triton.values import assert_rounded, watched
from tests.triton.watch import MemoryFault, Watch

# Groups' rows, rows behind the last, I and O.
SHAPES = {
    "ragged": ((0, 19, 0, 5, 1), 3, 40, 24),
    "one has all": ((0, 0, 20), 0, 32, 32),
    "odd": ((3, 17, 0, 2), 4, 19, 21),
    "no rows": ((0, 0), 5, 16, 16),
    "nothing": ((0, 0), 0, 16, 16),
}

CASES = [("ragged", torch.float16), *((shape, torch.bfloat16) for shape in SHAPES)]
CASES += [("odd", torch.float32), ("nothing", torch.float32)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiles that the interpreter gets through, several of each dim."""
    tiles = {2: ProductTile(16, 32, 32, 4, 2), 4: ProductTile(32, 16, 16, 4, 2)}
    monkeypatch.setattr(fused, "TILES", tiles)
    monkeypatch.setattr(fused, "WAVE_ROW_TILES", 2)
    with force_triton(True):
        yield


def drawn(shape: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return rows, weights, gradients of the results, ends of groups, and a matrix per group."""
    counts, left, width, out = SHAPES[shape]
    g = torch.Generator().manual_seed(width)
    live, groups = sum(counts), len(counts)
    x_RI = torch.randn(live + left, width, generator=g).to(dtype)
    dy_RO = torch.randn(live + left, out, generator=g).to(dtype)
    x_RI[live:], dy_RO[live:] = torch.nan, torch.nan
    w_EOI = torch.randn(groups, out, width, generator=g).mul_(width**-0.5).to(dtype)
    into_EOI = torch.randn(groups, out, width, generator=g)
    return x_RI, w_EOI, dy_RO, torch.tensor(counts).cumsum(0).to(torch.int32), into_EOI


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_products_are_those_of_fp64(shape: str, dtype: torch.dtype) -> None:
    x_RI, w_EOI, dy_RO, offs_E, _ = drawn(shape, dtype)
    live = int(offs_E[-1])
    x, w, dy = x_RI.double(), w_EOI.double(), dy_RO.double()
    y_RO = watched(lambda: fused.product(x_RI, w_EOI, offs_E), whole=False, waste=None)
    assert_rounded(y_RO[:live], loop.product(x, w, offs_E)[:live])
    dx_RI = watched(lambda: fused.input_gradient(dy_RO, w_EOI, offs_E), whole=False, waste=None)
    assert_rounded(dx_RI[:live], loop.input_gradient(dy, w, offs_E)[:live])
    # What nobody owns stays as memory was.
    assert bool(y_RO[live:].isnan().all()) and bool(dx_RI[live:].isnan().all())


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_weight_gradients_are_sums_in_fp32(shape: str, dtype: torch.dtype) -> None:
    x_RI, _, dy_RO, offs_E, into_EOI = drawn(shape, dtype)
    want_EOI = loop.weight_gradient(dy_RO.double(), x_RI.double(), offs_E, None)
    fresh = watched(lambda: fused.weight_gradient(dy_RO, x_RI, offs_E, None), waste=None)
    assert fresh.dtype == torch.float32
    assert_rounded(fresh, want_EOI)

    def added() -> Tensor:
        return fused.weight_gradient(dy_RO, x_RI, offs_E, into_EOI.clone())

    got_EOI = watched(added, whole=False, waste=None)
    assert_rounded(got_EOI, want_EOI + into_EOI)
    empty_E = offs_E.diff(prepend=offs_E.new_zeros(1)) == 0
    assert bool((fresh[empty_E] == 0).all()) and torch.equal(got_EOI[empty_E], into_EOI[empty_E])


def test_a_sum_over_many_rows_keeps_what_bf16_would_lose() -> None:
    """513 rows of ones: a sum rounded to bf16 underway stands still at 256, rounded last at 512."""
    ones_RX = torch.ones(513, 16, dtype=torch.bfloat16)
    offs_E = torch.tensor([513], dtype=torch.int32)
    for kernel in (
        choose_kernel("triton", torch.bfloat16, 16),
        choose_kernel("grouped", torch.bfloat16, 16),
    ):
        into_EOI = torch.ones(1, 16, 16)
        got = kernel.weight_gradient(ones_RX, ones_RX, offs_E, into_EOI)
        assert got is into_EOI and bool((into_EOI == 514).all()), kernel.name


def test_a_gradient_goes_into_a_view_of_a_larger_buffer() -> None:
    x_RI, _, dy_RO, offs_E, _ = drawn("ragged", torch.bfloat16)
    buffer = torch.zeros(5, 34, 40)
    view_EOI = buffer[:, 5:29]
    with Watch():
        fused.weight_gradient(dy_RO, x_RI, offs_E, view_EOI)
    assert torch.equal(view_EOI, fused.weight_gradient(dy_RO, x_RI, offs_E, None))
    assert not buffer[:, :5].any() and not buffer[:, 29:].any()


def test_a_groups_place_is_counted_in_64_bits() -> None:
    """Groups that lie 2**30 elements apart: the checker says where the third was looked for."""
    x_RI, w_EOI, dy_RO, offs_E, into_EOI = drawn("one has all", torch.float32)
    far, dims = 2**30, (3, 32, 32)
    with Watch(None), pytest.raises(MemoryFault, match=r"element 2\d{9}$"):
        fused._product[(8,)](
            x_RI, w_EOI, offs_E, dy_RO, *dims, far, 32, 1, 16, 16, 16, 4, 8
        )  # fmt: skip
    with Watch(None), pytest.raises(MemoryFault, match=r"element 2\d{9}$"):
        fused._weight_gradient[(1, 1, 3)](
            dy_RO, x_RI, offs_E, into_EOI, 32, 32, far, 32, 1, True, 16, 16, 16
        )  # fmt: skip


def test_torch_knows_the_operations() -> None:
    x_RI, w_EOI, dy_RO, offs_E, into_EOI = drawn("one has all", torch.float32)
    torch.library.opcheck(fused.product.overload, (x_RI, w_EOI, offs_E))
    torch.library.opcheck(fused.gradient.overload, (dy_RO, x_RI, offs_E))
    torch.library.opcheck(fused.gradient_.overload, (into_EOI, dy_RO, x_RI, offs_E))
