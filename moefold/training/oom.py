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
        held = "not known on a CPU"
        if world.device.type == "cuda":
            stats, of_all = torch.cuda.memory_stats(world.device), "allocated_bytes.all"
            peak, now = stats[f"{of_all}.peak"] / GIB, stats[f"{of_all}.current"] / GIB
            room = stats["reserved_bytes.all.current"] / GIB
            held = f"{now:.2f} GiB, at most {peak:.2f}, of {room:.2f} taken"
        try:
            task, choice = of_run(run, cluster(f"h100x{world.size}"))
            mine = next(m for m in memory(choice.case(task)) if m.rank == world.attention.pp)
            parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in mine.parts.items())
            expected = f"{mine.total / GIB:.2f} GiB at most: {parts}"
        except ValueError as unknown:
            expected = f"not known to the planner: {unknown}"
        raise OutOfMemory(
            f"rank {world.rank} has no memory left: {error}\nheld: {held}\nexpected: {expected}\n"
            "Split the model over more ranks, lower train.micro_batch or data.seq, or let "
            "layout.recompute drop more; `moefold plan` weighs them"
        ) from error
