"""Time and memory of a reference or a teacher, whose forward runs before that of each step."""

from moefold.mesh.pipeline import Stages
from moefold.model.config import Decoder
from moefold.planner.case import (
    Case,
    PipelineContents,
    bytes_per_activation,
    layer_counts,
    pipeline_contents,
    weighted_stages,
)
from moefold.planner.memoize import memoize
from moefold.planner.memory_state import StateSharding, state_estimator
from moefold.spec.reference import Reference
from moefold.spec.tuning import freeze, without_tuning


@memoize(64)
def frozen_model(decoder: Decoder) -> Decoder:
    """Return a model of which nothing is trained."""
    return freeze(without_tuning(decoder), ("*",))


def reference_model(reference: Reference | None, decoder: Decoder) -> Decoder | None:
    """Return the model whose forward runs before each step of a decoder; None if there is none."""
    if reference is None or not reference.runs_forward:
        return None
    return frozen_model(reference.teacher or decoder)


def reference_contents(case: Case, decoder: Decoder) -> PipelineContents:
    """Return the parts of a reference on each pipeline rank: in the stages of the trained model if
    it is this model, else in stages by its own weights.
    """
    mapping = case.schedule.stage_mapping
    same = case.reference is not None and case.reference.runs_model
    stages: Stages = case.stages
    if not same:
        stages = weighted_stages(decoder, case.sizes.pp, case.sizes.vpp, mapping)
    assert stages.layers == layer_counts(decoder)[0]
    return pipeline_contents(decoder, stages, case.sizes.pp, mapping)


def reference_bytes(case: Case, rank: int) -> float:
    """Return the bytes on a rank of a teacher's weights, and of what the loss reads of its results
    for all micro-batches of a step.
    """
    if case.reference is None:
        return 0.0
    total = 0.0
    if case.reference.teacher is not None:
        decoder = frozen_model(case.reference.teacher)
        sharding = StateSharding.of(case)
        contents = reference_contents(case, decoder).ranks[rank]
        total += state_estimator(decoder, sharding).rank_state(contents).weights
    if case.contents.ranks[rank].loss:
        row = case.reference.row_bytes(bytes_per_activation(case.number_formats.recipe))
        total += case.num_micro_batches * case.rows * row
    return total


def passes_seconds(case: Case, forward: list[float]) -> float:
    """Return the seconds of the forwards of all micro-batches of a step, one after another.

    A rank begins the next one once it has run the last of its stages, which with virtual stages lie
    apart: all stages between run in the meantime.

    Args:
        forward: seconds of a micro-batch's forward on each pipeline rank.
    """
    p = case.sizes.pp
    v = case.sizes.vpp
    total = sum(forward)
    stages = [[case.table.stage_of(rank, chunk) for chunk in range(v)] for rank in range(p)]
    apart = max(stages, key=lambda numbers: numbers[-1] - numbers[0])
    share = (abs(apart[-1] - apart[0]) + 1) / (p * v)
    period = max(*forward, share * total) if p > 1 else total
    return total + (case.num_micro_batches - 1) * period
