"""What ``moefold train`` does."""

import argparse
import json
import os
import tempfile
from pathlib import Path

from rich.console import Console

from moefold.api import free_folder
from moefold.checkpoint import manifest
from moefold.checkpoint.errors import CheckpointError
from moefold.checkpoint.folder import newest
from moefold.cli._training import answer, go, open_job
from moefold.config.records import plain
from moefold.run import Run, load_run
from moefold.training.banner import facts, panel
from moefold.training.loop import Job
from moefold.training.state import differences, restore

FORK_FILE = "fork.json"


def train(args: argparse.Namespace) -> int:
    """Carry out the command; return its exit status."""
    _one_process(args.nproc)
    overrides = list(args.overrides)
    if args.layout is not None:
        overrides.append(f"layout.sizes={json.dumps(args.layout)}")
    run = load_run(args.source, overrides)
    if args.fork is not None and args.folder is None:
        raise ValueError("--fork NEW starts from another run: name its folder with --folder OLD")
    console = Console(stderr=args.json)
    folder = Path(args.fork or args.folder or free_folder(run.name))
    if args.dry_run:
        return _dry_run(run, folder, args, console)
    with open_job(run, folder, console) as job:
        if args.fork is not None:
            _fork(job, Path(args.folder), console)
        _until(job, args.until)
        status = go(job, console)
    if args.json:
        print(answer(folder, status))
    return status


def _one_process(nproc: int) -> None:
    """Refuse what this version cannot do, before anything is read."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if nproc < 1:
        raise ValueError(f"--nproc {nproc}: at least 1")
    if nproc > 1:
        raise ValueError(f"--nproc {nproc}: this version trains on one process; leave it out")
    if started > 1:
        raise ValueError(
            f"started as one of {started} processes (WORLD_SIZE): this version trains on one; "
            "start it without a launcher"
        )


def _dry_run(run: Run, folder: Path, args: argparse.Namespace, console: Console) -> int:
    """Show the banner of the run as it would start in ``folder``, and leave no trace there."""
    if args.fork is not None:
        raise ValueError("--dry-run looks at one folder: leave --fork out")
    if folder.exists():
        with open_job(run, folder, console) as job:
            _until(job, args.until)
            _show(job, folder, args.json, console)
        return 0
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix=".dry-run-", dir=folder.parent) as scratch,
        open_job(run, Path(scratch) / "run", console, folder.parent / ".prepared") as job,
    ):
        _until(job, args.until)
        _show(job, folder, args.json, console)
    return 0


def _show(job: Job, folder: Path, as_json: bool, console: Console) -> None:
    if as_json:
        print(json.dumps(facts(job, folder), indent=2))
    else:
        console.print(panel(job, folder))


def _until(job: Job, until: int | None) -> None:
    if until is None:
        return
    if not job.step_number < until <= job.last_step:
        raise ValueError(
            f"--until {until}: the run is at step {job.step_number} and its last is "
            f"{job.last_step}; choose a step between, up to the last"
        )
    job.last_step = until


def _fork(job: Job, old: Path, console: Console) -> None:
    """Give a new run the weights, optimizer state and place of another one's newest checkpoint."""
    if job.resumed_from is not None:
        raise ValueError(f"--fork {job.folder}: there is a run already; name a new folder")
    path = newest(old)
    if path is None:
        raise CheckpointError(f"--folder {old} holds no checkpoint to fork from")
    meta = manifest.read(path).meta
    changed = differences(meta["run"], plain(job.run))
    job.progress = restore(path, job.model, job.optimizer)
    said = {"from": str(path), "step": job.step_number, "changed": changed}
    (job.folder / FORK_FILE).write_text(json.dumps(said, indent=2) + "\n")
    job.save()
    console.print(f"forked from {path} at step {job.step_number}; it differs in", soft_wrap=True)
    for line in changed or ["nothing that is computed"]:
        console.print(f"  {line}", soft_wrap=True, markup=False, highlight=False)
