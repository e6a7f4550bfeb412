"""Where a parameter lives: which of its dims each axis of a layout cuts.

A layer is written for one device and its record describes its weights; ``parallel/`` cuts them so.
What no axis cuts stands whole on every rank of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from moefold.model.config import Decoder
from moefold.spec.decoder import known_weights

Box = tuple[tuple[int, int], ...]
"""First place and end along each dim of a tensor."""


def shared_box(one: Box, other: Box) -> Box | None:
    """Return what two boxes of a tensor share; None where that is nothing."""
    pairs = zip(one, other, strict=True)
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in pairs)
    return shared if all(start < end for start, end in shared) else None


def inside(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return where a box lies in a tensor that holds the box around it."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, outer, strict=True))


@dataclass(frozen=True)
class Placement:
    """The cuts of one parameter, and which ranks hold copies of each of its pieces.

    The gradient of what tp does not cut is a share on each tensor rank, since the rows that read
    the parameter are spread over them: shares are summed before the update. What tp cuts, and
    experts, see all their rows.
    """

    cuts: Mapping[str, int] = field(default_factory=dict)
    """Dim by axis: ``tp``, ``ep`` or ``etp``. A dim may be cut by one axis only."""
    wide: bool = False
    """Whether a layer reads this matrix in the master's dtype; vectors are read so anyway."""

    @property
    def of_experts(self) -> bool:
        """Whether it lies on the expert grid: copies run over edp, else over dp and cp."""
        return "ep" in self.cuts

    @property
    def copies(self) -> str:
        """The kind of group whose ranks hold copies that belong to other tokens."""
        return "edp" if self.of_experts else "dp_cp"

    @property
    def shared_over_tp(self) -> bool:
        """Whether each tensor rank holds it whole and a share of its gradient."""
        return not self.of_experts and "tp" not in self.cuts

    @property
    def shared_over_etp(self) -> bool:
        """Whether each rank of experts' slices holds it whole and a share of its gradient."""
        return self.of_experts and "etp" not in self.cuts


WHOLE = Placement()


def placements(model: nn.Module, decoder: Decoder) -> dict[str, Placement]:
    """Return the placement of every parameter and buffer of a model by its global name.

    What no layer describes, buffers among it, is whole on each rank.

    Raises:
        ValueError: where a parameter has another shape than its layer describes.
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
            raise ValueError(f"{name} is {built} where its layer describes {list(weight.shape)}")
        found[name] = Placement({units.axis: dim for dim, units in weight.cuts}, weight.master)
    return found


@dataclass(frozen=True)
class Shard:
    """The piece of one parameter or buffer that a rank computes with."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box
    """What of it is here."""
    placement: Placement

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the piece."""
        return tuple(end - start for start, end in self.box)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is cut."""
        return self.local_shape == self.shape

    def of(self, tensor: Tensor) -> Tensor:
        """Return the piece as a view of the whole tensor."""
        return tensor[tuple(slice(start, end) for start, end in self.box)]


def shard(
    name: str, shape: tuple[int, ...], placement: Placement, at: Mapping[str, tuple[int, int]]
) -> Shard:
    """Return the piece of a whole tensor at a rank's coordinates, (coordinate, size) of each axis.

    Raises:
        ValueError: where an axis does not divide its dim.
    """
    box = [(0, size) for size in shape]
    for axis, dim in placement.cuts.items():
        index, ranks = at[axis]
        if shape[dim] % ranks:
            raise ValueError(f"{name}: {axis}{ranks} does not divide dim {dim} of {list(shape)}")
        each = shape[dim] // ranks
        box[dim] = (index * each, (index + 1) * each)
    return Shard(name, shape, tuple(box), placement)
