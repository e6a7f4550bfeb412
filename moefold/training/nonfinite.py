"""What happens when a step's loss or gradient is not finite: decided before the update.

Every rank decides alike, from figures that are the same on all; the report has what each holds.
"""

from collections.abc import Callable, Sequence
from enum import Enum

from moefold.comm.collectives import gather_objects
from moefold.config.base import Record
from moefold.data.batch import MicroBatch
from moefold.optim.norm import non_finite
from moefold.parallel.data.sharding import Data
from moefold.training.config import Rewind, Skip, Stop
from moefold.training.replay import MACHINE, replay
from moefold.training.step import StepFigures

SHOWN = 8
Again = Callable[[], StepFigures]
"""Computes the step's gradients once more, on the same data and weights."""


class NonFiniteStep(ValueError):
    """A step gave NaN or infinity; the weights are those before it."""


class Verdict(Enum):
    """What to do with a step."""

    UPDATE = "update"
    SKIP = "skip"
    REWIND = "rewind"


class Judge:
    """Says what to do with each step, by the run's policy.

    Attributes:
        strikes: steps that were not finite in a row, or rewinds since the run last got past one.
        struck_at: steps done before the newest of them.
    """

    def __init__(self, policy: Record) -> None:
        """Begin with no strikes."""
        self._policy = policy
        self.strikes = self.struck_at = 0

    def __call__(
        self,
        step: int,
        place: int,
        figures: StepFigures,
        batches: Sequence[MicroBatch],
        data: Data,
        again: Again,
    ) -> Verdict:
        """Return what the policy says of a step; every rank asks.

        Args:
            step: steps done before it.
            place: its place in the data's order.
            figures: what it gave.
            batches: what this rank trained on.
            data: this rank's share of the model, with the step's gradients.
            again: for policies that replay a bad step.

        Raises:
            NonFiniteStep: with the report, where the policy stops.
        """
        if figures.finite:
            # Steps made again after a rewind prove nothing: only getting past the bad one does.
            if step >= self.struck_at:
                self.strikes = 0
            return Verdict.UPDATE
        policy = self._policy
        assert isinstance(policy, Stop | Skip | Rewind)
        self.strikes, self.struck_at = self.strikes + 1, step
        holders = _holders(batches, data)
        told = replay(data, again) if policy.replay else ""
        used_up = isinstance(policy, Stop) or self.strikes > policy.limit
        if not (used_up or told.startswith(MACHINE)):
            return Verdict.SKIP if isinstance(policy, Skip) else Verdict.REWIND
        limit = "" if isinstance(policy, Stop) else f" (its limit of {policy.limit} is used up)"
        raise NonFiniteStep(
            f"step {step + 1} is not finite (loss {figures.lm_loss}, gradient norm "
            f"{figures.grad_norm}, router terms {figures.router_terms or 'none'}); nothing was "
            f"updated.\n{holders}\nPlace in the data's order: {place}\n"
            + (f"{told}\n" if told else "")
            + "Mend the cause, lower optim.lr, or set train.on_nonfinite to skip or rewind"
            + limit * used_up
        )


def _holders(batches: Sequence[MicroBatch], data: Data) -> str:
    """Name the gradients that are not finite, their ranks, and the documents of all data ranks."""
    world = data.placed.world
    grads = {n: p.grad for n, p in data.params.items() if p.grad is not None}
    documents = [f"{o.name} {o.document}" for batch in batches for o in batch.sources]
    mine = {"gradients": non_finite(grads), "documents": documents}
    said = gather_objects(mine, world.on_host)
    lines = [
        f"Gradients not finite{f' on rank {rank}' * (len(said) > 1)}: {_some(each['gradients'])}"
        for rank, each in enumerate(said)
        if each["gradients"]
    ]
    named = dict.fromkeys(name for each in said for name in each["documents"])
    return "\n".join([*(lines or ["Gradients not finite: none"]), f"documents: {_all(named)}"])


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _all(names: Sequence[str] | dict[str, None]) -> str:
    return ", ".join(names) or "unknown"
