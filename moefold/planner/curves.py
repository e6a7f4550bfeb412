"""How fast one device is: products by shape, attention by length, memory, launches.

Every curve takes :class:`Rates`, the constants of one device and one software stack, which
``time_constants.json`` holds with the source of each or the fit that it came from.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from moefold.planner.hardware import GRACE

FAMILIES = {
    "H100": "hopper",
    "H200": "hopper",
    "H800": "hopper",
    "H20": "hopper",
    "B200": "blackwell",
    "GB200": "blackwell",
    "B300": "blackwell_ultra",
    "GB300": "blackwell_ultra",
}
"""Devices that share their curves."""
FALLBACK = "hopper"
"""The family as which any other device is planned, less surely: shares of its own peaks."""


class Product(NamedTuple):
    """``count`` groups of an [m, k] by [k, n] product."""

    m: float
    n: float
    k: float
    count: float = 1.0

    @property
    def flops(self) -> float:
        """Multiply-adds counted as 2."""
        return 2.0 * self.m * self.n * self.k * self.count


@dataclass(frozen=True)
class Rates:
    """The constants that hold for one device and one stack."""

    gemm: float
    """Share of a format's peak that an endless product reaches."""
    half: float
    """Size of a dim at which a product loses as much again, in bf16 at 1 PFLOP/s."""
    narrow: float
    """What is left of ``gemm`` where formats are below bf16."""
    memory: float
    """Share of the memory's bandwidth that element-wise kernels reach."""
    scan: float
    """Bytes moved by scans over the sequence, in units of the least."""
    narrow_attention: float
    """Rate of attention in a narrow format, in units of bf16's."""
    quantise: float
    """Bytes moved to quantise a value, in units of the least that is possible."""
    forward_rate: float
    """Share of bf16's peak that attention's forward reaches on endless sequences."""
    forward_half: float
    """Tokens at which it reaches half of that."""
    backward_rate: float
    backward_half: float
    kernel_s: float
    """Device seconds that every kernel takes besides its work."""
    launch_s: float
    """Host seconds per launch."""
    step_s: float
    """Seconds per step of neither products nor exchanges: data, logging, synchronisation."""
    link: float
    """Share of link bandwidth that all-to-all reaches."""
    link_fused: float
    """Share of link bandwidth that exchanges reach which send a row once per rank or node."""
    link_deepep: float
    """Share of link bandwidth that DeepEP reaches."""
    nic: float
    hidden: float
    """Share of exchanges that overlap hides, where there is enough to hide under."""
    hidden_shards: float
    """Share of computing under which gathering of sharded weights hides."""
    device: float
    """Factor of the stack on the device's time outside products and attention."""
    launches: float
    """Factor of the stack on the number of launches."""


Own = tuple[tuple[str, float], ...]
"""Constants by name."""


class Constants:
    """Constants by dotted name: ``hopper.gemm``, ``common.hidden``, ``megatron 26.06.device``."""

    def __init__(self, values: Mapping[str, float], spread: Mapping[str, float]) -> None:
        """Take values by name, and the relative spread of what was predicted with them."""
        self.values, self.spread = dict(values), dict(spread)
        self._made: dict[tuple[str, str, str, Own], Rates] = {}

    def rates(self, device: str, stack: str, release: str, own: Own = ()) -> Rates:
        """Return what holds for a device and a stack's release.

        Args:
            own: constants that were measured on the device itself; they come before all others.
        """
        key = (device, stack, release, own)
        if key not in self._made:
            family, host = FAMILIES.get(device, FALLBACK), "grace" if device in GRACE else "x86"
            software = f"{stack} {self.nearest(stack, release)}".strip()
            scopes = (software, stack, device, family, host, "common", FALLBACK)
            found = {field.name: self._first(field.name, scopes) for field in fields(Rates)}
            self._made[key] = Rates(**found | dict(own))
        return self._made[key]

    def nearest(self, stack: str, release: str) -> str:
        """Return the measured release that stands for one: itself, else the last one before it.

        Releases whose name is no number stand for themselves alone; empty where none does.
        """
        known = sorted(
            name.removesuffix(".device").removeprefix(f"{stack} ")
            for name in self.values
            if name.startswith(f"{stack} ") and name.endswith(".device")
        )
        if release in known:
            return release
        numbered = [one for one in known if one[:1].isdigit()]
        if not numbered or (release and not release[:1].isdigit()):
            return ""
        before = [one for one in numbered if not release or one <= release]
        return before[-1] if before else numbered[0]

    def _first(self, name: str, scopes: tuple[str, ...]) -> float:
        for scope in scopes:
            value = self.values.get(f"{scope}.{name}")
            if value is not None:
                return value
        raise KeyError(f"no constant {name} for any of {', '.join(scopes)}")

    def uncertainty(self, device: str, stack: str, release: str, own: Own = ()) -> float:
        """Return the relative spread of steps on a device and a release: wider where one of them
        was not measured, and widest where neither was.
        """
        software = f"{stack} {release}".strip()
        known = bool(own) or f"{device}.measured" in self.values
        measured = known + (f"{software}.device" in self.values)
        return self.spread[("none", "one", "measured")[measured]]


@cache
def constants() -> Constants:
    """Return the constants that come with the package."""
    text = files("moefold.planner").joinpath("time_constants.json").read_text("utf-8")
    stored = json.loads(text)
    values = {name: entry[0] for name, entry in stored["constants"].items()}
    return Constants(values, stored["spread"])


def product_seconds(one: Product, rates: Rates, peak: float, narrow: bool) -> float:
    """Return the seconds of a product.

    Args:
        peak: FLOP/s of its format.
        narrow: whether the format is below bf16.

    A dim of size s keeps ``s / (s + h)`` of the rate: tiles that are not full, and the ends of the
    loop over k. h grows with the peak, because a faster device is done with a tile sooner.
    """
    share = rates.gemm * (rates.narrow if narrow else 1.0)
    h = rates.half * peak / 1e15
    loss = (1.0 + h / one.m) * (1.0 + h / one.n) * (1.0 + h / one.k)
    return one.flops * loss / (peak * share)


def attention_seconds(
    flops: float, length: float, dim: int, rates: Rates, peak: float, backward: bool
) -> float:
    """Return the seconds of attention's own products.

    Args:
        flops: those that the mask leaves.
        length: tokens of a sequence that a rank attends over.
        dim: of a head; below 128 the units that take exponents bind, in proportion.
    """
    rate = rates.backward_rate if backward else rates.forward_rate
    half = rates.backward_half if backward else rates.forward_half
    share = rate / (1.0 + half / length) * min(1.0, dim / 128.0)
    return flops / (peak * share)


def memory_seconds(moved: float, rates: Rates, bandwidth: float) -> float:
    """Return the seconds of element-wise kernels that move so many bytes."""
    return moved / (bandwidth * rates.memory)
