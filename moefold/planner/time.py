"""Step time by parts: layers of each rank at the device's rates, the pipeline over the ranks, data
parallelism and the optimizer.

The time of a pipeline is a closed form, which tests compare with a simulation of the table that
training executes; a schedule without a closed form is simulated.

    took = estimate(case)
    took.seconds, took.tflops_per_gpu, took.parts, took.binds, took.uncertainty
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
from moefold.planner.time_data import (
    ONCE_HIDDEN_SHARE,
    collective_counter,
    collective_seconds,
    exposed_seconds,
)
from moefold.planner.time_layer import (
    DISK_BANDWIDTH,
    EXCHANGE_SM_COST,
    PARTS,
    KernelSetting,
    WorkTime,
    build_setting,
    end_time,
    layer_time,
)
from moefold.planner.time_work import LayerPolicy, RankShare
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

BOTTLENECKS = {
    "compute": ("attention", "experts", "dense", "head", "recompute"),
    "memory bandwidth": ("memory", "quantise", "launch", "optimizer"),
    "communication": ("tp", "cp", "dispatch", "dp", "offload"),
    "host": ("host", "step"),
    "pipeline": ("bubble",),
}
"""Bottlenecks of a step, with the parts of its time that each comprises."""
HOST_ADAM_RATE = 0.6e9
"""Parameters per second that one rank's share of a host updates, copies included: Qwen3-30B-A3B on
16 H100 takes 3.19 s more with all of 1.9 G parameters per rank there (Megatron-Bridge)."""
HOST_OVERLAP_NORM = 4.0
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
    """Seconds of the slowest rank by part; they add up to ``seconds``."""
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
            wall: sum(self.parts[name] for name in names) for wall, names in BOTTLENECKS.items()
        }

    @property
    def bottleneck(self) -> str:
        """Bottleneck that takes the largest share of the step."""
        return max(self.seconds_by_bottleneck.items(), key=lambda wall: wall[1])[0]

    @cached_property
    def tflops_per_gpu(self) -> float:
        """Model TFLOP/s per GPU: half of causal attention, multi-token layers, no recompute."""
        return model_flops(self.case) / self.seconds / self.case.world / 1e12


def model_flops(case: Case) -> int:
    """Return a step's model FLOPs by the convention of :mod:`moefold.planner.count`."""
    return case.batch * count(case.decoder).flops([case.seq])


def estimate_time(case: Case, constants: Constants | None = None) -> StepTime:
    """Return the time of a step.

    Args:
        given: constants of devices and software; default is those of the package.

    Raises:
        ValueError: a layer has no description.
    """
    software, numbers = case.software, case.number_formats
    setting = build_setting(
        case.cluster, software, numbers.recipe, numbers.recipe_options, constants
    )
    rates, m = setting.rates, case.num_micro_batches
    made = PassTime(case.decoder, RankShare.of(case), setting, LayerPolicy.of(case))
    ranks = [made.layers_time(held) for held in case.rank_contents]
    spans = [made.micro_batch_time(rank, software.overlaps.ep) for rank in ranks]
    slow = max(range(len(ranks)), key=lambda rank: spans[rank].seconds)
    span = spans[slow]
    inner = pipeline_seconds(case.schedule, m, case.sizes.vpp, [one.seconds for one in spans])
    parts = {name: m * seconds for name, seconds in span.parts.items()}
    if software.overlaps.ep:
        # Exchanges of the first pass have no compute to overlap with.
        parts["dispatch"] += span.hidden / case.sizes.vpp
    parts["bubble"] = inner - m * span.seconds
    parts["dp"], covered = data_parallel_seconds(
        case, ranks[slow], case.rank_contents[slow], span, rates
    )
    parts["optimizer"] = _optimizer_seconds(case, case.rank_contents[slow], rates)
    parts["optimizer"] += orthogonal_seconds(case, slow, rates)
    parts["step"] = rates.step_s
    return StepTime(
        case, sum(parts.values()), parts, tuple((one.forward, one.backward) for one in spans),
        {"dispatch": m * span.hidden, "dp": covered}, setting.uncertainty,
    )  # fmt: skip


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


class PassTime:
    """Time of a micro-batch on a rank by the layers that it holds, independent of the pipeline."""

    def __init__(
        self, decoder: Decoder, share: RankShare, setting: KernelSetting, policy: LayerPolicy
    ) -> None:
        """Store the model, a rank's part of a micro-batch, and the setting."""
        self.decoder, self.blocks = decoder, distinct_blocks(decoder)[0]
        self.fixed = (embedding_weight(decoder) if decoder.tied else head_weight(decoder)).frozen
        self.how, self.rates = (share, setting, policy), setting.rates
        self._known: dict[StageContents, WorkTime] = {}

    def layers_time(self, held: StageContents) -> WorkTime:
        """Return the time of a rank's layers; a cached object that must not be modified."""
        if held not in self._known:
            made = WorkTime()
            for kind, count in held.layers:
                made.add(layer_time(self.blocks[kind], *self.how), count)
            if held.multi_token:
                made.add(end_time(None, *self.how), held.multi_token)
            losses = held.multi_token + held.loss
            if losses:
                end = end_time(self.decoder.vocab, *self.how, self.fixed)
                made.add(end, losses)
                made.weights -= (losses - 1) * end.weights  # all losses share the head
            self._known[held] = made
        return self._known[held]

    def micro_batch_time(self, time: WorkTime, overlaps_dispatch: bool) -> MicroBatchTime:
        """Combine device and host time of a micro-batch.

        Args:
            paired: whether exchanges overlap with compute of another micro-batch.
        """
        spans, hidden = [], 0.0
        parts: dict[str, float] = dict.fromkeys((*PARTS, "host"), 0.0)
        for seconds, host in (
            (time.forward, time.host_forward),
            (time.backward, time.host_backward),
        ):
            work = sum(seconds.values())
            exchange = seconds.get("dispatch", 0.0)
            under = 0.0
            if overlaps_dispatch:
                under = min(exchange * self.rates.hidden, 0.8 * (work - exchange))
            device = work - under + EXCHANGE_SM_COST * under
            whole = (
                (device**HOST_OVERLAP_NORM + host**HOST_OVERLAP_NORM) ** (1 / HOST_OVERLAP_NORM)
                if device
                else host
            )
            for name, value in seconds.items():
                parts[name] += value
            parts["dispatch"] -= under
            parts["experts"] += EXCHANGE_SM_COST * under
            parts["host"] += whole - device
            spans.append(whole)
            hidden += under
        return MicroBatchTime(spans[0], spans[1], parts, hidden)


def data_parallel_seconds(
    case: Case, rank: WorkTime, held: StageContents, span: MicroBatchTime, rates: Rates
) -> tuple[float, float]:
    """Return exposed and hidden seconds of data-parallel communication per step.

    For stacks other than Moefold the exchanged bytes are those of weights in products.
    """
    cluster, m, overlaps = case.cluster, case.num_micro_batches, case.software.overlaps
    if case.software.stack == "moefold":
        work = collective_seconds(case, held, rates)
        return exposed_seconds(case, work, held, (span.forward, span.backward), rates)
    sizes, folding = case.sizes, case.folding
    dense = rank.weights - rank.experts
    copies = strided_reach(cluster, folding.dp * sizes.cp, sizes.tp)
    expert = strided_reach(cluster, folding.edp, sizes.ep * sizes.etp)

    def ring(each: float) -> float:
        return ring_seconds(dense * each, copies, cluster, rates) + ring_seconds(
            rank.experts * each, expert, cluster, rates
        )

    gather, times = ring(2.0), (1, m if case.memory_policy.zero == 2 else 1)
    backward = (
        ring(case.number_formats.gradient_bytes),
        ONCE_HIDDEN_SHARE * overlaps.gradients * span.backward,
    )
    forward = gather, ONCE_HIDDEN_SHARE * overlaps.parameters * span.forward
    if case.memory_policy.zero == 3 and sizes.pp == 1:
        # Weights are gathered and gradients reduced in every micro-batch.
        times, free = (m, m), rates.hidden_shards * overlaps.parameters
        backward, forward = (2 * gather, free * span.backward), (gather, free * span.forward)
    hidden = times[0] * min(forward) + times[1] * min(backward)
    return times[0] * forward[0] + times[1] * backward[0] - hidden, hidden


def _optimizer_seconds(case: Case, held: StageContents, rates: Rates) -> float:
    """Return the seconds of zeroing gradients and of the update on device, host and disk."""
    numbers, keeping, device = case.number_formats, case.memory_policy, case.cluster.device
    local, own = collective_counter(case.decoder, StateSharding.of(case)).trained_elements(held)
    each = 2 * (numbers.master_bytes + 2 * numbers.matrix_moment_bytes) + 2 * numbers.gradient_bytes
    summed = own if keeping.zero > 1 else local
    moved = own * (each + numbers.weight_bytes) + summed * 2 * numbers.gradient_bytes
    here = moved / (device.memory_bandwidth * rates.memory)
    away = own * keeping.optimizer_offload
    # Elementwise updates fetch parts while others are stored; other updates fetch all, then store.
    ways = 1 if numbers.optimizer.elementwise else 2
    moved = ways * away * (numbers.master_bytes + 2 * numbers.matrix_moment_bytes)
    took = moved / DISK_BANDWIDTH if keeping.state_on_disk else 0.0
    if keeping.state_step == "device":
        return here + (took + moved / (device.host_bandwidth or device.memory_bandwidth))
    return here + (took + away / HOST_ADAM_RATE)


# ----------------------------------------------------------------------------- pipelines


def pipeline_seconds(schedule: Schedule, m: int, v: int, ranks: Sequence[float]) -> float:
    """Return the seconds of m micro-batches in a pipeline.

    Apart from filling and draining, each micro-batch takes the slowest rank's time. With ``STEADY``
    schedules, filling and draining take the time of one chunk on each other rank.

    Args:
        v: chunks per rank.
        ranks: seconds of a micro-batch's forward and backward over all chunks of each rank.
    """
    p, slowest, whole = len(ranks), max(ranks), sum(ranks)
    if isinstance(schedule, STEADY_SCHEDULES):
        passed = (whole - slowest) / v
        return m * slowest + passed + _startup_idle(schedule, p, v, m) * whole / p
    return m * slowest + idle_share(schedule, p, v, m) * whole / p


def idle_share(schedule: Schedule, p: int, v: int, m: int) -> float:
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
    short = min(m, 4 * p)
    table = schedule_table(schedule, p, v, short)
    return simulate(table, StageCosts(*(FORWARD_SHARE / v,) * 3)).makespan - short


# ----------------------------------------------------------------------------- Muon


def orthogonal_flops(decoder: Decoder, rule: Record) -> int:
    """Return the FLOPs of a step's Newton-Schulz iterations, each matrix computed once.

    With sides s <= l, an iteration has two products of s * s * l and one of s cubed.
    """
    if not isinstance(rule, Muon):
        return 0
    total = 0
    for weight in model_weights(decoder):
        if rule.orthogonalises(weight.name, weight.shape):
            short, long = sorted(weight.shape[-2:])
            total += prod(weight.shape[:-2]) * (2 * short * short * long + short**3)
    return 2 * rule.ns_steps * total


def orthogonal_seconds(case: Case, stage: int, rates: Rates) -> float:
    """Return the seconds of Newton-Schulz on one rank of a pipeline stage.

    Data ranks divide the matrices; each tensor rank computes a matrix that tp cuts as a whole.
    """
    rule = case.number_formats.optimizer
    if not isinstance(rule, Muon):
        return 0.0
    peak, total = case.cluster.device.peak("bf16"), 0.0
    for part, times in layers_and_norm(case.rank_contents[stage]):
        for weight in part_weights(case.decoder, part) if times else ():
            if weight.frozen or not rule.orthogonalises(weight.name, weight.shape):
                continue
            short, long = sorted(weight.shape[-2:])
            matrices = times * prod(weight.shape[:-2]) / (case.sizes.ep if weight.is_expert else 1)
            matrices /= StateSharding.of(case).shards_and_replicas(weight.is_expert)[0]
            products = (
                Product(short, short, long, 2 * matrices),
                Product(short, short, short, matrices),
            )
            total += sum(product_seconds(one, rates, peak, False) for one in products)
    return rule.ns_steps * total
