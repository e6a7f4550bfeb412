"""Memory of a run: ``recompute: auto`` by the planner, and explanations of out-of-memory errors."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process

import torch

from moefold.comm.agree import run_on_first
from moefold.comm.world import World
from moefold.layers.config import Auto
from moefold.planner.hardware import Cluster, cpu_device, device_by_name, find_device, with_memory
from moefold.planner.memory import estimate_memory
from moefold.planner.recompute import FALLBACK_DEVICE
from moefold.planner.task import resolve_memory_policy, task_from_run, with_memory_policy
from moefold.run import Run
from moefold.training.machine import HOST_BYTES

GIB = 2**30


def resolve_recompute(run: Run, world: World) -> Run:
    """Return the run with recompute and offload policies chosen in place of ``auto``.

    Raises:
        ValueError: if no choice fits the limit; says how much memory is needed.
    """
    if not isinstance(run.layout.recompute, Auto):
        return run
    keeping = run_on_first(lambda: resolve_memory_policy(run, cluster_of(world)), world.on_host)
    return with_memory_policy(run, keeping)


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


class OutOfMemory(RuntimeError):
    """A rank's device is out of memory; the text says what it held and what was planned."""


@contextmanager
def explaining_oom(run: Run, world: World) -> Iterator[None]:
    """Raise ``OutOfMemory``, with actual and planned memory, in place of torch's error."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        allocated_text = "unknown on a CPU"
        if world.device.type == "cuda":
            stats, key = torch.cuda.memory_stats(world.device), "allocated_bytes.all"
            peak, current = stats[f"{key}.peak"] / GIB, stats[f"{key}.current"] / GIB
            reserved = stats["reserved_bytes.all.current"] / GIB
            allocated_text = f"{current:.2f} GiB, peak {peak:.2f}; PyTorch reserved {reserved:.2f}"
        try:
            task, choice = task_from_run(run, cluster_of(world))
            by_stage = estimate_memory(choice.build_case(task))
            planned = next(stage for stage in by_stage if stage.rank == world.attention.pp)
            parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in planned.parts.items())
            planned_text = f"peak {planned.total / GIB:.2f} GiB: {parts}"
        except ValueError as unknown:
            planned_text = f"cannot be planned: {unknown}"
        raise OutOfMemory(
            f"rank {world.rank} has no memory left: {error}\nallocated: {allocated_text}\n"
            f"planned: {planned_text}\nSplit the model over more ranks, lower train.micro_batch or "
            "data.seq, or recompute more (layout.recompute); `moefold plan` compares such layouts"
        ) from error
