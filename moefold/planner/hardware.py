"""Devices and clusters as data, each number with its source in ``devices.json``; and in a file the
measured rates of one machine, a CPU (``moefold bench``) or a GPU, or the data sheet of a device.
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

from moefold.config.errors import RunError, Violation
from moefold.config.load import load
from moefold.config.suggest import closest
from moefold.files import folder_for, write_text
from moefold.planner.config import DeviceSheet, Host, LinkKind

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
    links: LinkKind = "switch"
    host: Host = "x86"
    block_scales: tuple[str, ...] = ()
    """Recipes whose scales of blocks its product units apply."""
    curves: str = ""
    """Family of its curves, for a device that is described in a file; empty is that of its name."""

    @property
    def recipes(self) -> tuple[str, ...]:
        """Number formats of products that it has units for, narrowest first."""
        formats = dict(self.peaks)
        narrow = ("fp8_tensor", "fp8_block") if "fp8" in formats else ()
        return (*reversed(self.block_scales), *narrow, "bf16", "fp32")

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
    """A number of equal devices; the rates of their links are those of ``device``."""

    device: Device
    devices: int
    per_node: int
    """Devices per host."""
    domain: int
    """Devices that fast links connect; at least those of a node, if the node has such links."""

    def link_rate(self, ranks: int) -> float:
        """Return a device's bytes/s in one direction within ``ranks`` devices of its domain: in a
        mesh only the links between these carry anything.
        """
        rate = self.device.link_bandwidth
        if self.device.links == "mesh" and 1 < ranks < self.domain:
            return rate * (ranks - 1) / (self.domain - 1)
        return rate

    @property
    def connections(self) -> str:
        """Links and network that the devices use, in words."""
        if self.devices == 1:
            return "a single device"
        device = self.device
        beyond = f"{device.nic_bandwidth / 1e9:,.4g} GB/s of network per device"
        if self.domain == 1:
            return f"connected by {beyond} alone"
        number = min(self.devices, self.domain)
        ranks = 2 if device.links == "mesh" else self.domain
        how = LINK_WORDS[device.links].format(f"{self.link_rate(ranks) / 1e9:,.4g} GB/s")
        inside = f"{number} connected by {how}"
        return inside if self.devices <= self.domain else f"{inside}, {beyond} beyond"


LINK_WORDS: Mapping[LinkKind, str] = {
    "switch": "switched links of {} each",
    "mesh": "direct links without a switch, {} between any two",
    "pcie": "PCIe of {} each",
}
HOW_TO_DESCRIBE = (
    "describe another one in a file FILE.json and name it FILE.jsonx8, such as "
    '{"name": "MyChip", "memory_gb": 64, "memory_gb_s": 1600, "tflops": {"bf16": 376}, '
    '"links": {"gb_s": 56, "node": 8}, "network_gb_s": 25} (docs/plan.md)'
)


@cache
def catalogue() -> dict[str, Device]:
    """Return every known device by name."""
    text = files("moefold.planner").joinpath("devices.json").read_text("utf-8")
    devices = dict[str, Device]()
    for name, entry in json.loads(text)["devices"].items():
        # Every value of an entry is ``[value, source]``.
        peaks = tuple((key, pair[0]) for key, pair in entry.pop("peaks").items())
        values = {key: pair[0] for key, pair in entry.items()}
        values["block_scales"] = tuple(values["block_scales"])
        devices[name] = Device(name, peaks, **values)
    return devices


OTHER_NAMES: Mapping[str, str] = {
    "3090": "RTX3090",
    "4090": "RTX4090",
    "5090": "RTX5090",
    "rtxa6000": "A6000",
    "a10080gb": "A100",
    "a10040": "A100-40GB",
    "a100pcie80gb": "A100-PCIe",
    "a100pcie40": "A100-PCIe-40GB",
    "mi300": "MI300X",
    "mi325": "MI325X",
    "mi355": "MI355X",
}
"""Names of devices that people type besides those of the catalogue, as :func:`_folded`."""


def _folded(name: str) -> str:
    return re.sub(r"[-_\s]", "", name).lower()


def _known_names() -> dict[str, str]:
    """Return names of the catalogue by what people type, as :func:`_folded`."""
    return {_folded(name): name for name in catalogue()} | dict(OTHER_NAMES)


def _nearest_device(name: str) -> str | None:
    known = _known_names()
    similar = closest(_folded(name), known, 0.5)
    return known[similar] if similar else None


def device_by_name(name: str) -> Device:
    """Return a device by its name, such as ``h100`` or ``rtx-4090``, in any case.

    Raises:
        ValueError: there is none; the message has the nearest, all others, and how to describe one.
    """
    found = _known_names().get(_folded(name))
    if found is not None:
        return catalogue()[found]
    similar = _nearest_device(name)
    nearest = f"nearest: {similar}; " if similar else ""
    raise ValueError(
        f"unknown device {name!r}; {nearest}known are {', '.join(catalogue())}; {HOW_TO_DESCRIBE}"
    )


BOARDS = {"PCIE", "NVL", "LAPTOP", "D", "TI", "SUPER", "ADA", "MAX"}
"""Words of a driver's name that tell a board from another one of the same chip."""


def find_device(name: str) -> Device | None:
    """Return the device for a driver's name, such as ``NVIDIA H100 80GB HBM3``, or None.

    Boards with lower rates than others of their chip, such as PCIe and laptop ones, are recognised
    only where the catalogue has them.
    """
    words = {*re.split(r"[^A-Z0-9]+", name.upper())}
    found = dict[int, Device]()
    for key, device in catalogue().items():
        own = {*re.sub(r"^RTX", "RTX-", key.upper()).split("-")}
        if own <= words and words & BOARDS <= own:
            found[len(own)] = device
    return found[max(found)] if found else None


MIN_LINK_GB = 0.01
"""Least GB/s of stated links."""
MAX_LINK_GB = 1e5
"""Most GB/s of stated links."""
PCIE = 55e9
"""Bytes/s of PCIe 5.0 x16 in one direction, the fastest that hosts have."""
PCIE_NODE = 8
"""Devices that share a host over PCIe, where nothing else is stated."""


@dataclass(frozen=True)
class StatedLinks:
    """Links of a cluster as its user states them; None is as the device is sold."""

    kind: LinkKind | None = None
    rate: float | None = None
    """Bytes/s of a device in one direction to the others of its node."""
    node: int | None = None
    """Devices that the links connect."""
    network: float | None = None
    """Bytes/s of a device in one direction beyond its node."""

    @classmethod
    def parse(
        cls, links: str | None = None, node: int | None = None, network_gb: float | None = None
    ) -> "StatedLinks":
        """Parse options of a command.

        Args:
            links: ``switch``, ``mesh`` or ``pcie``, GB/s, or both, such as ``pcie:20``.
            node: devices that the links connect.
            network_gb: GB/s of a device beyond its node.

        Raises:
            ValueError: a value is not legal; the message has the nearest that is.
        """
        if node is not None and not 1 <= node <= MAX_DEVICES:
            nearest = min(max(node, 1), MAX_DEVICES)
            raise ValueError(f"--node {node}: must be 1 to {MAX_DEVICES:,}; nearest: {nearest}")
        network = None if network_gb is None else _link_rate("--network-gb", network_gb)
        if links is None:
            return cls(None, None, node, network)
        word, colon, number = links.partition(":")
        if not colon and _number(word) is not None:
            word, number = "", word
        kinds: tuple[LinkKind, ...] = ("switch", "mesh", "pcie")
        by_word: dict[str, LinkKind] = {one: one for one in kinds}
        kind = by_word.get(word.lower())
        if word and kind is None:
            nearest = closest(word, kinds, 0.3) or "pcie"
            raise ValueError(
                f"--links {links}: must be switch, mesh or pcie, GB/s in one direction, or both, "
                f"such as pcie:20; nearest: {nearest}"
            )
        rate = _link_rate("--links", _number(number)) if number or colon else None
        return cls(kind, rate, node, network)

    def apply(self, device: Device) -> Device:
        """Return a device with these links.

        Raises:
            ValueError: the device has no such links as sold, or does not connect so many.
        """
        kind = self.kind or device.links
        node = self.node or device.domain
        rate = self.rate
        if rate is None and kind == "pcie" != device.links:
            rate = min(device.host_bandwidth, PCIE)
            node = self.node or PCIE_NODE
        elif rate is None:
            self._require_sold(device, kind, node)
            rate = device.link_bandwidth
        network = device.nic_bandwidth if self.network is None else self.network
        if self.node == 1:  # alone in their hosts, devices meet over the network
            rate = network
        return replace(device, links=kind, link_bandwidth=rate, nic_bandwidth=network, domain=node)

    def _require_sold(self, device: Device, kind: LinkKind, node: int) -> None:
        """Check links without a stated rate: they must be those that the device is sold with."""
        if kind != "pcie" == device.links and device.link_bandwidth:
            raise ValueError(
                f"--links {kind}: {device.name} is sold with PCIe alone; nearest: pcie; or state a "
                f"rate, such as --links {kind}:50 --node 2 for pairs with a bridge"
            )
        if node > device.domain and kind != "pcie":
            raise ValueError(
                f"--node {node}: links of {device.name} connect at most {device.domain} as sold; "
                f"nearest: {device.domain}; or state the rate of yours, such as --links "
                f"{device.link_bandwidth / 1e9:.4g}"
            )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _link_rate(option: str, gb: float | None) -> float:
    """Return GB/s of an option in bytes/s.

    Raises:
        ValueError: it is no number, or not in the range of links.
    """
    if gb is None or not MIN_LINK_GB <= gb <= MAX_LINK_GB:
        nearest = MAX_LINK_GB if gb is not None and gb > MAX_LINK_GB else MIN_LINK_GB
        shown = "without a number" if gb is None else f"{gb:g}"
        raise ValueError(
            f"{option} {shown}: must be {MIN_LINK_GB:g} to {MAX_LINK_GB:,.0f} GB/s in one "
            f"direction; nearest: {nearest:g}"
        )
    return gb * 1e9


def parse_cluster(text: str, links: StatedLinks | None = None) -> Cluster:
    """Parse the name of a cluster, such as ``h100x256``.

    Args:
        text: device, ``x`` and number; or ``cpu``, this machine by the default file of ``moefold
            bench``; or the path of a ``.json`` file of a measured machine or a described device,
            optionally followed by ``x`` and a number.
        links: links as the user states them; default is as the device is sold.

    Raises:
        ValueError: the text names no cluster, or the links are not legal for the device.
    """
    stated = links or StatedLinks()
    is_cpu = text.lower() == "cpu"
    # At least three letters: rtx4090 is no 4,090 devices named rt.
    parts = re.fullmatch(r"(.{3,}?)\s*x\s*(\d*[1-9]\d*)", text, re.IGNORECASE | re.DOTALL)
    name, number = (parts[1], int(parts[2])) if parts else (text, 1)
    if is_cpu or name.endswith(".json"):
        device = read_device(default_machine_file() if is_cpu else Path(name))
    elif parts:
        device = device_by_name(name)
    else:
        similar = _nearest_device(text)
        raise ValueError(
            f"cluster {text!r}: must be a device, x and a number, such as "
            f"{f'{similar.lower()}x8' if similar else 'h100x256'}; or cpu or a .json file, as "
            "measured by `moefold bench` or described (docs/plan.md)"
        )
    if number > MAX_DEVICES:
        raise ValueError(
            f"cluster {text!r}: must have at most {MAX_DEVICES:,} devices; "
            f"nearest: {name}x{MAX_DEVICES}"
        )
    device = stated.apply(device)
    if number > 1 and not device.link_bandwidth:
        raise ValueError(
            f"cluster {text!r}: must be one {device.name}, as no link rate is known; state it by "
            "--links, such as --links pcie:25"
        )
    if number > device.domain and not device.nic_bandwidth:
        raise ValueError(
            f"cluster {text!r}: more than a node of {device.domain} {device.name}, whose network "
            f"is not known; state it by --network-gb, or plan at most {device.domain} devices"
        )
    # Racks of Grace hosts have four devices in each host.
    most = 4 if device.host == "grace" else max(8, stated.node or 0)
    return Cluster(device, number, min(most, device.domain), device.domain)


def require_recipe(device: Device, recipe: str) -> None:
    """Check that a device has units for the products of a recipe. A CPU emulates all.

    Raises:
        ValueError: it does not; the message has the nearest recipe.
    """
    if device.cpu or recipe in device.recipes:
        return
    nearest = nearest_recipe(device, recipe)
    raise ValueError(
        f"precision {recipe}: {device.name} has no units for such products; nearest: {nearest} "
        f"(it has {', '.join(device.recipes)})"
    )


def nearest_recipe(device: Device, recipe: str) -> str:
    """Return a recipe itself if a device has units for it, else one of equal or the next width."""
    if device.cpu or recipe in device.recipes:
        return recipe
    widths = ("fp4", "fp8", "bf16", "fp32")
    least = widths.index(FORMAT_OF[recipe])
    # A device's recipes are sorted by width.
    return next(one for one in device.recipes if widths.index(FORMAT_OF[one]) >= least)


def read_device(file: Path) -> Device:
    """Read a file of a measured machine or of a described device.

    Raises:
        ValueError: it is absent or neither; the message has place and nearest legal value.
    """
    try:
        stored = json.loads(file.read_text("utf-8")) if file.exists() else None
    except (ValueError, RecursionError):
        stored = None
    if not file.exists():
        raise ValueError(
            f"{file} does not exist: run `moefold bench --machine {file}` first, or describe a "
            "device there (docs/plan.md)"
        )
    if not isinstance(stored, dict) or "form" in stored:
        return Machine.read(file).device
    sheet = load(DeviceSheet, file).record
    if _folded(sheet.name) in _known_names():
        rule = "is a known device: give yours another name"
        found = Violation(("name",), sheet.name, rule, f"My {sheet.name}")
        raise RunError([found], stored, str(file))
    return _described(sheet)


def _described(sheet: DeviceSheet) -> Device:
    """Return the device of a data sheet."""
    rates = sheet.tflops
    stated: dict[Format, float | None] = {
        "fp32": rates.fp32,
        "bf16": rates.bf16,
        "fp8": rates.fp8,
        "fp4": rates.fp4,
    }
    peaks: tuple[tuple[Format, float], ...] = tuple(
        (form, rate * 1e12) for form, rate in stated.items() if rate is not None
    )
    device = Device(
        sheet.name,
        peaks,
        round(sheet.memory_gb * 1e9),
        sheet.memory_gb_s * 1e9,
        link_bandwidth=0.0,
        nic_bandwidth=(sheet.network_gb_s or 0.0) * 1e9,
        domain=1,
        host_bandwidth=(sheet.host_gb_s or 0.0) * 1e9,
        watts=sheet.watts or 0.0,
        nominal_gb=sheet.memory_gb,
        links="switch",
        host=sheet.host,
        block_scales=sheet.block_scales,
        curves=sheet.curves,
    )
    if (links := sheet.links) is None:
        return device
    link_rate = links.gb_s * 1e9
    return replace(device, link_bandwidth=link_rate, domain=links.node, links=links.kind)


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
            outside = {name for name, value in values.items() if not 0 <= value < math.inf}
            zeros = {name for name in divisors if not values[name]}
            invalid = [name for name in values if name in outside | zeros]
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
