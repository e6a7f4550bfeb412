"""Work of a micro-batch in one layer on one rank, independent of rates: products, bytes, launches;
and what decides its time besides: a rank's shape, the policy of the layer, the setting of kernels.

It follows from the layer's description (``moefold/spec/layer.py``). Bytes count each read and write
of a tensor by an element-wise kernel, in bfloat16.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import NamedTuple, Protocol

from moefold.config.base import Record
from moefold.layers.config import Context, Offload, OffloadToPages, Ring
from moefold.mesh.shares import largest_share
from moefold.planner.case import Case, Software, bytes_per_activation
from moefold.planner.curves import Constants, Product, Rates, constants
from moefold.planner.hardware import Cluster
from moefold.planner.memoize import memoize
from moefold.spec.decoder import has_routing
from moefold.spec.layer import (
    NOTHING,
    Attention,
    LayerSpec,
    Matmul,
    Modules,
    Operation,
    Rows,
    Scan,
    Shape,
    Weight,
    as_layer_spec,
)

BF16 = 2
FP32 = 4
NORM_PASSES = 8
NORM_PASSES_BACKWARD = 12
"""Reads and writes of a row by two norms and two residual sums."""
PERMUTING_DISPATCHERS = ("deep_ep", "hybrid_ep", "nccl_ep")
"""Dispatchers that permute rows themselves."""
QUANTISE_BYTES = {"fp8_tensor": 6.0, "fp8_block": 4.0, "mxfp8": 4.0, "nvfp4": 5.0}
"""Minimum bytes moved per value: read in bf16 (twice if the whole tensor's scale is computed
first), and written along rows and along columns."""
SCAN_LENGTH = 4096
SCAN_DIM = 64
"""Length of sequences and width of heads at whose attention rate a scan's products run."""


class Core(NamedTuple):
    """Products of attention without its projections: forward FLOPs, length, width of a head."""

    flops: float
    length: float
    dim: int


@dataclass(frozen=True)
class Work:
    """Forward work of one part of a layer; backward has twice its products, once if frozen."""

    products: tuple[Product, ...] = ()
    cores: tuple[Core, ...] = ()
    moved: float = 0.0
    moved_backward: float = 0.0
    launches: float = 0.0
    weights: float = 0.0
    """Elements of weights on this rank."""
    bf16_only: bool = False
    """Whether products are in bf16 with every recipe."""
    trained_share: float = 1.0
    """Share of ``weights`` that has a gradient."""
    scanned_bytes: float = 0.0
    """Minimum of bytes that a scan over the sequence moves; twice as many in backward."""

    @cached_property
    def quantised_elements(self) -> tuple[float, float]:
        """Elements that a narrow recipe quantises, forward and backward."""
        if self.bf16_only:
            return 0.0, 0.0
        inputs = sum(product.m * product.k * product.count for product in self.products)
        return inputs, sum(product.m * product.n * product.count for product in self.products)


class RankGrid(Protocol):
    """Sizes of the axes that divide a layer."""

    @property
    def tp(self) -> int:
        """Ranks of tensor parallelism."""
        ...

    @property
    def cp(self) -> int:
        """Ranks of context parallelism."""
        ...

    @property
    def ep(self) -> int:
        """Ranks of expert parallelism."""
        ...

    @property
    def etp(self) -> int:
        """Ranks of tensor parallelism within experts."""
        ...


def work_shape(
    hidden: int, seq: int, micro_batch: int, grid: RankGrid, load: float, dispatch: str
) -> Shape:
    """Return the shape that decides the time of layers: that of an even split of rows, as loads and
    room are counted where rows are exchanged.

    Args:
        hidden: width of the rows.
        seq: tokens of a sequence.
        micro_batch: sequences of a micro-batch.
        grid: the sizes that divide it.
        load: rows of the fullest expert rank over the mean.
        dispatch: the kind of dispatcher.
    """
    return Shape(
        hidden=hidden,
        rows=micro_batch * seq // (grid.tp * grid.cp),
        seq=seq,
        tp=grid.tp,
        cp=grid.cp,
        ep=grid.ep,
        etp=grid.etp,
        load=load,
        sorted_rows=dispatch in PERMUTING_DISPATCHERS,
    )


def for_sublayer(shape: Shape, record: Record) -> Shape:
    """Return a shape reduced to what the time of a sublayer depends on."""
    return shape if has_routing(record) else shape.without_experts


def rows_read(shape: Shape, kind: Rows, top_k: int) -> float:
    """Return the rows that an operation reads on one rank, of ``top_k`` experts per row."""
    if kind == "routed":
        return shape.rows * top_k * shape.etp * shape.load
    return shape.rows if kind == "own" else shape.piece


class LayerPolicy(NamedTuple):
    """Dispatch, recompute and offload of a layer."""

    dispatch: str
    recompute: Modules = NOTHING
    offload: Offload | None = None
    context: Context = Ring()
    clones: int = 0
    """Slots per rank for clones of experts."""
    rows_per_hop: tuple[int, ...] = ()
    """Rows that a rank sends in each exchange if room is stated, filled or not."""

    @classmethod
    def of(cls, case: Case) -> "LayerPolicy":
        """Return the policy of a case."""
        fixed = case.fixed_dispatch
        hops = fixed.rows_per_hop(case.sizes.ep) if fixed else ()
        exchanges = case.context, case.clones, hops
        return cls(case.dispatch, case.recompute, case.layout.offload, *exchanges)

    @property
    def pages(self) -> OffloadToPages | None:
        """Pages of experts' rows between forward and backward; a whole block recomputes these."""
        return None if self.offload is None or "block" in self.recompute else self.offload.pages


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
    """Rows of a chunk of logits; None is all rows."""
    stack: str

    @property
    def quantises(self) -> bool:
        """Whether products read codes."""
        return self.recipe in QUANTISE_BYTES

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
    given = given or constants()
    device = cluster.device
    stack = software.stack
    fused = software.cuda_graphs == "full" and stack != "moefold"
    key = device.name, stack, software.release[:5], dict(device.rates).get(recipe, ())
    return _setting(
        cluster, given.rates(*key, device), given.uncertainty(*key), recipe, narrowed,
        software.cuda_graphs, software.host_speed, given.values["common.fused"] if fused else 1.0,
        software.overlaps.tp, software.logits_chunk, stack,
    )  # fmt: skip


Parts = dict[str, Work]


@memoize(1 << 14)
def sublayer_work(record: Record, shape: Shape, frozen: frozenset[str] = frozenset()) -> Parts:
    """Return the parts of a sublayer, a cached object; ``frozen`` names weights in it."""
    spec = as_layer_spec(record)
    if spec.absent:
        return {}
    routing = spec.routing
    top_k = 0 if routing is None else routing.top_k
    weights, operations = _weights_and_operations(spec, shape.hidden)
    parts = {op.name: _operation_work(op, weights, shape, top_k, frozen) for op in operations}
    if routing is not None:
        # Kernels that sort rows by expert and back; fewer where the dispatcher sorts them.
        passes, launches = (4, 8) if shape.sorted_rows else (8, 20)
        moved = rows_read(shape, "routed", top_k) * (routing.width or shape.hidden) * BF16 * passes
        parts["permute"] = Work((), (), moved, moved, launches)
    return parts


@memoize(1 << 10)
def _weights_and_operations(
    spec: LayerSpec, hidden: int
) -> tuple[dict[str, Weight], tuple[Operation, ...]]:
    weights = {weight.name: weight for weight in spec.weights(hidden)}
    operations = tuple(spec.operations(hidden))
    names = [operation.name for operation in operations]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        kind = type(spec).__name__
        raise ValueError(f"{kind} describes two operations named {repeated}: names must differ")
    return weights, operations


def norm_work(shape: Shape, count: int) -> Parts:
    """Return the work of ``count`` norms of a block, each with a residual sum."""
    size = shape.rows * shape.hidden * BF16 * count / 2
    return {"norms": Work((), (), NORM_PASSES * size, NORM_PASSES_BACKWARD * size, 2 * count)}


def head_work(vocab: int, shape: Shape, chunk: int | None = None, frozen: bool = False) -> Parts:
    """Return the work of head and loss: logits in fp32, read and written by softmax and gradient.

    Args:
        vocab: columns of the logits.
        shape: the rank's part of a micro-batch.
        chunk: rows of a chunk of logits; None is all rows.
        frozen: whether the matrix has no gradient.
    """
    columns = largest_share(vocab, shape.tp)
    logits = shape.piece * columns
    rows = min(chunk or shape.piece, shape.piece)
    product = Product(rows, columns, shape.hidden, shape.piece / rows)
    weights = shape.hidden * columns
    moved = 3 * logits * FP32
    launches = 8 * ceil(shape.piece / rows)
    trained = 0.0 if frozen else 1.0
    return {"head": Work((product,), (), moved, moved, launches, weights, True, trained)}


def join_work(shape: Shape) -> Parts:
    """Return the work of the projection that joins a multi-token layer's two inputs."""
    product = Product(shape.rows, shape.hidden, 2 * shape.hidden)
    return {"attention": Work((product,), launches=4, weights=2 * shape.hidden**2)}


def _operation_work(
    operation: Operation,
    weights: Mapping[str, Weight],
    shape: Shape,
    top_k: int,
    frozen: frozenset[str],
) -> Work:
    """Return the work of one operation of a layer on a rank."""
    products = tuple(_product(matmul, weights, shape, top_k) for matmul in operation.matmuls)
    forward = backward = 0.0
    for traffic in operation.traffic:
        units = traffic.units
        part = 1.0 if units is None else units.fraction(shape.sizes[units.axis])
        size = rows_read(shape, traffic.rows, top_k) * traffic.features * part * BF16
        forward += traffic.forward * size
        backward += traffic.backward * size
    launches = operation.launches
    if launches is None:
        launches = sum(product.count for product in products)
    cores, scanned = _core_work(operation.core, shape)
    local = sum(product.n * product.k * product.count for product in products)
    read = [weights[name] for matmul in operation.matmuls for name in matmul.weights]
    trained = sum(weight.elements for weight in read if weight.name not in frozen)
    trained /= sum(weight.elements for weight in read) or 1
    return Work(
        products, cores, forward, backward, launches, local, operation.wide, trained, scanned
    )


def _product(matmul: Matmul, weights: Mapping[str, Weight], shape: Shape, top_k: int) -> Product:
    """Return the sizes of a product on a rank; experts have equal numbers of rows."""
    sizes = shape.tp, shape.ep, shape.etp
    matrices = [weights[name].local_matrix(*sizes) for name in matmul.weights]
    _, k, count = matrices[0]
    rows = rows_read(shape, matmul.rows, top_k)
    if matmul.rows == "routed":
        rows = max(1.0, rows / count)
    return Product(rows, sum(n for n, _, _ in matrices), k, count)


def _core_work(core: Attention | Scan | None, shape: Shape) -> tuple[tuple[Core, ...], float]:
    """Return the products of attention or a scan, and the bytes that a scan moves."""
    if isinstance(core, Attention):
        pairs = core.pairs(shape.seq)
        flops = 2 * shape.piece * pairs * core.query_width / shape.tp
        return (Core(flops, 2 * pairs, core.v_dim),), 0.0
    if core is None:
        return (), 0.0
    flops = 2 * shape.piece * core.products / shape.tp
    return (Core(flops, SCAN_LENGTH, SCAN_DIM),), shape.piece * core.moved / shape.tp * BF16


OFFLOADED_WORK = {
    "norms": ("attention",),
    "attention": ("attention", "mla_up", "core"),
    "mla_up": ("mla_up",),
    "ffn": ("ffn",),
    "shared": ("shared",),
    "experts": ("experts",),
    "moe": ("experts",),
    "moe_act": ("moe_act",),
    "block": ("attention", "mla_up", "ffn", "shared", "experts"),
}
"""Parts of the work whose inputs are offloaded, by module of an offload policy."""


def offload_bytes(sublayers: Iterable[Parts], modules: frozenset[str]) -> float:
    """Return a layer's offloaded bytes in bf16: inputs of products or of activation functions."""
    names = {name for module in modules for name in OFFLOADED_WORK[module]}
    works = [work for parts in sublayers for name, work in parts.items() if name in names]
    return sum(BF16 * w.quantised_elements[0] if w.products else w.moved / 2 for w in works)
