"""Numbers of few bits on a device: the bits of the host, and the library's products of them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.kernels.gradients import Deferred
from moefold.kernels.quantise.blocks import Quantised, encode, format_of
from moefold.kernels.quantise.elements import E4M3
from moefold.kernels.quantise.hadamard import transform
from moefold.kernels.quantise.philox import chance
from moefold.kernels.scaled.products import (
    Draw,
    NarrowOperand,
    NarrowWeight,
    Recipe,
    scaled_product,
    times,
)
from moefold.kernels.scaled.rows import RowRuns
from tests.quantise_inputs import families

KINDS = ("fp8_tensor", "fp8_block", "mxfp8", "nvfp4")
ROWS, INNER, COLUMNS = 256, 512, 384


def parts(made: Quantised) -> list[Tensor]:
    """Codes and scales as integers, on the host."""
    held = [part for part in (made.codes, made.scales, made.matrix_scale) if part is not None]
    views = {1: torch.uint8, 4: torch.int32}
    return [part.contiguous().view(views[part.itemsize]).cpu() for part in held]


@pytest.mark.parametrize("role", ["rows", "gradient", "weight"])
@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_scales_are_those_of_the_host(kind: str, role: str) -> None:
    """Either way along, by every rule, on numbers of all sorts and with what is not finite."""
    rules = {"fp8_block": ("power", "fp32"), "mxfp8": ("up", "floor")}.get(kind, (None,))
    numbers = families()
    broken = numbers["normal"].clone()
    broken[3, 5], broken[9, 140] = torch.inf, torch.nan
    for name, x in (*numbers.items(), ("broken", broken)):
        for rule in rules:
            for dim in (-1, -2):
                form = format_of(kind, role, rule)
                here, there = encode(x, form, dim), encode(x.cuda(), form, dim)
                if name != "broken":  # a NaN has many bit patterns
                    pairs = zip(parts(here), parts(there), strict=True)
                    assert all(torch.equal(*pair) for pair in pairs), (name, rule, dim)
                same = here.dequantise(), there.dequantise().cpu()
                torch.testing.assert_close(*same, rtol=0, atol=0, equal_nan=True)


def test_draws_and_the_transform_are_those_of_the_host() -> None:
    rows = torch.arange(40) + (3 << 40)
    here = chance(rows, range(3, 77), (11, 5), 9)
    assert torch.equal(here, chance(rows.cuda(), range(3, 77), (11, 5), 9).cpu())
    for x in families().values():
        assert torch.equal(transform(x), transform(x.cuda()).cpu())
    form = format_of("nvfp4", "gradient")
    drawn = chance(torch.arange(16), range(160), (1, 2))
    x = families()["normal"]
    one, other = encode(x, form, -1, drawn), encode(x.cuda(), form, -1, drawn.cuda())
    assert all(torch.equal(a, b) for a, b in zip(parts(one), parts(other), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_products_in_fp64_have_the_bits_of_the_host(kind: str) -> None:
    """Dense and grouped, with their gradients: sums of codes times block scales are exact."""
    drawn = torch.Generator().manual_seed(4)
    x, w, dy = (
        torch.randn(*shape, generator=drawn, dtype=torch.float64)
        for shape in ((48, 64), (3, 32, 64), (48, 32))
    )
    found = []
    for device in ("cpu", "cuda"):
        ends = torch.tensor([17, 17, 45], dtype=torch.int32, device=device)
        rows, master = (one.to(device, copy=True).requires_grad_() for one in (x, w))
        made = NarrowWeight.of(master.detach(), Recipe(kind))
        weight = NarrowOperand(master, lambda made=made: made, Draw((1, 2), 3))
        sink = Deferred()
        y = scaled_product(rows, weight, RowRuns.of_groups(ends, 100), sink)
        y.backward(dy.to(device))
        sink.drain()
        assert rows.grad is not None and master.grad is not None
        found.append([y.detach().cpu(), rows.grad.cpu(), master.grad.cpu()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def operands(kind: str) -> tuple[Quantised, Quantised]:
    """RowRuns [M, K] and a weight [K, N], blocks along K, of numbers over 2^±6."""
    drawn = torch.Generator().manual_seed(2)
    sizes = [torch.randint(-6, 7, s, generator=drawn) for s in ((ROWS, INNER), (COLUMNS, INNER))]
    x, w = (torch.randn(size.shape, generator=drawn) * size.float().exp2() for size in sizes)
    return encode(x.cuda(), format_of(kind, "rows")), encode(w.cuda(), format_of(kind, "weight")).mT


def off(y: Tensor, want: Tensor) -> float:
    return float((y.double() - want).norm() / want.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["fp8_tensor", "fp8_block"])
def test_the_library_computes_from_the_codes_what_the_emulation_does(
    kind: str, dtype: torch.dtype
) -> None:
    """Within its sums: some 13 bits inside of a run of 128, fp32 between them.

    ``fp8_block``'s scales are handed over as they are, and exchanged they must show.
    """
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the library has products with blocks of 128 on Hopper alone")
    x, w = operands(kind)
    want = times(x, w, torch.float64)
    assert x.codes.dtype == w.codes.dtype == E4M3
    bound = 2e-3 if dtype == torch.float32 else 4e-3
    one, other = F.ScalingType.TensorWise, F.ScalingType.TensorWise
    given = [x.scales, w.scales]
    if kind == "fp8_block":
        one, other = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
        # [M, K / 128] and [K / 128, N / 128], each with its first dim next to itself in memory.
        given = [x.scales.mT.contiguous().mT, w.scales.mT.contiguous().mT]
        assert given[0].stride() == (1, ROWS) and given[1].stride() == (1, INNER // 128)
    assert x.codes.is_contiguous() and w.codes.mT.is_contiguous()

    def product(scale_x: Tensor, scale_w: Tensor) -> Tensor:
        return F.scaled_mm(x.codes, w.codes, scale_x, one, scale_w, other, output_dtype=dtype)

    assert off(product(*given), want) < bound
    if kind == "fp8_block":
        turned = given[0].flip(1)  # the scales of other blocks of the same rows
        assert off(product(turned.mT.contiguous().mT, given[1]), want) > 10 * bound
