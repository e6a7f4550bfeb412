"""The base of hooks, which the trainer calls at a run's events, and what they may access."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from moefold.checkpoint.disk import OUT_OF_SPACE

Figures = dict[str, float | int]
"""Metrics of one step or evaluation, under flat keys such as ``val/stdlib/bits_per_byte``."""


HOOKS = "hooks"
"""Key of the hooks' states in a checkpoint's metadata, and beside the progress of copies."""
HookState = dict[str, Any]
"""What a hook has counted or collected, as plain JSON: text, numbers, lists and mappings."""

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
    hook_states: dict[str, Any]
    """States of the hooks, of the checkpoint from which the run starts or to which it returned."""
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

    def start_trace(self) -> None:
        """Trace what follows on every rank, until ``stop_trace``."""
        ...

    def stop_trace(self, file: str | None, failed: bool = False) -> dict[str, Any]:
        """Write rank 0's trace and return the last step's walls; without a file, discard it."""
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

    def state(self) -> HookState:
        """Return what this hook has counted, so that a resumed run continues as if never stopped.

        It is stored in each checkpoint, under the class's name, whatever the layout.
        """
        return {}

    def load_state(self, state: HookState) -> None:
        """Take over what :meth:`state` returned, before ``on_start`` and ``on_rewind``.

        ``state`` is empty at the start of a run, and for checkpoints without this hook's state.
        """

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


def _named(hooks: Sequence[Hook]) -> dict[str, Hook]:
    """Return the hooks by the name of their class, numbered from the second of a class on."""
    named: dict[str, Hook] = {}
    for hook in hooks:
        base = name = type(hook).__name__
        number = 1
        while name in named:
            number += 1
            name = f"{base}#{number}"
        named[name] = hook
    return named


def hook_states(hooks: Sequence[Hook]) -> dict[str, HookState]:
    """Return the state of each hook that has one, by name."""
    states = ((name, hook.state()) for name, hook in _named(hooks).items())
    return {name: state for name, state in states if state}


def load_hook_states(hooks: Sequence[Hook], states: Mapping[str, Any]) -> None:
    """Give each hook its state of a checkpoint, or an empty one."""
    for name, hook in _named(hooks).items():
        state = states.get(name)
        hook.load_state(dict(state) if isinstance(state, dict) else {})


def call_hooks(hooks: Sequence[Hook], event: str, job: JobView, *args: Any) -> None:
    """Call the hooks for an event, in order; log a full disk once per hook if the run may go on."""
    recoverable = event in ("on_step", "on_evaluate")
    if event in ("on_start", "on_rewind"):
        load_hook_states(hooks, job.hook_states)
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


def stop_hooks(hooks: Sequence[Hook], job: JobView, error: BaseException | None) -> None:
    """Call every hook's ``on_stop``, also after one of them fails; raise the first failure.

    If the run ends with an error, failures are logged instead.
    """
    errors: list[Exception] = []
    for hook in hooks:
        try:
            hook.on_stop(job, error)
        except Exception as caught:
            errors.append(caught)
    for caught in errors:
        if error is None:
            raise caught
        _log.warning("a hook failed at the end of the run: %s", caught)
