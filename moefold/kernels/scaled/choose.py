"""Selection of the back end for products of low-precision codes, with its reason."""

import itertools
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.kernels.quantise.blocks import Quantised, encode, format_of
from moefold.kernels.scaled.deep_gemm import DeepGemm
from moefold.kernels.scaled.emulated import Emulated, ProductSpec
from moefold.kernels.scaled.scaled_grouped_mm import ScaledGroupedMm
from moefold.kernels.scaled.scaled_mm import ScaledMm

BACKENDS: tuple[Emulated, ...] = (DeepGemm(), ScaledGroupedMm(), ScaledMm(), Emulated())
"""Back ends in order of preference."""
PRODUCTS = ("y", "dx", "dw")
BOUND = 8e-3
"""Largest relative error of a correct back end: that of bf16 and of sums in tensor cores."""


class BackendChoice(NamedTuple):
    """Chosen back end of a product, and the reason."""

    backend: Emulated
    reason: str


@cache
def choose_backend(requested: str, spec: ProductSpec) -> BackendChoice:
    """Return the first back end that supports a product and passes a numerical test.

    Args:
        requested: ``auto``, or the name of a back end. Sums in fp64 and blocks of unpublished
            lengths are always emulated, and with ``auto`` all products on a CPU.
        spec: the product.

    Raises:
        ValueError: the requested back end is not available.
    """
    *others, emulated = BACKENDS
    if spec.dtype == torch.float64 or requested == emulated.name:
        return BackendChoice(emulated, "requested" if requested == emulated.name else "fp64 sums")
    if requested == "auto" and spec.device.type != "cuda":
        return BackendChoice(
            emulated, f"plain torch: auto uses libraries on GPUs, not on {spec.device.type}"
        )
    require_available(requested, spec.device)
    if not spec.published:
        return BackendChoice(emulated, "libraries support only the published block length")
    preferred = [backend for backend in others if backend.name == requested]
    reasons = []
    for backend in preferred or others:
        if not (why := backend.why_unsupported(spec) or _test_failure(backend, spec)):
            reason = "; ".join(reasons) or ("requested" if preferred else "preferred")
            return BackendChoice(backend, reason)
        reasons.append(f"{backend.name}: {why}")
    return BackendChoice(emulated, "; ".join(reasons))


def require_available(requested: str, device: torch.device) -> None:
    """Raise unless the named back end is available for a device.

    Raises:
        ValueError: it is not; the message names the remedy.
    """
    for backend in (candidate for candidate in BACKENDS if candidate.name == requested):
        if why := backend.why_unavailable(device):
            raise ValueError(
                f"train.quantise.backend: {requested} cannot be used: {why}. "
                f"{backend.remedy}, or use backend: auto"
            )


def describe_backends(
    requested: str, spec: ProductSpec, products: Sequence[str] = PRODUCTS
) -> Iterator[str]:
    """Yield descriptions of the back ends for dense and experts' products, with reasons."""
    by_choice: dict[BackendChoice, list[str]] = {}
    for grouped, product in itertools.product((False, True), products):
        choice = choose_backend(requested, spec._replace(product=product, grouped=grouped))
        by_choice.setdefault(choice, []).append(f"{product} of experts" if grouped else product)
    for (backend, why), names in by_choice.items():
        products = ", ".join(names) if len(by_choice) > 1 else "all"
        yield f"{products} {backend.name} ({why})"


def _test_failure(backend: Emulated, spec: ProductSpec) -> str:
    """Return how a back end fails a test with small operands; empty if it passes."""
    rows, weight, groups = _operands(spec)
    try:
        args = rows, weight, groups, torch.float32 if spec.product == "dw" else spec.dtype
        actual = torch.cat(backend.multiply_runs(*args)).float()
    except Exception as error:  # libraries raise errors of any type
        return str(error).partition("\n")[0] or type(error).__name__
    expected = torch.cat(BACKENDS[-1].multiply_runs(rows, weight, groups, torch.float32))
    error = float((actual - expected).norm() / expected.norm())
    return "" if error < BOUND else f"its products have a relative error of {error:.1g}"


def _operands(spec: ProductSpec) -> tuple[list[Quantised], Quantised, list[int]]:
    """Return test operands: runs, the matrix or matrices, and the group of each run."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        exponents = torch.randint(-6, 7, shape, generator=generator).float()
        return (torch.randn(shape, generator=generator) * exponents.exp2()).to(spec.device)

    rows, gradient, weight = (
        format_of(spec.kind, role, spec.scales) for role in ("rows", "gradient", "weight")
    )
    if spec.product == "dw":
        return [encode(numbers(72, 200), gradient)], encode(numbers(136, 200), rows).mT, [0]
    counts, groups = ([40, 56], [0, 2]) if spec.grouped else ([40], [0])
    row_format = rows if spec.product == "y" else gradient
    runs = [encode(numbers(count, 392), row_format) for count in counts]
    batch = (3,) if spec.grouped else ()
    if spec.product == "y":
        return runs, encode(numbers(*batch, 136, 392), weight).mT, groups
    value = numbers(*batch, 392, 136)
    square = weight.rows == weight.columns
    return runs, encode(value, weight, -1 if square else -2), groups
