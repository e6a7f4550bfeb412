"""Seconds of one layer and one micro-batch on one rank, by part: the work of ``time_work`` at the
rates of ``curves``, and the layer's collectives on ``network``."""

from dataclasses import dataclass, field
from typing import cast

from moefold.planner.curves import (
    Rates,
    attention_seconds,
    memory_seconds,
    product_seconds,
)
from moefold.planner.hardware import FORMAT_OF, Cluster, Format
from moefold.planner.network import Rows, exchange_seconds, reach, ring_seconds
from moefold.planner.time_work import BF16, Parts, Share, Work

PARTS: tuple[str, ...] = (
    "attention", "experts", "dense", "head", "memory", "quantise", "launch", "recompute",
    "tp", "cp", "dispatch", "offload",
)  # fmt: skip
"""What a rank does in a layer. ``memory`` is element-wise kernels, ``launch`` the device's own time
per kernel; ``tp``, ``cp`` and ``dispatch`` and ``offload``
are what of their transfers nothing hides."""
PLACE = {"attention": "attention", "mla_up": "attention", "core": "attention"} | {
    "experts": "experts", "ffn": "dense", "shared": "dense", "latent": "dense",
    "router": "dense", "head": "head",
}  # fmt: skip
"""The part that a part of the work counts as."""
CAPTURED = frozenset(("norms", "attention", "mla_up", "core", "router", "shared", "latent", "ffn"))
"""What partial CUDA graphs hold: all but dispatch, experts and combine."""
QUANTISE_BYTES = {"fp8_tensor": 6.0, "fp8_block": 4.0, "mxfp8": 4.0, "nvfp4": 5.0}
"""Least bytes per value: read in bf16 (twice where a scale of the whole tensor comes first), and
written along rows and along columns."""
RECOMPUTED = {
    "norms": ("norms",),
    "attention": ("attention", "mla_up", "core"),
    "mla_up": ("mla_up",),
    "ffn": ("ffn",),
    "shared": ("shared",),
    "experts": ("experts", "moe_act"),
    "moe": ("router", "permute", "experts", "moe_act", "latent"),
    "moe_act": ("moe_act",),
}
"""The parts of the work that each module of a recompute policy repeats; ``block`` is all."""
NARROW_LAUNCHES = 1.5
"""Further launches per product of a narrow recipe: quantising, and its scales."""
SM_COST = 0.2
"""Of products' rate while an exchange runs beside them: DeepEP with 20 SMs (arXiv 2603.07685)."""


@dataclass(frozen=True)
class Setting:
    """What beside its shape decides a layer's time."""

    cluster: Cluster
    rates: Rates
    recipe: str
    dispatch: str
    graphs: str
    recompute: frozenset[str]
    overlap_tp: bool
    host_speed: float
    narrowed: frozenset[str] = frozenset()
    fused_quantise: float = 1.0
    """What is left of quantising and launches where experts are one fused operation."""

    @property
    def format(self) -> Format:
        """The format whose peak the recipe's products have."""
        return cast(Format, FORMAT_OF[self.recipe])


@dataclass
class Time:
    """Seconds by part, forward and backward, and what runs beside them."""

    forward: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    backward: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    host_forward: float = 0.0
    host_backward: float = 0.0
    weights: float = 0.0
    """Elements of weights on the rank."""
    experts: float = 0.0
    """Of those, the routed experts'."""

    def add(self, other: "Time", times: float = 1.0) -> None:
        """Add another's seconds, ``times`` over."""
        for mine, theirs in ((self.forward, other.forward), (self.backward, other.backward)):
            for name, seconds in theirs.items():
                mine[name] += seconds * times
        self.host_forward += other.host_forward * times
        self.host_backward += other.host_backward * times
        self.weights += other.weights * times
        self.experts += other.experts * times


def layer_time(parts: Parts, share: Share, setting: Setting) -> Time:
    """Return the time of a layer's computing, without its collectives."""
    made = Time()
    again = _again(setting.recompute, parts)
    for name, work in parts.items():
        narrow = setting.recipe in QUANTISE_BYTES and (
            not work.wide or (name == "head" and "head" in setting.narrowed)
        )
        seconds = _work(work, PLACE.get(name, "memory"), setting, narrow)
        if name in ("permute", "moe_act") and setting.fused_quantise < 1:
            ahead, back = seconds["memory"]
            seconds["memory"] = ahead * setting.fused_quantise, back * setting.fused_quantise
        launches = _launches(name, work, setting)
        kernels = _kernels(name, work, setting) * setting.rates.kernel_s * setting.rates.device
        for part, (forward, backward) in seconds.items():
            made.forward[part] += forward
            made.backward[part] += backward
            if name in again:
                made.backward["recompute"] += forward
        made.forward["launch"] += kernels
        made.backward["launch"] += kernels * 2
        made.host_forward += launches
        made.host_backward += launches * (3 if name in again else 2)
        if name in again:
            made.backward["recompute"] += kernels
        made.weights += work.weights
        if name == "experts":
            made.experts += work.weights
    # Gradients of weights are added to an fp32 buffer.
    made.backward["memory"] += _moved(8.0 * made.weights, setting)
    return made


def _again(recompute: frozenset[str], parts: Parts) -> frozenset[str]:
    """Return the parts of the work that backward computes again."""
    if "block" in recompute:
        return frozenset(parts)
    return frozenset(name for module in recompute for name in RECOMPUTED.get(module, ()))


def _work(work: Work, place: str, setting: Setting, narrow: bool) -> dict[str, tuple[float, float]]:
    """Return a part's seconds, forward and backward, by what they count as."""
    rates, device = setting.rates, setting.cluster.device
    wide_peak = device.peak("fp32" if setting.recipe == "fp32" else "bf16")
    peak = device.peak(setting.format) if narrow else wide_peak
    products = sum(product_seconds(one, rates, peak, narrow) for one in work.products)
    forward, backward = products, 2 * products
    faster = rates.narrow_attention if narrow and "attention" in setting.narrowed else 1.0
    for flops, length, dim in work.cores:
        forward += attention_seconds(flops, length, dim, rates, wide_peak, False) / faster
        # Backward makes the scores again: five products for two.
        backward += attention_seconds(2.5 * flops, length, dim, rates, wide_peak, True) / faster
    found = {place: (forward, backward)}
    scanned = work.scanned * rates.scan
    if work.moved or scanned:
        ahead, back = found.get("memory", (0.0, 0.0))
        wider = 2 if setting.recipe == "fp32" else 1
        moved = (
            _moved(wider * (work.moved + scanned), setting),
            _moved(wider * (work.moved_backward + 2 * scanned), setting),
        )
        found["memory"] = (ahead + moved[0], back + moved[1])
    if narrow:
        each = QUANTISE_BYTES[setting.recipe] * rates.quantise * setting.fused_quantise
        inward, outward = work.quantised
        found["quantise"] = (_moved(each * inward, setting), _moved(each * outward, setting))
    return found


def _moved(count: float, setting: Setting) -> float:
    seconds = memory_seconds(count, setting.rates, setting.cluster.device.memory_bandwidth)
    return seconds * setting.rates.device


def _kernels(name: str, work: Work, setting: Setting) -> float:
    """Return the kernels of a part's forward."""
    count = work.launches
    if setting.recipe in QUANTISE_BYTES and not work.wide:
        groups = sum(one.count for one in work.products)
        count += NARROW_LAUNCHES * groups
    return count * (setting.fused_quantise if name == "experts" else 1.0)


def _launches(name: str, work: Work, setting: Setting) -> float:
    """Return the host's seconds to launch a part's forward."""
    if setting.graphs == "full":
        return 0.0
    count = (
        1.0
        if setting.graphs == "partial" and name in CAPTURED
        else (_kernels(name, work, setting) * setting.rates.launches)
    )
    return count * setting.rates.launch_s / setting.host_speed


def dispatch_seconds(rows: Rows, share: Share, setting: Setting) -> float:
    """Return the seconds of one dispatch, or one combine, with what etp gathers."""
    cluster, rates = setting.cluster, setting.rates
    group = reach(cluster, share.ep, share.etp)
    seconds = exchange_seconds(rows, setting.dispatch, group, cluster, rates, share.load)
    if share.etp > 1:
        gathered = rows.rows * rows.top_k * rows.bytes * share.etp * share.load
        seconds += ring_seconds(gathered, reach(cluster, share.etp, 1), cluster, rates)
    return seconds


def tensor_seconds(share: Share, setting: Setting, halves: int) -> tuple[float, float]:
    """Return the seconds that gathering and scattering rows over tp takes, forward and backward.

    Each half of a layer gathers before and scatters after; backward does both again, and gathers
    once more for the gradients of weights.
    """
    if share.tp == 1:
        return 0.0, 0.0
    moved = share.t * share.hidden * BF16
    group = reach(setting.cluster, share.tp, 1)
    once = ring_seconds(moved, group, setting.cluster, setting.rates)
    shown = 0.5 if setting.overlap_tp else 1.0
    return 2 * halves * once * shown, 3 * halves * once * shown


def context_seconds(
    moved: float, core: tuple[float, float], share: Share, setting: Setting
) -> tuple[float, float]:
    """Return what of the ring of keys and values attention's own time does not hide.

    Args:
        moved: bytes of a rank's keys and values.
        core: seconds of attention itself, forward and backward.
    """
    if share.cp == 1:
        return 0.0, 0.0
    group = reach(setting.cluster, share.cp, share.tp)
    device = setting.cluster.device
    rate = device.link_bandwidth if group.outside == 1 else device.nic_bandwidth
    once = moved * (share.cp - 1) / (rate * setting.rates.nic)
    return max(once / share.cp, once - core[0]), max(2 * once / share.cp, 2 * once - core[1])
