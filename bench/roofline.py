"""What a micro-batch would take on eight H100, from what is counted and what one of them measured.

An estimate: no step of eight devices was measured by this project. Each launch takes as long as its
bytes at the memory's rate or its product at the arithmetic's, whichever is longer, and the gap
before the next; no two overlap. Routing is even and the host is never late. Rates of one device are
those of ``results/gpu/h100_ceilings.json``.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from math import prod

from launches import Call, Place
from rich.table import Table

MEMORY = 3.0e12
"""Bytes per second of HBM3, copied."""
DENSE = 700e12
"""FLOP/s of a bf16 product of 4,096 rows of 2,048."""
GROUPED, SUMMED = 680e12, 478e12
"""FLOP/s of bf16 products of 32,768 rows with 16 experts, by the library; of weight gradients in
fp32, by the own kernel."""
ATTENTION = (555e12, 427e12)
"""FLOP/s of causal attention over 4,096 rows and heads of 128, forward and backward."""
WIDE = 50e12
"""FLOP/s of fp32 products without tf32."""
EXCHANGE = 325e9
"""Bytes per second of each rank's NCCL all-to-all over eight: 411 MB in 1.265 ms, as Megatron
Core's table for H100 says. Not measured."""
GAP = 2e-6
"""Seconds that the device is idle between two launches: a guess."""
AGAIN = {"norm": 1.0, "expert products": 2 / 3}
"""Parts whose forward the recipe runs again in backward, and how much of it: of the experts'
products the first, two of three matrices."""


@dataclass
class Time:
    """Seconds of a part."""

    product: float = 0.0
    memory: float = 0.0
    exchange: float = 0.0
    gaps: float = 0.0
    flops: float = 0.0

    def scaled(self, share: float) -> "Time":
        """Return a share of it, gaps too."""
        return Time(*(share * seconds for seconds in astuple(self)))

    @property
    def all(self) -> float:
        """One after another."""
        return self.product + self.memory + self.exchange + self.gaps


def _flops(call: Call) -> tuple[float, float]:
    """Return a call's FLOPs and their rate; none where it is no product."""
    shapes = [region[2] for region in call.reads]
    if call.name == "attention":
        _, heads, rows, dims = shapes[0]
        way = call.place.backward
        return 2.0 * heads * rows**2 * dims * (2.5 if way else 1), ATTENTION[way]
    grouped = call.name in (
        "_grouped_mm",
        "grouped_product",
        "grouped_gradient",
        "grouped_gradient_",
    )
    if not grouped and call.name not in ("mm", "addmm", "addmm_"):
        return 0.0, DENSE
    # What a product is added to comes first.
    at = int(call.name in ("addmm", "addmm_", "grouped_gradient_"))
    first, second = shapes[at : at + 2]
    narrow = list(call.reads.values())[at] == 2 * prod(first)
    rate = GROUPED if grouped else DENSE if narrow else WIDE
    rate = SUMMED if call.name.startswith("grouped_gradient") else rate
    outer = first[1] if call.name.startswith("grouped_gradient") else first[0]
    depth = prod(first) // outer
    return 2.0 * outer * depth * second[-1], rate


def times(calls: Sequence[Call], micro: int) -> dict[Place, Time]:
    """Return the time of each part of a micro-batch."""
    found = defaultdict[Place, Time](Time)
    for call in calls:
        if call.place.micro != micro:
            continue
        time = found[call.place]
        time.gaps += GAP
        read = sum(call.reads.values())
        moved = (read + sum(call.writes.values())) / MEMORY
        flops, rate = _flops(call)
        # What attention's backward computes again is work, and no FLOPs of the model.
        again = call.name == "attention" and call.place.backward
        time.flops += flops * 2 / 2.5 if again else flops
        if call.place.part == "exchange":
            time.exchange += read / EXCHANGE
        elif flops / rate > moved:
            time.product += flops / rate
        else:
            time.memory += moved
    return found


def roofline(
    calls: Sequence[Call], micro: int, layers: int, rows: int, once: float
) -> tuple[Table, dict[str, str]]:
    """Return a table of a layer's parts, and what a micro-batch of ``layers`` alike takes.

    ``once`` is the share of copies that are exchanged where each rank is sent a token once.
    """
    found = times(calls, micro)
    table = Table(title="milliseconds on H100: an estimate", title_justify="left")
    table.add_column("part")
    for column in ("products", "memory", "exchange", "gaps", "all"):
        table.add_column(column, justify="right")

    def line(name: str, parts: Sequence[Time]) -> float:
        whole = sum(part.all for part in parts)
        columns = [
            sum(getattr(part, kind) for part in parts)
            for kind in ("product", "memory", "exchange", "gaps")
        ]
        table.add_row(name, *(f"{1e3 * second:.3f}" for second in (*columns, whole)))
        return whole

    layer = {place: time for place, time in found.items() if place.layer is not None}
    outside = [time for place, time in found.items() if place.layer is None]
    for part in dict.fromkeys(place.part for place in layer):
        line(part, [time for place, time in layer.items() if place.part == part])
    one = line("a layer", list(layer.values()))
    rest = line("outside of layers", outside)
    again = [t.scaled(AGAIN.get(p.part, 0.0)) for p, t in layer.items() if not p.backward]
    more = line("again in backward", again)
    flops = layers * sum(t.flops for t in layer.values()) + sum(t.flops for t in outside)
    hidden = layers * sum(time.exchange for time in layer.values())
    whole = layers * one + rest
    cases = {
        "nothing runs again": whole,
        "norms and experts run again, as the recipe has it": whole + layers * more,
        "nothing runs again, a token once to each rank": whole - (1 - once) * hidden,
        "nothing runs again, every exchange hidden": whole - hidden,
    }
    return table, {
        name: f"{1e3 * seconds:.0f} ms, {flops / seconds / 1e12:.0f} TFLOP/s, "
        f"{rows / seconds:,.0f} tokens/s on each device"
        for name, seconds in cases.items()
    }
