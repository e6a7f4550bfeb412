"""Negative controls, which show that a proof can fail: each exchange between ranks is broken once.

The result at each recorded call site is replaced by that of an exchange without other ranks, and
for gradients also by its half. Each fault must make the proof fail. So must scaling one parameter's
gradient by 1 + 1e-8 on one rank, and the proof must name the parameter.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from moefold.comm.recorder import BACKWARD, CallSite
from moefold.proof.case import ProofCase, Subject
from moefold.proof.compare import Outcome
from moefold.proof.pool import run_cases
from moefold.proof.rank_run import InjectedFault
from moefold.proof.rounding_noise import RoundingNoise

WITHOUT_RESULT = ("send",)
"""Operations without a result; the matching receive is broken instead."""
EXEMPT_LABELS = {
    "room": "it names the room that a step lacked, and no case is such a step",
    "warm-up": "a group's first word carries no value of the step",
}
"""Labels of exchanges that cannot affect a passing case, each with its reason."""
TIME_OUT_S = 20.0
"""Time-out of communication in seconds: after a wrong result ranks may wait forever."""


class Control(NamedTuple):
    """An injected fault, and whether the proof noticed it."""

    case: str
    fault: InjectedFault
    noticed: bool
    evidence: str
    """The worst quantity, its error and its tensor; or the error that ended the step."""


Recorded = Sequence[tuple[ProofCase, Sequence[CallSite]]]


def choose_covering(recorded: Recorded) -> list[tuple[ProofCase, tuple[CallSite, ...]]]:
    """Return few cases that cover all call sites at each number of ranks, with the sites of each.

    Greedy: the case that adds the most call sites is taken first; of equal ones, the earliest.
    """
    chosen = []
    for world in sorted({case.world for case, _ in recorded}):
        candidates = [(case, frozenset(sites)) for case, sites in recorded if case.world == world]
        uncovered = frozenset[CallSite]().union(*(sites for _, sites in candidates))
        while uncovered:
            case, sites = max(candidates, key=lambda pair: len(pair[1] & uncovered))
            chosen.append((case, tuple(sorted(sites & uncovered))))
            uncovered -= sites
    return chosen


def faults_of(covering: Recorded) -> list[tuple[ProofCase, InjectedFault]]:
    """Return every fault of every call site, with the case that covers it."""
    faults = []
    for case, sites in covering:
        for site in sites:
            if site.op not in WITHOUT_RESULT and site.label not in EXEMPT_LABELS:
                hows = ("alone", "half") if yields_gradients(site) else ("alone",)
                faults += [(case, InjectedFault(site=site, how=how)) for how in hows]
    return faults


def yields_gradients(site: CallSite) -> bool:
    """Return whether a call site's result is gradients, which can be halved too."""
    return site.direction == BACKWARD or site.label == "gradients"


def run_faults(
    planned: Sequence[tuple[ProofCase, InjectedFault]],
    on_control: Callable[[Control], None] | None = None,
    noise: Mapping[Subject, RoundingNoise] = MappingProxyType({}),
) -> list[Control]:
    """Run cases with their faults; return whether the proof noticed each.

    Most are noticed in one step; the others run again with updates. ``noise`` has the bounds of
    subjects proved in their own format.
    """
    noises = [noise.get(case.subject) for case, _ in planned]
    planned = [
        (case if bounds is None else replace(case, subject=bounds.subject), fault)
        for (case, fault), bounds in zip(planned, noises, strict=True)
    ]
    controls: dict[int, Control] = {}

    def attempt(numbers: Sequence[int], with_updates: bool) -> None:
        def record(index: int, outcome: Outcome) -> None:
            number = numbers[index]
            case, fault = planned[number]
            bounds = {quantity: case.rounding_bound(quantity) for quantity in outcome.errors}
            if (measured := noises[number]) is not None:
                outcome, bounds = measured.apply_bounds(outcome)
            controls[number] = Control(case.name, fault, *_noticed(fault, outcome, bounds))
            if on_control is not None and (with_updates or controls[number].noticed):
                on_control(controls[number])

        cases = [planned[number][0] for number in numbers]
        if not with_updates:
            cases = [replace(c, precision=c.precision or c.subject.precision) for c in cases]
        faults = [planned[number][1] for number in numbers]
        run_cases(cases, faults, on_outcome=record, time_out_s=TIME_OUT_S)

    attempt(range(len(planned)), with_updates=False)
    unnoticed = [number for number, control in controls.items() if not control.noticed]
    attempt(unnoticed, with_updates=True)
    return [controls[number] for number in range(len(planned))]


def _noticed(
    fault: InjectedFault, outcome: Outcome, bounds: Mapping[str, float]
) -> tuple[bool, str]:
    beyond = {name: e for name, e in outcome.errors.items() if not e <= bounds[name]}
    if fault.parameter:
        error = outcome.errors.get("gradients", 0.0)
        named = outcome.where.get("gradients")
        noticed = named == fault.parameter and "gradients" in beyond
        return noticed, f"gradients {error:.1e} of {named}"
    if beyond:
        name = max(beyond, key=lambda quantity: beyond[quantity])
        return True, f"{name} {beyond[name]:.1e}, {outcome.where[name]}"
    if not outcome.errors:
        return True, outcome.problems[0].strip().splitlines()[-1]
    return False, "nothing"
