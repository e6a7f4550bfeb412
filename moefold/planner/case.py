"""A case: all explicit inputs of a plan, and the quantities derived from them.

The code that training uses derives them: ranks and groups by :class:`Folding`, parts of stages by
:class:`Stages`, micro-batches in flight by the schedule's table. Equal layers of a stage are
counted, so that a deep model costs no more to plan.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from math import inf
from typing import Literal, NamedTuple

from moefold.config.errors import RunError
from moefold.layers.config import Context, Offload, Precision, Ring
from moefold.mesh.config import EVEN, Sizes
from moefold.mesh.folding import Folding
from moefold.mesh.pipeline import StageMapping, StagePart, Stages
from moefold.model.config import Block, Decoder
from moefold.moe.dispatch.config import FixedShape
from moefold.optim.config import AdamW, Optim
from moefold.parallel.config import Layout, StatePlacement
from moefold.planner.hardware import Cluster
from moefold.planner.layouts import dispatch_kind
from moefold.planner.memoize import memoize
from moefold.planner.network import even_domains
from moefold.schedule.config import GPipe, Schedule, build_table
from moefold.schedule.table import Table
from moefold.spec.codes import coded_blocks
from moefold.spec.decoder import model_needs
from moefold.spec.forward_only import mark_forward_only
from moefold.spec.layer import Modules
from moefold.spec.reference import Reference
from moefold.spec.stages import default_stages

Recipe = Literal["fp32", "bf16", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4"]
"""Number format of matrix products; with all but ``fp32`` other operations are in bfloat16."""
Graphs = Literal["none", "partial", "experts", "full"]
"""CUDA graphs: none, of all but dispatch, experts and combine, of experts too, or of the whole
iteration."""
Stack = Literal["moefold", "megatron", "automodel", "torchtitan", "deepseek"]
"""Software whose saved activations, communication and kernel launches are modelled."""
NO_OFFLOAD = Offload()


@dataclass(frozen=True)
class NumberFormats:
    """Number formats of products and of each parameter's weights, gradients and state."""

    recipe: Recipe = "bf16"
    optimizer: Optim = field(default_factory=lambda: AdamW(lr=3e-4))
    weight_bytes: float = 2
    """Bytes per parameter of the copy that products read; 0 where they read the master or a
    temporary cast."""
    gradient_bytes: float = 4
    master_bytes: float = 4
    moment_bytes: float = 4
    """Bytes per parameter of each state tensor of the optimizer."""
    recipe_options: frozenset[Literal["attention", "head", "rows", "delayed"]] = frozenset()
    """What a narrow recipe also computes in its format, where recipes usually use bfloat16;
    ``rows`` are those sent to experts, and gradients of their results. ``delayed``: scaling factors
    are known before the values that they scale."""

    @property
    def precision(self) -> Precision:
        """The format in which training computes what the recipe does not narrow."""
        return "fp32" if self.recipe == "fp32" else "bf16"

    @property
    def matrix_moment_bytes(self) -> float:
        """Bytes per element of each state tensor of a large matrix."""
        return self.optimizer.moment_bytes((1 << 10, 1 << 10), self.moment_bytes)


def bytes_per_activation(recipe: str) -> int:
    """Return the bytes per element of activations with a recipe's products."""
    return 4 if recipe == "fp32" else 2


@dataclass(frozen=True)
class Overlaps:
    """Which communication overlaps with compute."""

    tp: bool = False
    ep: bool = False
    """Dispatch and combine of one micro-batch overlap with compute of another."""
    gradients: bool = False
    """Data-parallel gradient reduction overlaps with backward."""
    parameters: bool = False
    """Data-parallel weight gathering overlaps with forward."""


@dataclass(frozen=True)
class Software:
    """Software that runs the step."""

    stack: Stack = "moefold"
    release: str = ""
    """Release of the stack, such as ``26.08``; empty if unknown."""
    cuda_graphs: Graphs = "none"
    overlaps: Overlaps = Overlaps()
    host_speed: float = 1.0
    """Kernel launches per second relative to the host on which the stack was measured."""
    loss_chunk: int = 1024
    """Rows of a chunk of logits where head and loss are computed by chunks."""
    chunks_head: bool = False
    """Whether a stack other than Moefold computes head and loss by chunks, as Moefold does."""

    fuses_loss: bool = False
    """Whether another stack writes the gradient of logits over them, without a copy in fp32."""

    @property
    def logits_chunk(self) -> int | None:
        """Rows of a chunk of logits; None where the logits of all rows exist at once."""
        return self.loss_chunk if self.stack == "moefold" or self.chunks_head else None


class StageContents(NamedTuple):
    """Parts of the model in one pipeline chunk, or in all chunks of a rank."""

    layers: tuple[tuple[int, int], ...] = ()
    """Kinds of blocks, as numbered by :func:`distinct_blocks`, with the number of each."""
    multi_token: int = 0
    """Number of multi-token prediction layers among them, each with its own loss."""
    embedding: bool = False
    """Whether it contains the embedding."""
    loss: bool = False
    """Whether it contains the head and the loss."""
    ahead_before: int = 0
    """With the loss: number of multi-token prediction layers elsewhere, whose losses are here."""

    @property
    def losses(self) -> int:
        """Number of losses: the next token's, and one for each multi-token layer of the model."""
        return 1 + self.multi_token + self.ahead_before if self.loss else 0

    @property
    def has_norm(self) -> bool:
        """Whether it contains the last norm, which multi-token layers follow."""
        return self.multi_token > 0 or (self.loss and not self.ahead_before)

    @property
    def num_layers(self) -> int:
        """Number of layers of all kinds, without multi-token prediction layers."""
        return sum(count for _, count in self.layers) - self.multi_token

    @classmethod
    def from_parts(
        cls, parts: Iterable[StagePart], order: tuple[int, ...], main: int
    ) -> "StageContents":
        """Count parts; ``order`` is the kind of each layer, the ``main`` layers first."""
        layers = Counter[int]()
        kinds = Counter[str]()
        for part in parts:
            kinds[part.kind] += 1
            if part.kind in ("layer", "multi_token"):
                layers[order[part.index + (main if part.kind == "multi_token" else 0)]] += 1
        ends = kinds["embedding"] > 0, kinds["loss"] > 0
        ahead = kinds["multi_token"]
        ahead_before = len(order) - main - ahead if kinds["loss"] else 0
        return cls(tuple(sorted(layers.items())), ahead, *ends, ahead_before)


class PipelineContents(NamedTuple):
    """Parts of the model on each pipeline rank by chunk, and their counts by chunk and by rank."""

    parts: tuple[tuple[tuple[StagePart, ...], ...], ...]
    """``[rank][chunk]``"""
    chunks: tuple[tuple[StageContents, ...], ...]
    """``[rank][chunk]``"""
    ranks: tuple[StageContents, ...]


@memoize(256)
def distinct_blocks(decoder: Decoder) -> tuple[tuple[Block, ...], tuple[int, ...]]:
    """Return the distinct blocks of a model, and for each layer the index of its block."""
    numbers: dict[Block, int] = {}
    blocks = mark_forward_only(coded_blocks(decoder), decoder)
    order = tuple(numbers.setdefault(block, len(numbers)) for block in blocks)
    return tuple(numbers), order


@memoize(256)
def layer_counts(decoder: Decoder) -> tuple[int, int]:
    """Return the numbers of a model's layers and of its multi-token prediction layers."""
    return decoder.layers, len(decoder.multi_token)


@memoize(4096)
def pipeline_contents(
    decoder: Decoder, stages: Stages, pp: int, way: StageMapping
) -> PipelineContents:
    """Return the parts of the model on each pipeline rank, by chunk and in total."""
    parts = stages.table(pp, way)
    layers = (distinct_blocks(decoder)[1], layer_counts(decoder)[0])
    chunks = tuple(tuple(StageContents.from_parts(c, *layers) for c in rank) for rank in parts)
    ranks = tuple(StageContents.from_parts(chain(*rank), *layers) for rank in parts)
    return PipelineContents(parts, chunks, ranks)


MAX_LOAD_WITH_CLONES = (inf, 1.42, 1.07, 1.04, 1.005)
"""Largest load with clones in recorded routings (64 experts, top 8, 8 and 16 ranks, up to 4.1
without clones), by slots per rank: ``tests/cpu/test_moe_clones.py``."""


def load_with_clones(load: float, slots: int) -> float:
    """Return the load to plan with where each rank has ``slots`` slots for clones."""
    return min(load, MAX_LOAD_WITH_CLONES[min(slots, len(MAX_LOAD_WITH_CLONES) - 1)])


def require_load(load: float) -> None:
    """Check the rows of the fullest expert rank over the mean.

    Raises:
        ValueError: it is below the mean.
    """
    if load < 1:
        text = f"load {load}: must be at least 1, the mean of all expert ranks; nearest: 1"
        raise ValueError(text)


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
    """Its devices are the ranks."""
    layout: Layout
    """As a run file states it."""
    load: float
    """Rows of the most loaded expert rank over the mean, with clones; 1 is forced balance."""
    number_formats: NumberFormats = NumberFormats()
    software: Software = Software()
    reference: Reference | None = None
    """What the loss needs besides the model."""

    def __post_init__(self) -> None:
        """Check that a run could have these values."""
        num_stages = self.sizes.pp * self.sizes.vpp
        if len(self.stages.letters) != num_stages:
            raise ValueError(f"{len(self.stages.letters)} stages, but pp * vpp is {num_stages}")
        layers, ahead = layer_counts(self.decoder)
        if self.stages.layers != layers:
            raise ValueError(f"stages hold {self.stages.layers} layers, but the model has {layers}")
        if self.multi_token != ahead:
            raise ValueError(f"stages hold {self.multi_token} m layers, but the model has {ahead}")
        share = self.folding.dp * self.micro_batch
        if self.batch % share:
            nearest = max(1, round(self.batch / share)) * share
            raise ValueError(
                f"batch {self.batch} must be a multiple of dp * micro_batch = {share}; "
                f"nearest: {nearest}"
            )
        shape = self.sizes.pp, self.sizes.vpp, self.num_micro_batches
        if violations := list(self.schedule.violations(*shape)):
            source = "schedule {} with pp{} vpp{}, {} micro-batches on each data rank"
            raise RunError(violations, source=source.format(self.schedule.name, *shape))
        require_load(self.load)
        if not isinstance(self.context, Ring):
            heads = model_needs(self.decoder, self.seq).heads
            for violation in self.context.violations(self.sizes, heads):
                raise ValueError(f"layout.context: {violation.rule}")

    @cached_property
    def sizes(self) -> Sizes:
        """Sizes of the layout's axes."""
        return self.layout.split

    @cached_property
    def schedule(self) -> Schedule:
        """The pipeline schedule."""
        return self.layout.resolved_schedule

    @cached_property
    def stages(self) -> Stages:
        """Contents of the pipeline's stages."""
        stated = self.layout.stages
        shape = self.sizes.pp, self.sizes.vpp
        mapping = self.schedule.stage_mapping
        if stated is None:
            return weighted_stages(self.decoder, *shape, mapping)
        if stated == EVEN:
            return balanced_stages(*shape, *layer_counts(self.decoder), mapping)
        return parse_stages(stated)

    @property
    def context(self) -> Context:
        """How attention reads rows of other context ranks."""
        context = self.layout.context
        assert isinstance(context, Context)
        return context

    @property
    def dispatch(self) -> str:
        """Kind of the dispatcher; ``local`` where each rank has all experts."""
        return "local" if self.sizes.ep * self.sizes.etp == 1 else dispatch_kind(self.layout)

    @cached_property
    def recompute(self) -> Modules:
        """Kinds of module that backward recomputes."""
        return self.layout.recomputed

    @property
    def offload(self) -> Offload:
        """Where activations are stored between forward and backward."""
        return self.layout.offload or NO_OFFLOAD

    @property
    def state(self) -> StatePlacement:
        """Where master weights and moments are stored."""
        return self.layout.state

    @property
    def clones(self) -> int:
        """Slots per rank for clones of experts."""
        return 0 if self.layout.clones is None else self.layout.clones.slots

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.cluster.devices

    @cached_property
    def folding(self) -> Folding:
        """The attention and expert grids over the ranks."""
        return Folding(self.sizes, self.world, self.layout.order)

    @property
    def num_expert_domains(self) -> int:
        """Number of fast-link domains among which an expert-parallel group is divided evenly."""
        return even_domains(self.cluster, self.sizes.ep, self.sizes.etp)

    @property
    def fixed_dispatch(self) -> FixedShape | None:
        """The dispatcher's record if it has fixed shapes and stated room, else None."""
        dispatch = self.layout.dispatch
        sends = self.dispatch != "local"
        return dispatch if sends and isinstance(dispatch, FixedShape) else None

    @property
    def has_partial_graphs(self) -> bool:
        """Whether Moefold runs parts of blocks as CUDA graphs."""
        software = self.software
        return software.stack == "moefold" and software.cuda_graphs in ("partial", "experts")

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per step and data rank."""
        return self.batch // (self.folding.dp * self.micro_batch)

    @property
    def rows(self) -> int:
        """Rows of a micro-batch on a rank at a block's border, where tp and cp split them."""
        return self.micro_batch * self.seq // (self.sizes.tp * self.sizes.cp)

    @property
    def multi_token(self) -> int:
        """Number of multi-token prediction layers in the stages."""
        return sum(stage.count("m") for stage in self.stages.letters)

    @cached_property
    def table(self) -> Table:
        """The schedule's table, as training executes it."""
        return schedule_table(self.schedule, self.sizes.pp, self.sizes.vpp, self.num_micro_batches)

    @cached_property
    def contents(self) -> PipelineContents:
        """Parts of the model on each pipeline rank, with their counts."""
        mapping = self.schedule.stage_mapping
        return pipeline_contents(self.decoder, self.stages, self.sizes.pp, mapping)


schedule_table = memoize(512)(build_table)
"""A schedule's table, cached."""
balanced_stages = lru_cache(maxsize=4096)(Stages.balanced)
weighted_stages = memoize(4096)(default_stages)
parse_stages = lru_cache(maxsize=4096)(Stages.parse)


def equivalent_micro_batches(schedule: Schedule, p: int, m: int) -> int:
    """Return a smaller number of micro-batches whose table has the peak memory of that for m.

    After its warm-up a table is periodic, so that whole periods can be left out; the schedule can
    run the result. Only with all forwards first (GPipe) does the peak grow with m.
    """
    period = getattr(schedule, "group", None) or p
    warm_up = 3 * max(p, period)
    if m <= warm_up + period or isinstance(schedule, GPipe):
        return m
    return warm_up + (m - warm_up) % period
