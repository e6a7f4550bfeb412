"""The base of hooks, which the trainer calls at a run's events, and what they may access."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from moefold.checkpoint.disk import OUT_OF_SPACE

Figures = dict[str, float | int]
"""Metrics of one step or evaluation, under flat keys such as ``val/stdlib/bits_per_byte``."""


_log = logging.getLogger("moefold.training")


class JobView(Protocol):
    """The part of the trainer that hooks may use."""

    run: Any
    """The run's record."""
    folder: Path
    last_step: int
    """The step at which this process ends."""
    world: Any
    """The ranks that train; hooks run on rank 0."""
    model: Any
    """This rank's part of the model."""
    loader: Any
    tokenizer: Any
    batch_index: int
    """Index of the newest step's batch in the data order."""

    @property
    def recovered(self) -> dict[str, Any]:
        """Which ranks were lost before this attempt, and why (``MemoryCheckpoint.recovered``)."""
        ...

    @property
    def step_number(self) -> int:
        """Optimizer steps done since the start of the run, not of this process."""
        ...

    @property
    def tokens(self) -> int:
        """Valid tokens trained on so far."""
        ...

    def health(self) -> list[dict[str, Any]]:
        """Return routing statistics of each MoE layer in the last step."""
        ...

    def weights(self, pattern: str) -> dict[str, Any]:
        """Return the parameters whose global names match a pattern, unsharded and on the host.

        Parameters of ``model`` are this rank's parts, or handles without values if sharded.
        """
        ...

    def pace(self) -> list[float]:
        """Return each rank's busy seconds since the last call, waits excluded."""
        ...

    def evaluate(self) -> Figures:
        """Evaluate on the held-out sets, and pass the result to every hook's ``on_evaluate``."""
        ...

    def generate(self, prompts: list[list[int]], **options: Any) -> list[list[int]]:
        """Return the token ids generated after each prompt; options of ``model.generate``."""
        ...

    def save(self) -> Path:
        """Write a checkpoint of this step and return its folder."""
        ...

    def request_stop(self, reason: str) -> None:
        """Ask the trainer to save and end after this step."""
        ...


class Hook:
    """Base of hooks: a method for each event, which does nothing.

    Hooks are called in the order of their list, so each may read what earlier ones added to
    ``metrics``. A hook that raises stops the run, after ``on_stop`` of every hook, its own too.
    If ``watch.checkpoint.on_failure`` is ``continue``, an error of a full disk in ``on_step`` or
    ``on_evaluate`` is logged instead.
    """

    write_failed = False
    """Whether the last write failed because the disk was full."""

    def on_start(self, job: JobView) -> None:
        """Called before the first step of this process, after a checkpoint is loaded."""

    def on_rewind(self, job: JobView) -> None:
        """Called after the run returned to an earlier step, which voids records of later steps."""

    def on_step(self, job: JobView, metrics: Figures) -> None:
        """Called after each optimizer step; may add to ``metrics``."""

    def on_evaluate(self, job: JobView, metrics: Figures) -> None:
        """Called after each evaluation."""

    def on_stop(self, job: JobView, error: BaseException | None) -> None:
        """Called once, when the run ends or fails with ``error``."""


def call_hooks(hooks: Sequence[Hook], event: str, job: JobView, *args: Any) -> None:
    """Call the hooks for an event, in order; log a full disk once per hook if the run may go on."""
    recoverable = event in ("on_step", "on_evaluate")
    for hook in hooks:
        try:
            getattr(hook, event)(job, *args)
            if event == "on_step":
                hook.write_failed = False
        except OSError as error:
            continues = recoverable and job.run.watch.checkpoint.on_failure == "continue"
            if not continues or error.errno not in OUT_OF_SPACE:
                raise
            if not hook.write_failed:
                name = type(hook).__name__.removesuffix("Hook").lower()
                _log.warning("%s: %s; training continues without writing these steps", name, error)
            hook.write_failed = True
