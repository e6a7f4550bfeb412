"""What the commands share that train: opening a run, the banner, the end and its exit status."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from moefold.comm.world import World
from moefold.data.prepare import Progress as Told
from moefold.data.prepare import prepare
from moefold.run import Run
from moefold.training.banner import panel
from moefold.training.history import History
from moefold.training.hooks.assemble import assemble
from moefold.training.hooks.health import RoutingCollapse
from moefold.training.loop import Interrupted, Job
from moefold.training.nonfinite import NonFiniteStep
from moefold.training.recover import Keeper
from moefold.training.report import summary
from moefold.training.words import count

ENDED, STOPPED_BY_POLICY, SAVED_AND_STOPPED = 0, 3, 75
"""Exit status of a command that trains; ``docs/errors.md`` says what each one asks for."""


def open_job(
    run: Run,
    folder: Path,
    console: Console,
    cache: Path | None = None,
    world: World | None = None,
    keeper: Keeper | None = None,
) -> Job:
    """Open a run with its hooks; its data is prepared first, with a bar on a terminal."""
    cache = cache or folder.parent / ".prepared"
    if world is None or world.rank == 0:
        with telling(console) as told:
            prepare(run.data, cache, told)
    hooks = assemble(run.watch, console)
    return Job(run, folder, hooks, cache=cache, world=world, keeper=keeper)


def go(job: Job, console: Console) -> int:
    """Show the banner, train, say how it ended, and return the exit status."""
    if job.recovered:
        console.print(Text(f"{job.recovered['why']}; on from step {job.step_number}", "yellow"))
    else:
        console.print(panel(job, job.folder))
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
