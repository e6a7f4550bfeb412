"""Bounds for a search: no layout takes less time, or less memory, than these say.

The work of a layout is what all its layers take for one micro-batch on one rank. A step is never
shorter than its share of that work, whatever the pipeline. With a host that never holds up, work
adds up from parts, so that grids of attention and of experts can be bounded apart.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from moefold.mesh.config import Sizes
from moefold.planner.case import Case, Keeping, Recipe
from moefold.planner.curves import Rates, constants
from moefold.planner.from_run import Choice, Task
from moefold.planner.held import Held, kinds
from moefold.planner.memory import Overheads, layer_kept, software_of
from moefold.planner.memory_state import state
from moefold.planner.network import LATENCY_NIC, Rows, exchange_seconds, reach, ring_seconds
from moefold.planner.search_space import SENDING, VIRTUAL, Foldings, Modules, Space
from moefold.planner.time import HOST_ADAM, LEAST, Pass
from moefold.planner.time_layer import (
    SM_COST,
    Policy,
    Setting,
    half_seconds,
    loss_chunk_of,
    setting_of,
)
from moefold.planner.time_work import PERMUTING, Share
from moefold.schedule.config import OneFOneB
from moefold.spec.decoder import block_weights, has_routing
from moefold.spec.layer import Saved

Kept = tuple[Modules, Modules]
"""What is recomputed, and what is moved to the host."""
NOTHING: Kept = (frozenset(), frozenset())


class Grid(NamedTuple):
    """What is chosen first: the format, the micro-batch and the attention grid but for pp."""

    recipe: Recipe
    micro_batch: int
    tp: int
    cp: int


class Shape(NamedTuple):
    """What the work of a micro-batch depends on."""

    recipe: Recipe
    micro_batch: int
    tp: int
    cp: int
    ep: int
    etp: int
    dispatch: Any
    paired: bool

    @property
    def grid(self) -> Grid:
        """The part of it that is chosen first."""
        return Grid(*self[:4])


class Bounds:
    """Bounds of one task, each made once."""

    def __init__(self, task: Task, foldings: Foldings) -> None:
        self.task, self.foldings = task, foldings
        self.blocks, order = kinds(task.decoder)
        self.counts = Counter(order)
        self._common = self.counts.most_common(1)[0]
        self._passes: dict[tuple[Any, ...], Pass] = {}
        self._settings: dict[Recipe, Setting] = {}
        self._works: dict[tuple[Any, ...], float] = {}
        self._states: dict[tuple[Any, ...], float] = {}
        self._parts: dict[tuple[Any, ...], list[tuple[Saved, int]]] = {}
        self._sizes: dict[tuple[Any, ...], float] = {}
        self._chains: dict[tuple[Any, ...], list[tuple[float, float, Kept]]] = {}
        self._exchanged: dict[tuple[Any, ...], dict[str, float]] = {}
        self._widest: dict[int, int] = {}
        self._spreads: dict[tuple[Any, ...], float] = {}

    def steps(self, grid: Grid, pp: int) -> int | None:
        """Return the micro-batches per data rank, where the batch can be shared so."""
        share = self.foldings.world // (grid.tp * grid.cp * pp) * grid.micro_batch
        return None if self.task.batch % share else self.task.batch // share

    def turns(self, grid: Grid) -> float:
        """Return how often a rank's share of the layers runs, over that share: pp is not in it."""
        ranks = self.foldings.world * grid.micro_batch
        return self.task.batch * grid.tp * grid.cp / ranks

    # --------------------------------------------------------------------------- time

    def work(self, shape: Shape, kept: Kept) -> float:
        """Return the seconds of all layers for one micro-batch on one rank."""
        return self._seconds(shape, kept, self._whole)

    def fullest_rank(self, shape: Shape, kept: Kept, pp: int) -> float:
        """Return the least seconds of the slowest rank: some rank has its share of the most common
        layers, rounded up.
        """
        kind, number = self._common
        layer = self._seconds(shape, kept, Held(((kind, 1),)))
        return max(self.work(shape, kept) / pp, -(-number // pp) * layer)

    def _seconds(self, shape: Shape, kept: Kept, held: Held) -> float:
        key = shape, kept, held
        if key not in self._works:
            made = self._pass(shape, kept)
            self._works[key] = made.span(made.time(held)).seconds
        return self._works[key]

    def ideal(self, grid: Grid, kept: Kept) -> float:
        """Return the seconds of all layers without host and exchanges, experts spread widest."""
        key = grid, kept
        if key not in self._works:
            shape = Shape(*grid, self._most(grid), 1, "hybrid_ep", False)
            took = self._pass(shape, kept).time(self._whole)
            sent = took.forward.get("dispatch", 0.0) + took.backward.get("dispatch", 0.0)
            self._works[key] = took.device - sent
        return self._works[key]

    def spread(self, grid: Grid, ep: int, etp: int) -> float:
        """Return what other sizes of the experts' grid add to that at least, exchanges too."""
        rows, most = grid.micro_batch * self.task.seq / (grid.tp * grid.cp), self._most(grid)
        key = grid.recipe, rows, ep, etp, most
        if key not in self._spreads:
            more = self._experts(grid, ep, etp) - self._experts(grid, most, 1)
            # Recomputed experts run a third more of it.
            more *= 1 if more > 0 else 4 / 3
            self._spreads[key] = more + self._exchanges(grid, ep, etp)
        return self._spreads[key]

    def _experts(self, grid: Grid, ep: int, etp: int) -> float:
        """Return the device's seconds of all mixtures of experts."""
        share = self._share(Shape(*grid, ep, etp, "hybrid_ep", False))
        total = sum(
            half_seconds(block.ffn, share, self._setting(grid.recipe)) * self.counts[kind]
            for kind, block in enumerate(self.blocks)
            if has_routing(block.ffn)
        )
        return float(total)

    def _exchanges(self, grid: Grid, ep: int, etp: int) -> float:
        """Return what four exchanges per layer take at least, as much hidden as can be."""
        took = self.exchanges(Shape(*grid, ep, etp, "local", False))
        if not took:
            return 0.0
        layers = sum(self.counts[i] for i, b in enumerate(self.blocks) if has_routing(b.ffn))
        shown = 1.0 - self._rates.hidden * (1.0 - SM_COST)
        return 4 * layers * min(took.values()) * max(0.0, shown)

    def exchanges(self, shape: Shape) -> dict[str, float]:
        """Return the seconds of one exchange by dispatcher; empty where experts are on the rank."""
        task, router = self.task, self._router
        if shape.ep == 1 or router is None:
            return {}
        rows = Rows(
            shape.micro_batch * task.seq / (shape.tp * shape.cp), self._width * 2.0, router.top_k,
            router.groups_kept, router.groups,
        )  # fmt: skip
        group = reach(task.cluster, shape.ep, shape.etp)
        key = rows, group
        if key not in self._exchanged:
            self._exchanged[key] = {
                name: exchange_seconds(rows, name, group, task.cluster, self._rates, task.load)
                for name in SENDING
            }
        return self._exchanged[key]

    def sending(self, space: Space, shape: Shape) -> list[Any]:
        """Return the dispatchers that none other beats whatever else is chosen."""
        every = self.exchanges(shape)
        took = {name: every[name] for name in space.dispatchers if name in every}
        if not took:
            return list(space.dispatchers[:1])
        best: dict[bool, str] = {}
        for name in took:
            fused = name in PERMUTING
            if fused not in best or took[name] < took[best[fused]]:
                best[fused] = name
        if len(best) == 2 and took[best[True]] <= took[best[False]]:
            return [best[True]]
        return list(best.values())

    def fixed(self, share: float) -> float:
        """Return the least seconds of a step outside layers, a share of the update on the host."""
        return self._rates.step_s + share * self._parameters[0] / self.foldings.world / HOST_ADAM

    def data(self, shape: Shape, kept: Kept, pp: int, zero: int, m: int) -> float:
        """Return the least seconds of data-parallel communication, where nothing hides it.

        It is the slowest rank's: what that takes beyond the ends of the model are layers.
        """
        overlaps = self.task.software.overlaps
        if overlaps.gradients or overlaps.parameters:
            return 0.0
        moved = 6.0 * m if zero == 3 else self.task.numbers.gradient_bytes + 2.0
        if pp == 1:
            return moved * self._sent(shape, kept, pp, self._whole)
        key = "data", shape, kept, pp
        if key not in self._works:
            ends = self._whole._replace(layers=())
            slowest = self.fullest_rank(shape, kept, pp)
            rest = slowest - self._seconds(shape, kept, ends)
            last = self._layers_sent(shape, kept, pp, rest) + self._sent(shape, kept, pp, ends)
            self._works[key] = min(self._layers_sent(shape, kept, pp, slowest), last)
        return moved * self._works[key]

    def _layers_sent(self, shape: Shape, kept: Kept, pp: int, seconds: float) -> float:
        """Return the least that layers send which take so long together: those with the least to
        send for their time come first.
        """
        each = []
        for kind, number in self.counts.items():
            one = Held(((kind, 1),))
            took = self._seconds(shape, kept, one)
            each.append((self._sent(shape, kept, pp, one) / took, number * took))
        total = 0.0
        for rate, most in sorted(each):
            total += rate * max(0.0, min(seconds, most))
            seconds -= most
        return total

    def _sent(self, shape: Shape, kept: Kept, pp: int, held: Held) -> float:
        """Return the least seconds to gather or to scatter a byte per weight over data ranks."""
        took = self._pass(shape, kept).time(held)
        world, cluster = self.foldings.world // pp, self.task.cluster
        copies = reach(cluster, world // shape.tp, shape.tp)
        owners = reach(cluster, world // (shape.ep * shape.etp), shape.ep * shape.etp)
        dense = ring_seconds(took.weights - took.experts, copies, cluster, self._rates)
        own = ring_seconds(took.experts, owners, cluster, self._rates)
        return max(0.0, dense + own - 2 * LATENCY_NIC)

    def _most(self, grid: Grid) -> int:
        dense = grid.tp * grid.cp
        if dense not in self._widest:
            pairs = self.foldings.experts(grid.tp, grid.cp)
            self._widest[dense] = max(ep for ep, etp in pairs if etp == 1)
        return self._widest[dense]

    # --------------------------------------------------------------------------- memory

    def least_bytes(
        self, shape: Shape, pp: int, m: int, zero: int, share: float, kept: Kept
    ) -> float:
        """Return no more than what the fullest rank needs: an even share of state and layers."""
        alive = min(m, pp) * self.layers_kept(shape.grid, shape.etp, kept)
        tensors = (self.state(shape, pp, zero, share) + alive) / pp
        return tensors * (1 + self._software.fragments) + self._software.context

    def tensors_within(self, room: float) -> float:
        """Return the bytes of tensors that fit into a room beside what software takes."""
        return (room - self._software.context) / (1 + self._software.fragments)

    def state(self, shape: Shape, pp: int, zero: int, share: float) -> float:
        """Return the bytes of all layers' weights, master weights and moments on a rank, a share of
        the latter two on the host.
        """
        policy, total = (pp, shape.recipe, zero, share), 0.0
        for expert, sizes in ((False, (shape.tp,)), (True, (shape.ep, shape.etp))):
            key = expert, sizes, policy
            if key not in self._states:
                keeping = Keeping(zero, optimizer_offload=share)
                self._states[key] = self._state(shape, pp, keeping, expert)
            total += self._states[key]
        return total

    def _state(self, shape: Shape, pp: int, keeping: Keeping, expert: bool) -> float:
        """Return bytes of state of experts, or of all other weights: its own grid decides each."""
        case = self._sample(shape, keeping, pp)
        total = 0.0
        for kind, block in enumerate(self.blocks):
            weights = block_weights(block, self.task.decoder.hidden, 0)
            made = state(case, (weight for weight in weights if weight.expert is expert))
            total += self.counts[kind] * (made.total - made.gradients)
        return total

    def layers_kept(self, grid: Grid, etp: int, kept: Kept) -> float:
        """Return the bytes that all layers keep for one micro-batch on a rank."""
        key = grid, etp
        if key not in self._parts:
            case = self._sample(Shape(*grid, 1, etp, "local", False), Keeping())
            each = [layer_kept(case, block) for block in self.blocks]
            self._parts[key] = [(p, self.counts[i]) for i, parts in enumerate(each) for p in parts]
        if (key, kept) not in self._sizes:
            again, away = kept
            self._sizes[key, kept] = float(
                sum(
                    part.bytes * count
                    for part, count in self._parts[key]
                    if part.module not in away and part.stays(again)
                )
            )
        return self._sizes[key, kept]

    def chain(self, space: Space, grid: Grid) -> list[tuple[float, float, Kept]]:
        """Return bounds of work and of bytes by what is kept, work rising and bytes falling.

        Experts that are cut over etp keep no less than whole ones, which these are.
        """
        key = grid, space.kept
        if key not in self._chains:
            self._chains[key] = _front(
                (self.ideal(grid, kept), self.layers_kept(grid, 1, kept), kept)
                for kept in space.kept
            )
        return self._chains[key]

    def options(self, space: Space, shape: Shape, room: float) -> list[Kept]:
        """Return what may be kept so that some pipeline could fit, by rising work; what is slower
        and keeps no less is left out.
        """
        left = 0.0
        for pp in self.foldings.pipelines(shape.tp, shape.cp, shape.ep, shape.etp):
            m = self.steps(shape.grid, pp)
            for zero, share in space.shares(pp) if m else ():
                lasting = self.state(shape, pp, zero, share)
                within = self.tensors_within(room) * pp - lasting
                left = max(left, within / min(m or 1, pp))
        sizes = {kept: self.layers_kept(shape.grid, shape.etp, kept) for kept in space.kept}
        front = _front(
            (self.work(shape, kept), size, kept) for kept, size in sizes.items() if size <= left
        )
        return [kept for _, _, kept in front]

    # --------------------------------------------------------------------------- samples

    @cached_property
    def _parameters(self) -> tuple[int, int]:
        """Parameters of all layers, and those of routed experts among them."""
        hidden = self.task.decoder.hidden
        numbered = enumerate(self.blocks)
        weights = [(w, self.counts[i]) for i, b in numbered for w in block_weights(b, hidden, 0)]
        total = sum(w.elements * n for w, n in weights)
        return total, sum(w.elements * n for w, n in weights if w.expert)

    @cached_property
    def _router(self) -> Any:
        return next((b.ffn.routing for b in self.blocks if has_routing(b.ffn)), None)

    @cached_property
    def _width(self) -> int:
        latent = None if self._router is None else self._router.width
        return latent or self.task.decoder.hidden

    @cached_property
    def _rates(self) -> Rates:
        return self._setting("bf16").rates

    @cached_property
    def _software(self) -> Overheads:
        grid = Grid("bf16", 1, 1, 1)
        return software_of(self._sample(Shape(*grid, 1, 1, "local", False), Keeping()))

    @cached_property
    def _whole(self) -> Held:
        return Held(tuple(sorted(self.counts.items())), self.task.multi_token, True, True)

    def _setting(self, recipe: Recipe) -> Setting:
        if recipe not in self._settings:
            narrowed = self.task.numbers.narrowed
            made = setting_of(self.task.cluster, self.task.software, recipe, narrowed, constants())
            self._settings[recipe] = made
        return self._settings[recipe]

    def _share(self, shape: Shape) -> Share:
        task, fused = self.task, shape.dispatch in PERMUTING
        return Share(
            task.decoder.hidden, task.seq, shape.micro_batch, shape.tp, shape.cp, shape.ep,
            shape.etp, task.load, fused,
        )  # fmt: skip

    def _pass(self, shape: Shape, kept: Kept) -> Pass:
        key = shape, kept
        if key not in self._passes:
            overlaps = self.task.software.overlaps
            chunk = loss_chunk_of(self.task.software)
            policy = Policy(shape.dispatch, kept[0], kept[1], 1.0, overlaps.tp, chunk)
            self._passes[key] = Pass(
                self.task.decoder, self._share(shape), self._setting(shape.recipe), policy,
                shape.paired,
            )  # fmt: skip
        return self._passes[key]

    def _sample(self, shape: Shape, keeping: Keeping, pp: int = 1) -> Case:
        """Return a step of one micro-batch on every data rank."""
        sizes = Sizes.model_construct(
            tp=shape.tp, cp=shape.cp, pp=pp, vpp=1, ep=shape.ep, etp=shape.etp
        )
        dp = self.foldings.world // (shape.tp * shape.cp * pp)
        choice = Choice(sizes, OneFOneB(), shape.micro_batch, shape.dispatch, shape.recipe, keeping)
        return choice.case(replace(self.task, batch=dp * shape.micro_batch))


def _front(items: Iterable[tuple[float, float, Kept]]) -> list[tuple[float, float, Kept]]:
    """Return what nothing beats in both figures, by the first."""
    front: list[tuple[float, float, Kept]] = []
    for item in sorted(items, key=lambda item: item[:2]):
        if not front or item[1] < front[-1][1]:
            front.append(item)
    return front


def least_seconds(work: float, m: int, pp: int) -> float:
    """Return the least seconds of m micro-batches, whatever the schedule."""
    return work / pp * (m + LEAST * (pp - 1) / VIRTUAL)
