"""``moefold demo``: train a small mixture of experts on real text, in five minutes.

Trains the recipe demo on the source code of Python's standard library, in fewer steps on a slow
machine, and prints commands to try next. Exit status as of `moefold train`.
"""

import argparse
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.text import Text

from moefold.checkpoint import manifest
from moefold.checkpoint.folder import find_newest
from moefold.cli._common import add_json, progress_bars
from moefold.data.prepare import prepare
from moefold.files import scratch_folder, unused_folder
from moefold.run import Run, load_run_with_origins
from moefold.training.formatting import clock, count, step_time
from moefold.training.report import BASELINES, summary
from moefold.training.run_folder import History, held_out_sets

RECIPE = "demo"
BUDGET_S = 300
STEPS_BUDGET_S = 225
MIN_STEPS = 150
"""Maximum seconds of the demo, the seconds of these for steps (evaluation and samples take the
rest), and the minimum number of steps, however slow the machine."""
WARM_UP_STEPS = 2
MEASURED_STEPS = 8
MEASURED_S = 4.0
"""Number of warm-up steps; maximum number and seconds of measured steps."""
OUTPUT_FILES = {
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
    loaded = load_run_with_origins(RECIPE, args.overrides)
    run = loaded.record

    from moefold.cli._training import COMPLETED, open_job, print_summary, train_to_end
    from moefold.training.banner import card

    folder = Path(args.folder or unused_folder(run.name))
    console = Console(stderr=args.json)
    steps_note = None
    if loaded.origins["train", "steps"].kind != "override":
        run, steps_note = limit_steps(run, folder, console)
    with open_job(run, folder, console) as job:
        status = train_to_end(job, console, [] if steps_note is None else [("steps", steps_note)])
    if args.json:
        print_summary(folder, status)
    elif status == COMPLETED:
        facts = summary(History.read(folder))
        console.print(card("[bold]done[/]", _result_rows(folder, facts), "green"))
        console.print("commands to try next", style="cyan")
        moefold = program()
        run_folder = shlex.quote(str(folder))
        bigger = shlex.quote(str(folder.parent / "bigger"))
        for command in (
            f"sample {run_folder} --prompt 'class Queue:'",
            f"report {run_folder}",
            f"export {run_folder} {shlex.quote(str(folder) + '-hf')}",
            f"train demo --folder {bigger} model.shape.layers=8 train.steps=3000",
        ):
            # Not in the card, where a wrapped line could not be copied.
            console.print(Text(f"  {moefold} {command}", style="bold"), soft_wrap=True)
    return status


def limit_steps(run: Run, folder: Path, console: Console) -> tuple[Run, str | None]:
    """Return the run with as many of its steps as :data:`BUDGET_S` allows, and a note about it.

    A run that exists in ``folder`` keeps its number of steps.
    """
    checkpoint = find_newest(folder)
    wanted = run.train.steps
    if checkpoint is not None:
        meta = manifest.read(checkpoint).meta  # without a run for an imported model
        steps = meta["run"]["train"]["steps"] if "run" in meta else wanted
        text = None
    else:
        cache = folder.parent / ".prepared"
        with progress_bars(console) as show:
            prepare(run.data, cache, show)
        step_s = measure_step_s(run, cache)
        steps = affordable_steps(wanted, step_s)
        text = f"{wanted} fit into {clock(BUDGET_S)}, at {step_time(step_s)} per step as measured"
        if steps < wanted:
            text = (
                f"{steps} of the recipe's {wanted}, as a step takes {step_time(step_s)} on this "
                f"machine; train.steps={wanted} runs all"
            )
    return run.model_copy(update={"train": run.train.model_copy(update={"steps": steps})}), text


def affordable_steps(wanted: int, step_s: float) -> int:
    """Return how many of the ``wanted`` steps of ``step_s`` seconds the demo runs."""
    return min(wanted, max(MIN_STEPS, int(STEPS_BUDGET_S / step_s)))


def measure_step_s(run: Run, cache: Path) -> float:
    """Return the median time in seconds of the run's first steps, run in a scratch folder."""
    from moefold.training.trainer import Trainer

    with (
        scratch_folder("demo") as scratch,
        Trainer(run, scratch / "run", cache=cache) as job,
    ):
        for _ in range(WARM_UP_STEPS):
            job.step()
        times: list[float] = []
        while len(times) < MEASURED_STEPS and sum(times) < MEASURED_S:
            started = time.perf_counter()
            job.step()
            times.append(time.perf_counter() - started)
    return median(times)


def _result_rows(folder: Path, facts: dict[str, Any]) -> Iterator[tuple[str, str | Text]]:
    """Yield the results of a finished demo as (title, text)."""
    for _, key in held_out_sets(facts):
        result = Text(f"{facts[key]:.3f} bits per byte", "bold")
        yield "result", Text.assemble(result, " on held-out files")
    measured = facts["baselines"].items()
    baselines = [f"{BASELINES.get(name, name)} {value:.3f}" for name, value in measured]
    if baselines:
        yield "baselines", ", ".join(baselines)
    took = f" in {clock(facts['wall_s'])}" if "wall_s" in facts else ""
    yield "trained", f"{facts['step']:,} steps, {count(facts['tokens'])} tokens{took}"
    yield "folder", str(folder)
    for number, (file, what) in enumerate(OUTPUT_FILES.items()):
        if (folder / file).exists():
            yield "files" if number == 0 else "", f"{folder / file}  ({what})"


def program() -> str:
    """Return how to invoke this program: by name if the shell finds it, else by path."""
    script = Path(sys.executable).parent / "moefold"
    in_path = shutil.which("moefold")
    if in_path is not None and (not script.exists() or Path(in_path).samefile(script)):
        return "moefold"
    if not script.exists():
        return f"{shlex.quote(sys.executable)} -m moefold"
    cwd = Path.cwd()
    return shlex.quote(str(script.relative_to(cwd) if script.is_relative_to(cwd) else script))
