"""Seconds of one layer and one micro-batch on one rank, by part: the work of ``time_work`` at the
rates of ``curves``, and its exchanges by ``time_exchange``. Results are cached for all layouts:
sublayers by their own shapes, whole layers by all inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from moefold.config.base import Record
from moefold.layers.config import Offload, OffloadToPages
from moefold.model.config import Block
from moefold.planner.curves import (
    attention_seconds,
    memory_seconds,
    product_seconds,
)
from moefold.planner.hardware import FORMAT_OF
from moefold.planner.memoize import memoize
from moefold.planner.time_exchange import (
    block_exchange_seconds,
    clone_seconds,
    context_bytes,
    context_seconds,
    tensor_seconds,
)
from moefold.planner.time_work import (
    BF16,
    QUANTISE_BYTES,
    KernelSetting,
    LayerPolicy,
    Work,
    for_sublayer,
    head_work,
    join_work,
    norm_work,
    offload_bytes,
    sublayer_work,
)
from moefold.spec.decoder import norm_names, sublayers
from moefold.spec.forward_only import ForwardOnlyBlock
from moefold.spec.layer import LayerSpec, Shape

PARTS: tuple[str, ...] = (
    "attention", "experts", "dense", "head", "memory", "quantise", "launch", "recompute",
    "tp", "cp", "dispatch", "offload",
)  # fmt: skip
"""Parts of a layer's time. ``memory`` is element-wise kernels, ``launch`` the fixed device time per
kernel; ``tp``, ``cp``, ``dispatch`` and ``offload`` are exposed transfers."""
TIME_PART = {"attention": "attention", "mla_up": "attention", "core": "attention"} | {
    "experts": "experts", "ffn": "dense", "shared": "dense", "latent": "dense",
    "router": "dense", "head": "head",
}  # fmt: skip
"""Part of the time by part of the work."""
CAPTURED = frozenset(("norms", "attention", "mla_up", "core", "router", "shared", "latent", "ffn"))
"""Parts of the work in partial CUDA graphs: all but dispatch, experts and combine."""
CAPTURED_WORK: dict[str, frozenset[str]] = {
    "partial": CAPTURED, "experts": CAPTURED | {"experts", "moe_act"}
}  # fmt: skip
"""Parts of the work in graphs of parts of blocks; each has one launch."""
RECOMPUTED_WORK: Mapping[str, Mapping[str, float]] = {
    "attention": {"attention": 1, "mla_up": 1, "core": 1},
    "experts": {"experts": 2 / 3},
    "moe": {"router": 1, "permute": 1, "experts": 1, "moe_act": 1, "latent": 1},
}
"""Parts of the work that modules of a recompute policy repeat, with the share of each: for experts
only the first product, two of three matrices. Other modules repeat the part of their name, and
``block`` repeats all."""
NARROW_LAUNCHES = 1.5
"""Additional launches per product of a narrow recipe: quantising, and its scales."""


@dataclass
class WorkTime:
    """Seconds by part, forward and backward, the host's seconds, and the weights involved."""

    forward: dict[str, float] = field(default_factory=dict)
    backward: dict[str, float] = field(default_factory=dict)
    host_forward: float = 0.0
    host_backward: float = 0.0
    weights: float = 0.0
    """Elements of trained weights on the rank."""
    experts: float = 0.0
    """Elements of routed experts among them."""

    @property
    def device_seconds(self) -> float:
        """Seconds of all parts, without the host."""
        return sum(self.forward.values()) + sum(self.backward.values())

    def add_part(self, name: str, forward: float, backward: float) -> None:
        """Add seconds of one part."""
        self.forward[name] = self.forward.get(name, 0.0) + forward
        self.backward[name] = self.backward.get(name, 0.0) + backward

    def without_backward(self) -> "WorkTime":
        """Return the time of forward alone."""
        backward = dict.fromkeys(self.backward, 0.0)
        return replace(self, backward=backward, host_backward=0.0)

    def add(self, other: "WorkTime", count: float = 1.0) -> None:
        """Add another time, multiplied by ``count``."""
        self.forward = _sum_of(self.forward, other.forward, count)
        self.backward = _sum_of(self.backward, other.backward, count)
        self.host_forward += other.host_forward * count
        self.host_backward += other.host_backward * count
        self.weights += other.weights * count
        self.experts += other.experts * count


def _sum_of(total: dict[str, float], added: dict[str, float], count: float) -> dict[str, float]:
    """Return seconds by part with others, multiplied by ``count``, added."""
    if not total:  # as most sums are when they begin
        return {name: seconds * count for name, seconds in added.items()}
    for name, seconds in added.items():
        total[name] = total.get(name, 0.0) + seconds * count
    return total


@memoize(1 << 15)
def layer_time(block: Block, shape: Shape, setting: KernelSetting, policy: LayerPolicy) -> WorkTime:
    """Return the time of a block with its exchanges: a cached object that must not be modified."""
    inputs = block, shape, setting
    compute, parts = _block_time(*inputs)
    exchanges = block_exchange_seconds(*inputs, policy.dispatch, policy.rows_per_hop)
    # Copies of rows received from other ranks are never recomputed, as nothing else stores them.
    received = {"permute"} if shape.ep * shape.etp > 1 else set[str]()
    time = _add_recompute(compute, parts, policy.recompute - received)
    if shape.tp > 1:
        time.add_part("tp", *tensor_seconds(*inputs, policy.recompute))
    if shape.cp > 1 and "core" in parts:
        attention = time.forward["attention"], time.backward["attention"]
        sent = context_bytes(block.attention, shape, setting.width)
        forward, backward = context_seconds(sent, attention, shape, setting, policy.context)
        again = forward if policy.recompute & {"block", "attention"} else 0.0
        time.add_part("cp", forward, backward + again)
    saves = not isinstance(block, ForwardOnlyBlock)
    if policy.offload is not None and policy.offload.moves_layers and saves:
        _add_offload(time, *inputs, policy.offload, policy.pages)
    if policy.pages is not None and saves:
        # Rows are copied to pages in forward, and back in backward.
        rows = offload_bytes((sublayer_work(block.ffn, shape),), frozenset({"experts"}))
        moved = 2 * (setting.width / BF16) * rows
        copying = memory_seconds(moved, setting.rates, setting.cluster.device.memory_bandwidth)
        time.add_part("memory", copying, copying)
    if policy.clones:
        time.add_part("dispatch", *clone_seconds(*inputs, policy.clones))
    runs = 2 if policy.recompute & {"block", "moe"} else 1
    time.add_part("dispatch", exchanges, exchanges * runs)
    return time if saves else time.without_backward()


@memoize(1 << 15)
def _block_time(
    block: Block, shape: Shape, setting: KernelSetting
) -> tuple[WorkTime, Mapping[str, WorkTime]]:
    """Return a block's compute time without recompute, and its parts."""
    num_norms = sum(len(norm_names(block, name)) for name, _ in sublayers(block))
    parts: dict[str, WorkTime] = {}
    for name, record in sublayers(block):
        frozen = frozen_weights(block, name, record)
        times = _sublayer_parts(record, for_sublayer(shape, record), setting, frozen)
        for part, time in times.items():
            parts.setdefault(part, WorkTime()).add(time)
    parts |= _time_parts(norm_work(shape.without_experts, num_norms), setting)
    return _sum_parts(parts), parts


def frozen_weights(block: Block, sublayer: str, record: LayerSpec) -> frozenset[str]:
    """Return the names, within a sublayer of a block with that record, of its frozen weights."""
    path = f"{record.prefix or sublayer}."
    return frozenset(w.removeprefix(path) for w in block.frozen if w.startswith(path))


def sublayer_seconds(
    record: Record,
    shape: Shape,
    setting: KernelSetting,
    frozen: frozenset[str] = frozenset(),
    has_backward: bool = True,
) -> float:
    """Return device seconds of a sublayer: one forward and, if it has one, one backward; ``frozen``
    names weights in it.
    """
    parts = _sublayer_parts(record, for_sublayer(shape, record), setting, frozen).values()
    if not has_backward:
        return sum(sum(part.forward.values()) for part in parts)
    return sum(part.device_seconds for part in parts)


@memoize(1 << 12)
def head_or_join_time(
    vocab: int | None,
    shape: Shape,
    setting: KernelSetting,
    policy: LayerPolicy,
    frozen: bool = False,
) -> WorkTime:
    """Return the time of head and loss over a vocabulary or, without one, of the projection that
    joins a multi-token layer's inputs: a cached object. ``frozen``: the head is not trained.
    """
    head = vocab is not None
    work = head_work(vocab, shape, setting.loss_chunk, frozen) if head else join_work(shape)
    parts = _time_parts(work, setting)
    return _add_recompute(_sum_parts(parts), parts, policy.recompute)


def _sum_parts(parts: Mapping[str, WorkTime]) -> WorkTime:
    total = WorkTime()
    for part in parts.values():
        total.add(part)
    return total


def _add_recompute(
    time: WorkTime, parts: Mapping[str, WorkTime], recompute: frozenset[str]
) -> WorkTime:
    """Return a time that includes the parts of the work that backward recomputes."""
    shares = dict.fromkeys(parts, 1.0 if "block" in recompute else 0.0)
    for module in recompute:
        for name, share in RECOMPUTED_WORK.get(module, {module: 1}).items():
            shares[name] = max(shares.get(name, 0.0), share)
    repeated = [(part, shares[name]) for name, part in parts.items() if shares[name]]
    seconds = sum(share * sum(part.forward.values()) for part, share in repeated)
    host = time.host_backward + sum(share * part.host_forward for part, share in repeated)
    passes = dict(time.forward), {**time.backward, "recompute": seconds}
    return WorkTime(*passes, time.host_forward, host, time.weights, time.experts)


@memoize(1 << 15)
def _sublayer_parts(
    record: Record, shape: Shape, setting: KernelSetting, frozen: frozenset[str] = frozenset()
) -> dict[str, WorkTime]:
    return _time_parts(sublayer_work(record, shape, frozen), setting)


def _time_parts(parts: Mapping[str, Work], setting: KernelSetting) -> dict[str, WorkTime]:
    return {name: _part_time(name, work, setting) for name, work in parts.items()}


def _part_time(name: str, work: Work, setting: KernelSetting) -> WorkTime:
    """Return the time of a part of the work."""
    rates = setting.rates
    quantises = setting.quantises
    narrow = quantises and (not work.bf16_only or (name == "head" and "head" in setting.narrowed))
    trained = work.weights * work.trained_share
    time = WorkTime(weights=trained, experts=trained if name == "experts" else 0.0)
    time.add_part(TIME_PART.get(name, "memory"), *_matmul_seconds(work, setting, narrow))
    scanned = work.scanned_bytes * rates.scan
    fused = setting.fused_quantise if name in ("permute", "moe_act") else 1.0
    passes = rates.permute if name == "permute" else 1.0
    factor = fused * passes * (setting.width / BF16)
    forward = factor * (work.moved + scanned)
    # Gradients of weights are added to an fp32 buffer.
    backward = factor * (work.moved_backward + 2 * scanned) + 8.0 * trained
    time.add_part("memory", _move_seconds(forward, setting), _move_seconds(backward, setting))
    if narrow:
        # With delayed scaling no pass over the values for their maximum is needed.
        unread = BF16 if "delayed" in setting.narrowed else 0
        each = (QUANTISE_BYTES[setting.recipe] - unread) * rates.quantise * setting.fused_quantise
        quantising = (_move_seconds(each * count, setting) for count in work.quantised_elements)
        time.add_part("quantise", *quantising)
    kernels = work.launches
    if quantises and not work.bf16_only:
        kernels += NARROW_LAUNCHES * sum(product.count for product in work.products)
    if name == "experts":
        kernels *= setting.fused_quantise
    launch = kernels * rates.kernel_s * rates.device
    time.add_part("launch", launch, 2 * launch)
    if setting.graphs != "full":
        captured = name in CAPTURED_WORK.get(setting.graphs, ())
        launches = 1.0 if captured else kernels * rates.launches
        time.host_forward = launches * rates.launch_s / setting.host_speed
        time.host_backward = 2 * time.host_forward
    return time


def _matmul_seconds(work: Work, setting: KernelSetting, narrow: bool) -> tuple[float, float]:
    """Return the seconds of products and of attention, forward and backward."""
    rates = setting.rates
    device = setting.cluster.device
    wide_peak = device.peak("fp32" if setting.recipe == "fp32" else "bf16")
    peak = device.peak(FORMAT_OF[setting.recipe]) if narrow else wide_peak
    forward = sum(product_seconds(product, rates, peak, narrow) for product in work.products)
    backward = (1 + work.trained_share) * forward
    speedup = rates.narrow_attention if narrow and "attention" in setting.narrowed else 1.0
    for flops, length, dim in work.cores:
        forward += attention_seconds(flops, length, dim, rates, wide_peak, False) / speedup
        # Backward recomputes the scores: five products instead of two.
        backward += attention_seconds(2.5 * flops, length, dim, rates, wide_peak, True) / speedup
    return forward, backward


def _move_seconds(size: float, setting: KernelSetting) -> float:
    """Return the seconds in which element-wise kernels read and write ``size`` bytes."""
    seconds = memory_seconds(size, setting.rates, setting.cluster.device.memory_bandwidth)
    return seconds * setting.rates.device


DISK_BANDWIDTH = 2e9
"""Bytes/s in one direction between one rank and its machine's disks. Assumed: an eighth of four
drives of 4 GB/s."""


def _add_offload(
    time: WorkTime,
    block: Block,
    shape: Shape,
    setting: KernelSetting,
    offload: Offload,
    pages: OffloadToPages | None,
) -> None:
    """Add the cost of offloading to host and disk: memory traffic, and exposed transfers."""
    device = setting.cluster.device
    parts = sublayer_work(block.attention, shape), sublayer_work(block.ffn, shape)
    host, disk = (offload_bytes(parts, modules) * share for modules, share in offload.tiers)
    if pages is not None:
        host += offload_bytes(parts, frozenset({"experts"})) * pages.spill
    host, disk = (size * setting.width / BF16 for size in (host, disk))
    moved = host + disk
    if not moved:
        return
    # On a CPU host and device are one: a copy runs at memory bandwidth.
    rate = device.host_bandwidth or device.memory_bandwidth
    transfer = max(moved / rate, disk / DISK_BANDWIDTH)
    for seconds in (time.forward, time.backward):
        seconds["offload"] = max(0.0, transfer - 0.8 * sum(seconds.values()))
        seconds["memory"] += memory_seconds(moved, setting.rates, device.memory_bandwidth)
