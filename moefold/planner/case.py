"""A case: everything that decides a plan, stated and never guessed, and what follows from it.

What follows is read from where training reads it: ranks and groups from :class:`Folding`, places of
stages from :class:`Stages`, what is in flight from the schedule's own table. Equal layers of a
stage are counted, so that a deep model costs no more to plan.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import inf
from typing import Any, Literal, NamedTuple, get_args

from moefold.config.base import Record
from moefold.config.errors import RunError
from moefold.layers.config import Auto, Context, Full, Kind, Offload, Ring, Selective
from moefold.mesh.config import ORDERS, Order, Sizes
from moefold.mesh.folding import Folding
from moefold.mesh.pipeline import Place, Stages, Way
from moefold.model.config import Block, Decoder
from moefold.moe.dispatch.config import DISPATCH, FixedRoom
from moefold.optim.config import AdamW, Optim
from moefold.planner.hardware import Cluster
from moefold.planner.network import reach
from moefold.planner.remember import remembered
from moefold.schedule.config import GPipe, Schedule, tabulate
from moefold.schedule.table import Table
from moefold.spec.codes import coded_blocks
from moefold.spec.decoder import needs
from moefold.spec.layer import NOTHING, RING, Module, Modules

Recipe = Literal["fp32", "bf16", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4"]
"""What products are computed in; all but ``fp32`` keep what is no product in bfloat16."""
Dispatcher = Literal[
    "local", "allgather", "alltoall", "alltoall_once", "two_level", "padded", "spread",
    "deep_ep", "hybrid_ep", "nccl_ep",
]  # fmt: skip
"""How rows reach their experts, by the kinds of ``moe.config``. ``deep_ep``, ``hybrid_ep`` and
``nccl_ep`` are libraries, which send as ``two_level`` does; the last receives into room for all
rows of all ranks."""
Graphs = Literal["none", "partial", "experts", "full"]
"""CUDA graphs: none, of all but dispatch, experts and combine, of experts too, or of the whole
iteration."""
Stack = Literal["moefold", "megatron", "automodel", "torchtitan", "deepseek"]
"""Software whose way of keeping, sending and launching is planned."""
ZERO_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Numbers:
    """Number formats: what is computed in, and what is kept for each parameter."""

    recipe: Recipe = "bf16"
    optimizer: Optim = field(default_factory=lambda: AdamW(lr=3e-4))
    weight_bytes: float = 2
    """Bytes a parameter of the copy that products read; 0 where that is the master itself, or is
    made on the way."""
    gradient_bytes: float = 4
    master_bytes: float = 4
    moment_bytes: float = 4
    """Bytes a parameter of each state tensor of the optimizer."""
    narrowed: frozenset[Literal["attention", "head", "rows", "delayed"]] = frozenset()
    """What a narrow recipe computes in its format though recipes leave it in bfloat16; ``rows`` are
    those that it sends to experts, and gradients of their results. ``delayed``: scales are known
    before what they scale."""

    @property
    def matrix_moment_bytes(self) -> float:
        """Bytes an element of each state tensor of a large matrix."""
        return self.optimizer.moment_bytes((1 << 10, 1 << 10), self.moment_bytes)


@dataclass(frozen=True)
class Keeping:
    """What is sharded, recomputed or moved to the host instead of being kept."""

    zero: int = 1
    """0 nothing, 1 master weights and moments, 2 gradients too, 3 weights too."""
    zero_ranks: int | None = None
    """How many neighbours share what ``zero`` divides; None is all copies."""
    recompute: Modules = NOTHING
    offload: Modules = NOTHING
    """Modules whose activations go to the host between forward and backward."""
    offload_share: float = 1.0
    """Share of the layers of a chunk from which they go, the last one apart."""
    disk: Modules = NOTHING
    """Modules whose activations go to a file."""
    disk_share: float = 1.0
    in_flight: int = 2
    """Layers whose activations are on their way at once."""
    page: int = 0
    """Rows of a page, where experts' rows lie in pages for as many as came."""
    page_load: float = 1.0
    """Rows that there are pages for, over the mean."""
    spill: float = 0.0
    """Share of the layers of a chunk whose pages go on to the host, the last one apart."""
    optimizer_offload: float = 0.0
    """Share of master weights and moments that lies on the host, or on disk."""
    state_step: Literal["device", "host"] | None = None
    """Who updates that, as ``layout.state`` says; None is the host's step of other software."""
    state_on_disk: bool = False

    def __post_init__(self) -> None:
        """Refuse what is no stage, no module or no share."""
        if self.zero not in ZERO_STAGES:
            raise ValueError(f"zero {self.zero}: one of {ZERO_STAGES}")
        for name, modules in (
            ("recompute", self.recompute), ("offload", self.offload), ("disk", self.disk)
        ):  # fmt: skip
            unknown = sorted(modules - {*get_args(Module)})
            if unknown:
                raise ValueError(f"{name} {unknown}: among {', '.join(get_args(Module))}")
        for name in ("offload_share", "disk_share", "spill", "optimizer_offload"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} {getattr(self, name)}: a share from 0 to 1")


@dataclass(frozen=True)
class Overlaps:
    """Which communication runs beside computing."""

    tp: bool = False
    ep: bool = False
    """Exchanges of one micro-batch beside the computing of another."""
    gradients: bool = False
    """Data-parallel reduction beside backward."""
    parameters: bool = False
    """Data-parallel gathering beside forward."""


@dataclass(frozen=True)
class Software:
    """What runs the step; inputs that decide much and that no table of sizes tells."""

    stack: Stack = "moefold"
    release: str = ""
    """Release of the stack, such as ``26.08``; empty where it is not known."""
    cuda_graphs: Graphs = "none"
    overlaps: Overlaps = Overlaps()
    host_speed: float = 1.0
    """Kernel launches per second, in units of the host that the stack was measured on."""
    loss_chunk: int = 1024
    """Rows whose logits exist at once in Moefold; other stacks keep those of all rows."""


class Held(NamedTuple):
    """What a chunk of a pipeline computes, or a rank over its chunks."""

    layers: tuple[tuple[int, int], ...] = ()
    """Kinds of blocks, as :func:`kinds` numbers them, and how many of each."""
    multi_token: int = 0
    """Those of them that predict further tokens, each with a loss of its own."""
    embedding: bool = False
    loss: bool = False
    """Whether the last norm, the head and the loss are there."""

    @property
    def number(self) -> int:
        """Layers of all kinds, those of further tokens apart."""
        return sum(count for _, count in self.layers) - self.multi_token

    @classmethod
    def of(cls, places: Iterable[Place], order: tuple[int, ...], main: int) -> "Held":
        """Count places; ``order`` is the kind of each layer, of which ``main`` come first."""
        layers: Counter[int] = Counter()
        others: Counter[str] = Counter()
        for place in places:
            if place.kind == "layer":
                layers[order[place.index]] += 1
            elif place.kind == "multi_token":
                layers[order[main + place.index]] += 1
            others[place.kind] += 1
        ends = others["embedding"] > 0, others["loss"] > 0
        return cls(tuple(sorted(layers.items())), others["multi_token"], *ends)


class Contents(NamedTuple):
    """What a pipeline's ranks compute."""

    places: tuple[tuple[tuple[Place, ...], ...], ...]
    chunks: tuple[tuple[Held, ...], ...]
    ranks: tuple[Held, ...]


@remembered(256)
def kinds(decoder: Decoder) -> tuple[tuple[Block, ...], tuple[int, ...]]:
    """Return the different blocks of a model, and for each of its layers which one it is."""
    numbers: dict[Block, int] = {}
    order = tuple(numbers.setdefault(block, len(numbers)) for block in coded_blocks(decoder))
    return tuple(numbers), order


@remembered(256)
def main_layers(decoder: Decoder) -> tuple[int, int]:
    """Return the number of a model's layers, and of those of further tokens, which follow them."""
    return decoder.layers, len(decoder.multi_token)


@remembered(4096)
def contents(decoder: Decoder, stages: Stages, pp: int, way: Way) -> Contents:
    """Return what the ranks of a pipeline compute, chunk by chunk and over their chunks."""
    places, given = stages.table(pp, way), (kinds(decoder)[1], main_layers(decoder)[0])
    chunks = tuple(tuple(Held.of(chunk, *given) for chunk in rank) for rank in places)
    return Contents(places, chunks, tuple(Held.of(chain(*rank), *given) for rank in places))


EVENED = (inf, 1.42, 1.07, 1.04, 1.005)
"""Most load that plans of clones leave of recorded routings (64 experts, top 8, 8 and 16 ranks, up
to 4.1 before), by the slots of a rank: ``tests/cpu/test_moe_clones.py``."""


def evened(load: float, slots: int) -> float:
    """Return the load that is planned where ranks have so many slots for clones."""
    return min(load, EVENED[min(slots, len(EVENED) - 1)])


@dataclass(frozen=True)
class Case:
    """One step of one model in one layout on one cluster."""

    decoder: Decoder
    seq: int
    """Tokens per sequence."""
    batch: int
    """Sequences per step, over all ranks."""
    micro_batch: int
    """Sequences per micro-batch."""
    cluster: Cluster
    """Its number of devices is the number of ranks."""
    sizes: Sizes
    stages: Stages
    schedule: Schedule
    dispatch: Dispatcher
    load: float
    """Rows of the most loaded expert rank over the mean; 1 is forced balance."""
    numbers: Numbers = Numbers()
    keeping: Keeping = Keeping()
    software: Software = Software()
    context: Context = RING
    order: Order = ORDERS[0]
    max_rows: int | None = None
    """Room that a dispatch of fixed shapes is given; None is as much as ``load`` needs."""
    clones: int = 0
    """Slots of each rank for clones of experts, after which ``load`` is."""

    def __post_init__(self) -> None:
        """Refuse a case that no run could have, in words."""
        count = self.sizes.pp * self.sizes.vpp
        if len(self.stages.letters) != count:
            raise ValueError(f"stages are {len(self.stages.letters)}, pp * vpp is {count}")
        layers, ahead = main_layers(self.decoder)
        if self.stages.layers != layers:
            raise ValueError(f"stages hold {self.stages.layers} layers, the model has {layers}")
        if self.multi_token != ahead:
            raise ValueError(f"stages hold {self.multi_token} m, the model has {ahead}")
        share = self.folding.dp * self.micro_batch
        if self.batch % share:
            raise ValueError(f"batch {self.batch} must be a multiple of dp * micro_batch = {share}")
        order = self.sizes.pp, self.sizes.vpp, self.micro_batches
        if broken := list(self.schedule.violations(*order)):
            said = "schedule {} with pp{} vpp{}, {} micro-batches on each data rank"
            raise RunError(broken, source=said.format(self.schedule.name, *order))
        if self.load < 1:
            raise ValueError(f"load {self.load}: the most loaded is at least the mean, 1")
        if not isinstance(self.context, Ring):
            heads = needs(self.decoder, self.seq).heads
            for found in self.context.violations(self.sizes, heads):
                raise ValueError(f"context: {found.rule}")

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.cluster.devices

    @cached_property
    def folding(self) -> Folding:
        """The two grids over the ranks."""
        return Folding(self.sizes, self.world, self.order)

    @property
    def expert_domains(self) -> int:
        """Number of domains of fast links that the ranks of an expert group lie in, evenly."""
        return reach(self.cluster, self.sizes.ep, self.sizes.etp).outside

    @property
    def room(self) -> FixedRoom | None:
        """The dispatcher's record, where a run file states its room."""
        record = DISPATCH.kinds[self.dispatch]
        if self.max_rows is None or not issubclass(record, FixedRoom):
            return None
        return record.model_validate({"max_rows": self.max_rows})

    @property
    def graphs_of_parts(self) -> bool:
        """Whether Moefold runs blocks' parts as graphs."""
        software = self.software
        return software.stack == "moefold" and software.cuda_graphs in ("partial", "experts")

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step and data rank."""
        return self.batch // (self.folding.dp * self.micro_batch)

    @property
    def rows(self) -> int:
        """Rows of a micro-batch that a rank holds between sub-layers: split over tp and cp."""
        return self.micro_batch * self.seq // (self.sizes.tp * self.sizes.cp)

    @property
    def multi_token(self) -> int:
        """Number of multi-token prediction layers, as the stages have them."""
        return sum(stage.count("m") for stage in self.stages.letters)

    @cached_property
    def table(self) -> Table:
        """The schedule's table, as training executes it."""
        return table_of(self.schedule, self.sizes.pp, self.sizes.vpp, self.micro_batches)

    @property
    def places(self) -> tuple[tuple[tuple[Place, ...], ...], ...]:
        """What each chunk of each pipeline rank computes: ``[rank][chunk]``."""
        return self._contents.places

    @property
    def chunks(self) -> tuple[tuple[Held, ...], ...]:
        """Number of layers of each kind in each chunk of each pipeline rank: ``[rank][chunk]``."""
        return self._contents.chunks

    @property
    def held(self) -> tuple[Held, ...]:
        """Number of layers of each kind on each pipeline rank, over all its chunks."""
        return self._contents.ranks

    @cached_property
    def _contents(self) -> Contents:
        return contents(self.decoder, self.stages, self.sizes.pp, self.schedule.way)


table_of = remembered(512)(tabulate)
"""A schedule's table, made once."""


def settled(schedule: Schedule, p: int, m: int) -> int:
    """Return fewer micro-batches whose table keeps at its fullest what that of m keeps.

    Beyond its warm-up a table repeats itself, so that whole groups can be left out, which stays in
    the schedule's domain. Only where all forwards come first does what is kept grow with m.
    """
    period = getattr(schedule, "group", None) or p
    full = 3 * max(p, period)
    if m <= full + period or isinstance(schedule, GPipe):
        return m
    return full + (m - full) % period


def recomputed(record: Record | None) -> Modules:
    """Return what a run file's recompute record recomputes.

    Raises:
        ValueError: where the planner does not know the record.
    """
    if record is None:
        return NOTHING
    if isinstance(record, Full):
        return frozenset(("block",))
    if isinstance(record, Selective):
        return frozenset(record.modules)
    if isinstance(record, Auto):  # not settled: all that could be chosen
        return frozenset(get_args(Kind))
    raise ValueError(f"recompute {type(record).__name__} is not planned: Full or Selective")


def offloaded(record: Offload | None) -> dict[str, Any]:
    """Return what :class:`Keeping` says of a run file's activations on host and disk."""
    if record is None:
        return {}
    found: dict[str, Any] = {"in_flight": record.in_flight}
    for name, share, to in (
        ("offload", "offload_share", record.host), ("disk", "disk_share", record.disk)
    ):  # fmt: skip
        if to is not None:
            found |= {name: frozenset(to.modules), share: to.share}
    if record.pages is not None:
        pages = record.pages
        found |= {"page": pages.page, "page_load": pages.load, "spill": pages.spill}
    return found
