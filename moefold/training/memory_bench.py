"""Comparison of a step's planned and measured memory, by part and action, on local processes."""

from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from moefold.comm.collectives import gather_objects
from moefold.comm.environment import RankInfo
from moefold.comm.fork_server import fork_server
from moefold.comm.launch import launch
from moefold.comm.world import World
from moefold.config.slot import modules_to_preload
from moefold.layers.config import Precision
from moefold.mesh.folding import Folding
from moefold.parallel.config import Layout
from moefold.parallel.pipeline.p2p import held_messages, plan_rank
from moefold.planner.case import Case, bytes_per_activation
from moefold.planner.hardware import Cluster, cpu_device
from moefold.planner.memory import fullest_rank, memory_after_each, stage_bytes
from moefold.planner.task import task_from_run
from moefold.run import Run, require_fit
from moefold.training.machine import HOST_BYTES
from moefold.training.memory_probe import measure_step, state_bytes
from moefold.training.random_step import random_step
from moefold.training.step import gradients

PARTS = ("weights", "master", "moments", "gradients", "activations", "operands", "messages")
Planned = list[list[dict[str, float]]]
"""Planned bytes by part, after each action of each stage's line of the schedule."""
COLOURS = ("#4c78d8", "#7b8496", "#b8bfcc", "#d1495b", "#edae49", "#66a182", "#2e4057")


@dataclass(frozen=True)
class ActionBytes:
    """Bytes by part after an action of a rank's line; ``rows``: planned activations by tensor."""

    rank: int
    pp: int
    action: str
    planned: dict[str, float]
    rows: dict[str, float]
    executed: dict[str, int]


def compare_bytes(run: Run, world: int) -> list[ActionBytes]:
    """Run two steps on random tokens; return the ranks' bytes after each action of the second.

    Raises:
        RunError: if the run's layout does not fit so many ranks.
        ValueError: if this machine has too little memory.
    """
    require_fit(run, world)
    cluster = Cluster(cpu_device(1e11, 1e10, HOST_BYTES), world, 1, 1)
    task, layout = task_from_run(run, cluster, load=1.0)
    run = run.model_copy(update={"layout": layout})
    case = task.case(layout)
    available = cluster.device.memory_bytes
    needed = fullest_rank(case).peak_allocated * world
    if needed > available:
        raise ValueError(
            f"{run.name} on {world} ranks needs {needed / 1e9:.1f} GB, and this machine has "
            f"{available / 1e9:.1f} GB; reduce the model's layers or width, or data.seq"
        )
    planned = [planned_bytes(case, run.layout, pp) for pp in range(case.sizes.pp)]
    planned_parts = [[parts for parts, _ in line] for line in planned]
    args = run, case.number_formats.precision, case.num_micro_batches, planned_parts
    if world > 1:
        fork_server(__name__, *modules_to_preload((run, run.decoder)))
    by_rank = launch(measure_rank, world, *args) if world > 1 else measure_rank(None, *args)
    compared: list[ActionBytes] = []
    for rank, measured in enumerate(by_rank):
        pp = case.folding.attention_coordinates(rank).pp
        line = zip(case.table.lines[pp], planned[pp], measured, strict=True)
        for action, (parts, rows), executed in line:
            compared.append(ActionBytes(rank, pp, str(action), parts, rows, executed))
    return compared


def planned_bytes(
    case: Case, layout: Layout, pp: int
) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Return a pipeline rank's planned bytes after each action, by part and by saved tensor."""
    state = stage_bytes(case, pp).state
    planned = []
    width = bytes_per_activation(case.number_formats.recipe)
    message_bytes = case.rows * case.decoder.hidden * width
    # Records are hashable, which their types do not say.
    plan = plan_rank(layout, pp, case.num_micro_batches)  # type: ignore[arg-type]
    num_messages = held_messages(plan, case.stages.sent_rows)
    for after, messages in zip(memory_after_each(case, pp), num_messages, strict=True):
        values = (state.weights, state.master, state.moments, after.gradients, after.activations)
        values = (*values, after.operands, messages * message_bytes, *after.offloaded)
        by_part = dict(zip((*PARTS, "host", "disk"), values, strict=True))
        planned.append((by_part, after.activations_by_name))
    return planned


def measure_rank(
    info: RankInfo | None, run: Run, precision: Precision, micro_batches: int, planned: Planned
) -> Any:
    """Return every rank's measured bytes after each action of the second of two steps.

    ``info``: None for a single rank, which runs in this process.
    """
    if info is None:
        ranks = World.single()
    else:
        folding = Folding(run.layout.split, info.world_size, run.layout.order)
        ranks = World.open(folding, "cpu", run.watch.time_out_s)
    with ranks as world:
        chunk = run.train.loss_chunk
        state, optimizer, batches = random_step(world, run, precision, micro_batches, run.seed)
        gradients(state, batches, chunk)
        optimizer.step()
        state.refresh_weights()
        moments = state_bytes(state, optimizer)["moments"]
        steps = measure_step(state, batches, chunk, planned[world.attention.pp])
        return gather_objects(
            [{**measured, "moments": moments} for measured in steps], world.on_host
        )


def draw_bytes(compared: list[ActionBytes], title: str) -> Figure:
    """Plot what the first rank of each stage holds after each action, with the planned total."""
    first_ranks = {action.pp: action.rank for action in reversed(compared)}
    figure = Figure(figsize=(9, 1 + 2.6 * len(first_ranks)), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(len(first_ranks), 1, squeeze=False)[:, 0]
    for (pp, rank), panel in zip(sorted(first_ranks.items()), panels, strict=True):
        actions = [action for action in compared if action.rank == rank]
        base = [0.0] * len(actions)
        for part, colour in zip(PARTS, COLOURS, strict=True):
            heights = [action.executed[part] / 1e6 for action in actions]
            panel.bar(range(len(actions)), heights, 0.9, base, color=colour, label=part)
            base = [low + height for low, height in zip(base, heights, strict=True)]
        total = [sum(action.planned[part] for part in PARTS) / 1e6 for action in actions]
        panel.step(range(len(actions)), total, where="mid", color="black", label="planned")
        names = [action.action for action in actions]
        panel.set_xticks(range(len(actions)), names, rotation=90, fontsize=6)
        panel.set_ylabel(f"stage {pp}, MB")
    panels[0].legend(fontsize=7, ncols=4)
    return figure
