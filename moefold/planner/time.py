"""Step time by parts: layers of each rank at the device's rates, the pipeline over the ranks, data
parallelism and the optimizer.

The time of a pipeline is a closed form, which tests compare with a simulation of the table that
training executes; a schedule without a closed form is simulated.

    step = estimate_time(case)
    step.seconds, step.tflops_per_gpu, step.parts, step.bottleneck, step.uncertainty
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple

from moefold.config.base import Record
from moefold.model.config import Decoder
from moefold.optim.config import Muon
from moefold.planner.case import Case, StageContents, distinct_blocks, schedule_table
from moefold.planner.count import count
from moefold.planner.curves import Constants, Product, Rates, product_seconds
from moefold.planner.memoize import memoize
from moefold.planner.memory_state import StateSharding, layers_and_norm, part_weights
from moefold.planner.network import ring_seconds, strided_reach
from moefold.planner.reference import passes_seconds, reference_contents, reference_model
from moefold.planner.time_data import (
    ONCE_HIDDEN_SHARE,
    collective_counter,
    collective_seconds,
    exposed_seconds,
)
from moefold.planner.time_exchange import EXCHANGE_SM_COST
from moefold.planner.time_layer import (
    DISK_BANDWIDTH,
    PARTS,
    WorkTime,
    head_or_join_time,
    layer_time,
)
from moefold.planner.time_work import KernelSetting, LayerPolicy, build_setting, work_shape
from moefold.schedule.config import (
    DualPipeV,
    GPipe,
    Interleaved,
    Merged,
    OneFOneB,
    Schedule,
    ZeroBubbleH1,
    ZeroBubbleV,
)
from moefold.schedule.simulate import StageCosts, simulate
from moefold.spec.decoder import embedding_weight, head_weight, model_weights
from moefold.spec.layer import Shape

BOTTLENECKS = {
    "compute": ("attention", "experts", "dense", "head", "recompute", "reference"),
    "memory bandwidth": ("memory", "quantise", "launch", "optimizer"),
    "communication": ("tp", "cp", "dispatch", "dp", "offload"),
    "host": ("host", "step"),
    "pipeline": ("bubble",),
}
"""Bottlenecks of a step, with the parts of its time that each comprises."""
HOST_ADAM_RATE = 0.6e9
"""Parameters per second that one rank's share of a host updates, copies included: Qwen3-30B-A3B on
16 H100 takes 3.19 s more with all of 1.9 G parameters per rank there (Megatron-Bridge)."""
HOST_NORM = 4.0
"""Exponent of the norm that combines device and host time; infinity would be the maximum, which
needs a host that always runs ahead."""
STEADY_SCHEDULES = (OneFOneB, Interleaved, Merged, GPipe)
"""Schedules whose ranks have no idle time between filling and draining."""
FORWARD_SHARE = 1 / 3
"""Forward's share of a micro-batch's time: backward takes twice as long, half of that for weight
gradients."""
IDLE_CHUNKS: dict[type[Schedule], float] = {
    **dict.fromkeys(STEADY_SCHEDULES, 1.0),
    ZeroBubbleH1: FORWARD_SHARE,
    ZeroBubbleV: FORWARD_SHARE,
    DualPipeV: 2 * FORWARD_SHARE,
}
"""Idle time per other rank during filling and draining, in units of a chunk's time."""


@dataclass(frozen=True)
class StepTime:
    """Planned time of a step, with its parts and its bottleneck."""

    case: Case = field(repr=False)
    seconds: float
    parts: Mapping[str, float]
    """Seconds of one rank by part, by default the slowest; they add up to ``seconds``."""
    ranks: tuple[tuple[float, float], ...]
    """Forward and backward seconds of a micro-batch per pipeline rank, with exposed exchanges."""
    hidden: Mapping[str, float]
    """Seconds of communication hidden behind compute, by part."""
    uncertainty: float
    """Relative half-width of an interval that should contain two of three measured steps."""

    @property
    def seconds_by_bottleneck(self) -> dict[str, float]:
        """Seconds by bottleneck."""
        return {
            key: sum(self.parts.get(name, 0.0) for name in names)
            for key, names in BOTTLENECKS.items()
        }

    @property
    def bottleneck(self) -> str:
        """Bottleneck that takes the largest share of the step."""
        return max(self.seconds_by_bottleneck.items(), key=lambda item: item[1])[0]

    @cached_property
    def tflops_per_gpu(self) -> float:
        """Model TFLOP/s per GPU: half of causal attention, multi-token layers, no recompute."""
        return model_flops(self.case) / self.seconds / self.case.world / 1e12


def model_flops(case: Case) -> int:
    """Return a step's model FLOPs by the convention of :mod:`moefold.planner.count`."""
    return case.batch * count(case.decoder).flops([case.seq])


def estimate_time(
    case: Case, constants: Constants | None = None, rank: int | None = None
) -> StepTime:
    """Return the time of a step.

    Args:
        rank: the pipeline rank whose parts are returned; default is the slowest.
        constants: constants of devices and software; default is those of the package.

    Raises:
        ValueError: a layer has no description.
    """
    software = case.software
    numbers = case.number_formats
    products = numbers.recipe, numbers.recipe_options
    setting = build_setting(case.cluster, software, *products, constants)
    rates = setting.rates
    m = case.num_micro_batches
    passes = PassTime(case.decoder, case_shape(case), setting, LayerPolicy.of(case))
    work = [passes.layers_time(stage) for stage in case.contents.ranks]
    ranks = [passes.micro_batch_time(time, software.overlaps.ep) for time in work]
    slow = max(range(len(ranks)), key=lambda at: ranks[at].seconds) if rank is None else rank
    slowest = ranks[slow]
    stage = case.contents.ranks[slow]
    seconds = pipeline_seconds(case.schedule, m, case.sizes.vpp, [rank.seconds for rank in ranks])
    parts = {name: m * part for name, part in slowest.parts.items()}
    if software.overlaps.ep:
        # Exchanges of the first pass have no compute to overlap with.
        parts["dispatch"] += slowest.hidden / case.sizes.vpp
    parts["bubble"] = seconds - m * slowest.seconds
    parts["dp"], hidden = data_parallel_seconds(case, work[slow], stage, slowest, rates)
    parts["optimizer"] = _optimizer_seconds(case, stage, rates)
    parts["optimizer"] += newton_schulz_seconds(case, slow, rates)
    parts["step"] = rates.step_s
    parts |= _reference_part(case, passes)
    return StepTime(
        case, sum(parts.values()), parts, tuple((rank.forward, rank.backward) for rank in ranks),
        {"dispatch": m * slowest.hidden, "dp": hidden}, setting.uncertainty,
    )  # fmt: skip


def _reference_part(case: Case, passes: "PassTime") -> dict[str, float]:
    """Return the seconds of a reference's forward in each step, and of logits computed twice."""
    if case.reference is None:
        return {}
    seconds = 0.0
    decoder = reference_model(case.reference, case.decoder)
    if decoder is not None:
        shape, setting, policy = passes.inputs
        shape = shape._replace(hidden=decoder.hidden)
        times = PassTime(decoder, shape, setting, policy)
        ranks = reference_contents(case, decoder).ranks
        forward = [times.micro_batch_time(times.layers_time(one), False).forward for one in ranks]
        seconds += passes_seconds(case, forward)
    if case.reference.second_logits:
        logits = passes.layers_time(StageContents(loss=True)).forward
        seconds += case.num_micro_batches * sum(logits.values())
    return {"reference": seconds}


class MicroBatchTime(NamedTuple):
    """Seconds of one micro-batch on one rank."""

    forward: float
    backward: float
    parts: Mapping[str, float]
    """Seconds of forward and backward by part, ``host`` included."""
    hidden: float
    """Seconds of exchanges hidden behind compute."""

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.backward


def case_shape(case: Case) -> Shape:
    """Return the shape that decides the time of a case's layers."""
    return work_shape(
        case.decoder.hidden, case.seq, case.micro_batch, case.sizes, case.load, case.dispatch
    )


class PassTime:
    """Time of a micro-batch on a rank by the layers that it holds, independent of the pipeline."""

    def __init__(
        self, decoder: Decoder, shape: Shape, setting: KernelSetting, policy: LayerPolicy
    ) -> None:
        """Store the model, a rank's part of a micro-batch, and the setting."""
        self.decoder = decoder
        self.blocks = distinct_blocks(decoder)[0]
        head = embedding_weight(decoder) if decoder.tied else head_weight(decoder)
        self.frozen_head = head.frozen
        self.inputs = (shape, setting, policy)
        self.rates = setting.rates
        self._by_content: dict[StageContents, WorkTime] = {}

    def layers_time(self, stage: StageContents) -> WorkTime:
        """Return the time of a rank's layers; a cached object that must not be modified."""
        if stage not in self._by_content:
            time = WorkTime()
            for kind, count in stage.layers:
                time.add(layer_time(self.blocks[kind], *self.inputs), count)
            if stage.multi_token:
                time.add(head_or_join_time(None, *self.inputs), stage.multi_token)
            if num_losses := stage.losses:
                end = head_or_join_time(self.decoder.vocab, *self.inputs, self.frozen_head)
                time.add(end, num_losses)
                time.weights -= (num_losses - 1) * end.weights  # all losses share the head
            self._by_content[stage] = time
        return self._by_content[stage]

    def micro_batch_time(self, time: WorkTime, overlaps_dispatch: bool) -> MicroBatchTime:
        """Combine device and host time of a micro-batch.

        ``overlaps_dispatch``: exchanges overlap with compute of another micro-batch.
        """
        passes = list[float]()
        hidden = 0.0
        parts: dict[str, float] = dict.fromkeys((*PARTS, "host"), 0.0)
        for by_part, host in (
            (time.forward, time.host_forward), (time.backward, time.host_backward)
        ):  # fmt: skip
            work = sum(by_part.values())
            exchange = by_part.get("dispatch", 0.0)
            overlap = min(exchange * self.rates.hidden, 0.8 * (work - exchange))
            overlap = overlap if overlaps_dispatch else 0.0
            device = work - overlap + EXCHANGE_SM_COST * overlap
            combined = (device**HOST_NORM + host**HOST_NORM) ** (1 / HOST_NORM) if device else host
            for name, seconds in by_part.items():
                parts[name] += seconds
            parts["dispatch"] -= overlap
            parts["experts"] += EXCHANGE_SM_COST * overlap
            parts["host"] += combined - device
            passes.append(combined)
            hidden += overlap
        return MicroBatchTime(passes[0], passes[1], parts, hidden)


def data_parallel_seconds(
    case: Case, work: WorkTime, stage: StageContents, passes: MicroBatchTime, rates: Rates
) -> tuple[float, float]:
    """Return exposed and hidden seconds of data-parallel communication per step on a rank.

    For stacks other than Moefold the exchanged bytes are those of weights in products.

    Args:
        work: the rank's layers, whose weights are counted.
        stage: the rank's parts of the model.
        passes: seconds of a micro-batch on the rank.
    """
    cluster = case.cluster
    m = case.num_micro_batches
    overlaps = case.software.overlaps
    if case.software.stack == "moefold":
        collectives = collective_seconds(case, stage, rates)
        return exposed_seconds(case, collectives, stage, (passes.forward, passes.backward), rates)
    sizes = case.sizes
    folding = case.folding
    weights = (
        (work.weights - work.experts, strided_reach(cluster, folding.dp * sizes.cp, sizes.tp)),
        (work.experts, strided_reach(cluster, folding.edp, sizes.ep * sizes.etp)),
    )

    def ring(width: float) -> float:
        return sum(
            ring_seconds(count * width, group, cluster, rates.nic_gather)
            for count, group in weights
        )

    # Each pair is the seconds of a collective and the compute that can hide it.
    gathers = 1
    reductions = m if case.layout.zero == 2 else 1
    forward = ring(2.0), ONCE_HIDDEN_SHARE * overlaps.parameters * passes.forward
    hiding = ONCE_HIDDEN_SHARE * overlaps.gradients * passes.backward
    backward = ring(case.number_formats.gradient_bytes), hiding
    if case.layout.zero == 3 and sizes.pp == 1:
        # Weights are gathered and gradients reduced in every micro-batch.
        gathers = m
        reductions = m
        share = rates.hidden_shards * overlaps.parameters
        forward = forward[0], share * passes.forward
        backward = 2 * forward[0], share * passes.backward
    hidden = gathers * min(forward) + reductions * min(backward)
    return gathers * forward[0] + reductions * backward[0] - hidden, hidden


def _optimizer_seconds(case: Case, stage: StageContents, rates: Rates) -> float:
    """Return the seconds of zeroing gradients and of the update on device, host and disk."""
    numbers = case.number_formats
    placement = case.state
    device = case.cluster.device
    counter = collective_counter(case.decoder, StateSharding.of(case))
    local, updated = counter.trained_elements(stage)
    state = numbers.master_bytes + 2 * numbers.matrix_moment_bytes
    moved = updated * (2 * state + 2 * numbers.gradient_bytes + numbers.weight_bytes)
    moved += (updated if case.layout.zero > 1 else local) * 2 * numbers.gradient_bytes
    on_device = moved / (device.memory_bandwidth * rates.memory)
    offloaded = updated * placement.offloaded_share
    # Elementwise updates fetch parts while others are stored; other updates fetch all, then store.
    transfers = 1 if numbers.optimizer.elementwise else 2
    moved = transfers * offloaded * state
    disk = moved / DISK_BANDWIDTH if placement.at == "disk" else 0.0
    if placement.step == "device":
        return on_device + (disk + moved / (device.host_bandwidth or device.memory_bandwidth))
    return on_device + (disk + offloaded / HOST_ADAM_RATE)


# ----------------------------------------------------------------------------- pipelines


def pipeline_seconds(schedule: Schedule, m: int, v: int, ranks: Sequence[float]) -> float:
    """Return the seconds of m micro-batches in a pipeline.

    Apart from filling and draining, each micro-batch takes the slowest rank's time. With
    ``STEADY_SCHEDULES``, filling and draining take the time of one chunk on each other rank.

    Args:
        v: chunks per rank.
        ranks: seconds of a micro-batch's forward and backward over all chunks of each rank.
    """
    p = len(ranks)
    slowest = max(ranks)
    total = sum(ranks)
    if isinstance(schedule, STEADY_SCHEDULES):
        filling = (total - slowest) / v
        return m * slowest + filling + _startup_idle(schedule, p, v, m) * total / p
    return m * slowest + idle_micro_batches(schedule, p, v, m) * total / p


def idle_micro_batches(schedule: Schedule, p: int, v: int, m: int) -> float:
    """Return a rank's idle time with equal stages, in units of a micro-batch's time."""
    if p == 1:
        return 0.0
    share = IDLE_CHUNKS.get(type(schedule))
    if share is None:
        return _simulated_idle(schedule, p, v, m)
    return share * (p - 1) / v + _startup_idle(schedule, p, v, m)


def _startup_idle(schedule: Schedule, p: int, v: int, m: int) -> float:
    """Return the extra idle time where there are fewer micro-batches than ranks."""
    missing = max(0, p - m)
    if isinstance(schedule, ZeroBubbleH1):
        # There are too few weight gradients to fill the idle time.
        return missing * FORWARD_SHARE
    # All chunks but the first wait until the first micro-batch has passed all ranks.
    return missing * (v - 1) / v if isinstance(schedule, GPipe) else 0.0


@memoize(1024)
def _simulated_idle(schedule: Schedule, p: int, v: int, m: int) -> float:
    """Return the simulated idle time of a table with at most ``4 * p`` micro-batches."""
    simulated = min(m, 4 * p)
    table = schedule_table(schedule, p, v, simulated)
    return simulate(table, StageCosts(*(FORWARD_SHARE / v,) * 3)).makespan - simulated


# ----------------------------------------------------------------------------- Muon


def newton_schulz_flops(decoder: Decoder, optimizer: Record) -> int:
    """Return the FLOPs of a step's Newton-Schulz iterations, each matrix computed once.

    With sides s <= l, an iteration has two products of s * s * l and one of s cubed.
    """
    if not isinstance(optimizer, Muon):
        return 0
    total = 0
    for weight in model_weights(decoder):
        if optimizer.orthogonalises(weight.name, weight.shape):
            *stack, rows, columns = weight.shape
            short, long = sorted((rows, columns))
            total += prod(stack) * (2 * short * short * long + short**3)
    return 2 * optimizer.ns_steps * total


def newton_schulz_seconds(case: Case, stage: int, rates: Rates) -> float:
    """Return the seconds of Newton-Schulz on one rank of a pipeline stage.

    Data ranks divide the matrices; each tensor rank computes a matrix that tp cuts as a whole.
    """
    rule = case.number_formats.optimizer
    if not isinstance(rule, Muon):
        return 0.0
    peak = case.cluster.device.peak("bf16")
    total = 0.0
    for part, copies in layers_and_norm(case.contents.ranks[stage]):
        for weight in part_weights(case.decoder, part) if copies else ():
            if weight.frozen or not rule.orthogonalises(weight.name, weight.shape):
                continue
            short, long = sorted(weight.shape[-2:])
            ranks = case.sizes.ep if weight.is_expert else 1
            shards, _ = StateSharding.of(case).shards_and_replicas(weight.is_expert)
            matrices = copies * prod(weight.shape[:-2]) / ranks
            matrices /= shards
            products = [
                Product(short, short, *p) for p in ((long, 2 * matrices), (short, matrices))
            ]
            total += sum(product_seconds(product, rates, peak, False) for product in products)
    return rule.ns_steps * total
