"""Failures, scaling and cost of a long run.

The share of time that trains (ETTR, as Meta's RSC study names it) is, to first order in failures,
``1 - w/D - r * (u + D/2)``: a save stalls the run for w seconds every D seconds; each of r failures
per second costs the restart u and on average half of the D since the last save. It is largest at
``D = sqrt(2 * w / r)`` (Young, 1974).

More devices are more data ranks of the same layout. Strong scaling keeps the batch, until each data
rank has too few micro-batches; weak scaling increases it with the devices.
"""

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from moefold.planner.case import Case
from moefold.planner.task import TrainingTask
from moefold.planner.time import estimate_time

DAY = 86400.0
FAILURES_PER_DEVICE_DAY = 4.7e-4
"""Unexpected interruptions per device-day: 419 in 54 days on 16,384 H100 (Llama 3, arXiv
2407.21783). 504 B200 had 3.6e-4 (Lablup), 1,024 A100 about 2e-3 (OPT-175B)."""
RESTART_S = 600.0
"""Seconds from a failure to the next step: detection, start and loading. MegaScale (arXiv
2402.15627) reports detection within 10 minutes; automatic restarts reach about one."""
STALL_S = 5.0
"""Seconds for which a save stalls a run: a few with asynchronous saving."""
MAX_DEVICES = 100_000
"""Largest number of devices on curves."""
PUE = 1.25
"""Default power of the building over that of its machines."""
HOST_WATTS = 0.35
"""Power of hosts, fans and network over that of the boards: an 8-GPU H100 server is rated
10.2 kW for 5.6 kW of boards; its NICs are not always at their limit."""


@dataclass(frozen=True)
class Faults:
    """Rate and cost of interruptions; inputs, not predictions."""

    per_device_day: float = FAILURES_PER_DEVICE_DAY
    restart_s: float = RESTART_S
    stall_s: float = STALL_S

    def __post_init__(self) -> None:
        """Check that all values are finite and not negative."""
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} {value}: must be a finite number of at least 0")

    def failures_per_second(self, devices: int) -> float:
        """Return failures per second of ``devices`` devices."""
        return self.per_device_day * devices / DAY


@dataclass(frozen=True)
class Goodput:
    """Expected goodput of a number of devices."""

    save_interval_s: float
    """Seconds between saves; infinite without failures."""
    ettr: float
    """Share of time that trains, from 0 to 1."""
    mtbf_s: float
    """Mean seconds between failures; infinite without failures."""
    lost_shares: dict[str, float]
    """Shares of time lost to saving, to restarts and to repeated work (``again``); unclipped."""


def optimal_save_interval(stall_s: float, rate: float) -> float:
    """Return the seconds between saves that lose least time; infinite without failures."""
    return math.sqrt(2 * stall_s / rate) if rate else math.inf


def goodput(devices: int, faults: Faults = Faults()) -> Goodput:
    """Return the expected goodput of ``devices`` devices that all stop when one fails."""
    rate = faults.failures_per_second(devices)
    interval = optimal_save_interval(faults.stall_s, rate)
    saving = faults.stall_s / interval if interval else 0.0
    repeated = rate * interval / 2 if rate else 0.0
    lost = {"saving": saving, "restarts": rate * faults.restart_s, "again": repeated}
    ettr = min(1.0, max(0.0, 1.0 - sum(lost.values())))
    return Goodput(interval, ettr, 1 / rate if rate else math.inf, lost)


@dataclass(frozen=True)
class Price:
    """Price of a device-hour, without a default as prices differ by contract, and PUE."""

    per_device_hour: float | None = None
    pue: float = PUE

    def __post_init__(self) -> None:
        """Check the values."""
        if self.per_device_hour is not None and not 0 <= self.per_device_hour <= 1e18:
            raise ValueError(f"price {self.per_device_hour}: must be from 0 to 1e18")
        if not 1 <= self.pue < math.inf:
            raise ValueError(f"PUE {self.pue}: must be finite and at least 1")


@dataclass(frozen=True)
class RunCost:
    """Cost of training on a number of tokens."""

    tokens: float
    days: float
    device_hours: float
    energy_mwh: float | None
    """Megawatt-hours at the boards' power limit, hosts and building included: an upper bound. None
    if that limit is unknown."""
    cost: float | None
    """Cost in the currency of the price; None without a price."""


@dataclass(frozen=True)
class ScalingPoint:
    """Speed and goodput of a layout on a number of devices."""

    devices: int
    batch: int
    seconds: float
    tflops_per_gpu: float
    tokens_per_s: float
    good_tokens_per_s: float
    """Tokens per second of a long run, failures and saves included."""
    ettr: float
    save_every_s: float


def scaling_curve(
    task: TrainingTask,
    case: Case,
    kind: Literal["strong", "weak"],
    faults: Faults = Faults(),
) -> list[ScalingPoint]:
    """Return the points of a case's layout on its smallest number of devices, doubled up to
    ``MAX_DEVICES``.
    """
    points = list[ScalingPoint]()
    sizes = case.sizes
    devices = sizes.smallest_world
    while devices <= MAX_DEVICES:
        data_ranks = devices // (sizes.tp * sizes.cp * sizes.pp)
        multiple = data_ranks * case.micro_batch
        proportional = task.batch * devices / task.cluster.devices
        scaled = max(1, round(proportional / multiple)) * multiple
        batch = task.batch if kind == "strong" else scaled
        scaled_task = replace(task, cluster=replace(task.cluster, devices=devices), batch=batch)
        # No point where a data rank has too few micro-batches for the layout or the schedule.
        with suppress(ValueError):
            recipe = case.number_formats.recipe
            step = estimate_time(scaled_task.case(case.layout, case.micro_batch, recipe))
            expected = goodput(devices, faults)
            speed = batch * task.seq / step.seconds
            points.append(
                ScalingPoint(
                    devices, batch, step.seconds, step.tflops_per_gpu, speed,
                    speed * expected.ettr, expected.ettr, expected.save_interval_s,
                )
            )  # fmt: skip
        devices *= 2
    return points


def run_cost(
    task: TrainingTask, tokens_per_s: float, tokens: float, price: Price = Price()
) -> RunCost:
    """Return the cost of training on ``tokens`` tokens at a speed."""
    seconds = tokens / tokens_per_s
    hours = seconds / 3600 * task.cluster.devices
    watts = task.cluster.device.watts * (1 + HOST_WATTS) * price.pue
    energy = hours * watts / 1e6 if watts else None
    cost = None if price.per_device_hour is None else hours * price.per_device_hour
    return RunCost(tokens, seconds / DAY, hours, energy, cost)
