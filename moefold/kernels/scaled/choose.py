"""Selection of the back end for products of low-precision codes, with its reason."""

import itertools
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.kernels.quantise.blocks import Quantised, encode, format_of
from moefold.kernels.scaled.deep_gemm import DeepGemm
from moefold.kernels.scaled.emulated import Emulated, Use
from moefold.kernels.scaled.scaled_grouped_mm import ScaledGroupedMm
from moefold.kernels.scaled.scaled_mm import ScaledMm

BACKENDS: tuple[Emulated, ...] = (DeepGemm(), ScaledGroupedMm(), ScaledMm(), Emulated())
"""Back ends in order of preference."""
PRODUCTS = ("y", "dx", "dw")
BOUND = 8e-3
"""Largest relative error of a correct back end: that of bf16 and of sums in tensor cores."""


class Path(NamedTuple):
    """Chosen back end of a product, with the reason."""

    backend: Emulated
    why: str


@cache
def choose(asked: str, use: Use) -> Path:
    """Return the first back end that supports a product and passes a numerical test.

    Args:
        asked: ``auto``, or the name of a back end. Sums in fp64 and blocks of unpublished lengths
            are always emulated, and with ``auto`` all products on a CPU.
        use: the product.

    Raises:
        ValueError: the requested back end is not available.
    """
    *others, emulated = BACKENDS
    if use.dtype == torch.float64 or asked == emulated.name:
        return Path(emulated, "requested" if asked == emulated.name else "fp64 sums")
    if asked == "auto" and use.device.type != "cuda":
        return Path(emulated, f"plain torch: auto uses libraries on GPUs, not on {use.device.type}")
    demand(asked, use.device)
    if not use.published:
        return Path(emulated, "libraries support only the published block length")
    preferred = [one for one in others if one.name == asked]
    said = []
    for one in preferred or others:
        if not (why := one.why_not(use) or _wrong(one, use)):
            return Path(one, "; ".join(said) or ("requested" if preferred else "preferred"))
        said.append(f"{one.name}: {why}")
    return Path(emulated, "; ".join(said))


def demand(asked: str, device: torch.device) -> None:
    """Check that the named back end is available for a device.

    Raises:
        ValueError: it is not; the message says how to get it.
    """
    for one in (backend for backend in BACKENDS if backend.name == asked):
        if why := one.missing(device):
            raise ValueError(
                f"train.quantise.backend: {asked} cannot be used: {why}. "
                f"{one.remedy}, or use backend: auto"
            )


def paths(asked: str, use: Use, products: Sequence[str] = PRODUCTS) -> Iterator[str]:
    """Yield descriptions of the back ends of dense and experts' products, with reasons."""
    found: dict[Path, list[str]] = {}
    for grouped, product in itertools.product((False, True), products):
        path = choose(asked, use._replace(product=product, grouped=grouped))
        found.setdefault(path, []).append(f"{product} of experts" if grouped else product)
    for (backend, why), what in found.items():
        yield f"{', '.join(what) if len(found) > 1 else 'all'} {backend.name} ({why})"


def _wrong(backend: Emulated, use: Use) -> str:
    """Return how a back end fails a test with small operands; empty if it is correct."""
    made, weight, groups = _operands(use)
    try:
        given = made, weight, groups, torch.float32 if use.product == "dw" else use.dtype
        found = torch.cat(backend.each(*given)).float()
    except Exception as error:  # libraries raise errors of any type
        return str(error).partition("\n")[0] or type(error).__name__
    want = torch.cat(BACKENDS[-1].each(made, weight, groups, torch.float32))
    off = float((found - want).norm() / want.norm())
    return "" if off < BOUND else f"its products have a relative error of {off:.1g}"


def _operands(use: Use) -> tuple[list[Quantised], Quantised, list[int]]:
    """Return test operands: runs, the matrix or matrices, and the group of each run."""
    drawn = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        sizes = torch.randint(-6, 7, shape, generator=drawn).float()
        return (torch.randn(shape, generator=drawn) * sizes.exp2()).to(use.device)

    rows, gradient, weight = (
        format_of(use.kind, role, use.scales) for role in ("rows", "gradient", "weight")
    )
    if use.product == "dw":
        return [encode(numbers(72, 200), gradient)], encode(numbers(136, 200), rows).mT, [0]
    counts, groups = ([40, 56], [0, 2]) if use.grouped else ([40], [0])
    of_rows = rows if use.product == "y" else gradient
    made = [encode(numbers(count, 392), of_rows) for count in counts]
    lead = (3,) if use.grouped else ()
    if use.product == "y":
        return made, encode(numbers(*lead, 136, 392), weight).mT, groups
    value = numbers(*lead, 392, 136)
    square = weight.rows == weight.columns
    return made, encode(value, weight, -1 if square else -2), groups
