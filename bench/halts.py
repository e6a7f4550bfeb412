"""A plug-in of a run file that halts ranks at a chosen call, until they are told to go on.

So that a signal arrives in the middle of a save, and not some milliseconds before or after it. The
plan is the JSON file ``halts.plan`` beside this file, or beside a copy of it; without one nothing
halts:

    {"by": 4711, "in_ranks": true, "halts": [{"call": "moefold.checkpoint.disk:Disk.write",
      "about": "step-00000003", "rank": 0, "turn": 2}]}

``by`` is the process that started the command: its child is the launcher, and others are ranks.

The process halts before the call number ``turn`` of those in which an argument is ``about`` that
text: a path, or an open file of that path. It then writes ``halts.plan.halted-N-PID`` for halt N,
and goes on once there is ``halts.plan.go``.
"""

import json
import os
import time
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

PLAN = Path(__file__).with_suffix(".plan")
MOST_S = 120.0
POLL_S = 0.005


def arm(plan: Path) -> None:
    """Let this process halt as planned, if it is one that the plan is for."""
    told = json.loads(plan.read_text())
    is_launcher = os.getppid() == told["by"]
    if told["in_ranks"] != is_launcher:
        for number, halt in enumerate(told["halts"]):
            _replace(plan, number, **halt)


def _replace(plan: Path, number: int, call: str, about: str, rank: int | None, turn: int) -> None:
    """Replace a function, named ``module:Class.function``, by one that halts at its turn."""
    module, _, names = call.partition(":")
    *owners, name = names.split(".")
    owner: Any = import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    function: Callable[..., Any] = getattr(owner, name)
    seen = 0

    @wraps(function)
    def halting(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        if (rank is None or _rank(args) == rank) and (not about or _is_about(about, args)):
            seen += 1
            if seen == turn:
                _halt(plan, number)
        return function(*args, **kwargs)

    setattr(owner, name, halting)


def _rank(args: tuple[Any, ...]) -> int:
    """Return this process's rank, which ranks that have not met have in their arguments."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else args[0].rank


def _is_about(text: str, args: tuple[Any, ...]) -> bool:
    """Return whether an argument is a path with a text in it, or an open file of such a path."""
    paths = [str(arg) for arg in args if isinstance(arg, Path)]
    paths += [os.readlink(f"/proc/self/fd/{arg}") for arg in args if isinstance(arg, int)]
    return any(text in path for path in paths)


def _halt(plan: Path, number: int) -> None:
    """Say that this process has halted, and wait for the word to go on."""
    plan.with_name(f"{plan.name}.halted-{number}-{os.getpid()}").touch()
    go = plan.with_name(f"{plan.name}.go")
    until = time.monotonic() + MOST_S
    while not go.exists() and time.monotonic() < until:
        time.sleep(POLL_S)


if PLAN.exists():
    arm(PLAN)
