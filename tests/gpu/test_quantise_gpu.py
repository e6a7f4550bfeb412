"""Numbers of few bits on a device: the bits of the host, and the library's products of them."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moefold.kernels.gradients import DeferredSink
from moefold.kernels.quantise.blocks import Quantised, encode, format_of
from moefold.kernels.quantise.hadamard import transform
from moefold.kernels.quantise.philox import chance
from moefold.kernels.scaled import choose as chooser
from moefold.kernels.scaled.choose import BACKENDS, PRODUCTS
from moefold.kernels.scaled.products import (
    QuantisedOperand,
    QuantisedWeight,
    Recipe,
    RoundingSeed,
    scaled_product,
)
from moefold.kernels.scaled.rows import RowRuns
from moefold.kernels.scaled.scaled_mm import MIN_CAPABILITY
from tests.gpu.stand_in import HAS_DEVICE
from tests.quantise_inputs import families

KINDS = ("fp8_tensor", "fp8_block", "mxfp8", "nvfp4")


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
    numbers = families() if HAS_DEVICE else {"normal": families()["normal"]}
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
        made = QuantisedWeight.of(master.detach(), Recipe(kind))
        weight = QuantisedOperand(master, lambda made=made: made, RoundingSeed((1, 2), 3))
        sink = DeferredSink()
        y = scaled_product(rows, weight, RowRuns.of_groups(ends, 100), sink)
        y.backward(dy.to(device))
        sink.drain()
        assert rows.grad is not None and master.grad is not None
        found.append([y.detach().cpu(), rows.grad.cpu(), master.grad.cpu()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.real_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_back_ends_compute_from_the_codes_what_the_emulation_does(
    kind: str, dtype: torch.dtype
) -> None:
    """Each that takes a product: within fp32 sums, of tensor cores some 13 bits in a run of 128,
    and the rounding of bf16. What is refused, or is wrong, is told with its reason.
    """
    device, took = torch.device("cuda"), set[str]()
    for grouped in (False, True):
        for product in PRODUCTS:
            use = Recipe(kind).product_spec(product, grouped, dtype, device)
            for backend in BACKENDS[:-1]:
                if not backend.why_unsupported(use):
                    assert not chooser._test_failure(backend, use), (backend.name, use)
                    took.add(backend.name)
    if torch.cuda.get_device_capability() >= MIN_CAPABILITY[kind] and kind != "fp8_block":
        assert "scaled_mm" in took


@pytest.mark.real_device
def test_the_library_reads_scales_by_its_order() -> None:
    """Those of other blocks of the same rows must show."""
    use = Recipe("fp8_block").product_spec("y", False, torch.bfloat16, torch.device("cuda"))
    backend = BACKENDS[2]
    if why := backend.why_unsupported(use):
        pytest.skip(why)
    (x,), w, _ = chooser._operands(use)
    turned = replace(x, scales=x.scales.flip(1))
    want = BACKENDS[-1].multiply(x, w, torch.float64)
    assert off(backend.multiply(x, w, torch.float32), want) < 2e-3
    assert off(backend.multiply(turned, w, torch.float32), want) > 2e-2


def off(y: Tensor, want: Tensor) -> float:
    return float((y.double() - want).norm() / want.norm())
