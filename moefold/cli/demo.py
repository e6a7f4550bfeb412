"""``moefold demo``: train a small mixture of experts on real text, in five minutes.

Trains the recipe demo on the source code of Python's standard library, in fewer steps on a slow
machine, and prints commands to try next. Exit status as of `moefold train`.
"""

import argparse
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.text import Text

from moefold.checkpoint import manifest
from moefold.checkpoint.folder import newest
from moefold.cli._common import add_json, progress_bars
from moefold.data.prepare import prepare
from moefold.files import free_folder
from moefold.run import Run, loaded_run
from moefold.training.report import BASELINES, summary
from moefold.training.run_folder import History, sets
from moefold.training.words import clock, count, step_time

RECIPE = "demo"
TOTAL_S, STEPS_S, FEWEST = 300, 225, 150
"""Maximum seconds of the demo, seconds of these for steps (evaluation and samples take the rest),
and minimum number of steps, however slow the machine."""
WARM_UP_STEPS, MEASURED_STEPS, MEASURED_S = 2, 8, 4.0
"""Number of warm-up steps; then maximum number and seconds of measured steps."""
SHOWN = {
    "experts.html": "which expert took which token",
    "loss.png": "loss curve",
    "expert_load.png": "load of each expert",
    "samples.txt": "texts generated during training",
}


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("overrides", metavar="k=v", nargs="*", help="override, such as seed=2")
    parser.add_argument(
        "--folder", metavar="OUT", help="output folder (default: a new one in runs/)"
    )
    add_json(parser, "print the results as one JSON object, and all other output on stderr")


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    loaded = loaded_run(RECIPE, args.overrides)
    run = loaded.record

    from moefold.cli._training import ENDED, open_job, print_answer, train_to_end
    from moefold.training.banner import card

    folder = Path(args.folder or free_folder(run.name))
    console = Console(stderr=args.json)
    fits = None
    if loaded.origins["train", "steps"].kind != "override":
        run, fits = fitted(run, folder, console)
    with open_job(run, folder, console) as job:
        status = train_to_end(job, console, [] if fits is None else [("steps", fits)])
    if args.json:
        print_answer(folder, status)
    elif status == ENDED:
        facts = summary(History.read(folder))
        console.print(card("[bold]done[/]", _rows(folder, facts), "green"))
        console.print("commands to try next", style="cyan")
        moefold, where = program(), shlex.quote(str(folder))
        bigger = shlex.quote(str(folder.parent / "bigger"))
        for command in (
            f"sample {where} --prompt 'class Queue:'",
            f"report {where}",
            f"export {where} {shlex.quote(str(folder) + '-hf')}",
            f"train demo --folder {bigger} model.shape.layers=8 train.steps=3000",
        ):
            # Not in the card, where a wrapped line could not be copied.
            console.print(Text(f"  {moefold} {command}", style="bold"), soft_wrap=True)
    return status


def fitted(run: Run, folder: Path, console: Console) -> tuple[Run, str | None]:
    """Return the run with as many of its steps as :data:`TOTAL_S` allows, and a text about it.

    A run that exists in ``folder`` keeps its number of steps.
    """
    begun, asked = newest(folder), run.train.steps
    if begun is not None:
        meta = manifest.read(begun).meta  # without a run for an imported model
        steps, said = meta["run"]["train"]["steps"] if "run" in meta else asked, None
    else:
        cache = folder.parent / ".prepared"
        with progress_bars(console) as told:
            prepare(run.data, cache, told)
        step_s = rehearsed(run, cache)
        steps = fitting(asked, step_s)
        said = f"{asked} fit into {clock(TOTAL_S)}, at {step_time(step_s)} per step as measured"
        if steps < asked:
            said = (
                f"{steps} of the recipe's {asked}, as a step takes {step_time(step_s)} on this "
                f"machine; train.steps={asked} runs all"
            )
    return run.model_copy(update={"train": run.train.model_copy(update={"steps": steps})}), said


def fitting(asked: int, step_s: float) -> int:
    """Return how many of ``asked`` steps of ``step_s`` seconds the demo runs."""
    return min(asked, max(FEWEST, int(STEPS_S / step_s)))


def rehearsed(run: Run, cache: Path) -> float:
    """Return the median time of the run's first steps in seconds, run in a scratch folder."""
    from moefold.training.trainer import Trainer

    with (
        tempfile.TemporaryDirectory(prefix="moefold-demo-") as scratch,
        Trainer(run, Path(scratch) / "run", cache=cache) as job,
    ):
        for _ in range(WARM_UP_STEPS):
            job.step()
        times: list[float] = []
        while len(times) < MEASURED_STEPS and sum(times) < MEASURED_S:
            started = time.perf_counter()
            job.step()
            times.append(time.perf_counter() - started)
    return median(times)


def _rows(folder: Path, facts: dict[str, Any]) -> Iterator[tuple[str, str | Text]]:
    """Yield the results of a finished demo as (title, text)."""
    for _, key in sets(facts):
        result = Text(f"{facts[key]:.3f} bits per byte", "bold")
        yield "result", Text.assemble(result, " on held-out files")
    beside = [f"{BASELINES.get(k, k)} {v:.3f}" for k, v in facts["baselines"].items()]
    if beside:
        yield "baselines", ", ".join(beside)
    took = f" in {clock(facts['wall_s'])}" if "wall_s" in facts else ""
    yield "trained", f"{facts['step']:,} steps, {count(facts['tokens'])} tokens{took}"
    yield "folder", str(folder)
    for number, (file, what) in enumerate(SHOWN.items()):
        if (folder / file).exists():
            yield "files" if number == 0 else "", f"{folder / file}  ({what})"


def program() -> str:
    """Return how to call this program: by name if the shell finds it, else by path."""
    beside = Path(sys.executable).parent / "moefold"
    found = shutil.which("moefold")
    if found is not None and (not beside.exists() or Path(found).samefile(beside)):
        return "moefold"
    if not beside.exists():
        return f"{shlex.quote(sys.executable)} -m moefold"
    here = Path.cwd()
    return shlex.quote(str(beside.relative_to(here) if beside.is_relative_to(here) else beside))
