"""Placement of parameters: which dim of a parameter each axis of a layout cuts.

Layers are written for one device; their records describe the weights, and ``parallel/`` shards them
accordingly. A parameter is replicated over every axis that does not cut it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from moefold.mesh.shares import share
from moefold.model.config import Decoder
from moefold.spec.decoder import known_weights

Box = tuple[tuple[int, int], ...]
"""Half-open range of indices along each dim of a tensor."""


def intersection(left: Box, right: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    pairs = zip(left, right, strict=True)
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in pairs)
    return shared if all(start < end for start, end in shared) else None


def slices(box: Box) -> tuple[slice, ...]:
    """Return the slices by which ``box`` is indexed in the global tensor."""
    return tuple(slice(start, end) for start, end in box)


def relative_slices(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the slices by which ``box`` is indexed in a tensor that holds ``outer``."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, outer, strict=True))


@dataclass(frozen=True)
class Placement:
    """The cuts of one parameter, and the group of ranks that replicate each shard.

    A parameter that tp does not cut has a partial gradient on each tensor rank, because each rank
    reads it with its own rows; partial gradients are summed before the update. Parameters that tp
    cuts, and experts, see all their rows.
    """

    cuts: Mapping[str, int] = field(default_factory=dict)
    """Dim that each axis (``tp``, ``ep``, ``etp``) cuts; no two axes cut one dim."""
    uneven: frozenset[str] = frozenset()
    """Axes that need not divide the dim: some ranks then have one index more than others."""
    wide: bool = False
    """Whether layers read this matrix in the master dtype, as they do all vectors."""

    @property
    def is_expert(self) -> bool:
        """Whether the parameter is on the expert grid: replicated over edp, not dp and cp."""
        return "ep" in self.cuts

    @property
    def replicas(self) -> str:
        """Kind of the group whose ranks hold replicas and process different tokens."""
        return "edp" if self.is_expert else "dp_cp"

    @property
    def replicated_over_tp(self) -> bool:
        """Whether each tensor rank holds a replica, with a partial gradient."""
        return not self.is_expert and "tp" not in self.cuts

    @property
    def replicated_over_etp(self) -> bool:
        """Whether each rank of etp holds a replica, with a partial gradient."""
        return self.is_expert and "etp" not in self.cuts


REPLICATED = Placement()


def placements(model: nn.Module, decoder: Decoder) -> dict[str, Placement]:
    """Return the placement of every parameter and buffer of a model, by global name.

    Parameters without a description, and buffers, are replicated.

    Raises:
        ValueError: if the shape of a parameter differs from its description.
    """
    described = {weight.name: weight for weight in known_weights(decoder)}
    by_name: dict[str, Placement] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        weight = described.get(name)
        if weight is None:
            by_name[name] = REPLICATED
            continue
        if weight.shape != tuple(tensor.shape):
            built = list(tensor.shape)
            raise ValueError(f"{name} has shape {built}; its layer states {list(weight.shape)}")
        by_name[name] = Placement(
            {units.axis: dim for dim, units in weight.cuts},
            uneven=frozenset(units.axis for _, units in weight.cuts if units.uneven),
            wide=weight.is_master_matrix,
        )
    return by_name


@dataclass(frozen=True)
class Shard:
    """The piece of one parameter or buffer that one rank computes with."""

    name: str
    shape: tuple[int, ...]
    """Shape of the global tensor."""
    box: Box
    """Box of this piece in the global tensor."""
    placement: Placement

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the piece."""
        return tuple(end - start for start, end in self.box)

    def slice_of(self, tensor: Tensor) -> Tensor:
        """Return the piece as a view of the global tensor."""
        return tensor[slices(self.box)]


def shard(
    name: str, shape: tuple[int, ...], placement: Placement, axes: Mapping[str, tuple[int, int]]
) -> Shard:
    """Return the piece of a global tensor on one rank.

    ``axes`` has the rank's (coordinate, size) on each axis.

    Raises:
        ValueError: if the size of an axis does not divide the dim that it cuts.
    """
    box = [(0, size) for size in shape]
    for axis, dim in placement.cuts.items():
        index, ranks = axes[axis]
        if shape[dim] % ranks and axis not in placement.uneven:
            raise ValueError(f"{name}: {axis}{ranks} does not divide dim {dim} of {list(shape)}")
        box[dim] = share(shape[dim], ranks, index)
    return Shard(name, shape, tuple(box), placement)
