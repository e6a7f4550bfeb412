"""Memory of a rank over a step, part by part, from the schedule's own table.

State lasts; activations of a chunk live from its forward to its backward; what a pass works with
comes and goes. Ranks of one stage differ only in their experts' load, so that one rank per pipeline
rank is planned: the one whose experts get the most rows. A table repeats itself, so that of its
thousands of steps few differ, and of those fewer can be the fullest. What is there after each step,
activations row by row, is for those who hold a plan against a run.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from operator import add, mul
from typing import NamedTuple

from moefold.layers.config import leaving
from moefold.mesh.folding import ATTENTION, EXPERTS, KINDS
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

MIB = 2**20


@dataclass(frozen=True)
class Overheads:
    """What software takes beside tensors; of a stack, never of a row or a model."""

    context: float = 0.0
    """Bytes that driver, libraries and kernels take outside the allocator."""
    communicator: float = 0.0
    """Bytes of the buffers of one group of ranks."""
    fragments: float = 0.0
    """Share by which what the allocator reserves exceeds what tensors take."""
    graphs: float = 0.0
    """Share of activations that partial CUDA graphs keep again as static buffers."""


GPU = Overheads(context=700 * MIB, communicator=150 * MIB, fragments=0.045, graphs=0.05)
"""Context and communicators: the order of magnitude that NVIDIA's and NCCL's documents give. Share
of fragments: 72-73 GB reserved for 69-70 GB allocated, GPT-OSS-120B on 32 H100. Share of graphs:
about 7 GB of DeepSeek-V3's 131 GB of activations (arXiv 2603.07685, section 4.3.6)."""
CPU = Overheads()
"""A CPU's allocator gives back what it does not need; the process itself is not counted."""


@dataclass(frozen=True)
class Moment:
    """Memory while one action runs."""

    label: str
    """The action, such as ``F3`` or ``B0'1``; ``step`` is the optimizer's."""
    activations: float
    operands: float
    """What products of weights wait with between I and W."""
    working: float
    """What the action itself works with."""
    gradients: float
    """Those that are there already."""
    host: float = 0.0
    """Activations in the host's memory, beside what the device holds."""
    disk: float = 0.0

    @property
    def total(self) -> float:
        """All that is not there for the whole step."""
        return self.activations + self.operands + self.working + self.gradients


@dataclass(frozen=True)
class Memory:
    """Memory of one rank of a pipeline rank, in bytes."""

    rank: int
    """The pipeline rank."""
    state: State
    overheads: float
    """What software takes outside the allocator."""
    fragments: float
    """Share of what tensors take."""
    moments: tuple[Moment, ...] = field(repr=False)
    """The step in order."""
    tier: str = "host"
    """Where state lies that is not on the device."""

    @property
    def elsewhere(self) -> dict[str, float]:
        """Bytes that lie on the host or on disk between steps, by part and place."""
        state, place = self.state, f"on {self.tier}"
        found = {f"master {place}": state.away_master, f"moments {place}": state.away_moments}
        found["pages on host"] = state.away_pages
        return {name: value for name, value in found.items() if value}

    @cached_property
    def fullest(self) -> Moment:
        """The moment with the most."""
        return max(self.moments, key=lambda m: m.total)

    @property
    def allocated(self) -> float:
        """The most that tensors take at once: what a framework reports as peak allocated."""
        return self.state.total - self.state.gradients + self.fullest.total

    @property
    def total(self) -> float:
        """The most that the device must have."""
        return self.allocated * (1 + self.fragments) + self.overheads

    @property
    def away(self) -> dict[str, float]:
        """The most activations that lie elsewhere, by place, where any do."""
        most = {
            "host": max(m.host for m in self.moments), "disk": max(m.disk for m in self.moments)
        }  # fmt: skip
        return {name: size for name, size in most.items() if size}

    @property
    def parts(self) -> dict[str, float]:
        """The total by part."""
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
    """Return the memory of each pipeline rank over a step."""
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
    """Yield the most that each pipeline rank's device must have, as :attr:`Memory.total` has it.

    Only steps that can be the fullest are looked at, those with the most chunks first, and of a
    rank for which there is no room only as many as show it.
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
    """Return the most that any device must have, None where that is more than there is room for."""
    most = 0.0
    for total in totals(case, room):
        if total > room:
            return None
        most = max(most, total)
    return most


def fullest(case: Case) -> Memory:
    """Return the memory of the fullest pipeline rank, over a step that is no longer than it need be
    to reach its peak; its ``rank`` names it.
    """
    short = shortened(case)
    most = list(totals(short))
    return _memory(short, most.index(max(most)))


def shortened(case: Case) -> Case:
    """Return a step of fewer micro-batches with the same peaks of memory."""
    m = settled(case.schedule, case.sizes.pp, case.micro_batches)
    if m == case.micro_batches or case.software.cuda_graphs == "full":
        return case
    return replace(case, batch=case.folding.dp * case.micro_batch * m)


def software_of(device: Device) -> Overheads:
    """Return what software takes beside tensors on a device."""
    return CPU if device.cpu else GPU


def overheads(case: Case) -> float:
    """Return what software takes outside the allocator; groups of the same ranks are one."""
    software, folding = software_of(case.cluster.device), case.folding
    groups = communicators(folding.attention, folding.experts)
    return software.context + groups * software.communicator


@remembered(1 << 12)
def communicators(attention: Grid, experts: Grid) -> int:
    """Return how many different groups of several ranks a rank of two grids is in."""
    grids = {ATTENTION: attention, EXPERTS: experts}
    return len({kind.runs(grids[kind.grid]) for kind in KINDS.values()} - {()})


# ----------------------------------------------------------------------------- stages


class Stage(NamedTuple):
    """What a pipeline rank holds."""

    state: State
    chunks: list[ChunkBytes]
    kept: list[float]
    """What each chunk keeps."""
    waiting: list[float]
    """What the products of each chunk's weights wait with."""
    there: float
    """Bytes of gradients that are there before any backward: those of the head."""
    coming: float
    """What of the state comes to the device for its update, at most."""
    passes: tuple[int, ...]
    """How many passes of each chunk have graphs, whose memory lasts."""

    def there_before(self, step: Running) -> tuple[float, float]:
        """Return the activations before a step, and what products of weights wait with."""
        alive = sum(map(mul, step.kept, self.kept))
        waiting = sum(map(mul, step.waiting, self.waiting))
        if step.backward is not None and step.frees:
            alive += self.chunks[step.backward].ahead
        return alive, waiting

    def away_during(self, step: Running) -> tuple[float, float]:
        """Return the activations on the host and on disk, at most, while a step runs."""
        began = (number == step.forward for number in range(len(self.chunks)))
        return self.away([*map(add, step.kept, began)])

    def away(self, kept: Sequence[int]) -> tuple[float, float]:
        """Return the activations on host and disk of so many micro-batches in each chunk."""
        host, disk = zip(*(chunk.away for chunk in self.chunks), strict=True)
        return sum(map(mul, kept, host)), sum(map(mul, kept, disk))

    def needs(self, step: Running) -> tuple[float, float, float, float]:
        """Return activations, operands, what the step works with, and gradients while it runs.

        Graphs of a pass have what they keep and work with for themselves, whatever runs.
        """
        chunks, (alive, waiting) = self.chunks, self.there_before(step)
        there = self.there + sum(chunks[number].coming for number in step.begun)
        used = freed = 0.0
        if step.backward is not None:
            back = chunks[step.backward]
            freed = back.waiting if step.kind == "W" else back.kept
            # As activations go gradients come, and what products wait with: the larger counts.
            if step.adds and step.backward not in step.begun:
                there += max(back.coming - freed, 0.0)
            if step.kind == "I":
                waiting += max(back.waiting - freed, 0.0)
                freed = max(freed - back.waiting, 0.0)
            used = back.sums if step.kind == "W" else back.backward + back.moving - back.ahead
        if step.forward is not None:
            ahead = chunks[step.forward]
            beside = ahead.gathered if step.backward is not None else 0.0  # of other units
            used = max(used, ahead.forward + ahead.moving) + beside
            # Layer by layer one pass keeps and the other frees: they are never both whole.
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
    # A CPU has logits and their logarithms in fp32; kernels of GPUs make the gradient of logits.
    logit = 8 if beside is CPU else shape.width
    return _chunks(case.decoder, shape, split, case.keeping, graphs, rows, logit)


def orders(case: Case, rank: int) -> list[tuple[int, ...]]:
    """Return the kinds of a rank's layers, chunk by chunk in order; none where no layer leaves."""
    keeping = case.keeping
    if not (keeping.offload or keeping.disk or keeping.spill):
        return [()] * len(case.chunks[rank])
    return in_order(case, rank)


def in_order(case: Case, rank: int) -> list[tuple[int, ...]]:
    """Return the kinds of a rank's layers, those of further tokens apart, chunk by chunk."""
    order = kinds(case.decoder)[1]
    return [
        tuple(order[place.index] for place in chunk if place.kind == "layer")
        for chunk in case.places[rank]
    ]


def pages_of(case: Case, rank: int) -> tuple[Counter[int], Counter[int]]:
    """Return how many pages a rank has here and on the host, of rows of so many bytes."""
    (blocks, order), (main, _) = kinds(case.decoder), main_layers(case.decoder)
    found: list[ChunkBlocks] = []
    for chunk in case.places[rank]:
        layers = [blocks[order[one.index]] for one in chunk if one.kind == "layer"]
        more = [blocks[order[main + one.index]] for one in chunk if one.kind == "multi_token"]
        found.append(ChunkBlocks(layers, more, any(one.kind == "loss" for one in chunk)))
    return pages(found, shape_of(case), case.keeping, case.table.lines[rank])


def stage_of(case: Case, rank: int, sizes: ChunkSizes | None = None) -> Stage:
    """Return what a pipeline rank holds; ``sizes`` where a case's chunks are known already."""
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
    """Return state with what graphs read and leave, chunks without what of it they keep, and how
    many passes of each chunk have graphs of their own."""
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
    return replace(state, graphs=graphs), left, passes


# ----------------------------------------------------------------------------- after each step


FETCHED = "fetched"
"""The row of what is on its way back to the next step's backward from host and disk."""
ENDS = "ends"
"""The row of what is kept beside layers: between the last of them and the loss, above all."""


class After(NamedTuple):
    """Bytes after a step."""

    rows: dict[str, float]
    """Activations by the rows that layers keep, ``fetched`` and ``ends``."""
    operands: float
    """What products of weights wait with."""
    gradients: float
    away: tuple[float, float]
    """Activations on the host and on disk."""

    @property
    def activations(self) -> float:
        """Those of all rows."""
        return sum(self.rows.values())


def after_each(case: Case, rank: int) -> Iterator[After]:
    """Yield what is there after each step of a rank's line."""
    stage, held = stage_of(case, rank), case.chunks[rank]
    given = zip(held, orders(case, rank), stage.kept, strict=True)
    rows = [_rows(case, *one) for one in given]
    steps = list(steps_of(case.table.lines[rank], case.sizes.vpp))
    nothing = (0,) * len(rows)
    # What is there after a step is there before the next one, and nothing after the last.
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
    """Return what a chunk keeps of a micro-batch, by row; ``whole`` bytes in all.

    Layers are in ``order`` if any leave.
    """
    found, (blocks, _), keeping = Counter[str](), kinds(case.decoder), case.keeping
    for kind, count in held.layers:
        for part in layer_kept(case, blocks[kind]):
            if part.stays(keeping.recompute):
                found[part.name] += here(part, keeping).bytes * count
    for kind in order[: leaving(keeping.spill, len(order), held.loss)]:
        for part in layer_kept(case, blocks[kind]):
            if part.stays(keeping.recompute) and part.rows and part.saved:
                found[part.name] += here(part, keeping).bytes
    for to, share in enumerate((keeping.offload_share, keeping.disk_share)):
        for kind in order[: leaving(share, len(order), held.loss)]:
            for part in departing(layer_kept(case, blocks[kind]), keeping)[to]:
                found[part.name] -= part.bytes
    found[ENDS] = round(whole) - found.total()
    return found
