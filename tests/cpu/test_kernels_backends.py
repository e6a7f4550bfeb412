"""Libraries' products on codes: they are given what they read, and chosen with a reason.

Stand-ins act libraries out; what a CPU has is run, and ``meta`` checks shapes. It shows that codes,
scales and groups go where they belong, not that GPUs multiply them: ``tests/gpu``.
"""

import sys
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.kernels.gradients import DeferredSink
from moefold.kernels.quantise.blocks import SCALES
from moefold.kernels.scaled import choose as chooser
from moefold.kernels.scaled.choose import BACKENDS, PRODUCTS, choose_backend
from moefold.kernels.scaled.emulated import Emulated, ProductSpec
from moefold.kernels.scaled.operands import swizzled
from moefold.kernels.scaled.products import (
    QuantisedOperand,
    QuantisedWeight,
    Recipe,
    RoundingSeed,
    scaled_product,
)
from moefold.kernels.scaled.rows import RowRuns, encode_row_ids
from tests.cpu import scaled_stubs

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BY_NAME = {backend.name: backend for backend in BACKENDS}
KINDS = list(SCALES)


def three(recipe: Recipe, dtype: torch.dtype, grouped: bool) -> list[Tensor]:
    """The products of rows with padding; experts' rows in two micro-batches, one expert idle."""
    drawn = torch.Generator().manual_seed(3)

    def numbers(*shape: int) -> Tensor:
        sizes = torch.randint(-6, 7, shape, generator=drawn).float()
        return torch.randn(shape, generator=drawn) * sizes.exp2()

    x, dy, w = numbers(190, 150), numbers(190, 72), numbers(*(3,) * grouped, 72, 150)
    x[170:] = torch.nan
    rows = RowRuns.dense(170, torch.arange(190))
    if grouped:
        sent = torch.cat(
            [encode_row_ids(first, torch.randperm(95, generator=drawn)) for first in (0, 1000)]
        )
        rows = RowRuns.of_groups(torch.tensor([50, 50, 170], dtype=torch.int32), 0, 0, sent)
    x, master = x.to(dtype).requires_grad_(), w.requires_grad_()
    made = QuantisedWeight.of(w.detach(), recipe)
    sink = DeferredSink()
    y = scaled_product(
        x, QuantisedOperand(master, lambda: made, RoundingSeed((1, 2), 3)), rows, sink
    )
    y.backward(dy.to(dtype))
    sink.drain()
    assert x.grad is not None and master.grad is not None
    return [y.detach(), x.grad, master.grad]


def same(found: list[Tensor], want: list[Tensor], bounds: tuple[float, ...]) -> None:
    """Each within its bound, as norms; values lie over 2^±6, so that a wrong scale is large."""
    for name, one, other, bound in zip(PRODUCTS, found, want, bounds, strict=True):
        off = (one.double() - other.double()).norm() / other.double().norm()
        assert off < bound, (name, float(off))


@pytest.fixture
def tried() -> Iterator[None]:
    """While open, libraries are stand-ins on a CPU, and what has been chosen is forgotten."""
    choose_backend.cache_clear()
    with (
        mock.patch.object(F, "scaled_mm", scaled_stubs.scaled_mm),
        mock.patch.object(F, "scaled_grouped_mm", scaled_stubs.scaled_grouped_mm),
        mock.patch("moefold.kernels.scaled.deep_gemm.DEVICE", "cpu"),
        mock.patch.object(
            type(BY_NAME["scaled_grouped_mm"]), "why_unavailable", lambda self, device: ""
        ),
    ):
        yield
    choose_backend.cache_clear()


@pytest.mark.parametrize("grouped", [False, True])
def test_a_cpu_multiplies_whole_matrices_by_the_library(grouped: bool) -> None:
    """E4M3, and E5M2 of gradients; within fp32 sums."""
    recipe = Recipe("fp8_tensor", backend="scaled_mm")
    path = recipe.choose_backend("dw", grouped, torch.empty(0))
    assert path == (BY_NAME["scaled_mm"], "requested")
    want = three(recipe._replace(backend="emulated"), torch.float32, grouped)
    same(three(recipe, torch.float32, grouped), want, (1e-6, 1e-6, 1e-6))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_library_is_given_codes_and_scales_as_it_reads_them(
    kind: str, grouped: bool, tried: None
) -> None:
    """Plants: scales not swizzled; those of the other operand; blocks' rows."""
    recipe = Recipe(kind, backend="scaled_mm")
    with mock.patch.object(type(BY_NAME["scaled_mm"]), "why_unsupported", lambda self, spec: ""):
        for product in PRODUCTS:
            path = recipe.choose_backend(product, grouped, torch.empty(0))
            assert path == (BY_NAME["scaled_mm"], "requested")
        found = three(recipe, torch.float32, grouped)
    same(found, three(Recipe(kind), torch.float32, grouped), (1e-6, 1e-6, 1e-6))


@pytest.mark.parametrize("kind", ["fp8_tensor", "mxfp8"])
def test_the_grouped_library_is_given_all_groups(kind: str, tried: None) -> None:
    """Plants: rows that fill a group are taken for its own; scales of one group for all."""
    backend, dtype = BY_NAME["scaled_grouped_mm"], torch.bfloat16

    def why_unsupported(self: Emulated, spec: ProductSpec) -> str:
        return "" if spec.product == "y" or (spec.product, kind) == ("dx", "mxfp8") else "no"

    with mock.patch.object(type(backend), "why_unsupported", why_unsupported):
        recipe, rows = Recipe(kind, backend=backend.name), torch.empty(0, dtype=dtype)
        assert recipe.choose_backend("y", True, rows).backend is backend
        assert (recipe.choose_backend("dx", True, rows).backend is backend) == (kind == "mxfp8")
        found = three(recipe, dtype, True)
    same(found, three(Recipe(kind), dtype, True), (4e-3, 4e-3, 1e-6))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("revision", list(scaled_stubs.SIGNATURES))
def test_deep_gemm_is_called_as_its_source_has_it(
    revision: str, grouped: bool, tried: None
) -> None:
    """Plants: rows that fill a group are multiplied; its weight's scales by rows."""
    recipe, dtype = Recipe("fp8_block", backend="deep_gemm"), torch.bfloat16
    with mock.patch.dict(sys.modules, deep_gemm=scaled_stubs.deep_gemm(revision)):
        for product in PRODUCTS:
            path = recipe.choose_backend(product, grouped, torch.empty(0, dtype=dtype))
            assert path == (BY_NAME["deep_gemm"], "requested")
        found = three(recipe, dtype, grouped)
    same(found, three(Recipe("fp8_block"), dtype, grouped), (4e-3, 4e-3, 1e-6))


@pytest.mark.skipif(torch.__version__ < "2.13", reason="older ones check no shapes on meta")
@pytest.mark.parametrize("kind", KINDS)
def test_the_library_takes_the_shapes_of_operands(kind: str) -> None:
    meta = torch.device("meta")
    for grouped in (False, True):
        for product in PRODUCTS:
            use = Recipe(kind).product_spec(product, grouped, torch.bfloat16, meta)
            made, weight, groups = chooser._operands(use)
            for one, group in zip(made, groups, strict=True):
                matrix = weight.matrix(group) if product != "dw" and grouped else weight
                y = BY_NAME["scaled_mm"].multiply(one, matrix, torch.float32)
                assert y.shape == (one.shape[0], matrix.shape[1])


def test_scales_lie_where_blackwell_reads_them() -> None:
    scales = torch.randint(0, 255, (140, 5), dtype=torch.uint8)
    flat = swizzled(scales)
    assert flat.shape == (2 * 2 * 512,)
    for row in range(140):
        for block in range(5):
            assert flat[scaled_stubs.swizzled_at(row, block, 5)] == scales[row, block]
    assert int((flat != 0).sum()) == int((scales != 0).sum())
    assert torch.equal(swizzled(torch.stack((scales, scales + 1)))[1], swizzled(scales + 1))


def test_what_is_chosen_has_a_reason() -> None:
    use = Recipe("fp8_block").product_spec("y", True, torch.bfloat16, CPU)
    path = choose_backend("auto", use)
    assert path.backend.name == "emulated" and "libraries on GPUs, not on cpu" in path.reason
    assert choose_backend("deep_gemm", use._replace(dtype=torch.float64)).reason == "fp64 sums"
    for asked, said in {
        "deep_gemm": "runs on NVIDIA.*Install 2.1 or newer from github.com/deepseek-ai/DeepGEMM",
        "scaled_grouped_mm": "needs a GPU. Run on an NVIDIA GPU of sm_90",
    }.items():
        with pytest.raises(ValueError, match=f"backend: {asked} cannot be used: .*{said}.* auto"):
            choose_backend(asked, use)
    with pytest.raises(ValueError, match="No module named 'deep_gemm'"):
        choose_backend("deep_gemm", use._replace(device=CUDA))
    with pytest.raises(ValueError, match="cannot be used: it runs on NVIDIA GPUs and CPUs"):
        choose_backend("scaled_mm", use._replace(device=torch.device("mps")))
    rest = choose_backend("scaled_mm", Recipe("mxfp8").product_spec("y", False, torch.float32, CPU))
    assert rest == (BY_NAME["emulated"], "scaled_mm: it does not support mxfp8 on CPUs")


def test_a_wrong_library_is_not_chosen(tried: None) -> None:
    """Plant: what is tried may be anything."""
    use = Recipe("fp8_tensor").product_spec("dx", True, torch.bfloat16, CPU)

    def refuses(*args: object, **named: object) -> Tensor:
        raise RuntimeError("no kernel image\nis there")

    for library, said in (
        (lambda *a, **b: 1.1 * scaled_stubs.scaled_mm(*a, **b), "relative error of 0.1"),
        (refuses, "no kernel image"),
    ):
        choose_backend.cache_clear()
        with mock.patch.object(F, "scaled_mm", library):
            path = choose_backend("scaled_mm", use)
        assert path.backend.name == "emulated" and path.reason.endswith(said), path
