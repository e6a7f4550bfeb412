"""Records of the ``layout`` section: parallel sizes, schedule, ZeRO, dispatch and memory options.

All packages that build a part of the run read it. It imports no torch.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field

from moefold.config.base import Record
from moefold.config.errors import Violation
from moefold.config.fields import OnDisk
from moefold.layers.config import (
    CONTEXT,
    RECOMPUTE,
    Auto,
    Context,
    Offload,
    Ring,
    Selective,
)
from moefold.mesh.config import EVEN, MAX_RANKS, ORDERS, Order, Sizes, SizesText, StagesText
from moefold.mesh.legality import size_violations
from moefold.mesh.pipeline import Stages
from moefold.mesh.shares import divisors
from moefold.model.config import Decoder
from moefold.moe.dispatch.config import (
    DISPATCH,
    AllToAll,
    Clones,
    Dispatch,
    FixedShape,
    ThirdParty,
)
from moefold.schedule.config import SCHEDULE, Interleaved, OneFOneB, Schedule, build_table
from moefold.schedule.table import Table
from moefold.spec.decoder import ModelNeeds
from moefold.spec.layer import Modules, recomputed_modules
from moefold.spec.stages import default_stages

MAX_VIRTUAL = 10_000
ONE_F_ONE_B = OneFOneB()
INTERLEAVED = Interleaved()
"""Schedules of a layout that states none, without virtual stages and with them."""

_parse_sizes = lru_cache(maxsize=4096)(Sizes.parse)


class StatePlacement(Record):
    """Where master weights and optimizer moments are stored between steps, and updated."""

    at: Literal["device", "host", "disk"] = "device"
    """``host``: memory of the rank's machine; ``disk``: a file on that machine."""
    step: Literal["device", "host"] = "device"
    """Where offloaded state is updated: on the device, to which it is fetched unit by unit, or on
    the host, which receives gradients and returns weights."""
    share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the state that is offloaded, in whole units (a layer, the embedding, the head)."""
    folder: Annotated[str, Field(min_length=1), OnDisk()] | None = None
    """Folder for ``disk``, on a fast local disk of each machine; ``$NAME`` is replaced by the
    environment variable. Each rank has a file there while it runs."""

    def rules(self) -> Iterator[Violation]:
        """State on the device is updated there; ``folder`` is set exactly for ``disk``."""
        if self.at == "device" and self.step == "host":
            yield Violation(("step",), self.step, "must be device with at: device", "device")
        if (self.at == "disk") != (self.folder is not None):
            rule = "must be set with at: disk, and only then"
            yield Violation(("folder",), self.folder, rule, None if self.folder else "./scratch")

    @property
    def is_offloaded(self) -> bool:
        """Whether any state is offloaded from the device."""
        return self.at != "device" and self.share > 0

    @property
    def offloaded_share(self) -> float:
        """Share of the state that is offloaded from the device."""
        return self.share if self.is_offloaded else 0.0


class Layout(Record):
    """How a run is split over ranks, and what is saved or offloaded; never changes the maths."""

    sizes: SizesText = ""
    """Axis sizes such as ``tp2 pp2 ep4``; an axis left out is 1."""
    order: Order = ORDERS[0]
    """Order of axes over ranks, from that of neighbouring ranks on. In the experts' grid tp stands
    for etp, dp for edp."""
    stages: StagesText | None = None
    """Content of each pipeline stage, such as ``Et*3|(tt|)*29m|L``: ``E`` is the embedding, ``t`` a
    layer, ``m`` a multi-token layer, ``L`` head and loss. ``even``: equally many layers in each.
    None: the rank with most FLOPs has least, counting head, loss and multi-token layers."""
    schedule: Annotated[Record, SCHEDULE] | None = None
    """Pipeline schedule; None is 1f1b, or interleaved with virtual stages."""
    context: Annotated[Record, CONTEXT] = Ring()
    """How attention reads the rows of other context ranks."""
    zero: Annotated[int, Field(ge=0, le=3)] = 1
    """ZeRO stage. Data ranks shard: 1 optimizer state, 2 also gradients, 3 also weights."""
    zero_ranks: Annotated[int, Field(ge=1)] | None = None
    """Number of neighbouring ranks that ZeRO shards over; such groups hold copies. None: all."""
    state: StatePlacement = StatePlacement()
    """Where master weights and moments are stored between steps."""
    dispatch: Annotated[Record, DISPATCH] = AllToAll()
    """How token rows are sent to the ranks of their experts, and back."""
    clones: Clones | None = None
    """Copies of hot experts on ranks that receive fewer rows; None makes none."""
    recompute: Annotated[Record, RECOMPUTE] | None = None
    """Activations that backward recomputes; None saves all."""
    offload: Offload | None = None
    """Activations stored in host memory or on disk between forward and backward."""
    experts: Literal["auto", "grouped", "triton", "loop"] = "auto"
    """Kernel of the experts' products: torch's grouped product, own kernels, or a loop."""
    graphs: Literal["none", "partial", "step"] = "none"
    """CUDA graphs, which reduce launches by the host. ``partial``: of each block's parts except
    exchanges, and of experts where dispatch has a fixed capacity. ``step``: of a step's forward and
    backward as one. Ignored on devices other than CUDA."""
    graph_experts: bool = True
    """Whether ``partial`` captures experts, where it can. Their graphs hold all the rows that a
    rank can receive, in each pass in flight."""

    def rules(self) -> Iterator[Violation]:
        """Each axis is named once; :meth:`violations` checks the layout against a model."""
        words = self.sizes.split()
        axes = [w.rstrip("0123456789") for w in words]
        if len(set(axes)) < len(axes):
            by_axis = dict(zip(axes, words, strict=True))
            yield Violation(
                ("sizes",), self.sizes, "must name each axis once", " ".join(by_axis.values())
            )
            return
        if any(int(w.lstrip("abcdefghijklmnopqrstuvwxyz")) > MAX_RANKS for w in words):
            rule = f"must have at most {MAX_RANKS} ranks along an axis"
            yield Violation(("sizes",), self.sizes, rule, "")
        elif self.split.smallest_world > MAX_RANKS or self.split.vpp > MAX_VIRTUAL:
            rule = f"must fit at most {MAX_RANKS} ranks, with at most vpp{MAX_VIRTUAL}"
            yield Violation(("sizes",), self.sizes, rule, "")

    def violations(self, model: ModelNeeds, rows: int | None = None) -> Iterator[Violation]:
        """Yield options that conflict with one another or with the model.

        ``rows`` is the number of rows of a micro-batch, where known.
        """
        yield from size_violations(self.split, model, order=self.order, stages=self.stages)
        if isinstance(self.context, Context):
            violations = self.context.violations(self.split, model.heads)
            yield from (violation.under("context") for violation in violations)
        if isinstance(self.dispatch, Dispatch):
            yield from (broken.under("dispatch") for broken in self.dispatch.violations(self.split))
        if isinstance(self.dispatch, FixedShape) and rows is not None:
            yield from self._capacity_violations(self.dispatch, model, rows)
        if self.clones is not None:
            yield from self._clone_violations(self.clones, model.experts)
        if self.offload is not None:
            violations = self.offload.violations(model.modules, self.recompute)
            yield from (violation.under("offload") for violation in violations)
            fixed = isinstance(self.dispatch, FixedShape) and self.split.ep * self.split.etp > 1
            if self.offload.pages is not None and not fixed:
                rule = "needs dispatch padded or spread, with ep or etp above 1: only these state "
                rule += "how many rows a rank can receive"
                yield Violation(("offload", "pages"), self.offload.pages, rule, None)
        violations = iter(())
        if isinstance(self.recompute, Selective) and not model.has_undescribed:
            violations = self.recompute.violations(model.recomputable(tp=2), self.split.tp)
        if isinstance(self.recompute, Auto):
            violations = self.recompute.violations(self.offload)
        yield from (violation.under("recompute") for violation in violations)
        yield from self._schedule_violations()
        yield from self._graph_violations(model)

    def _graph_violations(self, model: ModelNeeds) -> Iterator[Violation]:
        """Yield options that CUDA graphs cannot capture: offloading, and values the host reads."""
        if self.graphs == "none":
            return
        sizes = self.split
        recompute = self.recompute
        is_step = self.graphs == "step"
        offloads = self.offload is not None and self.offload.moves_layers
        offloads |= isinstance(recompute, Auto) and bool(recompute.host or recompute.disk)
        reads_counts = sizes.ep * sizes.etp > 1 and not isinstance(self.dispatch, FixedShape)
        is_stochastic = any(spec.is_stochastic for spec in model.specs)
        overlaps = self.resolved_schedule.overlaps_passes
        broken = (
            ("cannot be combined with offloaded activations", offloads, "none"),
            ("cannot be combined with offloaded layout.state", self.state.is_offloaded, "none"),
            ("cannot be combined with a router that draws random numbers", is_stochastic, "none"),
            (
                "must be partial with a schedule that overlaps forwards and backwards: two threads "
                "issue their kernels, and one graph records one thread",
                is_step and overlaps,
                "partial",
            ),
            (
                "must be partial with this dispatch, which reads row counts on the host; padded "
                "and spread do not",
                is_step and reads_counts,
                "partial",
            ),
        )
        for rule, wrong, nearest in broken:
            if wrong:
                yield Violation(("graphs",), self.graphs, rule, nearest)
        if not self.graph_experts and (is_step or sizes.ep * sizes.etp == 1):
            rule = "must be true unless graphs is partial and ep or etp is above 1: only exchanges "
            rule += "separate experts from the other parts of a block"
            yield Violation(("graph_experts",), False, rule, True)
        most = 2 if is_step else 1
        if self.zero > most:
            fixed = "weights" if is_step else "weights and gradients"
            rule = f"must be at most {most}: graphs: {self.graphs} needs {fixed} in fixed memory"
            yield Violation(("zero",), self.zero, rule, most)

    def schedule_violations(self, micro_batches: int) -> list[Violation]:
        """Return why the schedule cannot run ``micro_batches`` on a data rank."""
        sizes = self.split
        if sizes.pp == 1:
            return []
        found = self.resolved_schedule.violations(sizes.pp, sizes.vpp, micro_batches)
        return [violation for violation in found if violation.path == ("micro_batches",)]

    def step_violations(self, micro_batches: int) -> Iterator[Violation]:
        """Yield why the schedule cannot run a step of ``micro_batches`` in all, whatever dp is."""
        broken = [self.schedule_violations(count) for count in divisors(micro_batches)]
        if broken and all(broken):
            yield from broken[-1]

    def _capacity_violations(
        self, dispatch: FixedShape, model: ModelNeeds, rows: int
    ) -> Iterator[Violation]:
        """Yield a capacity that is too small even for perfectly balanced routing."""
        sizes = self.split
        # Only layers that never drop copies.
        routings = (s.routing for s in model.specs if not getattr(s, "drops", False))
        top_k = max((routing.top_k for routing in routings if routing is not None), default=0)
        sent = rows // (sizes.tp * sizes.cp) * top_k
        least = -(-sent // sizes.ep) if dispatch.per_pair else sent
        if sizes.ep * sizes.etp > 1 and dispatch.max_rows < least:
            where = "between two ranks" if dispatch.per_pair else "on each rank"
            rule = f"must be at least {least}, the rows {where} if routing is perfectly balanced"
            yield Violation(("dispatch", "max_rows"), dispatch.max_rows, rule, least)

    def _clone_violations(self, clones: Clones, experts: tuple[int, ...]) -> Iterator[Violation]:
        """Yield why these clones are impossible; ``experts`` counts the experts of each layer."""
        ep = self.split.ep
        if ep == 1:
            rule = "needs ep above 1: clones are on other ranks of ep"
            yield Violation(("clones",), clones, rule, None)
            return
        if isinstance(self.dispatch, ThirdParty):
            rule = f"needs another dispatch: {self.dispatch.kind} does not support clones"
            yield Violation(("clones",), clones, rule, None)
        most = min((n - n // ep for n in experts), default=clones.slots)
        if clones.slots > most:
            rule = f"must be at most {most}, the number of experts on the other ranks of ep{ep}"
            yield Violation(("clones", "slots"), clones.slots, rule, most)

    def _schedule_violations(self) -> Iterator[Violation]:
        """Yield sizes that the schedule does not support for any number of micro-batches."""
        sizes = self.split
        for violation in self.resolved_schedule.violations(sizes.pp, sizes.vpp, 2 * sizes.pp):
            if violation.path == ("vpp",) and sizes.pp == 1:
                rule = f"needs a pipeline, pp above 1, with vpp{violation.nearest}"
                yield Violation(("schedule",), self.schedule, rule, None)
            elif violation.path == ("vpp",):
                nearest = sizes.model_copy(update={"vpp": violation.nearest}).text
                yield Violation(("sizes",), self.sizes, violation.rule, nearest)
            elif violation.path == ("group",):
                yield violation.under("schedule")

    @property
    def resolved_schedule(self) -> Schedule:
        """The schedule; by default 1f1b, or interleaved with virtual stages."""
        chosen = self.schedule or (INTERLEAVED if self.split.vpp > 1 else ONE_F_ONE_B)
        assert isinstance(chosen, Schedule)
        return chosen

    def world_violations(self, world: int) -> Iterator[Violation]:
        """Yield options other than ``sizes`` that do not fit ``world`` ranks."""
        copies = world // (self.split.tp * self.split.pp)
        if self.zero and self.zero_ranks is not None and copies % self.zero_ranks:
            rule = f"must divide the {copies} ranks that hold copies of dense weights"
            yield Violation(
                ("zero_ranks",), self.zero_ranks, rule, math.gcd(copies, self.zero_ranks)
            )

    def table(self, micro_batches: int) -> Table:
        """Return the schedule's table for a step with ``micro_batches`` per data rank.

        Raises:
            RunError: outside the schedule's domain, with the nearest legal values.
        """
        sizes = self.split
        return build_table(self.resolved_schedule, sizes.pp, sizes.vpp, micro_batches)

    @property
    def stated_stages(self) -> Stages | None:
        """The stages that the layout lists, if it does."""
        return None if self.stages in (None, EVEN) else Stages.parse(self.stages)

    def stages_of(self, decoder: Decoder) -> Stages:
        """Return the stages of a model: those stated, or else chosen by its layers."""
        stated = self.stated_stages
        if stated is not None:
            return stated
        sizes = self.split
        mapping = self.resolved_schedule.stage_mapping
        if self.stages == EVEN:
            ahead = len(decoder.multi_token)
            return Stages.balanced(sizes.pp, sizes.vpp, decoder.layers, ahead, mapping)
        return default_stages(decoder, sizes.pp, sizes.vpp, mapping)

    @property
    def recomputed(self) -> Modules:
        """Kinds of module that backward recomputes; under ``auto`` all that could be chosen.

        Raises:
            ValueError: the record of a plug-in does not state them.
        """
        return recomputed_modules(self.recompute)

    @property
    def split(self) -> Sizes:
        """The sizes as numbers."""
        return _parse_sizes(self.sizes)

    @property
    def split_groups(self) -> tuple[tuple[str, int], ...]:
        """Kinds of groups split into two levels, with the number of neighbours in each subgroup."""
        context = self.context.splits(self.split) if isinstance(self.context, Context) else ()
        return context + (self.dispatch.splits if isinstance(self.dispatch, Dispatch) else ())

    @property
    def constrains_model(self) -> bool:
        """Whether the layout can conflict with a model: an axis or another such option is set."""
        chosen = self.stages, self.schedule, self.offload, self.recompute, self.clones
        named = any(option is not None for option in chosen)
        return bool(self.sizes.strip()) or named or self.graphs != "none"
