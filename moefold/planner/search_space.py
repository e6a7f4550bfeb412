"""Space of a layout search: the values of each policy, and the legal foldings."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, combinations, product
from typing import cast, get_args

from moefold.config.suggest import closest
from moefold.layers.config import OffloadKind
from moefold.mesh.pipeline import LAYERS, Stages
from moefold.mesh.shares import divisors
from moefold.parallel.config import StatePlacement
from moefold.planner.case import Recipe
from moefold.planner.hardware import Device, require_recipe
from moefold.planner.layouts import DEVICE, THIRD_PARTY_DISPATCHERS, OptimizerOnHost
from moefold.planner.memoize import memoize
from moefold.planner.task import TrainingTask
from moefold.schedule.config import (
    DualPipeV,
    Interleaved,
    Merged,
    OneFOneB,
    Schedule,
    VShapedSchedule,
    ZeroBubbleH1,
    ZeroBubbleV,
)
from moefold.spec.decoder import has_routing, model_needs, sublayers
from moefold.spec.layer import NOTHING, Module, Modules

SCHEDULES: tuple[Schedule, ...] = (
    OneFOneB(), Interleaved(), Merged(), ZeroBubbleH1(), ZeroBubbleV(), DualPipeV()
)  # fmt: skip
"""All schedules but GPipe, which takes as long as 1F1B and needs more memory."""
DISPATCHERS = (
    "alltoall", "alltoall_once", "two_level", "allgather", "deep_ep", "hybrid_ep"
)  # fmt: skip
"""Dispatchers without ``max_rows``; ``nccl_ep`` is left out, as it is planned with the time of
``hybrid_ep``."""
MAX_MICRO_BATCH_TOKENS = 32768
"""Most tokens of a micro-batch that is tried."""
MAX_VIRTUAL_STAGES = 16
"""Most virtual stages per rank that are tried."""


@dataclass(frozen=True)
class SearchSpace:
    """Values that a search tries for each policy; it tries all legal foldings."""

    recipes: tuple[Recipe, ...]
    schedules: tuple[Schedule, ...] = SCHEDULES
    dispatchers: tuple[str, ...] = DISPATCHERS
    recomputes: tuple[Modules, ...] = (NOTHING,)
    offloads: tuple[Modules, ...] = (NOTHING,)
    zeros: tuple[int, ...] = (1, 2, 3)
    """ZeRO stages without a pipeline; with one it is 1."""
    states: tuple[StatePlacement, ...] = (DEVICE,)
    """Where master weights and moments are."""
    micro_batches: tuple[int, ...] = (1,)

    def zero_and_states(self, pp: int) -> Iterator[tuple[int, StatePlacement]]:
        """Yield ZeRO stages with places of optimizer state.

        Stages 2 and 3 only without a pipeline: with one the longest searches take more than twice
        as long, and none of twenty finds anything faster. Stage 0 needs more memory than 1 and is
        never faster.
        """
        return product(self.zeros if pp == 1 else (1,), self.states)

    @property
    def thrifty(self) -> "SearchSpace":
        """The part of the space with layouts of least memory, in its first number format."""
        return replace(
            self,
            recipes=self.recipes[:1],
            zeros=(3,),
            # The last ones are all modules, and whole blocks.
            recomputes=self.recomputes[-2:],
            states=self.states[-1:],
            micro_batches=(min(self.micro_batches),),
        )

    @cached_property
    def paired_values(self) -> list[bool]:
        """Values of ``overlaps_passes`` among the schedules."""
        return sorted({schedule.overlaps_passes for schedule in self.schedules})

    @cached_property
    def recompute_offload_pairs(self) -> tuple[tuple[Modules, Modules], ...]:
        """Pairs of recompute and offload in which no module is both."""
        pairs = product(self.recomputes, self.offloads)
        return tuple(
            (again, away)
            for again, away in pairs
            if not again & away and not (away and "block" in again)
        )


def full_space(task: TrainingTask) -> SearchSpace:
    """Return the space of all that can be planned for a task on its device."""
    trainable = trainable_space(task)
    recipes = trainable.recipes
    if not task.precision_stated:
        recipes = candidate_recipes(task.cluster.device, task.number_formats.recipe)
    # Other packages' dispatchers need links between devices, of which PCIe has none.
    by_links = task.cluster.device.links != "pcie"
    space = replace(
        trainable,
        recipes=recipes,
        dispatchers=DISPATCHERS if by_links else trainable.dispatchers,
    )
    if not task.cluster.device.host_bandwidth:
        return space
    experts: Modules = frozenset(("experts",))
    return replace(space, offloads=(NOTHING, experts), states=(DEVICE, OptimizerOnHost()))


def trainable_space(task: TrainingTask) -> SearchSpace:
    """Return the space that training executes without other packages, in the run's own format."""
    max_size = max(1, MAX_MICRO_BATCH_TOKENS // task.seq)
    return SearchSpace(
        recipes=(task.number_formats.recipe,),
        dispatchers=tuple(name for name in DISPATCHERS if name not in THIRD_PARTY_DISPATCHERS),
        recomputes=tuple(_recomputes(task)),
        micro_batches=tuple(size for size in divisors(task.batch) if size <= max_size),
    )


def offloading_space(task: TrainingTask) -> SearchSpace:
    """Return the space that training executes with optimizer state, and any kind of activation, on
    the host. A disk takes longer and leaves as much memory free.
    """
    return replace(
        trainable_space(task),
        offloads=(NOTHING, frozenset(get_args(OffloadKind))),
        states=(DEVICE, StatePlacement(at="host"), StatePlacement(at="host", step="host")),
    )


def candidate_recipes(device: Device, own: Recipe) -> tuple[Recipe, ...]:
    """Return a run's own recipe, and bf16 and narrower recipes that a device has units for."""
    formats = dict(device.peaks)
    recipes = list[Recipe]((own,))
    if "bf16" in formats:
        recipes.append("bf16")
    if device.block_scales:
        recipes += cast("tuple[Recipe, ...]", device.block_scales)
    elif "fp8" in formats:
        recipes += ("fp8_block", "fp8_tensor")
    return tuple(dict.fromkeys(recipes))


def stated_recipe(text: str, device: Device) -> Recipe:
    """Return the recipe that a word means on a device: ``fp8`` is that of its own kind.

    Raises:
        ValueError: there is no such recipe, or the device has no units for it; the message names
            the nearest one that it has.
    """
    word = text.lower()
    if word == "fp8":
        word = "mxfp8" if "mxfp8" in device.recipes else "fp8_block"
    known = get_args(Recipe)
    if word not in known:
        nearest = closest(word, ("fp8", *known), 0.4)
        hint = f"; nearest: {nearest}" if nearest else ""
        raise ValueError(f"precision {text}: must be fp8 or one of {', '.join(known)}{hint}")
    require_recipe(device, word)
    return cast("Recipe", word)


def _recomputes(task: TrainingTask) -> Iterator[Modules]:
    """Yield sets of modules to recompute, and whole blocks."""
    blocks = [block for stack in task.decoder.stacks for block in stack.blocks]
    specs = [spec for block in blocks for _, spec in sublayers(block)]
    operations = {op.name for spec in specs for op in spec.operations(task.decoder.hidden)}
    moefold = task.software.stack == "moefold"
    with_experts: list[Module] = ["shared"] if "shared" in operations else []
    if not all(has_routing(block.ffn) for block in blocks):
        with_experts.append("ffn")
    routed: list[Module] = ["experts", "permute", "gather"] if moefold else ["moe_act"]
    modules: list[Module] = ["norms", "attention", *routed]
    if "mla_up" in operations:
        modules.append("mla_up")
    for chosen in chain.from_iterable(combinations(modules, n) for n in range(len(modules) + 1)):
        yield frozenset((*chosen, *with_experts) if "experts" in chosen else chosen)
    yield frozenset(("block",))


@dataclass(frozen=True)
class Foldings:
    """Legal sizes of each axis for a model on a number of ranks."""

    world: int
    layers: int
    seq: int
    tp: tuple[int, ...]
    cp: tuple[int, ...]
    ep: tuple[int, ...]
    etp: tuple[int, ...]
    pp: tuple[int, ...]

    @classmethod
    def for_task(cls, task: TrainingTask) -> "Foldings":
        """Return the legal sizes for a task by the requirements in ``spec.decoder``."""
        model = model_needs(task.decoder, task.seq)
        world = task.cluster.devices
        sizes = dict[str, tuple[int, ...]]()
        for axis in ("tp", "cp", "ep", "etp"):
            units = [unit for unit in model.units if unit.axis == axis]
            possible = divisors(world) if units or axis in ("tp", "cp") else [1]
            sizes[axis] = tuple(n for n in possible if all(unit.allows(n) for unit in units))
        pp = tuple(size for size in divisors(world) if size <= model.layers)
        return cls(world, model.layers, task.seq, **sizes, pp=pp)

    @property
    def attention_grids(self) -> tuple[tuple[int, int], ...]:
        """All legal (tp, cp) with a row of a sequence for each of their ranks."""
        pairs = product(self.tp, self.cp)
        legal = [(tp, cp) for tp, cp in pairs if self.world % (tp * cp) == 0]
        return tuple((tp, cp) for tp, cp in legal if tp * cp <= self.seq)

    def expert_grids(self, tp: int, cp: int) -> list[tuple[int, int]]:
        """Return every (ep, etp) that is legal with a (tp, cp)."""
        pairs = product(self.ep, self.etp)
        return [(e, t) for e, t in pairs if self.world % math.lcm(tp * cp, e * t) == 0]

    def pipeline_sizes(self, tp: int, cp: int, ep: int, etp: int) -> list[int]:
        """Return every pp that is legal with the other axes."""
        grid_ranks = math.lcm(tp * cp, ep * etp)
        return [pp for pp in self.pp if self.world % (grid_ranks * pp) == 0]


@memoize(1 << 12)
def virtual_stages(schedule: Schedule, pp: int, m: int, layers: int) -> tuple[int, ...]:
    """Return the numbers of virtual stages that a schedule can run."""
    if pp == 1 or isinstance(schedule, OneFOneB):
        needs_pipeline = isinstance(schedule, (VShapedSchedule, ZeroBubbleH1, Interleaved))
        return () if pp == 1 and needs_pipeline else (1,)
    first = 2 if isinstance(schedule, Interleaved) else 1
    numbers = range(first, min(MAX_VIRTUAL_STAGES, layers // pp) + 1)
    return tuple(vpp for vpp in numbers if not any(schedule.violations(pp, vpp, m)))


def with_separate_multi_token(stages: Stages) -> Stages | None:
    """Return stages with multi-token layers moved off the loss's stage, None if impossible."""
    *letters, last = stages.letters
    if "m" not in last or not letters or any(letter in last for letter in LAYERS):
        return None
    *before, receiver = letters
    return Stages((*before, receiver + last.replace("L", ""), "L"))
