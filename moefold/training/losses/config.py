"""Records of losses; imports no torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from moefold.config.base import Record
from moefold.config.errors import MISSING, REMOVE, Violation
from moefold.config.fields import OnDisk
from moefold.config.slot import Slot
from moefold.data.config import Chat, FileSource, Preferences
from moefold.layers.config import Size
from moefold.model.families.base import ParsedConfig
from moefold.model.families.folder import read_config
from moefold.spec.decoder import model_needs

LOSS = Slot("loss")


class LossRecord(Record):
    """Base of the records in the loss slot."""

    pairs: ClassVar[bool] = False
    """Whether the loss compares pairs of answers."""

    def violations(self, run: Any) -> Iterator[Violation]:
        """Yield violations between a run and its loss; paths start at the run."""
        if run.layout.graphs == "step" and not isinstance(self, CrossEntropy):
            rule = "cannot be step: train.loss needs computations outside the step's CUDA graph"
            yield Violation(("layout", "graphs"), "step", rule, "partial")
        if not isinstance(self, CrossEntropy) and run.decoder.multi_token:
            rule = "cannot be combined with multi-token prediction; set model.multi_token to []"
            yield Violation(("train", "loss"), self, rule, {"kind": "cross_entropy"})
        for part in ("train", "valid"):
            for number, source in enumerate(getattr(run.data, part)):
                paired = isinstance(source, Preferences)
                if paired and not self.pairs:
                    rule = f"cannot use the pairs of answers in data.{part}"
                    yield Violation(("train", "loss"), self, rule, {"kind": "dpo"})
                elif self.pairs and not paired:
                    path = ("data", part, number, "source")
                    nearest = "preferences" if isinstance(source, FileSource) else MISSING
                    rule = "must be preferences: train.loss compares pairs of answers"
                    yield Violation(path, source.source, rule, nearest)


@LOSS.register
class CrossEntropy(LossRecord):
    """Mean cross-entropy over labels."""

    kind: Literal["cross_entropy"] = "cross_entropy"

    owner = "moefold.training.losses.base:Objective"


@LOSS.register
class Distill(LossRecord):
    """Forward KL divergence from a teacher's distribution at each label (arXiv 1503.02531).

    The teacher runs on each rank's rows in the run's layout; below ZeRO 3 its weights are whole.
    """

    kind: Literal["distill"] = "distill"
    teacher: Annotated[str, OnDisk()]
    """A Hugging Face folder with the run's tokenizer; its layers may differ."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Divisor of both models' logits; the loss is multiplied by its square."""
    stored: Annotated[str, OnDisk()] | None = None
    """Folder with the teacher's ``top_k`` largest probabilities at each label, written before the
    first step unless it exists; None: the teacher runs in each step."""
    top_k: Size = 64
    """Number of probabilities stored for each label."""

    owner = "moefold.training.losses.distill:build_distillation"

    def read_config(self) -> ParsedConfig:
        """Return the teacher's description, without multi-token prediction.

        Raises:
            ValueError: if the folder cannot be read.
        """
        return read_config(Path(self.teacher), multi_token=False)

    def layout(self, layout: Any) -> Any:
        """Return the teacher's layout: the run's, with stages balanced for it and no offloading."""
        reset = {"stages": None, "recompute": None, "offload": None}
        return layout.model_copy(update={**reset, "state": type(layout.state)()})

    def violations(self, run: Any) -> Iterator[Violation]:
        """Yield violations of an unreadable teacher, another vocabulary, or an unfit layout."""
        yield from super().violations(run)
        path = ("train", "loss", "teacher")
        try:
            teacher = self.read_config().decoder
        except ValueError as error:
            rule = f"must be a Hugging Face folder that can be read: {error}"
            yield Violation(path, self.teacher, rule)
            return
        vocab = run.decoder.vocab
        if teacher.vocab != vocab:
            rule = f"must have the model's vocabulary of {vocab} tokens, but has {teacher.vocab}"
            yield Violation(path, self.teacher, rule)
        if self.stored is not None:
            if self.top_k > vocab:
                rule = f"must be at most the vocabulary's {vocab} tokens"
                yield Violation(("train", "loss", "top_k"), self.top_k, rule, vocab)
            if not all(isinstance(source, Chat) for source in run.data.train):
                rule = "needs chat sources only in data.train: each epoch cuts text differently"
                yield Violation(("train", "loss", "stored"), self.stored, rule, REMOVE)
        layout = self.layout(run.layout)
        if not any(run.layout.rules()) and layout.constrains_model:
            for violation in layout.violations(model_needs(teacher, run.data.seq)):
                rule = f"does not fit layout.{'.'.join(map(str, violation.path))}: {violation.rule}"
                yield Violation(path, self.teacher, rule)


@LOSS.register
class Dpo(LossRecord):
    """Direct preference optimisation (arXiv 2305.18290), on pairs of answers."""

    kind: Literal["dpo"] = "dpo"
    form: Literal["sigmoid", "ipo"] = "sigmoid"
    """``sigmoid``, or the squared distance of IPO (arXiv 2310.12036)."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """The loss's beta: factor on log-probability ratios of model and reference."""
    reference: Literal["adapters_off", "stored"] = "adapters_off"
    """The reference model: the model without its adapters, which runs in each step, or the model
    at the start of the run, whose scores of all answers are stored in the run's folder."""

    owner = "moefold.training.losses.dpo:build_preference"
    pairs: ClassVar[bool] = True

    def violations(self, run: Any) -> Iterator[Violation]:
        """Yield sources without pairs, and a reference without adapters in a run without them."""
        yield from super().violations(run)
        if self.reference == "adapters_off" and run.adapter is None:
            rule = "needs an adapter: without one the reference is the trained model itself"
            yield Violation(("train", "loss", "reference"), self.reference, rule, "stored")
