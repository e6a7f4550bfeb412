"""What a loss needs in each step besides the trained model: a reference, a teacher, their results.

Imports no torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import yaml

from moefold.config.base import Record
from moefold.config.check import check
from moefold.config.errors import RunError, Violation
from moefold.model.config import Decoder
from moefold.training.losses.config import LOSS, CrossEntropy, Distill, Dpo

LOSS_KEY = "train.loss"


@dataclass(frozen=True)
class Reference:
    """A forward that runs in each step before that of the trained model, and what it leaves."""

    teacher: Decoder | None = None
    """A model with weights of its own whose forward runs; its last rows last until the loss."""
    runs_model: bool = False
    """Whether the forward is that of the trained model without its adapters."""
    stored_numbers: int = 0
    """Numbers in fp32 that are read from a file for each row."""
    second_logits: bool = False
    """Whether the loss computes all logits before those of its gradient."""

    @property
    def runs_forward(self) -> bool:
        """Whether a forward of some model runs before each step."""
        return self.runs_model or self.teacher is not None

    def row_bytes(self, width: int) -> int:
        """Return the bytes that each row of a step has on the last stage until its loss."""
        hidden = 0 if self.teacher is None else self.teacher.hidden
        return hidden * width + 4 * self.stored_numbers


def reference_of(loss: Record, teacher: Decoder | None = None) -> Reference | None:
    """Return what a loss needs besides the trained model; None if nothing.

    Args:
        loss: a record of the loss slot.
        teacher: the teacher's description, if it is known; otherwise its folder is read.

    Raises:
        ValueError: the teacher's folder cannot be read.
    """
    if isinstance(loss, Dpo):
        return Reference(runs_model=loss.reference == "adapters_off", second_logits=True)
    if not isinstance(loss, Distill):
        return None
    if loss.stored is not None:
        return Reference(stored_numbers=2 * loss.top_k + 1)
    return Reference(teacher or loss.read_config().decoder)


class _Stated(Record):
    loss: Annotated[Record, LOSS] = CrossEntropy()


class StatedLoss(NamedTuple):
    """A loss that overrides of a run file state for a published model."""

    kind: str
    reference: Reference | None
    needs_adapter: bool
    """Whether its reference is the model without adapters."""


def stated_loss(
    overrides: Sequence[str], vocab: int, known: Callable[[str], Decoder | None]
) -> tuple[StatedLoss | None, list[str]]:
    """Return the loss that overrides of a run file state, if any, and the other overrides.

    Args:
        overrides: ``path=value`` texts.
        vocab: tokens of the model's vocabulary.
        known: returns the description of a published model by its name; None if there is none.

    Raises:
        ValueError: the loss is not legal, or its teacher cannot be read or has another vocabulary.
    """
    stated: StatedLoss | None = None
    others = list[str]()
    for override in overrides:
        key, _, text = override.partition("=")
        if key != LOSS_KEY:
            others.append(override)
            continue
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"override {override} is not YAML: {error}") from None
        checked = check(_Stated, {"loss": {"kind": value} if isinstance(value, str) else value})
        if checked.record is None:
            raise RunError(checked.violations, source=override)
        loss = checked.record.loss
        teacher: Decoder | None = None
        if isinstance(loss, Distill):
            teacher = known(loss.teacher) or loss.read_config().decoder
            if teacher.vocab != vocab:
                raise ValueError(
                    f"train.loss.teacher {loss.teacher}: must have the model's vocabulary of "
                    f"{vocab:,} tokens, not {teacher.vocab:,}"
                )
        reference = reference_of(loss, teacher)
        adapted = isinstance(loss, Dpo) and loss.reference == "adapters_off"
        stated = StatedLoss(getattr(loss, "kind", ""), reference, adapted)
    return stated, others


def adapter_violation() -> Violation:
    """Return the violation of a reference without adapters in a run that has none."""
    rule = "needs adapter=: without one the reference is the trained model itself"
    return Violation(("train", "loss", "reference"), "adapters_off", rule, "stored")
