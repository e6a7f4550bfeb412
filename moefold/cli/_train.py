"""What ``moefold train`` does."""

import argparse
import json
import tempfile
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from moefold.api import free_folder
from moefold.cli._asked import asked_run
from moefold.cli._training import answer, go, open_job
from moefold.comm.agree import on_first, told_by_first
from moefold.comm.environment import Spot
from moefold.comm.join import join
from moefold.comm.launch import launch
from moefold.comm.respawn import survive
from moefold.comm.respawn_rank import Line
from moefold.comm.world import World
from moefold.run import Run
from moefold.training.banner import facts, panel
from moefold.training.distributed import WORDS, device_kind, world_of
from moefold.training.fork import Fork
from moefold.training.recover import Keeper
from moefold.training.trainer import Trainer


def train(run: Run, spot: Spot | None, args: argparse.Namespace) -> int:
    """Carry out the command; return its exit status.

    Args:
        run: what ``args`` name.
        spot: this process's place where something else started several ranks.
        args: the command's.
    """
    time_out_s, record = run.watch.time_out_s, run.watch.survive
    if spot is not None:
        join(spot, time_out_s, device_kind())
        return rank(spot, args)
    nproc = args.nproc or 1
    if nproc == 1:
        return _train(run, args, None)
    args.folder = args.folder or str(free_folder(run.name))
    device = device_kind(nproc)
    if record is None:
        how = {"time_out_s": time_out_s, "device": device, "words": WORDS}
        return launch(rank, nproc, args, **how)
    if device == "cuda":
        raise ValueError(
            "watch.survive goes on over gloo, and ranks on CUDA devices speak over NCCL: leave it "
            "out (the same command goes on from the newest checkpoint), or run on the CPU with "
            "CUDA_VISIBLE_DEVICES= (empty)"
        )
    how = {"record": record, "time_out_s": time_out_s, "words": WORDS}
    return survive(surviving_rank, nproc, args, **how)


def surviving_rank(line: Line, args: argparse.Namespace) -> int:
    """Carry out the command as a rank that goes on, from memory, when others were lost."""
    keeper = Keeper(line)
    return line.through(lambda spot: rank(spot, args, keeper))


def rank(spot: Spot, args: argparse.Namespace, keeper: Keeper | None = None) -> int:
    """Carry out the command as one of several ranks, which have joined each other."""
    run = asked_run(args)
    folder = Path(args.fork or args.folder or f"runs/{run.name}")
    with world_of(run, spot, folder) as world:
        if args.folder is None:
            found = on_first(lambda: str(free_folder(run.name)), world.on_host)
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
    fork = args.fork and Fork(Path(args.folder), args.weights_only, args.new_tokenizer)
    with open_job(run, folder, console, world=world, keeper=keeper, forks=bool(fork)) as job:
        began = bool(job.recovered) and (job.resumed_from is not None or job.step_number > 0)
        if fork and not began:
            _say_fork(fork.into(job), console)
        _until(job, args.until, began)
        status = go(job, console)
    if args.json and first:
        print(answer(folder, status))
    return status


def _dry_run(
    run: Run, folder: Path, args: argparse.Namespace, console: Console, world: World | None
) -> int:
    """Show the banner of the run as it would start in ``folder``, and write nothing there."""
    if args.fork is not None:
        raise ValueError("--dry-run looks at one folder: leave --fork out")
    with tempfile.TemporaryDirectory(prefix="moefold-dry-run-") as own:
        scratch = Path(own)
        if world is not None:  # One for all ranks of a machine.
            shared = Path(told_by_first(own, world.on_host))
            scratch = shared if shared.is_dir() else scratch
        with open_job(run, folder, console, world, scratch=scratch) as job:
            _until(job, args.until)
            _show(job, folder, args.json, console)
    return 0


def _show(job: Trainer, folder: Path, as_json: bool, console: Console) -> None:
    if job.world.rank:
        return
    if as_json:
        print(json.dumps(facts(job, folder), indent=2))
    else:
        console.print(panel(job, folder))


def _until(job: Trainer, until: int | None, began: bool = False) -> None:
    if until is None:
        return
    if not began and not job.step_number < until <= job.last_step:
        raise ValueError(
            f"--until {until}: the run is at step {job.step_number} and its last is "
            f"{job.last_step}; choose a step between, up to the last"
        )
    job.last_step = until


def _say_fork(said: dict[str, Any], console: Console) -> None:
    """Print what a new run has taken of another one, and where the two differ."""
    lines = [
        f"forked from {said['from']} at step {said['step']}: {', '.join(said['taken'])} taken; "
        f"tokenizer {said['tokenizer']}",
        *(f"  {line}" for line in said["changed"]),
    ]
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False)
