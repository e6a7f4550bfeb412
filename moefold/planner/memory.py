"""Memory of a rank during a step, by part, from the schedule's table.

State is constant; activations of a chunk live from its forward to its backward; temporaries live
during one action. Ranks of a stage differ only in their experts' load, so that one rank per stage
is planned: the one whose experts get the most rows. A table is periodic: of its thousands of
actions few differ, and fewer can be the peak. :func:`memory_after_each` yields the memory after
each action, activations by row, for comparison with a run.
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
from moefold.planner.case import (
    Case,
    StageContents,
    distinct_blocks,
    equivalent_micro_batches,
    layer_counts,
)
from moefold.planner.hardware import Device
from moefold.planner.memoize import memoize
from moefold.planner.memory_chunk import ChunkBytes, ChunkEstimator, offloaded_tensors
from moefold.planner.memory_graphs import chunk_static_bytes, micro_batch_bytes
from moefold.planner.memory_saved import layer_shape, saved_tensors_of
from moefold.planner.memory_state import StateBytes, StateSharding
from moefold.planner.memory_steps import RunningAction, peak_candidates, running_actions
from moefold.planner.reference import reference_bytes
from moefold.planner.time_data import collective_counter
from moefold.spec.pages import ChunkBlocks, count_pages, page_bytes, unpaged

MIB = 2**20


@dataclass(frozen=True)
class Overheads:
    """Memory of software besides tensors, independent of model and layout."""

    context: float = 0.0
    """Bytes of driver, libraries and kernels outside the allocator."""
    communicator: float = 0.0
    """Bytes of the buffers of one communicator."""
    fragmentation: float = 0.0
    """Reserved but unused memory of the allocator, as a share of allocated memory."""
    graph_buffers: float = 0.0
    """Share of activations that partial CUDA graphs store a second time in static buffers."""


GPU_OVERHEADS = Overheads(
    context=700 * MIB, communicator=150 * MIB, fragmentation=0.045, graph_buffers=0.05
)
"""Context and communicators: the order of magnitude in NVIDIA's and NCCL's documents. Fragments:
72-73 GB reserved for 69-70 GB allocated, GPT-OSS-120B on 32 H100. Graphs: about 7 GB of
DeepSeek-V3's 131 GB of activations (arXiv 2603.07685, section 4.3.6)."""
CPU_OVERHEADS = Overheads()
"""A CPU's allocator returns unused memory; memory of the process itself is not counted."""


@dataclass(frozen=True)
class ActionMemory:
    """Bytes of memory while one action runs."""

    label: str
    """The action, such as ``F3`` or ``B0'1``; ``step`` is the optimizer's."""
    activations: float
    operands: float
    """Operands of deferred weight-gradient products, stored between I and W."""
    temporaries: float
    """Temporaries of the action."""
    gradients: float
    """Gradients allocated so far."""
    host: float = 0.0
    """Activations in host memory; not part of the total."""
    disk: float = 0.0

    @property
    def total(self) -> float:
        """Bytes on the device that do not last for the whole step."""
        return self.activations + self.operands + self.temporaries + self.gradients


@dataclass(frozen=True)
class StageMemory:
    """Memory of one rank of a pipeline stage during a step, in bytes."""

    rank: int
    """The pipeline rank."""
    state: StateBytes
    overheads: float
    """Memory of software outside the allocator."""
    fragmentation: float
    """Reserved but unused memory as a share of allocated memory."""
    actions: tuple[ActionMemory, ...] = field(repr=False)
    """Memory during each action, in order."""
    tier: str = "host"
    """Where offloaded state is stored: host or disk."""

    @property
    def offloaded_state(self) -> dict[str, float]:
        """Bytes of state and pages on the host or on disk, by part and place."""
        sizes = {
            f"master on {self.tier}": self.state.offloaded_master,
            f"moments on {self.tier}": self.state.offloaded_moments,
            "pages on host": self.state.offloaded_pages,
        }
        return {name: size for name, size in sizes.items() if size}

    @cached_property
    def peak_action(self) -> ActionMemory:
        """The action with the most memory."""
        return max(self.actions, key=lambda action: action.total)

    @property
    def peak_allocated(self) -> float:
        """Peak memory of tensors: what a framework reports as peak allocated."""
        return self.state.total - self.state.gradients + self.peak_action.total

    @property
    def total(self) -> float:
        """Memory that the device needs."""
        return self.peak_allocated * (1 + self.fragmentation) + self.overheads

    @property
    def offloaded_activations(self) -> dict[str, float]:
        """Peak of activations on the host and on disk, without those that are zero."""
        sizes = {tier: max(getattr(a, tier) for a in self.actions) for tier in ("host", "disk")}
        return {tier: size for tier, size in sizes.items() if size}

    @property
    def parts(self) -> dict[str, float]:
        """``total`` by part."""
        peak = self.peak_action
        parts = {
            **self.state.on_device,
            "gradients": peak.gradients,
            "activations": peak.activations,
        }
        if any(action.operands for action in self.actions):
            parts["operands"] = peak.operands
        parts["working"] = peak.temporaries
        parts["fragments"] = self.peak_allocated * self.fragmentation
        parts["software"] = self.overheads
        return parts


def estimate_memory(case: Case) -> tuple[StageMemory, ...]:
    """Return the memory of each pipeline rank during a step."""
    return tuple(_rank_memory(case, rank) for rank in range(case.sizes.pp))


def _rank_memory(case: Case, rank: int) -> StageMemory:
    stage = stage_bytes(case, rank)
    line = case.table.lines[rank]
    actions = []
    for step, running in zip(line, running_actions(line, case.sizes.vpp), strict=True):
        needed = stage.needed_during(running)
        offloaded = stage.offloaded_during(running)
        actions.append(ActionMemory(str(step), *needed, *offloaded))
    actions.append(ActionMemory("step", 0.0, 0.0, stage.state_update, stage.state.gradients))
    fragmentation = software_overheads(case.cluster.device).fragmentation
    tier = "disk" if case.state.at == "disk" else "host"
    return StageMemory(rank, stage.state, software_bytes(case), fragmentation, tuple(actions), tier)


def rank_totals(case: Case, limit: float = inf) -> Iterator[float]:
    """Yield the bytes that each pipeline rank's device needs, as in :attr:`StageMemory.total`.

    Only actions that can be the peak are computed, those with the most chunks first; a rank that
    exceeds ``limit`` ends as soon as that is known, with a lower bound.
    """
    estimator = _chunk_estimator(case)
    software = software_bytes(case)
    fragmentation = software_overheads(case.cluster.device).fragmentation
    for rank, actions in enumerate(peak_candidates(case)):
        stage = stage_bytes(case, rank, estimator)
        constant = stage.state.total - stage.state.gradients
        peak = stage.state.gradients + stage.state_update
        available = (limit - software) / (1 + fragmentation) - constant
        for action in actions:
            peak = max(peak, sum(stage.needed_during(action)))
            if peak > available:
                break
        yield (constant + peak) * (1 + fragmentation) + software


def peak_within(case: Case, limit: float) -> float | None:
    """Return the bytes that the fullest device needs, None if that is more than ``limit``."""
    peak = 0.0
    for total in rank_totals(case, limit):
        if total > limit:
            return None
        peak = max(peak, total)
    return peak


def fullest_rank(case: Case) -> StageMemory:
    """Return the memory of the fullest pipeline rank, for a step with just enough micro-batches to
    reach the peak.
    """
    short = with_fewest_micro_batches(case)
    totals = list(rank_totals(short))
    return _rank_memory(short, totals.index(max(totals)))


def with_fewest_micro_batches(case: Case) -> Case:
    """Return a case with fewer micro-batches and the same peak memory."""
    m = equivalent_micro_batches(case.schedule, case.sizes.pp, case.num_micro_batches)
    if m == case.num_micro_batches or case.software.cuda_graphs == "full" or case.reference:
        return case
    return replace(case, batch=case.folding.dp * case.micro_batch * m)


def software_overheads(device: Device) -> Overheads:
    """Return the overheads of software on a device."""
    return CPU_OVERHEADS if device.cpu else GPU_OVERHEADS


def software_bytes(case: Case) -> float:
    """Return the bytes of software outside the allocator: context and communicators."""
    software = software_overheads(case.cluster.device)
    folding = case.folding
    groups = num_communicators(folding.attention, folding.experts)
    return software.context + groups * software.communicator


@memoize(1 << 12)
def num_communicators(attention: Grid, experts: Grid) -> int:
    """Return the number of distinct groups of several ranks that a rank belongs to."""
    grids = {ATTENTION: attention, EXPERTS: experts}
    return len({kind.runs(grids[kind.grid]) for kind in GROUP_KINDS.values()} - {()})


# ----------------------------------------------------------------------------- stages


class StageBytes(NamedTuple):
    """Bytes on a pipeline rank from which the memory during each action follows."""

    state: StateBytes
    chunks: list[ChunkBytes]
    saved: list[float]
    """Activations of a micro-batch in each chunk."""
    deferred: list[float]
    """Operands of deferred weight-gradient products of a micro-batch in each chunk."""
    lasting_gradients: float
    """Gradients, or shards of them, allocated during the whole step."""
    state_update: float
    """Peak of offloaded state that is on the device for its update."""
    passes: tuple[int, ...]
    """Number of passes of each chunk with CUDA graphs, whose memory lasts."""

    def saved_before(self, action: RunningAction) -> tuple[float, float]:
        """Return activations, and operands of deferred products, before an action."""
        activations = sum(map(mul, action.saved, self.saved))
        operands = sum(map(mul, action.deferred, self.deferred)) if any(action.deferred) else 0.0
        if action.backward is not None and action.frees_activations:
            activations += self.chunks[action.backward].prefetched
        return activations, operands

    def gradients_before(self, action: RunningAction) -> float:
        """Return the gradients that are allocated before an action."""
        begun = [self.chunks[chunk].first_gradients for chunk in action.with_gradients]
        # Only the last chunk can have the head.
        head = self.chunks[-1].head_gradients
        if head and not action.has_begun(len(self.chunks) - 1):
            head = 0.0
        return self.lasting_gradients + head + sum(begun)

    def offloaded_during(self, action: RunningAction) -> tuple[float, float]:
        """Return the peak of activations on the host and on disk while an action runs."""
        running = (chunk == action.forward for chunk in range(len(self.chunks)))
        return self.offloaded([*map(add, action.saved, running)])

    def offloaded(self, micro_batches: Sequence[int]) -> tuple[float, float]:
        """Return activations on host and disk with some number of micro-batches in each chunk."""
        host, disk = zip(*(chunk.offloaded for chunk in self.chunks), strict=True)
        return sum(map(mul, micro_batches, host)), sum(map(mul, micro_batches, disk))

    def needed_during(self, action: RunningAction) -> tuple[float, float, float, float]:
        """Return activations, operands, temporaries and gradients while an action runs.

        CUDA graphs of a pass hold memory for their activations and temporaries at all times.
        """
        chunks = self.chunks
        gradients = self.gradients_before(action)
        activations, operands = self.saved_before(action)
        temporaries = freed = 0.0
        if action.backward is not None:
            back = chunks[action.backward]
            freed = back.deferred if action.kind == "W" else back.saved
            # Activations are freed as gradients and operands are allocated: the larger counts.
            if action.computes_weight_gradients and action.backward not in action.with_gradients:
                gradients += max(back.first_gradients - freed, 0.0)
            if action.kind == "I":
                operands += max(back.deferred - freed, 0.0)
                freed = max(freed - back.deferred, 0.0)
            temporaries = back.backward + back.in_transfer - back.prefetched
            temporaries = back.unsharded_gradients if action.kind == "W" else temporaries
        if action.forward is not None:
            ahead = chunks[action.forward]
            if not action.has_begun(action.forward):
                gradients += ahead.head_gradients
            temporaries = max(temporaries, ahead.forward + ahead.in_transfer)
            # In a pair the two passes gather weights of different units.
            temporaries += ahead.gathered_weights if action.backward is not None else 0.0
            # The forward stores activations layer by layer while the backward frees its own.
            paired = max(ahead.saved - freed, 0.0) + ahead.fullest_layer
            activations += paired if freed else ahead.saved
        if self.passes:
            largest = (max(chunk.forward, chunk.backward) for chunk in chunks)
            activations, operands, temporaries = (
                sum(map(mul, self.passes, sizes)) for sizes in (self.saved, self.deferred, largest)
            )
        return activations, operands, temporaries, gradients


_cached_estimator = memoize(1 << 12)(ChunkEstimator)


def _chunk_estimator(case: Case) -> ChunkEstimator:
    software = case.software
    overheads = software_overheads(case.cluster.device)
    buffers = software.cuda_graphs != "none" and software.stack != "moefold"
    graphs = overheads.graph_buffers if buffers else 0.0
    sharding = StateSharding.of(case)
    rows = software.logits_chunk
    shape = layer_shape(case)
    # A CPU holds logits and their logarithms in fp32; GPU kernels replace logits by their gradient.
    logit = 8 if overheads is CPU_OVERHEADS else shape.width
    # Without a fused loss logits are saved once more in fp32.
    saved_logit = shape.width if software.fuses_loss else shape.width + 4
    policy = (case.recompute, case.offload)
    return _cached_estimator(
        case.decoder, shape, sharding, *policy, graphs, rows, logit, saved_logit
    )


def offload_order(case: Case, rank: int) -> list[tuple[int, ...]]:
    """Return the kinds of a rank's layers by chunk, in order; empty if nothing is offloaded."""
    if not case.offload.moves_layers:
        return [()] * len(case.contents.chunks[rank])
    return layer_order(case, rank)


def layer_order(case: Case, rank: int) -> list[tuple[int, ...]]:
    """Return the kinds of a rank's layers by chunk, without multi-token prediction layers."""
    kinds = distinct_blocks(case.decoder)[1]
    order = []
    for chunk in case.contents.parts[rank]:
        layers = [part.index for part in chunk if part.kind == "layer"]
        order.append(tuple(kinds[index] for index in layers))
    return order


def rank_pages(case: Case, rank: int) -> tuple[Counter[int], Counter[int]]:
    """Return the numbers of pages of a rank on the device and on the host, by bytes per row."""
    (blocks, order) = distinct_blocks(case.decoder)
    (main, _) = layer_counts(case.decoder)
    chunks: list[ChunkBlocks] = []
    for parts in case.contents.parts[rank]:
        layers = [blocks[order[part.index]] for part in parts if part.kind == "layer"]
        ahead = [blocks[order[main + part.index]] for part in parts if part.kind == "multi_token"]
        chunks.append(ChunkBlocks(layers, ahead, any(part.kind == "loss" for part in parts)))
    line = case.table.lines[rank]
    return count_pages(chunks, layer_shape(case), case.recompute, case.offload, line)


def stage_bytes(case: Case, rank: int, estimator: ChunkEstimator | None = None) -> StageBytes:
    """Return the bytes of a pipeline rank; ``estimator`` is the case's, if known already."""
    estimator = estimator or _chunk_estimator(case)
    contents = case.contents.ranks[rank]
    orders = offload_order(case, rank)
    chunks = list(map(estimator.chunk_bytes, case.contents.chunks[rank], orders))
    state = estimator.states.rank_state(contents)
    if (pages := case.offload.pages) is not None:
        device, host = page_bytes(*rank_pages(case, rank), pages.page)
        state = replace(state, pages=device, offloaded_pages=host)
    if case.reference is not None:
        state = replace(state, reference=reference_bytes(case, rank))
    state, chunks, passes = add_graph_memory(case, rank, state, chunks)
    if contents.embedding and len(chunks) > 1 and (contents.multi_token or case.decoder.tied):
        # A later chunk that reads the table runs its backward first, and allocates its gradient.
        later = contents.loss or contents.multi_token
        table = estimator.table_gradients(case.contents.chunks[rank][0]) if later else 0.0
        chunks[0] = chunks[0]._replace(first_gradients=chunks[0].first_gradients - table)
    allocated = sum(chunk.first_gradients + chunk.head_gradients for chunk in chunks)
    lasting_gradients = state.gradients - allocated
    saved = [chunk.saved for chunk in chunks]
    deferred = [chunk.deferred for chunk in chunks]
    fetched = case.state.is_offloaded and case.state.step == "device"
    state_update = estimator.states.update_peak(contents) if fetched else 0.0
    return StageBytes(state, chunks, saved, deferred, lasting_gradients, state_update, passes)


def add_graph_memory(
    case: Case, rank: int, state: StateBytes, chunks: list[ChunkBytes]
) -> tuple[StateBytes, list[ChunkBytes], tuple[int, ...]]:
    """Return state with the memory of CUDA graphs, chunks without the part of that memory that they
    count as activations, and the number of passes of each chunk with their own graphs."""
    shape = layer_shape(case)
    ahead = layer_counts(case.decoder)[1]
    captured = case.software.cuda_graphs
    blocks = distinct_blocks(case.decoder)[0]
    if not case.has_partial_graphs:
        if captured == "full" and case.software.stack == "moefold":
            state = replace(state, graphs=case.num_micro_batches * micro_batch_bytes(shape, ahead))
        return state, chunks, ()
    actions = list(running_actions(case.table.lines[rank], len(chunks)))
    # The most passes in flight of each chunk.
    passes = tuple(
        max(step.saved[chunk] + step.deferred[chunk] + (step.forward == chunk) for step in actions)
        for chunk in range(len(chunks))
    )
    paged = case.offload.pages is not None
    inputs = shape, case.recompute, paged, captured == "experts", ahead
    orders = ([blocks[kind] for kind in order] for order in layer_order(case, rank))
    static = [chunk_static_bytes(order, *inputs) for order in orders]
    defers = any(action.kind == "W" for action in actions)
    chunks = [
        chunk._replace(saved=chunk.saved - saved, deferred=chunk.deferred * defers)
        for chunk, (_, saved) in zip(chunks, static, strict=True)
    ]
    graphs = sum(count * size for count, (size, _) in zip(passes, static, strict=True))
    sharding = StateSharding.of(case)
    shards = 0.0
    if sharding.zero < 2:
        return replace(state, graphs=graphs), chunks, passes
    # Graphs add to unsharded gradients in static memory, besides this rank's shards of the sums.
    counter = collective_counter(case.decoder, sharding)
    for part, _, count in counter.part_uses(case.contents.ranks[rank]):
        for bucket in (bucket for bucket in part.buckets if bucket.op == "reduce_scatter"):
            ranks, _ = sharding.shards_and_replicas(bucket.group == "edp")
            shards += count * bucket.bytes / ranks
    return replace(state, graphs=graphs, gradients=state.gradients + shards), chunks, passes


# ----------------------------------------------------------------------------- after each step


FETCHED = "fetched"
"""Row of activations fetched from host and disk for the backward of the next action."""
OUTSIDE_LAYERS = "ends"
"""Row of activations outside layers, mostly between the last one and the loss."""


class MemoryAfter(NamedTuple):
    """Bytes after an action."""

    activations_by_name: dict[str, float]
    """Activations by name of the saved tensor, and ``fetched`` and ``ends``."""
    operands: float
    """Operands of deferred weight-gradient products."""
    gradients: float
    offloaded: tuple[float, float]
    """Activations on the host and on disk."""

    @property
    def activations(self) -> float:
        """Activations on the device."""
        return sum(self.activations_by_name.values())


def memory_after_each(case: Case, rank: int) -> Iterator[MemoryAfter]:
    """Yield the memory after each action of a rank's line in the table."""
    stage = stage_bytes(case, rank)
    orders = offload_order(case, rank)
    contents = zip(case.contents.chunks[rank], orders, stage.saved, strict=True)
    chunks = [_activations_by_name(case, *content) for content in contents]
    actions = list(running_actions(case.table.lines[rank], case.sizes.vpp))
    # Memory after an action is that before the next one; after the last, activations are zero.
    zeros = (0,) * len(chunks)
    all_chunks = frozenset(range(len(chunks)))
    last = RunningAction(None, None, "", zeros, zeros, all_chunks)
    for action in [*actions[1:], last]:
        sizes: dict[str, float] = {}
        for micro_batches, chunk in zip(action.saved, chunks, strict=True):
            for name, size in chunk.items():
                sizes[name] = sizes.get(name, 0) + size * micro_batches
        back = action.backward
        if back is not None and action.frees_activations and stage.chunks[back].prefetched:
            sizes[FETCHED] = stage.chunks[back].prefetched
        _, operands = stage.saved_before(action)
        gradients = stage.gradients_before(action)
        yield MemoryAfter(sizes, operands, gradients, stage.offloaded(action.saved))


def _activations_by_name(
    case: Case, contents: StageContents, order: tuple[int, ...], total: float
) -> Counter[str]:
    """Return a chunk's activations of a micro-batch by name; ``total`` is their sum.

    ``order`` is the kinds of layers in order if anything is offloaded.
    """
    sizes = Counter[str]()
    (blocks, _) = distinct_blocks(case.decoder)
    offload = case.offload
    pages = offload.pages
    for kind, count in contents.layers:
        for tensor in saved_tensors_of(case, blocks[kind]):
            if tensor.is_saved_under(case.recompute):
                sizes[tensor.name] += unpaged(tensor, pages).bytes * count
    spilled = 0.0 if pages is None else pages.spill
    for kind in order[: offloaded_layers(spilled, len(order), contents.loss)]:
        for tensor in saved_tensors_of(case, blocks[kind]):
            if tensor.is_saved_under(case.recompute) and tensor.rows and tensor.saved:
                sizes[tensor.name] += unpaged(tensor, pages).bytes
    for tier, (_, share) in enumerate(offload.tiers):
        for kind in order[: offloaded_layers(share, len(order), contents.loss)]:
            saved = saved_tensors_of(case, blocks[kind])
            for tensor in offloaded_tensors(saved, case.recompute, offload)[tier]:
                sizes[tensor.name] -= tensor.bytes
    sizes[OUTSIDE_LAYERS] = round(total) - sizes.total()
    return sizes
