"""The learning rate over a run whose number of steps changes: a schedule stated by its phases.

The first phase is the schedule over the steps that the run began with. A change of steps adds a
phase that begins at the rate of the last step (``train.extend``); nothing jumps unless it is asked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moefold.optim.config import LrSchedule, span_steps

SCHEDULE = "schedule"
EXTENSIONS = ("decay", "constant", "rewarm")


class RateJump(ValueError):
    """Another number of steps would change the learning rate; nothing says how."""


@dataclass(frozen=True)
class RatePhase:
    """A part of the curve of the learning rate."""

    end: int
    """Step at which it ends, the first that it does not take."""
    kind: str = SCHEDULE
    """``schedule``, or what ``train.extend`` asked for."""
    first: int = 0
    """Updates done before it."""
    start: float = 1.0
    """Factor on the peak rate at the last step before it; of a ``schedule``, not used."""

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "RatePhase":
        """Read from a checkpoint's JSON data."""
        return cls(**stored)

    def factor(self, schedule: LrSchedule, step: int) -> float:
        """Return the factor on the peak rate at ``step`` (updates done before it, from 0)."""
        if self.kind == SCHEDULE:
            return schedule.factor(step, self.end)
        if self.kind == "constant":
            return self.start
        steps = max(self.end - self.first, 1)
        done = min(step - self.first, steps)
        if self.kind == "decay":
            return _fall(schedule, done, steps, self.start)
        warmup = self._rewarm_steps(schedule)
        if done < warmup:
            missing = 1 - self.start
            return self.start + missing * (done + 1) / (warmup + 1)
        return schedule.resolved(warmup, steps).factor(done, steps)

    def warmup_end(self, schedule: LrSchedule) -> int:
        """Return the step at which the rate has risen to the peak, at the latest."""
        if self.kind == SCHEDULE:
            return span_steps(schedule.warmup, self.end)
        return self.first + (self._rewarm_steps(schedule) if self.kind == "rewarm" else 0)

    def _rewarm_steps(self, schedule: LrSchedule) -> int:
        """Return the steps of a second warm-up: the schedule's, or a tenth of the phase."""
        steps = max(self.end - self.first, 1)
        warmup = span_steps(schedule.warmup or 0.1, steps)
        return max(1, min(warmup, steps - 1))


def rate_factor(phases: Sequence[RatePhase], schedule: LrSchedule, step: int) -> float:
    """Return the factor on the peak rate at ``step``: that of the last phase that has begun."""
    phase = next(phase for phase in reversed(phases) if phase.first <= step)
    return phase.factor(schedule, step)


def change_steps(
    phases: Sequence[RatePhase],
    schedule: LrSchedule,
    step: int,
    steps: int,
    extend: str | None,
    lr: float,
) -> tuple[RatePhase, ...]:
    """Return the phases of a run that has done ``step`` steps and now ends at ``steps``.

    Args:
        phases: the phases until now.
        schedule: the run's schedule.
        step: updates done.
        steps: the new number of steps.
        extend: what to do, of ``EXTENSIONS``; None: the last phase over the new number of steps,
            if the rate of the next step is the same.
        lr: the peak rate, for the message.

    Raises:
        RateJump: if the rate of the next step differs and ``extend`` is None.
    """
    last = phases[-1]
    if steps == last.end or steps <= step:
        return tuple(phases)
    restated = (*phases[:-1], replace(last, end=steps))
    if step == 0:
        return restated
    before = rate_factor(phases, schedule, step - 1)
    if extend is None:
        expected = rate_factor(phases, schedule, step) if step < last.end else before
        present = rate_factor(restated, schedule, step)
        if abs(present - expected) > 1e-9 * max(present, expected):
            raise RateJump(_jump_message(last.end, steps, step, lr * before, lr * present))
        return restated
    # A warm-up is not broken off: what was asked for begins at its end.
    warmup_end = last.warmup_end(schedule)
    phase = RatePhase(steps, extend, step, before)
    if step < warmup_end:
        phase = RatePhase(steps, extend, warmup_end, 1.0)
    return (*(one for one in phases if one.first < phase.first), phase)


def describe_rate(phases: Sequence[RatePhase], schedule: LrSchedule, step: int, lr: float) -> str:
    """Return the rate of the next step, and the phase that it belongs to, for a banner."""
    phase = next(phase for phase in reversed(phases) if phase.first <= step)
    kind = getattr(schedule, "kind", type(schedule).__name__)
    rate = lr * phase.factor(schedule, step)
    text = f"{rate:.3g} at step {step + 1:,}"
    if phase.kind == SCHEDULE:
        return f"{text} ({kind} over {phase.end:,} steps, peak {lr:.3g})"
    steps = f"from step {phase.first + 1:,} to {phase.end:,}"
    return f"{text} (train.extend: {phase.kind} {steps}, peak {lr:.3g})"


def _fall(schedule: LrSchedule, step: int, steps: int, start: float) -> float:
    """Return the factor ``step`` of ``steps`` after ``start``, falling as the schedule does.

    It ends where the schedule ends. A schedule that does not fall is a straight line to zero here.
    """
    curve = schedule.resolved(0, steps)
    end = curve.factor(steps, steps)
    if end >= 1:
        return start * (1 - step / steps)
    remaining = (curve.factor(step, steps) - end) / (1 - end)
    floor = min(end, start)
    return floor + (start - floor) * remaining


def _jump_message(old: int, new: int, step: int, before: float, after: float) -> str:
    """Return the text of a :class:`RateJump`."""
    stop = f", or stop at that step of the present curve with --until {new}" if new < old else ""
    return (
        f"train.steps: {new} instead of {old} changes the learning rate from {before:.3g} at step "
        f"{step} to {after:.3g} at step {step + 1}, by optim.schedule_lr over {new} steps. Say "
        f"what happens with train.extend: decay (it falls from {before:.3g} to the schedule's "
        f"end), constant (it stays at {before:.3g}) or rewarm (it rises to the peak again, and "
        f"then follows the schedule){stop}"
    )
