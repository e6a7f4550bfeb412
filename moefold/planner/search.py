"""Best-first search for the fastest layouts of a task that fit in memory, with lower bounds.

A layout is decided in four steps: the two grids with micro-batch and number format; the pipeline's
depth with what is sharded, recomputed and offloaded; schedule and dispatcher; stages. Each step
computes a lower bound of the seconds of a partial layout and drops what cannot fit; the partial
layout with the lowest bound is extended next. So :func:`moefold.planner.time.estimate_time` and
``planner.memory`` evaluate few of millions of layouts, and the first evaluated one that fits is the
fastest.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count, islice, product
from math import inf
from typing import Any, NamedTuple

from moefold.mesh.config import Sizes
from moefold.parallel.config import Layout, StatePlacement
from moefold.planner.case import (
    Case,
    Recipe,
    StageContents,
    balanced_stages,
    distinct_blocks,
)
from moefold.planner.layouts import DEVICE, make_dispatch, make_layout, make_offload
from moefold.planner.memory import peak_within, software_overheads
from moefold.planner.memory_chunk import two_largest, unsharded_units
from moefold.planner.memory_saved import saved_by_module, saved_tensors_of
from moefold.planner.memory_state import StateBytes, StateSharding, state_estimator
from moefold.planner.network import even_domains
from moefold.planner.recompute import MEMORY_RESERVE
from moefold.planner.reference import reference_model
from moefold.planner.search_space import (
    DISPATCHERS,
    Foldings,
    SearchSpace,
    virtual_stages,
    with_separate_multi_token,
)
from moefold.planner.task import TrainingTask
from moefold.planner.time import (
    HOST_ADAM_RATE,
    MicroBatchTime,
    PassTime,
    data_parallel_seconds,
    estimate_time,
    pipeline_seconds,
)
from moefold.planner.time_data import DataSeconds, collective_seconds, min_exposed_seconds
from moefold.planner.time_exchange import (
    EXCHANGE_SM_COST,
    block_exchange_seconds,
    tensor_seconds,
)
from moefold.planner.time_layer import (
    WorkTime,
    frozen_weights,
    layer_time,
    sublayer_seconds,
)
from moefold.planner.time_work import (
    PERMUTING_DISPATCHERS,
    KernelSetting,
    LayerPolicy,
    build_setting,
    work_shape,
)
from moefold.planner.untrained import without_feed_forward
from moefold.schedule.config import Schedule
from moefold.spec.decoder import has_routing, model_weights
from moefold.spec.forward_only import num_passes
from moefold.spec.layer import Modules, Shape, as_layer_spec

MEMORY_SLACK = 1.1
"""Memory of balanced stages over the limit at which stages of equal time are still tried."""

LEAST_FORWARD = 0.9
"""Share of a forward without exchanges that is counted in its lower bound."""

RecomputeOffload = tuple[Modules, Modules]
"""Modules that are recomputed, and modules whose activations are offloaded to the host."""
NO_RECOMPUTE_OFFLOAD: RecomputeOffload = (frozenset(), frozenset())
UNLIMITED_OVERLAP = MicroBatchTime(1e9, 1e9, {}, 0.0)
"""A micro-batch long enough to hide all communication that can overlap with compute."""


@dataclass(frozen=True)
class FoundLayout:
    """A layout that fits in memory."""

    case: Case = field(repr=False)
    seconds: float
    """Planned seconds of a step."""
    peak_bytes: float
    """Peak memory of the fullest rank."""


class Grids(NamedTuple):
    """Format, micro-batch and the sizes of both grids without pipeline."""

    recipe: Recipe
    micro_batch: int
    tp: int
    cp: int
    ep: int = 1
    etp: int = 1

    def sizes(self, pp: int, vpp: int = 1) -> Sizes:
        """Return the sizes with a pipeline; unchecked, as the search tries only legal ones."""
        tp, cp, ep, etp = self[2:]
        return Sizes.model_construct(tp=tp, cp=cp, pp=pp, vpp=vpp, ep=ep, etp=etp)


class PipelineDepth(NamedTuple):
    """Grids with a pipeline's depth, sharding, and alternatives of recompute and offload."""

    grids: Grids
    pp: int
    num_micro_batches: int
    """Micro-batches per data rank."""
    zero: int
    """ZeRO stage."""
    state: StatePlacement
    """Where optimizer state is."""
    alternatives: tuple[RecomputeOffload, ...]
    """The recompute and offload of this layout, then those that save less and take longer."""


class PipelineLayout(NamedTuple):
    """All of a layout but the contents of its stages."""

    depth: PipelineDepth
    schedule: Schedule
    vpp: int
    dispatch: str
    """Kind of the dispatcher."""

    @property
    def folding_sizes(self) -> tuple[int, ...]:
        """Sizes without virtual stages."""
        grids = self.depth.grids
        return grids.tp, grids.cp, self.depth.pp, grids.ep, grids.etp


def folding_sizes(sizes: Sizes) -> tuple[int, ...]:
    """Return sizes without virtual stages; lists contain one layout per folding."""
    return sizes.tp, sizes.cp, sizes.pp, sizes.ep, sizes.etp


class Search:
    """Searches of one task, with a common cache."""

    def __init__(self, task: TrainingTask) -> None:
        """Count the task's layers, and separate routed experts from the rest of their layers."""
        self.task = task
        self.foldings = Foldings.for_task(task)
        blocks, order = distinct_blocks(task.decoder)
        layers = Counter(order)
        self.most_common = layers.most_common(1)[0]
        """The most common kind of layer, and its number."""
        self.all_layers = StageContents(tuple(sorted(layers.items())), task.multi_token, True, True)
        self.block_counts = [(blocks[kind], number) for kind, number in layers.items()]
        """The kinds of layers with their numbers, multi-token ones included."""
        routed = [(block, n) for block, n in self.block_counts if has_routing(block.ffn)]
        # The time of shared experts depends on the attention grid, that of routed ones on theirs.
        self.moe_ffns = [
            (
                b.ffn,
                b.ffn.model_copy(update={"shared": None}),
                (
                    frozen_weights(b, "ffn", as_layer_spec(b.ffn)),
                    num_passes(b) == 2,
                ),
                n,
            )
            for b, n in routed
        ]
        """MoE feed-forwards with shared experts and without, their frozen weights and whether they
        have a backward, and numbers."""
        bare = [(without_feed_forward(block), n) for block, n in routed]
        self.moe_blocks = [(block, *rest) for (block, _), rest in zip(routed, bare, strict=True)]
        """MoE blocks, these without a feed-forward, and their numbers."""
        dense = [(block, n) for block, n in self.block_counts if not has_routing(block.ffn)]
        self.dense_blocks = bare + dense
        self.num_trained = sum(w.elements for w in model_weights(task.decoder) if not w.frozen)
        self._cache: dict[Any, Any] = {}

    def best(self, space: SearchSpace, top: int = 5) -> list[FoundLayout]:
        """Return the fastest layouts that fit, one per folding, the fastest first.

        Args:
            space: values to search over.
            top: number of layouts.
        """
        return list(islice(self.iter_fitting(space), top))

    def iter_fitting(self, space: SearchSpace) -> Iterator[FoundLayout]:
        """Yield the layouts of a space that fit, one per folding, the fastest first."""
        limit = self.task.cluster.device.memory_bytes * (1 - MEMORY_RESERVE)
        steps = (self.depths, self.schedules, self.stages)
        yielded = set[tuple[int, ...]]()
        tie_breaker = count()
        # Partial layouts: lower bound of seconds, tie breaker, index of the next step, layout.
        heap: list[tuple[float, int, int, Any]] = []
        extended: Iterable[tuple[float, int, Any]] = self.grids(space)
        while True:
            for bound, step, layout in extended:
                heapq.heappush(heap, (bound, next(tie_breaker), step, layout))
            if not heap:
                return
            bound, _, step, layout = heapq.heappop(heap)
            extended = ()
            if step == 2 and layout.folding_sizes in yielded:
                continue
            if step < len(steps):
                extended = steps[step](space, layout, limit)
                continue
            folding = folding_sizes(layout.sizes)
            if folding in yielded:
                continue
            peak = peak_within(layout, limit)
            if peak is not None:
                yielded.add(folding)
                yield FoundLayout(layout, bound, peak)

    def least_memory(self, space: SearchSpace) -> FoundLayout | None:
        """Return the layout with the least memory on its fullest rank; None if none is legal.

        Stages are balanced, with the fewest virtual ones, and of recompute and offload the two
        choices are tried that save least. Tensor parallelism stays within fast links, and is used
        in experts only where there are no more of them to divide.
        """
        best: FoundLayout | None = None
        for bound, depth in sorted(self._memory_bounds(space), key=lambda entry: entry[0]):
            if best is not None and bound >= best.peak_bytes:
                break
            for case in self._least_cases(space, depth):
                peak = peak_within(case, best.peak_bytes if best else inf)
                if peak is not None and (best is None or peak < best.peak_bytes):
                    best = FoundLayout(case, inf, peak)
        return best and replace(best, seconds=estimate_time(best.case).seconds)

    def first_within(self, space: SearchSpace, limit: float) -> FoundLayout | None:
        """Return some layout of those that :meth:`least_memory` tries that needs at most ``limit``
        bytes, or None.
        """
        for bound, depth in self._memory_bounds(space):
            for case in self._least_cases(space, depth) if bound <= limit else ():
                peak = peak_within(case, limit)
                if peak is not None:
                    return FoundLayout(case, estimate_time(case).seconds, peak)
        return None

    def _memory_bounds(self, space: SearchSpace) -> Iterator[tuple[float, PipelineDepth]]:
        """Yield pipeline depths, each with a lower bound of the bytes of its fullest rank."""
        software = software_overheads(self.task.cluster.device)
        foldings = self.foldings
        for recipe, size, (tp, cp) in product(
            space.recipes, space.micro_batches, foldings.attention_grids
        ):
            if tp > max(self.task.cluster.domain, min(foldings.tp)):
                continue
            pairs = foldings.expert_grids(tp, cp)
            for ep, etp in [pair for pair in pairs if pair[1] == 1 or pair[0] == foldings.ep[-1]]:
                grids = Grids(recipe, size, tp, cp, ep, etp)
                options = self._recompute_options(space, grids)[-2:]
                saving = tuple(option for option, _ in options)
                for pp in foldings.pipeline_sizes(tp, cp, ep, etp):
                    m = self.num_micro_batches(grids, pp)
                    for zero, state in space.zero_and_states(pp) if m else ():
                        total = self._state_bytes(grids, pp, m, zero, state)
                        total += options[-1][1] * min(m, pp)
                        least = max(total / pp, self._least_state(grids, pp, zero, state))
                        bound = least * (1 + software.fragmentation) + software.context
                        yield bound, PipelineDepth(grids, pp, m, zero, state, saving)

    def _least_cases(self, space: SearchSpace, depth: PipelineDepth) -> Iterator[Case]:
        """Yield the cases of a depth with balanced stages, for each schedule and each choice of
        recompute and offload.
        """
        pp = depth.pp
        exchanges = depth.grids.ep * depth.grids.etp > 1
        dispatch = space.dispatchers[0] if exchanges else "local"
        for schedule, option in product(space.schedules, depth.alternatives):
            chosen = depth._replace(alternatives=(option,))
            numbers = virtual_stages(schedule, pp, depth.num_micro_batches, self.foldings.layers)
            for vpp in numbers[:1]:
                layout = self._make_layout(PipelineLayout(chosen, schedule, vpp, dispatch))
                yield self.task.case(layout, depth.grids.micro_batch, depth.grids.recipe)

    # --------------------------------------------------------------------------- steps

    def grids(self, space: SearchSpace) -> Iterator[tuple[float, int, Grids]]:
        """Yield every format, micro-batch and pair of grids, with a lower bound of step time."""
        foldings = self.foldings
        for recipe, micro_batch, (tp, cp) in product(
            space.recipes, space.micro_batches, foldings.attention_grids
        ):
            attention = Grids(recipe, micro_batch, tp, cp)
            if not any(self.num_micro_batches(attention, pp) for pp in foldings.pp):
                continue
            # A rank's micro-batches times its share of the layers, which does not depend on pp.
            passes = self.task.batch * tp * cp / (foldings.world * micro_batch)
            dense = self._dense_seconds(attention)
            experts = self._expert_seconds(space, attention)
            for ep, etp in foldings.expert_grids(tp, cp):
                bound = (dense + experts[ep, etp]) * passes + self._fixed_seconds(attention, DEVICE)
                yield bound, 0, Grids(recipe, micro_batch, tp, cp, ep, etp)

    def depths(
        self, space: SearchSpace, grids: Grids, limit: float
    ) -> Iterator[tuple[float, int, PipelineDepth]]:
        """Yield every pipeline depth with the recompute and offload choices that could fit."""
        software = software_overheads(self.task.cluster.device)
        tensor_limit = (limit - software.context) / (1 + software.fragmentation)
        # Bytes that are left for a micro-batch's activations in all layers.
        rooms = list[tuple[float, int, int, int, StatePlacement]]()
        for pp in self.foldings.pipeline_sizes(grids.tp, grids.cp, grids.ep, grids.etp):
            m = self.num_micro_batches(grids, pp)
            for zero, state in space.zero_and_states(pp) if m else ():
                free = tensor_limit * pp - self._state_bytes(grids, pp, m, zero, state)
                if free >= 0 and self._least_state(grids, pp, zero, state) <= tensor_limit:
                    rooms.append((free / min(m, pp), pp, m, zero, state))
        if not rooms:
            return
        options = self._recompute_options(space, grids, max(rooms, key=lambda room: room[0])[0])
        for room, pp, m, zero, state in rooms:
            fitting = tuple(option for option, size in options if size <= room)
            if fitting:
                depth = PipelineDepth(grids, pp, m, zero, state, fitting)
                yield self.lower_bound(space, depth), 1, depth

    def schedules(
        self, space: SearchSpace, depth: PipelineDepth, limit: float
    ) -> Iterator[tuple[float, int, Any]]:
        """Yield every schedule with virtual stages and dispatcher, and a depth that saves less."""
        grids = depth.grids
        pp = depth.pp
        m = depth.num_micro_batches
        option, *further = depth.alternatives
        if further:
            less_saved = depth._replace(alternatives=tuple(further))
            yield self.lower_bound(space, less_saved), 1, less_saved
        for dispatch, paired in self._fastest_dispatchers(space, grids):
            total, slowest = self._pass_bounds(grids, dispatch, paired, option, pp)
            ranks = [slowest] + [(total - slowest) / (pp - 1)] * (pp - 1) if pp > 1 else [total]
            outside = self._outside_seconds(depth, slowest)
            for schedule in space.schedules:
                if schedule.overlaps_passes != paired and dispatch != "local":
                    continue
                for vpp in virtual_stages(schedule, pp, m, self.foldings.layers):
                    partial = PipelineLayout(depth, schedule, vpp, dispatch)
                    later = self._reference_seconds(depth, vpp) - self._reference_seconds(depth, 1)
                    yield pipeline_seconds(schedule, m, vpp, ranks) + outside + later, 2, partial

    def stages(
        self, space: SearchSpace, partial: PipelineLayout, limit: float
    ) -> Iterator[tuple[float, int, Case]]:
        """Yield the case of a layout and its step time, where it may fit: with balanced stages,
        with stages of equal time, and with these but multi-token layers off the stage of the loss.
        """
        grids = partial.depth.grids
        layout = self._make_layout(partial)
        case = self.task.case(layout, grids.micro_batch, grids.recipe)
        sizes = case.sizes
        if peak_within(case, limit * MEMORY_SLACK) is None:
            return
        step_time = estimate_time(case)
        yield step_time.seconds, 3, case
        seconds = [sum(passes) for passes in step_time.ranks]
        layers = [contents.num_layers for contents in case.contents.ranks]
        loss_rank = 0 if case.schedule.stage_mapping == "v" and sizes.vpp % 2 == 0 else sizes.pp - 1
        per_layer = [seconds[rank] / n for rank, n in enumerate(layers) if n and rank != loss_rank]
        if not per_layer:  # also without a pipeline
            return
        layer = max(per_layer)
        last = round((seconds[loss_rank] - layers[loss_rank] * layer) / layer, 1)
        first = 0.0 if loss_rank == 0 else round((seconds[0] - layers[0] * layer) / layer, 1)
        equal_time = balanced_stages(
            sizes.pp, sizes.vpp, self.foldings.layers, self.task.multi_token,
            case.schedule.stage_mapping, (first, last),
        )  # fmt: skip
        separate = with_separate_multi_token(equal_time)
        for stages in filter(None, (equal_time, separate)):
            placed = layout.model_copy(update={"stages": stages.text})
            placed_case = replace(case, layout=placed)
            yield estimate_time(placed_case).seconds, 3, placed_case

    def _make_layout(self, partial: PipelineLayout) -> Layout:
        depth = partial.depth
        recompute, offload = depth.alternatives[0]
        sizes = depth.grids.sizes(depth.pp, partial.vpp)
        domains = even_domains(self.task.cluster, sizes.ep, sizes.etp)
        return make_layout(
            sizes,
            schedule=partial.schedule,
            dispatch=make_dispatch(partial.dispatch, sizes.ep // domains),
            zero=depth.zero,
            recompute=recompute,
            offload=offload,
            state=depth.state,
        )

    # --------------------------------------------------------------------------- time

    def num_micro_batches(self, grids: Grids, pp: int) -> int:
        """Return the micro-batches of a data rank; 0 where the batch cannot be divided evenly."""
        share = self.foldings.world // (grids.tp * grids.cp * pp) * grids.micro_batch
        return 0 if self.task.batch % share else self.task.batch // share

    def _dense_seconds(self, grids: Grids) -> float:
        """Return device seconds of one micro-batch without routed experts."""
        inputs = self._layer_inputs(grids, "local")
        ends = PassTime(self.task.decoder, *inputs).layers_time(StageContents((), 0, True, True))
        total = (1 + self.task.multi_token) * ends.device_seconds
        total += sum(n * layer_time(b, *inputs).device_seconds for b, n in self.dense_blocks)
        for ffn, routed_only, passes, n in self.moe_ffns:
            both, routed = (
                sublayer_seconds(part, *inputs[:2], *passes) for part in (ffn, routed_only)
            )
            total += n * (both - routed)
        for *blocks, n in self.moe_blocks if grids.tp > 1 else ():
            both, attention = (
                sum(tensor_seconds(b, *inputs[:2], frozenset())[: num_passes(b)]) for b in blocks
            )
            total += n * (both - attention)
        return total

    def _expert_seconds(self, space: SearchSpace, attention: Grids) -> dict[tuple[int, int], float]:
        """Return, for each (ep, etp), device seconds of routed experts and least exposed seconds of
        exchanges; cached for all attention grids with equally many rows per rank.
        """
        rows = attention.micro_batch / (attention.tp * attention.cp)
        key = "experts", attention.recipe, rows, space.dispatchers, *space.paired_values
        if key not in self._cache:
            seconds = {}
            for ep, etp in product(self.foldings.ep, self.foldings.etp):
                grids = attention._replace(ep=ep, etp=etp)
                shape, setting, _ = self._layer_inputs(grids, PERMUTING_DISPATCHERS[0])
                overlap = True in space.paired_values
                hidden = setting.rates.hidden * (1.0 - EXCHANGE_SM_COST) if overlap else 0.0
                experts = sum(
                    n * sublayer_seconds(ffn, shape, setting, *passes)
                    for _, ffn, passes, n in self.moe_ffns
                )
                least = min(self._exchange_seconds(grids, name) for name in space.dispatchers)
                seconds[ep, etp] = experts + least * (1.0 - hidden)
            self._cache[key] = seconds
        return self._cache[key]

    def _exchange_seconds(self, grids: Grids, dispatch: str) -> float:
        """Return the seconds of dispatches and combines of every layer, in each of its passes."""
        shape, setting, _ = self._layer_inputs(grids, dispatch)
        return sum(
            n * num_passes(block) * block_exchange_seconds(block, shape, setting, dispatch)
            for block, _, n in self.moe_blocks
        )

    def _fastest_dispatchers(self, space: SearchSpace, grids: Grids) -> list[tuple[str, bool]]:
        """Return the fastest dispatchers without and with overlap with another micro-batch."""
        if grids.ep * grids.etp == 1:
            return [("local", False)]
        key = "dispatchers", grids, space.dispatchers, *space.paired_values
        if key not in self._cache:
            self._cache[key] = []
            # Among those that permute rows, and among the others, exchanges make the difference.
            fastest = dict[bool, tuple[float, str]]()
            for dispatch in space.dispatchers:
                permutes = dispatch in PERMUTING_DISPATCHERS
                seconds = self._exchange_seconds(grids, dispatch)
                if seconds < fastest.get(permutes, (inf,))[0]:
                    fastest[permutes] = seconds, dispatch
            for paired in space.paired_values:
                bounds = {
                    dispatch: self._pass_bounds(grids, dispatch, paired, NO_RECOMPUTE_OFFLOAD, 1)
                    for _, dispatch in fastest.values()
                }
                self._cache[key].append((min(bounds, key=bounds.__getitem__), paired))
        return self._cache[key]

    def _pass_bounds(
        self, grids: Grids, dispatch: str, paired: bool, option: RecomputeOffload, pp: int
    ) -> tuple[float, float]:
        """Return a micro-batch's seconds in all layers, and a lower bound of the slowest rank's.

        Some rank has its share of the most common layers, rounded up.
        """
        key = "passes", grids, dispatch, option
        if key not in self._cache:
            passes = PassTime(self.task.decoder, *self._layer_inputs(grids, dispatch, option))
            one_layer = StageContents(((self.most_common[0], 1),))
            times = [passes.layers_time(contents) for contents in (self.all_layers, one_layer)]
            self._cache[key] = [
                [passes.micro_batch_time(time, overlap).seconds for time in times]
                for overlap in (False, True)
            ]
        total, layer = self._cache[key][paired]
        return total, max(total / pp, -(-self.most_common[1] // pp) * layer)

    def lower_bound(self, space: SearchSpace, depth: PipelineDepth) -> float:
        """Return a lower bound of a depth's seconds with any schedule."""
        grids = depth.grids
        pp = depth.pp
        option = depth.alternatives[0]
        slowest = min(
            self._pass_bounds(grids, dispatch, paired, option, pp)[1]
            for dispatch, paired in self._fastest_dispatchers(space, grids)
        )
        return slowest * depth.num_micro_batches + self._outside_seconds(depth, slowest)

    def _outside_seconds(self, depth: PipelineDepth, slowest: float) -> float:
        """Return a lower bound of seconds outside passes, with exposed data-parallel communication,
        if the slowest rank's passes take ``slowest`` or longer: a longer pass hides less than it
        adds.

        A pipeline's slowest rank has at least its share of the layers' time, without model ends.
        """
        grids = depth.grids
        pp = depth.pp
        key = ("data", depth.grids, depth.pp, depth.zero)
        rates = self._setting(grids.recipe).rates
        if key not in self._cache:
            passes = PassTime(self.task.decoder, *self._layer_inputs(grids, "local"))
            contents = self.all_layers
            share = 1.0
            if pp > 1:
                contents = StageContents(self.all_layers.layers)
                model = passes.layers_time(self.all_layers).device_seconds
                layers = passes.layers_time(contents).device_seconds
                share = max(0.0, model / pp - (model - layers)) / layers
            case = self._one_batch_case(grids, pp, depth.zero)
            if self.task.software.stack == "moefold":
                work = collective_seconds(case, contents, rates)
                self._cache[key] = DataSeconds(*(share * seconds for seconds in work))
            else:
                rank = WorkTime()
                rank.add(passes.layers_time(contents), share)
                seconds = data_parallel_seconds(case, rank, contents, UNLIMITED_OVERLAP, rates)[0]
                self._cache[key] = DataSeconds(**{"between" if depth.zero == 3 else "end": seconds})
        m = depth.num_micro_batches
        exposed = min_exposed_seconds(self._cache[key], depth.zero, m, slowest, rates)
        return self._fixed_seconds(grids, depth.state) + exposed + self._reference_seconds(depth, 1)

    def _reference_seconds(self, depth: PipelineDepth, vpp: int) -> float:
        """Return a lower bound of the seconds of a reference's forwards: for each, the slowest
        rank's share or, with virtual stages, all from its first stage to its last.
        """
        decoder = reference_model(self.task.reference, self.task.decoder)
        if decoder is None:
            return 0.0
        key = "reference", depth.grids
        if key not in self._cache:
            contents = StageContents(tuple(sorted(Counter(distinct_blocks(decoder)[1]).items())))
            forward = list[float]()
            for name in DISPATCHERS if depth.grids.ep * depth.grids.etp > 1 else ("local",):
                shape, setting, policy = self._layer_inputs(depth.grids, name)
                passes = PassTime(decoder, shape._replace(hidden=decoder.hidden), setting, policy)
                parts = passes.layers_time(contents).forward
                forward.append(sum(parts.values()) - parts.get("dispatch", 0.0))
            self._cache[key] = LEAST_FORWARD * min(forward)
        between = (depth.pp * (vpp - 1) + 1) / (depth.pp * vpp)
        return depth.num_micro_batches * self._cache[key] * between

    def _fixed_seconds(self, grids: Grids, state: StatePlacement) -> float:
        """Return a lower bound of seconds outside layers, including updates on the host."""
        step = self._setting(grids.recipe).rates.step_s
        on_host = state.offloaded_share if state.step == "host" else 0.0
        return step + on_host * self.num_trained / self.foldings.world / HOST_ADAM_RATE

    # --------------------------------------------------------------------------- memory

    def _state_bytes(
        self, grids: Grids, pp: int, m: int, zero: int, placement: StatePlacement
    ) -> float:
        """Return the bytes of state on all ranks of a pipeline at the peak of activations, with
        gradients unless the first backward, after the peak of few micro-batches, allocates them.
        """
        state, unsharded, _ = self._state(grids, pp, zero, placement)
        late_gradients = self.task.software.stack == "moefold" and zero < 2 and m < 2 * pp
        constant = state.total - (state.gradients if late_gradients else 0.0)
        # Unsharded tensors of a pass are in use at the peak; a pipeline's rank has a part of them.
        return constant + unsharded

    def _least_state(self, grids: Grids, pp: int, zero: int, placement: StatePlacement) -> float:
        """Return a lower bound of the bytes of the fullest rank's state, with all gradients, as at
        the optimizer's step: some rank has its share of the most common layers, rounded up.
        """
        state, _, layer = self._state(grids, pp, zero, placement)
        return max(state.total / pp, -(-self.most_common[1] // pp) * layer)

    def _state(
        self, grids: Grids, pp: int, zero: int, placement: StatePlacement
    ) -> tuple[StateBytes, float, float]:
        """Return the state of all ranks of a pipeline, the bytes of unsharded tensors of a pass
        without a pipeline, and the bytes of state of one of the most common layers.
        """
        key = "state", grids._replace(micro_batch=1, cp=1), pp, zero, placement
        if key not in self._cache:
            case = self._one_batch_case(grids, pp, zero, placement)
            sharding = StateSharding.of(case)
            estimator = state_estimator(case.decoder, sharding)
            layer = estimator.part_state(self.most_common[0]).total
            inputs = (case.decoder, sharding, self.all_layers)
            unsharded = sum(map(two_largest, unsharded_units(*inputs))) if pp == 1 else 0.0
            self._cache[key] = estimator.rank_state(self.all_layers), unsharded, layer
        return self._cache[key]

    def _recompute_options(
        self, space: SearchSpace, grids: Grids, most: float = inf
    ) -> list[tuple[RecomputeOffload, float]]:
        """Return recompute and offload choices by rising work, with falling bytes of all layers,
        which are at most ``most``.
        """
        # All ep > 1 are alike; with ep = 1 there are also copies of rows that recompute drops.
        wide = grids._replace(ep=max(self.foldings.ep)) if grids.ep * grids.etp > 1 else grids
        sizes = self._saved_bytes(space, grids, wide)
        fitting = {option: size for option, size in sizes.items() if size <= most}
        key = "recompute", wide, space.recompute_offload_pairs, len(fitting)
        if key not in self._cache:
            by_work = [(self._work(wide, option), size, option) for option, size in fitting.items()]
            options: list[tuple[RecomputeOffload, float]] = []
            for _, size, option in sorted(by_work, key=lambda entry: entry[:2]):
                if not options or size < options[-1][1]:
                    options.append((option, size))
            self._cache[key] = options
        return self._cache[key]

    def _saved_bytes(
        self, space: SearchSpace, grids: Grids, alike: Grids
    ) -> dict[RecomputeOffload, float]:
        """Return the bytes that all layers save with each recompute and offload, without those in
        which recompute of some module saves nothing; ``alike`` are the same for alike grids.
        """
        key = "saved", alike, space.recompute_offload_pairs
        if key not in self._cache:
            case = self._one_batch_case(grids)
            saved = [(part, n) for b, n in self.block_counts for part in saved_tensors_of(case, b)]
            recomputes = dict.fromkeys(recompute for recompute, _ in space.recompute_offload_pairs)
            by_module = {recompute: saved_by_module(saved, recompute) for recompute in recomputes}
            all_sizes: dict[RecomputeOffload, float] = {}
            sizes: dict[RecomputeOffload, float] = {}
            for option in space.recompute_offload_pairs:
                recompute, offload = option
                modules = by_module[recompute]
                size = modules.total() - sum(modules[module] for module in offload)
                all_sizes[option] = size
                fewer = (all_sizes.get((recompute - {module}, offload)) for module in recompute)
                if size not in fewer:
                    sizes[option] = size
            self._cache[key] = sizes
        return self._cache[key]

    def _work(self, grids: Grids, option: RecomputeOffload) -> float:
        """Return a micro-batch's seconds in all layers with a recompute and offload."""
        key = "work", grids, option
        if key not in self._cache:
            passes = PassTime(self.task.decoder, *self._layer_inputs(grids, "local", option))
            time = passes.layers_time(self.all_layers)
            self._cache[key] = passes.micro_batch_time(time, False).seconds
        return self._cache[key]

    # --------------------------------------------------------------------------- inputs

    def _layer_inputs(
        self, grids: Grids, dispatch: str, option: RecomputeOffload = NO_RECOMPUTE_OFFLOAD
    ) -> tuple[Shape, KernelSetting, LayerPolicy]:
        """Return the inputs of a layer's time."""
        task = self.task
        shape = work_shape(
            task.decoder.hidden, task.seq, grids.micro_batch, grids, task.load, dispatch
        )
        recompute, offload = option
        policy = LayerPolicy(dispatch, recompute, make_offload(offload))
        return shape, self._setting(grids.recipe), policy

    def _setting(self, recipe: Recipe) -> KernelSetting:
        """Return the setting of kernels, cached by format."""
        if recipe not in self._cache:
            task = self.task
            options = task.number_formats.recipe_options
            self._cache[recipe] = build_setting(task.cluster, task.software, recipe, options)
        return self._cache[recipe]

    def _one_batch_case(
        self, grids: Grids, pp: int = 1, zero: int = 1, state: StatePlacement = DEVICE
    ) -> Case:
        """Return a case with one micro-batch on every data rank."""
        dp = self.foldings.world // (grids.tp * grids.cp * pp)
        task = replace(self.task, batch=dp * grids.micro_batch)
        layout = make_layout(grids.sizes(pp), zero=zero, state=state)
        return task.case(layout, grids.micro_batch, grids.recipe)
