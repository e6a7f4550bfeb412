"""Functions shared by ``train`` and ``demo``. Imports torch."""

import argparse
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from moefold.checkpoint.errors import SaveError
from moefold.checkpoint.folder import newest
from moefold.cli._common import print_json, progress_bars
from moefold.comm.config import Survive
from moefold.comm.environment import RankInfo
from moefold.comm.worker import Attempt
from moefold.run import Run
from moefold.training.banner import Row, panel
from moefold.training.hooks.alarms import RoutingCollapse
from moefold.training.hooks.assemble import assemble
from moefold.training.nonfinite import NonFiniteStep
from moefold.training.recover import MemoryCheckpoint
from moefold.training.report import summary
from moefold.training.run_folder import History
from moefold.training.trainer import Interrupted, Trainer
from moefold.training.words import count

ENDED, STOPPED_BY_POLICY, SAVED_AND_STOPPED = 0, 3, 75
"""Exit status of commands that train; ``docs/errors.md`` says how to react to each."""


def elastic_rank(
    info: RankInfo,
    attempt: Attempt,
    rank: Callable[..., int],
    record: Survive,
    args: argparse.Namespace,
) -> int:
    """Call ``rank`` of a command with the memory from which it resumes after a loss of ranks.

    Ranks fork from a process that has imported this function's module, which therefore is one that
    imports all that training needs.
    """
    return rank(info, args, MemoryCheckpoint(attempt, record))


def open_job(run: Run, folder: Path, console: Console, **how: Any) -> Trainer:
    """Open a run with its hooks, and prepare its data; ``how`` is passed to :class:`Trainer`."""
    hooks = assemble(run.watch, console)
    with progress_bars(console) as told:
        return Trainer(run, folder, hooks, told=told, **how)


def train_to_end(
    job: Trainer, console: Console, said: Sequence[Row] = (), forks: bool = False
) -> int:
    """Show the banner with the lines ``said``, train, print the result, return the exit status.

    ``forks``: the command had --fork, which must be left out to resume the run.
    """
    folder = shlex.quote(str(job.folder))
    without = " and without --fork" if forks else ""
    onwards = f"to resume, repeat the command with --folder {folder}{without}"
    if job.recovered:
        console.print(Text(f"{job.recovered['why']}; resumed at step {job.step_number}", "yellow"))
    else:
        console.print(panel(job, said))
    if job.step_number >= job.last_step:
        job.save()
        where = f"--folder {folder} train.steps={2 * job.step_number}{without}"
        done = f"step {job.step_number} is done already; to train further, run again with {where}"
        console.print(Text(done), soft_wrap=True)
        return ENDED
    try:
        final = job.train()
    except Interrupted as stopped:
        console.print(Text(str(stopped), style="yellow"), soft_wrap=True)
        console.print(Text(onwards), soft_wrap=True)
        return SAVED_AND_STOPPED
    except (NonFiniteStep, RoutingCollapse) as stopped:
        console.print(Text("stopped", style="bold red"), Text(str(stopped)), sep=": ")
        return STOPPED_BY_POLICY
    except (OSError, SaveError):
        if stood := newest(job.folder):
            again = f"the newest checkpoint is {stood}; {onwards}"
            console.print(Text(again, style="yellow"), soft_wrap=True)
        raise
    figures = f"{count(final['tokens'])} tokens, loss {final['lm_loss']:.3f}"
    done = Text.assemble(("done", "green"), f" step {job.step_number:,}, {figures}: {job.folder}")
    console.print(done, soft_wrap=True)
    return ENDED


def print_answer(folder: Path, status: int) -> None:
    """Print the output of ``--json`` of a command that trains."""
    history = History.read(folder)
    figures = summary(history) if history.lines else {}
    print_json({"folder": str(folder), "status": status, **figures})
