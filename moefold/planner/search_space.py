"""What a search chooses from: which values of each policy, and which foldings are legal."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, combinations, product

from moefold.mesh.legality import divisors
from moefold.mesh.pipeline import LAYERS, Stages
from moefold.planner.case import Dispatcher, Recipe
from moefold.planner.from_run import OTHERS, TrainingTask
from moefold.planner.hardware import Device
from moefold.schedule.config import (
    DualPipeV,
    Interleaved,
    Merged,
    OneFOneB,
    Schedule,
    ZeroBubbleH1,
    ZeroBubbleV,
)
from moefold.spec.decoder import halves, has_routing, needs
from moefold.spec.layer import NOTHING, Module, Modules

SCHEDULES: tuple[Schedule, ...] = (
    OneFOneB(), Interleaved(), Merged(), ZeroBubbleH1(), ZeroBubbleV(), DualPipeV()
)  # fmt: skip
"""All but GPipe, which takes as long as 1F1B and keeps more."""
SENDING: tuple[Dispatcher, ...] = (
    "alltoall", "alltoall_once", "two_level", "allgather", "deep_ep", "hybrid_ep"
)  # fmt: skip
"""All that move rows into as much room as they need; ``nccl_ep`` is planned as long as
``hybrid_ep``."""
MOST_ROWS = 32768
"""Tokens of a micro-batch beyond which no larger one is tried."""
VIRTUAL = 16
"""The most virtual stages per rank that are tried."""


@dataclass(frozen=True)
class Space:
    """The values that a search tries of each policy. Foldings are always all legal ones."""

    recipes: tuple[Recipe, ...]
    schedules: tuple[Schedule, ...] = SCHEDULES
    dispatchers: tuple[Dispatcher, ...] = SENDING
    recomputes: tuple[Modules, ...] = (NOTHING,)
    offloads: tuple[Modules, ...] = (NOTHING,)
    optimizer_offloads: tuple[float, ...] = (0.0,)
    micro_batches: tuple[int, ...] = (1,)
    apart: bool = True
    """Whether multi-token layers may lie apart from the loss."""

    def shares(self, pp: int) -> Iterator[tuple[int, float]]:
        """Yield ZeRO stages and shares of the optimizer on the host.

        Stages 2 and 3 only where no pipeline is in the way: with them the longest searches
        take more than twice as long, and none of twenty finds anything faster. Stage 0 keeps more
        and gains nothing.
        """
        return product((1, 2, 3) if pp == 1 else (1,), self.optimizer_offloads)

    @cached_property
    def kept(self) -> tuple[tuple[Modules, Modules], ...]:
        """What is recomputed and what is offloaded: nothing is both."""
        pairs = product(self.recomputes, self.offloads)
        return tuple((a, o) for a, o in pairs if not (a & o or (o and "block" in a)))


def everything(task: TrainingTask) -> Space:
    """Return all that can be planned for a task on its device."""
    space = replace(
        today(task),
        recipes=formats(task.cluster.device, task.numbers.recipe),
        dispatchers=SENDING,
        apart=True,
    )
    if not task.cluster.device.host_bandwidth:
        return space
    experts: Modules = frozenset(("experts",))
    return replace(space, offloads=(NOTHING, experts), optimizer_offloads=(0.0, 1.0))


def today(task: TrainingTask) -> Space:
    """Return what training executes of it by itself, in the run's own number format."""
    most = max(1, MOST_ROWS // task.seq)
    return Space(
        recipes=(task.numbers.recipe,),
        dispatchers=tuple(name for name in SENDING if name not in OTHERS),
        recomputes=tuple(_recomputes(task)),
        micro_batches=tuple(size for size in divisors(task.batch) if size <= most),
        apart=False,
    )


def formats(device: Device, asked: Recipe) -> tuple[Recipe, ...]:
    """Return the asked recipe, and the narrower ones that a device has units for."""
    known, found = dict(device.peaks), list[Recipe]()
    if asked == "fp32":
        found.append("fp32")
    if "bf16" in known:
        found.append("bf16")
    if "fp4" in known:
        found += ("mxfp8", "nvfp4")
    elif "fp8" in known:
        found += ("fp8_block", "fp8_tensor")
    return tuple(found or ["fp32"])


def _recomputes(task: TrainingTask) -> Iterator[Modules]:
    """Yield what can be made again: sets of cheap and dear modules, and whole blocks."""
    blocks = [block for stack in task.decoder.stacks for block in stack.blocks]
    hidden = task.decoder.hidden
    specs = [spec for block in blocks for _, spec in halves(block)]
    operations = {one.name for spec in specs for one in spec.operations(hidden)}
    moefold = task.software.stack == "moefold"
    beside: set[Module] = set()
    if not all(has_routing(block.ffn) for block in blocks):
        beside.add("ffn")
    if "shared" in operations:
        beside.add("shared")
    beside_norms: list[Module] = ["experts", "permute", "gather"] if moefold else ["moe_act"]
    names: list[Module] = ["norms", "attention", *beside_norms]
    if "mla_up" in operations:
        names.append("mla_up")
    for chosen in chain.from_iterable(combinations(names, n) for n in range(len(names) + 1)):
        yield frozenset((*chosen, *beside) if "experts" in chosen else chosen)
    yield frozenset(("block",))


@dataclass(frozen=True)
class Foldings:
    """The legal sizes of each axis for a model on a number of ranks."""

    world: int
    layers: int
    tp: tuple[int, ...]
    cp: tuple[int, ...]
    ep: tuple[int, ...]
    etp: tuple[int, ...]
    pp: tuple[int, ...]

    @classmethod
    def of(cls, task: TrainingTask) -> "Foldings":
        """Return the legal sizes of a task; ``spec.decoder`` states what a model asks."""
        model, world = needs(task.decoder, task.seq), task.cluster.devices
        sizes = dict[str, tuple[int, ...]]()
        for axis in ("tp", "cp", "ep", "etp"):
            asked = [need.number for need in model.needs if need.axis == axis]
            known = asked or axis in ("tp", "cp")
            sizes[axis] = tuple(divisors(math.gcd(world, *asked))) if known else (1,)
        pp = tuple(size for size in divisors(world) if size <= model.layers)
        return cls(world, model.layers, **sizes, pp=pp)

    @property
    def attention(self) -> tuple[tuple[int, int], ...]:
        """Every (tp, cp)."""
        return tuple((t, c) for t in self.tp for c in self.cp if self.world % (t * c) == 0)

    def experts(self, tp: int, cp: int) -> list[tuple[int, int]]:
        """Return every (ep, etp) that goes with a (tp, cp)."""
        pairs = product(self.ep, self.etp)
        return [(e, t) for e, t in pairs if self.world % math.lcm(tp * cp, e * t) == 0]

    def pipelines(self, tp: int, cp: int, ep: int, etp: int) -> list[int]:
        """Return every pp that goes with the other axes."""
        least = math.lcm(tp * cp, ep * etp)
        return [pp for pp in self.pp if self.world % (least * pp) == 0]


def apart(stages: Stages) -> Stages | None:
    """Return stages with multi-token layers moved off the loss's stage, None where none can."""
    last = stages.letters[-1]
    if "m" not in last or len(stages.letters) < 2 or any(x in last for x in LAYERS):
        return None
    tail = last.replace("L", "")
    return Stages((*stages.letters[:-2], stages.letters[-2] + tail, "L"))
