"""Performance curves of one device: products by shape, attention by length, memory, launches.

Every curve takes :class:`Rates`, the constants of one device and one software stack, from
``time_constants.json``, which states the source or fit of each.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from moefold.planner.hardware import Device, catalogue

FAMILIES = {
    "H100": "hopper",
    "H200": "hopper",
    "H800": "hopper",
    "H20": "hopper",
    "B200": "blackwell",
    "GB200": "blackwell",
    "B300": "blackwell_ultra",
    "GB300": "blackwell_ultra",
    "GH200": "hopper",
    "RTX5090": "blackwell",
    "MI300X": "cdna",
    "MI325X": "cdna",
    "MI355X": "cdna",
}
"""Family of each device; the devices of a family have common curves."""
FALLBACK = "hopper"
"""Family of all other devices, relative to their own peaks and with a larger uncertainty."""


class Product(NamedTuple):
    """``count`` matrix products of [m, k] by [k, n]."""

    m: float
    n: float
    k: float
    count: float = 1.0

    @property
    def flops(self) -> float:
        """FLOPs, a multiply-add counted as 2."""
        return 2.0 * self.m * self.n * self.k * self.count


@dataclass(frozen=True)
class Rates:
    """Constants for one device and one software stack."""

    gemm: float
    """Share of a format's peak that an infinitely large product reaches."""
    half: float
    """Size of a dim at which a product takes twice as long per FLOP, in bf16 at 1 PFLOP/s."""
    narrow: float
    """Factor on ``gemm`` for formats below bf16."""
    memory: float
    """Share of memory bandwidth that element-wise kernels reach."""
    scan: float
    """Bytes moved by scans over the sequence, relative to the minimum."""
    narrow_attention: float
    """Rate of attention in a narrow format relative to bf16."""
    quantise: float
    """Bytes moved to quantise a value, relative to the minimum."""
    forward_rate: float
    """Share of bf16's peak that attention's forward reaches on infinitely long sequences."""
    forward_half: float
    """Tokens at which attention's forward reaches half of ``forward_rate``."""
    backward_rate: float
    backward_half: float
    kernel_s: float
    """Fixed device seconds of every kernel."""
    launch_s: float
    """Host seconds per launch."""
    step_s: float
    """Fixed seconds per step: data, logging, synchronisation."""
    link: float
    """Share of link bandwidth that all-to-all reaches."""
    link_fused: float
    """Share of link bandwidth reached by exchanges that send a row once per rank or node."""
    link_deepep: float
    """Share of link bandwidth that DeepEP reaches."""
    nic_exchange: float
    """Share of a NIC's rate that exchanges with experts reach."""
    nic_gather: float
    """Share of a NIC's rate that gathers and reduce-scatters reach."""
    nic_context: float
    """Share of a NIC's rate that context ranks reach with keys, values and heads."""
    permute: float
    """Bytes moved to sort rows by expert and back, relative to one read and write for each."""
    hidden: float
    """Share of exchanges that overlap hides, where there is enough compute."""
    hidden_shards: float
    """Share of compute behind which gathering of sharded weights can be hidden."""
    device: float
    """Factor of the stack on device time outside products and attention."""
    launches: float
    """Factor of the stack on the number of launches."""


MeasuredRates = tuple[tuple[str, float], ...]
"""Constants by name."""


class Constants:
    """Constants by dotted name: ``hopper.gemm``, ``common.hidden``, ``megatron 26.06.device``."""

    def __init__(self, values: Mapping[str, float], spread: Mapping[str, float]) -> None:
        """Store values by name, and the relative spread of predictions made with them."""
        self.values = dict(values)
        self.spread = dict(spread)
        self._cache: dict[tuple[str, str, str, MeasuredRates, str, str], Rates] = {}

    def rates(
        self,
        device: str,
        stack: str,
        release: str,
        measured: MeasuredRates = (),
        described: Device | None = None,
    ) -> Rates:
        """Return the constants for a device and a stack's release.

        Args:
            measured: constants measured on the device itself, which take precedence.
            described: the device, if the catalogue may not have it.
        """
        known = described or catalogue().get(device)
        host = known.host if known else "x86"
        family = (known.curves if known else "") or FAMILIES.get(device, FALLBACK)
        key = (device, stack, release, measured, host, family)
        if key not in self._cache:
            software = f"{stack} {self.nearest_release(stack, release)}".strip()
            scopes = (
                f"{software} {host}", software, f"{stack} {host}", stack,
                device, family, host, "common", FALLBACK,
            )  # fmt: skip
            constants = {field.name: self._lookup(field.name, scopes) for field in fields(Rates)}
            if unknown := sorted(dict(measured).keys() - constants.keys()):
                raise ValueError(
                    f"unknown names of measured rates of {device}: {', '.join(unknown)}; run "
                    "`moefold bench` again"
                )
            self._cache[key] = Rates(**constants | dict(measured))
        return self._cache[key]

    def nearest_release(self, stack: str, release: str) -> str:
        """Return the measured release to use for a release: itself, else the last one before it.

        A release that is not a number matches only itself; empty if there is no match.
        """
        prefix = f"{stack} "
        suffix = ".device"
        names = [n for n in self.values if n.startswith(prefix) and n.endswith(suffix)]
        releases = sorted(name.removesuffix(suffix).removeprefix(prefix) for name in names)
        if release in releases:
            return release
        numbered = [known for known in releases if known[:1].isdigit()]
        if not numbered or (release and not release[:1].isdigit()):
            return ""
        earlier = [known for known in numbered if not release or known <= release]
        return earlier[-1] if earlier else numbered[0]

    def has_measured(self, device: str) -> bool:
        """Return whether runs on a device of this name were measured."""
        return f"{device}.measured" in self.values

    def _lookup(self, name: str, scopes: tuple[str, ...]) -> float:
        for scope in scopes:
            value = self.values.get(f"{scope}.{name}")
            if value is not None:
                return value
        raise KeyError(f"no constant {name} for any of {', '.join(scopes)}")

    def uncertainty(
        self, device: str, stack: str, release: str, measured: MeasuredRates = ()
    ) -> float:
        """Return the relative spread of predicted steps: wider where device or release was not
        measured, and widest where neither was.
        """
        software = f"{stack} {release}".strip()
        device_measured = bool(measured) or self.has_measured(device)
        num_measured = device_measured + (f"{software}.device" in self.values)
        return self.spread[("none", "one", "measured")[num_measured]]


@cache
def constants() -> Constants:
    """Return the constants of the package."""
    text = files("moefold.planner").joinpath("time_constants.json").read_text("utf-8")
    stored = json.loads(text)
    values = {name: entry[0] for name, entry in stored["constants"].items()}
    return Constants(values, stored["spread"])


def device_note(device: Device) -> str:
    """Return whose curves a device is planned with, where it was not measured; otherwise empty."""
    if device.cpu or device.rates or constants().has_measured(device.name):
        return ""
    family = device.curves or FAMILIES.get(device.name, FALLBACK)
    shares = "AMD's largest products and otherwise Hopper" if family == "cdna" else family.title()
    return (
        f"{device.name}: rates, memory and links are from the data sheet, not measured; the shares "
        f"of them that kernels reach are those of {shares.replace('_', ' ')}"
    )


def product_seconds(product: Product, rates: Rates, peak: float, narrow: bool) -> float:
    """Return the seconds of a product.

    A dim of size s reaches ``s / (s + h)`` of the rate, because of partial tiles and of the ends of
    the loop over k. h grows with the peak, as a faster device completes a tile sooner.

    Args:
        peak: FLOP/s of the product's format.
        narrow: whether the format is below bf16.
    """
    share = rates.gemm * (rates.narrow if narrow else 1.0)
    h = rates.half * peak / 1e15
    loss = (1.0 + h / product.m) * (1.0 + h / product.n) * (1.0 + h / product.k)
    return product.flops * loss / (peak * share)


def attention_seconds(
    flops: float, length: float, dim: int, rates: Rates, peak: float, backward: bool
) -> float:
    """Return the seconds of attention without its projections.

    Args:
        flops: FLOPs of the unmasked pairs.
        length: tokens of a sequence that a rank attends over.
        dim: width of a head; below 128 exponentials limit the rate, in proportion.
    """
    rate = rates.backward_rate if backward else rates.forward_rate
    half = rates.backward_half if backward else rates.forward_half
    share = rate / (1.0 + half / length) * min(1.0, dim / 128.0)
    return flops / (peak * share)


def memory_seconds(moved: float, rates: Rates, bandwidth: float) -> float:
    """Return the seconds of element-wise kernels that move ``moved`` bytes."""
    return moved / (bandwidth * rates.memory)
