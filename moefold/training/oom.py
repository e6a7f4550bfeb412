"""Out-of-memory report: what a device held, beside what the planner expects of the run."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moefold.comm.world import World
from moefold.planner.from_run import of_run
from moefold.planner.hardware import cluster
from moefold.planner.memory import memory
from moefold.run import Run

GIB = 2**30


class OutOfMemory(RuntimeError):
    """A rank's device had no memory left; the text says what it held and what was expected."""


@contextmanager
def explaining_oom(run: Run, world: World) -> Iterator[None]:
    """Add to a device's refusal who it was, what it held, and what was to be expected.

    Raises:
        OutOfMemory: instead of torch's error.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"rank {world.rank} has no memory left: {error}\n{_held(world.device)}\n"
            f"{_expected(run, world)}\nSplit the model over more ranks, lower train.micro_batch "
            "or data.seq, or let layout.recompute drop more; `moefold plan` weighs them"
        ) from error


def _held(device: torch.device) -> str:
    if device.type != "cuda":
        return "held: not known on a CPU"
    stats = torch.cuda.memory_stats(device)
    peak, now = stats["allocated_bytes.all.peak"], stats["allocated_bytes.all.current"]
    room = stats["reserved_bytes.all.current"]
    return f"held: {now / GIB:.2f} GiB, at most {peak / GIB:.2f}, of {room / GIB:.2f} taken"


def _expected(run: Run, world: World) -> str:
    """Word the planner's figures for this pipeline rank."""
    try:
        task, choice = of_run(run, cluster(f"h100x{world.size}"))
        mine = next(m for m in memory(choice.case(task)) if m.rank == world.attention.pp)
    except ValueError as error:
        return f"expected: not known to the planner: {error}"
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in mine.parts.items())
    return f"expected: {mine.total / GIB:.2f} GiB at most: {parts}"
