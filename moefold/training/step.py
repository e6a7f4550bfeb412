"""One optimizer step up to the update: forward and backward of its micro-batches, and its metrics.

T rows, D hidden. A step's loss is a sum, such as the cross-entropy of all valid labels, divided by
their global count, plus each router term weighted by its micro-batch's share of valid rows.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from moefold.data.batch import MicroBatch
from moefold.layers.flow import Flow
from moefold.moe.balance import sum_counters
from moefold.parallel import limits
from moefold.parallel.apply import build_flow
from moefold.parallel.data.sharding import ShardedState
from moefold.parallel.pipeline.executor import StepExecutor, run_step
from moefold.training.figures import StepFigures, Totals, reduce_figures, sum_counts
from moefold.training.losses.base import CROSS_ENTROPY, Objective


def gradients(
    state: ShardedState,
    batches: Sequence[MicroBatch],
    loss_chunk: int,
    stop: bool = False,
    executor: StepExecutor = run_step,
    objective: Objective = CROSS_ENTROPY,
) -> StepFigures:
    """Compute the gradients of a step's loss for every trained parameter; return its metrics.

    A step whose rows overflowed a dispatcher's stated room is recomputed without that limit.

    Args:
        state: the model's parts on this rank; their gradients are discarded first.
        batches: this data rank's micro-batches, whole and in order; every data rank has as many.
        loss_chunk: number of rows whose logits exist at a time.
        stop: whether this rank was asked to end the run; the result says it on all ranks.
        executor: runs this rank's part of the pipeline schedule.
        objective: the loss.

    Raises:
        ValueError: if rows overflowed and the layout has overflow end the run.
    """
    parts = state.parts
    with parts.world.recorder.module("step"):
        totals = sum_counts(parts, batches, objective)
        limits.check_even_rows(parts, batches)
    run = partial(_pass, state, batches, totals, loss_chunk, stop, executor, objective)
    figures, missing = run()
    if missing is None:
        return figures
    needed = limits.sufficient_settings(parts, missing)
    if not limits.repeats_on_overflow(parts):
        raise limits.overflow_error(parts, needed)
    return replace(run(exact=True)[0], **needed._asdict())


def _pass(
    state: ShardedState,
    batches: Sequence[MicroBatch],
    totals: Totals,
    loss_chunk: int,
    stop: bool,
    executor: StepExecutor,
    objective: Objective,
    exact: bool = False,
) -> tuple[StepFigures, Tensor | None]:
    """Run forward and backward of all micro-batches, with gradients and counters set to zero.

    Returns the metrics and, if rows overflowed on any rank, the overflow of this one, else None.
    """
    parts = state.parts
    model = parts.model
    world = parts.world
    module = world.recorder.module
    flows = [build_flow(parts, batch, exact=exact) for batch in batches]
    with module("loss"):
        flows = [
            replace(flow, reference=objective.reference(parts, batch, flow, loss_chunk))
            for batch, flow in zip(batches, flows, strict=True)
        ]
    state.begin_step(len(batches))
    model.start_step()

    def loss(x_TD: Tensor, flow: Flow, scale: Tensor) -> tuple[Tensor, Tensor]:
        head = model.head_operand(flow)
        with module("loss"):
            return objective(x_TD, head, flow, scale=scale, chunk=loss_chunk)

    with module("pipeline"):
        result = executor(parts, flows, totals.factors, loss)
    with module("gradients"):
        norm_squared = state.finish()
    with module("counters"):
        sum_counters([mixture.balance for _, mixture in model.moe_layers()], world.group("stage"))
    missing = limits.missing_room(parts, [count for flow in flows for count in flow.overflow])
    offsets = range(1, 1 + len(model.record.multi_token))
    extra_names = [*objective.figures, *(f"multi_token/{number}" for number in offsets)]
    with module("figures"):
        return reduce_figures(parts, result, totals, norm_squared, stop, missing, extra_names)
