"""Parallel sizes of a layout, one per axis. Text form: ``tp2 cp2 pp4 vpp2 ep8 etp1``."""

import math
import re
from typing import Annotated, Literal, get_args

from pydantic import Field

from moefold.config.base import Record

AXES = ("tp", "cp", "pp", "vpp", "ep", "etp")
MAX_RANKS = 1_000_000
PATTERN = rf"^\s*(({'|'.join(AXES)})[1-9][0-9]{{0,6}}(\s+|$))*$"

EVEN = "even"
"""Stages with equally many layers, whatever else they have."""
STAGES = rf"^({EVEN}|[EtdxmL|()*0-9, ]+)$"

Order = Literal["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"]
"""Orders of axes, from that of neighbouring ranks on; for experts tp is etp and dp is edp."""
ORDERS: tuple[Order, ...] = get_args(Order)

StagesText = Annotated[str, Field(pattern=STAGES, max_length=10_000)]
Axis = Annotated[int, Field(ge=1, le=MAX_RANKS)]
SizesText = Annotated[str, Field(pattern=PATTERN, max_length=200, examples=["tp2 pp2 ep4"])]


class Sizes(Record):
    """Sizes of a layout's axes; the data-parallel sizes follow from the number of ranks."""

    tp: Axis = 1
    cp: Axis = 1
    pp: Axis = 1
    vpp: Axis = 1
    ep: Axis = 1
    etp: Axis = 1

    @classmethod
    def parse(cls, text: str) -> "Sizes":
        """Parse the text form; axes are in any order, and 1 if omitted.

        Raises:
            ValueError: if an axis is unknown, named twice, or has no positive size.
        """
        sizes: dict[str, int] = {}
        for word in text.split():
            match = re.fullmatch(r"([a-z]+)([1-9][0-9]*)", word)
            if match is None or match[1] not in AXES:
                axes = ", ".join(AXES)
                raise ValueError(f"layout {text!r}: {word!r} is not an axis ({axes}) and size")
            # Compared by its digits first: Python refuses to read a number of thousands of them.
            if len(match[2]) > len(str(MAX_RANKS)) or int(match[2]) > MAX_RANKS:
                raise ValueError(f"layout {text!r}: {word} is more than {MAX_RANKS:,} ranks")
            if match[1] in sizes:
                raise ValueError(f"layout {text!r}: {match[1]} is given twice")
            sizes[match[1]] = int(match[2])
        return cls(**sizes)

    @property
    def smallest_world(self) -> int:
        """The fewest ranks that both grids fit: ``pp * lcm(tp * cp, ep * etp)``."""
        return self.pp * math.lcm(self.tp * self.cp, self.ep * self.etp)

    @property
    def row_multiple(self) -> int:
        """The multiple of rows that context ranks (two pieces each) and tensor ranks can split."""
        return self.tp * (2 * self.cp if self.cp > 1 else 1)

    @property
    def text(self) -> str:
        """The text form for run files, without axes of size 1."""
        return " ".join(f"{axis}{size}" for axis, size in self if size > 1)

    def __str__(self) -> str:
        """Return the text form, or ``dp only`` if all ranks are data ranks."""
        return self.text or "dp only"
