"""Trace of a step on its ranks, and the parts that each rank's seconds consist of.

A rank's step is a stretch of its timeline. On a CPU it is that of the thread that computes: in an
operator, blocked in an exchange or for another rank that is late, or, all else, between operators.
On a GPU it is the device's: in a kernel, in a kernel that communicates, or idle, since the host has
not launched the next one.
"""

import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from moefold.comm.collectives import gather_objects, sum_
from moefold.comm.recorder import BACKWARD, FORWARD, TimedCall
from moefold.comm.world import World
from moefold.mesh.folding import Folding
from moefold.parallel.apply import ModelParts
from moefold.parallel.pipeline.lanes import LANE_WAIT
from moefold.planner.walls import OTHER_STAGES, RankWalls, StepWalls
from moefold.training.figures import routing_health

Interval = tuple[float, float]
"""Start and end in seconds of ``time.monotonic``."""
OperationKey = tuple[str, int]
"""Channel and number of an operation, equal on all its ranks."""
AFTER_EXPERTS = (".combine", FORWARD), (".dispatch", BACKWARD)
"""Exchanges that follow the experts' products: their module's suffix, and direction."""
ANCHOR = "start of a trace"
"""Name of an event whose time is known by both clocks."""
PRODUCTS = re.compile(
    r"mm\b|mm_|addmv|::mv|linear|conv|attention|dot_product|cutlass|gemm|nvjet|xmma|flash|fmha"
)
"""Operators and kernels that multiply matrices or attend."""
OWN_PRODUCTS = ("_product", "_weight_gradient")
"""The package's kernels that do."""
HOST_OP_NAMES = """
as_strided view _unsafe_view reshape _reshape_alias view_as expand expand_as t transpose permute
movedim select slice narrow unsqueeze squeeze split split_with_sizes unbind chunk unflatten flatten
detach detach_ alias lift_fresh empty empty_like empty_strided new_empty new_empty_strided resize_
set_ contiguous to _to_copy clone linear matmul item _local_scalar_dense is_nonzero resolve_conj
resolve_neg result_type zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full
"""
HOST_OPS = frozenset(HOST_OP_NAMES.split())
"""Operators whose own time, without those that they call, is spent on the host."""


class Operator(NamedTuple):
    """An operator of the computing thread, or a kernel of the device."""

    name: str
    start: float
    end: float


class StepTrace:
    """Traces a step on all ranks: ``start``, the step, ``stop``; each is called on every rank."""

    def __init__(self, world: World) -> None:
        self._world = world
        # Otherwise the profiler writes a line to stderr whenever it starts and stops.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        activities = [ProfilerActivity.CPU]
        if world.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._origin = 0.0
        self._anchored = 0.0

    def start(self) -> None:
        """Start to record."""
        self._profile.start()
        recorder = self._world.recorder
        recorder.timeline = []
        if self._world.size > 1:
            sum_(torch.zeros(1), self._world.on_host)
        # Ranks leave the sum together, so that times from here on compare across machines.
        self._origin = time.monotonic()
        recorder.timeline = []
        self._anchored = time.monotonic()
        with record_function(ANCHOR):
            pass

    def stop(self, failed: bool = False) -> None:
        """Stop to record; the trace can be written and measured then.

        ``failed``: whether the ranks have failed, so that nothing of theirs is waited for.
        """
        self._calls = self._world.recorder.stop_timeline(waits=not failed)
        self._profile.stop()

    def write(self, file: Path) -> None:
        """Write this rank's trace, for ``chrome://tracing`` or ``ui.perfetto.dev``."""
        self._profile.export_chrome_trace(str(file))

    def measure(self, window: Interval, parts: ModelParts) -> StepWalls:
        """Return the parts of the step that took ``window`` on this rank; all ranks call it."""
        begun = {}
        for timed in self._calls:
            channel, number = timed.call.key
            begun.setdefault(channel, {})[number] = timed.call.begun - self._origin
        arrivals: dict[OperationKey, float] = {}
        for by_channel in gather_objects(begun, self._world.on_host):
            for channel, by_number in by_channel.items():
                for number, seconds in by_number.items():
                    key = channel, int(number)
                    arrivals[key] = max(arrivals.get(key, 0.0), seconds)
        arrivals = {key: seconds + self._origin for key, seconds in arrivals.items()}
        rank = self._measure_rank(window, arrivals)
        ranks = [RankWalls(**one) for one in gather_objects(vars(rank), self._world.on_host)]
        if self._world.device.type == "cuda":
            ranks = split_waits(ranks)
        load, hottest = expert_load(routing_health(parts), parts.layout.split.ep)
        return StepWalls(tuple(ranks), load, hottest)

    def _measure_rank(self, window: Interval, arrivals: dict[OperationKey, float]) -> RankWalls:
        operators, transfers, lane_waits = self._events()
        if self._world.device.type == "cuda":
            layers = [*work_layers(operators, nested=False), ("exchange", transfers)]
            exposed = subtracted(
                merged(transfers), merged(chain(*(found for _, found in layers[:-1])))
            )
            running = transfers
        else:
            here = self._world.folding, threading.get_ident()
            blocked, running = blocked_layers(self._calls, arrivals, lane_waits, *here)
            running += begun_by_all(transfers, self._calls, arrivals)
            layers = [*blocked, *work_layers(operators)]
            exposed = merged(chain(*(found for _, found in blocked)))
        hidden = length(clipped(subtracted(merged(running), exposed), window))
        inside = [timed.call.record for timed in self._calls if timed.ended <= window[1]]
        sent = sum(record.bytes for record in inside)
        seconds = partition(window, layers)
        return RankWalls(self._world.attention.pp, window[1] - window[0], seconds, hidden, sent)

    def _events(self) -> tuple[list[Operator], list[Interval], list[Interval]]:
        """Return operators or kernels, transfers in the background, and waits between lanes."""
        profiler = self._profile.profiler
        assert profiler is not None and profiler.kineto_results is not None, "it has stopped"
        events = profiler.kineto_results.events()
        anchor = next(event for event in events if event.name() == ANCHOR)
        offset = self._anchored - anchor.start_ns() * 1e-9
        thread = anchor.start_thread_id()
        on_cpu = anchor.device_type()
        of_device = self._world.device.type == "cuda"
        operators = list[Operator]()
        transfers = list[Interval]()
        waits = list[Interval]()
        for event in events:
            name = event.name()
            start = event.start_ns()
            span = start * 1e-9 + offset, (start + event.duration_ns()) * 1e-9 + offset
            is_kernel = event.device_type() != on_cpu
            is_main = not is_kernel and event.start_thread_id() == thread
            if name.startswith("gloo:") or (is_kernel and "nccl" in name.lower()):
                transfers.append(span)
            elif name == LANE_WAIT:
                waits.append(span)
            elif is_kernel or (is_main and not of_device and is_operator(name)):
                operators.append(Operator(name, *span))
        return operators, transfers, waits


def begun_by_all(
    transfers: Iterable[Interval],
    calls: Iterable[TimedCall],
    arrivals: Mapping[OperationKey, float],
) -> list[Interval]:
    """Return transfers in the background from when the last rank had begun them.

    They are those of operations for which this rank waited only later, in their order.
    """
    later = [timed for timed in calls if timed.call.since != timed.call.begun]
    later.sort(key=lambda timed: timed.call.begun)
    answer = list[Interval]()
    for start, end in sorted(transfers):
        for timed in later:
            if timed.call.begun <= start and end <= timed.ended:
                answer.append((max(start, arrivals[timed.call.key]), end))
                later.remove(timed)
                break
    return answer


def blocked_layers(
    calls: Iterable[TimedCall],
    arrivals: Mapping[OperationKey, float],
    lane_waits: Sequence[Interval],
    folding: Folding,
    main: int,
) -> tuple[list[tuple[str, list[Interval]]], list[Interval]]:
    """Return when the computing thread was blocked, by part, and when exchanges ran.

    Until the last rank has begun an exchange the others wait for it; then they exchange.

    Args:
        calls: this rank's operations.
        arrivals: when the last rank began each of them.
        lane_waits: when the computing thread waited for the thread that exchanges beside it.
        folding: the ranks of the run.
        main: the computing thread.
    """
    waits: dict[str, list[Interval]] = {}
    exchanges = list[Interval]()
    running = list[Interval]()
    for timed in calls:
        call = timed.call
        arrived = min(max(arrivals[call.key], call.begun), timed.ended)
        # What a rank waits for only later is known to run as the back end's thread says.
        since = arrived if call.since == call.begun else max(arrived, call.since)
        running.append((since, timed.ended))
        if not call.blocking:
            continue
        blocked = [(call.since, timed.ended)] if timed.thread == main else lane_waits
        late = clipped(blocked, (call.since, arrived))
        waits.setdefault(_late_part(timed, folding), []).extend(late)
        exchanges.extend(clipped(blocked, (max(arrived, call.since), timed.ended)))
    # What is left of waits for the other thread is what it does around exchanges.
    exchanges.extend(lane_waits)
    return [*waits.items(), ("exchange", exchanges)], running


def _late_part(timed: TimedCall, folding: Folding) -> str:
    """Return the part of a step that a wait for a late rank is."""
    if len({folding.attention_coordinates(rank).pp for rank in timed.call.ranks}) > 1:
        return OTHER_STAGES
    site = timed.call.record.site
    for suffix, direction in AFTER_EXPERTS:
        if site.label.endswith(suffix) and site.direction == direction:
            return "experts"
    return "ranks"


def split_waits(ranks: Sequence[RankWalls]) -> list[RankWalls]:
    """Split exchanges whose kernels also wait for late ranks: what all ranks take is the exchange.

    What all ranks of a stage take beyond that is a wait for other stages.
    """
    least = min(rank.parts["exchange"] for rank in ranks)
    answer = []
    for rank in ranks:
        own = rank.parts["exchange"]
        stage = min(other.parts["exchange"] for other in ranks if other.pp == rank.pp)
        waits = {"exchange": least, OTHER_STAGES: stage - least, "ranks": own - stage}
        answer.append(replace(rank, parts={**rank.parts, **waits}))
    return answer


def is_operator(name: str) -> bool:
    """Return whether a traced event is an operator, rather than a range that contains some."""
    space, found, _ = name.partition("::")
    return bool(found) and space not in ("autograd", "c10d", "gloo", "nccl", "profiler")


def work_layers(
    operators: Iterable[Operator], nested: bool = True
) -> list[tuple[str, list[Interval]]]:
    """Return the time of operators by part, each without those that it calls, or of kernels.

    ``nested``: whether they are operators; kernels call none.
    """
    found: dict[str, list[Interval]] = {"products": [], "memory": []}
    timed = own_times(operators) if nested else ((op, [(op.start, op.end)]) for op in operators)
    for operator, own in timed:
        name = operator.name.rpartition("::")[2]
        if (PRODUCTS.search(operator.name) and name not in HOST_OPS) or name in OWN_PRODUCTS:
            found["products"].extend(own)
        elif name not in HOST_OPS:
            found["memory"].extend(own)
    return list(found.items())


def own_times(operators: Iterable[Operator]) -> Iterator[tuple[Operator, list[Interval]]]:
    """Yield operators with their intervals outside of the operators that they contain."""
    open_: list[tuple[Operator, list[Interval], float]] = []
    ordered = sorted(operators, key=lambda op: (op.start, -op.end))
    for operator in [*ordered, None]:
        while open_ and (operator is None or open_[-1][0].end <= operator.start):
            outer, own, since = open_.pop()
            yield outer, [*own, (since, outer.end)]
        if operator is None:
            return
        if open_:
            outer, own, since = open_[-1]
            open_[-1] = outer, [*own, (since, operator.start)], max(since, operator.end)
        open_.append((operator, [], operator.start))


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return intervals in order, overlapping ones as one."""
    answer = list[Interval]()
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if answer and start <= answer[-1][1]:
            answer[-1] = answer[-1][0], max(end, answer[-1][1])
        else:
            answer.append((start, end))
    return answer


def clipped(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """Return the parts of intervals inside a window."""
    first, last = window
    inside = ((max(start, first), min(end, last)) for start, end in intervals)
    return [(start, end) for start, end in inside if start < end]


def subtracted(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return what of merged intervals lies outside of other merged ones."""
    answer = list[Interval]()
    at = 0
    for start, end in intervals:
        while at < len(others) and others[at][1] <= start:
            at += 1
        index = at
        while index < len(others) and others[index][0] < end:
            answer.append((start, others[index][0]))
            start = max(start, others[index][1])
            index += 1
        answer.append((start, end))
    return [(start, end) for start, end in answer if start < end]


def length(intervals: Iterable[Interval]) -> float:
    """Return the seconds of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def partition(
    window: Interval, layers: Sequence[tuple[str, Sequence[Interval]]]
) -> dict[str, float]:
    """Return the seconds of a window by part; time of no layer is the host's.

    Where layers overlap, the first counts.
    """
    seconds = dict[str, float]()
    taken = list[Interval]()
    for name, intervals in layers:
        fresh = subtracted(clipped(merged(intervals), window), taken)
        seconds[name] = seconds.get(name, 0.0) + length(fresh)
        taken = merged([*taken, *fresh])
    seconds["host"] = length(subtracted([window], taken))
    return seconds


def expert_load(
    health: Sequence[dict[str, Any]], ep: int
) -> tuple[float, tuple[int, int, float] | None]:
    """Return the fullest expert rank's rows over the mean, and the hottest expert of all layers.

    The first is the mean of the layers, whose experts ``ep`` ranks share evenly.
    """
    loads = list[float]()
    hottest: tuple[int, int, float] | None = None
    for layer in health:
        load = layer["load"]
        if not sum(load):
            continue
        share = len(load) // ep
        ranks = [sum(load[first : first + share]) for first in range(0, len(load), share)]
        loads.append(max(ranks) * len(ranks) / sum(ranks))
        most = max(range(len(load)), key=load.__getitem__)
        times = load[most] * len(load) / sum(load)
        if hottest is None or times > hottest[2]:
            hottest = layer["layer"], most, times
    return (sum(loads) / len(loads) if loads else 1.0), hottest
