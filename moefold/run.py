"""The run file: the record of a whole training run, its validation and its loading.

``model``, ``data``, ``optim``, ``train`` and ``adapter`` define what is computed, the run's
identity; ``layout`` defines where and never the result; ``watch``, what is logged and saved.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import Field

from moefold import finetune
from moefold.config.base import Record, to_dict
from moefold.config.errors import FieldPath, RunError, Violation
from moefold.config.fields import OnDisk
from moefold.config.load import LoadedRecord, load
from moefold.data.config import Data, DataError
from moefold.mesh.legality import size_violations
from moefold.model.config import MODEL, Decoder
from moefold.model.families import folder
from moefold.moe.dispatch.config import Dispatch
from moefold.optim.config import OPTIMIZER, Optim
from moefold.parallel.config import Layout
from moefold.spec.decoder import ModelNeeds, model_needs, require_possible
from moefold.spec.quantised import cut_violations, moment_violations, quantise_violations
from moefold.spec.tuning import apply_tuning, optimizer_violations, tuning_violations
from moefold.training.config import ADAPTER, Lora, Train
from moefold.training.hooks.config import Watch

RECIPES = Path(__file__).parent / "recipes"
IDENTITY = ("seed", "model", "data", "optim", "train", "adapter")
"""Fields that define what is computed; a run folder is resumed only if they agree."""
_FREE_IN_TRAIN = ("steps", "extend", "repeat", "loss_chunk", "routing")
FREE_IN_IDENTITY = tuple(("train", field) for field in _FREE_IN_TRAIN)
"""Fields inside ``IDENTITY`` that may change on resume. ``micro_batch`` may not: balance terms and
capacity are computed over a micro-batch."""


class Run(Record):
    """One training run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    deterministic: bool = False
    """Whether two runs give the same bits, at some cost of speed."""
    model: Annotated[Record, MODEL]
    data: Data
    optim: Annotated[Optim, OPTIMIZER]
    train: Train
    adapter: Annotated[Lora, ADAPTER] | None = None
    """Adapters that are trained instead of the model's weights; None trains the weights."""
    layout: Layout = Layout()
    watch: Watch = Watch()
    uses: tuple[Annotated[str, OnDisk()], ...] = ()
    """Python files from outside the package that register parts."""

    def rules(self) -> Iterator[Violation]:
        """Learning rate, model, adapters, number formats, loss and layout fit each other."""
        for violation in self.optim.violations(self.train.steps):
            yield violation.under("optim")
        if self.layout.state.step == "host" and not self.optim.elementwise:
            rule = f"needs an elementwise optimizer, such as adamw; optim.kind is {self.optim.kind}"
            yield Violation(("layout", "state", "step"), "host", rule, "device")
        dispatch = self.layout.dispatch
        if self.deterministic and isinstance(dispatch, Dispatch) and not dispatch.deterministic:
            rule = f"must be false with layout.dispatch {dispatch.kind}, which is not deterministic"
            yield Violation(("deterministic",), True, rule, False)
        try:
            violations = list(self.model.violations(self.data.vocab))  # type: ignore[attr-defined]
            yield from (violation.under("model") for violation in violations)
            if violations or any(self.model.rules()):
                return
            require_possible(self._base_decoder)
            if self.train.freeze or self.adapter or self.train.quantise:
                yield from tuning_violations(self._base_decoder, self.train.freeze, self.adapter)
                yield from quantise_violations(self.decoder)
                cuts = cut_violations(self.decoder, self.layout, self.data.seq)
                yield from (violation.under("layout") for violation in cuts)
            found = optimizer_violations(self.decoder, self.optim)
            yield from (violation.under("optim") for violation in found)
            if self.optim.group:
                cuts = moment_violations(self.decoder, self.optim, self.layout, self.data.seq)
                yield from (violation.under("layout") for violation in cuts)
            yield from self.train.violations(self)
            if self.layout.constrains_model and not any(self.layout.rules()):
                rows = self.train.micro_batch
                broken = self.layout.violations(self.needs, rows * self.data.seq)
                yield from (violation.under("layout") for violation in broken)
                yield from self._step_violations()
        except DataError as error:
            yield Violation(("data", "tokenizer"), self.data.tokenizer, str(error))
        except ValueError as error:
            yield Violation(("model",), self.model, str(error))

    def _step_violations(self) -> Iterator[Violation]:
        """Yield a violation if the schedule cannot run a step's number of micro-batches."""
        train = self.train
        batches: dict[FieldPath, int] = {("train", "batch"): train.batch}
        if train.ramp is not None:
            batches["train", "ramp", "from"] = train.ramp.start
        for path, batch in batches.items():
            for found in self.layout.step_violations(batch // train.micro_batch):
                rule = f"{found.rule} (train.micro_batch is {train.micro_batch})"
                yield Violation(path, batch, rule, found.nearest * train.micro_batch)

    @cached_property
    def decoder(self) -> Decoder:
        """The model's full description: vocabulary, frozen weights, adapters, number formats."""
        decoder = apply_tuning(self._base_decoder, self.train.freeze, self.adapter)
        return decoder.model_copy(update={"quantise": self.train.quantise})

    @cached_property
    def needs(self) -> ModelNeeds:
        """What the model and the length of its sequences ask of a layout."""
        return model_needs(self.decoder, self.data.seq)

    @cached_property
    def _base_decoder(self) -> Decoder:
        """The model's description without frozen weights, adapters or quantisation."""
        return self.model.describe(self.data.vocab)  # type: ignore[attr-defined]


def require_fit(run: Run, world: int) -> None:
    """Check that a run's layout fits on ``world`` ranks.

    Raises:
        RunError: if it does not, with every violation and the nearest legal values.
    """
    layout = run.layout
    found = size_violations(layout.split, run.needs, world, layout.order, layout.stages)
    found += [broken.under("layout") for broken in layout.world_violations(world)]
    if found:
        ranks = f"{world} ranks" if world > 1 else "one rank (for more: --nproc N or a launcher)"
        raise RunError(found, to_dict(run), f"layout {layout.sizes!r} on {ranks}")


def recipes() -> dict[str, Path]:
    """Return the paths of the run files shipped in the package, by name."""
    return {path.stem: path for path in sorted(RECIPES.glob("*.yaml"))}


def load_run(source: str | Path, overrides: Sequence[str] = ()) -> Run:
    """Load and validate a run; relative paths in it become absolute.

    Args:
        source: a run file, a recipe's name, or a Hugging Face folder to fine-tune.
        overrides: changes ``path=value``, such as ``train.steps=10``; for a Hugging Face folder
            also ``base=RECIPE``.

    Raises:
        RunError: if it is invalid; lists every violation with path, rule and nearest legal value.
    """
    return load_run_with_origins(source, overrides).record


def load_run_with_origins(source: str | Path, overrides: Sequence[str] = ()) -> LoadedRecord[Run]:
    """Load a run as :func:`load_run` does, with the origin of each of its values."""
    if isinstance(overrides, str):
        raise TypeError(f"overrides is {overrides!r}; pass a list, such as [{overrides!r}]")
    path = Path(source)
    finetune.require_base_model(source)
    if (path / "config.json").exists():
        known = recipes() | finetune.recipes()
        try:
            return load(Run, *finetune.raw_run(path, overrides), known, f"fine-tuning of {path}")
        except ValueError:
            folder.read_config(path)  # its error is clearer for a family that nothing registered
            raise
    return load(Run, source, overrides, recipes())
