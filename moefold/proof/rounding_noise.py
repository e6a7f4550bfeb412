"""Error bounds in a run's own number format, measured by reordering sums on one rank.

One rank repeats the run several times with shuffled sums. The error of each tensor, and of each
step's figure, may be a few times the difference between these runs, but less than the effect of a
missing exchange. If shuffled sums come near that, the format is too coarse for the quantity.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from moefold.layers.precision import DTYPES
from moefold.parallel.config import Layout
from moefold.proof.case import MAX_BOUND, ProofCase, Subject
from moefold.proof.compare import Item, Outcome
from moefold.proof.pool import MAX_SEEDS, run_cases

SHUFFLED = range(1, 9)
"""Seeds of the one-rank runs: enough for tokens that rounding can re-route to appear."""
BOUND_FACTOR = 4
"""Bound of an error, as a multiple of the worst difference between shuffled sums."""
MAX_TRIES = 5
"""Maximum number of seeds tried for a subject for which the format is too coarse."""
COARSE = 0.25
"""A quantity is too coarse to compare if shuffled sums differ by more."""
ROUTED = ("counts", "router/")
"""Quantities that one re-routed token changes by about its fraction of the tokens."""
UPDATED = ("weights", "optimizer/")
LATER = ("step 2", "step 3")
"""Quantities after an update, which may magnify any rounding up to a flipped sign."""


@dataclass(frozen=True)
class RoundingNoise:
    """Bounds of a subject's errors in its own number format."""

    subject: Subject
    """Subject with the seed for which the fewest quantities are too coarse."""
    bounds: Mapping[Item, float]
    """Bound of each tensor and step for which the format is fine enough."""
    coarse: Mapping[Item, float]
    """Difference between shuffled sums, for the other tensors and steps."""
    least: float
    """Bound of items that shuffled runs do not have."""
    failed: tuple[str, ...] = ()
    """Errors that ended runs with shuffled sums."""

    @classmethod
    def of(cls, subject: Subject, shuffled: Sequence[Outcome]) -> "RoundingNoise":
        """Return bounds derived from runs with shuffled sums."""
        eps = torch.finfo(DTYPES[subject.precision]).eps
        # A mean over rows, such as the loss, is more precise than one 16-bit number.
        least = min(4 * eps, 2.0**-13)
        worst: dict[Item, float] = {}
        for outcome in shuffled:
            for item, error in outcome.item_errors.items():
                worst[item] = max(worst.get(item, least), error)
        # A token can be re-routed in any layer and in any step.
        counts = (e for (quantity, _), e in worst.items() if quantity == "counts")
        rerouted = max([2 * eps, *counts])
        worst |= {item: max(e, rerouted) for item, e in worst.items() if item[0].startswith(ROUTED)}
        fine = {item: error for item, error in worst.items() if error <= COARSE}
        bounds = {item: min(BOUND_FACTOR * error, MAX_BOUND) for item, error in fine.items()}
        coarse = {item: error for item, error in worst.items() if item not in fine}
        failed = dict.fromkeys(why for o in shuffled if not o.item_errors for why in o.problems)
        return cls(subject, bounds, coarse, BOUND_FACTOR * least, tuple(failed))

    @property
    def problems(self) -> tuple[str, ...]:
        """Quantities before an update for which the format is too coarse, and failed runs."""
        text = "reordered sums differ by {:.0%}, too much to compare; verify in fp32 or fp64"
        failed = tuple(f"one rank with reordered sums: {why}" for why in self.failed)
        coarse = []
        for (quantity, item), error in self.coarse.items():
            if not quantity.startswith(UPDATED) and item not in LATER:
                coarse.append(f"{quantity} of {item}: {text.format(error)}")
        return (*failed, *coarse)

    def apply_bounds(self, outcome: Outcome) -> tuple[Outcome, dict[str, float]]:
        """Return an outcome with each quantity's worst item relative to its bound, and the bounds.

        Items for which the format is too coarse are left out.
        """
        worst: dict[str, tuple[float, str, float]] = {}
        for item, error in outcome.item_errors.items():
            if item in self.coarse:
                continue
            (quantity, name) = item
            bound = self.bounds.get(item, self.least)
            excess = math.inf if math.isnan(error) else error / bound
            if quantity not in worst or excess > worst[quantity][0]:
                worst[quantity] = excess, name, bound
        errors = {quantity: outcome.item_errors[quantity, worst[quantity][1]] for quantity in worst}
        where = {quantity: name for quantity, (_, name, _) in worst.items()}
        bounds = {quantity: bound for quantity, (*_, bound) in worst.items()}
        return replace(outcome, errors=errors, where=where), bounds


def measure_noise(subjects: Iterable[Subject]) -> dict[Subject, RoundingNoise]:
    """Run each subject with shuffled sums and derive its bounds.

    A token close to a tie makes roundings matter. Subjects for which the format is too coarse are
    therefore redrawn with other seeds, like degenerate ones.
    """
    best_noise: dict[Subject, RoundingNoise] = {}
    remaining = list(dict.fromkeys(subjects))
    for attempt in range(MAX_TRIES):
        shift = attempt * MAX_SEEDS
        drawn = [replace(subject, seed=subject.seed + shift) for subject in remaining]
        cases = [
            ProofCase(f"one rank, shuffled {order}", subject, Layout(), 1, shuffle=order)
            for subject in drawn
            for order in SHUFFLED
        ]
        outcomes = run_cases(cases)
        for number, subject in enumerate(remaining):
            first = number * len(SHUFFLED)
            noise = RoundingNoise.of(cases[first].subject, outcomes[first : first + len(SHUFFLED)])
            best = best_noise.get(subject)
            if best is None or len(noise.problems) < len(best.problems):
                best_noise[subject] = noise
        remaining = [subject for subject in remaining if best_noise[subject].problems]
    return best_noise
