"""Walls of a step: the parts that its seconds consist of, measured on its ranks beside planned.

A rank works (products, memory traffic), exchanges, or waits: for its host, or for other ranks,
which have more rows of hot experts, a heavier stage, or anything else to do. The parts of a rank
add up to its step, and a step is shown as the mean over its ranks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from moefold.moe.dispatch.config import Clones
from moefold.planner.case import Case
from moefold.planner.search_change import ChangedLayout, LayoutChange, suggest_changes
from moefold.planner.task import TrainingTask
from moefold.planner.time import BOTTLENECKS, estimate_time
from moefold.spec.decoder import model_needs

WALLS = {
    "products": "matrix products and attention",
    "memory": "memory traffic",
    "exchange": "exchange, exposed",
    "host": "waits for the host",
    "experts": "imbalance between experts",
    "stages": "imbalance between stages",
    "ranks": "imbalance between ranks",
    "bubble": "pipeline bubble",
}
"""Parts of a step, in words."""
WORK = ("products", "memory")
"""Parts in which a rank computes; all others are losses."""
OTHER_STAGES = "other stages"
"""A rank's measured waits for other stages: imbalance between stages, and the bubble."""
LEAST_LOSS = 0.25
"""Share of a step from which on its largest loss counts as its wall, however long it computes."""
OF_BOTTLENECKS = {
    "compute": "products",
    "memory bandwidth": "memory",
    "communication": "exchange",
    "host": "host",
    "pipeline": "bubble",
}
PER_STEP = ("bubble", "dp", "optimizer", "step")
"""Planned parts of a step that are not those of its micro-batches."""
MAX_SLOTS = 4
"""Most slots per rank for clones of hot experts that are tried."""


@dataclass(frozen=True)
class RankWalls:
    """Measured parts of one rank's step."""

    pp: int
    """Index of its pipeline stage."""
    seconds: float
    parts: Mapping[str, float]
    """Seconds by part: those of ``WALLS`` before stages are compared, and ``OTHER_STAGES``."""
    hidden: float
    """Seconds of exchanges during which the rank computed."""
    sent: int
    """Bytes sent to other ranks."""


@dataclass(frozen=True)
class StepWalls:
    """Measured parts of a step on all its ranks."""

    ranks: tuple[RankWalls, ...]
    load: float = 1.0
    """Rows of the fullest expert rank over the mean, the mean of all layers."""
    hottest: tuple[int, int, float] | None = None
    """Layer and number of the expert with most rows, and its rows over the mean expert's."""

    @property
    def seconds(self) -> float:
        """Seconds of the step, the mean over the ranks."""
        return mean(rank.seconds for rank in self.ranks)

    @property
    def hidden(self) -> float:
        """Seconds of exchanges during which ranks computed, the mean over the ranks."""
        return mean(rank.hidden for rank in self.ranks)

    @property
    def busy(self) -> list[float]:
        """Seconds of each rank without waits for other stages."""
        return [rank.seconds - rank.parts.get(OTHER_STAGES, 0.0) for rank in self.ranks]

    @property
    def by_rank(self) -> list[dict[str, float]]:
        """Seconds of each rank by the parts of ``WALLS``; they add up to the rank's step.

        Waits for other stages are imbalance as far as another rank is busy for longer, and the
        bubble beyond that.
        """
        longest = max(self.busy)
        answer = []
        for rank, busy in zip(self.ranks, self.busy, strict=True):
            parts = {name: rank.parts.get(name, 0.0) for name in WALLS}
            waits = rank.parts.get(OTHER_STAGES, 0.0)
            parts["stages"] = min(waits, longest - busy)
            parts["bubble"] = waits - parts["stages"]
            answer.append(parts)
        return answer

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by the parts of ``WALLS``, the mean over the ranks."""
        by_rank = self.by_rank
        return {name: mean(parts[name] for parts in by_rank) for name in WALLS}

    @property
    def wall(self) -> str:
        """The part that bounds the step: the largest loss if it is large, else the largest part."""
        parts = self.parts
        losses = {name: seconds for name, seconds in parts.items() if name not in WORK}
        loss = max(losses, key=losses.__getitem__)
        if losses[loss] >= LEAST_LOSS * self.seconds:
            return loss
        return max(parts, key=parts.__getitem__)

    @property
    def evidence(self) -> str:
        """What the ranks show about the wall; empty if nothing more."""
        if self.wall == "experts" and self.hottest is not None:
            layer, expert, load = self.hottest
            return (
                f"the fullest rank has {self.load:.2f} times the mean rows; expert {expert} of "
                f"layer {layer} has {load:.1f} times the mean expert's"
            )
        if self.wall == "stages":
            stages = sorted({rank.pp for rank in self.ranks})
            busy = [
                max(b for r, b in zip(self.ranks, self.busy, strict=True) if r.pp == pp)
                for pp in stages
            ]
            heaviest = max(stages, key=busy.__getitem__)
            seconds = ", ".join(f"stage {pp} {busy[pp]:.3g} s" for pp in stages)
            return f"stage {heaviest} is the heaviest; busy: {seconds}"
        if self.wall == "ranks":
            waits = [parts["ranks"] for parts in self.by_rank]
            slow = min(range(len(waits)), key=waits.__getitem__)
            means = self.parts
            excess = {
                name: seconds - means[name]
                for name, seconds in self.by_rank[slow].items()
                if name != "ranks"
            }
            most = max(excess, key=excess.__getitem__)
            return (
                f"rank {slow} waits least and others wait for it: its {WALLS[most]} takes "
                f"{excess[most]:.3g} s more than the mean"
            )
        return ""

    def to_json(self) -> dict[str, Any]:
        """Return the measurement and what follows from it, as plain data."""
        return {
            "seconds": self.seconds,
            "parts": self.parts,
            "hidden_exchange": self.hidden,
            "wall": self.wall,
            "evidence": self.evidence,
            "load": self.load,
            "hottest": self.hottest,
            "ranks": [vars(rank) for rank in self.ranks],
            "parts_by_rank": self.by_rank,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "StepWalls":
        """Read the measurement of :meth:`to_json`."""
        hottest = data["hottest"]
        ranks = tuple(RankWalls(**rank) for rank in data["ranks"])
        return cls(ranks, data["load"], None if hottest is None else tuple(hottest))


def planned_walls(case: Case) -> tuple[dict[str, float], float]:
    """Return the planned seconds of a step by the parts of ``WALLS``, and of hidden exchanges.

    As measured ones these are the mean over the ranks: the slowest stage's seconds beyond the mean
    are imbalance, and so is what the fullest expert rank adds.
    """
    full = estimate_time(case)
    even = full if case.load == 1 else estimate_time(replace(case, load=1.0))
    seconds = [forward + backward for forward, backward in even.ranks]
    share = mean(seconds) / max(seconds)
    walls = dict.fromkeys(WALLS, 0.0)
    for bottleneck, names in BOTTLENECKS.items():
        for name in names:
            part = even.parts.get(name, 0.0)
            kept = part if name in PER_STEP else part * share
            walls[OF_BOTTLENECKS[bottleneck]] += kept
            walls["stages"] += part - kept
    walls["experts"] = full.seconds - even.seconds
    return walls, sum(even.hidden.values())


def best_change(task: TrainingTask, case: Case, wall: str) -> LayoutChange | None:
    """Return the change of a layout that the planner thinks best against a wall, if any is faster.

    It is the one that takes most from the wall's planned seconds; where none does, the fastest.
    """
    changes = suggest_changes(task, case, changes_against(task, case, wall))
    before = planned_walls(case)[0][wall]
    useful = [
        (before - planned_walls(change.case)[0][wall], change)
        for change in changes
        if change.fits and change.saved_share > 0
    ]
    if not useful:
        return None
    gain, change = max(useful, key=lambda pair: pair[0])
    return change if gain > 0 else useful[0][1]


def beside_plan(walls: StepWalls, planned: tuple[TrainingTask, Case] | None) -> dict[str, Any]:
    """Return a step's walls, measured and planned, and the best change, as plain data."""
    answer = walls.to_json() | {"planned": None, "change": None}
    if planned is None:
        return answer
    parts, hidden = planned_walls(planned[1])
    change = best_change(*planned, walls.wall)
    seconds = sum(parts.values())
    answer["planned"] = {"seconds": seconds, "parts": parts, "hidden_exchange": hidden}
    if change is not None:
        saved = change.saved_share
        answer["change"] = {"change": change.description, "saved_share": saved}
    return answer


def changes_against(
    task: TrainingTask, case: Case, wall: str
) -> Iterator[tuple[str, ChangedLayout]]:
    """Yield changes that only make sense against a wall, with descriptions."""
    layout = case.layout
    given = ChangedLayout(layout, case.micro_batch, case.number_formats.recipe)
    if wall == "stages" and layout.stages is not None:
        yield "stages by weight (no layout.stages)", given.relaid(stages=None)
    if wall == "experts" and case.sizes.ep > 1:
        needs = model_needs(task.decoder, task.seq)
        for slots in range(case.clones + 1, MAX_SLOTS + 1):
            changed = given.relaid(clones=Clones(slots=slots))
            if not list(changed.layout.violations(needs)):
                yield f"clones of hot experts, {slots} slots per rank", changed
