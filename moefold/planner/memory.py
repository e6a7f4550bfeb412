"""Memory of a rank over a step, part by part, from the schedule's own table.

State lasts; activations of a chunk live from its forward to its backward; what a pass works with
comes and goes. Ranks of one stage differ only in their experts' load, so that one rank per pipeline
rank is planned: the one whose experts get the most rows. A table repeats itself, so that of its
thousands of steps few differ, and of those fewer can be the fullest.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from operator import ge, mul
from typing import NamedTuple

from moefold.mesh.folding import ATTENTION, EMBEDDING, KINDS
from moefold.mesh.grid import Grid
from moefold.model.config import Block, Decoder
from moefold.planner.case import Case, Held, Keeping, kinds, settled, table_of
from moefold.planner.memory_kept import CODES, kept, operands, shape_of
from moefold.planner.memory_state import Split, State, states_of
from moefold.planner.remember import remembered
from moefold.schedule.config import Schedule
from moefold.schedule.table import Line, actions_of
from moefold.spec.layer import INDEX, STATISTIC, Shape, activation_width, described

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
        found = {"master": state.away_master, "moments": state.away_moments}
        return {f"{name} {place}": value for name, value in found.items() if value}

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
        Moment(str(step), *stage.needs(running))
        for step, running in zip(line, steps_of(line, case.sizes.vpp), strict=True)
    ]
    moments.append(Moment("step", 0.0, 0.0, stage.coming, stage.state.gradients))
    software = software_of(case)
    tier = "disk" if case.keeping.state_on_disk else "host"
    return Memory(rank, stage.state, overheads(case), software.fragments, tuple(moments), tier)


def totals(case: Case, room: float = inf) -> Iterator[float]:
    """Yield the most that each pipeline rank's device must have, as :attr:`Memory.total` has it.

    Only steps that can be the fullest are looked at, those with the most chunks first, and of a
    rank for which there is no room only as many as show it.
    """
    chunks, fragments, outside = _chunks_of(case), software_of(case).fragments, overheads(case)
    m = settled(case.schedule, case.sizes.pp, case.micro_batches)
    running = fullest_steps(case.schedule, case.sizes.pp, case.sizes.vpp, m)
    for rank, steps in enumerate(running):
        stage = chunks.stage(case, rank)
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
    if m == case.micro_batches:
        return case
    return replace(case, batch=case.folding.dp * case.micro_batch * m)


def software_of(case: Case) -> Overheads:
    """Return what software takes beside tensors on a case's devices."""
    return CPU if case.cluster.device.link_bandwidth == 0 else GPU


def overheads(case: Case) -> float:
    """Return what software takes outside the allocator; groups of the same ranks are one."""
    software, folding = software_of(case), case.folding
    groups = communicators(folding.attention, folding.experts)
    return software.context + groups * software.communicator


@remembered(1 << 12)
def communicators(attention: Grid, experts: Grid) -> int:
    """Return how many different groups of several ranks a rank of two grids is in.

    Without making them: groups are the same where the axes that they run over are, written as
    strides and sizes with neighbouring axes joined.
    """
    found = set[tuple[tuple[int, int], ...]]()
    for kind, (name, axes, _) in KINDS.items():
        grid = attention if name == ATTENTION else experts
        group: list[tuple[int, int]] = []
        for axis, size in grid.axes:
            if axis not in axes or size == 1:
                continue
            stride, last = grid.strides[axis], group[-1] if group else (0, 0)
            if kind == EMBEDDING:
                group = [(stride * (size - 1), 2)]
            elif last[0] * last[1] == stride:
                group[-1] = last[0], last[1] * size
            else:
                group.append((stride, size))
        found.add(tuple(group))
    return len(found - {()})


# ----------------------------------------------------------------------------- steps


class Running(NamedTuple):
    """A step of a rank's line, by what its memory depends on."""

    forward: int | None
    """The chunk that goes forward."""
    backward: int | None
    """The chunk that goes back."""
    kind: str
    """``B``, ``I`` or ``W`` of that."""
    kept: tuple[int, ...]
    """Micro-batches whose activations are there before the step, by chunk."""
    waiting: tuple[int, ...]
    """Micro-batches whose weights' products wait before the step, by chunk."""
    begun: frozenset[int]
    """Chunks whose gradients are there before the step."""

    @property
    def frees(self) -> bool:
        """Whether activations go with the step."""
        return self.kind in ("B", "I")

    @property
    def adds(self) -> bool:
        """Whether gradients of weights come with the step."""
        return self.kind in ("B", "W")

    def covers(self, other: "Running") -> bool:
        """Return whether another step that runs the same passes needs no more than this one."""
        mine, theirs = self.kept + self.waiting, other.kept + other.waiting
        return self.begun >= other.begun and all(map(ge, mine, theirs))


def steps_of(line: Line, chunks: int) -> Iterator[Running]:
    """Yield the steps of a rank's line."""
    kept, waiting, begun = [0] * chunks, [0] * chunks, frozenset[int]()
    for step in line:
        forward = backward = None
        kind = ""
        for action in actions_of(step):
            if action.kind == "F":
                forward = action.chunk
            else:
                backward, kind = action.chunk, action.kind
        made = Running(forward, backward, kind, tuple(kept), tuple(waiting), begun)
        yield made
        if forward is not None:
            kept[forward] += 1
        if backward is not None:
            kept[backward] -= made.frees
            waiting[backward] += (kind == "I") - (kind == "W")
            begun |= {backward} if made.adds else set()


@remembered(1024)
def fullest_steps(schedule: Schedule, p: int, v: int, m: int) -> tuple[tuple[Running, ...], ...]:
    """Return of each rank the steps that no other covers: one of them is the fullest, most likely
    one of the first.
    """
    table = table_of(schedule, p, v, m)
    return tuple(_uncovered(steps_of(line, v)) for line in table.lines)


def _uncovered(steps: Iterable[Running]) -> tuple[Running, ...]:
    alike: dict[tuple[int | None, int | None, str], list[Running]] = {}
    for step in dict.fromkeys(steps):
        group = alike.setdefault(step[:3], [])
        if not any(one.covers(step) for one in group):
            group[:] = [one for one in group if not step.covers(one)] + [step]
    found = (one for group in alike.values() for one in group)
    return tuple(sorted(found, key=lambda one: -sum(one.kept + one.waiting)))


# ----------------------------------------------------------------------------- chunks


class _Chunk(NamedTuple):
    """Bytes of a pipeline rank's chunk for one micro-batch."""

    kept: float
    waiting: float
    """What the products of its weights wait with."""
    forward: float
    """What its forward works with."""
    backward: float
    layer: float
    """Kept by its fullest layer."""
    coming: float
    """Gradients that come with its first backward."""


class Stage(NamedTuple):
    """What a pipeline rank holds."""

    state: State
    chunks: list[_Chunk]
    kept: list[float]
    """What each chunk keeps."""
    waiting: list[float]
    """What the products of each chunk's weights wait with."""
    there: float
    """Bytes of gradients that are there before any backward: those of the head."""
    coming: float = 0.0
    """What of the state comes to the device for its update, at most."""

    def there_before(self, step: Running) -> tuple[float, float]:
        """Return the activations before a step, and what products of weights wait with."""
        return sum(map(mul, step.kept, self.kept)), sum(map(mul, step.waiting, self.waiting))

    def needs(self, step: Running) -> tuple[float, float, float, float]:
        """Return activations, operands, what the step works with, and gradients while it runs."""
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
            used = back.backward if step.kind != "W" else 0.0
        if step.forward is not None:
            ahead = chunks[step.forward]
            used = max(used, ahead.forward)
            # Layer by layer one pass keeps and the other frees: they are never both whole.
            alive += max(ahead.kept - freed, 0.0) + ahead.layer if freed else ahead.kept
        return alive, waiting, used, there


class _Chunks:
    """Bytes of chunks for one micro-batch, each made once for all cases that share what decides."""

    def __init__(
        self,
        decoder: Decoder,
        shape: Shape,
        split: Split,
        keeping: Keeping,
        graphs: float,
        rows: int,
        logit: int,
    ) -> None:
        """Take what decides; logits of ``rows`` exist at once, each of so many bytes."""
        self.decoder, self.shape, self.keeping, self.graphs = decoder, shape, keeping, graphs
        self.blocks, order = kinds(decoder)
        self.last, self.loss_rows, self.logit = order[-1], min(rows, shape.piece), logit
        self.stack, self.recipe = split.stack, split.numbers.recipe
        self.states = states_of(decoder, split)
        self._known: dict[Held, _Chunk] = {}

    def stage(self, case: Case, rank: int) -> Stage:
        """Return what a pipeline rank holds."""
        chunks = [self.of(held) for held in case.chunks[rank]]
        state = self.states.held(case.held[rank])
        there = state.gradients - sum(chunk.coming for chunk in chunks)
        kept, waiting = [one.kept for one in chunks], [one.waiting for one in chunks]
        by_device = self.keeping.state_step == "device"
        coming = self.states.coming(case.held[rank]) if by_device else 0.0
        return Stage(state, chunks, kept, waiting, there, coming)

    def of(self, held: Held) -> _Chunk:
        """Return the bytes of a chunk that holds this."""
        if held not in self._known:
            self._known[held] = self._made(held)
        return self._known[held]

    def _made(self, held: Held) -> _Chunk:
        shape, logits = self.shape, self._logits()
        layers = [(self._layer(kind), count) for kind, count in held.layers]
        widest = (max((one[i] for one, _ in layers), default=0.0) for i in range(3))
        layer, forward, backward = widest
        total = sum(one[0] * count for one, count in layers)
        waiting = sum(one[3] * count for one, count in layers)
        if held.embedding:
            # Under tp the places of its share, which rows are among them, and all rows' gradients.
            places = shape.piece * INDEX if shape.tp > 1 else 0
            total += places + (shape.piece if shape.tp > 1 else 0)
            waiting += places + shape.piece * shape.hidden * STATISTIC
        # The gradient of the last norm's weight.
        waiting += shape.hidden * STATISTIC if held.loss else 0.0
        if held.multi_token:
            last = self._layer(self.last)
            # The joined pair of rows and the norms before and after it.
            total += held.multi_token * (last[0] + 5 * shape.row + logits)
            waiting += held.multi_token * (last[3] + 3 * shape.row)
        if held.loss:
            total += shape.row + shape.rows * STATISTIC + logits
        if held.loss and self.stack == "moefold":
            columns = self.decoder.vocab / shape.tp
            forward = max(forward, self.loss_rows * columns * self.logit)
        kept = total * (1 + self.graphs)
        return _Chunk(kept, waiting, forward, backward, layer, self._gradients(held))

    def _gradients(self, held: Held) -> float:
        """Return the bytes of a chunk's gradients that come with its first backward.

        Moefold drops gradients as a step begins; other stacks keep their buffers.
        """
        if self.stack != "moefold" or self.keeping.zero > 1:
            return 0.0
        embeds = held.embedding and not self.decoder.tied
        found = self.states.of("embedding").gradients if embeds else 0.0
        return found + self.states.inner(held).gradients

    def _logits(self) -> float:
        """Bytes of logits between forward and backward: whole in Megatron, and again in fp32."""
        if self.stack == "moefold":
            return self.shape.row
        columns = self.decoder.vocab / self.shape.tp
        return self.shape.piece * columns * (self.shape.width + 4)

    def _layer(self, kind: int) -> tuple[float, float, float, float]:
        """Return what a block keeps, what its passes work with, and what its products wait with."""
        block = self.blocks[kind]
        return _layer(block, self.shape, self.stack, self.recipe, self.keeping)


_chunks = remembered(1 << 12)(_Chunks)


def stage_of(case: Case, rank: int) -> Stage:
    """Return what a pipeline rank holds."""
    return _chunks_of(case).stage(case, rank)


def _chunks_of(case: Case) -> _Chunks:
    graphs = 0.0 if case.software.cuda_graphs == "none" else software_of(case).graphs
    split, rows = Split.of(case), case.software.loss_chunk
    shape = shape_of(case)
    # A CPU has logits and their logarithms in fp32; kernels of GPUs make the gradient of logits.
    logit = 8 if software_of(case) is CPU else shape.width
    return _chunks(case.decoder, shape, split, case.keeping, graphs, rows, logit)


@remembered(1 << 12)
def _layer(
    block: Block, shape: Shape, stack: str, recipe: str, keeping: Keeping
) -> tuple[float, float, float, float]:
    """Return what a block keeps, what its forward and its backward work with (activation and
    output, the gradients in a feed-forward, and what is made again), and what the products of its
    weights wait with.
    """
    parts = kept(block, shape, stack, recipe)
    stays = [part for part in parts if part.stays(keeping.recompute)]
    here = sum(part.bytes for part in stays)
    away = sum(part.bytes for part in stays if part.module in keeping.offload)
    again = sum(part.bytes for part in parts) - here
    spec = described(block.ffn)
    rows, features = shape.piece, shape.hidden
    if spec.routing is not None:
        rows, features = shape.received(spec.routing.top_k), spec.routing.width or shape.hidden
    sent = rows * features * shape.width
    inner = rows * activation_width(spec, shape) * shape.width
    forward, backward = inner + sent + shape.row, 4 * inner + 2 * sent + 2 * shape.row
    waiting = sum(part.bytes for part in operands(block, shape))
    if stack != "moefold":
        waiting *= CODES.get(recipe, shape.width) / shape.width
    return here - away * keeping.offload_share, forward, backward + max(again, 0), waiting
