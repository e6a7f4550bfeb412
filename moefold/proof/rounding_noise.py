"""Bounds of errors in a run's own number format, from what orders of the same sums differ by.

One rank runs several times more with its sums shuffled. Each tensor, and each step's figure, may be
off by a few times what these runs differ by, and by less than what a missing exchange changes.
Where shuffled sums come near that, the format is too coarse to tell.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from moefold.layers.precision import DTYPES
from moefold.parallel.config import Layout
from moefold.proof.case import LARGEST, ProofCase, Subject
from moefold.proof.compare import Item, Outcome
from moefold.proof.pool import DRAWS, run_cases

SHUFFLED = range(1, 9)
"""Seeds of the one-rank runs: a token that goes elsewhere by a rounding does so in some of them."""
SPREAD = 4
"""Largest error, in units of the largest that shuffled sums showed."""
TRIES = 5
"""How many seeds are tried for a subject of which the format can tell."""
COARSE = 0.25
"""What shuffled sums may differ by at most where the largest bound can tell anything."""
ROUTED = ("counts", "router/")
"""Quantities that a token changes which goes elsewhere, by about its share."""
UPDATED = ("weights", "optimizer/")
LATER = ("step 2", "step 3")
"""What is seen after an update, which may magnify any rounding: of two signs there is no middle."""


@dataclass(frozen=True)
class RoundingNoise:
    """What errors of a subject are held against in its own format."""

    subject: Subject
    """With the seed by which most can be told."""
    bounds: Mapping[Item, float]
    """Of each tensor and step that the format is fine enough for."""
    coarse: Mapping[Item, float]
    """What shuffled sums differ by, of the others."""
    least: float
    """Bound of what shuffled sums do not show."""
    failed: tuple[str, ...] = ()
    """Why runs with shuffled sums came to nothing."""

    @classmethod
    def of(cls, subject: Subject, shuffled: Sequence[Outcome]) -> "RoundingNoise":
        """Return the bounds that runs with shuffled sums give."""
        eps = torch.finfo(DTYPES[subject.precision]).eps
        # A mean over rows, such as the loss, is finer than one number of 16 bits.
        least = min(4 * eps, 2.0**-13)
        seen: dict[Item, float] = {}
        for outcome in shuffled:
            for item, error in outcome.each.items():
                seen[item] = max(seen.get(item, least), error)
        # Any layer's token may be the next one that goes elsewhere, in any step.
        moved = max([2 * eps, *(e for (name, _), e in seen.items() if name == "counts")])
        seen |= {item: max(e, moved) for item, e in seen.items() if item[0].startswith(ROUTED)}
        fine = {item: error for item, error in seen.items() if error <= COARSE}
        bounds = {item: min(SPREAD * error, LARGEST) for item, error in fine.items()}
        coarse = {item: error for item, error in seen.items() if item not in fine}
        failed = dict.fromkeys(why for run in shuffled if not run.each for why in run.problems)
        return cls(subject, bounds, coarse, SPREAD * least, tuple(failed))

    @property
    def problems(self) -> tuple[str, ...]:
        """What no update excuses of that for which the format is too coarse, in words; failures."""
        words = "sums in other orders differ by {:.0%}, too much to tell: prove it in fp32 or fp64"
        failed = tuple(f"one rank, sums shuffled: {why}" for why in self.failed)
        return failed + tuple(
            f"{quantity} of {what}: {words.format(error)}"
            for (quantity, what), error in self.coarse.items()
            if not quantity.startswith(UPDATED) and what not in LATER
        )

    def held(self, outcome: Outcome) -> tuple[Outcome, dict[str, float]]:
        """Return an outcome with each quantity's worst tensor or step beside its bound, and bounds.

        What the format is too coarse for is left out.
        """
        worst: dict[str, tuple[float, str, float]] = {}
        for item, error in outcome.each.items():
            if item in self.coarse:
                continue
            (quantity, what), bound = item, self.bounds.get(item, self.least)
            excess = math.inf if math.isnan(error) else error / bound
            if quantity not in worst or excess > worst[quantity][0]:
                worst[quantity] = excess, what, bound
        errors = {quantity: outcome.each[quantity, worst[quantity][1]] for quantity in worst}
        where = {quantity: what for quantity, (_, what, _) in worst.items()}
        bounds = {quantity: bound for quantity, (*_, bound) in worst.items()}
        return replace(outcome, errors=errors, where=where), bounds


def noise_of(subjects: Iterable[Subject]) -> dict[Subject, RoundingNoise]:
    """Run each subject's sums shuffled and return the bounds that this gives.

    Where a token is close to a tie, a rounding moves much. So what is too coarse to tell is drawn
    anew, as what is degenerate is.
    """
    found: dict[Subject, RoundingNoise] = {}
    left = list(dict.fromkeys(subjects))
    for turn in range(TRIES):
        cases = [
            ProofCase(f"one rank, shuffled {order}", drawn, Layout(), 1, shuffle=order)
            for drawn in (replace(one, seed=one.seed + turn * DRAWS) for one in left)
            for order in SHUFFLED
        ]
        outcomes = run_cases(cases)
        for number, subject in enumerate(left):
            at = number * len(SHUFFLED)
            made = RoundingNoise.of(cases[at].subject, outcomes[at : at + len(SHUFFLED)])
            held = found.get(subject)
            if held is None or len(made.problems) < len(held.problems):
                found[subject] = made
        left = [subject for subject in left if found[subject].problems]
    return found
