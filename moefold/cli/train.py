"""``moefold train``: train a run, or resume it.

Trains a model as RUN describes, and writes to a new folder in runs/, or to --folder. A run that
exists in --folder is resumed; RUN can then be left out.

exit status:
  0   the run reached its last step or --until, or --dry-run succeeded
  2   wrong input, or no memory left
  3   a policy stopped it: non-finite loss or gradient, or collapsed routing
  75  a signal stopped the run; it saved first, and --folder resumes it
  76  ranks were killed or did not answer; --folder resumes from the last save
"""

import argparse
import os
import sys
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from moefold.checkpoint.folder import find_newest, is_checkpoint
from moefold.cli._common import add_json, add_layout, add_run, overrides_of, print_json
from moefold.comm.environment import RankInfo, rank_info_from_env
from moefold.comm.fork_server import fork_server
from moefold.config.load import load
from moefold.config.slot import modules_to_preload
from moefold.failures import IMPORT_BYTES, WORKING_BYTES, require_address_space
from moefold.files import remove_empty_folders, scratch_folder, unused_folder
from moefold.layers.config import Auto
from moefold.offload.disk import DiskFile
from moefold.run import Run, load_run, require_fit
from moefold.training.hooks.logs import RUN_FILE

if TYPE_CHECKING:
    from moefold.comm.world import World
    from moefold.training.recover import MemoryCheckpoint
    from moefold.training.trainer import Trainer

RANK_MODULE = "moefold.cli._training"
"""Module that imports all that training needs."""


MAX_HERE = 4096
"""Ranks that one machine starts."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_run(parser, "train.steps=100", optional=True)
    parser.add_argument(
        "--dry-run", action="store_true", help="only print parameters, time, memory and kernels"
    )
    text = "output folder; a run in it is resumed (default: a new one in runs/)"
    parser.add_argument("--folder", metavar="OUT", help=text)
    text = "save and stop at this step (default: the run's last step)"
    parser.add_argument("--until", metavar="STEP", type=int, help=text)
    parser.add_argument(
        "--fork",
        metavar="NEW",
        help="start a new run in folder NEW from the newest checkpoint in --folder, a run's or "
        "an imported model's, or from --folder itself if it is a checkpoint (default: none)",
    )
    text = "with --fork: take only the weights and start at step 0"
    parser.add_argument("--weights-only", action="store_true", help=text)
    text = "with --fork: allow a tokenizer that differs from the checkpoint's"
    parser.add_argument("--new-tokenizer", action="store_true", help=text)
    add_layout(parser)
    parser.add_argument("--nproc", metavar="N", type=int, help="ranks on this machine (default: 1)")
    add_json(parser, "print the results as one JSON object, and all other output on stderr")


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    run, info = parse_run(args)
    nproc = args.nproc or 1
    record = run.watch.survive
    launches = info is None and (nproc > 1 or record is not None)
    if launches:  # The server imports what ranks need while this process imports what it needs.
        fork_server(RANK_MODULE, __name__, *modules_to_preload((run, run.decoder)))

    imports = 0 if "torch" in sys.modules else IMPORT_BYTES
    require_address_space(imports + WORKING_BYTES, "the smallest run")
    from moefold.cli._training import elastic_rank, saying_how_to_resume
    from moefold.comm.elastic import launch_elastic
    from moefold.comm.launch import launch
    from moefold.comm.rendezvous import join
    from moefold.training.distributed import MESSAGES, device_kind

    time_out_s = run.watch.time_out_s
    is_fork = args.fork is not None
    if info is not None:
        join(info, time_out_s, device_kind())
        with saying_how_to_resume(args.fork or args.folder or f"runs/{run.name}", is_fork):
            return rank(info, args)
    if not launches:
        return _train(run, args, None)
    args.folder = args.folder or str(unused_folder(run.name))
    options = {"time_out_s": time_out_s, "device": device_kind(nproc), "messages": MESSAGES}
    with saying_how_to_resume(args.fork or args.folder, is_fork):
        if record is None:
            return launch(rank, nproc, args, **options)
        return launch_elastic(elastic_rank, nproc, rank, record, args, record=record, **options)


# --------------------------------------------------------------------- before torch is imported


def parse_run(args: argparse.Namespace) -> tuple[Run, RankInfo | None]:
    """Return the run, and this process's rank if a launcher such as torchrun started it.

    Raises:
        ValueError: if arguments contradict each other, or the run is not legal.
    """
    info = rank_info_from_env()
    if args.fork is not None and args.folder is None:
        raise ValueError("--fork NEW needs the folder to start from: add --folder OLD")
    if args.fork is not None and args.dry_run:
        raise ValueError("--dry-run cannot be combined with --fork: leave one out")
    for flag in ("weights_only", "new_tokenizer"):
        if vars(args)[flag] and args.fork is None:
            raise ValueError(f"--{flag.replace('_', '-')} is only for forks: add --fork NEW")
    if args.nproc is not None and not 1 <= args.nproc <= MAX_HERE:
        raise ValueError(f"--nproc {args.nproc}: must be at least 1 and at most {MAX_HERE}")
    run = load_requested_run(args)
    if info is None or info.world_size == 1:
        require_fit(run, args.nproc or 1)
        _require_writable_disk(run)
        if isinstance(run.layout.recompute, Auto) and run.layout.recompute.bytes:
            from moefold.planner.hardware import parse_cluster
            from moefold.planner.task import require_recompute_limit

            # Check that some recompute policy fits the limit.
            require_recompute_limit(run, parse_cluster(f"h100x{args.nproc or 1}"))
        return run, None
    if args.nproc is not None:
        raise ValueError(
            f"a launcher has started {info.world_size} ranks already: leave --nproc out"
        )
    return run, info


def _require_writable_disk(run: Run) -> None:
    """Raise ``OffloadError`` if files cannot be created in the folders for offloaded tensors."""
    layout = run.layout
    folders = [layout.state.folder]
    if layout.offload is not None and layout.offload.disk is not None:
        folders.append(layout.offload.disk.folder)
    if isinstance(layout.recompute, Auto):
        folders.append(layout.recompute.disk)
    for folder in filter(None, folders):
        path = Path(os.path.expandvars(folder))
        if "$" not in str(path):
            new = [p for p in (path, *path.parents) if not p.exists()]
            DiskFile(folder, 0, "a file")
            remove_empty_folders(new)


def load_requested_run(args: argparse.Namespace) -> Run:
    """Load the run of the arguments; without RUN, the one in ``--folder``."""
    overrides = overrides_of(args)
    source = args.source
    if source is not None and "=" in source and not Path(source).exists():
        overrides.insert(0, source)  # an override in the place of RUN
        source = None
    if source is not None:
        return load_run(source, overrides)
    if args.folder is None:
        raise ValueError("name a RUN (a run file, recipe or Hugging Face folder), or --folder OUT")
    folder = Path(args.folder)
    if is_checkpoint(folder):  # as the source of a fork
        folder = folder.parent
    if not (folder / RUN_FILE).is_file():
        has_checkpoint = folder.is_dir() and find_newest(folder) is not None
        what = "an imported model, not a run" if has_checkpoint else "no run to resume"
        flags = f"--folder {folder}" + " --fork NEW" * has_checkpoint
        raise ValueError(f"{folder} holds {what}; start one with moefold train RUN {flags}")
    # Older runs were saved with paths relative to the working folder.
    return load(Run, folder / RUN_FILE, overrides, folder=Path.cwd()).record


# ------------------------------------------------------------------------------------ one rank


def rank(info: RankInfo, args: argparse.Namespace, memory: "MemoryCheckpoint | None" = None) -> int:
    """Run the command as one of several ranks, which have joined the rendezvous."""
    from moefold.comm.agree import run_on_first
    from moefold.training.distributed import open_world

    run = load_requested_run(args)
    folder = Path(args.fork or args.folder or f"runs/{run.name}")
    with open_world(run, info, folder) as world:
        if args.folder is None:
            args.folder = run_on_first(lambda: str(unused_folder(run.name)), world.on_host)
        return _train(run, args, world, memory)


def _train(
    run: Run,
    args: argparse.Namespace,
    world: "World | None",
    memory: "MemoryCheckpoint | None" = None,
) -> int:
    from moefold.cli._training import open_job, print_summary, train_to_end
    from moefold.training.fork import fork

    first = world is None or world.rank == 0
    console = Console(stderr=args.json, file=None if first else StringIO())
    folder = Path(args.fork or args.folder or unused_folder(run.name))
    if args.dry_run:
        return _dry_run(run, folder, args, console, world)
    options = {"world": world, "memory": memory, "is_fork": args.fork is not None}
    with open_job(run, folder, console, **options) as job:
        resumed = bool(job.recovered) and (job.resumed_from is not None or job.step_number > 0)
        if args.fork is not None and not resumed:
            forked = fork(job, Path(args.folder), args.weights_only, args.new_tokenizer)
            lines = [
                f"forked from {forked['from']} with its {', '.join(forked['taken'])}; starts at "
                f"step {forked['step']}; tokenizer: {forked['tokenizer']}",
                *(f"  {line}" for line in forked["changed"]),
                *(f"  data: {line}" for line in forked["data"]),
            ]
            console.print("\n".join(lines), soft_wrap=True, markup=False, highlight=False)
        _set_last_step(job, args.until, resumed)
        status = train_to_end(job, console, is_fork=args.fork is not None)
    if args.json and first:
        print_summary(folder, status)
    return status


def _dry_run(
    run: Run, folder: Path, args: argparse.Namespace, console: Console, world: "World | None"
) -> int:
    """Print the banner of the run as it would start in ``folder``, without writing there."""
    from moefold.cli._training import open_job
    from moefold.comm.agree import broadcast_from_first
    from moefold.training.banner import banner_facts, banner_panel

    with scratch_folder("dry-run") as own:
        scratch = own
        if world is not None:  # One folder for all ranks of a machine.
            shared = Path(broadcast_from_first(str(own), world.on_host))
            scratch = shared if shared.is_dir() else scratch
        run = _with_disk_folder(run, str(scratch))
        with open_job(run, folder, console, world=world, scratch=scratch) as job:
            _set_last_step(job, args.until)
            if args.json and job.world.rank == 0:
                print_json(banner_facts(job))
            elif not args.json:
                console.print(banner_panel(job))  # the consoles of other ranks discard it
    return 0


def _with_disk_folder(run: Run, folder: str) -> Run:
    """Return the run with another folder for activations offloaded to disk."""
    layout = run.layout
    update = dict[str, Any]()
    if layout.offload is not None and layout.offload.disk is not None:
        disk = layout.offload.disk.model_copy(update={"folder": folder})
        update["offload"] = layout.offload.model_copy(update={"disk": disk})
    if isinstance(layout.recompute, Auto) and layout.recompute.disk is not None:
        update["recompute"] = layout.recompute.model_copy(update={"disk": folder})
    return run.model_copy(update={"layout": layout.model_copy(update=update)})


def _set_last_step(job: "Trainer", until: int | None, resumed: bool = False) -> None:
    """Let the run stop at ``--until``; ``resumed``: after the loss of a rank."""
    if until is None:
        return
    if not resumed and not job.step_number < until <= job.last_step:
        raise ValueError(
            f"--until {until}: must be above {job.step_number}, the steps already done, and at "
            f"most {job.last_step}, which is train.steps"
        )
    job.last_step = until
