"""What is missing where no layout fits: the least memory of any, its largest parts, and remedies.

Each remedy is a changed task for which a layout that fits has been found.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import ceil, log2

from moefold.mesh.config import MAX_RANKS
from moefold.mesh.shares import largest_share
from moefold.planner.case import Case
from moefold.planner.memory import StageMemory, fullest_rank
from moefold.planner.recompute import MEMORY_RESERVE
from moefold.planner.search import FoundLayout, Search
from moefold.planner.search_space import SearchSpace, full_space, offloading_space
from moefold.planner.task import TrainingTask
from moefold.spec.tuning import with_usual_adapter

VERDICT_MARGIN = 1.1
"""Least memory over the limit beyond which no layout is searched for: least memory is that of
balanced stages, and others can need a little less."""
MAX_DOUBLINGS = 2
"""Numbers of devices that are tried, each twice the one before."""
SHOWN_PARTS = 3


@dataclass(frozen=True)
class Remedy:
    """A change of a task with which a layout fits."""

    change: str
    """What to add to the command, or to replace in it."""
    task: TrainingTask = field(repr=False)
    found: FoundLayout = field(repr=False)
    """The layout that fits: one with little memory, not the fastest."""


@dataclass(frozen=True)
class Shortfall:
    """Why a task fits in no layout, and what would make it fit."""

    least: FoundLayout | None
    """The layout with the least memory; None if no layout is legal."""
    limit_bytes: float
    """Bytes that a layout may need: those of a device without the reserve."""
    parts: tuple[tuple[str, float], ...]
    """The largest parts of the least memory, in bytes."""
    remedies: tuple[Remedy, ...]
    """Changes that make it fit, the cheapest first; empty if none of those tried does."""
    tried: tuple[str, ...]
    """All changes that were tried."""


def memory_limit(task: TrainingTask) -> float:
    """Return the bytes that a layout may need on each device."""
    return task.cluster.device.memory_bytes * (1 - MEMORY_RESERVE)


def may_fit(search: Search, space: SearchSpace) -> bool:
    """Return whether a search of a space can find a layout that fits; False only if its least
    memory is clearly above the limit.
    """
    room = memory_limit(search.task) * VERDICT_MARGIN
    return search.first_within(space.thrifty, room) is not None


def find_shortfall(task: TrainingTask) -> Shortfall:
    """Return why a task fits in no layout, with the changes that make it fit."""
    search = Search(task)
    found = filter(None, (search.least_memory(space) for space in _spaces(task)))
    least = min(found, key=lambda layout: layout.peak_bytes, default=None)
    tries = _Tries()
    if least is None:
        batch = ceil(task.batch / task.cluster.devices) * task.cluster.devices
        tries.first_fit([(f"a batch of {batch:,} sequences", replace(task, batch=batch))])
    for change, changed in adapted(task) if least else ():
        small = Search(changed).least_memory(next(_spaces(changed)))
        if not tries.first_fit([(change, changed)]) and small:
            tries.first_fit(
                (f"{change}, {more}", one) for more, one in more_devices(changed, small)
            )
    if least is not None:
        tries.first_fit(more_devices(task, least))
    parts = largest_parts(least.case) if least else ()
    remedies = tuple(tries.remedies)
    return Shortfall(least, memory_limit(task), parts, remedies, tuple(tries.changes))


def _spaces(task: TrainingTask) -> Iterator[SearchSpace]:
    """Yield the spaces of layouts with little memory: those of training first."""
    if not task.untrained_kinds:
        yield offloading_space(task).thrifty
    yield full_space(task).thrifty


@dataclass
class _Tries:
    """Changes that were tried, and those with which a layout fits."""

    changes: list[str] = field(default_factory=list)
    remedies: list[Remedy] = field(default_factory=list)

    def first_fit(self, changes: Iterable[tuple[str, TrainingTask]]) -> bool:
        """Try changes up to the first that makes a layout fit; return whether one does."""
        for change, task in changes:
            self.changes.append(change)
            found = _first_fitting(task)
            if found is not None:
                self.remedies.append(Remedy(change, task, found))
                return True
        return False


def _first_fitting(task: TrainingTask) -> FoundLayout | None:
    search = Search(task)
    found = (search.first_within(space, memory_limit(task)) for space in _spaces(task))
    return next(filter(None, found), None)


# ----------------------------------------------------------------------------- changes


def adapted(task: TrainingTask) -> Iterator[tuple[str, TrainingTask]]:
    """Yield training of an adapter, unless the task has frozen weights already."""
    tuned = with_usual_adapter(task.decoder)
    if tuned is not None:
        override, decoder = tuned
        yield override, replace(task, decoder=decoder)


def more_devices(task: TrainingTask, least: FoundLayout) -> Iterator[tuple[str, TrainingTask]]:
    """Yield more devices by powers of two, from the fewest that could have room for the least
    memory: n times as many need at least an n-th of it each.
    """
    cluster = task.cluster
    if not cluster.device.link_bandwidth:
        return
    first = max(1, ceil(log2(least.peak_bytes / memory_limit(task))))
    for power in range(first, first + MAX_DOUBLINGS):
        devices = cluster.devices * 2**power
        if devices <= MAX_RANKS:
            more = replace(cluster, devices=devices)
            change = f"{devices:,} {cluster.device.name} (not {cluster.devices:,})"
            yield change, replace(task, cluster=more)


# ----------------------------------------------------------------------------- parts


def largest_parts(case: Case) -> tuple[tuple[str, float], ...]:
    """Return the largest parts of a case's memory on its fullest rank, in bytes."""
    memory = fullest_rank(case)
    parts = memory.parts
    logits, holder = _logits(case, memory)
    sizes = {
        "weights": parts["weights"],
        "optimizer state": parts["master"] + parts["moments"],
        "gradients": parts["gradients"],
        "activations": parts["activations"] + parts.get("operands", 0.0),
        "working memory": parts["working"],
        "logits": logits,
    }
    sizes[holder] -= logits
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    return tuple(ordered[:SHOWN_PARTS])


def _logits(case: Case, memory: StageMemory) -> tuple[float, str]:
    """Return the bytes of logits at the peak, and the part of memory that counts them: they are
    activations where a stack saves all of them, and temporary where it computes them by chunks.
    """
    if not case.contents.ranks[memory.rank].loss:
        return 0.0, "working memory"
    rows = case.rows * case.sizes.tp
    columns = largest_share(case.decoder.vocab, case.sizes.tp)
    chunk = case.software.logits_chunk
    if chunk is None:
        # In the products' format, and without a fused loss in fp32 too.
        each = 2.0 if case.software.fuses_loss else 6.0
        return min(rows * columns * each, memory.parts["activations"]), "activations"
    size = min(rows, chunk) * columns * 2.0
    # With less in use, the peak is not that of the loss.
    return (size if memory.parts["working"] >= size else 0.0), "working memory"
