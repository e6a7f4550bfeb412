"""Memory of a run: ``recompute: auto`` by the planner, and explanations of out-of-memory errors."""

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import parent_process
from socket import gethostname

import torch

from moefold.comm.agree import run_on_first
from moefold.comm.collectives import gather_objects
from moefold.comm.world import World
from moefold.config.base import to_dict
from moefold.failures import (
    GIB,
    WORKING_BYTES,
    OutOfMemory,
    describe_host_memory,
    describe_shortage,
    host_capacity,
    is_out_of_memory,
    require_address_space,
)
from moefold.layers.config import Auto
from moefold.parallel.config import Layout
from moefold.planner.hardware import Cluster, cpu_device, device_by_name, find_device, with_memory
from moefold.planner.memory import StageMemory, estimate_memory
from moefold.planner.recompute import FALLBACK_DEVICE
from moefold.planner.task import resolve_layout, task_from_run
from moefold.run import Run
from moefold.training.machine import HOST_BYTES

ADVICE = (
    "Split the model over more ranks, lower train.micro_batch or data.seq, or recompute more "
    "(layout.recompute); `moefold plan` compares such layouts"
)
"""What lowers the memory that a rank takes."""


def resolve_recompute(run: Run, world: World) -> Run:
    """Return the run with recompute and offload policies chosen in place of ``auto``.

    Raises:
        ValueError: if no choice fits the limit; says how much memory is needed.
    """
    if not isinstance(run.layout.recompute, Auto):
        return run
    # Ranks exchange plain data, not records.
    fields = run_on_first(lambda: to_dict(resolve_layout(run, cluster_of(world))), world.on_host)
    return run.model_copy(update={"layout": Layout.model_validate(fields)})


def cluster_of(world: World) -> Cluster:
    """Return the ranks' devices as the planner's cluster; ranks on a CPU share its memory."""
    if world.device.type == "cuda":
        name = torch.cuda.get_device_name(world.device)
        chip = find_device(name) or device_by_name(FALLBACK_DEVICE)
        memory_bytes = torch.cuda.get_device_properties(world.device).total_memory
        return Cluster(with_memory(chip, memory_bytes), world.size, min(8, world.size), chip.domain)
    return Cluster(cpu_device(1e11, 1e10, HOST_BYTES // world.size), world.size, 1, 1)


@contextmanager
def heap_frozen() -> Iterator[None]:
    """Exclude the objects that exist at entry from garbage collection until exit.

    A full collection of them takes a tenth of a second, and each rank runs its own at a different
    step, in which all others wait. If something is frozen already, nothing changes.
    """
    # Ranks that were forked have frozen what they began with; to count that takes as long again.
    freezes = parent_process() is None and not gc.get_freeze_count()
    if freezes:
        gc.collect()
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()


@contextmanager
def explaining_oom(run: Run, world: World) -> Iterator[None]:
    """Raise ``OutOfMemory``, with actual and planned memory, in place of a library's error."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        # What the failed call holds is freed, so that there is memory to plan with.
        traceback.clear_frames(error.__traceback__)
        text = f"rank {world.rank} has no memory left: {_describe(error, world)}"
        planned = _planned_memory(run, world)
        raise OutOfMemory(f"{text}\nplanned: {planned}\n{ADVICE}") from error


def _describe(error: Exception, world: World) -> str:
    """Return what failed, and how much memory this rank has."""
    if not isinstance(error, torch.OutOfMemoryError):
        return describe_shortage(error)
    if world.device.type != "cuda":
        return f"{error}; {describe_host_memory()}"
    stats = torch.cuda.memory_stats(world.device)
    key = "allocated_bytes.all"
    peak = stats[f"{key}.peak"] / GIB
    current = stats[f"{key}.current"] / GIB
    reserved = stats["reserved_bytes.all.current"] / GIB
    allocated = f"allocated: {current:.2f} GiB, peak {peak:.2f}"
    return f"{error}\n{allocated}; PyTorch reserved {reserved:.2f}"


def _planned_memory(run: Run, world: World) -> str:
    """Return the planned peak of this rank and its parts."""
    try:
        planned = _plan(run, world)
    except (ValueError, MemoryError) as unknown:
        return f"cannot be planned: {unknown}"
    parts = [f"{name} {size / GIB:.2f}" for name, size in planned.parts.items()]
    return f"peak {planned.total / GIB:.2f} GiB: {', '.join(parts)}"


def _plan(run: Run, world: World) -> StageMemory:
    """Return the planned memory of this rank.

    Raises:
        ValueError: if it cannot be planned.
    """
    task, layout = task_from_run(run, cluster_of(world))
    by_stage = estimate_memory(task.case(layout))
    return next(stage for stage in by_stage if stage.rank == world.attention.pp)


def require_host_memory(run: Run, world: World) -> None:
    """Check that ranks on a CPU find the memory that they are planned to take.

    All ranks of a machine share its memory and swap, and a process may be allowed to map less.

    Raises:
        OutOfMemory: if there is less.
    """
    planned_bytes = 0
    if world.device.type == "cpu":
        with suppress(ValueError):
            planned_bytes = int(_plan(run, world).total)
        machine = gethostname()
        by_rank = gather_objects([machine, planned_bytes], world.on_host)
        here = [size for name, size in by_rank if name == machine]
        if sum(here) > host_capacity():
            ranks = "1 rank is" if len(here) == 1 else f"{len(here)} ranks are"
            raise OutOfMemory(
                f"{ranks} planned to take {sum(here) / GIB:.2f} GiB on {machine}, which has "
                f"{host_capacity() / GIB:.2f} GiB of memory and swap. {ADVICE}"
            )
    purpose = f"rank {world.rank} of this run ({planned_bytes / GIB:.2f} GiB are planned)"
    require_address_space(planned_bytes + WORKING_BYTES, purpose)
