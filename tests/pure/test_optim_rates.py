"""The learning rate of runs whose number of steps changes: every schedule, every extension."""

import json
import math
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.optim.config import Constant, Cosine, LinearDecay, LrSchedule, Wsd, span_steps
from moefold.optim.rates import (
    EXTENSIONS,
    RateJump,
    RatePhase,
    change_steps,
    describe_rate,
    rate_factor,
)

QUICK = settings(max_examples=200, deadline=None, database=None)
WARMUP = st.one_of(st.integers(0, 5), st.sampled_from((0.0, 0.1, 0.3)))
FINAL = st.sampled_from((0.0, 0.1, 0.5))
SCHEDULES = st.one_of(
    st.builds(Constant, warmup=WARMUP),
    st.builds(LinearDecay, warmup=WARMUP, final=FINAL),
    st.builds(Cosine, warmup=WARMUP, final=FINAL),
    st.builds(
        Wsd,
        warmup=WARMUP,
        decay=st.one_of(st.integers(0, 5), st.sampled_from((0.0, 0.2, 0.5))),
        final=FINAL,
        shape=st.sampled_from(("linear", "cosine", "sqrt")),
    ),
)
SHAPES = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: 0.5 * (1 + math.cos(math.pi * x)),
    "sqrt": lambda x: 1 - math.sqrt(x),
}


def rule(schedule: LrSchedule, kind: str, start: float, done: int, steps: int) -> float:
    """The rate ``done`` of ``steps`` after an extension that began at ``start``, by the table."""
    if kind == "constant":
        return start
    if kind == "decay":
        if isinstance(schedule, Constant):
            return start * (1 - done / steps)
        assert isinstance(schedule, LinearDecay | Wsd)
        shape = schedule.shape if isinstance(schedule, Wsd) else schedule.curve
        fall = span_steps(schedule.decay, steps) if isinstance(schedule, Wsd) else steps
        if fall == 0:  # the schedule has no decay: a straight line to zero
            return start * (1 - done / steps)
        fall, low = min(fall, steps), min(schedule.final, start)
        if isinstance(schedule, LinearDecay) and done < steps - fall:
            return start
        return low + (start - low) * SHAPES[shape](max(done - (steps - fall), 0) / fall)
    warmup = span_steps(schedule.warmup or 0.1, steps)
    warmup = max(1, min(warmup, steps - 1))
    if done < warmup:
        return start + (1 - start) * (done + 1) / (warmup + 1)
    if isinstance(schedule, Constant):
        return 1.0
    if isinstance(schedule, LinearDecay):
        x = (done - warmup) / (steps - warmup) if steps > warmup else 1.0
        return schedule.final + (1 - schedule.final) * SHAPES[schedule.curve](x)
    assert isinstance(schedule, Wsd)
    fall = min(span_steps(schedule.decay, steps), steps - warmup)
    if done <= steps - fall or fall == 0:
        return 1.0
    x = (done - (steps - fall)) / fall
    return schedule.final + (1 - schedule.final) * SHAPES[schedule.shape](x)


@QUICK
@given(SCHEDULES, st.integers(6, 40), st.data())
def test_an_extended_run_follows_the_stated_rule(
    schedule: LrSchedule, steps: int, data: st.DataObject
) -> None:
    """At any step, running or finished, longer or shorter, and extended once more."""
    phases: tuple[RatePhase, ...] = (RatePhase(steps),)
    step = 0
    for _ in range(2):
        step = data.draw(st.integers(step + 1, max(step + 1, steps)), label="step")
        new = data.draw(st.integers(step + 1, step + 40).filter(lambda n: n != steps), label="new")  # noqa: B023
        kind = data.draw(st.sampled_from(EXTENSIONS), label="extend")
        warm, rising = phases[-1].warmup_end(schedule), rate_factor(phases, schedule, step)
        before = rate_factor(phases, schedule, step - 1)
        changed = change_steps(phases, schedule, step, new, kind, lr=1.0)
        if step < warm:  # the warm-up ends as it began
            assert rate_factor(changed, schedule, step) == rising
            assert changed[-1] == RatePhase(new, kind, warm, 1.0)
        else:
            for at in range(step, new):
                expected = rule(schedule, kind, before, at - step, new - step)
                assert rate_factor(changed, schedule, at) == pytest.approx(expected, abs=1e-12)
            # No jump: the next rate is the last one, or a step of the warm-up above it.
            after = rate_factor(changed, schedule, step)
            assert after == pytest.approx(before) if kind != "rewarm" else before <= after <= 1
        for at in range(step):
            assert rate_factor(changed, schedule, at) == rate_factor(phases, schedule, at)
        phases, steps = changed, new
        stored = json.loads(json.dumps([asdict(phase) for phase in phases]))
        assert tuple(map(RatePhase.from_dict, stored)) == phases
        if step < warm:
            return


@QUICK
@given(SCHEDULES, st.integers(6, 40), st.data())
def test_without_an_answer_the_rate_never_jumps(
    schedule: LrSchedule, steps: int, data: st.DataObject
) -> None:
    """Either the next rate is what it would have been, or both rates are in the refusal."""
    step = data.draw(st.integers(1, steps))
    new = data.draw(st.integers(step + 1, step + 60))
    phases = (RatePhase(steps),)
    before = schedule.factor(step - 1, steps)
    expected = schedule.factor(step, steps) if step < steps else before
    other = schedule.factor(step, new)
    try:
        changed = change_steps(phases, schedule, step, new, None, lr=0.5)
    except RateJump as error:
        assert other != pytest.approx(expected, rel=1e-10)
        assert f"from {before / 2:.3g} at step {step} to {other / 2:.3g}" in str(error)
        assert ("--until" in str(error)) == (new < steps)
        assert all(f"{kind} (" in str(error) for kind in EXTENSIONS)
    else:
        assert rate_factor(changed, schedule, step) == pytest.approx(expected)
        assert changed == (RatePhase(new),)


def test_a_finished_run_of_warmup_stable_decay_is_told_both_rates() -> None:
    """The rate has decayed to a quarter; another number of steps would be the peak again."""
    schedule = Wsd(warmup=0.2, decay=4)
    with pytest.raises(RateJump, match=r"from 0\.00075 at step 10 to 0\.003 at step 11.*over 40"):
        change_steps((RatePhase(10),), schedule, 10, 40, None, lr=0.003)


def test_a_stable_phase_is_prolonged_without_a_question() -> None:
    """The decay of a run that has not begun it moves to the new end; so does a constant rate."""
    schedule = Wsd(warmup=2, decay=4)
    assert change_steps((RatePhase(20),), schedule, 9, 40, None, 1.0) == (RatePhase(40),)
    assert change_steps((RatePhase(20),), Constant(warmup=2), 20, 40, None, 1.0) == (RatePhase(40),)
    held = (RatePhase(20), RatePhase(30, "constant", 20, 0.25))
    longer = change_steps(held, schedule, 30, 50, None, 1.0)
    assert longer == (RatePhase(20), RatePhase(50, "constant", 20, 0.25))
    for step in (17, 20):  # within the decay, and after it
        with pytest.raises(RateJump):
            change_steps((RatePhase(20),), schedule, step, 40, None, 1.0)


def test_nothing_changes_before_the_first_step_or_after_the_last() -> None:
    schedule = Cosine(warmup=0.25)
    assert change_steps((RatePhase(20),), schedule, 0, 40, None, 1.0) == (RatePhase(40),)
    assert change_steps((RatePhase(20),), schedule, 20, 5, None, 1.0) == (RatePhase(20),)
    assert change_steps((RatePhase(20),), schedule, 7, 20, "rewarm", 1.0) == (RatePhase(20),)


def test_the_phase_and_the_rate_are_said() -> None:
    phases = (RatePhase(10), RatePhase(40, "constant", 10, 0.25))
    said = describe_rate(phases, Wsd(warmup=0.2, decay=4), 10, 0.003)
    assert said == "0.00075 at step 11 (train.extend: constant from step 11 to 40, peak 0.003)"
    assert describe_rate(phases[:1], Wsd(), 0, 0.003).endswith("(wsd over 10 steps, peak 0.003)")
