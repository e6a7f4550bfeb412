"""The time of a step by parts: each rank's layers at the device's rates, the pipeline over them,
then what data parallelism and the optimizer add.

    took = estimate(case)
    took.seconds, took.tflops_per_gpu, took.parts, took.binds, took.uncertainty
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from moefold.config.base import Record
from moefold.layers.config import Gqa, Mla
from moefold.mesh.pipeline import Place
from moefold.model.config import Block
from moefold.moe.config import Moe
from moefold.planner.case import Case
from moefold.planner.curves import Constants, Rates, constants, memory_seconds
from moefold.planner.network import Rows, reach, ring_seconds
from moefold.planner.time_layer import (
    PARTS,
    SM_COST,
    Setting,
    Time,
    context_seconds,
    dispatch_seconds,
    layer_time,
    tensor_seconds,
)
from moefold.planner.time_optimizer import orthogonal_seconds
from moefold.planner.time_pipeline import pipeline_seconds
from moefold.planner.time_work import BF16, Share, head, joint, layer, offload_bytes

BINDS = {
    "compute": ("attention", "experts", "dense", "head", "recompute"),
    "memory": ("memory", "quantise", "launch", "optimizer"),
    "communication": ("tp", "cp", "dispatch", "dp", "offload"),
    "host": ("host", "step"),
    "pipeline": ("bubble",),
}
"""What binds a step, and the parts that say so."""
JOINT = 0
"""Stands for a multi-token layer's joint projection among the ids of blocks."""
Span = tuple[float, float, dict[str, float], float]
"""Forward and backward seconds of a micro-batch, by part, and exchanges that are hidden."""
FUSED = ("deepep", "hybridep")
HOST_ADAM = 0.6e9
"""Parameters per second that one rank's share of a host updates, copies included: Qwen3-30B-A3B on
16 H100 takes 3.19 s more with all of 1.9 G parameters per rank there (Megatron-Bridge)."""
SHARP = 4.0
"""How sharply the slower of device and host decides; endless would be the maximum, which needs a
host that always runs ahead."""


@dataclass(frozen=True)
class StepTime:
    """How long a step takes, and why."""

    case: Case = field(repr=False)
    seconds: float
    parts: Mapping[str, float]
    """Seconds of the slowest rank by part; they add up to ``seconds``."""
    ranks: tuple[tuple[float, float], ...]
    """Forward and backward of one micro-batch on each pipeline rank, with its exposed exchanges."""
    host: tuple[float, ...]
    """Seconds the host needs for one micro-batch of each pipeline rank."""
    hidden: Mapping[str, float]
    """Seconds of communication that computing hides, by part."""
    binds: str
    uncertainty: float
    """Relative half-width: two steps of three should lie within."""

    @cached_property
    def tflops_per_gpu(self) -> float:
        """Causal attention counted by half, multi-token layers in, recompute out."""
        return flops(self.case) / self.seconds / self.case.world / 1e12


def estimate(case: Case, given: Constants | None = None) -> StepTime:
    """Return the time of a step.

    Raises:
        ValueError: where a layer's kind is not planned.
    """
    return _Step(case, given or constants()).time()


class _Step:
    """One estimate in the making."""

    def __init__(self, case: Case, given: Constants) -> None:
        self.case, self.given = case, given
        software = case.software
        self.named = case.cluster.device.name, software.stack, software.release[:5]
        self.rates: Rates = given.rates(*self.named)
        whole = software.cuda_graphs == "full"
        self.setting = Setting(
            case.cluster, self.rates, case.numbers.recipe, case.dispatch, software.cuda_graphs,
            case.keeping.recompute, software.overlaps.tp, software.host_speed,
            case.numbers.narrowed, given.values["common.fused"] if whole else 1.0,
        )  # fmt: skip
        sizes = case.sizes
        self.share = Share(
            case.decoder.hidden, case.seq, case.micro_batch, sizes.tp, sizes.cp, sizes.ep,
            sizes.etp, case.load, case.dispatch in FUSED,
        )  # fmt: skip
        self._layers: dict[int, Time] = {}
        self._known: dict[int, Block] = {}
        self._sums: dict[tuple, Time] = {}
        self._head: Time | None = None

    def time(self) -> StepTime:
        """Return the time of the step."""
        case, m = self.case, self.case.micro_batches
        ranks = [self._held(place for chunk in rank for place in chunk) for rank in case.places]
        spans = [self._span(rank) for rank in ranks]
        slow = max(range(len(ranks)), key=lambda rank: sum(spans[rank][:2]))
        inner = self._pipeline(spans, m)
        busy = m * sum(spans[slow][:2])
        parts = dict.fromkeys((*PARTS, "host", "bubble", "dp", "optimizer", "step"), 0.0)
        hidden = {"dispatch": m * spans[slow][3], "dp": 0.0}
        for name, seconds in spans[slow][2].items():
            parts[name] += m * seconds
        first = spans[slow][3] / case.sizes.vpp if case.software.overlaps.ep else 0.0
        parts["dispatch"] += first
        parts["bubble"] = inner - busy
        shown, covered = self._data(ranks[slow], spans[slow], m)
        parts["dp"], hidden["dp"] = shown, covered
        parts["optimizer"] = self._optimizer(ranks[slow]) + orthogonal_seconds(
            case, slow, self.rates
        )
        parts["step"] = self.rates.step_s
        seconds = sum(parts.values())
        whole = {group: sum(parts[name] for name in names if name in parts)
                 for group, names in BINDS.items()}  # fmt: skip
        return StepTime(
            case, seconds, parts, tuple(span[:2] for span in spans),
            tuple(rank.host_forward + rank.host_backward for rank in ranks), hidden,
            max(whole, key=lambda group: whole[group]), self._uncertainty(),
        )  # fmt: skip

    def _pipeline(self, spans: list[Span], m: int) -> float:
        """Return the seconds of all micro-batches."""
        case = self.case
        ranks = [span[0] + span[1] for span in spans]
        return pipeline_seconds(case.schedule, m, case.sizes.vpp, ranks)

    def _held(self, places: Iterable[Place]) -> Time:
        """Return the time of what a rank holds; equal layers are counted, not repeated."""
        counts: dict[int, int] = {}
        blocks, losses = self.case.blocks, 0
        for place in places:
            if place.kind == "layer":
                block = blocks[place.index]
                self._known[id(block)] = block
                counts[id(block)] = counts.get(id(block), 0) + 1
            elif place.kind == "loss":
                losses += 1
            elif place.kind == "multi_token":
                self._known[id(blocks[-1])] = blocks[-1]
                counts[id(blocks[-1])] = counts.get(id(blocks[-1]), 0) + 1
                counts[JOINT] = counts.get(JOINT, 0) + 1
                losses += 1
        key = (*sorted(counts.items()), losses)
        if key not in self._sums:
            made = Time()
            for name, times in counts.items():
                made.add(self._joint() if name == JOINT else self._layer(name), times)
            if losses:
                made.add(self._loss(), losses)
            self._sums[key] = made
        return self._sums[key]

    def _joint(self) -> Time:
        return layer_time(joint(self.share), self.share, self.setting)

    def _loss(self) -> Time:
        if self._head is None:
            parts = head(self.case.decoder.vocab, self.share)
            self._head = layer_time(parts, self.share, self.setting)
        return self._head

    def _layer(self, name: int) -> Time:
        """Return the time of a block with its exchanges, made once per kind."""
        if name not in self._layers:
            self._layers[name] = self._made(self._known[name])
        return self._layers[name]

    def _made(self, block: Block) -> Time:
        share, setting, recompute = self.share, self.setting, self.case.keeping.recompute
        parts = layer(block, share)
        made = layer_time(parts, share, setting)
        halves = ("attention" in parts) + ("ffn" in parts)
        ahead, back = tensor_seconds(share, setting, halves)
        made.forward["tp"], made.backward["tp"] = ahead, back
        if share.cp > 1 and "core" in parts:
            core = made.forward["attention"], made.backward["attention"]
            sent = _keys(block.attention, share)
            made.forward["cp"], made.backward["cp"] = context_seconds(sent, core, share, setting)
        offloaded = offload_bytes(parts, self.case.keeping.offload)
        if offloaded:
            self._offload(made, offloaded * self.case.keeping.offload_share)
        if isinstance(block.ffn, Moe) and share.ep * share.etp > 1:
            once = 2 * dispatch_seconds(_rows(block.ffn, share), share, setting)
            again = bool(recompute & {"block", "moe"})
            made.forward["dispatch"] = once
            made.backward["dispatch"] = once * (2 if again else 1)
        return made

    def _offload(self, made: Time, moved: float) -> None:
        """Add what sending to the host and back costs: memory traffic, and what does not hide."""
        device = self.case.cluster.device
        for seconds in (made.forward, made.backward):
            work = sum(seconds.values())
            seconds["offload"] += max(0.0, moved / device.host_bandwidth - 0.8 * work)
            seconds["memory"] += memory_seconds(moved, self.rates, device.memory_bandwidth)

    def _span(self, rank: Time) -> Span:
        """Return forward, backward, both by part, and exchanges that are hidden."""
        spans, parts, hidden = [], dict.fromkeys((*PARTS, "host"), 0.0), 0.0
        for seconds, host in (
            (rank.forward, rank.host_forward),
            (rank.backward, rank.host_backward),
        ):
            work = sum(seconds.values())
            exchange = seconds["dispatch"]
            under = 0.0
            if self.case.software.overlaps.ep:
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
        return spans[0], spans[1], parts, hidden

    def _data(self, rank: Time, span: Span, m: int) -> tuple[float, float]:
        """Return data-parallel communication per step: what shows, and what is hidden."""
        case, cluster = self.case, self.case.cluster
        sizes, folding, overlaps = case.sizes, case.folding, case.software.overlaps
        dense = rank.weights - rank.experts
        copies = reach(cluster, folding.dp * sizes.cp, sizes.tp)
        expert = reach(cluster, folding.edp, sizes.ep * sizes.etp)

        def ring(each: float) -> float:
            return ring_seconds(dense * each, copies, cluster, self.rates) + ring_seconds(
                rank.experts * each, expert, cluster, self.rates
            )

        reduce, gather = ring(case.numbers.gradient_bytes), ring(2.0)
        shown = covered = 0.0
        if case.keeping.zero == 3 and sizes.pp == 1:
            for each, under in ((gather, span[0]), (gather + ring(2.0), span[1])):
                free = self.rates.hidden_shards * under if overlaps.parameters else 0.0
                covered += m * min(each, free)
                shown += m * max(0.0, each - free)
            return shown, covered
        for each, under, hides in (
            (reduce, span[1], overlaps.gradients),
            (gather, span[0], overlaps.parameters),
        ):
            free = 0.8 * under if hides else 0.0
            covered += min(each, free)
            shown += max(0.0, each - free)
        return shown, covered

    def _optimizer(self, rank: Time) -> float:
        """Return the seconds of zeroing gradients and of the update, on device and host."""
        case, numbers = self.case, self.case.numbers
        sharded = case.keeping.zero > 0
        dense = (rank.weights - rank.experts) / (case.folding.dp * case.sizes.cp if sharded else 1)
        own = dense + rank.experts / (case.folding.edp if sharded else 1)
        each = 2 * (numbers.master_bytes + 2 * numbers.moment_bytes) + 2 * numbers.gradient_bytes
        local = rank.weights / (case.folding.edp if case.keeping.zero == 3 else 1)
        moved = own * (each + numbers.weight_bytes) + local * 2 * numbers.gradient_bytes
        device = moved / (case.cluster.device.memory_bandwidth * self.rates.memory)
        return device + own * case.keeping.optimizer_offload / HOST_ADAM

    def _uncertainty(self) -> float:
        device, stack = self.given.knows(*self.named)
        name = "measured" if device and stack else ("one" if device or stack else "none")
        return self.given.spread[name]


def flops(case: Case) -> float:
    """Return a step's model FLOPs: 6 per multiplied weight and token, attention's causal half."""
    share = Share(case.decoder.hidden, case.seq, 1, 1, 1, 1, 1, 1.0, True)
    seen: dict[int, float] = {}
    total = 0.0
    for block in case.blocks:
        if id(block) not in seen:
            seen[id(block)] = _counted(layer(block, share))
        total += seen[id(block)]
    logits = _counted(head(case.decoder.vocab, share))
    extra = seen[id(case.blocks[-1])] + logits + _counted(joint(share))
    return 3 * case.batch * (total + logits + case.multi_token * extra)


def _counted(parts: dict) -> float:
    return sum(
        sum(one.flops for one in work.products) + sum(core.flops for core in work.cores)
        for name, work in parts.items()
        if name != "router"
    )


def _keys(attention: Record, share: Share) -> float:
    """Return the bytes of keys and values that a rank passes on, of kinds that have them."""
    if isinstance(attention, Gqa):
        return share.t * 2 * attention.kv_heads * attention.head_dim * BF16 / share.tp
    if isinstance(attention, Mla):
        width = attention.nope_dim + attention.rope_dim + attention.v_dim
        return share.t * attention.heads * width * BF16 / share.tp
    return 0.0


def _rows(ffn: Moe, share: Share) -> Rows:
    """Return what a rank sends to a layer's experts."""
    groups = ffn.router.groups
    hidden = getattr(ffn, "latent", None) or share.hidden
    return Rows(
        share.r,
        hidden * BF16,
        ffn.router.top_k,
        groups.keep if groups else None,
        groups.count if groups else 1,
    )
