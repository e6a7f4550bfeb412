"""Placement of parameters: which dim of a parameter each axis of a layout cuts.

Layers are written for one device; their records describe the weights, and ``parallel/`` cuts them
accordingly. A parameter is replicated over every axis that does not cut it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from moefold.model.config import Decoder
from moefold.spec.decoder import known_weights

Box = tuple[tuple[int, int], ...]
"""Half-open range of indices along each dim of a tensor."""


def shared_box(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    pairs = zip(one, other, strict=True)
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in pairs)
    return shared if all(start < end for start, end in shared) else None


def slices(box: Box) -> tuple[slice, ...]:
    """Return the slices by which ``box`` is indexed in the global tensor."""
    return tuple(slice(start, end) for start, end in box)


def inside(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the slices by which ``box`` is indexed in a tensor that holds ``outer``."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, outer, strict=True))


@dataclass(frozen=True)
class Placement:
    """The cuts of one parameter, and the ranks that hold copies of each of its pieces.

    A parameter that tp does not cut has a partial gradient on each tensor rank, as each reads it
    with its own rows; partial gradients are summed before the update. Parameters that tp cuts, and
    experts, see all their rows.
    """

    cuts: Mapping[str, int] = field(default_factory=dict)
    """Dim that each axis (``tp``, ``ep``, ``etp``) cuts; no two axes cut one dim."""
    wide: bool = False
    """Whether layers read this matrix in the master dtype, as they do all vectors."""

    @property
    def of_experts(self) -> bool:
        """Whether the parameter is on the expert grid: replicated over edp, not dp and cp."""
        return "ep" in self.cuts

    @property
    def copies(self) -> str:
        """Kind of the group whose ranks hold copies and process different tokens."""
        return "edp" if self.of_experts else "dp_cp"

    @property
    def shared_over_tp(self) -> bool:
        """Whether each tensor rank holds it whole, with a partial gradient."""
        return not self.of_experts and "tp" not in self.cuts

    @property
    def shared_over_etp(self) -> bool:
        """Whether each rank of etp holds it whole, with a partial gradient."""
        return self.of_experts and "etp" not in self.cuts


WHOLE = Placement()


def placements(model: nn.Module, decoder: Decoder) -> dict[str, Placement]:
    """Return the placement of every parameter and buffer of a model, by global name.

    Parameters without a description, and buffers, are whole on each rank.

    Raises:
        ValueError: if the shape of a parameter differs from its description.
    """
    described = {weight.name: weight for weight in known_weights(decoder)}
    found: dict[str, Placement] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        weight = described.get(name)
        if weight is None:
            found[name] = WHOLE
            continue
        if weight.shape != tuple(tensor.shape):
            built = list(tensor.shape)
            raise ValueError(f"{name} has shape {built}; its layer states {list(weight.shape)}")
        found[name] = Placement({units.axis: dim for dim, units in weight.cuts}, weight.master)
    return found


@dataclass(frozen=True)
class Shard:
    """The piece of one parameter or buffer that one rank computes with."""

    name: str
    shape: tuple[int, ...]
    """Shape of the global tensor."""
    box: Box
    """Box of the global tensor that this piece is."""
    placement: Placement

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the piece."""
        return tuple(end - start for start, end in self.box)

    def of(self, tensor: Tensor) -> Tensor:
        """Return the piece as a view of the whole tensor."""
        return tensor[slices(self.box)]


def shard(
    name: str, shape: tuple[int, ...], placement: Placement, at: Mapping[str, tuple[int, int]]
) -> Shard:
    """Return the piece of a global tensor on the rank with (coordinate, size) ``at`` each axis.

    Raises:
        ValueError: if the size of an axis does not divide the dim that it cuts.
    """
    box = [(0, size) for size in shape]
    for axis, dim in placement.cuts.items():
        index, ranks = at[axis]
        if shape[dim] % ranks:
            raise ValueError(f"{name}: {axis}{ranks} does not divide dim {dim} of {list(shape)}")
        each = shape[dim] // ranks
        box[dim] = (index * each, (index + 1) * each)
    return Shard(name, shape, tuple(box), placement)
