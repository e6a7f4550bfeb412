"""What ``moefold train`` does."""

import argparse
import json
import tempfile
from io import StringIO
from pathlib import Path

from rich.console import Console

from moefold.api import free_folder
from moefold.checkpoint import manifest
from moefold.checkpoint.errors import CheckpointError
from moefold.checkpoint.folder import newest
from moefold.cli._training import answer, go, open_job
from moefold.comm.agree import on_first
from moefold.comm.environment import Spot, environment
from moefold.comm.join import join
from moefold.comm.launch import launch
from moefold.comm.respawn import survive
from moefold.comm.respawn_rank import Line
from moefold.comm.world import World
from moefold.config.records import plain
from moefold.run import Run, demand_fit, load_run
from moefold.training.banner import facts, panel
from moefold.training.loop import Job
from moefold.training.ranks import device_kind, world_of
from moefold.training.recover import Keeper
from moefold.training.state import differences, restore

FORK_FILE = "fork.json"


def train(args: argparse.Namespace) -> int:
    """Carry out the command; return its exit status."""
    spot, nproc = environment(), 1 if args.nproc is None else args.nproc
    if args.fork is not None and args.folder is None:
        raise ValueError("--fork NEW starts from another run: name its folder with --folder OLD")
    if nproc < 1:
        raise ValueError(f"--nproc {nproc}: at least 1")
    run = _run(args)
    if spot is not None and spot.world > 1:
        if args.nproc is not None:
            raise ValueError(f"a launcher started {spot.world} ranks already; leave --nproc out")
        join(spot, run.watch.time_out_s, device_kind())
        return rank(spot, args)
    demand_fit(run, nproc)
    if nproc == 1:
        return _train(run, args, None)
    args.folder = args.folder or str(free_folder(run.name))
    time_out_s, record = run.watch.time_out_s, run.watch.survive
    if record is None:
        return launch(rank, nproc, args, time_out_s=time_out_s, device=device_kind())
    how = {"record": record, "time_out_s": time_out_s, "device": device_kind()}
    return survive(surviving_rank, nproc, args, **how)


def _run(args: argparse.Namespace) -> Run:
    overrides = list(args.overrides)
    if args.layout is not None:
        overrides.append(f"layout.sizes={json.dumps(args.layout)}")
    return load_run(args.source, overrides)


def surviving_rank(line: Line, args: argparse.Namespace) -> int:
    """Carry out the command as a rank that goes on, from memory, when others were lost."""
    keeper = Keeper(line)
    return line.through(lambda spot: rank(spot, args, keeper))


def rank(spot: Spot, args: argparse.Namespace, keeper: Keeper | None = None) -> int:
    """Carry out the command as one of several ranks, which have joined each other."""
    run = _run(args)
    folder = Path(args.fork or args.folder or f"runs/{run.name}")
    with world_of(run, spot, folder) as world:
        ranks = world.group("world")
        if args.folder is None:
            found = on_first(lambda: str(free_folder(run.name)), ranks, world.device)
            args.folder = found
        return _train(run, args, world, keeper)


def _train(
    run: Run, args: argparse.Namespace, world: World | None, keeper: Keeper | None = None
) -> int:
    first = world is None or world.rank == 0
    console = Console(stderr=args.json, file=None if first else StringIO())
    folder = Path(args.fork or args.folder or free_folder(run.name))
    if args.dry_run:
        return _dry_run(run, folder, args, console, world)
    with open_job(run, folder, console, world=world, keeper=keeper) as job:
        began = bool(job.recovered) and (job.resumed_from is not None or job.step_number > 0)
        if args.fork is not None and not began:
            _fork(job, Path(args.folder), console)
        _until(job, args.until, began)
        status = go(job, console)
    if args.json and first:
        print(answer(folder, status))
    return status


def _dry_run(
    run: Run, folder: Path, args: argparse.Namespace, console: Console, world: World | None
) -> int:
    """Show the banner of the run as it would start in ``folder``, and leave no trace there."""
    if args.fork is not None:
        raise ValueError("--dry-run looks at one folder: leave --fork out")
    if folder.exists():
        with open_job(run, folder, console, world=world) as job:
            _until(job, args.until)
            _show(job, folder, args.json, console)
        return 0
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix=".dry-run-", dir=folder.parent) as scratch,
        open_job(run, Path(scratch) / "run", console, folder.parent / ".prepared", world) as job,
    ):
        _until(job, args.until)
        _show(job, folder, args.json, console)
    return 0


def _show(job: Job, folder: Path, as_json: bool, console: Console) -> None:
    if job.world.rank:
        return
    if as_json:
        print(json.dumps(facts(job, folder), indent=2))
    else:
        console.print(panel(job, folder))


def _until(job: Job, until: int | None, began: bool = False) -> None:
    if until is None:
        return
    if not began and not job.step_number < until <= job.last_step:
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
    job.progress = restore(path, job.data, job.optimizer)
    job.data.renew()
    said = {"from": str(path), "step": job.step_number, "changed": changed}
    (job.folder / FORK_FILE).write_text(json.dumps(said, indent=2) + "\n")
    job.save()
    console.print(f"forked from {path} at step {job.step_number}; it differs in", soft_wrap=True)
    for line in changed or ["nothing that is computed"]:
        console.print(f"  {line}", soft_wrap=True, markup=False, highlight=False)
