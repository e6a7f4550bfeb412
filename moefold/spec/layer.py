"""Descriptions of layers without torch: weights, operations, and tensors saved for backward.

Each kind of layer is a record (:class:`LayerSpec`) that states these three. Everything that does
not run the layer is derived from them: legal layouts, cuts of parameters, counts and FLOPs, planned
memory and time, and the small models of ``verify``.

T rows of a rank between sublayers, P rows of its tensor group, R rows after dispatch, D hidden.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from math import gcd, lcm, prod
from typing import ClassVar, Literal, NamedTuple, Self, cast

from moefold.config.base import Record
from moefold.config.errors import Violation
from moefold.layers.config import Recompute
from moefold.mesh.config import Sizes
from moefold.mesh.shares import largest_share

Axis = Literal["tp", "cp", "ep", "etp"]
Rows = Literal["own", "group", "routed"]
"""Rows that an operation reads: T of the rank, P of its tensor group, or R after dispatch."""
Module = Literal[
    "block",
    "norms",
    "attention",
    "mla_up",
    "ffn",
    "shared",
    "experts",
    "permute",
    "gather",
    "moe",
    "moe_act",
]
"""Kinds of module that can be recomputed or offloaded. ``block`` is a whole block, ``moe`` router
to combine, ``moe_act`` the experts' activation; the others are those of ``layers.config.Kind``."""
Modules = frozenset[Module]
Sublayer = Literal["attention", "ffn"]
Start = Literal["normal", "output", "zeros", "ones", "norm"] | float | Callable[[float], float]
"""Initial values of a parameter: ``normal``, with std ``init_std``; ``output``, with ``init_std *
init_out_scale``, for weights that write to the residual (GPT-2); ``norm``, so that the decoder's
norms multiply by 1; a float, normal with that std; or a function of the place, 0 to 1, in dim 0."""
NOTHING: Modules = frozenset()
NORMS: Modules = frozenset(("norms",))
CORE: Modules = frozenset(("attention",))
UP: Modules = frozenset(("mla_up",))
COPIES: Modules = frozenset(("permute",))
GATHER: Modules = frozenset(("gather",))

STATISTIC = 4
"""Bytes of a statistic, router score or routing weight: fp32 for any compute dtype."""
INDEX = 8
"""Bytes of an int64 expert id or index of a row or token."""
SMALL_WIDTH = 16
SMALL_HEAD = 4
"""Width of a feed-forward and dims of a head in the small models of ``verify``."""


def recomputed_modules(record: Record | None) -> Modules:
    """Return the kinds of module that a recompute record recomputes.

    Raises:
        ValueError: the record of a plug-in does not state them.
    """
    if record is None:
        return NOTHING
    if not isinstance(record, Recompute):
        raise ValueError(f"layout.recompute: {type(record).__name__} cannot be planned")
    return cast("Modules", record.recomputed)


class Units(NamedTuple):
    """Units that the ranks of an axis divide among them: heads, columns of a width, experts."""

    axis: Axis
    number: int
    name: str
    """Name of the units in the rule that the axis divides their number."""
    heads: bool = False
    """Whether context ranks may divide them further."""
    said: str = ""
    """Text of the rule in place of the default one."""
    uneven: bool = False
    """Whether the axis need not divide the number: a rank may have one unit more than another, as
    :func:`moefold.mesh.shares.share` says. Each unit is then one index of the dim."""

    @property
    def rule(self) -> str:
        """The rule that a layout must keep, such as ``tp must divide the expert width (7)``."""
        if self.said:
            return self.said
        relation = "be at most" if self.uneven else "divide"
        return f"{self.axis} must {relation} {self.name} ({self.number})"

    def allows(self, ranks: int) -> bool:
        """Return whether ``ranks`` ranks can divide the units among them."""
        return ranks <= self.number if self.uneven else self.number % ranks == 0

    def fraction(self, ranks: int) -> float:
        """Return the fraction of the units that the fullest rank computes, at least one unit."""
        if self.uneven:
            return largest_share(self.number, ranks) / self.number
        return max(self.number, ranks) / (self.number * ranks)

    def part_of(self, size: float, ranks: int) -> float:
        """Return how much of a dim of ``size``, which the units fill, the fullest rank has."""
        if self.uneven:
            return float(largest_share(self.number, ranks))  # exact, where a fraction is rounded
        return size * self.fraction(ranks)


@dataclass(frozen=True)
class Weight:
    """Description of one parameter of a layer, by its name in the layer."""

    name: str
    shape: tuple[int, ...]
    cuts: tuple[tuple[int, Units], ...] = ()
    """Dims that an axis cuts, each with the units of which a rank gets whole ones."""
    category: str = "attention"
    """Category in parameter counts: attention, norms, ffn, experts, router or shared."""
    product: bool = True
    """Whether products read it in the compute dtype; otherwise layers read the master."""
    looked_up: bool = False
    """Whether rows are also looked up in it, in the master's dtype."""
    latent: bool = False
    """Whether it is the norm of a latent, which FLOP counts treat as one product."""
    frozen: bool = False
    """Whether it is not trained: it then exists only in the format that it is read in."""
    stacked: bool = False
    """Whether it stacks matrices of several outputs that one product reads: such a weight has no
    adapter and is not quantised."""
    summed: bool = False
    """Whether its gradient is a sum over rows, which is computed at once and never deferred,
    though it is no vector."""
    start: Start | None = None
    """Initial values; None is ``zeros`` for a vector, ``output`` if ``added``, else ``normal``."""
    added: bool = False
    """Whether the output of its product is added to the residual, unscaled."""

    @property
    def resolved_start(self) -> Start:
        """Initial values: ``start``, or its default."""
        if self.start is not None:
            return self.start
        if len(self.shape) == 1:
            return "zeros"
        return "output" if self.added else "normal"

    @property
    def reads_compute_dtype(self) -> bool:
        """Whether the compute dtype is enough for all reads, and thus for a frozen weight.

        Rows that are looked up are rounded to the compute dtype afterwards.
        """
        return self.product or self.looked_up

    @property
    def is_master_matrix(self) -> bool:
        """Whether it is a matrix that is read in the master's dtype, as all vectors are."""
        return self.looked_up or (not self.product and len(self.shape) > 1)

    @property
    def elements(self) -> int:
        """Number of elements of the whole parameter."""
        return prod(self.shape)

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to routed experts, which ep cuts."""
        return any(units.axis == "ep" for _, units in self.cuts)

    def local_elements(self, tp: int, ep: int, etp: int) -> float:
        """Return the number of elements on the fullest rank, before sharding over data ranks."""
        sizes = {"tp": tp, "ep": ep, "etp": etp}
        elements = self.elements
        ranks = 1
        for dim, units in self.cuts:
            if units.uneven:
                elements //= self.shape[dim]
                elements *= largest_share(units.number, sizes[units.axis])
            else:
                ranks *= sizes[units.axis]
        return elements / ranks

    def local_matrix(self, tp: int, ep: int, etp: int) -> tuple[float, float, float]:
        """Return outputs, inputs and number of the weight's matrices on one rank."""
        sizes = {"tp": tp, "ep": ep, "etp": etp}
        shape = [float(size) for size in self.shape]
        for dim, units in self.cuts:
            shape[dim] = units.part_of(shape[dim], sizes[units.axis])
        matrices = shape.pop(0) if self.is_expert else 1.0
        return prod(shape[:-1]), shape[-1], matrices


def norm(
    name: str,
    width: int,
    units: Units | None = None,
    latent: bool = False,
    start: Start = "ones",
) -> Weight:
    """Return the weight of an RMSNorm, cut by ``units`` if given."""
    cuts = () if units is None else ((0, units),)
    return Weight(name, (width,), cuts, "norms", product=False, latent=latent, start=start)


@dataclass(frozen=True)
class Matmul:
    """A matrix product, or grouped product, of rows with one or several weights."""

    weights: tuple[str, ...]
    """Names of weights that one product reads, with their outputs concatenated."""
    rows: Rows = "group"


@dataclass(frozen=True)
class Attention:
    """Causal softmax attention within documents, one row per token."""

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    window: int | None = None
    """Number of tokens that a row attends to, including itself; None is no limit."""
    head_norms: bool = False
    """Whether queries and keys are normed."""
    chunk: int | None = None
    """Length of chunks within which rows attend; None is the whole document."""

    @property
    def key_value_width(self) -> int:
        """Features of a row's keys and values."""
        return self.kv_heads * (self.qk_dim + self.v_dim)

    @property
    def query_width(self) -> int:
        """Features of a row's queries and outputs; also the multiply-adds per query-key pair."""
        return self.heads * (self.qk_dim + self.v_dim)

    def pairs(self, seq: int) -> float:
        """Return the average number of tokens that a row of a sequence attends to."""
        if self.chunk is not None and self.chunk < seq:
            chunks, rest = divmod(seq, self.chunk)
            return (chunks * self.chunk**2 + rest**2) / (2 * seq)
        window = min(self.window or seq, seq)
        return window - window**2 / (2 * seq)


@dataclass(frozen=True)
class Scan:
    """A recurrence over the sequence, computed in chunks; figures are per row and before tp."""

    products: float
    """Multiply-adds."""
    moved: float
    """Least number of elements read and written."""
    chunk: int
    state: float
    """Elements of the state between chunks."""


@dataclass(frozen=True)
class Traffic:
    """Memory traffic of element-wise kernels: reads and writes of each feature of a row."""

    features: float
    forward: float
    backward: float
    rows: Rows = "group"
    units: Units | None = None
    """Units of the features, if an axis cuts them."""


@dataclass(frozen=True)
class Operation:
    """One step of a layer: matrix products or a core, and the element-wise kernels around them."""

    name: str
    matmuls: tuple[Matmul, ...] = ()
    core: Attention | Scan | None = None
    traffic: tuple[Traffic, ...] = ()
    launches: float | None = None
    """Number of kernels in a forward; None is one per product."""
    wide: bool = False
    """Whether products are never quantised, and are left out of FLOP counts."""


class RoutingSpec(NamedTuple):
    """Routing of a layer with experts, as planner and dispatchers read it."""

    experts: int
    top_k: int
    width: int | None = None
    """Features of dispatched rows; None is D."""
    groups: int = 1
    groups_kept: int | None = None
    places: int = 0
    """Columns of ``experts_TK`` in a decision; 0 is ``top_k``."""


class SavedKind(Enum):
    """What a saved tensor is, where rules beyond its own layer treat it apart."""

    BLOCK_INPUT = auto()
    """Rows that a block reads, which recomputing whole blocks saves alone."""
    RESIDUAL = auto()
    """Rows between the sublayers of a block."""
    NORM_STATISTIC = auto()
    """Statistic of the norm before a sublayer."""
    NORM_OUTPUT = auto()
    """Output of the norm before a sublayer."""
    GATHERED = auto()
    """That output, gathered over tp."""
    LATENT_ROWS = auto()
    """Narrow rows of which experts read copies."""
    EXPERT_ENDS = auto()
    """Ends of each expert's rows in a buffer."""
    RECEIVED = auto()
    """Rows that an expert rank receives, with their weights and indices."""
    CODES = auto()
    """Codes of few bits, with scales, in place of rows."""
    OTHER = auto()
    """No rule beyond its layer's concerns it."""


@dataclass(frozen=True)
class Saved:
    """One tensor that lives from a layer's forward until its backward, or longer."""

    name: str
    bytes: int
    freed_by: Modules = NOTHING
    """Kinds whose recompute frees it; recomputing whole blocks frees all but the input."""
    needed_by: Modules = NOTHING
    """Kinds whose recompute needs it as an input: it is saved only then. Empty: always saved."""
    saved: bool = True
    """Whether autograd saves it; otherwise it is part of a decision, which recompute needs."""
    module: Module = "block"
    """Kind of module that it belongs to, for offloading."""
    operand_of: tuple[str, ...] = ()
    """Names, within the layer, of weights whose gradients read it: a schedule that defers weight
    gradients holds it until then, and holds it anew if backward recomputed it."""
    from_forward: bool = True
    """Whether forward saves it; otherwise backward computes it."""
    rows: int = 0
    """Rows of an experts' buffer of fixed room, some of which may be unused; 0: all are used."""
    also_saved: "Saved | None" = None
    """What another consumer saves of it even if those gradients read codes in its place."""
    kind: SavedKind = SavedKind.OTHER
    sublayer: Sublayer | None = None
    """Sublayer of the block that states it (``block_saved``)."""
    result_of: str = ""
    """Name, within the layer, of the weight whose product it is, if it is a pre-activation."""
    only_beside: Modules = NOTHING
    """Kinds that must all be recomputed too for it to be saved."""

    def is_saved_under(self, recompute: Modules) -> bool:
        """Return whether it is saved under a recompute policy."""
        if "block" in recompute:
            return self.kind is SavedKind.BLOCK_INPUT or not self.saved
        if not self.only_beside <= recompute:
            return False
        if self.needed_by and not self.needed_by & recompute:
            return False
        return not self.freed_by & recompute


class Shape(NamedTuple):
    """Rows, bytes and ranks that decide a layer's tensors and work on the fullest rank."""

    hidden: int
    rows: int
    """T."""
    tp: int = 1
    etp: int = 1
    load: float = 1.0
    """Rows of the most loaded expert rank relative to the mean."""
    width: int = 2
    """Bytes of an element of the compute dtype."""
    cp: int = 1
    gathers: bool = False
    """Whether each context rank gathers all keys and values."""
    ranks_sharing_heads: int = 1
    """Context ranks that exchange rows for heads (Ulysses); 1 if none do."""
    ep: int = 1
    room: int | None = None
    """Rows of the dispatcher's receive buffer, if its shapes are fixed."""
    places: int = 0
    """Further indices that such a dispatcher saves (``FixedShape.saved_indices``)."""
    separate_exchanges: bool = False
    """Whether a schedule runs a block's exchanges as separate segments, to overlap them."""
    clones: int = 0
    """Slots of a rank for clones of other ranks' experts."""
    seq: int = 0
    """Tokens of a sequence, which decide the work of attention."""
    sorted_rows: bool = False
    """Whether the dispatcher itself sorts rows by expert."""

    @property
    def sizes(self) -> dict[Axis, int]:
        """Sizes of the axes that cut weights."""
        return {"tp": self.tp, "cp": self.cp, "ep": self.ep, "etp": self.etp}

    @property
    def without_experts(self) -> "Shape":
        """The shape for a layer without experts, wherever experts are."""
        return self._replace(ep=1, etp=1, load=1.0, sorted_rows=False)

    @property
    def piece(self) -> int:
        """P: rows that attention and a dense feed-forward read."""
        return self.rows * self.tp

    @property
    def hidden_bytes(self) -> int:
        """Bytes of T rows of the hidden state."""
        return self.rows * self.hidden * self.width

    @property
    def num_gathered(self) -> int:
        """Number of context ranks whose keys and values a rank gathers."""
        return self.cp if self.gathers else 1

    @property
    def exchanges_heads(self) -> bool:
        """Whether context ranks exchange rows for heads (Ulysses)."""
        return self.ranks_sharing_heads > 1

    def received_rows(self, routing: RoutingSpec) -> int:
        """R: rows on the most loaded expert rank; on a single one, a row for every place."""
        top_k = (routing.places if self.ep * self.etp == 1 else 0) or routing.top_k
        return self.room or round(self.rows * top_k * self.etp * self.load)


Side = Literal["query", "key", "alone"]
"""Outputs of weight rows: part of a query, of a key, or of a query whose key all heads share."""


class LogitRows(NamedTuple):
    """A weight or bias of query or key projections, as QK-clip scales its rows by head; tp cuts it
    by heads."""

    weight: str
    """Name within the layer."""
    heads: int
    parts: tuple[tuple[int, Side | None], ...]
    """(number of rows, side) of consecutive rows of a head; None: the rows do not affect logits."""


class LayerSpec(Record):
    """Base record of every kind of layer: one sublayer of a block, attention or feed-forward."""

    prefix: ClassVar[str | None] = None
    """Name of the module in a block; None is ``attention`` or ``ffn``."""
    absent: ClassVar[bool] = False
    """Whether the sublayer, with its norm, does not exist."""
    untrained: ClassVar[str | None] = None
    """Description of a kind that can be planned but not trained; None for others."""
    widths: ClassVar[tuple[str, ...]] = ()
    """Fields that no axis counts and that may be smaller in a layout of the same sizes: features
    of a head, a latent or an expert, and tokens of a window."""
    caches: ClassVar[bool] = False
    """Whether rows affect later rows only through ``Flow.cache``, so that generation may use it.
    Each class declares this itself; it is not inherited."""

    def weights(self, hidden: int) -> Iterable[Weight]:
        """Yield the parameters, in the order of the module's parameters."""
        raise _undescribed_error(self)

    def operations(self, hidden: int) -> Iterable[Operation]:
        """Yield matrix products, cores and element-wise kernels of a forward."""
        raise _undescribed_error(self)

    def saved(self, shape: Shape) -> Iterable[Saved]:
        """Yield the tensors that a forward saves for backward, without the input of the norm."""
        raise _undescribed_error(self)

    def products(self, hidden: int) -> Iterator[tuple[Operation, Matmul, tuple[Weight, ...]]]:
        """Yield matrix products, each with its operation and the weights that it reads."""
        weights = {weight.name: weight for weight in self.weights(hidden)}
        for operation in self.operations(hidden):
            for matmul in operation.matmuls:
                yield operation, matmul, tuple(weights[name] for name in matmul.weights)

    def activation_width(self, shape: Shape) -> float:
        """Return the input width, on a rank, of the last product that is not wide, of dispatched
        rows or, where none are, of the tensor group's."""
        weights = {m.rows: w for op, m, w in self.products(shape.hidden) if not op.wide}
        last = next((weights[r] for r in ("routed", "group", "own") if r in weights), None)
        return last[0].local_matrix(shape.tp, shape.ep, shape.etp)[1] if last else 0.0

    @property
    def routing(self) -> RoutingSpec | None:
        """Description of the routing; None without experts."""
        return None

    @property
    def compares_rows(self) -> bool:
        """Whether rows compete by router score, so that equal rows are a tie."""
        return False

    @property
    def logits(self) -> tuple[LogitRows, ...]:
        """Weights to which attention logits are proportional, for QK-clip."""
        return ()

    @property
    def summary(self) -> str:
        """Kind and size of the layer, for the banner."""
        return type(self).__name__

    def units(self, hidden: int) -> tuple[Units, ...]:
        """Return the distinct units that axes of a layout divide."""
        cuts = (units for weight in self.weights(hidden) for _, units in weight.cuts)
        return tuple(dict.fromkeys(cuts))

    def shrink(self, by: Sizes) -> Self:
        """Return a small record of the same kind whose units the sizes of a layout divide.

        By default, integers above the small width become that width, rounded up to a multiple of
        all axes; if the record's rules refuse the result, the record itself is returned.
        """
        width = round_up(SMALL_WIDTH, lcm(by.tp, by.cp, by.ep, by.etp))
        changes = {name: width for name, value in self if type(value) is int and value > width}
        small = self.model_copy(update=changes)
        return self if any(True for _ in small.rules()) else small

    def narrowed(self, factor: int, multiple: int) -> Self:
        """Return a record whose ``widths`` are ``factor`` times smaller, with as many units.

        ``multiple`` is what axes divide widths by: each is rounded up to it.
        """
        stated = {name: getattr(self, name) for name in self.widths}
        changes = {
            name: min(width, round_up(-(-width // factor), multiple))
            for name, width in stated.items()
            if width is not None
        }
        return self.model_copy(update=changes)

    def without_discrete_choices(self) -> Self:
        """Return a record without discrete choices that rounding could change."""
        return self

    def violations(self, hidden: int) -> Iterator[Violation]:
        """Yield values of the record that do not fit the hidden size of the model."""
        yield from ()

    @property
    def is_stochastic(self) -> bool:
        """Whether routing draws random numbers, so that decisions depend on the step."""
        return False

    def without_gradient(self) -> Iterator[tuple[str, str]]:
        """Yield weights whose gradient is mathematically zero, each with the reason."""
        yield from ()


def as_layer_spec(record: Record) -> LayerSpec:
    """Return a record as a :class:`LayerSpec`.

    Raises:
        ValueError: if a plug-in's record is none.
    """
    if isinstance(record, LayerSpec):
        return record
    raise _undescribed_error(record)


def summary_of(record: Record) -> str:
    """Return ``summary`` of a record; its class name if it is no :class:`LayerSpec`."""
    return record.summary if isinstance(record, LayerSpec) else type(record).__name__


def _undescribed_error(record: Record) -> ValueError:
    name = type(record).__name__
    return ValueError(
        f"{name} is not described: inherit from moefold.spec.layer.LayerSpec, or from a kind that "
        "does, and define weights, operations and saved"
    )


def round_up(number: int, multiple: int) -> int:
    """Return the least multiple of ``multiple`` that is at least ``number``."""
    return -(-number // multiple) * multiple


def small_heads(heads: int, by: Sizes) -> int:
    """Return a small number of heads that tp divides, and tp * cp if it divides ``heads``.

    Context ranks may divide the heads of a tensor rank further.
    """
    return round_up(round_up(min(heads, 2), gcd(by.tp * by.cp, heads)), by.tp)
