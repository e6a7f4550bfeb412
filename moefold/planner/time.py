"""The time of a step by parts: each rank's layers at the device's rates, the pipeline over them,
then what data parallelism and the optimizer add.

How long a pipeline takes is in closed forms, which tests hold to the simulator over the tables that
training executes; a schedule without one is simulated.

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
from moefold.planner.case import Case, Held, kinds, table_of
from moefold.planner.count import count
from moefold.planner.curves import Constants, Product, Rates, product_seconds
from moefold.planner.memory_state import Split, inner_parts, part_weights
from moefold.planner.network import reach, ring_seconds
from moefold.planner.remember import remembered
from moefold.planner.time_data import HIDDEN_ONCE, copies_of, data_work, shown
from moefold.planner.time_layer import (
    DISK_BANDWIDTH,
    PARTS,
    SM_COST,
    Setting,
    Time,
    end_time,
    layer_time,
    setting_of,
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
from moefold.schedule.simulate import Costs, simulate
from moefold.spec.decoder import embedding, head, model_weights

BINDS = {
    "compute": ("attention", "experts", "dense", "head", "recompute"),
    "memory bandwidth": ("memory", "quantise", "launch", "optimizer"),
    "communication": ("tp", "cp", "dispatch", "dp", "offload"),
    "host": ("host", "step"),
    "pipeline": ("bubble",),
}
"""What binds a step, and the parts that say so."""
HOST_ADAM = 0.6e9
"""Parameters per second that one rank's share of a host updates, copies included: Qwen3-30B-A3B on
16 H100 takes 3.19 s more with all of 1.9 G parameters per rank there (Megatron-Bridge)."""
SHARP = 4.0
"""How sharply the slower of device and host decides; endless would be the maximum, which needs a
host that always runs ahead."""
STEADY = (OneFOneB, Interleaved, Merged, GPipe)
"""Schedules whose ranks work without a gap once filled."""
FILLING = 1 / 3
"""Share of a micro-batch's work that is its forward: backward takes twice as long, half of that for
gradients of weights."""
IDLE: dict[type[Schedule], float] = {
    **dict.fromkeys(STEADY, 1.0),
    ZeroBubbleH1: FILLING,
    ZeroBubbleV: FILLING,
    DualPipeV: 2 * FILLING,
}
"""Idle time of a rank, in a chunk's work, for each other rank that fills and drains before it."""


@dataclass(frozen=True)
class StepTime:
    """How long a step takes, and why."""

    case: Case = field(repr=False)
    seconds: float
    parts: Mapping[str, float]
    """Seconds of the slowest rank by part; they add up to ``seconds``."""
    ranks: tuple[tuple[float, float], ...]
    """Forward and backward of one micro-batch on each pipeline rank, with its exposed exchanges."""
    hidden: Mapping[str, float]
    """Seconds of communication that computing hides, by part."""
    uncertainty: float
    """Relative half-width: two steps of three should lie within."""

    @property
    def walls(self) -> dict[str, float]:
        """Seconds by what a step runs into."""
        return {wall: sum(self.parts[name] for name in names) for wall, names in BINDS.items()}

    @property
    def binds(self) -> str:
        """What takes most of a step."""
        return max(self.walls.items(), key=lambda wall: wall[1])[0]

    @cached_property
    def tflops_per_gpu(self) -> float:
        """Causal attention counted by half, multi-token layers in, recompute out."""
        return flops(self.case) / self.seconds / self.case.world / 1e12


def flops(case: Case) -> int:
    """Return a step's model FLOPs, as :mod:`moefold.planner.count` counts them."""
    return case.batch * count(case.decoder).flops([case.seq])


def estimate(case: Case, given: Constants | None = None) -> StepTime:
    """Return the time of a step.

    Args:
        given: constants of devices and software; those of the package unless given.

    Raises:
        ValueError: where a layer describes nothing.
    """
    software, numbers = case.software, case.numbers
    setting = setting_of(case.cluster, software, numbers.recipe, numbers.narrowed, given)
    rates, m = setting.rates, case.micro_batches
    made = PassTime(case.decoder, RankShare.of(case), setting, LayerPolicy.of(case))
    ranks = [made.time(held) for held in case.held]
    spans = [made.span(rank, software.overlaps.ep) for rank in ranks]
    slow = max(range(len(ranks)), key=lambda rank: spans[rank].seconds)
    span = spans[slow]
    inner = pipeline_seconds(case.schedule, m, case.sizes.vpp, [one.seconds for one in spans])
    parts = {name: m * seconds for name, seconds in span.parts.items()}
    if software.overlaps.ep:
        # The first has nothing to hide under.
        parts["dispatch"] += span.hidden / case.sizes.vpp
    parts["bubble"] = inner - m * span.seconds
    parts["dp"], covered = data_seconds(case, ranks[slow], case.held[slow], span, rates)
    parts["optimizer"] = _optimizer_seconds(case, case.held[slow], rates)
    parts["optimizer"] += orthogonal_seconds(case, slow, rates)
    parts["step"] = rates.step_s
    return StepTime(
        case, sum(parts.values()), parts, tuple((one.forward, one.backward) for one in spans),
        {"dispatch": m * span.hidden, "dp": covered}, setting.uncertainty,
    )  # fmt: skip


class MicroBatchTime(NamedTuple):
    """A micro-batch on one rank."""

    forward: float
    backward: float
    parts: Mapping[str, float]
    """Seconds of both by part, the host's among them."""
    hidden: float
    """Seconds of exchanges that computing hides."""

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


class PassTime:
    """The time of a micro-batch on ranks that hold these layers or those, whatever the pipeline."""

    def __init__(
        self, decoder: Decoder, share: RankShare, setting: Setting, policy: LayerPolicy
    ) -> None:
        """Take what decides it."""
        self.decoder, self.blocks = decoder, kinds(decoder)[0]
        self.fixed = (embedding(decoder) if decoder.tied else head(decoder)).frozen
        self.how, self.rates = (share, setting, policy), setting.rates
        self._known: dict[Held, Time] = {}

    def time(self, held: Held) -> Time:
        """Return the time of what a rank holds; not to be changed."""
        if held not in self._known:
            made = Time()
            for kind, count in held.layers:
                made.add(layer_time(self.blocks[kind], *self.how), count)
            if held.multi_token:
                made.add(end_time(None, *self.how), held.multi_token)
            losses = held.multi_token + held.loss
            if losses:
                end = end_time(self.decoder.vocab, *self.how, self.fixed)
                made.add(end, losses)
                made.weights -= (losses - 1) * end.weights  # which all of them share
            self._known[held] = made
        return self._known[held]

    def span(self, time: Time, paired: bool) -> MicroBatchTime:
        """Return what device and host make of it.

        Args:
            paired: whether exchanges run beside another micro-batch's computing.
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
            if paired:
                under = min(exchange * self.rates.hidden, 0.8 * (work - exchange))
            device = work - under + SM_COST * under
            whole = (device**SHARP + host**SHARP) ** (1 / SHARP) if device else host
            for name, value in seconds.items():
                parts[name] += value
            parts["dispatch"] -= under
            parts["experts"] += SM_COST * under
            parts["host"] += whole - device
            spans.append(whole)
            hidden += under
        return MicroBatchTime(spans[0], spans[1], parts, hidden)


def data_seconds(
    case: Case, rank: Time, held: Held, span: MicroBatchTime, rates: Rates
) -> tuple[float, float]:
    """Return data-parallel communication per step: what shows, and what is hidden.

    Of other stacks the exchanged bytes are those of products' weights.
    """
    cluster, m, overlaps = case.cluster, case.micro_batches, case.software.overlaps
    if case.software.stack == "moefold":
        work = data_work(case, held, rates)
        return shown(case, work, held, (span.forward, span.backward), rates)
    sizes, folding = case.sizes, case.folding
    dense = rank.weights - rank.experts
    copies = reach(cluster, folding.dp * sizes.cp, sizes.tp)
    expert = reach(cluster, folding.edp, sizes.ep * sizes.etp)

    def ring(each: float) -> float:
        return ring_seconds(dense * each, copies, cluster, rates) + ring_seconds(
            rank.experts * each, expert, cluster, rates
        )

    gather, times = ring(2.0), (1, m if case.keeping.zero == 2 else 1)
    backward = ring(case.numbers.gradient_bytes), HIDDEN_ONCE * overlaps.gradients * span.backward
    forward = gather, HIDDEN_ONCE * overlaps.parameters * span.forward
    if case.keeping.zero == 3 and sizes.pp == 1:
        # Weights come and gradients go with every micro-batch.
        times, free = (m, m), rates.hidden_shards * overlaps.parameters
        backward, forward = (2 * gather, free * span.backward), (gather, free * span.forward)
    hidden = times[0] * min(forward) + times[1] * min(backward)
    return times[0] * forward[0] + times[1] * backward[0] - hidden, hidden


def _optimizer_seconds(case: Case, held: Held, rates: Rates) -> float:
    """Return the seconds of zeroing gradients and of the update, on device, host and disk."""
    numbers, keeping, device = case.numbers, case.keeping, case.cluster.device
    local, own = copies_of(case.decoder, Split.of(case)).trained(held)
    each = 2 * (numbers.master_bytes + 2 * numbers.matrix_moment_bytes) + 2 * numbers.gradient_bytes
    summed = own if keeping.zero > 1 else local
    moved = own * (each + numbers.weight_bytes) + summed * 2 * numbers.gradient_bytes
    here = moved / (device.memory_bandwidth * rates.memory)
    away = own * keeping.optimizer_offload
    # Parts come while others go; where all come before any goes, it takes both ways.
    ways = 1 if numbers.optimizer.elementwise else 2
    moved = ways * away * (numbers.master_bytes + 2 * numbers.matrix_moment_bytes)
    took = moved / DISK_BANDWIDTH if keeping.state_on_disk else 0.0
    if keeping.state_step == "device":
        return here + (took + moved / (device.host_bandwidth or device.memory_bandwidth))
    return here + (took + away / HOST_ADAM)


# ----------------------------------------------------------------------------- pipelines


def pipeline_seconds(schedule: Schedule, m: int, v: int, ranks: Sequence[float]) -> float:
    """Return the seconds of m micro-batches.

    Beyond filling and draining, each takes the slowest rank's time. Where ranks work without a gap
    once filled, filling and draining pass each other rank once, a chunk each.

    Args:
        v: chunks per rank.
        ranks: seconds of a micro-batch's forward and backward over all chunks of each rank.
    """
    p, slowest, whole = len(ranks), max(ranks), sum(ranks)
    if isinstance(schedule, STEADY):
        passed = (whole - slowest) / v
        return m * slowest + passed + _short(schedule, p, v, m) * whole / p
    return m * slowest + idle(schedule, p, v, m) * whole / p


def idle(schedule: Schedule, p: int, v: int, m: int) -> float:
    """Return by how much a table of equal stages is longer than its work, in micro-batches."""
    if p == 1:
        return 0.0
    share = IDLE.get(type(schedule))
    if share is None:
        return _simulated(schedule, p, v, m)
    return share * (p - 1) / v + _short(schedule, p, v, m)


def _short(schedule: Schedule, p: int, v: int, m: int) -> float:
    """Return what it is longer where there are fewer micro-batches than ranks."""
    missing = max(0, p - m)
    if isinstance(schedule, ZeroBubbleH1):
        # Gradients of weights do not fill what is idle.
        return missing * FILLING
    # All chunks but one wait for the first micro-batch to come round.
    return missing * (v - 1) / v if isinstance(schedule, GPipe) else 0.0


@remembered(1024)
def _simulated(schedule: Schedule, p: int, v: int, m: int) -> float:
    """Return what a simulated table of filling, two rounds and draining is longer than its work."""
    short = min(m, 4 * p)
    table = table_of(schedule, p, v, short)
    return simulate(table, Costs(*(FILLING / v,) * 3)).makespan - short


# ----------------------------------------------------------------------------- Muon


def orthogonal_flops(decoder: Decoder, rule: Record) -> int:
    """Return the FLOPs of a step's Newton-Schulz over all matrices, each computed once.

    Of sides s and l, s the smaller, an iteration takes two products of s * s * l and one of s
    cubed.
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
    """Return the seconds that a rank of a pipeline rank spends on its share of the matrices.

    Data ranks share them out; a matrix that tensor ranks cut is made whole by each of them.
    """
    rule = case.numbers.optimizer
    if not isinstance(rule, Muon):
        return 0.0
    peak, total = case.cluster.device.peak("bf16"), 0.0
    for part, times in inner_parts(case.held[stage]):
        for weight in part_weights(case.decoder, part) if times else ():
            if weight.frozen or not rule.orthogonalises(weight.name, weight.shape):
                continue
            short, long = sorted(weight.shape[-2:])
            matrices = times * prod(weight.shape[:-2]) / (case.sizes.ep if weight.expert else 1)
            matrices /= Split.of(case).levels(weight.expert)[0]
            products = (
                Product(short, short, long, 2 * matrices),
                Product(short, short, short, matrices),
            )
            total += sum(product_seconds(one, rates, peak, False) for one in products)
    return rule.ns_steps * total
