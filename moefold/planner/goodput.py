"""How much of a long run is training: what saving, failing and starting again cost.

The share of time that trains (ETTR, as Meta's RSC study names it) is, to first order in failures,
``1 - w/D - r * (u + D/2)``: w seconds that a save holds the run up, every D seconds; r failures per
second, each of which costs the restart u and on average half of the D since the last save. It is
largest at ``D = sqrt(2 * w / r)`` (Young, 1974).
"""

import math
from dataclasses import dataclass

DAY = 86400.0
PER_DEVICE_DAY = 4.7e-4
"""Unexpected interruptions per device and day: 419 in 54 days on 16,384 H100 (Llama 3, arXiv
2407.21783). 504 B200 had 3.6e-4 (Lablup), 1,024 A100 about 2e-3 (OPT-175B)."""
RESTART_S = 600.0
"""Seconds from a failure to the next step: detection, start and loading. MegaScale (arXiv
2402.15627) reports detection within 10 minutes; automatic restarts reach about one."""
STALL_S = 5.0
"""Seconds that a save holds a run up: a few with saving beside training."""


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


def goodput(devices: int, faults: Faults | None = None, interval_s: float | None = None) -> Goodput:
    """Return what so many devices can expect.

    Args:
        devices: that stop together when one fails.
        faults: how often and how dear.
        interval_s: seconds between saves; the best one unless given.

    Raises:
        ValueError: where the interval is not positive.
    """
    faults = faults or Faults()
    rate = faults.rate(devices)
    every = best_interval(faults.stall_s, rate) if interval_s is None else interval_s
    if every < 0 or (interval_s is not None and every == 0):
        raise ValueError(f"interval {every}: more than 0 seconds")
    saving = faults.stall_s / every if every else 0.0
    again = rate * every / 2 if math.isfinite(every) else 0.0
    lost = {"saving": saving, "restarts": rate * faults.restart_s, "again": again}
    ettr = min(1.0, max(0.0, 1.0 - sum(lost.values())))
    return Goodput(every, ettr, 1 / rate if rate else math.inf, lost)
