"""What one forward pass carries besides its tensors. Passed from layer to layer, never ambient."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moefold.data.batch import MicroBatch
from moefold.kernels.gradients import RETURNED, GradientSink
from moefold.kernels.operand import Operand
from moefold.layers.config import Rope
from moefold.layers.rope import Angles
from moefold.policies.recompute import Decisions, Recompute
from moefold.precision.recipe import Recipe


@dataclass(frozen=True)
class Flow:
    """One pass of one micro-batch through the model.

    Args:
        rows: the micro-batch.
        recipe: number formats; makes operands of weights.
        sink: where weight gradients go.
        recompute: what is computed again in backward.
        decisions: routing decisions of this micro-batch; a second run of a layer replays them.
        training: whether counters count.
    """

    rows: MicroBatch
    recipe: Recipe
    sink: GradientSink = RETURNED
    recompute: Recompute = field(default_factory=Recompute)
    decisions: Decisions = field(default_factory=Decisions)
    training: bool = True
    _angles: dict[tuple[Rope, int], Angles] = field(default_factory=dict)

    @property
    def n_valid(self) -> int | None:
        """How many rows count, all of them first; None where all do."""
        return None if self.rows.n_valid == self.rows.rows else self.rows.n_valid

    @property
    def valid_T(self) -> Tensor | None:
        """bool mask of rows that count, None where all do (known on the host)."""
        return None if self.n_valid is None else self.rows.valid_T

    def operand(self, weight: Tensor, dtype: torch.dtype | None = None) -> Operand:
        """Return a parameter as products take it, or in ``dtype``: no layer opens one itself."""
        return self.recipe.operand(weight, dtype)

    def angles(self, rope: Rope, dim: int) -> Angles:
        """Return the rows' rotary angles, computed once per pass and kind."""
        key = (rope, dim)
        if key not in self._angles:
            self._angles[key] = Angles.of(self.rows.positions_T, rope, dim, self.recipe.dtype)
        return self._angles[key]


Segment = Callable[..., tuple[Tensor, ...]]
"""A piece of a block: ``segment(flow, *tensors) -> tensors``. Schedules, graph capture and
compilation work on segments; running a block's segments one after another is its forward."""
