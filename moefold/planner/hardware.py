"""Devices and clusters as data, each number with its source in ``devices.json``; and the measured
rates of one machine, a CPU (``moefold bench``) or a GPU, in a file.
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
"""Formats of dense products for which peaks are stated."""
FORMAT_OF: Mapping[str, Format] = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp8_tensor": "fp8",
    "fp8_block": "fp8",
    "mxfp8": "fp8",
    "nvfp4": "fp4",
}
"""Format of a recipe's products, by whose peak they are planned."""
CPU = "CPU"
MAX_DEVICES = 1_000_000
"""Most devices of a cluster that is planned: more than any has, and searches still end."""
MACHINE_FILE_VERSION = 1
"""Version of the file format of measured machines; other versions are rejected."""


@dataclass(frozen=True)
class Device:
    """One kind of accelerator, or a CPU."""

    name: str
    peaks: tuple[tuple[Format, float], ...]
    """FLOP/s of dense products by format, without formats that the device lacks."""
    memory_bytes: int
    """Memory that a program can allocate: the nominal size less that of driver and firmware."""
    memory_bandwidth: float
    """Bytes/s."""
    link_bandwidth: float = 0.0
    """Bytes/s in one direction to the other devices of its domain; 0 for a CPU."""
    nic_bandwidth: float = 0.0
    """Bytes/s in one direction to devices outside its domain."""
    domain: int = 1
    """Devices that its fast links connect, as sold."""
    host_bandwidth: float = 0.0
    """Bytes/s in one direction to host memory."""
    watts: float = 0.0
    """Power limit of the board."""
    nominal_gb: float = 0.0
    """Nominal memory in GB."""
    rates: tuple[tuple[str, tuple[tuple[str, float], ...]], ...] = ()
    """For a measured device, by recipe: constants of :class:`moefold.planner.curves.Rates` that
    replace those of its family."""

    @property
    def cpu(self) -> bool:
        """Whether it is a CPU, which has no asynchronous kernel launches."""
        return self.name == CPU

    @property
    def size(self) -> str:
        """Nominal memory as text, such as ``80 GB``."""
        return f"{self.nominal_gb or self.memory_bytes / 1e9:.0f} GB"

    def peak(self, format: Format) -> float:
        """Return FLOP/s of dense products; a missing format has the peak of the next wider one."""
        known = dict(self.peaks)
        wider: tuple[Format, ...] = ("fp4", "fp8", "bf16", "fp32")
        for name in wider[wider.index(format) :]:
            if name in known:
                return known[name]
        raise ValueError(f"{self.name} has no known peak rate in {format} or any wider format")


@dataclass(frozen=True)
class Cluster:
    """A number of equal devices."""

    device: Device
    devices: int
    per_node: int
    """Devices per host."""
    domain: int
    """Devices that fast links connect; at least those of a node, if the node has such links."""


@cache
def catalogue() -> dict[str, Device]:
    """Return every known device by name."""
    text = files("moefold.planner").joinpath("devices.json").read_text("utf-8")
    devices = dict[str, Device]()
    for name, entry in json.loads(text)["devices"].items():
        # Every value of an entry is ``[number, source]``.
        peaks = tuple((key, pair[0]) for key, pair in entry.pop("peaks").items())
        devices[name] = Device(name, peaks, **{key: pair[0] for key, pair in entry.items()})
    return devices


def device_by_name(name: str) -> Device:
    """Return a device by its case-insensitive name, such as ``h100``.

    Raises:
        ValueError: there is none; the message lists all devices.
    """
    devices = {key.lower(): device for key, device in catalogue().items()}
    if name.lower() not in devices:
        raise ValueError(f"unknown device {name!r}; known are {', '.join(catalogue())}")
    return devices[name.lower()]


def find_device(name: str) -> Device | None:
    """Return the device for a driver's name, such as ``NVIDIA H100 80GB HBM3``, or None.

    PCIe and NVL boards are not recognised, as they have lower rates than others of their name.
    """
    words = re.split(r"[^A-Z0-9]+", name.upper())
    if {"PCIE", "NVL"} & {*words}:
        return None
    return next((device for key, device in catalogue().items() if key.upper() in words), None)


def parse_cluster(text: str) -> Cluster:
    """Parse the name of a cluster, such as ``h100x256``.

    Args:
        text: device, ``x`` and number; or ``cpu``, this machine by the default file of ``moefold
            bench``; or the path of a measured machine's ``.json`` file, optionally followed by
            ``x`` and a number.

    Raises:
        ValueError: the text names no cluster.
    """
    parts = re.fullmatch(r"(.+)x(\d*[1-9]\d*)", text, re.IGNORECASE)
    name, number = (parts[1], int(parts[2])) if parts else (text, 1)
    if text.lower() == "cpu" or name.endswith(".json"):
        device = Machine.read(
            default_machine_file() if text.lower() == "cpu" else Path(name)
        ).device
    elif parts:
        device = device_by_name(name)
    else:
        raise ValueError(
            f"cluster {text!r}: must be a device, x and a number, such as h100x256; or cpu or a "
            ".json file, as measured by `moefold bench`"
        )
    if number > MAX_DEVICES:
        raise ValueError(f"cluster {text!r}: must have at most {MAX_DEVICES:,} devices")
    if number > 1 and not device.link_bandwidth:
        raise ValueError(f"cluster {text!r}: must be one {device.name}, as no link rate is known")
    per_node = 4 if device.name in GRACE_DEVICES else min(8, device.domain)
    return Cluster(device, number, per_node, device.domain)


GRACE_DEVICES = ("GB200", "GB300")
"""Devices sold with four per host, in racks that fast links connect."""


def with_memory(device: Device, memory_bytes: int) -> Device:
    """Return a device with another memory size, such as a 24 GB card of its kind."""
    return replace(device, memory_bytes=memory_bytes, nominal_gb=memory_bytes / 1e9)


def cpu_device(
    peak: float, memory_bandwidth: float, memory_bytes: int, bf16: float | None = None
) -> Device:
    """Return a CPU as one device.

    Args:
        peak: FLOP/s of large fp32 products.
        memory_bandwidth: bytes/s.
        memory_bytes: memory that a process may allocate.
        bf16: FLOP/s of large bfloat16 products; None is the rate of fp32.
    """
    peaks: tuple[tuple[Format, float], ...] = (("fp32", peak), ("bf16", bf16 or peak))
    return Device(CPU, peaks, memory_bytes, memory_bandwidth)


@dataclass(frozen=True)
class Machine:
    """Measured rates of one machine: one thread of a CPU, or one GPU."""

    name: str
    """Name that the hardware reports."""
    threads: int
    software: str
    """Version of torch; with another version the machine counts as another one."""
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
    """Measurements behind the rates, for information."""
    gpu: bool = False
    """Whether it is a GPU. A known kind has the links in the catalogue, which were not measured."""

    @property
    def device(self) -> Device:
        """The machine as a device with measured rates."""
        rates = tuple((recipe, tuple(by_name.items())) for recipe, by_name in self.rates.items())
        device = cpu_device(self.fp32, self.bandwidth, self.memory_bytes, self.bf16)
        if self.gpu:
            sold = find_device(self.name) or Device(self.name, (), 0, 0.0)
            peaks = tuple((dict(sold.peaks) | dict(device.peaks)).items())
            memory = self.memory_bytes
            bandwidth = self.bandwidth
            device = replace(sold, peaks=peaks, memory_bytes=memory, memory_bandwidth=bandwidth)
        return replace(device, rates=rates)

    @property
    def cluster(self) -> Cluster:
        """The machine as a cluster of one device."""
        return Cluster(self.device, 1, 1, 1)

    def write(self, file: Path) -> None:
        """Write the file, creating its folder."""
        text = json.dumps({"form": MACHINE_FILE_VERSION, **asdict(self)}, indent=1)
        with folder_for(file.parent):
            write_text(file, text + "\n")

    @classmethod
    def read(cls, file: Path) -> "Machine":
        """Read a file.

        Raises:
            ValueError: it is absent or not a file that ``moefold bench`` writes.
        """
        if not file.exists():
            raise ValueError(f"{file} does not exist: run `moefold bench --machine {file}` first")
        try:
            stored = json.loads(file.read_text("utf-8"))
            if stored.pop("form") != MACHINE_FILE_VERSION:
                raise KeyError("form")
            machine = cls(**stored)
            values = {n: getattr(machine, n) for n in ("fp32", "bf16", "bandwidth", "memory_bytes")}
            for recipe, rates in machine.device.rates:
                values |= {f"rates.{recipe}.{name}": rate for name, rate in rates}
            # Work is divided by all rates but seconds and sizes.
            divisors = {name for name in values if not name.endswith(("_s", "half"))}
            invalid = [
                name
                for name, value in values.items()
                if not 0 <= value < math.inf or (name in divisors and not value)
            ]
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
            text = f"{file} is not a valid machine file: run `moefold bench` again"
            raise ValueError(text) from None
        for name in invalid:
            need = f"must be finite and {'above' if name in divisors else 'at least'} 0"
            raise ValueError(f"{file}: {name} {values[name]} {need}: run `moefold bench` again")
        return machine


def default_machine_file() -> Path:
    """Return the default path of a user's machine file."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "moefold" / "machine.json"
