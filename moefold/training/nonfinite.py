"""What happens when a step's loss or gradient is not finite: decided before the update."""

from collections.abc import Sequence
from enum import Enum

from moefold.config.base import Record
from moefold.data.batch import Origin
from moefold.training.config import Rewind, Skip
from moefold.training.step import StepFigures


class NonFiniteStep(ValueError):
    """A step gave NaN or infinity; the weights are those before it."""


class Verdict(Enum):
    """What to do with a step."""

    UPDATE = "update"
    SKIP = "skip"
    REWIND = "rewind"


def judge(
    policy: Record,
    strikes: int,
    step: int,
    place: int,
    figures: StepFigures,
    parameters: Sequence[str],
    sources: Sequence[Origin],
) -> Verdict:
    """Return what the policy says of a step that is not finite.

    Args:
        policy: the run's record.
        strikes: such steps in a row, or rewinds since the run last got past one, this one included.
        step: number of the step.
        place: its place in the data's order.
        figures: what was not finite.
        parameters: names whose gradient is not finite.
        sources: the documents of its batch.

    Raises:
        NonFiniteStep: with the report, where the policy stops.
    """
    if isinstance(policy, Skip | Rewind) and strikes <= policy.limit:
        return Verdict.SKIP if isinstance(policy, Skip) else Verdict.REWIND
    documents = ", ".join(dict.fromkeys(f"{o.name} {o.document}" for o in sources)) or "unknown"
    named = ", ".join(parameters[:8]) + (
        f" and {len(parameters) - 8} more" if len(parameters) > 8 else ""
    )
    raise NonFiniteStep(
        f"step {step} is not finite (loss {figures.lm_loss}, gradient norm {figures.grad_norm}, "
        f"router terms {figures.router_terms or 'none'}); nothing was updated.\n"
        f"Gradients not finite: {named or 'none'}\n"
        f"Place in the data's order: {place}; documents: {documents}\n"
        f"Mend the cause, lower optim.lr, or set train.on_nonfinite to skip or rewind"
        + (
            f" (its limit of {policy.limit} is used up)"
            if isinstance(policy, Skip | Rewind)
            else ""
        )
    )
