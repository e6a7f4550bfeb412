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
from moefold.planner.memoize import memoize
from moefold.planner.memory_chunk import ChunkBytes, ChunkEstimator, offloaded_tensors
from moefold.planner.memory_graphs import chunk_static_bytes, max_in_flight, micro_batch_bytes
from moefold.planner.memory_pages import ChunkBlocks, count_pages, page_bytes, unpaged
from moefold.planner.memory_saved import layer_shape, saved_tensors_of
from moefold.planner.memory_state import StateBytes, StateSharding
from moefold.planner.memory_steps import RunningAction, peak_candidates, running_actions
from moefold.planner.time_data import collective_counter

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
        state, place = self.state, f"on {self.tier}"
        found = {
            f"master {place}": state.offloaded_master,
            f"moments {place}": state.offloaded_moments,
        }
        found["pages on host"] = state.offloaded_pages
        return {name: value for name, value in found.items() if value}

    @cached_property
    def peak_action(self) -> ActionMemory:
        """The action with the most memory."""
        return max(self.actions, key=lambda m: m.total)

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
        most = {
            "host": max(m.host for m in self.actions), "disk": max(m.disk for m in self.actions)
        }  # fmt: skip
        return {name: size for name, size in most.items() if size}

    @property
    def parts(self) -> dict[str, float]:
        """``total`` by part."""
        moment = self.peak_action
        return {
            **self.state.on_device,
            "gradients": moment.gradients,
            "activations": moment.activations,
            **({"operands": moment.operands} if any(m.operands for m in self.actions) else {}),
            "working": moment.temporaries,
            "fragments": self.peak_allocated * self.fragmentation,
            "software": self.overheads,
        }


def estimate_memory(case: Case) -> tuple[StageMemory, ...]:
    """Return the memory of each pipeline rank during a step."""
    return tuple(estimate_rank(case, rank) for rank in range(case.sizes.pp))


def estimate_rank(case: Case, rank: int) -> StageMemory:
    stage, line = stage_bytes(case, rank), case.table.lines[rank]
    moments = [
        ActionMemory(str(step), *stage.needed_during(running), *stage.offloaded_during(running))
        for step, running in zip(line, running_actions(line, case.sizes.vpp), strict=True)
    ]
    moments.append(ActionMemory("step", 0.0, 0.0, stage.state_update, stage.state.gradients))
    software = software_overheads(case.cluster.device)
    tier = "disk" if case.keeping.state_on_disk else "host"
    return StageMemory(
        rank, stage.state, software_bytes(case), software.fragmentation, tuple(moments), tier
    )


def rank_totals(case: Case, limit: float = inf) -> Iterator[float]:
    """Yield the memory that each pipeline rank's device needs, as in :attr:`Memory.total`.

    Only actions that can be the peak are computed, those with the most chunks first; a rank that
    exceeds ``room`` ends as soon as that is known, with a lower bound.
    """
    chunks, outside = _chunk_estimator(case), software_bytes(case)
    fragments = software_overheads(case.cluster.device).fragmentation
    m = settled(case.schedule, case.sizes.pp, case.micro_batches)
    running = peak_candidates(case.schedule, case.sizes.pp, case.sizes.vpp, m)
    for rank, steps in enumerate(running):
        stage = stage_bytes(case, rank, chunks)
        lasting = stage.state.total - stage.state.gradients
        most = stage.state.gradients + stage.state_update
        enough = (limit - outside) / (1 + fragments) - lasting
        for step in steps:
            most = max(most, sum(stage.needed_during(step)))
            if most > enough:
                break
        yield (lasting + most) * (1 + fragments) + outside


def peak_within(case: Case, limit: float) -> float | None:
    """Return the memory that the fullest device needs, None if that is more than ``room``."""
    most = 0.0
    for total in rank_totals(case, limit):
        if total > limit:
            return None
        most = max(most, total)
    return most


def fullest_rank(case: Case) -> StageMemory:
    """Return the memory of the fullest pipeline rank, for a step with just enough micro-batches to
    reach the peak.
    """
    short = with_fewest_micro_batches(case)
    most = list(rank_totals(short))
    return estimate_rank(short, most.index(max(most)))


def with_fewest_micro_batches(case: Case) -> Case:
    """Return a case with fewer micro-batches and the same peak memory."""
    m = settled(case.schedule, case.sizes.pp, case.micro_batches)
    if m == case.micro_batches or case.software.cuda_graphs == "full":
        return case
    return replace(case, batch=case.folding.dp * case.micro_batch * m)


def software_overheads(device: Device) -> Overheads:
    """Return the overheads of software on a device."""
    return CPU_OVERHEADS if device.cpu else GPU_OVERHEADS


def software_bytes(case: Case) -> float:
    """Return the memory of software outside the allocator: context and communicators."""
    software, folding = software_overheads(case.cluster.device), case.folding
    groups = num_communicators(folding.attention, folding.experts)
    return software.context + groups * software.communicator


@memoize(1 << 12)
def num_communicators(attention: Grid, experts: Grid) -> int:
    """Return the number of distinct groups of several ranks that a rank belongs to."""
    grids = {ATTENTION: attention, EXPERTS: experts}
    return len({kind.runs(grids[kind.grid]) for kind in GROUP_KINDS.values()} - {()})


# ----------------------------------------------------------------------------- stages


class StageBytes(NamedTuple):
    """Bytes on a pipeline rank."""

    state: StateBytes
    chunks: list[ChunkBytes]
    saved: list[float]
    """Activations of a micro-batch in each chunk."""
    deferred: list[float]
    """Operands of deferred weight-gradient products of a micro-batch in each chunk."""
    head_gradients: float
    """Gradients allocated before any backward: those of the head."""
    state_update: float
    """Peak of offloaded state that is on the device for its update."""
    passes: tuple[int, ...]
    """Number of passes of each chunk with CUDA graphs, whose memory lasts."""

    def saved_before(self, step: RunningAction) -> tuple[float, float]:
        """Return activations, and operands of deferred products, before an action."""
        alive = sum(map(mul, step.saved, self.saved))
        waiting = sum(map(mul, step.deferred, self.deferred))
        if step.backward is not None and step.frees_activations:
            alive += self.chunks[step.backward].prefetched
        return alive, waiting

    def offloaded_during(self, step: RunningAction) -> tuple[float, float]:
        """Return the peak of activations on the host and on disk while an action runs."""
        began = (number == step.forward for number in range(len(self.chunks)))
        return self.offloaded([*map(add, step.saved, began)])

    def offloaded(self, kept: Sequence[int]) -> tuple[float, float]:
        """Return activations on host and disk; ``kept`` are the micro-batches in each chunk."""
        host, disk = zip(*(chunk.offloaded for chunk in self.chunks), strict=True)
        return sum(map(mul, kept, host)), sum(map(mul, kept, disk))

    def needed_during(self, step: RunningAction) -> tuple[float, float, float, float]:
        """Return activations, operands, temporaries and gradients while an action runs.

        CUDA graphs of a pass hold memory for their activations and temporaries at all times.
        """
        chunks, (alive, waiting) = self.chunks, self.saved_before(step)
        there = self.head_gradients + sum(
            chunks[number].first_gradients for number in step.with_gradients
        )
        used = freed = 0.0
        if step.backward is not None:
            back = chunks[step.backward]
            freed = back.deferred if step.kind == "W" else back.saved
            # Activations are freed as gradients and operands are allocated: the larger counts.
            if step.computes_weight_gradients and step.backward not in step.with_gradients:
                there += max(back.first_gradients - freed, 0.0)
            if step.kind == "I":
                waiting += max(back.deferred - freed, 0.0)
                freed = max(freed - back.deferred, 0.0)
            used = (
                back.unsharded_gradients
                if step.kind == "W"
                else back.backward + back.in_transfer - back.prefetched
            )
        if step.forward is not None:
            ahead = chunks[step.forward]
            beside = (
                ahead.gathered_weights if step.backward is not None else 0.0
            )  # weights of other units
            used = max(used, ahead.forward + ahead.in_transfer) + beside
            # The forward stores activations layer by layer while the backward frees its own.
            alive += max(ahead.saved - freed, 0.0) + ahead.fullest_layer if freed else ahead.saved
        if self.passes:
            works = (max(chunk.forward, chunk.backward) for chunk in chunks)
            sizes = self.saved, self.deferred, works
            alive, waiting, used = (sum(map(mul, self.passes, size)) for size in sizes)
        return alive, waiting, used, there


_chunks = memoize(1 << 12)(ChunkEstimator)


def _chunk_estimator(case: Case) -> ChunkEstimator:
    software, beside = case.software, software_overheads(case.cluster.device)
    again = software.cuda_graphs != "none" and software.stack != "moefold"
    graphs = beside.graph_buffers if again else 0.0
    split, rows, shape = StateSharding.of(case), software.loss_chunk, layer_shape(case)
    # A CPU holds logits and their logarithms in fp32; GPU kernels replace logits by their gradient.
    logit = 8 if beside is CPU_OVERHEADS else shape.width
    return _chunks(case.decoder, shape, split, case.keeping, graphs, rows, logit)


def offload_order(case: Case, rank: int) -> list[tuple[int, ...]]:
    """Return the kinds of a rank's layers by chunk, in order; empty if nothing is offloaded."""
    keeping = case.keeping
    if not (keeping.offload or keeping.disk or keeping.spill):
        return [()] * len(case.chunks[rank])
    return layer_order(case, rank)


def layer_order(case: Case, rank: int) -> list[tuple[int, ...]]:
    """Return the kinds of a rank's layers by chunk, without multi-token prediction layers."""
    order = kinds(case.decoder)[1]
    return [
        tuple(order[place.index] for place in chunk if place.kind == "layer")
        for chunk in case.places[rank]
    ]


def rank_pages(case: Case, rank: int) -> tuple[Counter[int], Counter[int]]:
    """Return the numbers of pages of a rank on the device and on the host, by bytes per row."""
    (blocks, order), (main, _) = kinds(case.decoder), main_layers(case.decoder)
    found: list[ChunkBlocks] = []
    for chunk in case.places[rank]:
        layers = [blocks[order[one.index]] for one in chunk if one.kind == "layer"]
        more = [blocks[order[main + one.index]] for one in chunk if one.kind == "multi_token"]
        found.append(ChunkBlocks(layers, more, any(one.kind == "loss" for one in chunk)))
    return count_pages(found, layer_shape(case), case.keeping, case.table.lines[rank])


def stage_bytes(case: Case, rank: int, sizes: ChunkEstimator | None = None) -> StageBytes:
    """Return the bytes of a pipeline rank; ``sizes`` are the case's chunks if known already."""
    sizes, held = sizes or _chunk_estimator(case), case.chunks[rank]
    chunks = [sizes.chunk_bytes(*one) for one in zip(held, offload_order(case, rank), strict=True)]
    state = sizes.states.rank_state(case.held[rank])
    if case.keeping.page:
        on_device, on_host = page_bytes(*rank_pages(case, rank), case.keeping.page)
        state = replace(state, pages=on_device, offloaded_pages=on_host)
    state, chunks, passes = add_graph_memory(case, rank, state, chunks)
    there = state.gradients - sum(chunk.first_gradients for chunk in chunks)
    kept, waiting = [one.saved for one in chunks], [one.deferred for one in chunks]
    by_device = case.keeping.state_step == "device"
    coming = sizes.states.update_peak(case.held[rank]) if by_device else 0.0
    return StageBytes(state, chunks, kept, waiting, there, coming, passes)


def add_graph_memory(
    case: Case, rank: int, state: StateBytes, chunks: list[ChunkBytes]
) -> tuple[StateBytes, list[ChunkBytes], tuple[int, ...]]:
    """Return state with the memory of CUDA graphs, chunks without the part of that memory that they
    count as activations, and the number of passes of each chunk with their own graphs."""
    shape, ahead, held = layer_shape(case), main_layers(case.decoder)[1], case.software.cuda_graphs
    if not case.graphs_of_parts:
        whole = held == "full" and case.software.stack == "moefold"
        rows = case.micro_batches * micro_batch_bytes(shape, ahead) if whole else 0.0
        return replace(state, graphs=rows), chunks, ()
    blocks, steps = (
        kinds(case.decoder)[0],
        list(running_actions(case.table.lines[rank], len(chunks))),
    )
    passes, fixed = tuple(max_in_flight(steps, len(chunks))), held == "experts"
    sizes = [
        chunk_static_bytes([blocks[kind] for kind in order], shape, case.keeping, fixed, ahead)
        for order in layer_order(case, rank)
    ]
    splits = any(step.kind == "W" for step in steps)
    left = [
        one._replace(saved=one.saved - shared, deferred=one.deferred * splits)
        for one, (_, shared) in zip(chunks, sizes, strict=True)
    ]
    graphs = sum(count * size for count, (size, _) in zip(passes, sizes, strict=True))
    # Graphs add to whole gradients in fixed memory; this rank's shares of their sums lie beside it.
    split = StateSharding.of(case)
    shares = sum(
        times * one.bytes / split.shards_and_replicas(one.group == "edp")[0]
        for part, _, times in collective_counter(case.decoder, split).part_uses(case.held[rank])
        for one in part.buckets
        if one.op == "reduce_scatter"
    )
    return replace(state, graphs=graphs, gradients=state.gradients + shares), left, passes


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
    stage, held = stage_bytes(case, rank), case.chunks[rank]
    given = zip(held, offload_order(case, rank), stage.saved, strict=True)
    rows = [_activations_by_name(case, *one) for one in given]
    steps = list(running_actions(case.table.lines[rank], case.sizes.vpp))
    nothing = (0,) * len(rows)
    # Memory after an action is that before the next one; after the last, activations are zero.
    begun = frozenset(range(len(rows)))
    last = RunningAction(None, None, "", nothing, nothing, begun)
    for step in [*steps[1:], last]:
        found = Counter[str]()
        for number, row in zip(step.saved, rows, strict=True):
            found.update({name: size * number for name, size in row.items()})
        made, away = dict[str, float](found), stage.offloaded(step.saved)
        if (
            step.backward is not None
            and step.frees_activations
            and stage.chunks[step.backward].prefetched
        ):
            made[FETCHED] = stage.chunks[step.backward].prefetched
        coming = sum(stage.chunks[number].first_gradients for number in step.with_gradients)
        operands = stage.saved_before(step)[1]
        yield MemoryAfter(made, operands, stage.head_gradients + coming, away)


def _activations_by_name(
    case: Case, held: Held, order: tuple[int, ...], whole: float
) -> Counter[str]:
    """Return a chunk's activations of a micro-batch by name; ``whole`` is their sum.

    ``order`` is the kinds of layers in order if anything is offloaded.
    """
    found, (blocks, _), keeping = Counter[str](), kinds(case.decoder), case.keeping
    for kind, count in held.layers:
        for part in saved_tensors_of(case, blocks[kind]):
            if part.stays(keeping.recompute):
                found[part.name] += unpaged(part, keeping).bytes * count
    for kind in order[: offloaded_layers(keeping.spill, len(order), held.loss)]:
        for part in saved_tensors_of(case, blocks[kind]):
            if part.stays(keeping.recompute) and part.rows and part.saved:
                found[part.name] += unpaged(part, keeping).bytes
    for to, share in enumerate((keeping.offload_share, keeping.disk_share)):
        for kind in order[: offloaded_layers(share, len(order), held.loss)]:
            for part in offloaded_tensors(saved_tensors_of(case, blocks[kind]), keeping)[to]:
                found[part.name] -= part.bytes
    found[OUTSIDE_LAYERS] = round(whole) - found.total()
    return found
