"""Seconds of a layer's exchanges: dispatch and combine, rows over tp, keys and heads over cp,
and weights of clones, by the rates of ``network``.
"""

from dataclasses import replace

from moefold.config.base import Record
from moefold.layers.config import Context
from moefold.model.config import Block
from moefold.planner.memoize import memoize
from moefold.planner.network import DispatchRows, exchange_seconds, ring_seconds, strided_reach
from moefold.planner.time_work import BF16, KernelSetting
from moefold.spec.decoder import sublayers
from moefold.spec.layer import (
    GATHER,
    STATISTIC,
    Attention,
    LayerSpec,
    RoutingSpec,
    Shape,
    as_layer_spec,
)

CODED_ROW_BYTES = 1 + 1 / 32
"""Bytes per element of rows sent as codes: 128 share an fp32 scale, or 32 a scale of one byte."""
EXCHANGE_SM_COST = 0.2
"""Slowdown of products, relative to the time of a concurrent exchange: DeepEP with 20 SMs (arXiv
2603.07685)."""


def block_exchange_seconds(
    block: Block,
    shape: Shape,
    setting: KernelSetting,
    dispatch: str,
    rows_per_hop: tuple[int, ...] = (),
) -> float:
    """Return the seconds of one dispatch and one combine of a block; 0 where its rows stay."""
    routing = as_layer_spec(block.ffn).routing
    if routing is None or shape.ep * shape.etp == 1:
        return 0.0
    rows = dispatched_rows(routing, shape, setting.width)
    inputs = shape, setting, dispatch, rows_per_hop
    combine = dispatch_seconds(rows, *inputs)
    if setting.quantises and "rows" in setting.narrowed:
        rows = replace(rows, bytes=rows.bytes * CODED_ROW_BYTES / BF16)
    return dispatch_seconds(rows, *inputs) + combine


def dispatch_seconds(
    rows: DispatchRows,
    shape: Shape,
    setting: KernelSetting,
    dispatch: str,
    rows_per_hop: tuple[int, ...] = (),
) -> float:
    """Return the seconds of one dispatch or combine, including the all-gather over etp.

    ``rows_per_hop`` are the rows of each exchange if room is stated; they are equal on all ranks.
    """
    cluster = setting.cluster
    rates = setting.rates
    copies = rows.rows * rows.top_k
    group = strided_reach(cluster, shape.ep, shape.etp)
    loads = [shape.load]
    if rows_per_hop:
        dispatch = "alltoall"
        loads = [sent / copies for sent in rows_per_hop]
    seconds = sum(exchange_seconds(rows, dispatch, group, cluster, rates, load) for load in loads)
    if shape.etp > 1:
        gathered = copies * rows.bytes * shape.etp * loads[-1]
        seconds += ring_seconds(
            gathered, strided_reach(cluster, shape.etp, 1), cluster, rates.nic_gather
        )
    return seconds


def tensor_seconds(
    block: Block, shape: Shape, setting: KernelSetting, recompute: frozenset[str]
) -> tuple[float, float]:
    """Return the seconds of gathering and scattering rows over tp, forward and backward.

    Each sublayer with products that tp cuts gathers their inputs, which are saved unless
    recomputed, and reduce-scatters their outputs; backward runs the transposes of both.
    """
    nic = setting.rates.nic_gather
    group = strided_reach(setting.cluster, shape.tp, 1), setting.cluster, nic
    scatter = ring_seconds(shape.piece * shape.hidden * setting.width, *group)
    if setting.stack != "moefold":
        # Other stacks save a rank's own rows, and gather once more for weight gradients.
        exposed = scatter * (0.5 if setting.overlap_tp else 1.0)
        exposed *= sum(spec.routing is None for _, spec in sublayers(block))
        return 2 * exposed, (3 + ("gather" in recompute)) * exposed
    forward = backward = 0.0
    for name, spec in sublayers(block):
        gathered, repeating = _gathered_row_bytes(spec, shape.hidden, shape.tp, setting.width)
        if not gathered:
            continue
        gather = ring_seconds(shape.rows * gathered, *group)
        forward = forward + gather + scatter
        backward = backward + gather + scatter
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


def clone_seconds(
    block: Block, shape: Shape, setting: KernelSetting, slots: int
) -> tuple[float, float]:
    """Return the seconds of exchanging clones' weights, forward, and with fp32 gradients, backward.

    A rank sends all its experts in pieces, and then as many as fill the slots of all ranks.
    """
    spec = as_layer_spec(block.ffn)
    if spec.routing is None or shape.ep == 1:
        return 0.0, 0.0
    weights = (weight for weight in spec.weights(shape.hidden) if weight.is_expert)
    local = sum(weight.local_elements(shape.tp, shape.ep, shape.etp) for weight in weights)
    sent = local * (1 + slots * shape.ep / spec.routing.experts)
    group = strided_reach(setting.cluster, shape.ep, shape.etp), setting.cluster, setting.rates
    weights_sent = DispatchRows(1.0, sent * setting.width, 1)
    # Gradients are wider.
    gradients_sent = DispatchRows(1.0, sent * (setting.width + STATISTIC), 1)
    forward = exchange_seconds(weights_sent, "alltoall", *group, 1.0)
    backward = exchange_seconds(gradients_sent, "alltoall", *group, 1.0)
    return forward, backward


def context_seconds(
    sent: tuple[float, float],
    attention: tuple[float, float],
    shape: Shape,
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
    cluster = setting.cluster
    rates = setting.rates
    keys = sent[0]
    if context.gathers:
        group = strided_reach(cluster, shape.cp, shape.tp)
        gather = ring_seconds(keys * shape.cp, group, cluster, rates.nic_context)
        return gather, gather
    heads = context.sharing_heads(shape.cp)
    # Queries, keys and values in one exchange, outputs in another.
    group = strided_reach(cluster, heads, shape.tp)
    rows = DispatchRows(1.0, sum(sent) / 2, 1)
    exchanged = 2 * exchange_seconds(
        rows, "alltoall", group, cluster, rates, 1.0, rates.nic_context
    )
    ranks = shape.cp // heads
    if ranks == 1:
        return exchanged, exchanged
    group = strided_reach(cluster, ranks, shape.tp * heads)
    # A ring sends to one neighbour.
    rate = cluster.link_rate(2) if group.domains == 1 else cluster.device.nic_bandwidth
    ring = keys * (ranks - 1) / (rate * rates.nic_context)
    forward = max(ring / ranks, ring - attention[0])
    backward = max(2 * ring / ranks, 2 * ring - attention[1])
    return exchanged + forward, exchanged + backward


def context_bytes(attention: Record, shape: Shape, width: int) -> tuple[float, float]:
    """Return the bytes of a rank's keys and values, and of its queries and outputs; 0 for layers
    without attention.
    """
    column = shape.piece * width / shape.tp
    for operation in as_layer_spec(attention).operations(shape.hidden):
        if isinstance(core := operation.core, Attention):
            return column * core.key_value_width, column * core.query_width
    return 0.0, 0.0


def dispatched_rows(routing: RoutingSpec, shape: Shape, width: int) -> DispatchRows:
    """Return the rows that a rank sends to a layer's experts, with ``width`` bytes per element."""
    size = (routing.width or shape.hidden) * width
    return DispatchRows(shape.rows, size, routing.top_k, routing.groups_kept, routing.groups)
