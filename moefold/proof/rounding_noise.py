"""Error bounds in a run's own number format, measured by reordering sums on one rank.

One rank runs several more times with its sums shuffled. Each tensor, and each step's figure, may be
off by a few times what these runs differ by, but by less than what a missing exchange changes.
If shuffled sums come near that, the format is too coarse for the quantity.
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
"""Seeds of the one-rank runs: enough that a token that a rounding can re-route is in some."""
SPREAD = 4
"""Bound of an error, as a multiple of the largest difference between shuffled sums."""
TRIES = 5
"""Maximum number of seeds tried for a subject for which the format is too coarse."""
COARSE = 0.25
"""A quantity is too coarse to compare if shuffled sums differ by more."""
ROUTED = ("counts", "router/")
"""Quantities that one re-routed token changes by about its share."""
UPDATED = ("weights", "optimizer/")
LATER = ("step 2", "step 3")
"""Quantities after an update, which may magnify any rounding: a sign can only flip."""


@dataclass(frozen=True)
class RoundingNoise:
    """Bounds of a subject's errors in its own number format."""

    subject: Subject
    """The subject, with the seed for which the fewest quantities are too coarse."""
    bounds: Mapping[Item, float]
    """Bound of each tensor and step for which the format is fine enough."""
    coarse: Mapping[Item, float]
    """Difference between shuffled sums, for the other tensors and steps."""
    least: float
    """Bound of items that are not among the results of shuffled runs."""
    failed: tuple[str, ...] = ()
    """Errors that ended runs with shuffled sums."""

    @classmethod
    def of(cls, subject: Subject, shuffled: Sequence[Outcome]) -> "RoundingNoise":
        """Return the bounds that follow from runs with shuffled sums."""
        eps = torch.finfo(DTYPES[subject.precision]).eps
        # A mean over rows, such as the loss, is more precise than one 16-bit number.
        least = min(4 * eps, 2.0**-13)
        seen: dict[Item, float] = {}
        for outcome in shuffled:
            for item, error in outcome.each.items():
                seen[item] = max(seen.get(item, least), error)
        # A token can be re-routed in any layer and in any step.
        moved = max([2 * eps, *(e for (name, _), e in seen.items() if name == "counts")])
        seen |= {item: max(e, moved) for item, e in seen.items() if item[0].startswith(ROUTED)}
        fine = {item: error for item, error in seen.items() if error <= COARSE}
        bounds = {item: min(SPREAD * error, LARGEST) for item, error in fine.items()}
        coarse = {item: error for item, error in seen.items() if item not in fine}
        failed = dict.fromkeys(why for run in shuffled if not run.each for why in run.problems)
        return cls(subject, bounds, coarse, SPREAD * least, tuple(failed))

    @property
    def problems(self) -> tuple[str, ...]:
        """Quantities before an update for which the format is too coarse, and failed runs."""
        words = "reordered sums differ by {:.0%}, too much to compare; verify in fp32 or fp64"
        failed = tuple(f"one rank with reordered sums: {why}" for why in self.failed)
        return failed + tuple(
            f"{quantity} of {what}: {words.format(error)}"
            for (quantity, what), error in self.coarse.items()
            if not quantity.startswith(UPDATED) and what not in LATER
        )

    def held(self, outcome: Outcome) -> tuple[Outcome, dict[str, float]]:
        """Return an outcome with each quantity's worst item relative to its bound, and the bounds.

        Items for which the format is too coarse are left out.
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
    """Run each subject with shuffled sums and return the bounds that follow.

    If a token is close to a tie, a rounding changes much. Subjects for which the format is too
    coarse are therefore redrawn with other seeds, like degenerate ones.
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
