"""This machine's CPU as a device: rates that ``moefold bench`` measured, kept in a small file.

machine = Machine.read(file)
estimate(case_on(machine.cluster), machine.constants("bf16")).seconds
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moefold.files import folder_for, write_text
from moefold.planner.curves import Constants, constants
from moefold.planner.hardware import Cluster, processor

FORM = 1
"""Of the file; another one is not read."""
NAME = "CPU"


@dataclass(frozen=True)
class Machine:
    """One thread of a CPU, as it was measured."""

    name: str
    """What the processor calls itself."""
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

    @property
    def cluster(self) -> Cluster:
        """The machine as a cluster of one device."""
        device = processor(self.fp32, self.bandwidth, self.memory_bytes, self.bf16)
        return Cluster(device, 1, 1, 1)

    def constants(self, format: str) -> Constants:
        """Return the package's constants with this machine's own in place of any other's."""
        known = constants()
        own = {f"{NAME}.{name}": value for name, value in self.rates[format].items()}
        return Constants({**known.values, **own, f"{NAME}.measured": 1.0}, known.spread)

    def write(self, file: Path) -> None:
        """Write the file, its folder too."""
        text = json.dumps({"form": FORM, **asdict(self)}, indent=1)
        with folder_for(file.parent):
            write_text(file, text + "\n")

    @classmethod
    def read(cls, file: Path) -> "Machine":
        """Read a file.

        Raises:
            ValueError: where it is not such a file; ``moefold bench`` writes one.
        """
        try:
            stored = json.loads(file.read_text("utf-8"))
            if stored.pop("form") != FORM:
                raise KeyError("form")
            return cls(**stored)
        except (json.JSONDecodeError, AttributeError, KeyError, TypeError):
            text = f"{file} is not what `moefold bench` writes: run it again"
            raise ValueError(text) from None


def usual_file() -> Path:
    """Return where a user's machine file lies unless said otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "moefold" / "machine.json"
