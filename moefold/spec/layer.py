"""What a layer is, without torch: its weights, its operations, and what it saves for backward.

Each kind of layer is a record (:class:`LayerSpec`) that answers three questions, once. Everyone who
does not run it derives from the answers: which layouts are legal, how parameters are cut, counts
and FLOPs, planned memory and time, and the small models of ``verify``.

T rows of a rank between sub-layers, P rows that its tensor group holds together, R rows after
dispatch, D hidden features.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import gcd, lcm, prod
from typing import ClassVar, Literal, NamedTuple, Self

from moefold.config.base import Record
from moefold.config.errors import Violation
from moefold.layers.config import Context, Ring
from moefold.mesh.config import Sizes

Axis = Literal["tp", "cp", "ep", "etp"]
Rows = Literal["own", "group", "routed"]
"""Rows that an operation reads: T of this rank, P of its tensor group, or R after dispatch."""
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
"""What can be recomputed or offloaded. ``block`` is whole blocks, ``moe`` router to combine and
``moe_act`` the experts' activation alone; the rest are those of ``layers.config.Kind``."""
Modules = frozenset[Module]
Start = Literal["normal", "output", "zeros", "ones", "norm"] | float | Callable[[float], float]
"""Values of a parameter before the first step: ``normal``, with the decoder's spread; ``output``,
with that spread over the root of twice the layers, for what ends in a block's rows (GPT-2);
``norm``, a factor of one as the decoder's norms have it; normal with a spread of its own; or a
function of how far along the first dim an element stands, between 0 and 1."""
NOTHING: Modules = frozenset()
NORMS: Modules = frozenset(("norms",))
CORE: Modules = frozenset(("attention",))
UP: Modules = frozenset(("mla_up",))
COPIES: Modules = frozenset(("permute",))
GATHER: Modules = frozenset(("gather",))

STATISTIC = 4
"""Bytes of a statistic, score or weight of routing: fp32 whatever the compute dtype."""
INDEX = 8
"""Bytes of an expert's id, of a row's place and of a token's."""
RING = Ring()
SMALL_WIDTH, SMALL_HEAD = 16, 4
"""Width of a feed-forward and dims of a head in the small models that ``verify`` computes."""


class Units(NamedTuple):
    """What the ranks of an axis share: whole heads, columns of a width, experts."""

    axis: Axis
    number: int
    name: str
    """In words, for the rule that the axis divides their number."""
    heads: bool = False
    """Whether context ranks may share them further."""
    said: str = ""
    """The rule in other words, where those say more."""

    @property
    def rule(self) -> str:
        """The rule that a layout must keep, such as ``tp divides attention heads (7)``."""
        return self.said or f"{self.axis} divides {self.name} ({self.number})"

    def fraction(self, ranks: int) -> float:
        """Return the fraction that one rank computes; no rank computes less than one unit."""
        return max(self.number, ranks) / (self.number * ranks)


@dataclass(frozen=True)
class Weight:
    """One parameter of a layer, named within it."""

    name: str
    shape: tuple[int, ...]
    cuts: tuple[tuple[int, Units], ...] = ()
    """Dims that an axis cuts, each with the units that a rank gets whole."""
    counted: str = "attention"
    """What counts list it under: attention, norms, ffn, experts, router or shared."""
    product: bool = True
    """Whether products read it in the compute dtype; others read the master itself."""
    looked_up: bool = False
    """Whether rows are read from it in the master's dtype, whatever products read."""
    latent: bool = False
    """Whether it is the norm of a latent, which counts of FLOPs take for one product."""
    frozen: bool = False
    """Whether it is not trained: then it exists in the format that it is read in alone."""
    stacked: bool = False
    """Whether matrices of several outputs are read in one product: it has no adapter and stays
    wide."""
    summed: bool = False
    """Whether its gradient is a sum over rows, which is made at once and waits as such, though it
    is no vector."""
    start: Start | None = None
    """Values before the first step; None is ``zeros`` for a vector, ``output`` for what is added
    to a block's rows, and ``normal`` for other matrices."""
    added: bool = False
    """Whether a block adds what its product gives to its rows, unscaled."""

    @property
    def begins(self) -> Start:
        """``start``, or what it is by default."""
        usual: Start = "output" if self.added else "normal"
        return self.start or ("zeros" if len(self.shape) == 1 else usual)

    @property
    def narrow(self) -> bool:
        """Whether all that is read of it is in the compute dtype, so that a frozen one is too.

        Rows that are looked up are rounded to it once they are found.
        """
        return self.product or self.looked_up

    @property
    def master(self) -> bool:
        """Whether it is a matrix that is read as the master is; vectors are so anyway."""
        return self.looked_up or (not self.product and len(self.shape) > 1)

    @property
    def elements(self) -> int:
        """Number of elements of the whole parameter."""
        return prod(self.shape)

    @property
    def expert(self) -> bool:
        """Whether it belongs to routed experts, which ep shares."""
        return any(units.axis == "ep" for _, units in self.cuts)

    def dim(self, axis: Axis) -> int | None:
        """Return the dim that an axis cuts; None where it leaves the weight whole."""
        return next((dim for dim, units in self.cuts if units.axis == axis), None)

    def part(self, tp: int, ep: int, etp: int) -> float:
        """Return the elements that one rank holds before data ranks share them."""
        sizes = {"tp": tp, "ep": ep, "etp": etp}
        return self.elements / prod(sizes[units.axis] for _, units in self.cuts)

    def matrix(self, tp: int, ep: int, etp: int) -> tuple[float, float, float]:
        """Return outputs and inputs of its product on one rank, and how many such it has."""
        sizes, local = {"tp": tp, "ep": ep, "etp": etp}, [float(size) for size in self.shape]
        for dim, units in self.cuts:
            local[dim] *= units.fraction(sizes[units.axis])
        first = 1 if self.expert else 0
        return prod(local[first:-1]), local[-1], local[0] if self.expert else 1.0


def norm(
    name: str,
    width: int,
    units: Units | None = None,
    latent: bool = False,
    start: Start = "ones",
) -> Weight:
    """Return the weight of an RMSNorm, cut where its features are."""
    cuts = () if units is None else ((0, units),)
    return Weight(name, (width,), cuts, "norms", product=False, latent=latent, start=start)


@dataclass(frozen=True)
class Matmul:
    """A matrix product, or a grouped one: rows times the outputs of one or several weights."""

    weights: tuple[str, ...]
    """Read in one product, their outputs side by side."""
    rows: Rows = "group"


@dataclass(frozen=True)
class Attention:
    """Causal softmax attention: one row per token, documents apart."""

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    window: int | None = None
    """Tokens that a row sees, itself among them; None is all before it."""
    head_norms: bool = False
    """Whether queries and keys pass norms of their own."""
    chunk: int | None = None
    """Tokens among which a row sees those before it; None is all."""

    @property
    def key_value_width(self) -> int:
        """Features of a row's keys and values."""
        return self.kv_heads * (self.qk_dim + self.v_dim)

    @property
    def query_width(self) -> int:
        """Features of a row's queries and outputs, which is also multiply-adds per pair."""
        return self.heads * (self.qk_dim + self.v_dim)

    def pairs(self, seq: int) -> float:
        """Return how many tokens a row of a sequence sees on average."""
        if self.chunk is not None and self.chunk < seq:
            whole, rest = divmod(seq, self.chunk)
            return (whole * self.chunk**2 + rest**2) / (2 * seq)
        window = min(self.window or seq, seq)
        return window - window**2 / (2 * seq)


@dataclass(frozen=True)
class Scan:
    """A recurrence over the sequence that runs in chunks; numbers are per row, before tp."""

    products: float
    """Multiply-adds."""
    moved: float
    """Elements that it reads and writes at the least."""
    chunk: int
    state: float
    """Elements of the state between chunks."""


@dataclass(frozen=True)
class Traffic:
    """Element-wise kernels: how often each of a row's features is read or written."""

    features: float
    forward: float
    backward: float
    rows: Rows = "group"
    units: Units | None = None
    """What the features belong to, where an axis cuts them."""


@dataclass(frozen=True)
class Operation:
    """One step of a layer: matrix products or a core, and the element-wise kernels around it."""

    name: str
    matmuls: tuple[Matmul, ...] = ()
    core: Attention | Scan | None = None
    traffic: tuple[Traffic, ...] = ()
    launches: float | None = None
    """Kernels of a forward; None is one for each product."""
    wide: bool = False
    """Whether products stay in the compute dtype whatever the recipe, and FLOPs leave them out."""


class RoutingSpec(NamedTuple):
    """What a layer with experts tells of its router to those who send rows."""

    experts: int
    top_k: int
    width: int | None = None
    """Features of the rows that are sent; None is D."""
    groups: int = 1
    groups_kept: int | None = None
    places: int = 0
    """Places for experts in a row of a decision; 0 is ``top_k``."""


@dataclass(frozen=True)
class Saved:
    """One tensor that stays alive between a layer's forward and its backward, or after that."""

    name: str
    bytes: int
    dropped: Modules = NOTHING
    """Recomputing one of these drops it; recomputing whole blocks drops all but the input."""
    only: Modules = NOTHING
    """It is kept only where one of these is recomputed, as its input; nothing: always."""
    saved: bool = True
    """Whether autograd saves it; what is not saved is a decision that any second run needs."""
    module: Module = "block"
    """What it belongs to, for offloading."""
    operand: tuple[str, ...] = ()
    """Weights, by name within the layer, the products of whose gradients read it: a schedule that
    puts these off holds it until then, and holds it again where backward made it again."""
    kept: bool = True
    """Whether forward leaves it; else backward makes it."""
    rows: int = 0
    """Rows of experts that there is stated room for, of which fewer may count; 0: all count."""
    beside: "Saved | None" = None
    """What of it something else keeps, where those products read codes of it in its place."""

    def stays(self, recompute: Modules) -> bool:
        """Return whether it is kept under a recompute policy."""
        if "block" in recompute:
            return self.name == "input" or not self.saved
        if self.only and not self.only & recompute:
            return False
        return not self.dropped & recompute


@dataclass(frozen=True)
class Shape:
    """Numbers of rows and of bytes on the fullest rank of a layer."""

    hidden: int
    rows: int
    """T."""
    tp: int = 1
    etp: int = 1
    load: float = 1.0
    """Rows of the most loaded expert rank over the mean."""
    width: int = 2
    """Bytes of an element of the compute dtype."""
    cp: int = 1
    context: Context = RING
    """How ``cp`` ranks see each other's rows."""
    ep: int = 1
    room: int | None = None
    """Rows that the dispatcher receives in any case, where its shapes are fixed."""
    places: int = 0
    """Places of rows that it notes then, beyond those of entries and of rows received."""
    apart: bool = False
    """Whether a schedule runs a block's exchanges as parts of their own, beside other work."""
    clones: int = 0
    """Slots of a rank for clones of other ranks' experts."""

    @property
    def piece(self) -> int:
        """P: rows that attention and a dense feed-forward see."""
        return self.rows * self.tp

    @property
    def row(self) -> int:
        """Bytes of all T rows."""
        return self.rows * self.hidden * self.width

    @property
    def gathered(self) -> int:
        """Context ranks whose keys and values each of them gathers."""
        return self.cp if self.context.gathers else 1

    @property
    def exchanged(self) -> bool:
        """Whether context ranks attend with a share of the heads of more rows than their own."""
        return self.context.sharing_heads(self.cp) > 1

    def received(self, routing: RoutingSpec) -> int:
        """R: rows of the most loaded rank's experts; alone it has room for every place."""
        top_k = (routing.places if self.ep * self.etp == 1 else 0) or routing.top_k
        return self.room or round(self.rows * top_k * self.etp * self.load)


Side = Literal["query", "key", "alone"]
"""What rows of a weight make: part of a query or key, or of a query whose key all heads share."""


class LogitRows(NamedTuple):
    """A weight or bias whose rows scale logits, head by head."""

    weight: str
    """Named within the layer."""
    heads: int
    parts: tuple[tuple[int, Side | None], ...]
    """Of each head so many rows of a side, one part after the other; None leaves logits alone."""


class LayerSpec(Record):
    """One half of a block, attention or feed-forward: the base of every kind of layer."""

    prefix: ClassVar[str | None] = None
    """What its module is called in a block; None is ``attention`` or ``ffn``."""
    absent: ClassVar[bool] = False
    """Whether the half is not there, nor its norm."""
    untrained: ClassVar[str | None] = None
    """For kinds that are planned but cannot be trained: what they are, in words."""
    caches: ClassVar[bool] = False
    """Whether a row reaches later rows by what the layer keeps of texts in ``Flow.cache`` alone.
    Each class says so for itself; it is not inherited."""

    def weights(self, hidden: int) -> Iterable[Weight]:
        """Yield the parameters, in the order of the module's own."""
        raise _undescribed(self)

    def operations(self, hidden: int) -> Iterable[Operation]:
        """Yield matrix products, cores and element-wise kernels of a forward."""
        raise _undescribed(self)

    def saved(self, shape: Shape) -> Iterable[Saved]:
        """Yield what a forward saves for backward, the input of the half's norm apart."""
        raise _undescribed(self)

    def products(self, hidden: int) -> Iterator[tuple[Operation, Matmul, tuple[Weight, ...]]]:
        """Yield matrix products, each with its operation and the weights that it reads."""
        weights = {weight.name: weight for weight in self.weights(hidden)}
        for operation in self.operations(hidden):
            for matmul in operation.matmuls:
                yield operation, matmul, tuple(weights[name] for name in matmul.weights)

    def activation_width(self, shape: Shape) -> float:
        """Return how many features a feed-forward or routed experts read last, on a rank."""
        found = [w for one, _, w in self.products(shape.hidden) if one.name in ("ffn", "experts")]
        return found[-1][0].matrix(shape.tp, shape.ep, shape.etp)[1] if found else 0.0

    @property
    def routing(self) -> RoutingSpec | None:
        """What its router does; None without experts."""
        return None

    @property
    def compares_rows(self) -> bool:
        """Whether experts choose among rows by their scores, so that equal rows are a tie."""
        return False

    @property
    def logits(self) -> tuple[LogitRows, ...]:
        """Weights that attention's logits grow with."""
        return ()

    @property
    def words(self) -> str:
        """The kind and its size, as a line of the banner says it."""
        return type(self).__name__

    def units(self, hidden: int) -> tuple[Units, ...]:
        """Return what axes of a layout share, each once."""
        cuts = (units for weight in self.weights(hidden) for _, units in weight.cuts)
        return tuple(dict.fromkeys(cuts))

    def shrunk(self, by: Sizes) -> Self:
        """Return a small record of the same kind whose units the sizes of a layout divide.

        Whole numbers above the small width fall to it, rounded up to a multiple of all axes; where
        the record's own rules refuse that, it stays as it is.
        """
        least = rounded_up(SMALL_WIDTH, lcm(by.tp, by.cp, by.ep, by.etp))
        wide = {n: least for n, v in self if type(v) is int and v > least}
        small = self.model_copy(update=wide)
        return self if any(True for _ in small.rules()) else small

    def steady(self) -> Self:
        """Return a record none of whose choices can change with a rounding."""
        return self

    def violations(self, hidden: int) -> Iterator[Violation]:
        """Yield what of the record does not go with the width of its model."""
        yield from ()

    @property
    def draws(self) -> bool:
        """Whether a pass draws by the step's number, which its decision then depends on."""
        return False

    def without_gradient(self) -> Iterator[tuple[str, str]]:
        """Yield weights whose gradient is zero by the maths, each with the reason."""
        yield from ()


def described(record: Record) -> LayerSpec:
    """Return a record as the description that it is.

    Raises:
        ValueError: for a kind from outside that describes nothing.
    """
    if isinstance(record, LayerSpec):
        return record
    raise _undescribed(record)


def words_of(record: Record) -> str:
    """Return a kind and its size in words; the name alone of one that describes nothing."""
    return record.words if isinstance(record, LayerSpec) else type(record).__name__


def _undescribed(record: Record) -> ValueError:
    name = type(record).__name__
    return ValueError(
        f"{name} is not described: inherit from moefold.spec.layer.LayerSpec, or from a kind that "
        "does, and state weights, operations and saved"
    )


def rounded_up(number: int, multiple: int) -> int:
    """Return the least multiple that is not below a number."""
    return -(-number // multiple) * multiple


def small_heads(heads: int, by: Sizes) -> int:
    """Return few heads that tp divides, and tp * cp where it divides the given ones.

    Context ranks may share heads that tensor ranks share already.
    """
    few = rounded_up(min(heads, 2), gcd(by.tp * by.cp, heads))
    return rounded_up(few, by.tp)
