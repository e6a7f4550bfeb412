"""Memory of a rank over a step, part by part, from the schedule's own table.

State lasts; activations of a chunk live from its forward to its backward; what a pass works with
comes and goes. Ranks of one stage differ only in their experts' load, so that one rank per pipeline
rank is planned: the one whose experts get the most rows. A table repeats itself, so that of its
thousands of steps few differ, and of those fewer can be the fullest.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from operator import mul
from typing import NamedTuple, cast

from moefold.mesh.config import Order, Sizes
from moefold.mesh.folding import ATTENTION, EMBEDDING, KINDS, Folding
from moefold.model.config import Block, Decoder
from moefold.planner import memory_kept, memory_megatron
from moefold.planner.case import Case, Keeping, settled, table_of
from moefold.planner.held import Held, kinds
from moefold.planner.memory_kept import shape_of
from moefold.planner.memory_state import Split, State, states_of
from moefold.planner.remember import remembered
from moefold.schedule.config import Schedule
from moefold.schedule.table import Line, actions_of
from moefold.spec.layer import Saved, Shape, activation_width, described

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
    working: float
    """What the action itself works with."""
    gradients: float
    """Those that are there already."""

    @property
    def total(self) -> float:
        """All that is not there for the whole step."""
        return self.activations + self.working + self.gradients


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
            **vars(self.state),
            "gradients": moment.gradients,
            "activations": moment.activations,
            "working": moment.working,
            "fragments": self.allocated * self.fragments,
            "software": self.overheads,
        }


def memory(case: Case) -> tuple[Memory, ...]:
    """Return the memory of each pipeline rank over a step."""
    return tuple(_memory(case, rank) for rank in range(case.sizes.pp))


def _memory(case: Case, rank: int) -> Memory:
    state, stage = _stage(case, _chunks_of(case), rank)
    line = case.table.lines[rank]
    moments = [
        Moment(str(step), *stage.needs(running))
        for step, running in zip(line, steps_of(line, case.sizes.vpp), strict=True)
    ]
    moments.append(Moment("step", 0.0, 0.0, state.gradients))
    return Memory(rank, state, overheads(case), software_of(case).fragments, tuple(moments))


def totals(case: Case, room: float = inf) -> Iterator[float]:
    """Yield the most that each pipeline rank's device must have, as :attr:`Memory.total` has it.

    Only steps that can be the fullest are looked at, those with the most chunks first, and of a
    rank for which there is no room only as many as show it.
    """
    chunks, fragments, outside = _chunks_of(case), software_of(case).fragments, overheads(case)
    m = settled(case.schedule, case.sizes.pp, case.micro_batches)
    running = fullest_steps(case.schedule, case.sizes.pp, case.sizes.vpp, m)
    for rank, steps in enumerate(running):
        state, stage = _stage(case, chunks, rank)
        lasting = state.total - state.gradients
        enough = (room - outside) / (1 + fragments) - lasting
        most = state.gradients
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


def layer_kept(case: Case, block: Block) -> tuple[Saved, ...]:
    """Return what one block keeps for one micro-batch if nothing is recomputed."""
    return _layer_kept(block, shape_of(case), case.software.stack, case.numbers.recipe)


@remembered(1 << 12)
def _layer_kept(block: Block, shape: Shape, stack: str, recipe: str) -> tuple[Saved, ...]:
    if stack == "moefold":
        return memory_kept.kept(block, shape)
    return memory_megatron.kept(block, shape, memory_megatron.Widths.of(recipe, stack, shape.width))


def software_of(case: Case) -> Overheads:
    """Return what software takes beside tensors on a case's devices."""
    return CPU if case.cluster.device.link_bandwidth == 0 else GPU


def overheads(case: Case) -> float:
    """Return what software takes outside the allocator; groups of the same ranks are one."""
    software = software_of(case)
    return software.context + communicators(case.folding) * software.communicator


def communicators(folding: Folding) -> int:
    """Return how many different groups of several ranks a rank is in.

    Without making them: groups are the same where the axes that they run over are, written with
    neighbouring axes joined.
    """
    return _communicators(folding.sizes, folding.world, folding.order)


@remembered(1 << 12)
def _communicators(sizes: Sizes, world: int, order: str) -> int:
    folding = Folding(sizes, world, cast("Order", order))
    return len({_reach(folding, kind) for kind in KINDS} - {()})


def _reach(folding: Folding, kind: str) -> tuple[tuple[int, int], ...]:
    """Return the strides and sizes of the axes that a kind of group runs over."""
    name, axes, _ = KINDS[kind]
    grid = folding.attention if name == ATTENTION else folding.experts
    if kind == EMBEDDING:
        pp = folding.sizes.pp
        return ((grid.strides["pp"] * (pp - 1), 2),) if pp > 1 else ()
    found: list[tuple[int, int]] = []
    for axis, size in grid.axes:
        if axis not in axes or size == 1:
            continue
        stride, last = grid.strides[axis], found[-1] if found else (0, 0)
        if last[0] * last[1] == stride:
            found[-1] = last[0], last[1] * size
        else:
            found.append((stride, size))
    return tuple(found)


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
    begun: frozenset[int]
    """Chunks whose gradients are there before the step."""

    @property
    def frees(self) -> bool:
        """Whether activations go with the step, and gradients come."""
        return self.kind in ("B", "W")

    def covers(self, other: "Running") -> bool:
        """Return whether another step that runs the same passes needs no more than this one."""
        return self.begun >= other.begun and all(
            mine >= theirs for mine, theirs in zip(self.kept, other.kept, strict=True)
        )


def steps_of(line: Line, chunks: int) -> Iterator[Running]:
    """Yield the steps of a rank's line."""
    kept, begun = [0] * chunks, frozenset[int]()
    for step in line:
        forward = backward = None
        kind = ""
        for action in actions_of(step):
            if action.kind == "F":
                forward = action.chunk
            else:
                backward, kind = action.chunk, action.kind
        made = Running(forward, backward, kind, tuple(kept), begun)
        yield made
        if forward is not None:
            kept[forward] += 1
        if backward is not None and made.frees:
            kept[backward] -= 1
            begun |= {backward}


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
    return tuple(sorted(found, key=lambda one: -sum(one.kept)))


# ----------------------------------------------------------------------------- chunks


class _Chunk(NamedTuple):
    """Bytes of a pipeline rank's chunk for one micro-batch."""

    kept: float
    forward: float
    """What its forward works with."""
    backward: float
    layer: float
    """Kept by its fullest layer."""
    coming: float
    """Gradients that come with its first backward."""


class _Stage(NamedTuple):
    """A pipeline rank's chunks."""

    chunks: list[_Chunk]
    kept: list[float]
    """What each keeps."""
    there: float
    """Bytes of gradients that are there before any backward: those of the head."""

    def needs(self, step: Running) -> tuple[float, float, float]:
        """Return activations, what the step works with, and gradients while it runs."""
        chunks = self.chunks
        alive = sum(map(mul, step.kept, self.kept))
        there = self.there + sum(chunks[number].coming for number in step.begun)
        used = freed = 0.0
        if step.backward is not None:
            back = chunks[step.backward]
            if step.frees:
                freed = back.kept
                new = 0.0 if step.backward in step.begun else back.coming
                # A first backward frees as its gradients come: of the two the larger counts.
                there += max(new - freed, 0.0)
            used = back.backward if step.kind != "W" else 0.0
        if step.forward is not None:
            ahead = chunks[step.forward]
            used = max(used, ahead.forward)
            # Layer by layer one pass keeps and the other frees: they are never both whole.
            alive += max(ahead.kept - freed, 0.0) + ahead.layer if freed else ahead.kept
        return alive, used, there


def _stage(case: Case, chunks: "_Chunks", rank: int) -> tuple[State, _Stage]:
    """Return what a pipeline rank holds."""
    found = [chunks.of(held) for held in case.chunks[rank]]
    state = chunks.states.held(case.held[rank])
    there = state.gradients - sum(chunk.coming for chunk in found)
    return state, _Stage(found, [chunk.kept for chunk in found], there)


class _Chunks:
    """Bytes of chunks for one micro-batch, each made once for all cases that share what decides."""

    def __init__(
        self,
        decoder: Decoder,
        shape: Shape,
        split: Split,
        keeping: Keeping,
        graphs: float,
        loss_chunk: int,
    ) -> None:
        self.decoder, self.shape, self.keeping, self.graphs = decoder, shape, keeping, graphs
        self.loss_chunk = loss_chunk
        self.blocks = kinds(decoder)[0]
        self.last = kinds(decoder)[1][-1]
        self.stack, self.recipe = split.stack, split.numbers.recipe
        self.states = states_of(decoder, split)
        self._layers: dict[int, tuple[float, float, float]] = {}
        self._known: dict[Held, _Chunk] = {}

    def of(self, held: Held) -> _Chunk:
        """Return the bytes of a chunk that holds this."""
        if held not in self._known:
            layers = [self._layer(kind) for kind, _ in held.layers]
            kept = max((layer[0] for layer in layers), default=0.0)
            forward, backward = self._working(held, layers)
            made = _Chunk(self._kept(held), forward, backward, kept, self._gradients(held))
            self._known[held] = made
        return self._known[held]

    def _gradients(self, held: Held) -> float:
        """Bytes of a chunk's gradients that are not there before its first backward.

        Moefold drops gradients as a step begins; other stacks keep their buffers.
        """
        if self.stack != "moefold" or self.keeping.zero > 1:
            return 0.0
        found = self.states.layers(held).gradients
        embeds = held.embedding and not self.decoder.tied
        return found + (self.states.of("embedding").gradients if embeds else 0.0)

    def _kept(self, held: Held) -> float:
        """Bytes that a chunk keeps for one micro-batch."""
        row = self.shape.rows * self.shape.hidden * self.shape.width
        total = sum(self._layer(kind)[0] * count for kind, count in held.layers)
        if held.multi_token:
            # The joined pair of rows and the norms before and after it.
            each = self._layer(self.last)[0] + 5 * row + self._logits()
            total += held.multi_token * each
        if held.loss:
            total += row + self._logits()
        return total * (1 + self.graphs)

    def _logits(self) -> float:
        """Bytes of logits between forward and backward: whole in Megatron, and again in fp32."""
        if self.stack == "moefold":
            return self.shape.rows * self.shape.hidden * self.shape.width
        columns = self.decoder.vocab / self.shape.tp
        return self.shape.piece * columns * (self.shape.width + 4)

    def _working(
        self, held: Held, layers: Sequence[tuple[float, float, float]]
    ) -> tuple[float, float]:
        """Bytes that forward and backward of a chunk work with at their fullest."""
        forward = max((layer[1] for layer in layers), default=0.0)
        backward = max((layer[2] for layer in layers), default=0.0)
        if self.stack == "moefold" and held.loss:
            rows = min(self.loss_chunk, self.shape.piece)
            columns = self.decoder.vocab / self.shape.tp
            # Logits, and their logarithms in fp32, which become the gradient in place.
            forward = max(forward, rows * columns * (self.shape.width + 4))
        return forward, backward

    def _layer(self, kind: int) -> tuple[float, float, float]:
        """Return what a block keeps, and what its forward and its backward work with."""
        if kind not in self._layers:
            block, keeping = self.blocks[kind], self.keeping
            parts = _layer_kept(block, self.shape, self.stack, self.recipe)
            stays = [part for part in parts if part.stays(keeping.recompute)]
            away = sum(part.bytes for part in stays if part.module in keeping.offload)
            kept = sum(part.bytes for part in stays) - away * keeping.offload_share
            again = sum(part.bytes for part in parts) - sum(part.bytes for part in stays)
            forward, backward = self._widest(block)
            self._layers[kind] = (kept, forward, backward + max(again, 0))
        return self._layers[kind]

    def _widest(self, block: Block) -> tuple[float, float]:
        """Return the bytes of activation and output, and of the gradients in a feed-forward."""
        shape, spec = self.shape, described(block.ffn)
        row, routing = shape.row, spec.routing
        if routing is None:
            rows, sent = shape.piece, shape.piece * shape.hidden * shape.width
        else:
            rows = shape.received(routing.top_k)
            sent = rows * (routing.width or shape.hidden) * shape.width
        width = activation_width(spec, shape)
        inner = rows * width * shape.width
        return inner + sent + row, 4 * inner + 2 * sent + 2 * row


_chunks = remembered(1 << 12)(_Chunks)


def _chunks_of(case: Case) -> _Chunks:
    graphs = 0.0 if case.software.cuda_graphs == "none" else software_of(case).graphs
    split, chunk = Split.of(case), case.software.loss_chunk
    return _chunks(case.decoder, shape_of(case), split, case.keeping, graphs, chunk)
