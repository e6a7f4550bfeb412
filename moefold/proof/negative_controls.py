"""Negative controls, which show that a proof can fail: every exchange between ranks is broken once.

For each recorded call site, the result is replaced by what it would be had no other rank taken
part, and for gradients also by its half. Each break must make the proof fail. So must scaling one
parameter's gradient by 1 + 1e-8 on one rank, and the proof must name the parameter.
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

UNSEEN = ("send",)
"""Operations without a result; the corresponding receive is broken instead."""
GUARDS = {
    "room": "it names the room that a step lacked, and no case is such a step",
    "warm-up": "a group's first word carries no value of the step",
}
"""Labels of exchanges that decide nothing in a case that passes, each with its reason."""
TIME_OUT_S = 20.0
"""Time-out of communication in seconds, since a wrong result may make ranks wait in vain."""


class Control(NamedTuple):
    """An injected fault, and whether the proof noticed it."""

    case: str
    broken: InjectedFault
    noticed: bool
    said: str
    """The worst quantity, its error and its tensor; or the error that ended the step."""


Recorded = Sequence[tuple[ProofCase, Sequence[CallSite]]]


def cover(recorded: Recorded) -> list[tuple[ProofCase, tuple[CallSite, ...]]]:
    """Return few cases that cover all call sites at each number of ranks, with the sites of each.

    Greedy: the case that adds the most call sites is taken first; of equal ones, the earliest.
    """
    chosen = []
    for world in sorted({case.world for case, _ in recorded}):
        having = [(case, frozenset(sites)) for case, sites in recorded if case.world == world]
        left = frozenset[CallSite]().union(*(sites for _, sites in having))
        while left:
            case, sites = max(having, key=lambda pair: len(pair[1] & left))
            chosen.append((case, tuple(sorted(sites & left))))
            left -= sites
    return chosen


def faults_of(covering: Recorded) -> list[tuple[ProofCase, InjectedFault]]:
    """Return every fault of every call site, with the case that covers it."""
    found = []
    for case, sites in covering:
        for site in sites:
            if site.op not in UNSEEN and site.label not in GUARDS:
                ways = ("alone", "half") if halves(site) else ("alone",)
                found += [(case, InjectedFault(site=site, how=how)) for how in ways]
    return found


def halves(site: CallSite) -> bool:
    """Return whether a call site's result is gradients, so that halving it is meaningful."""
    return site.direction == BACKWARD or site.label == "gradients"


def control(
    planned: Sequence[tuple[ProofCase, InjectedFault]],
    told: Callable[[Control], None] | None = None,
    noise: Mapping[Subject, RoundingNoise] = MappingProxyType({}),
) -> list[Control]:
    """Run cases with their faults; return for each whether the proof noticed it.

    Most are noticed in one step; the others run again with updates. ``noise`` has the bounds of
    subjects that are proved in their own format.
    """
    noises = [noise.get(case.subject) for case, _ in planned]
    planned = [
        (case if of_it is None else replace(case, subject=of_it.subject), fault)
        for (case, fault), of_it in zip(planned, noises, strict=True)
    ]
    found: dict[int, Control] = {}

    def attempt(numbers: Sequence[int], whole: bool) -> None:
        def tell(at: int, outcome: Outcome) -> None:
            number = numbers[at]
            case, broken = planned[number]
            bounds = {quantity: case.bound_of(quantity) for quantity in outcome.errors}
            if (of_it := noises[number]) is not None:
                outcome, bounds = of_it.held(outcome)
            found[number] = Control(case.name, broken, *_noticed(broken, outcome, bounds))
            if told is not None and (whole or found[number].noticed):
                told(found[number])

        cases = [planned[number][0] for number in numbers]
        if not whole:
            cases = [replace(c, precision=c.precision or c.subject.precision) for c in cases]
        faults = [planned[number][1] for number in numbers]
        run_cases(cases, faults, told=tell, time_out_s=TIME_OUT_S)

    attempt(range(len(planned)), whole=False)
    attempt([number for number, control in found.items() if not control.noticed], whole=True)
    return [found[number] for number in range(len(planned))]


def _noticed(
    broken: InjectedFault, outcome: Outcome, bounds: Mapping[str, float]
) -> tuple[bool, str]:
    beyond = {name: e for name, e in outcome.errors.items() if not e <= bounds[name]}
    if broken.parameter:
        error, named = outcome.errors.get("gradients", 0.0), outcome.where.get("gradients")
        noticed = named == broken.parameter and "gradients" in beyond
        return noticed, f"gradients {error:.1e} of {named}"
    if beyond:
        name = max(beyond, key=lambda quantity: beyond[quantity])
        return True, f"{name} {beyond[name]:.1e}, {outcome.where[name]}"
    if not outcome.errors:
        return True, outcome.problems[0].strip().splitlines()[-1]
    return False, "nothing"
