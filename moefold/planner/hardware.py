"""Devices and clusters as data: ``devices.json`` holds each number with its source. Also what was
measured on one machine, a CPU by ``moefold bench`` or a GPU, by the rates in its file.
"""

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from moefold.files import folder_for, write_text

Format = Literal["fp32", "bf16", "fp8", "fp4"]
"""Formats of dense products that peaks are stated for."""
FORMAT_OF: Mapping[str, Format] = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp8_tensor": "fp8",
    "fp8_block": "fp8",
    "mxfp8": "fp8",
    "nvfp4": "fp4",
}
"""The format whose peak a recipe's products have."""
CPU = "CPU"
MACHINE_FORM = 1
"""Version of the file of a measured machine; another one is not read."""


@dataclass(frozen=True)
class Device:
    """One kind of accelerator, or a CPU. Rates are per device and per second."""

    name: str
    peaks: tuple[tuple[Format, float], ...]
    """FLOP/s of dense products by format; a format it lacks is not there."""
    memory_bytes: int
    """What a program can allocate: the nominal size less what driver and firmware take."""
    memory_bandwidth: float
    """Bytes/s."""
    link_bandwidth: float = 0.0
    """Bytes/s in one direction to the other devices of its domain; 0 for a CPU."""
    nic_bandwidth: float = 0.0
    """Bytes/s in one direction to devices outside its domain."""
    domain: int = 1
    """Devices that its fast links join, as sold."""
    host_bandwidth: float = 0.0
    """Bytes/s in one direction to host memory."""
    watts: float = 0.0
    """Power of the board, at its limit."""
    sold_gb: float = 0.0
    """Memory by the name it is sold under; what can be allocated is counted in bytes."""
    rates: tuple[tuple[str, tuple[tuple[str, float], ...]], ...] = ()
    """For a device that was measured itself: by recipe, the constants of
    :class:`moefold.planner.curves.Rates` that hold for it instead of its family's."""

    @property
    def cpu(self) -> bool:
        """Whether it is a processor, on which nothing is launched ahead."""
        return self.name == CPU

    @property
    def size(self) -> str:
        """Its memory as people call it, such as ``80 GB``."""
        return f"{self.sold_gb or self.memory_bytes / 1e9:.0f} GB"

    def peak(self, format: Format) -> float:
        """Return FLOP/s of dense products; a format it lacks runs as the next wider one."""
        known = dict(self.peaks)
        wider: tuple[Format, ...] = ("fp4", "fp8", "bf16", "fp32")
        for name in wider[wider.index(format) :]:
            if name in known:
                return known[name]
        raise ValueError(f"{self.name} has no peak for {format} or any wider format")


@dataclass(frozen=True)
class Cluster:
    """A number of equal devices."""

    device: Device
    devices: int
    per_node: int
    """Devices that share a host."""
    domain: int
    """Devices that the fast links join; at least a node's where the node has such links."""


@cache
def catalogue() -> dict[str, Device]:
    """Return every known device by its name."""
    text = files("moefold.planner").joinpath("devices.json").read_text("utf-8")
    return {name: _device(name, entry) for name, entry in json.loads(text)["devices"].items()}


def _device(name: str, entry: dict[str, Any]) -> Device:
    """Read an entry: every value is ``[number, source]``."""
    peaks = tuple((key, pair[0]) for key, pair in entry["peaks"].items())
    return Device(name, peaks, **{key: pair[0] for key, pair in entry.items() if key != "peaks"})


def device(name: str) -> Device:
    """Return a device by its name in any case, such as ``h100``.

    Raises:
        ValueError: where there is none, with those there are.
    """
    known = {key.lower(): found for key, found in catalogue().items()}
    if name.lower() not in known:
        raise ValueError(f"no device is called {name!r}; there are {', '.join(catalogue())}")
    return known[name.lower()]


def sold_as(name: str) -> Device | None:
    """Return the device that a driver calls ``name``, such as ``NVIDIA H100 80GB HBM3``.

    None where it is not known. Boards for PCIe slots have lower rates under the same name.
    """
    words = re.split(r"[^A-Z0-9]+", name.upper())
    if {"PCIE", "NVL"} & {*words}:
        return None
    return next((one for key, one in catalogue().items() if key.upper() in words), None)


def cluster(text: str) -> Cluster:
    """Return the cluster that a text such as ``h100x256`` names.

    Args:
        text: device, ``x`` and number; or ``cpu``, this machine by the file that ``moefold bench``
            writes unless told otherwise; or the path of a ``.json`` file of a measured machine,
            one of it unless ``x`` and a number follow.

    Raises:
        ValueError: where the text is no such thing.
    """
    parts = re.fullmatch(r"(.+)x(\d*[1-9]\d*)", text, re.IGNORECASE)
    name, number = (parts[1], int(parts[2])) if parts else (text, 1)
    if text.lower() == "cpu" or name.endswith(".json"):
        found = Machine.read(usual_file() if text.lower() == "cpu" else Path(name)).device
    elif parts:
        found = device(name)
    else:
        raise ValueError(
            f"cluster {text!r}: device, x and number, such as h100x256; or cpu, this machine as "
            "`moefold bench` measured it"
        )
    if number > 1 and not found.link_bandwidth:
        raise ValueError(f"cluster {text!r}: of {found.name} one was measured, and no link of it")
    host = 4 if found.name in GRACE else min(8, found.domain)
    return Cluster(found, number, host, found.domain)


GRACE = ("GB200", "GB300")
"""Devices sold four to a host, in racks that fast links join."""


def resized(one: Device, memory_bytes: int) -> Device:
    """Return a device with another memory, such as a 24 GB card of the same kind."""
    return replace(one, memory_bytes=memory_bytes, sold_gb=memory_bytes / 1e9)


def processor(
    peak: float, memory_bandwidth: float, memory_bytes: int, bf16: float | None = None
) -> Device:
    """Return a CPU as one device.

    Args:
        peak: FLOP/s of large fp32 products.
        memory_bandwidth: bytes/s.
        memory_bytes: what a process may take.
        bf16: FLOP/s of large bfloat16 products; None is as fp32.
    """
    peaks: tuple[tuple[Format, float], ...] = (("fp32", peak), ("bf16", bf16 or peak))
    return Device(CPU, peaks, memory_bytes, memory_bandwidth)


@dataclass(frozen=True)
class Machine:
    """One thread of a CPU, or one device, as it was measured."""

    name: str
    """What it calls itself."""
    threads: int
    software: str
    """Version of torch: a new one is another machine."""
    fp32: float
    """FLOP/s of large products."""
    bf16: float
    bandwidth: float
    """Bytes/s of large element-wise sums."""
    memory_bytes: int
    rates: Mapping[str, Mapping[str, float]]
    """Constants of the time model by format (``fp32``, ``bf16``) and by their names in
    :class:`moefold.planner.curves.Rates`."""
    tables: Mapping[str, Any] = field(default_factory=dict)
    """What the rates come from, for a reader."""
    gpu: bool = False
    """Whether it is a GPU. One that is sold has the links of its kind, which were not measured."""

    @property
    def device(self) -> Device:
        """The machine as a device with its own rates."""
        found = processor(self.fp32, self.bandwidth, self.memory_bytes, self.bf16)
        if self.gpu:
            sold = sold_as(self.name) or Device(self.name, (), 0, 0.0)
            peaks = tuple((dict(sold.peaks) | dict(found.peaks)).items())
            sizes = found.memory_bytes, found.memory_bandwidth
            found = replace(sold, peaks=peaks, memory_bytes=sizes[0], memory_bandwidth=sizes[1])
        rates = tuple((recipe, tuple(known.items())) for recipe, known in self.rates.items())
        return replace(found, rates=rates)

    @property
    def cluster(self) -> Cluster:
        """The machine as a cluster of one device."""
        return Cluster(self.device, 1, 1, 1)

    def write(self, file: Path) -> None:
        """Write the file, its folder too."""
        text = json.dumps({"form": MACHINE_FORM, **asdict(self)}, indent=1)
        with folder_for(file.parent):
            write_text(file, text + "\n")

    @classmethod
    def read(cls, file: Path) -> "Machine":
        """Read a file.

        Raises:
            ValueError: where it is not such a file; ``moefold bench`` writes one.
        """
        if not file.exists():
            raise ValueError(f"{file} is not there: `moefold bench` measures this machine into it")
        try:
            stored = json.loads(file.read_text("utf-8"))
            if stored.pop("form") != MACHINE_FORM:
                raise KeyError("form")
            found = cls(**stored)
            sizes = found.fp32, found.bf16, found.bandwidth, found.memory_bytes
            if not all(0 < size < math.inf for size in sizes) or not found.device.peaks:
                raise ValueError
            return found
        except (ValueError, AttributeError, KeyError, TypeError):
            text = f"{file} is not what `moefold bench` writes: run it again"
            raise ValueError(text) from None


def usual_file() -> Path:
    """Return where a user's machine file lies unless said otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "moefold" / "machine.json"
