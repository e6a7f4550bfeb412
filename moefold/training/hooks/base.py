"""What a hook is: everything that is not the step, told of the run's events by the loop."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from moefold.checkpoint.disk import FULL

Figures = dict[str, float | int]
"""Of one step or one evaluation, under flat keys such as ``val/stdlib/bits_per_byte``."""


_log = logging.getLogger("moefold.training")


class JobView(Protocol):
    """What a hook may read of the running job and ask of it."""

    run: Any
    """The run's record."""
    folder: Path
    last_step: int
    """The step at which this process ends."""
    world: Any
    """The ranks that train; hooks are told on the first."""
    model: Any
    """This rank's part of the model."""
    loader: Any
    tokenizer: Any
    place: int
    """Where the newest step stands in the data's order."""

    @property
    def recovered(self) -> dict[str, Any]:
        """What ranks were lost before this attempt, and why; see ``training/recover.py``."""
        ...

    @property
    def step_number(self) -> int:
        """Optimizer steps done, counted from the start of the run and not of this process."""
        ...

    @property
    def tokens(self) -> int:
        """Valid tokens trained on so far."""
        ...

    def health(self) -> list[dict[str, Any]]:
        """Figures of each MoE layer's routing since they were last asked for."""
        ...

    def weights(self, pattern: str) -> dict[str, Any]:
        """Return the parameters whose global names match a pattern, whole and on the host.

        Those of ``model`` are parts, and where data ranks share them handles without values.
        """
        ...

    def pace(self) -> list[float]:
        """Seconds in which each rank was busy since this was last asked for, waits left out."""
        ...

    def evaluate(self) -> Figures:
        """Evaluate on the held-out sets; every hook's ``on_evaluate`` sees the result."""
        ...

    def generate(self, prompts: list[list[int]], **how: Any) -> list[list[int]]:
        """Return what the model writes after each prompt; see ``model.generate`` for options."""
        ...

    def save(self) -> Path:
        """Write a checkpoint of this step and return its folder."""
        ...

    def request_stop(self, reason: str) -> None:
        """Ask the loop to save and end after this step."""
        ...


class Hook:
    """The base of every hook: does nothing at each event.

    Hooks are told in the order of their list, so one may read what an earlier one added to
    ``metrics``. A hook that raises stops the run; it is then told so by ``on_stop`` like the rest.
    Where the run is to go on without a checkpoint that failed, it does so too without what a hook
    could not write of a step on a full disk.
    """

    refused = False
    """Whether a full disk has refused what it wrote last."""

    def on_start(self, job: JobView) -> None:
        """Before the first step of this process, after a checkpoint is loaded."""

    def on_rewind(self, job: JobView) -> None:
        """After the run went back to an earlier step; what was written about later ones is void."""

    def on_step(self, job: JobView, metrics: Figures) -> None:
        """After each optimizer step; ``metrics`` may be added to."""

    def on_evaluate(self, job: JobView, metrics: Figures) -> None:
        """After each evaluation."""

    def on_stop(self, job: JobView, error: BaseException | None) -> None:
        """Once, when the run ends or fails with ``error``."""


def tell(hooks: Sequence[Hook], event: str, job: JobView, *given: Any) -> None:
    """Tell hooks of an event, one after another; a hook that a full disk refuses says so once."""
    spared = event in ("on_step", "on_evaluate")
    for hook in hooks:
        try:
            getattr(hook, event)(job, *given)
            if event == "on_step":
                hook.refused = False
        except OSError as error:
            goes_on = spared and job.run.watch.checkpoint.on_failure == "continue"
            if not goes_on or error.errno not in FULL:
                raise
            if not hook.refused:
                name = type(hook).__name__.removesuffix("Hook").lower()
                _log.warning(
                    "%s: %s; training goes on, and its steps are missing there", name, error
                )
            hook.refused = True
