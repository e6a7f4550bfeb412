"""What ``moefold train`` is asked for, looked at before torch is imported."""

import argparse
import json
from pathlib import Path

from moefold.checkpoint.folder import newest
from moefold.comm.environment import Spot, environment
from moefold.config.load import load
from moefold.run import Run, demand_fit, load_run
from moefold.training.hooks.logs import RUN_FILE


def asked(args: argparse.Namespace) -> tuple[Run, Spot | None]:
    """Return the run, and this process's place among ranks that something else started.

    Raises:
        ValueError: for arguments that do not go together, and a run that is not legal.
    """
    spot = environment()
    _check(args)
    if args.nproc is not None and args.nproc < 1:
        raise ValueError(f"--nproc {args.nproc}: at least 1")
    run = asked_run(args)
    if spot is None or spot.world == 1:
        demand_fit(run, args.nproc or 1)
        return run, None
    if args.nproc is not None:
        raise ValueError(f"a launcher started {spot.world} ranks already; leave --nproc out")
    return run, spot


def _check(args: argparse.Namespace) -> None:
    """Refuse flags that go with others which are not there."""
    if args.fork is not None and args.folder is None:
        raise ValueError("--fork NEW starts from another run: name its folder with --folder OLD")
    for flag in ("weights_only", "new_tokenizer"):
        if vars(args)[flag] and args.fork is None:
            raise ValueError(f"--{flag.replace('_', '-')} says how to fork: give --fork NEW too")


def asked_run(args: argparse.Namespace) -> Run:
    """Return the run that is asked for; without RUN the one whose folder is given."""
    overrides, source = list(args.overrides), args.source
    if source is not None and "=" in source and not Path(source).exists():
        overrides.insert(0, source)  # it stands where RUN would
        source = None
    if args.layout is not None:
        overrides.append(f"layout.sizes={json.dumps(args.layout)}")
    if source is not None:
        return load_run(source, overrides)
    # A run saved before paths were saved whole has them from the working folder.
    return load(Run, _saved_run(args.folder), overrides, folder=Path.cwd()).record


def _saved_run(folder: str | None) -> Path:
    """Return the run file that a run keeps in its folder."""
    if folder is None:
        raise ValueError("name a RUN (a run file, recipe or Hugging Face folder), or --folder OUT")
    path = Path(folder) / RUN_FILE
    if path.is_file():
        return path
    held = Path(folder).is_dir() and newest(folder) is not None
    what = "an imported model, and no run" if held else "no run to continue"
    flags = f"--folder {folder} --fork NEW" if held else f"--folder {folder}"
    raise ValueError(f"{folder} holds {what}: name one, moefold train RUN {flags}")
