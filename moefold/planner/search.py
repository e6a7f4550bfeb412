"""The fastest layouts of a task: best-first branch and bound over foldings, schedules, policies.

The most promising grids come first and are bounded from below by ``search_bounds``; only of those
that could still win are experts, pipelines and what is kept gone through, then priced, and only the
fastest of what is priced is asked whether it fits. So the first that fits is the fastest. Every
time is :func:`moefold.planner.time.estimate`'s own, and memory is ``planner.memory``'s.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple

from moefold.mesh.config import Sizes
from moefold.mesh.pipeline import Stages
from moefold.planner.case import Case, Keeping
from moefold.planner.from_run import PAIRED, Choice, Task
from moefold.planner.memory import peak_within
from moefold.planner.search_bounds import NOTHING, Bounds, Grid, Kept, Shape, least_seconds
from moefold.planner.search_space import VIRTUAL, Foldings, Space, apart, weighted
from moefold.planner.time import StepTime, estimate, pipeline_seconds
from moefold.schedule.config import (
    Interleaved,
    OneFOneB,
    Schedule,
    Vee,
    ZeroBubbleH1,
)

RESERVE = 0.05
"""Share of the memory that a layout of a search leaves free: measured peaks are up to 8 % off."""
SLACK = 1.1
"""How much fuller balanced stages may be than those whose ranks take equally long."""


@dataclass(frozen=True)
class Found:
    """A layout that fits."""

    choice: Choice
    case: Case = field(repr=False)
    seconds: float
    bytes: float
    """Peak memory of the fullest rank."""

    @property
    def folding(self) -> tuple[int, ...]:
        """Its sizes without virtual stages: what tells one layout from another in a list."""
        return _folding(self.choice.sizes)


def _folding(sizes: Sizes) -> tuple[int, ...]:
    return sizes.tp, sizes.cp, sizes.pp, sizes.ep, sizes.etp


class Search:
    """Searches of one task, which share what they have priced."""

    def __init__(self, task: Task) -> None:
        self.task, self.foldings = task, Foldings.of(task)
        self.bounds = Bounds(task, self.foldings)
        self.priced = 0
        """Layouts whose whole step was priced."""

    def best(self, space: Space, top: int = 5, limit: float | None = None) -> list[Found]:
        """Return the fastest layouts that fit, each of another folding, the fastest first.

        Args:
            space: what may be chosen.
            top: how many.
            limit: bytes per device; the device's own less :data:`RESERVE` unless given.
        """
        room = limit or self.task.cluster.device.memory_bytes * (1 - RESERVE)
        found: dict[tuple[int, ...], Found] = {}
        tie = count()
        heap: list[tuple[float, int, str, Any]] = []

        def push(level: str, items: Iterator[tuple[float, Any]]) -> None:
            for bound, item in items:
                heapq.heappush(heap, (bound, next(tie), level, item))

        push("grid", self._grids(space))
        while heap and len(found) < top:
            bound, _, level, item = heapq.heappop(heap)
            if level == "grid":
                push("experts", self._experts(item))
            elif level == "experts":
                push("fitting", self._fitting(space, item, room))
            elif level == "fitting":
                push("shape", self._shapes(space, *item))
            elif level == "shape":
                push("depth", self._depths(space, item, room))
            elif level == "depth":
                push("depth", self._kept(space, item._replace(at=item.at + 1)))
                push("open", self._schedules(space, item))
            elif level == "open":
                choice = item.choice()
                if _folding(choice.sizes) not in found:
                    push("priced", self._priced(choice, room))
            elif _folding(item.sizes) not in found:
                case = item.case(self.task)
                needed = peak_within(case, room)
                if needed is not None:
                    found[_folding(item.sizes)] = Found(item, case, bound, needed)
        return list(found.values())

    # --------------------------------------------------------------------------- levels

    def _grids(self, space: Space) -> Iterator[tuple[float, Grid]]:
        """Yield every attention grid, micro-batch and format, with a bound."""
        for recipe in space.recipes:
            for size in space.micro_batches:
                for tp, cp in self.foldings.attention:
                    grid = Grid(recipe, size, tp, cp)
                    if any(self.bounds.steps(grid, pp) for pp in self.foldings.pp):
                        bound = self.bounds.ideal(grid, NOTHING) * self.bounds.turns(grid)
                        yield bound + self.bounds.fixed(0.0), grid

    def _experts(self, grid: Grid) -> Iterator[tuple[float, Shape]]:
        """Yield every way to lay experts beside a grid, with a bound."""
        bounds = self.bounds
        for ep, etp in self.foldings.experts(grid.tp, grid.cp):
            work = bounds.ideal(grid, NOTHING) + bounds.spread(grid, ep, etp)
            bound = work * bounds.turns(grid) + bounds.fixed(0.0)
            yield bound, Shape(*grid, ep, etp, "local", False)

    def _fitting(self, space: Space, shape: Shape, room: float) -> Iterator[tuple[float, Any]]:
        """Yield a shape, bounded by what it must recompute so that it could fit."""
        least = self._least_kept(space, shape, room)
        if least:
            order = sorted(least, key=lambda kept: least[kept])
            yield least[order[0]], (shape, tuple(order))

    def _least_kept(self, space: Space, shape: Shape, room: float) -> dict[Kept, float]:
        """Return bounds by what is kept, of all that could be the fastest of some pipeline."""
        bounds, grid = self.bounds, shape.grid
        chain = bounds.chain(space, grid)
        more = bounds.spread(grid, shape.ep, shape.etp)
        least: dict[Kept, float] = {}
        for pp in self.foldings.pipelines(grid.tp, grid.cp, shape.ep, shape.etp):
            m = bounds.steps(grid, pp)
            if m is None:
                continue
            for zero, share in space.shares(pp):
                lasting = bounds.state(shape, pp, zero, share)
                left = (bounds.tensors_within(room) * pp - lasting) / min(m, pp)
                found = next((item for item in chain if item[1] <= left), None)
                if found is not None:
                    bound = least_seconds(found[0] + more, m, pp)
                    bound += bounds.fixed(share)
                    least[found[2]] = min(least.get(found[2], math.inf), bound)
        return least

    def _shapes(
        self, space: Space, shape: Shape, order: tuple[Kept, ...]
    ) -> Iterator[tuple[float, Shape]]:
        """Yield every way to send rows to experts, with a bound."""
        alone = shape.ep * shape.etp == 1
        paired = {isinstance(schedule, PAIRED) for schedule in space.schedules}
        for dispatch in ("local",) if alone else self.bounds.sending(space, shape):
            for side in {False} if alone else paired:
                made = shape._replace(dispatch=dispatch, paired=side)
                work = min(self.bounds.work(made, kept) for kept in order)
                yield work * self.bounds.turns(shape.grid) + self.bounds.fixed(0.0), made

    def _depths(self, space: Space, shape: Shape, room: float) -> Iterator[tuple[float, "_Depth"]]:
        """Yield every depth of pipeline of a shape, with the fastest that it could keep."""
        bounds = self.bounds
        kept = bounds.options(space, shape, room)
        for pp in self.foldings.pipelines(shape.tp, shape.cp, shape.ep, shape.etp):
            m = bounds.steps(shape.grid, pp)
            for zero, share in space.shares(pp) if m else ():
                made = _Depth(shape, pp, m or 1, zero, share, kept, 0)
                while made.at < len(kept) and bounds.least_bytes(*made[:5], made.now) > room:
                    made = made._replace(at=made.at + 1)
                yield from self._kept(space, made)

    def _kept(self, space: Space, depth: "_Depth") -> Iterator[tuple[float, "_Depth"]]:
        """Yield a depth, where there is something left that it could keep, with a bound."""
        if depth.at < len(depth.kept):
            vpp = min(VIRTUAL, max(1, self.foldings.layers // depth.pp))
            yield min(self._least(depth, one, vpp) for one in space.schedules), depth

    def _schedules(self, space: Space, depth: "_Depth") -> Iterator[tuple[float, "_Open"]]:
        """Yield every schedule of a depth, with a bound."""
        shape = depth.shape
        for schedule in space.schedules:
            if shape.ep * shape.etp > 1 and isinstance(schedule, PAIRED) != shape.paired:
                continue
            for vpp in self._virtual(schedule, depth.pp, depth.m):
                yield self._least(depth, schedule, vpp), _Open(depth, schedule, vpp)

    def _least(self, depth: "_Depth", schedule: Schedule, vpp: int) -> float:
        """Return a bound of the time: other ranks share evenly what the fullest leaves."""
        shape, pp, m, zero, share = depth[:5]
        work = self.bounds.work(shape, depth.now)
        slowest = self.bounds.fullest_rank(shape, depth.now, pp)
        ranks = [slowest] + [(work - slowest) / (pp - 1)] * (pp - 1) if pp > 1 else [work]
        took = pipeline_seconds(schedule, m, vpp, ranks)
        return took + self.bounds.data(shape, depth.now, pp, zero, m) + self.bounds.fixed(share)

    def _virtual(self, schedule: Schedule, pp: int, m: int) -> Iterator[int]:
        """Yield the numbers of virtual stages that a schedule can run."""
        if pp == 1:
            if not isinstance(schedule, (Vee, ZeroBubbleH1, Interleaved)):
                yield 1
        elif isinstance(schedule, OneFOneB):
            yield 1
        else:
            first = 2 if isinstance(schedule, Interleaved) else 1
            for vpp in range(first, min(VIRTUAL, self.foldings.layers // pp) + 1):
                if not any(schedule.misfits(pp, vpp, m)):
                    yield vpp

    # --------------------------------------------------------------------------- layouts

    def _priced(self, choice: Choice, room: float) -> Iterator[tuple[float, Choice]]:
        """Yield a layout with each way to cut stages, priced, where it may fit."""
        case = choice.case(self.task)
        if peak_within(case, room * SLACK) is None:
            return
        took = estimate(case)
        self.priced += 1
        yield took.seconds, choice
        for stages in self._stages(case, took):
            self.priced += 1
            yield estimate(replace(case, stages=stages)).seconds, replace(choice, stages=stages)

    def _stages(self, case: Case, took: StepTime) -> Iterator[Stages]:
        """Yield stages whose ranks take equally long, by what balanced ones took."""
        sizes = case.sizes
        if sizes.pp == 1:
            return
        each = [sum(span) for span in took.ranks]
        held = [one.number for one in case.held]
        home = 0 if case.way == "v" and sizes.vpp % 2 == 0 else sizes.pp - 1
        plain = [
            time / n
            for rank, (time, n) in enumerate(zip(each, held, strict=True))
            if n and rank != home
        ]
        if not plain:
            return
        one = max(plain)
        last = round((each[home] - held[home] * one) / one, 1)
        first = 0.0 if home == 0 else round((each[0] - held[0] * one) / one, 1)
        made = weighted(
            sizes.pp, sizes.vpp, self.foldings.layers, self.task.multi_token, case.way, first, last
        )
        yield made
        moved = apart(made)
        if moved is not None:
            yield moved


class _Depth(NamedTuple):
    """A shape in a pipeline of some depth, and what it could keep, by rising work."""

    shape: Shape
    pp: int
    m: int
    zero: int
    share: float
    """Share of the optimizer that lies on the host."""
    kept: list[Kept]
    at: int

    @property
    def now(self) -> Kept:
        """What it keeps."""
        return self.kept[self.at]


class _Open(NamedTuple):
    """A layout that is not priced yet, all but its stages."""

    depth: _Depth
    schedule: Schedule
    vpp: int

    def choice(self) -> Choice:
        """Return it with balanced stages."""
        shape, depth = self.depth.shape, self.depth
        again, away = depth.now
        sizes = Sizes.model_construct(
            tp=shape.tp, cp=shape.cp, pp=depth.pp, vpp=self.vpp, ep=shape.ep, etp=shape.etp
        )
        keeping = Keeping(depth.zero, recompute=again, offload=away, optimizer_offload=depth.share)
        return Choice(
            sizes, self.schedule, shape.micro_batch, shape.dispatch, shape.recipe, keeping
        )
