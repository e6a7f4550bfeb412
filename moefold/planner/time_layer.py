"""Seconds of one layer and one micro-batch on one rank, by part: the work of ``time_work`` at the
rates of ``curves``, and the layer's collectives by ``network``. Results are cached for all layouts:
sublayers by their own shapes, whole layers by all inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from moefold.config.base import Record
from moefold.layers.config import Context
from moefold.model.config import Block
from moefold.planner.case import Software, bytes_per_activation
from moefold.planner.curves import (
    Constants,
    Rates,
    attention_seconds,
    constants,
    memory_seconds,
    product_seconds,
)
from moefold.planner.hardware import FORMAT_OF, Cluster
from moefold.planner.memoize import memoize
from moefold.planner.network import DispatchRows, exchange_seconds, ring_seconds, strided_reach
from moefold.planner.time_work import (
    BF16,
    LayerPolicy,
    RankShare,
    Work,
    head_work,
    join_work,
    norm_work,
    offload_bytes,
    sublayer_work,
)
from moefold.spec.decoder import norm_names, sublayers
from moefold.spec.layer import (
    GATHER,
    STATISTIC,
    Attention,
    LayerSpec,
    RoutingSpec,
    Shape,
    as_layer_spec,
)

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
QUANTISE_BYTES = {"fp8_tensor": 6.0, "fp8_block": 4.0, "mxfp8": 4.0, "nvfp4": 5.0}
"""Minimum bytes moved per value: read in bf16 (twice if the whole tensor's scale is computed
first), and written along rows and along columns."""
CODED_ROW_BYTES = 1 + 1 / 32
"""Bytes per element of rows sent as codes: 128 share an fp32 scale, or 32 a scale of one byte."""
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
EXCHANGE_SM_COST = 0.2
"""Slowdown of products, relative to the time of a concurrent exchange: DeepEP with 20 SMs (arXiv
2603.07685)."""


@dataclass(frozen=True, eq=False)
class KernelSetting:
    """Inputs other than shapes that decide the time of kernels; equal settings are one object."""

    cluster: Cluster
    rates: Rates
    uncertainty: float
    """Relative spread of predictions with these rates."""
    recipe: str
    narrowed: frozenset[str]
    graphs: str
    host_speed: float
    fused_quantise: float
    """Factor on quantising and launches where experts are one fused operation."""
    overlap_tp: bool
    loss_chunk: int | None
    """Rows of a chunk of logits; None is all rows, as in stacks other than Moefold."""
    stack: str

    @property
    def width(self) -> int:
        """Bytes per element of activations."""
        return bytes_per_activation(self.recipe)


_setting = memoize(1024)(KernelSetting)


def build_setting(
    cluster: Cluster,
    software: Software,
    recipe: str,
    narrowed: frozenset[str],
    given: Constants | None = None,
) -> KernelSetting:
    """Return the setting of a cluster, software and number format; equal settings are one object.

    Args:
        given: constants of devices and software; default is those of the package.
    """
    given, device, stack = given or constants(), cluster.device, software.stack
    fused = software.cuda_graphs == "full" and stack != "moefold"
    key = device.name, stack, software.release[:5], dict(device.rates).get(recipe, ())
    return _setting(
        cluster, given.rates(*key), given.uncertainty(*key), recipe, narrowed,
        software.cuda_graphs, software.host_speed, given.values["common.fused"] if fused else 1.0,
        software.overlaps.tp, software.loss_chunk if stack == "moefold" else None, stack,
    )  # fmt: skip


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

    def add(self, other: "WorkTime", count: float = 1.0) -> None:
        """Add another time, multiplied by ``count``."""
        for total, added in ((self.forward, other.forward), (self.backward, other.backward)):
            for name, seconds in added.items():
                total[name] = total.get(name, 0.0) + seconds * count
        self.host_forward += other.host_forward * count
        self.host_backward += other.host_backward * count
        self.weights += other.weights * count
        self.experts += other.experts * count


@memoize(1 << 15)
def layer_time(
    block: Block, share: RankShare, setting: KernelSetting, policy: LayerPolicy
) -> WorkTime:
    """Return the time of a block with its exchanges: a cached object that must not be modified."""
    inputs = block, share, setting
    compute, parts, exchanges = _block_time(*inputs, policy.dispatch, policy.rows_per_hop)
    # Copies of rows received from other ranks are never recomputed, as nothing else stores them.
    received = {"permute"} if share.ep * share.etp > 1 else set[str]()
    time = _add_recompute(compute, parts, policy.recompute - received)
    if share.tp > 1:
        time.add_part("tp", *tensor_seconds(*inputs, policy.recompute))
    if share.cp > 1 and "core" in parts:
        attention = time.forward["attention"], time.backward["attention"]
        sent = _context_bytes(block.attention, share, setting.width)
        forward, backward = context_seconds(sent, attention, share, setting, policy.context)
        again = forward if policy.recompute & {"block", "attention"} else 0.0
        time.add_part("cp", forward, backward + again)
    if policy.offload or policy.disk or policy.spill:
        _add_offload(time, *inputs, policy)
    if policy.pages:
        # Rows are copied to pages in forward, and back in backward.
        rows = offload_bytes((sublayer_work(block.ffn, share),), frozenset({"experts"}))
        moved = 2 * (setting.width / BF16) * rows
        copying = memory_seconds(moved, setting.rates, setting.cluster.device.memory_bandwidth)
        time.add_part("memory", copying, copying)
    if policy.clones:
        time.add_part("dispatch", *_clone_seconds(*inputs, policy.clones))
    runs = 2 if policy.recompute & {"block", "moe"} else 1
    time.add_part("dispatch", exchanges, exchanges * runs)
    return time


@memoize(1 << 15)
def _block_time(
    block: Block, share: RankShare, setting: KernelSetting, dispatch: str, hops: tuple[int, ...]
) -> tuple[WorkTime, Mapping[str, WorkTime], float]:
    """Return a block's compute time without recompute, its parts, and the seconds of exchanges."""
    num_norms = sum(len(norm_names(block, name)) for name, _ in sublayers(block))
    parts: dict[str, WorkTime] = {}
    for name, record in sublayers(block):
        path = f"{record.prefix or name}."
        frozen = frozenset(w.removeprefix(path) for w in block.frozen if w.startswith(path))
        times = _sublayer_parts(record, share.for_sublayer(record), setting, frozen)
        for part, time in times.items():
            parts.setdefault(part, WorkTime()).add(time)
    parts |= _time_parts(norm_work(share.dense, num_norms), setting)
    exchanges, routing = 0.0, as_layer_spec(block.ffn).routing
    if routing is not None and share.ep * share.etp > 1:
        rows = dispatched_rows(routing, share, setting.width)
        inputs = share, setting, dispatch, hops
        combine = dispatch_seconds(rows, *inputs)
        if setting.recipe in QUANTISE_BYTES and "rows" in setting.narrowed:
            rows = replace(rows, bytes=rows.bytes * CODED_ROW_BYTES / BF16)
        exchanges = dispatch_seconds(rows, *inputs) + combine
    return _sum_parts(parts), parts, exchanges


def sublayer_seconds(record: Record, share: RankShare, setting: KernelSetting) -> float:
    """Return device seconds of a sublayer: one forward and one backward."""
    parts = _sublayer_parts(record, share.for_sublayer(record), setting)
    return sum(part.device_seconds for part in parts.values())


@memoize(1 << 12)
def head_or_join_time(
    vocab: int | None,
    share: RankShare,
    setting: KernelSetting,
    policy: LayerPolicy,
    frozen: bool = False,
) -> WorkTime:
    """Return the time of head and loss over a vocabulary or, without one, of the projection that
    joins a multi-token layer's inputs: a cached object. ``frozen``: the head is not trained.
    """
    head = vocab is not None
    work = head_work(vocab, share, setting.loss_chunk, frozen) if head else join_work(share)
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
    record: Record, share: RankShare, setting: KernelSetting, frozen: frozenset[str] = frozenset()
) -> dict[str, WorkTime]:
    return _time_parts(sublayer_work(record, share, frozen), setting)


def _time_parts(parts: Mapping[str, Work], setting: KernelSetting) -> dict[str, WorkTime]:
    return {name: _part_time(name, work, setting) for name, work in parts.items()}


def _part_time(name: str, work: Work, setting: KernelSetting) -> WorkTime:
    """Return the time of a part of the work."""
    rates, quantises = setting.rates, setting.recipe in QUANTISE_BYTES
    narrow = quantises and (not work.bf16_only or (name == "head" and "head" in setting.narrowed))
    trained = work.weights * work.trained_share
    time = WorkTime(weights=trained, experts=trained if name == "experts" else 0.0)
    time.add_part(TIME_PART.get(name, "memory"), *_matmul_seconds(work, setting, narrow))
    scanned = work.scanned_bytes * rates.scan
    fused = setting.fused_quantise if name in ("permute", "moe_act") else 1.0
    factor = fused * (setting.width / BF16)
    forward = factor * (work.moved + scanned)
    # Gradients of weights are added to an fp32 buffer.
    backward = factor * (work.moved_backward + 2 * scanned) + 8.0 * trained
    time.add_part("memory", _move_seconds(forward, setting), _move_seconds(backward, setting))
    if narrow:
        # With delayed scaling no pass over the values for their maximum is needed.
        unread = BF16 if "delayed" in setting.narrowed else 0
        each = (QUANTISE_BYTES[setting.recipe] - unread) * rates.quantise * setting.fused_quantise
        passes = (_move_seconds(each * count, setting) for count in work.quantised_elements)
        time.add_part("quantise", *passes)
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
    rates, device = setting.rates, setting.cluster.device
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


def dispatch_seconds(
    rows: DispatchRows,
    share: RankShare,
    setting: KernelSetting,
    dispatch: str,
    rows_per_hop: tuple[int, ...] = (),
) -> float:
    """Return the seconds of one dispatch or combine, including the all-gather over etp.

    ``rows_per_hop`` are the rows of each exchange if room is stated; they are equal on all ranks.
    """
    cluster, rates, copies = setting.cluster, setting.rates, rows.rows * rows.top_k
    group, loads = strided_reach(cluster, share.ep, share.etp), [share.load]
    if rows_per_hop:
        dispatch, loads = "alltoall", [sent / copies for sent in rows_per_hop]
    seconds = sum(exchange_seconds(rows, dispatch, group, cluster, rates, load) for load in loads)
    if share.etp > 1:
        gathered = copies * rows.bytes * share.etp * loads[-1]
        seconds += ring_seconds(gathered, strided_reach(cluster, share.etp, 1), cluster, rates)
    return seconds


def tensor_seconds(
    block: Block, share: RankShare, setting: KernelSetting, recompute: frozenset[str]
) -> tuple[float, float]:
    """Return the seconds of gathering and scattering rows over tp, forward and backward.

    Each sublayer with products that tp cuts gathers their inputs, which are saved unless
    recomputed, and reduce-scatters their outputs; backward runs the transposes of both.
    """
    group = strided_reach(setting.cluster, share.tp, 1), setting.cluster, setting.rates
    scatter = ring_seconds(share.tokens * share.hidden * setting.width, *group)
    if setting.stack != "moefold":
        # Other stacks save a rank's own rows, and gather once more for weight gradients.
        exposed = scatter * (0.5 if setting.overlap_tp else 1.0)
        exposed *= sum(spec.routing is None for _, spec in sublayers(block))
        return 2 * exposed, (3 + ("gather" in recompute)) * exposed
    forward = backward = 0.0
    for name, spec in sublayers(block):
        gathered, repeating = _gathered_row_bytes(spec, share.hidden, share.tp, setting.width)
        if not gathered:
            continue
        gather = ring_seconds(share.border_rows * gathered, *group)
        forward, backward = forward + gather + scatter, backward + gather + scatter
        if recompute & repeating:
            backward += gather
        # Recompute skips the reduce-scatter at the end of a block: backward does not read its sum.
        if "block" in recompute and (name != "ffn" or spec.routing is not None):
            backward += scatter
    return forward, backward


@memoize(1 << 12)
def _gathered_row_bytes(
    spec: LayerSpec, hidden: int, tp: int, width: int
) -> tuple[float, frozenset[str]]:
    """Return the bytes that tensor ranks gather for each row of a rank, and which recompute modules
    gather them again.
    """
    saved = spec.saved(Shape(hidden, 1, tp, width=width))
    gathered = [tensor for tensor in saved if tensor.freed_by >= GATHER]
    modules = frozenset(("block",)).union(*(tensor.freed_by for tensor in gathered))
    return sum(tensor.bytes for tensor in gathered), modules


def _clone_seconds(
    block: Block, share: RankShare, setting: KernelSetting, slots: int
) -> tuple[float, float]:
    """Return the seconds of exchanging clones' weights, forward, and with fp32 gradients, backward.

    A rank sends all its experts in pieces, and then as many as fill the slots of all ranks.
    """
    spec = as_layer_spec(block.ffn)
    if spec.routing is None or share.ep == 1:
        return 0.0, 0.0
    weights = (weight for weight in spec.weights(share.hidden) if weight.is_expert)
    local = sum(weight.local_elements(share.tp, share.ep, share.etp) for weight in weights)
    sent = local * (1 + slots * share.ep / spec.routing.experts)
    group = strided_reach(setting.cluster, share.ep, share.etp), setting.cluster, setting.rates
    forward, backward = (
        exchange_seconds(DispatchRows(1.0, sent * width, 1), "alltoall", *group, 1.0)
        for width in (setting.width, setting.width + STATISTIC)
    )
    return forward, backward


DISK_BANDWIDTH = 2e9
"""Bytes/s in one direction between one rank and its machine's disks. Assumed: an eighth of four
drives of 4 GB/s."""


def _add_offload(
    time: WorkTime, block: Block, share: RankShare, setting: KernelSetting, policy: LayerPolicy
) -> None:
    """Add the cost of offloading to host and disk: memory traffic, and exposed transfers."""
    device = setting.cluster.device
    parts = sublayer_work(block.attention, share), sublayer_work(block.ffn, share)
    host = offload_bytes(parts, policy.offload) * policy.offload_share
    host += offload_bytes(parts, frozenset({"experts"})) * policy.spill
    disk = offload_bytes(parts, policy.disk) * policy.disk_share
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


def context_seconds(
    sent: tuple[float, float],
    attention: tuple[float, float],
    share: RankShare,
    setting: KernelSetting,
    context: Context,
) -> tuple[float, float]:
    """Return the exposed seconds of exchanges between context ranks, forward and backward.

    Attention hides the rounds of a ring. All-gathers of rows and exchanges of heads are exposed, as
    are those of their gradients.

    Args:
        sent: bytes of a rank's keys and values, and of its queries and outputs.
        attention: seconds of attention itself, forward and backward.
    """
    cluster, rates, keys = setting.cluster, setting.rates, sent[0]
    if context.gathers:
        group = strided_reach(cluster, share.cp, share.tp)
        gather = ring_seconds(keys * share.cp, group, cluster, rates)
        return gather, gather
    heads = context.sharing_heads(share.cp)
    # Queries, keys and values in one exchange, outputs in another.
    group, rows = strided_reach(cluster, heads, share.tp), DispatchRows(1.0, sum(sent) / 2, 1)
    exchanged = 2 * exchange_seconds(rows, "alltoall", group, cluster, rates, 1.0)
    ranks = share.cp // heads
    if ranks == 1:
        return exchanged, exchanged
    group, device = strided_reach(cluster, ranks, share.tp * heads), cluster.device
    rate = device.link_bandwidth if group.domains == 1 else device.nic_bandwidth
    ring = keys * (ranks - 1) / (rate * rates.nic)
    forward = max(ring / ranks, ring - attention[0])
    return exchanged + forward, exchanged + max(2 * ring / ranks, 2 * ring - attention[1])


def _context_bytes(attention: Record, share: RankShare, width: int) -> tuple[float, float]:
    """Return the bytes of a rank's keys and values, and of its queries and outputs; 0 for layers
    without attention.
    """
    column = share.tokens * width / share.tp
    for operation in as_layer_spec(attention).operations(share.hidden):
        if isinstance(core := operation.core, Attention):
            return column * core.key_value_width, column * core.query_width
    return 0.0, 0.0


def dispatched_rows(routing: RoutingSpec, share: RankShare, width: int) -> DispatchRows:
    """Return the rows that a rank sends to a layer's experts, with ``width`` bytes per element."""
    size = (routing.width or share.hidden) * width
    return DispatchRows(share.border_rows, size, routing.top_k, routing.groups_kept, routing.groups)
