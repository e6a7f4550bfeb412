"""What the commands share that train: opening a run, the banner, the end and its exit status."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from moefold.checkpoint.errors import SaveError
from moefold.checkpoint.folder import newest
from moefold.comm.world import World
from moefold.data.prepare import Progress as Told
from moefold.data.prepare import prepare
from moefold.run import Run
from moefold.training.banner import Row, panel
from moefold.training.hooks.alarms import RoutingCollapse
from moefold.training.hooks.assemble import assemble
from moefold.training.nonfinite import NonFiniteStep
from moefold.training.recover import Keeper
from moefold.training.report import summary
from moefold.training.run_folder import History
from moefold.training.trainer import Interrupted, Trainer
from moefold.training.words import count

ENDED, STOPPED_BY_POLICY, SAVED_AND_STOPPED = 0, 3, 75
"""Exit status of a command that trains; ``docs/errors.md`` says what each one asks for."""


def open_job(
    run: Run,
    folder: Path,
    console: Console,
    world: World | None = None,
    keeper: Keeper | None = None,
    scratch: Path | None = None,
    forks: bool = False,
) -> Trainer:
    """Open a run with its hooks; its data is prepared, with a bar on a terminal."""
    hooks = assemble(run.watch, console)
    with telling(console) as told:
        return Trainer(
            run, folder, hooks, world=world, keeper=keeper, told=told, scratch=scratch, forks=forks
        )


def prepare_data(run: Run, cache: Path, console: Console) -> None:
    """Prepare a run's data, with a bar on a terminal."""
    with telling(console) as told:
        prepare(run.data, cache, told)


def go(job: Trainer, console: Console, said: Sequence[Row] = ()) -> int:
    """Show the banner with the lines ``said``, train, say how it ended, return the exit status."""
    if job.recovered:
        console.print(Text(f"{job.recovered['why']}; on from step {job.step_number}", "yellow"))
    else:
        console.print(panel(job, job.folder, said))
    if job.step_number >= job.last_step:
        job.save()
        where = f"--folder {job.folder} train.steps={2 * job.last_step}"
        console.print(f"step {job.last_step} is done already; go on with {where}", soft_wrap=True)
        return ENDED
    try:
        final = job.train()
    except Interrupted as stopped:
        console.print(Text(str(stopped), style="yellow"), soft_wrap=True)
        again = f"the same command with --folder {job.folder} goes on from there"
        console.print(again, soft_wrap=True, highlight=False)
        return SAVED_AND_STOPPED
    except (NonFiniteStep, RoutingCollapse) as stopped:
        console.print(Text("stopped", style="bold red"), Text(str(stopped)), sep=": ")
        return STOPPED_BY_POLICY
    except (OSError, SaveError):
        if stood := newest(job.folder):
            again = f"{stood} stands; the same command with --folder {job.folder} goes on from it"
            console.print(Text(again, style="yellow"), soft_wrap=True)
        raise
    tokens, loss = count(final["tokens"]), final["lm_loss"]
    console.print(
        f"[green]done[/] step {job.step_number:,}, {tokens} tokens, loss {loss:.3f}: {job.folder}",
        soft_wrap=True,
        highlight=False,
    )
    return ENDED


def answer(folder: Path, status: int) -> str:
    """Return what a command that trains answers with ``--json``."""
    history = History.read(folder)
    figures = summary(history) if history.lines else {}
    return json.dumps({"folder": str(folder), "status": status, **figures}, indent=2)


@contextmanager
def telling(console: Console) -> Iterator[Told]:
    """Show what preparing data is at; on a terminal alone, and gone when it is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        tasks: dict[str, int] = {}

        def told(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done)  # type: ignore[arg-type]

        yield told
