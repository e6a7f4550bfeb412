"""Best-first search for the fastest layouts of a task that fit in memory, with lower bounds.

A layout is decided in four steps: the two grids with micro-batch and number format; the pipeline's
depth with what is sharded, recomputed and offloaded; schedule and dispatcher; stages. Each step
computes a lower bound of the seconds of a partial layout and drops what cannot fit; the partial
layout with the lowest bound is extended next. So :func:`moefold.planner.time.estimate` and
``planner.memory`` evaluate few of millions of layouts, and the first evaluated one that fits is the
fastest.
"""

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count, islice, product
from typing import Any, NamedTuple

from moefold.mesh.config import Sizes
from moefold.planner.case import (
    Case,
    Dispatcher,
    MemoryPolicy,
    Recipe,
    StageContents,
    distinct_blocks,
)
from moefold.planner.memory import peak_within, software_overheads
from moefold.planner.memory_chunk import two_largest, unsharded_units
from moefold.planner.memory_saved import saved_tensors_of
from moefold.planner.memory_state import StateSharding, state_estimator
from moefold.planner.recompute import MEMORY_RESERVE
from moefold.planner.search_space import (
    MAX_VIRTUAL_STAGES,
    SCHEDULES,
    Foldings,
    SearchSpace,
    with_separate_multi_token,
)
from moefold.planner.task import LayoutChoice, TrainingTask, balanced_stages
from moefold.planner.time import (
    HOST_ADAM_RATE,
    MicroBatchTime,
    PassTime,
    data_parallel_seconds,
    estimate_time,
    pipeline_seconds,
)
from moefold.planner.time_data import DataSeconds, collective_seconds, min_exposed_seconds
from moefold.planner.time_layer import (
    EXCHANGE_SM_COST,
    KernelSetting,
    WorkTime,
    build_setting,
    dispatch_seconds,
    dispatched_rows,
    half_seconds,
    layer_time,
    tensor_seconds,
)
from moefold.planner.time_work import PERMUTING_DISPATCHERS, LayerPolicy, RankShare
from moefold.planner.untrained import AbsentLayer, make_block
from moefold.schedule.config import Interleaved, OneFOneB, Schedule, VShapedSchedule, ZeroBubbleH1
from moefold.spec.decoder import has_routing, model_weights
from moefold.spec.layer import Modules, as_layer_spec

MEMORY_SLACK = 1.1
"""Memory of balanced stages over the limit at which stages of equal time are still tried."""

RecomputeOffload = tuple[Modules, Modules]
"""What is recomputed, and what is offloaded to the host."""
NOTHING: RecomputeOffload = (frozenset(), frozenset())
UNLIMITED_OVERLAP = MicroBatchTime(1e9, 1e9, {}, 0.0)
"""A micro-batch long enough to hide all communication that can overlap with compute."""
_HeapEntry = tuple[float, int, int, Any]
"""A partial layout: bound of its seconds, a tie breaker, index of the next step, and the layout."""


@dataclass(frozen=True)
class FoundLayout:
    """A layout that fits."""

    choice: LayoutChoice
    case: Case = field(repr=False)
    seconds: float
    peak_bytes: float
    """Memory of the fullest rank."""


class Grids(NamedTuple):
    """Inputs of a micro-batch's work except dispatcher, recompute and offload."""

    recipe: Recipe
    micro_batch: int
    tp: int
    cp: int
    ep: int = 1
    etp: int = 1

    def sizes(self, pp: int, vpp: int = 1) -> Sizes:
        """Return the sizes with a pipeline, without checks, as the search tries only legal ones."""
        tp, cp, ep, etp = self[2:]
        return Sizes.model_construct(tp=tp, cp=cp, pp=pp, vpp=vpp, ep=ep, etp=etp)


class PipelineDepth(NamedTuple):
    """Grids in a pipeline of some depth, with alternatives of recompute and offload."""

    grids: Grids
    pp: int
    num_micro_batches: int
    """Micro-batches per data rank."""
    zero: int
    host_share: float
    """Share of optimizer state on the host."""
    alternatives: tuple[RecomputeOffload, ...]
    """The recompute and offload of this layout, then those that save less and take longer."""


class Search:
    """Searches of one task, with a common cache."""

    def __init__(self, task: TrainingTask) -> None:
        self.task, self.foldings = task, Foldings.for_task(task)
        blocks, order = distinct_blocks(task.decoder)
        layers = Counter(order)
        self.most_common = layers.most_common(1)[0]
        """The most common kind of layer, and its number."""
        self.all_layers = StageContents(tuple(sorted(layers.items())), task.multi_token, True, True)
        self.blocks = [(blocks[kind], number) for kind, number in layers.items()]
        """The kinds of layers with their numbers, multi-token ones included."""
        routed = [(one, number) for one, number in self.blocks if has_routing(one.ffn)]
        # The time of shared experts depends on the attention grid, that of routed ones on theirs.
        self.mixtures = [
            (one.ffn, one.ffn.model_copy(update={"shared": None}), number) for one, number in routed
        ]
        self.dense = [(make_block(one.attention, AbsentLayer()), number) for one, number in routed]
        self.routed = [(one, *bare) for (one, _), bare in zip(routed, self.dense, strict=True)]
        self.dense += [(one, number) for one, number in self.blocks if not has_routing(one.ffn)]
        self.parameters = sum(weight.elements for weight in model_weights(task.decoder))
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
        room = self.task.cluster.device.memory_bytes * (1 - MEMORY_RESERVE)
        found = set[tuple[int, ...]]()
        steps = (self.depths, self.schedules, self.stages)
        heap: list[_HeapEntry] = []
        tie = count()

        def push(items: Iterator[tuple[float, int, Any]]) -> None:
            for bound, step, item in items:
                heapq.heappush(heap, (bound, next(tie), step, item))

        push(self.grids(space))
        while heap:
            bound, _, step, item = heapq.heappop(heap)
            if step >= 2 and item.folding_sizes in found:
                continue
            if step < len(steps):
                push(steps[step](space, item, room))
                continue
            case = item.build_case(self.task)
            needed = peak_within(case, room)
            if needed is not None:
                found.add(item.folding_sizes)
                yield FoundLayout(item, case, bound, needed)

    # --------------------------------------------------------------------------- steps

    def grids(self, space: SearchSpace) -> Iterator[tuple[float, int, Grids]]:
        """Yield every format, micro-batch and pair of grids, with a lower bound of step time."""
        foldings = self.foldings
        for recipe, size, (tp, cp) in product(
            space.recipes, space.micro_batches, foldings.attention_grids
        ):
            attention = Grids(recipe, size, tp, cp)
            if not any(self.num_micro_batches(attention, pp) for pp in foldings.pp):
                continue
            # Runs of a rank's share of layers times that share, which does not depend on pp.
            turns = self.task.batch * tp * cp / (foldings.world * size)
            dense, experts = self._dense_seconds(attention), self._expert_seconds(space, attention)
            for ep, etp in foldings.expert_grids(tp, cp):
                bound = (dense + experts[ep, etp]) * turns + self._fixed_seconds(attention, 0.0)
                yield bound, 0, Grids(recipe, size, tp, cp, ep, etp)

    def depths(
        self, space: SearchSpace, grids: Grids, room: float
    ) -> Iterator[tuple[float, int, PipelineDepth]]:
        """Yield every pipeline depth with the recompute and offload choices that could fit."""
        software = software_overheads(self.task.cluster.device)
        options = self._recompute_options(space, grids)
        tensors = (room - software.context) / (1 + software.fragmentation)
        for pp in self.foldings.pipeline_sizes(grids.tp, grids.cp, grids.ep, grids.etp):
            m = self.num_micro_batches(grids, pp)
            for zero, on_host in space.zero_and_host_shares(pp) if m else ():
                left = tensors * pp - self._state_bytes(grids, pp, m, zero, on_host)
                kept = tuple(one for one, size in options if size * min(m, pp) <= left)
                if kept:
                    depth = PipelineDepth(grids, pp, m, zero, on_host, kept)
                    yield self.lower_bound(space, depth), 1, depth

    def schedules(
        self, space: SearchSpace, depth: PipelineDepth, room: float
    ) -> Iterator[tuple[float, int, Any]]:
        """Yield every schedule with virtual stages and dispatcher, and a depth that saves less."""
        grids, pp, m = depth.grids, depth.pp, depth.num_micro_batches
        (again, away), *others = depth.alternatives
        if others:
            less = depth._replace(alternatives=tuple(others))
            yield self.lower_bound(space, less), 1, less
        keeping = MemoryPolicy(
            depth.zero, recompute=again, offload=away, optimizer_offload=depth.host_share
        )
        for dispatch, paired in self._fastest_dispatchers(space, grids):
            work, slowest = self._pass_bounds(grids, dispatch, paired, (again, away), pp)
            ranks = [slowest] + [(work - slowest) / (pp - 1)] * (pp - 1) if pp > 1 else [work]
            outside = self._fixed_seconds(grids, depth.host_share) + self._data_parallel_bound(
                depth, slowest
            )
            for schedule in space.schedules:
                if schedule.overlaps_passes != paired and dispatch != "local":
                    continue
                for vpp in self._virtual_stages(schedule, pp, m):
                    sizes = grids.sizes(pp, vpp)
                    choice = LayoutChoice(
                        sizes, schedule, grids.micro_batch, dispatch, grids.recipe, keeping
                    )
                    yield pipeline_seconds(schedule, m, vpp, ranks) + outside, 2, choice

    def stages(
        self, space: SearchSpace, choice: LayoutChoice, room: float
    ) -> Iterator[tuple[float, int, LayoutChoice]]:
        """Yield a layout and its step time, where it may fit: with balanced stages, with stages of
        equal time, and with these but multi-token layers off the stage of the loss.
        """
        case, sizes = choice.build_case(self.task), choice.sizes
        if peak_within(case, room * MEMORY_SLACK) is None:
            return
        took = estimate_time(case)
        yield took.seconds, 3, choice
        each = [sum(span) for span in took.ranks]
        held = [one.num_layers for one in case.rank_contents]
        home = 0 if case.schedule.stage_mapping == "v" and sizes.vpp % 2 == 0 else sizes.pp - 1
        plain = [each[rank] / n for rank, n in enumerate(held) if n and rank != home]
        if not plain:  # also without a pipeline
            return
        layer = max(plain)
        last = round((each[home] - held[home] * layer) / layer, 1)
        first = 0.0 if home == 0 else round((each[0] - held[0] * layer) / layer, 1)
        layers, more = self.foldings.layers, self.task.multi_token
        made = balanced_stages(
            sizes.pp, sizes.vpp, layers, more, case.schedule.stage_mapping, (first, last)
        )
        for stages in filter(
            None, (made, with_separate_multi_token(made) if space.separate_multi_token else None)
        ):
            seconds = estimate_time(replace(case, stages=stages)).seconds
            yield seconds, 3, replace(choice, stages=stages)

    def _virtual_stages(self, schedule: Schedule, pp: int, m: int) -> Iterator[int]:
        """Yield the numbers of virtual stages that a schedule can run."""
        if pp == 1:
            if not isinstance(schedule, (VShapedSchedule, ZeroBubbleH1, Interleaved)):
                yield 1
        elif isinstance(schedule, OneFOneB):
            yield 1
        else:
            first = 2 if isinstance(schedule, Interleaved) else 1
            for vpp in range(first, min(MAX_VIRTUAL_STAGES, self.foldings.layers // pp) + 1):
                if not any(schedule.violations(pp, vpp, m)):
                    yield vpp

    # --------------------------------------------------------------------------- time

    def num_micro_batches(self, grids: Grids, pp: int) -> int:
        """Return the micro-batches of a data rank; 0 where the batch cannot be divided evenly."""
        share = self.foldings.world // (grids.tp * grids.cp * pp) * grids.micro_batch
        return 0 if self.task.batch % share else self.task.batch // share

    def _dense_seconds(self, grids: Grids) -> float:
        """Return device seconds of one micro-batch without routed experts."""
        how = self._layer_inputs(grids, "local")
        ends = (
            PassTime(self.task.decoder, *how)
            .layers_time(StageContents((), 0, True, True))
            .device_seconds
        )
        total = (1 + self.task.multi_token) * ends
        total += sum(number * layer_time(one, *how).device_seconds for one, number in self.dense)
        for mixture, bare, number in self.mixtures:
            shared = half_seconds(mixture, *how[:2]) - half_seconds(bare, *how[:2])
            total += number * shared
        for whole, bare, number in self.routed if grids.tp > 1 else ():
            sent, less = (sum(tensor_seconds(one, *how[:2], NOTHING[0])) for one in (whole, bare))
            total += number * (sent - less)
        return total

    def _expert_seconds(self, space: SearchSpace, attention: Grids) -> dict[tuple[int, int], float]:
        """Return, for each (ep, etp), device seconds of routed experts and least exposed seconds of
        exchanges; cached for all attention grids with equally many rows per rank.
        """
        rows, sides = attention.micro_batch / (attention.tp * attention.cp), _paired_values(space)
        key = "experts", attention.recipe, rows, space.dispatchers, *sides
        if key not in self._cache:
            found = {}
            for ep, etp in product(self.foldings.ep, self.foldings.etp):
                grids = attention._replace(ep=ep, etp=etp)
                share, setting, _ = self._layer_inputs(grids, PERMUTING_DISPATCHERS[0])
                hidden = setting.rates.hidden * (1.0 - EXCHANGE_SM_COST) if True in sides else 0.0
                took, sent = 0.0, dict.fromkeys(space.dispatchers, 0.0)
                for _, bare, number in self.mixtures:
                    routing = as_layer_spec(bare).routing
                    assert routing is not None
                    rows_out = dispatched_rows(routing, share, setting.width)
                    took += number * half_seconds(bare, share, setting)
                    for name in sent:
                        sent[name] += number * dispatch_seconds(rows_out, share, setting, name)
                found[ep, etp] = took + 4 * min(sent.values()) * (1.0 - hidden)
            self._cache[key] = found
        return self._cache[key]

    def _fastest_dispatchers(
        self, space: SearchSpace, grids: Grids
    ) -> list[tuple[Dispatcher, bool]]:
        """Return the fastest dispatchers without and with overlap with another micro-batch."""
        if grids.ep * grids.etp == 1:
            return [("local", False)]
        key = "ways", grids, space.dispatchers, *_paired_values(space)
        if key not in self._cache:
            self._cache[key] = [
                (
                    min(
                        space.dispatchers,
                        key=lambda n: self._pass_bounds(grids, n, side, NOTHING, 1),
                    ),
                    side,
                )
                for side in _paired_values(space)
            ]
        return self._cache[key]

    def _pass_bounds(
        self, grids: Grids, dispatch: Dispatcher, paired: bool, kept: RecomputeOffload, pp: int
    ) -> tuple[float, float]:
        """Return a micro-batch's seconds in all layers, and a lower bound of the slowest rank's.

        Some rank has its share of the most common layers, rounded up.
        """
        key = "work", grids, dispatch, kept
        if key not in self._cache:
            made = PassTime(self.task.decoder, *self._layer_inputs(grids, dispatch, kept))
            times = [
                made.layers_time(held)
                for held in (self.all_layers, StageContents(((self.most_common[0], 1),)))
            ]
            self._cache[key] = [
                [made.micro_batch_time(time, side).seconds for time in times]
                for side in (False, True)
            ]
        work, layer = self._cache[key][paired]
        return work, max(work / pp, -(-self.most_common[1] // pp) * layer)

    def lower_bound(self, space: SearchSpace, depth: PipelineDepth) -> float:
        """Return a lower bound of a depth's seconds with any schedule."""
        grids, pp, kept = depth.grids, depth.pp, depth.alternatives[0]
        ways = (
            self._pass_bounds(grids, *way, kept, pp)
            for way in self._fastest_dispatchers(space, grids)
        )
        slowest = min(slowest for _, slowest in ways)
        return (
            slowest * depth.num_micro_batches
            + self._fixed_seconds(grids, depth.host_share)
            + self._data_parallel_bound(depth, slowest)
        )

    def _data_parallel_bound(self, depth: PipelineDepth, slowest: float) -> float:
        """Return a lower bound of exposed data-parallel seconds, if the slowest rank's passes take
        ``slowest`` or longer: a longer pass hides less than it adds.

        A pipeline's slowest rank has at least its share of the layers' time, without model ends.
        """
        grids, pp, key = depth.grids, depth.pp, ("shared", depth.grids, depth.pp, depth.zero)
        how = self._layer_inputs(grids, "local")
        rates = how[1].rates
        if key not in self._cache:
            made = PassTime(self.task.decoder, *how)
            whole, layers = (
                made.layers_time(self.all_layers),
                made.layers_time(StageContents(self.all_layers.layers)),
            )
            part = (
                max(0.0, whole.device_seconds / pp - (whole.device_seconds - layers.device_seconds))
                / layers.device_seconds
            )
            held, part = (
                (StageContents(self.all_layers.layers), part) if pp > 1 else (self.all_layers, 1.0)
            )
            case = self._one_batch_case(grids, MemoryPolicy(depth.zero), pp)
            if self.task.software.stack == "moefold":
                work = collective_seconds(case, held, rates)
                self._cache[key] = DataSeconds(*(part * seconds for seconds in work))
            else:
                rank = WorkTime()
                rank.add(made.layers_time(held), part)
                seconds = data_parallel_seconds(case, rank, held, UNLIMITED_OVERLAP, rates)[0]
                self._cache[key] = DataSeconds(**{"between" if depth.zero == 3 else "end": seconds})
        return min_exposed_seconds(
            self._cache[key], depth.zero, depth.num_micro_batches, slowest, rates
        )

    def _fixed_seconds(self, grids: Grids, on_host: float) -> float:
        """Return a lower bound of seconds outside layers, including updates on the host."""
        step = self._layer_inputs(grids, "local")[1].rates.step_s
        return step + on_host * self.parameters / self.foldings.world / HOST_ADAM_RATE

    # --------------------------------------------------------------------------- memory

    def _state_bytes(self, grids: Grids, pp: int, m: int, zero: int, on_host: float) -> float:
        """Return the bytes of state on all ranks of a pipeline at the peak of activations, with
        gradients unless the first backward, after the peak of few micro-batches, allocates them.
        """
        key = "lasting", grids._replace(micro_batch=1, cp=1), pp, zero, on_host
        if key not in self._cache:
            case = self._one_batch_case(grids, MemoryPolicy(zero, optimizer_offload=on_host), pp)
            split = StateSharding.of(case)
            state = state_estimator(case.decoder, split).rank_state(self.all_layers)
            self._cache[key] = (
                state,
                sum(map(two_largest, unsharded_units(case.decoder, split, self.all_layers))),
            )
        state, passing = self._cache[key]
        later = self.task.software.stack == "moefold" and zero < 2 and m < 2 * pp
        # Unsharded tensors of a pass are in use at the peak; a pipeline's rank has a part of them.
        return state.total - (state.gradients if later else 0.0) + (passing if pp == 1 else 0.0)

    def _recompute_options(
        self, space: SearchSpace, grids: Grids
    ) -> list[tuple[RecomputeOffload, float]]:
        """Return recompute and offload choices by rising work, with falling bytes of all layers."""
        # All ep > 1 are alike; with ep = 1 there are also copies of rows that recompute drops.
        wide = grids._replace(ep=max(self.foldings.ep)) if grids.ep * grids.etp > 1 else grids
        key = "options", wide, space.recompute_offload_pairs
        if key not in self._cache:
            case = self._one_batch_case(grids, MemoryPolicy())
            parts = [
                (one, number) for b, number in self.blocks for one in saved_tensors_of(case, b)
            ]
            found: list[tuple[float, float, RecomputeOffload]] = []
            sizes: dict[RecomputeOffload, float] = {}
            for again, away in space.recompute_offload_pairs:
                size = sum(
                    part.bytes * number
                    for part, number in parts
                    if part.module not in away and part.is_saved_under(again)
                )
                sizes[again, away] = size
                if any(sizes.get((again - {one}, away)) == size for one in again):
                    continue
                made = PassTime(
                    self.task.decoder, *self._layer_inputs(wide, "local", (again, away))
                )
                work = made.micro_batch_time(made.layers_time(self.all_layers), False).seconds
                found.append((work, size, (again, away)))
            best: list[tuple[RecomputeOffload, float]] = []
            for _, size, kept in sorted(found, key=lambda one: one[:2]):
                if not best or size < best[-1][1]:
                    best.append((kept, size))
            self._cache[key] = best
        return self._cache[key]

    # --------------------------------------------------------------------------- samples

    def _layer_inputs(
        self, grids: Grids, dispatch: Dispatcher, kept: RecomputeOffload = NOTHING
    ) -> tuple[RankShare, KernelSetting, LayerPolicy]:
        """Return the inputs of a layer's time; settings are cached by format."""
        task, recipe = self.task, grids.recipe
        if recipe not in self._cache:
            narrowed = task.number_formats.recipe_options
            self._cache[recipe] = build_setting(task.cluster, task.software, recipe, narrowed)
        share = RankShare(
            task.decoder.hidden, task.seq, *grids[1:], task.load, dispatch in PERMUTING_DISPATCHERS
        )  # fmt: skip
        return share, self._cache[recipe], LayerPolicy(dispatch, *kept)

    def _one_batch_case(self, grids: Grids, keeping: MemoryPolicy, pp: int = 1) -> Case:
        """Return a case with one micro-batch on every data rank."""
        dp = self.foldings.world // (grids.tp * grids.cp * pp)
        task = replace(self.task, batch=dp * grids.micro_batch)
        choice = LayoutChoice(
            grids.sizes(pp), SCHEDULES[0], grids.micro_batch, "alltoall", grids.recipe
        )
        return replace(choice, memory_policy=keeping).build_case(task)


def _paired_values(space: SearchSpace) -> list[bool]:
    """Return the values of ``paired`` (exchanges overlap with compute) among the schedules."""
    return sorted({schedule.overlaps_passes for schedule in space.schedules})
