"""Functions shared by ``train`` and ``demo``. Imports torch."""

import argparse
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from moefold.checkpoint.errors import SaveError
from moefold.checkpoint.folder import find_newest
from moefold.cli._common import print_json, progress_bars
from moefold.comm.config import Survive
from moefold.comm.environment import RankInfo
from moefold.comm.launch import RankLost
from moefold.comm.worker import Attempt
from moefold.comm.world import IN_OPERATION
from moefold.data.config import DataError
from moefold.run import Run
from moefold.training.banner import Row, banner_panel
from moefold.training.formatting import count
from moefold.training.hooks.alarms import RoutingCollapse
from moefold.training.hooks.assemble import assemble
from moefold.training.nonfinite import LargeGradients, NonFiniteStep
from moefold.training.recover import MemoryCheckpoint
from moefold.training.report import summary
from moefold.training.run_folder import History
from moefold.training.trainer import Interrupted, Trainer

COMPLETED = 0
STOPPED_BY_POLICY = 3
SAVED_AND_STOPPED = 75
"""Exit status of commands that train; ``docs/errors.md`` says how to react to each."""


def elastic_rank(
    info: RankInfo,
    attempt: Attempt,
    rank: Callable[..., int],
    record: Survive,
    args: argparse.Namespace,
) -> int:
    """Call a command's ``rank`` with the memory from which it resumes after a loss of ranks."""
    return rank(info, args, MemoryCheckpoint(attempt, record))


@contextmanager
def saying_how_to_resume(folder: str, is_fork: bool = False) -> Iterator[None]:
    """Add to a loss of ranks how the run in ``folder`` goes on.

    ``is_fork``: the command had --fork.

    Raises:
        RankLost: if ranks are lost; also if this process was started by another launcher, and an
            operation with its other ranks fails.
    """
    try:
        yield
    except RankLost as lost:
        reason = f"{lost.reason}; {resume_hint(folder, is_fork)}"
        raise RankLost(reason, lost.report, lost.ranks, lost.results) from lost
    except RuntimeError as error:
        if IN_OPERATION not in getattr(error, "__notes__", ()):
            raise
        reason = f"communication with other ranks failed: {error}"
        raise RankLost(f"{reason}; {resume_hint(folder, is_fork)}") from error


def resume_hint(folder: str, is_fork: bool) -> str:
    """Return how to resume a run, to complete a sentence; ``is_fork``: the command had --fork."""
    has_checkpoint = find_newest(Path(folder)) is not None
    where = "" if has_checkpoint else ", which has no checkpoint yet, so from the start"
    # Until there is a checkpoint a fork has to begin again where it began.
    without_fork = " and without --fork" if is_fork and has_checkpoint else ""
    folder = shlex.quote(folder)
    return f"to resume, repeat the command with --folder {folder}{without_fork}{where}"


def open_job(run: Run, folder: Path, console: Console, **options: Any) -> Trainer:
    """Open a run with its hooks, and prepare its data; ``options`` go to :class:`Trainer`."""
    hooks = assemble(run.watch, console)
    with progress_bars(console) as progress:
        return Trainer(run, folder, hooks, on_progress=progress, **options)


def train_to_end(
    job: Trainer, console: Console, banner_rows: Sequence[Row] = (), is_fork: bool = False
) -> int:
    """Show the banner with ``banner_rows``, train, print the result, return the exit status.

    ``is_fork``: the command had --fork, which must be omitted to resume the run.
    """
    folder = shlex.quote(str(job.folder))
    without_fork = " and without --fork" if is_fork else ""
    if job.recovered:
        console.print(Text(f"{job.recovered['why']}; resumed at step {job.step_number}", "yellow"))
    else:
        console.print(banner_panel(job, banner_rows))
    if job.step_number >= job.last_step:
        job.save()
        steps = f"train.steps={2 * job.step_number} train.extend=constant"
        command = f"--folder {folder} {steps}{without_fork} (or train.extend=decay or rewarm)"
        text = f"step {job.step_number} is done already; to train further, run again with {command}"
        console.print(Text(text), soft_wrap=True)
        return COMPLETED
    try:
        result = job.train()
    except Interrupted as stopped:
        console.print(Text(str(stopped), style="yellow"), soft_wrap=True)
        console.print(Text(resume_hint(str(job.folder), is_fork)), soft_wrap=True)
        return SAVED_AND_STOPPED
    except (NonFiniteStep, LargeGradients, RoutingCollapse) as stopped:
        console.print(Text("stopped", style="bold red"), Text(str(stopped)), sep=": ")
        return STOPPED_BY_POLICY
    except (OSError, SaveError, DataError):
        if checkpoint := find_newest(job.folder):
            text = f"the newest checkpoint is {checkpoint}; {resume_hint(str(job.folder), is_fork)}"
            console.print(Text(text, style="yellow"), soft_wrap=True)
        raise
    figures = f"{count(result['tokens'])} tokens, loss {result['lm_loss']:.3f}"
    text = Text.assemble(("done", "green"), f" step {job.step_number:,}, {figures}: {job.folder}")
    console.print(text, soft_wrap=True)
    return COMPLETED


def print_summary(folder: Path, status: int) -> None:
    """Print the output of ``--json`` of a command that trains."""
    history = History.read(folder)
    figures = summary(history) if history.lines else {}
    print_json({"folder": str(folder), "status": status, **figures})
