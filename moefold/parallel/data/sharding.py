"""ZeRO sharding of weights, gradients and optimizer state over data ranks.

A gradient is complete after three sums: over ranks that hold copies and saw other tokens, over
tensor ranks that hold a full parameter and apply it to different rows, and over the stages that
hold the embedding. Each element counts once in the norm.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from moefold.comm.collectives import sum_
from moefold.comm.group import Group
from moefold.config.base import Record
from moefold.config.errors import RunError
from moefold.config.slot import build
from moefold.layers.history import all_reduce_amax
from moefold.layers.placement import Box, Shard
from moefold.layers.precision import quantised_weights
from moefold.layers.unshard import EMBEDDING, RESIDENT, UnshardHooks, unit_of
from moefold.offload.slots import MovedTensors
from moefold.optim.base import PREFIX, LocalMatrices, Optimizer
from moefold.optim.config import Optim
from moefold.optim.norm import squared_norm
from moefold.parallel.apply import Chunk, ModelParts
from moefold.parallel.data.bucket import Bucket, BucketSlot, box_size, boxes, handle_of, to_global
from moefold.parallel.data.coded import CodedBucket
from moefold.parallel.data.fsdp_hooks import FsdpHooks, GradReducer
from moefold.parallel.data.groups import SharedGroups, group_boxes
from moefold.parallel.data.matrices import MatrixSource, ShardedMatrices
from moefold.parallel.data.offload import (
    OffloadedOptimizer,
    OffloadedPart,
    StateOffload,
    units_to_offload,
)
from moefold.parallel.data.qk_clip import ClippedOptimizer
from moefold.spec.decoder import heads_by_weight

EMBEDDING_WEIGHT = f"{EMBEDDING}.weight"


@dataclass(frozen=True)
class LocalSlice:
    """A box of a global tensor that this rank holds, for checkpoints and proofs."""

    name: str
    tensor: Tensor
    """The live values, contiguous, in the shape of the box."""
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    box: Box
    copy: int
    """Index among the ``copies`` owners of the box; ``copies`` if this rank is not an owner."""
    copies: int
    """Number of ranks that own a copy of the box."""

    @classmethod
    def full(cls, name: str, tensor: Tensor, copy: int, copies: int) -> "LocalSlice":
        """Return a slice that covers the full tensor."""
        shape = tuple(tensor.shape)
        return cls(name, tensor, shape, tuple((0, size) for size in shape), copy, copies)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first owner of the box."""
        return self.copy == 0


class ShardedState:
    """This rank's shard of the training state, with its collectives.

    Attributes:
        parts: this rank's parts of the model; sharded parameters are replaced by handles.
        params: what this rank updates, by global name: its elements of a parameter, or all of it.
        has_values: whether tensors have values, not only names, shapes and dtypes.
        histories: amax histories for delayed scaling of products on codes, by weight name.
    """

    def __init__(self, parts: ModelParts, has_values: bool = True) -> None:
        """Shard the parameters' values.

        Those on ``meta`` are allocated on the world's device; :meth:`fill` sets their values.
        """
        self.has_values = has_values
        self.parts = replace(parts, hooks_for=self.hooks_for)
        self._shards = parts.shards
        world = parts.world
        layout = parts.layout
        if broken := list(layout.world_violations(world.size)):
            raise RunError(broken, source="layout")
        self._groups_by_kind: dict[str, tuple[Group, Group]] = {}
        """By kind: ranks that shard one copy, and ranks with the corresponding shard of others."""
        for kind in ("dp_cp", "edp"):
            size = world.group(kind).size
            inside = math.gcd(layout.zero_ranks or size, size) if layout.zero else 1
            self._groups_by_kind[kind] = world.split(kind, inside)
        self._embedding_group: Group | None = None
        if len(parts.embedding_stages) > 1:
            # Collective: ranks of the stages in between take part too.
            self._embedding_group = world.stage_group(parts.embedding_stages)
        self._units: dict[str, list[Bucket]] = defaultdict(list)
        self._bucket: dict[str, Bucket] = {}
        self.params: dict[str, Tensor] = {}
        self._masters: dict[str, Tensor] = {}
        """What the optimizer updates, by name; not ``params`` if the host updates."""
        self._moments: list[Tensor] = []
        """Offloaded moments."""
        self._stale = True
        quantised = quantised_weights(parts.model).items()
        self.histories = {n: p.history for n, p in quantised if p.history is not None}
        self._heads = heads_by_weight(parts.model.record)
        """Number of heads of weights whose rows are divided into heads, by name."""
        state = layout.state
        self.offload: StateOffload | None = None
        if state.is_offloaded and has_values:
            self.offload = StateOffload(state, world.device, world.rank)
        self._moved = MovedTensors(world.device)
        """State that is on the host between two phases of a run."""
        self._build_buckets()
        self._reducer = GradReducer({}, {}, False)
        self.refresh_weights()

    # Sharding

    def _build_buckets(self) -> None:
        """Move sharded and offloaded parameters into buckets; replace them by handles."""
        model = self.parts.model
        zero = self.parts.layout.zero
        device = self.parts.world.device
        groups: dict[tuple[str, str, torch.dtype, bool, bool], dict[str, nn.Parameter]]
        groups = defaultdict(dict)
        offloaded = self._units_to_offload()
        coded = {n: p for n, p in quantised_weights(model).items() if p.recipe.has_square_blocks}
        for name, parameter in model.named_parameters():
            placement = self._shards[name].placement
            is_offloaded = parameter.requires_grad and unit_of(name) in offloaded
            is_unsharded = self._groups_by_kind[placement.replicas][0].size == 1
            # A frozen parameter has no master and no state: only ZeRO 3 shards its values.
            if (is_unsharded and not is_offloaded) or (zero < 3 and not parameter.requires_grad):
                continue
            wide = placement.wide or parameter.dim() < 2
            dtype = parameter.dtype if wide else model.precision_policy.dtype
            key = unit_of(name), placement.replicas, dtype, parameter.requires_grad, name in coded
            groups[key][name] = parameter
        for (unit, kind, dtype, trained, codes), parameters in groups.items():
            offload = self.offload if trained and unit in offloaded else None
            home = offload and offload.update_device
            args = unit, parameters, *self._groups_by_kind[kind], dtype, device, zero < 3, home
            slices = self.parts.world.group("etp" if kind == "edp" else "tp")
            bucket = CodedBucket(coded, slices, *args) if codes else Bucket(*args)
            self._units[unit].append(bucket)
            for name, handle in bucket.handles.items():
                self._bucket[name] = bucket
                _set_tensor(model, name, handle)
            bucket.register_weights(model.precision_policy)
        _materialise(model, device)
        for name, parameter in model.named_parameters():
            bucket = self._bucket.get(name)
            if bucket is None:
                self.params[name] = parameter
            elif bucket.is_unsharded:
                self._register_update(bucket, bucket.slots[name], bucket.slots[name].shape)
        for bucket in self.buckets:
            for slot in () if bucket.is_unsharded else bucket.slots.values():
                # As many dims as the parameter has: weight decay depends on their number.
                self._register_update(bucket, slot, [*[1] * (len(slot.shape) - 1), -1])
        for bucket in self._offloaded_buckets:
            assert self.offload is not None
            self.offload.register(f"masters of {bucket.unit}", bucket.master_L)

    def _register_update(self, bucket: Bucket, slot: BucketSlot, shape: Sequence[int]) -> None:
        """Register this rank's elements of a parameter, if any, for updates, in this shape."""
        own = bucket.local_view(slot, bucket.master_L)
        if own.numel():
            own = own.view(*shape).requires_grad_(bucket.trained)
            self._masters[slot.name] = own
            by_host = bucket.offloaded and self.offload is not None and self.offload.updates_on_host
            self.params[slot.name] = handle_of(own, bucket.values.device) if by_host else own

    def _units_to_offload(self) -> frozenset[str]:
        """Return the units whose masters and moments are offloaded."""
        if self.offload is None:
            return frozenset()
        elements: dict[str, int] = defaultdict(int)
        for name, parameter in self.parts.model.named_parameters():
            ranks = self._groups_by_kind[self._shards[name].placement.replicas][0].size
            elements[unit_of(name)] += parameter.numel() * parameter.requires_grad // ranks
        return units_to_offload(elements, self.offload.record.share)

    @property
    def _offloaded_buckets(self) -> list[Bucket]:
        """Buckets whose masters are offloaded."""
        return [bucket for bucket in self.buckets if bucket.offloaded]

    @property
    def buckets(self) -> Iterator[Bucket]:
        """All buckets, in model order."""
        for buckets in self._units.values():
            yield from buckets

    def optimizer(self, record: Record) -> Optimizer:
        """Build the optimizer of this rank's params; free offloaded state of an earlier one."""
        assert isinstance(record, Optim)
        masters = {name: self._masters.get(name, p) for name, p in self.params.items()}
        if self.offload is None:
            optimizer = self._build_optimizer(record, masters, tuple(self._units))
        else:
            self.offload.unregister(self._moments)
            self._moments = []
            parts = []
            # In one order on all ranks: an update may contain collectives.
            units = dict.fromkeys([*(b.unit for b in self.buckets), *map(unit_of, masters)])
            for part in [(unit,) for unit in units] if record.elementwise else [tuple(units)]:
                params = {name: master for name, master in masters.items() if unit_of(name) in part}
                parts.append(self._build_offloaded_part(record, params, part))
            optimizer = OffloadedOptimizer(self.params, parts, self.offload)
        if record.qk_clip is None:
            return optimizer
        return ClippedOptimizer(optimizer, self.parts, self.weights, record.qk_clip)

    def _build_offloaded_part(
        self, record: Optim, masters: dict[str, Tensor], units: tuple[str, ...]
    ) -> OffloadedPart:
        """Build the optimizer of some units, and offload its moments."""
        assert self.offload is not None
        buckets = [bucket for bucket in self._offloaded_buckets if bucket.unit in units]
        tensors = [bucket.master_L for bucket in buckets]
        self.offload.prefetch(tensors)()
        optimizer = self._build_optimizer(record, masters, units)
        self.offload.write_back(tensors)()
        offloaded = {name for bucket in buckets for name in bucket.slots}
        for key, moment in optimizer.state().items():
            name = _parameter_name(key)
            if name in offloaded and moment.dim():
                self.offload.register(key, moment)
                self._moments.append(moment)
                tensors.append(moment)
        return OffloadedPart(optimizer, buckets, tensors)

    def _build_optimizer(
        self, record: Optim, masters: dict[str, Tensor], units: Collection[str]
    ) -> Optimizer:
        """Build the optimizer of the masters of some units, given how ranks shard them."""
        if record.rounds:
            buckets = [bucket for bucket in self.buckets if bucket.unit in units]
            groups = SharedGroups(
                record.group, self._shards, buckets, self.parts.model.precision_policy
            )
            return build(record, masters, groups=groups)
        sources = [
            self._matrix_source(name, record)
            for name, parameter in self.parts.model.named_parameters()
            if parameter.requires_grad and record.needs_whole(name, self._shards[name].shape)
        ]
        if not sources:
            return build(record, masters)
        shapes = {n: record.split(self._shards[n].shape, self._heads.get(n, 0)) for n in masters}
        if all(source.shard_group.size == 1 and source.slice_group is None for source in sources):
            return build(record, masters, wholes=LocalMatrices(shapes))
        dtype = self.parts.model.precision_policy.master_dtype
        device = self.parts.world.device
        empty = torch.empty(0, dtype=dtype, device=device)
        return build(record, masters, wholes=ShardedMatrices(sources, shapes, empty))

    def _matrix_source(self, name: str, record: Optim) -> MatrixSource:
        """Return how a parameter made of matrices is sharded; no rank has part of a head."""
        shard = self._shards[name]
        bucket = self._bucket.get(name)
        world = self.parts.world
        local_shape = shard.local_shape
        heads = self._heads.get(name, 0)
        dims = len(local_shape)
        shape = record.split(local_shape, heads * local_shape[0] // shard.shape[0])
        cut = [
            (world.group(axis), dim - dims)
            for axis, dim in shard.placement.cuts.items()
            if len(shape) == dims and dim >= dims - 2 and world.group(axis).size > 1
        ]
        slices, dim = cut[0] if cut else (None, 0)
        inside = self._groups_by_kind[shard.placement.replicas][0]
        runs = ((0, math.prod(shape)),)
        if bucket is not None:
            slot = bucket.slots[name]
            length = bucket.length
            runs = tuple(slot.range_in(r * length, (r + 1) * length) for r in range(inside.size))
        return MatrixSource(name, shape, runs, inside, slices, dim)

    # A step

    def begin_step(self, micro_batches: int) -> None:
        """Drop the last step's gradients; prepare to reduce those of this many micro-batches."""
        self.move_back()
        self._drop_gradients()
        for bucket in self.buckets:
            bucket.begin_step()
        for history in self.histories.values():
            history.seen_RM.zero_()
        uses: dict[str, int] = defaultdict(int)
        for chunk in self.parts.chunks:
            ends = [self.parts.model.head_unit] * chunk.has_head
            ends += [EMBEDDING] * len(chunk.multi_token)
            for unit in self._unit_order(chunk, True) + ends:
                uses[unit] += micro_batches
        self._reducer = GradReducer(self._units, uses, self.parts.layout.zero >= 2)

    def _drop_gradients(self) -> None:
        """Drop gradients, also those of shards, which are views of the last step's sums."""
        for parameter in (*self.parts.model.parameters(), *self.params.values()):
            parameter.grad = None

    def hooks_for(self, chunk: Chunk, *, training: bool, deferred: bool = False) -> UnshardHooks:
        """Return the hooks that unshard a chunk's weights for one micro-batch."""
        self.move_back()
        if not self._units:
            return RESIDENT
        reducer = self._reducer if training else None
        order = self._unit_order(chunk, training)
        return FsdpHooks(self._units, order, reducer, deferred, chunk.forward_only)

    def _unit_order(self, chunk: Chunk, training: bool) -> list[str]:
        """Return the units of a chunk in forward order, without the head.

        Multi-token layers, which run only in training, also look up embeddings in between.
        """
        layers, extra = ([f"layers.{n}" for n in ns] for ns in (chunk.layers, chunk.multi_token))
        ends = ["norm"] * chunk.has_norm + extra * training
        return [EMBEDDING] * chunk.has_embedding + layers + ends

    def finish(self) -> Tensor:
        """Complete every gradient; return this rank's part of the squared norm, fp64.

        A parameter that received none gets a zero gradient, so that its moments still decay.
        """
        all_reduce_amax(self.histories.values(), self.parts.world.group("stage"))
        for bucket in self.buckets:
            bucket.finish()
        trained = {name: p for name, p in self.params.items() if p.requires_grad}
        for name, parameter in trained.items():
            bucket = self._bucket.get(name)
            if bucket is not None:
                assert bucket.summed_L is not None
                own = bucket.local_view(bucket.slots[name], bucket.summed_L)
                parameter.grad = own.view_as(parameter)
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        placements = {name: self._shards[name].placement for name in trained}
        sharded = {n for n, bucket in self._bucket.items() if not bucket.is_unsharded}
        for kind, (_, replicas) in self._groups_by_kind.items():
            copied = [n for n in trained if n not in sharded and placements[n].replicas == kind]
            _sum_gradients([trained[n] for n in copied], replicas)
        over_tp = [p for n, p in trained.items() if placements[n].replicated_over_tp]
        _sum_gradients(over_tp, self.parts.world.group("tp"))
        over_etp = [p for n, p in trained.items() if placements[n].replicated_over_etp]
        _sum_gradients(over_etp, self.parts.world.group("etp"))
        # Last, when each stage has summed over data ranks: a sum of two is the same in any order.
        if self._embedding_group is not None and EMBEDDING_WEIGHT in trained:
            _sum_gradients([trained[EMBEDDING_WEIGHT]], self._embedding_group)
        owned = [p.grad for n, p in trained.items() if not self._copy_index(n)[0]]
        grads = [grad for grad in owned if grad is not None]
        return squared_norm(grads, self.parts.world.device)

    def end_step(self) -> None:
        """Update router balance, amax histories and weights, after the masters were updated."""
        for _, mixture in self.parts.model.moe_layers():
            mixture.balance.finish_step(mixture.router)
        for history in self.histories.values():
            history.advance()
        self.refresh_weights()

    @torch.no_grad()
    def refresh_weights(self) -> None:
        """Refresh the weights that stay unsharded, after any change of the masters.

        Starts the gathers; the first pass through a unit waits for that unit's gather.
        """
        for bucket in self._offloaded_buckets:
            if self._stale or not bucket.has_compute_copy:
                bucket.store_compute_copy(self._stored_values(bucket.master_L))
        self._stale = False
        self.flush()
        for bucket in self.buckets:
            if self.has_values:
                bucket.refresh_weights()

    def flush(self) -> None:
        """Write offloaded state that was read into memory back to disk."""
        if self.offload is not None:
            self.offload.flush()

    def move_out(self, optimizer: Optimizer | None = None) -> int:
        """Move all state to host memory until it is next used; return the bytes there.

        Gradients, gathered weights and compute copies are freed. A pass, a step or a checkpoint
        moves the state back, on all ranks at once.
        """
        model = self.parts.model
        self._drop_gradients()
        for bucket in self.buckets:
            bucket.free_derived()
        model.precision_policy.free_copies()
        tensors = [*model.parameters(), *model.buffers(), *self.params.values()]
        tensors += [] if optimizer is None else optimizer.tensors()
        tensors += [bucket.master_L for bucket in self.buckets if not bucket.offloaded]
        moved = self._moved.move_out(tensors)
        if self.parts.world.device.type == "cuda":
            torch.cuda.empty_cache()
        return moved

    def move_back(self) -> None:
        """Move the state back to the device if it is on the host, and refresh the weights."""
        if self._moved:
            self._moved.move_back()
            self.refresh_weights()

    def _stored_values(self, tensor: Tensor) -> Tensor:
        """Return the values of a state tensor, wherever they are stored."""
        return tensor.detach() if self.offload is None else self.offload.stored_values(tensor)

    # Reading and writing the state

    def _copy_index(self, name: str) -> tuple[int, int]:
        """Return this rank's index among owners of its elements of a tensor, and their number."""
        placement = self._shards[name].placement
        world = self.parts.world
        bucket = self._bucket.get(name)
        holders = world.group(placement.replicas) if bucket is None else bucket.replica_group
        index = holders.index
        count = holders.size
        if placement.replicated_over_tp:
            tp = world.folding.sizes.tp
            index = index * tp + world.attention.tp
            count *= tp
        if placement.replicated_over_etp:
            etp = world.folding.sizes.etp
            index = index * etp + world.experts.etp
            count *= etp
        if name == EMBEDDING_WEIGHT:
            stages = self.parts.embedding_stages
            index += count * stages.index(world.attention.pp)
            count *= len(stages)
        return index, count

    def weights(self) -> Iterator[LocalSlice]:
        """Yield this rank's masters and buffers; call :meth:`refresh_weights` after writes."""
        self.move_back()
        self._stale = True
        for name, parameter in self.params.items():
            master = self._masters.get(name, parameter)
            yield from self._boxes(name, name, self._stored_values(master))
        persistent = self.parts.model.state_dict()
        for name, buffer in self.parts.model.named_buffers():
            if name not in persistent:
                continue
            shard = self._shards[name]
            yield LocalSlice(name, buffer, shard.shape, shard.box, *self._copy_index(name))

    def gradients(self) -> Iterator[LocalSlice]:
        """Yield this rank's gradients, complete after :meth:`finish`."""
        for name, parameter in self.params.items():
            if parameter.grad is not None:
                yield from self._boxes(name, name, parameter.grad)

    def optimizer_state(self, optimizer: Optimizer) -> Iterator[LocalSlice]:
        """Yield this rank's optimizer state under its names in a checkpoint."""
        self.move_back()
        for key, tensor in optimizer.state().items():
            name = _parameter_name(key)
            if key.endswith("_groups"):
                shard = self._shards[name]
                (index, count) = self._copy_index(name)
                entries = group_boxes(shard, optimizer.group, self._local_range(name), tensor)
                for values, shape, box, owned in entries:
                    yield LocalSlice(key, values, shape, box, index if owned else count, count)
            elif tensor.shape == self.params[name].shape:
                yield from self._boxes(key, name, tensor)
            else:  # one value for all elements: owned by the ranks with the first element
                at_start = not any(start for start, _ in self._shards[name].box)
                index, count = self._copy_index(name)
                owned = at_start and not self._local_range(name)[0]
                yield LocalSlice.full(key, tensor, index if owned else count, count)
        stage = self.parts.world.group("stage")
        for name, history in self.histories.items():
            key = f"{PREFIX}.{name}.amaxes"
            yield LocalSlice.full(key, history.past_RMH, stage.index, stage.size)

    @torch.no_grad()
    def fill(self, values: Callable[[Shard], Tensor], buffers: bool = False) -> None:
        """Set this rank's masters to ``values(shard)``, and refresh the weights.

        Buffers become zero; with ``buffers``, the function sets persistent ones too.
        """
        if not self.has_values:
            return
        for buffer in self.parts.model.buffers():
            buffer.zero_()
        for local in self.weights():
            if local.name in self.params or buffers:
                placement = self._shards[local.name].placement
                local.tensor.copy_(values(Shard(local.name, local.shape, local.box, placement)))
        self.refresh_weights()

    def _local_range(self, name: str) -> tuple[int, int]:
        """Return the range of elements of its shard of a parameter that this rank updates."""
        bucket = self._bucket.get(name)
        if bucket is None:
            return 0, math.prod(self._shards[name].local_shape)
        return bucket.local_range(bucket.slots[name])

    def _boxes(self, key: str, name: str, tensor: Tensor) -> Iterable[LocalSlice]:
        """Yield a tensor of this rank's elements of a parameter, as boxes of the full parameter."""
        shard = self._shards[name]
        copy = self._copy_index(name)
        if name not in self._bucket:
            yield LocalSlice(key, tensor, shard.shape, shard.box, *copy)
            return
        flat = tensor.reshape(-1)
        offset = 0
        for box in boxes(shard.local_shape, *self._local_range(name)):
            values = flat.narrow(0, offset, box_size(box)).view([b - a for a, b in box])
            yield LocalSlice(key, values, shard.shape, to_global(box, shard.box), *copy)
            offset += box_size(box)


def _parameter_name(key: str) -> str:
    """Return the parameter's name from the key of an optimizer state tensor."""
    return key.removeprefix(f"{PREFIX}.").rpartition(".")[0]


def _materialise(model: nn.Module, device: torch.device) -> None:
    """Allocate parameters and buffers that are on ``meta``."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            empty = torch.empty_like(tensor, device=device)
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, tensor.requires_grad)
            _set_tensor(model, name, empty)


def _set_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    prefix, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(prefix), leaf, tensor)


def _sum_gradients(parameters: Sequence[Tensor], ranks: Group) -> None:
    """Sum gradients over ranks with the same elements of the parameters, in one all-reduce."""
    if ranks.size == 1 or not parameters:
        return
    grads = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    sum_(flat, ranks)
    for grad, summed in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(summed.view_as(grad))
