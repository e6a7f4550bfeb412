"""What a long run takes: failures, more devices, and money.

The share of time that trains (ETTR, as Meta's RSC study names it) is, to first order in failures,
``1 - w/D - r * (u + D/2)``: w seconds that a save holds the run up, every D seconds; r failures per
second, each of which costs the restart u and on average half of the D since the last save. It is
largest at ``D = sqrt(2 * w / r)`` (Young, 1974).

More devices are more data ranks of the same layout. Strong scaling keeps the batch, which ends
where each data rank has too few micro-batches; weak scaling lets it grow with the devices.
"""

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from moefold.planner.from_run import Choice, TrainingTask
from moefold.planner.time import estimate

DAY = 86400.0
PER_DEVICE_DAY = 4.7e-4
"""Unexpected interruptions per device and day: 419 in 54 days on 16,384 H100 (Llama 3, arXiv
2407.21783). 504 B200 had 3.6e-4 (Lablup), 1,024 A100 about 2e-3 (OPT-175B)."""
RESTART_S = 600.0
"""Seconds from a failure to the next step: detection, start and loading. MegaScale (arXiv
2402.15627) reports detection within 10 minutes; automatic restarts reach about one."""
STALL_S = 5.0
"""Seconds that a save holds a run up: a few with saving beside training."""
MOST = 100_000
"""Devices up to which curves go."""
PUE = 1.25
"""Power of the building over that of its machines, where none is stated."""
HOST_WATTS = 0.35
"""Power of hosts, fans and network over that of the boards: an 8-GPU H100 server is rated
10.2 kW for 5.6 kW of boards, with its NICs not at their limit all the time."""


@dataclass(frozen=True)
class Faults:
    """How often a run is interrupted, and what that costs. All are inputs: none is predicted."""

    per_device_day: float = PER_DEVICE_DAY
    restart_s: float = RESTART_S
    stall_s: float = STALL_S

    def __post_init__(self) -> None:
        """Refuse what is no rate or no time."""
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} {value}: a finite number of at least 0")

    def rate(self, devices: int) -> float:
        """Return failures per second of so many devices."""
        return self.per_device_day * devices / DAY


@dataclass(frozen=True)
class Goodput:
    """What a number of devices can expect."""

    interval_s: float
    """Seconds between saves; endless where nothing fails."""
    ettr: float
    """Share of time that trains, from 0 to 1."""
    between_failures_s: float
    lost: dict[str, float]
    """Shares that go to saving, to restarts and to work done again; unclipped."""


def best_interval(stall_s: float, rate: float) -> float:
    """Return the seconds between saves that lose least; endless where nothing fails."""
    return math.sqrt(2 * stall_s / rate) if rate else math.inf


def goodput(devices: int, faults: Faults = Faults()) -> Goodput:
    """Return what so many devices can expect, that stop together when one fails."""
    rate = faults.rate(devices)
    every = best_interval(faults.stall_s, rate)
    saving = faults.stall_s / every if every else 0.0
    again = rate * every / 2 if rate else 0.0
    lost = {"saving": saving, "restarts": rate * faults.restart_s, "again": again}
    ettr = min(1.0, max(0.0, 1.0 - sum(lost.values())))
    return Goodput(every, ettr, 1 / rate if rate else math.inf, lost)


@dataclass(frozen=True)
class Price:
    """What a device costs. Prices differ by contract: there is no default in money."""

    per_device_hour: float | None = None
    pue: float = PUE

    def __post_init__(self) -> None:
        """Refuse what is no price."""
        if self.per_device_hour is not None and not 0 <= self.per_device_hour < math.inf:
            raise ValueError(f"price {self.per_device_hour}: at least 0 per device and hour")
        if not 1 <= self.pue < math.inf:
            raise ValueError(f"PUE {self.pue}: the building takes at least what its machines take")


@dataclass(frozen=True)
class Bill:
    """What so many tokens cost."""

    tokens: float
    days: float
    device_hours: float
    energy_mwh: float | None
    """Megawatt-hours at the boards' limit, hosts and building included: an upper bound. None where
    that limit is not known."""
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
    good_tokens_per_s: float
    """Of a long run, failures and saves included."""
    ettr: float
    save_every_s: float


def curve(
    task: TrainingTask,
    choice: Choice,
    kind: Literal["strong", "weak"],
    faults: Faults = Faults(),
) -> list[Point]:
    """Return a layout's points, from the fewest devices that it fits on, doubled up to the most."""
    points, devices = list[Point](), choice.sizes.smallest_world
    while devices <= MOST:
        share = devices // (choice.sizes.tp * choice.sizes.cp * choice.sizes.pp)
        grain = share * choice.micro_batch
        grown = max(1, round(task.batch * devices / task.cluster.devices / grain)) * grain
        batch = task.batch if kind == "strong" else grown
        other = replace(task, cluster=replace(task.cluster, devices=devices), batch=batch)
        # None where too few micro-batches are left to a data rank, for it or for the schedule.
        with suppress(ValueError):
            took, expected = estimate(choice.case(other)), goodput(devices, faults)
            speed = batch * task.seq / took.seconds
            points.append(
                Point(
                    devices, batch, took.seconds, took.tflops_per_gpu, speed,
                    speed * expected.ettr, expected.ettr, expected.interval_s,
                )
            )  # fmt: skip
        devices *= 2
    return points


def bill(task: TrainingTask, tokens_per_s: float, tokens: float, price: Price = Price()) -> Bill:
    """Return what training on so many tokens costs at a speed."""
    seconds = tokens / tokens_per_s
    hours = seconds / 3600 * task.cluster.devices
    watts = task.cluster.device.watts * (1 + HOST_WATTS) * price.pue
    energy = hours * watts / 1e6 if watts else None
    cost = None if price.per_device_hour is None else hours * price.per_device_hour
    return Bill(tokens, seconds / DAY, hours, energy, cost)
