"""A layout on more devices: speed, share of it that trains, cost and energy.

More devices are more data ranks of the same layout. Strong scaling keeps the batch, which ends
where each data rank has too few micro-batches; weak scaling lets it grow with the devices.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from moefold.planner.from_run import Choice, Task
from moefold.planner.goodput import Faults, goodput
from moefold.planner.time import estimate

MOST = 100_000
"""Devices up to which curves go."""
HOUR = 3600.0
PUE = 1.25
"""Power of the building over that of its machines, where none is stated."""
HOST_WATTS = 0.35
"""Power of hosts, fans and network over that of the boards: an 8-GPU H100 server is rated
10.2 kW for 5.6 kW of boards, with its NICs not at their limit all the time."""


@dataclass(frozen=True)
class Price:
    """What a device costs. Prices differ by contract: there is no default in money."""

    per_device_hour: float | None = None
    pue: float = PUE

    def __post_init__(self) -> None:
        """Refuse what is no price."""
        if self.per_device_hour is not None and not self.per_device_hour >= 0:
            raise ValueError(f"price {self.per_device_hour}: at least 0 per device and hour")
        if not self.pue >= 1:
            raise ValueError(f"PUE {self.pue}: the building takes at least what its machines take")


@dataclass(frozen=True)
class Bill:
    """What so many tokens cost."""

    tokens: float
    days: float
    device_hours: float
    energy_mwh: float
    """Megawatt-hours at the boards' limit, hosts and building included: an upper bound."""
    cost: float | None
    """In the price's money; None without a price."""


@dataclass(frozen=True)
class Point:
    """A layout on a number of devices."""

    devices: int
    batch: int
    seconds: float
    tflops_per_gpu: float
    tokens_per_s: float
    ettr: float
    save_every_s: float

    @property
    def good_tokens_per_s(self) -> float:
        """Tokens per second of a long run, failures and saves included."""
        return self.tokens_per_s * self.ettr


def curve(
    task: Task,
    choice: Choice,
    kind: Literal["strong", "weak"],
    faults: Faults | None = None,
    most: int = MOST,
) -> tuple[Point, ...]:
    """Return a layout's points, from the fewest devices that it fits on to ``most``."""
    return tuple(_points(task, choice, kind, faults, most))


def _points(
    task: Task, choice: Choice, kind: str, faults: Faults | None, most: int
) -> Iterator[Point]:
    for devices in counts(choice, most):
        share = devices // (choice.sizes.tp * choice.sizes.cp * choice.sizes.pp)
        grain = share * choice.micro_batch
        grown = max(1, round(task.batch * devices / task.cluster.devices / grain)) * grain
        batch = task.batch if kind == "strong" else grown
        cluster = replace(task.cluster, devices=devices)
        other = replace(task, cluster=cluster, batch=batch)
        if batch % grain:
            continue
        try:
            case = choice.case(other)
            took = estimate(case)
        except ValueError:
            # The schedule needs more micro-batches than are left to a data rank.
            continue
        expected = goodput(devices, faults)
        yield Point(
            devices, batch, took.seconds, took.tflops_per_gpu, batch * task.seq / took.seconds,
            expected.ettr, expected.interval_s,
        )  # fmt: skip


def counts(choice: Choice, most: int) -> Sequence[int]:
    """Return the numbers of devices on which a layout stands: its smallest, doubled."""
    least = choice.sizes.smallest_world
    return [least << n for n in range(max(0, int(math.log2(most / least)) + 1))]


def bill(task: Task, tokens_per_s: float, tokens: float, price: Price | None = None) -> Bill:
    """Return what training on so many tokens costs at a speed."""
    price = price or Price()
    seconds = tokens / tokens_per_s
    hours = seconds / HOUR * task.cluster.devices
    watts = task.cluster.device.watts * (1 + HOST_WATTS) * price.pue
    cost = None if price.per_device_hour is None else hours * price.per_device_hour
    return Bill(tokens, seconds / 86400, hours, hours * watts / 1e6, cost)
