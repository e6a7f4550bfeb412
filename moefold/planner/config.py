"""Record of a device as its data sheet describes it. Imports no torch.

{"name": "MyChip", "memory_gb": 64, "memory_gb_s": 1600, "tflops": {"bf16": 376},
 "links": {"gb_s": 56, "node": 8}, "network_gb_s": 25}
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from moefold.config.base import Record
from moefold.config.errors import MISSING, REMOVE, Violation

Rate = Annotated[float, Field(gt=0, le=1e9)]
"""A rate in the unit of its field."""
Scales = Literal["mxfp8", "nvfp4"]
"""Recipes whose scales of blocks only some chips apply in their product units."""
LinkKind = Literal["switch", "mesh", "pcie"]
"""``switch``: each device reaches any other at its full rate; ``mesh``: one direct link to each
other device of the node, each with an equal share of the rate; ``pcie``: the host's PCIe."""
Host = Literal["x86", "grace"]
Curves = Literal["hopper", "blackwell", "blackwell_ultra"]


class Tflops(Record):
    """TFLOP/s of dense products with fp32 sums, by format; the chip lacks formats left out."""

    bf16: Rate
    fp32: Rate | None = None
    """Default: as bf16."""
    fp8: Rate | None = None
    fp4: Rate | None = None


class LinkSheet(Record):
    """Links inside a node."""

    gb_s: Rate
    """GB/s of a device in one direction to all others of its node together."""
    node: Annotated[int, Field(ge=1, le=1_000_000)] = 8
    """Devices that the links connect."""
    kind: LinkKind = "switch"


class DeviceSheet(Record):
    """A device without measurements. GB are 10^9 bytes, rates are in one direction."""

    name: Annotated[str, Field(min_length=1, max_length=60)]
    memory_gb: Annotated[float, Field(gt=0, le=1e6)]
    """Memory that a program can allocate."""
    memory_gb_s: Rate
    """Memory bandwidth."""
    tflops: Tflops
    links: LinkSheet | None = None
    """None: a single device is planned, unless the command states links."""
    network_gb_s: Rate | None = None
    """Network per device beyond a node; None: clusters of one node."""
    host_gb_s: Rate | None = None
    """To host memory; None: no plan offloads anything."""
    host: Host = "x86"
    watts: Annotated[float, Field(gt=0, le=1e5)] | None = None
    block_scales: tuple[Scales, ...] = ()
    """Recipes whose scales of blocks the chip applies itself."""
    curves: Curves = "hopper"
    """Measured architecture whose share of peak rates is taken for this one."""

    def rules(self) -> Iterator[Violation]:
        """Yield rates that block scales need, and scales that narrow formats need."""
        for recipe, form in (("mxfp8", "fp8"), ("nvfp4", "fp4")):
            if recipe in self.block_scales and getattr(self.tflops, form) is None:
                rule = f"{recipe} needs the rate tflops.{form}"
                kept = [one for one in self.block_scales if one != recipe]
                yield Violation(("block_scales",), [*self.block_scales], rule, kept or REMOVE)
        if self.links is not None and self.links.node == 1:
            rule = "must be at least 2, or leave links out"
            yield Violation(("links", "node"), 1, rule, 2)
        if self.name == "CPU":
            rule = "is the name of this machine's processor: choose another"
            yield Violation(("name",), self.name, rule, MISSING)
