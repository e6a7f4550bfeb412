"""Applies a layout to a decoder: builds only this rank's layers and weight shards.

No code here is specific to a kind of layer. The pipeline's stages select layers by number, and each
layer states how its weights are cut (:mod:`moefold.layers.placement`).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from moefold.comm.world import EXCHANGE_KINDS, World
from moefold.data.batch import MicroBatch
from moefold.layers.config import Precision
from moefold.layers.flow import Flow, local_rows
from moefold.layers.linear import assign_shards
from moefold.layers.offload import ActivationOffload
from moefold.layers.placement import Shard, placements, shard
from moefold.layers.saved_tensors import SavedTensors
from moefold.layers.unshard import RESIDENT, UnshardHooks
from moefold.mesh.pipeline import Stages
from moefold.model.config import Decoder
from moefold.model.decoder import DecoderModel
from moefold.parallel.config import Layout
from moefold.schedule.table import Table
from moefold.spec.decoder import parts_below_trained


@dataclass(frozen=True)
class Chunk:
    """The layers of one pipeline stage, and whether it has the embedding and the head."""

    layers: tuple[str, ...]
    """Numbers of the layers, in order; may be empty."""
    has_embedding: bool
    """Whether the stage begins with the embedding."""
    has_head: bool
    """Whether the stage ends with head and loss."""
    multi_token: tuple[str, ...] = ()
    """Numbers of the multi-token prediction layers, which run after the final norm."""
    has_norm: bool = False
    """Whether it has the final norm: the stage of the multi-token layers or, without any, the
    head's."""
    receives: int = 1
    """Tensors of rows [T, D] that a pass of training receives from the stage before, as one."""
    sends: int = 1
    """Tensors of rows that it sends to the next: more than one after multi-token layers."""
    forward_only: int = 0
    """Number of its first parts, embedding and layers, that have no backward."""
    sends_gradient: bool = True
    """Whether the stage before reads the gradient of what it sends."""

    @classmethod
    def of(cls, stages: Stages, number: int, layers: int, untrained: int = 0) -> "Chunk":
        """Build one stage of all; multi-token layers are numbered from ``layers`` on.

        No parameter is trained in the first ``untrained`` parts of the model.
        """
        parts = stages.parts()[number]
        sends = stages.sent_rows[number]
        kinds = [part.kind for part in parts]
        main = tuple(str(part.index) for part in parts if part.kind == "layer")
        ahead = tuple(str(layers + part.index) for part in parts if part.kind == "multi_token")
        ends = "embedding" in kinds, "loss" in kinds
        receives = sends - len(ahead)
        has_norm = bool(ahead) or ("loss" in kinds and receives == 1)
        before = sum(map(len, stages.parts()[:number]))
        forward_only = min(max(untrained - before, 0), len(main) + ends[0])
        return cls(main, *ends, ahead, has_norm, receives, sends, forward_only, untrained < before)


HooksFor = Callable[..., UnshardHooks]
"""``hooks_for(chunk, training=…, deferred=False)`` returns the unshard hooks for one micro-batch.

``training``: a backward follows. ``deferred``: weight gradients are computed by a later action.
"""


def resident_hooks(chunk: Chunk, *, training: bool, deferred: bool = False) -> UnshardHooks:
    """Return hooks that do nothing, for weights that are never sharded."""
    return RESIDENT


@dataclass(frozen=True)
class ModelParts:
    """This rank's parts of a model, and what a step needs to run them with other ranks."""

    model: DecoderModel
    world: World
    layout: Layout
    chunks: tuple[Chunk, ...]
    """Pipeline stages on this rank, in model order."""
    shards: dict[str, Shard]
    """This rank's shard of each tensor of ``model``, by its global name."""
    table: Table
    """A table of the schedule; the stages of each rank do not depend on micro-batches."""
    embedding_stages: tuple[int, ...]
    """Pipeline ranks that hold the embedding matrix: more than one where the head is tied to it or
    another stage has multi-token prediction layers."""
    term_layers: dict[str, int]
    """Number of layers of the whole model with each router term."""
    secondary: World | None
    """The world's separate groups for exchanges of paired passes; None without pairs."""
    offload: ActivationOffload | None
    """Offload of activations to host or disk; None if all stay on the device."""
    hooks_for: HooksFor = resident_hooks


def build_parts(
    decoder: Decoder,
    precision: Precision,
    layout: Layout,
    world: World,
    device: torch.device | str = "cpu",
) -> ModelParts:
    """Build this rank's parts of a decoder, uninitialised; nothing else is ever allocated.

    On device ``meta`` they are not allocated either, so that ZeRO can shard them first.

    Raises:
        ValueError: if an axis does not divide a dim that it cuts.
    """
    model = DecoderModel(decoder, precision, layout.dispatch, layout.experts, "meta")
    parts = partition_model(model, layout, world)
    model.to_empty(device=device)
    return parts


def partition_model(model: DecoderModel, layout: Layout, world: World) -> ModelParts:
    """Reduce a whole model in place to this rank's parts; its tensors may be on ``meta``."""
    terms = Counter(term for _, mixture in model.moe_layers() for term in mixture.terms)
    sizes = world.folding.sizes
    table = layout.table(2 * sizes.pp)
    stages = layout.stages_of(model.record)
    stage_numbers = [table.stage_of(world.attention.pp, chunk) for chunk in range(sizes.vpp)]
    untrained = parts_below_trained(model.record)
    chunks = tuple(
        Chunk.of(stages, stage, model.record.layers, untrained) for stage in stage_numbers
    )
    letters = "EmL" if model.record.tied else "Em"
    holders = {
        table.rank_of(k) for k, stage in enumerate(stages.letters) if set(stage) & set(letters)
    }
    # Drop the layers, embedding, norm and head that no chunk of this rank runs.
    numbers = [number for chunk in chunks for number in (*chunk.layers, *chunk.multi_token)]
    model.layers = nn.ModuleDict({number: model.layers[number] for number in numbers})
    has_embedding = any(chunk.has_embedding for chunk in chunks)
    has_head = any(chunk.has_head for chunk in chunks)
    looks_ahead = any(chunk.multi_token for chunk in chunks)
    if not has_embedding and not looks_ahead and not (has_head and model.record.tied):
        model.embed = None
    if not any(chunk.has_norm for chunk in chunks):
        model.norm = None
    if not has_head:
        model.head = None
    shards = _shard_parameters(model, world)
    assign_shards(model, shards)
    if layout.clones is not None:
        for _, mixture in model.moe_layers():
            mixture.dispatcher.enable_clones(layout.clones, sizes.ep)
    secondary = world.secondary if table.has_pairs else None
    for kind, inner in layout.split_groups:
        world.split(kind, inner)
        if secondary is not None and kind in EXCHANGE_KINDS:
            secondary.split(kind, inner)
    embedding = tuple(sorted(holders))
    offload = None
    if layout.offload is not None:
        offload = ActivationOffload(layout.offload, world.device, world.rank)
    return ModelParts(
        model, world, layout, chunks, shards, table, embedding, dict(terms), secondary, offload
    )


def single_rank_parts(model: DecoderModel, layout: Layout | None = None) -> ModelParts:
    """Return a whole model as the parts of a single rank."""
    device = next(model.parameters()).device
    return partition_model(model, layout or Layout(), World.single(device))


def _shard_parameters(model: DecoderModel, world: World) -> dict[str, Shard]:
    """Replace each parameter by this rank's shard; return the shards of all tensors, by name."""
    sizes = world.folding.sizes
    axis_position = {
        "tp": (world.attention.tp, sizes.tp),
        "ep": (world.experts.ep, sizes.ep),
        "etp": (world.experts.etp, sizes.etp),
    }
    placement = placements(model, model.record)
    shards: dict[str, Shard] = {}
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            full = f"{prefix}.{name}" if prefix else name
            shards[full] = piece = shard(
                full, tuple(parameter.shape), placement[full], axis_position
            )
            if piece.local_shape != piece.shape:
                values = piece.slice_of(parameter.detach()).clone()
                setattr(module, name, nn.Parameter(values, parameter.requires_grad))
    for name, buffer in model.named_buffers():
        shards[name] = shard(name, tuple(buffer.shape), placement[name], axis_position)
    return shards


def build_flow(
    parts: ModelParts, batch: MicroBatch, training: bool = True, exact: bool = False
) -> Flow:
    """Return the ``Flow`` of this rank's rows of a micro-batch, which is whole and on the host."""
    model = parts.model
    layout = parts.layout
    world = parts.world
    device = world.device
    depth = len(model.record.multi_token) if training else 0

    def local_on_device(batch: MicroBatch) -> tuple[MicroBatch, MicroBatch | None]:
        rows, piece = local_rows(batch, world)
        return rows.to(device), None if piece is None else piece.to(device)

    rows, piece = local_on_device(batch)
    offload = parts.offload.without_pages() if parts.offload and exact else parts.offload
    return Flow(
        rows,
        model.precision_policy,
        saved_tensors=SavedTensors(layout.recompute, offload, clones=layout.clones is not None),
        training=training,
        world=world,
        context=layout.context,
        piece=piece,
        exact=exact,
        shifted_rows=tuple(local_on_device(batch.shift(later)) for later in range(1, depth + 1)),
    )
