"""The wall of a run's step: a few steps of random tokens on local processes, traced."""

import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import gettempdir
from typing import Any, NamedTuple

import torch

from moefold.comm.collectives import sum_
from moefold.comm.environment import RankInfo
from moefold.comm.fork_server import fork_server
from moefold.comm.launch import launch
from moefold.comm.world import World
from moefold.config.slot import modules_to_preload
from moefold.layers.config import Precision
from moefold.planner.case import Case
from moefold.planner.hardware import Cluster, Machine, default_machine_file
from moefold.planner.task import TrainingTask, task_from_run
from moefold.planner.walls import StepWalls, beside_plan
from moefold.run import Run, require_fit
from moefold.training.calibrate import measure_kernels
from moefold.training.distributed import device_kind, open_world, single_rank
from moefold.training.machine import HOST_BYTES, cpu_name, one_thread
from moefold.training.memory import cluster_of
from moefold.training.random_step import random_step
from moefold.training.step import gradients
from moefold.training.trace import StepTrace

LOOPBACK_SHARE = 0.25
"""Assumed rate of messages between processes of one machine, as a share of its memory's."""


class MeasuredSteps(NamedTuple):
    """What a few steps of a run showed, and how they were planned."""

    walls: StepWalls
    """Of the traced step of median length."""
    untraced_s: float
    """Median seconds of a step without a trace."""
    task: TrainingTask
    case: Case
    """Planned with the measured load of the experts' ranks."""
    rates: str
    """Origin of the rates with which it was planned."""


def measure_walls(run: Run, world: int, rounds: int) -> MeasuredSteps:
    """Time ``rounds`` steps of random tokens, and trace as many, on ``world`` ranks.

    Raises:
        RunError: if the run's layout does not fit so many ranks.
        ValueError: if the run cannot be planned, or there are fewer devices than ranks.
    """
    require_fit(run, world)
    device = device_kind(world)
    cluster, rates = cluster_here(device, world) or _measured_cluster(world)
    task, layout = task_from_run(run, cluster, load=1.0)
    run = run.model_copy(update={"layout": layout})
    case = task.case(layout)
    args = run, case.number_formats.precision, case.num_micro_batches, rounds
    if world == 1:
        with one_thread():
            data, untraced = measure_rank(None, *args)
    else:
        fork_server(__name__, *modules_to_preload((run, run.decoder)))
        data, untraced = launch(measure_rank, world, *args, device=device)
    walls = StepWalls.from_json(data)
    task = replace(task, load=max(1.0, walls.load))
    return MeasuredSteps(walls, untraced, task, task.case(layout), rates)


def cluster_here(device: str, world: int) -> tuple[Cluster, str] | None:
    """Return this machine's devices as the planner's cluster, and the origin of their rates.

    None for a CPU that `moefold bench` has not measured.
    """
    if device == "cuda":
        cluster = cluster_of(World.single(torch.device(device)))
        per_node = min(world, torch.cuda.device_count())
        return replace(cluster, devices=world, per_node=per_node), cluster.device.name
    file = default_machine_file()
    if not file.exists():
        return None
    return _cluster_of_processes(Machine.read(file), world), f"the rates in {file}"


def _measured_cluster(world: int) -> tuple[Cluster, str]:
    """Return what :func:`cluster_here` does, of kernels that are timed now."""
    machine = measure_kernels(cpu_name(), f"torch {torch.__version__}", HOST_BYTES)
    rates = "rates of kernels measured now (`moefold bench` fits them to whole steps)"
    return _cluster_of_processes(machine, world), rates


def _cluster_of_processes(machine: Machine, world: int) -> Cluster:
    loopback = LOOPBACK_SHARE * machine.bandwidth
    chip = replace(machine.device, link_bandwidth=loopback, nic_bandwidth=loopback)
    return Cluster(chip, world, 1, 1)


def describe_walls(walls: StepWalls, run: Run, device: str) -> dict[str, Any]:
    """Return walls of a run's step beside its plan, as plain data; without one if none is known.

    ``device``: ``cuda`` or ``cpu``, of this machine.
    """
    planned = None
    with suppress(ValueError):
        cluster = cluster_here(device, len(walls.ranks))
        if cluster is not None:
            task, layout = task_from_run(run, cluster[0], load=max(1.0, walls.load))
            planned = task, task.case(layout)
    return {"device": device, **beside_plan(walls, planned)}


def measure_rank(
    info: RankInfo | None, run: Run, precision: Precision, micro_batches: int, rounds: int
) -> tuple[dict[str, Any], float]:
    """Run steps on one rank; return the walls of the median traced one, and untraced seconds.

    ``info``: None for a single rank, which runs in this process.
    """
    # No rank hangs here for long enough to write a report into a folder.
    ranks = single_rank(run) if info is None else open_world(run, info, Path(gettempdir()))
    with ranks as world:
        walls, untraced = trace_steps(world, run, precision, micro_batches, rounds)
        return walls.to_json(), untraced


def trace_steps(
    world: World, run: Run, precision: Precision, micro_batches: int, rounds: int
) -> tuple[StepWalls, float]:
    """Run steps on the ranks of a world; return what :func:`measure_rank` does, as a record."""
    seed = run.seed + world.attention.dp
    state, optimizer, batches = random_step(world, run, precision, micro_batches, seed)

    def step() -> tuple[float, float]:
        sum_(torch.zeros(1), world.on_host)  # ranks begin together
        started = time.monotonic()
        gradients(state, batches, run.train.loss_chunk)
        optimizer.step()
        state.end_step()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        return started, time.monotonic()

    step()
    untraced = list[float]()
    traced = list[StepWalls]()
    for _ in range(rounds):
        started, ended = step()
        untraced.append(ended - started)
        trace = StepTrace(world)
        trace.start()
        window = step()
        trace.stop()
        traced.append(trace.measure(window, state.parts))
    middle = sorted(traced, key=lambda walls: walls.seconds)[len(traced) // 2]
    return middle, median(untraced)
