"""Memory of a rank during a step, by part, from the schedule's table.

State is constant; activations of a chunk live from its forward to its backward; temporaries live
during one action. Ranks of a stage differ only in their experts' load, so that one rank per stage
is planned: the one whose experts get the most rows. A table is periodic: of its thousands of
actions few differ, and fewer can be the peak. :func:`after_each` yields the memory after each
action, activations by row, for comparison with a run.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from operator import add, mul
from typing import NamedTuple

from moefold.layers.config import offloaded_layers
from moefold.mesh.folding import ATTENTION, EXPERTS, GROUP_KINDS
from moefold.mesh.grid import Grid
from moefold.planner.case import Case, Held, kinds, main_layers, settled
from moefold.planner.hardware import Device
from moefold.planner.memory_chunk import ChunkBytes, ChunkSizes, departing
from moefold.planner.memory_graphs import in_flight, pass_bytes, row_bytes
from moefold.planner.memory_kept import layer_kept, shape_of
from moefold.planner.memory_pages import ChunkBlocks, here, page_bytes, pages
from moefold.planner.memory_state import Split, State
from moefold.planner.memory_steps import Running, fullest_steps, steps_of
from moefold.planner.remember import remembered
from moefold.planner.time_data import copies_of

MIB = 2**20


@dataclass(frozen=True)
class Overheads:
    """Memory of software besides tensors, independent of model and layout."""

    context: float = 0.0
    """Bytes of driver, libraries and kernels outside the allocator."""
    communicator: float = 0.0
    """Bytes of the buffers of one communicator."""
    fragments: float = 0.0
    """Reserved but unused memory of the allocator, as a share of allocated memory."""
    graphs: float = 0.0
    """Share of activations that partial CUDA graphs store a second time in static buffers."""


GPU = Overheads(context=700 * MIB, communicator=150 * MIB, fragments=0.045, graphs=0.05)
"""Context and communicators: the order of magnitude in NVIDIA's and NCCL's documents. Fragments:
72-73 GB reserved for 69-70 GB allocated, GPT-OSS-120B on 32 H100. Graphs: about 7 GB of
DeepSeek-V3's 131 GB of activations (arXiv 2603.07685, section 4.3.6)."""
CPU = Overheads()
"""A CPU's allocator returns unused memory; memory of the process itself is not counted."""


@dataclass(frozen=True)
class Moment:
    """Bytes of memory while one action runs."""

    label: str
    """The action, such as ``F3`` or ``B0'1``; ``step`` is the optimizer's."""
    activations: float
    operands: float
    """Operands of deferred weight-gradient products, stored between I and W."""
    working: float
    """Temporaries of the action."""
    gradients: float
    """Gradients allocated so far."""
    host: float = 0.0
    """Activations in host memory; not part of the total."""
    disk: float = 0.0

    @property
    def total(self) -> float:
        """Bytes on the device that do not last for the whole step."""
        return self.activations + self.operands + self.working + self.gradients


@dataclass(frozen=True)
class Memory:
    """Memory of one rank of a pipeline stage during a step, in bytes."""

    rank: int
    """The pipeline rank."""
    state: State
    overheads: float
    """Memory of software outside the allocator."""
    fragments: float
    """Reserved but unused memory as a share of allocated memory."""
    moments: tuple[Moment, ...] = field(repr=False)
    """Memory during each action, in order."""
    tier: str = "host"
    """Where offloaded state is stored: host or disk."""

    @property
    def elsewhere(self) -> dict[str, float]:
        """Bytes of state and pages on the host or on disk, by part and place."""
        state, place = self.state, f"on {self.tier}"
        found = {f"master {place}": state.away_master, f"moments {place}": state.away_moments}
        found["pages on host"] = state.away_pages
        return {name: value for name, value in found.items() if value}

    @cached_property
    def fullest(self) -> Moment:
        """The action with the most memory."""
        return max(self.moments, key=lambda m: m.total)

    @property
    def allocated(self) -> float:
        """Peak memory of tensors: what a framework reports as peak allocated."""
        return self.state.total - self.state.gradients + self.fullest.total

    @property
    def total(self) -> float:
        """Memory that the device needs."""
        return self.allocated * (1 + self.fragments) + self.overheads

    @property
    def away(self) -> dict[str, float]:
        """Peak of activations on the host and on disk, without those that are zero."""
        most = {
            "host": max(m.host for m in self.moments), "disk": max(m.disk for m in self.moments)
        }  # fmt: skip
        return {name: size for name, size in most.items() if size}

    @property
    def parts(self) -> dict[str, float]:
        """``total`` by part."""
        moment = self.fullest
        return {
            **self.state.here,
            "gradients": moment.gradients,
            "activations": moment.activations,
            **({"operands": moment.operands} if any(m.operands for m in self.moments) else {}),
            "working": moment.working,
            "fragments": self.allocated * self.fragments,
            "software": self.overheads,
        }


def memory(case: Case) -> tuple[Memory, ...]:
    """Return the memory of each pipeline rank during a step."""
    return tuple(_memory(case, rank) for rank in range(case.sizes.pp))


def _memory(case: Case, rank: int) -> Memory:
    stage, line = stage_of(case, rank), case.table.lines[rank]
    moments = [
        Moment(str(step), *stage.needs(running), *stage.away_during(running))
        for step, running in zip(line, steps_of(line, case.sizes.vpp), strict=True)
    ]
    moments.append(Moment("step", 0.0, 0.0, stage.coming, stage.state.gradients))
    software = software_of(case.cluster.device)
    tier = "disk" if case.keeping.state_on_disk else "host"
    return Memory(rank, stage.state, overheads(case), software.fragments, tuple(moments), tier)


def totals(case: Case, room: float = inf) -> Iterator[float]:
    """Yield the memory that each pipeline rank's device needs, as in :attr:`Memory.total`.

    Only actions that can be the peak are computed, those with the most chunks first; a rank that
    exceeds ``room`` ends as soon as that is known, with a lower bound.
    """
    chunks, outside = _chunks_of(case), overheads(case)
    fragments = software_of(case.cluster.device).fragments
    m = settled(case.schedule, case.sizes.pp, case.micro_batches)
    running = fullest_steps(case.schedule, case.sizes.pp, case.sizes.vpp, m)
    for rank, steps in enumerate(running):
        stage = stage_of(case, rank, chunks)
        lasting = stage.state.total - stage.state.gradients
        most = stage.state.gradients + stage.coming
        enough = (room - outside) / (1 + fragments) - lasting
        for step in steps:
            most = max(most, sum(stage.needs(step)))
            if most > enough:
                break
        yield (lasting + most) * (1 + fragments) + outside


def peak_within(case: Case, room: float) -> float | None:
    """Return the memory that the fullest device needs, None if that is more than ``room``."""
    most = 0.0
    for total in totals(case, room):
        if total > room:
            return None
        most = max(most, total)
    return most


def fullest(case: Case) -> Memory:
    """Return the memory of the fullest pipeline rank, for a step with just enough micro-batches to
    reach the peak.
    """
    short = shortened(case)
    most = list(totals(short))
    return _memory(short, most.index(max(most)))


def shortened(case: Case) -> Case:
    """Return a case with fewer micro-batches and the same peak memory."""
    m = settled(case.schedule, case.sizes.pp, case.micro_batches)
    if m == case.micro_batches or case.software.cuda_graphs == "full":
        return case
    return replace(case, batch=case.folding.dp * case.micro_batch * m)


def software_of(device: Device) -> Overheads:
    """Return the overheads of software on a device."""
    return CPU if device.cpu else GPU


def overheads(case: Case) -> float:
    """Return the memory of software outside the allocator: context and communicators."""
    software, folding = software_of(case.cluster.device), case.folding
    groups = communicators(folding.attention, folding.experts)
    return software.context + groups * software.communicator


@remembered(1 << 12)
def communicators(attention: Grid, experts: Grid) -> int:
    """Return the number of distinct groups of several ranks that a rank belongs to."""
    grids = {ATTENTION: attention, EXPERTS: experts}
    return len({kind.runs(grids[kind.grid]) for kind in GROUP_KINDS.values()} - {()})


# ----------------------------------------------------------------------------- stages


class Stage(NamedTuple):
    """Bytes on a pipeline rank."""

    state: State
    chunks: list[ChunkBytes]
    kept: list[float]
    """Activations of a micro-batch in each chunk."""
    waiting: list[float]
    """Operands of deferred weight-gradient products of a micro-batch in each chunk."""
    there: float
    """Gradients allocated before any backward: those of the head."""
    coming: float
    """Peak of offloaded state that is on the device for its update."""
    passes: tuple[int, ...]
    """Number of passes of each chunk with CUDA graphs, whose memory lasts."""

    def there_before(self, step: Running) -> tuple[float, float]:
        """Return activations, and operands of deferred products, before an action."""
        alive = sum(map(mul, step.kept, self.kept))
        waiting = sum(map(mul, step.waiting, self.waiting))
        if step.backward is not None and step.frees:
            alive += self.chunks[step.backward].ahead
        return alive, waiting

    def away_during(self, step: Running) -> tuple[float, float]:
        """Return the peak of activations on the host and on disk while an action runs."""
        began = (number == step.forward for number in range(len(self.chunks)))
        return self.away([*map(add, step.kept, began)])

    def away(self, kept: Sequence[int]) -> tuple[float, float]:
        """Return activations on host and disk; ``kept`` are the micro-batches in each chunk."""
        host, disk = zip(*(chunk.away for chunk in self.chunks), strict=True)
        return sum(map(mul, kept, host)), sum(map(mul, kept, disk))

    def needs(self, step: Running) -> tuple[float, float, float, float]:
        """Return activations, operands, temporaries and gradients while an action runs.

        CUDA graphs of a pass hold memory for their activations and temporaries at all times.
        """
        chunks, (alive, waiting) = self.chunks, self.there_before(step)
        there = self.there + sum(chunks[number].coming for number in step.begun)
        used = freed = 0.0
        if step.backward is not None:
            back = chunks[step.backward]
            freed = back.waiting if step.kind == "W" else back.kept
            # Activations are freed as gradients and operands are allocated: the larger counts.
            if step.adds and step.backward not in step.begun:
                there += max(back.coming - freed, 0.0)
            if step.kind == "I":
                waiting += max(back.waiting - freed, 0.0)
                freed = max(freed - back.waiting, 0.0)
            used = back.sums if step.kind == "W" else back.backward + back.moving - back.ahead
        if step.forward is not None:
            ahead = chunks[step.forward]
            beside = ahead.gathered if step.backward is not None else 0.0  # weights of other units
            used = max(used, ahead.forward + ahead.moving) + beside
            # The forward stores activations layer by layer while the backward frees its own.
            alive += max(ahead.kept - freed, 0.0) + ahead.layer if freed else ahead.kept
        if self.passes:
            works = (max(chunk.forward, chunk.backward) for chunk in chunks)
            sizes = self.kept, self.waiting, works
            alive, waiting, used = (sum(map(mul, self.passes, size)) for size in sizes)
        return alive, waiting, used, there


_chunks = remembered(1 << 12)(ChunkSizes)


def _chunks_of(case: Case) -> ChunkSizes:
    software, beside = case.software, software_of(case.cluster.device)
    again = software.cuda_graphs != "none" and software.stack != "moefold"
    graphs = beside.graphs if again else 0.0
    split, rows, shape = Split.of(case), software.loss_chunk, shape_of(case)
    # A CPU holds logits and their logarithms in fp32; GPU kernels replace logits by their gradient.
    logit = 8 if beside is CPU else shape.width
    return _chunks(case.decoder, shape, split, case.keeping, graphs, rows, logit)


def orders(case: Case, rank: int) -> list[tuple[int, ...]]:
    """Return the kinds of a rank's layers by chunk, in order; empty if nothing is offloaded."""
    keeping = case.keeping
    if not (keeping.offload or keeping.disk or keeping.spill):
        return [()] * len(case.chunks[rank])
    return in_order(case, rank)


def in_order(case: Case, rank: int) -> list[tuple[int, ...]]:
    """Return the kinds of a rank's layers by chunk, without multi-token prediction layers."""
    order = kinds(case.decoder)[1]
    return [
        tuple(order[place.index] for place in chunk if place.kind == "layer")
        for chunk in case.places[rank]
    ]


def pages_of(case: Case, rank: int) -> tuple[Counter[int], Counter[int]]:
    """Return the numbers of pages of a rank on the device and on the host, by bytes per row."""
    (blocks, order), (main, _) = kinds(case.decoder), main_layers(case.decoder)
    found: list[ChunkBlocks] = []
    for chunk in case.places[rank]:
        layers = [blocks[order[one.index]] for one in chunk if one.kind == "layer"]
        more = [blocks[order[main + one.index]] for one in chunk if one.kind == "multi_token"]
        found.append(ChunkBlocks(layers, more, any(one.kind == "loss" for one in chunk)))
    return pages(found, shape_of(case), case.keeping, case.table.lines[rank])


def stage_of(case: Case, rank: int, sizes: ChunkSizes | None = None) -> Stage:
    """Return the bytes of a pipeline rank; ``sizes`` are the case's chunks if known already."""
    sizes, held = sizes or _chunks_of(case), case.chunks[rank]
    chunks = [sizes.of(*one) for one in zip(held, orders(case, rank), strict=True)]
    state = sizes.states.held(case.held[rank])
    if case.keeping.page:
        on_device, on_host = page_bytes(*pages_of(case, rank), case.keeping.page)
        state = replace(state, pages=on_device, away_pages=on_host)
    state, chunks, passes = with_graphs(case, rank, state, chunks)
    there = state.gradients - sum(chunk.coming for chunk in chunks)
    kept, waiting = [one.kept for one in chunks], [one.waiting for one in chunks]
    by_device = case.keeping.state_step == "device"
    coming = sizes.states.coming(case.held[rank]) if by_device else 0.0
    return Stage(state, chunks, kept, waiting, there, coming, passes)


def with_graphs(
    case: Case, rank: int, state: State, chunks: list[ChunkBytes]
) -> tuple[State, list[ChunkBytes], tuple[int, ...]]:
    """Return state with the memory of CUDA graphs, chunks without the part of that memory that they
    count as activations, and the number of passes of each chunk with their own graphs."""
    shape, ahead, held = shape_of(case), main_layers(case.decoder)[1], case.software.cuda_graphs
    if not case.graphs_of_parts:
        whole = held == "full" and case.software.stack == "moefold"
        rows = case.micro_batches * row_bytes(shape, ahead) if whole else 0.0
        return replace(state, graphs=rows), chunks, ()
    blocks, steps = kinds(case.decoder)[0], list(steps_of(case.table.lines[rank], len(chunks)))
    passes, fixed = tuple(in_flight(steps, len(chunks))), held == "experts"
    sizes = [
        pass_bytes([blocks[kind] for kind in order], shape, case.keeping, fixed, ahead)
        for order in in_order(case, rank)
    ]
    splits = any(step.kind == "W" for step in steps)
    left = [
        one._replace(kept=one.kept - shared, waiting=one.waiting * splits)
        for one, (_, shared) in zip(chunks, sizes, strict=True)
    ]
    graphs = sum(count * size for count, (size, _) in zip(passes, sizes, strict=True))
    # Graphs add to whole gradients in fixed memory; this rank's shares of their sums lie beside it.
    split = Split.of(case)
    shares = sum(
        times * one.bytes / split.levels(one.kind == "edp")[0]
        for part, _, times in copies_of(case.decoder, split).uses(case.held[rank])
        for one in part.buckets
        if one.op == "reduce_scatter"
    )
    return replace(state, graphs=graphs, gradients=state.gradients + shares), left, passes


# ----------------------------------------------------------------------------- after each step


FETCHED = "fetched"
"""Row of activations fetched from host and disk for the backward of the next action."""
ENDS = "ends"
"""Row of activations outside layers, mostly between the last one and the loss."""


class After(NamedTuple):
    """Bytes after an action."""

    rows: dict[str, float]
    """Activations by name of the saved tensor, and ``fetched`` and ``ends``."""
    operands: float
    """Operands of deferred weight-gradient products."""
    gradients: float
    away: tuple[float, float]
    """Activations on the host and on disk."""

    @property
    def activations(self) -> float:
        """Activations on the device."""
        return sum(self.rows.values())


def after_each(case: Case, rank: int) -> Iterator[After]:
    """Yield the memory after each action of a rank's line in the table."""
    stage, held = stage_of(case, rank), case.chunks[rank]
    given = zip(held, orders(case, rank), stage.kept, strict=True)
    rows = [_rows(case, *one) for one in given]
    steps = list(steps_of(case.table.lines[rank], case.sizes.vpp))
    nothing = (0,) * len(rows)
    # Memory after an action is that before the next one; after the last, activations are zero.
    begun = frozenset(range(len(rows)))
    last = Running(None, None, "", nothing, nothing, begun)
    for step in [*steps[1:], last]:
        found = Counter[str]()
        for number, row in zip(step.kept, rows, strict=True):
            found.update({name: size * number for name, size in row.items()})
        made, away = dict[str, float](found), stage.away(step.kept)
        if step.backward is not None and step.frees and stage.chunks[step.backward].ahead:
            made[FETCHED] = stage.chunks[step.backward].ahead
        coming = sum(stage.chunks[number].coming for number in step.begun)
        operands = stage.there_before(step)[1]
        yield After(made, operands, stage.there + coming, away)


def _rows(case: Case, held: Held, order: tuple[int, ...], whole: float) -> Counter[str]:
    """Return a chunk's activations of a micro-batch by name; ``whole`` is their sum.

    ``order`` is the kinds of layers in order if anything is offloaded.
    """
    found, (blocks, _), keeping = Counter[str](), kinds(case.decoder), case.keeping
    for kind, count in held.layers:
        for part in layer_kept(case, blocks[kind]):
            if part.stays(keeping.recompute):
                found[part.name] += here(part, keeping).bytes * count
    for kind in order[: offloaded_layers(keeping.spill, len(order), held.loss)]:
        for part in layer_kept(case, blocks[kind]):
            if part.stays(keeping.recompute) and part.rows and part.saved:
                found[part.name] += here(part, keeping).bytes
    for to, share in enumerate((keeping.offload_share, keeping.disk_share)):
        for kind in order[: offloaded_layers(share, len(order), held.loss)]:
            for part in departing(layer_kept(case, blocks[kind]), keeping)[to]:
                found[part.name] -= part.bytes
    found[ENDS] = round(whole) - found.total()
    return found
