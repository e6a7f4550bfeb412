"""The optimizer interface: local maths over named tensors, with flat, named state.

Nothing here knows of ranks. Parameters have their global names, equal in every layout, and state is
named after them, so that a checkpoint of one layout can be loaded in another.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

PREFIX = "optim"


class FullMatrices(Protocol):
    """Gathers full matrices of parameters of which this rank updates only some elements.

    Each matrix is assigned to one rank, or to a few that compute the same update. They change the
    tensors from ``gather`` in place, or pass others to ``scatter``.
    """

    shapes: Mapping[str, tuple[int, ...]]
    """Full shape of each parameter of which this rank updates elements."""

    def gather(self, pieces: Mapping[str, Tensor]) -> list[Tensor]:
        """Return this rank's matrices ``[..., m, n]`` from all ranks' pieces; a collective call."""
        ...

    def scatter(self, matrices: Sequence[Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's pieces of all ranks' matrices, in the shapes of ``like``."""
        ...


@dataclass(frozen=True)
class LocalMatrices:
    """Matrices of parameters that only this rank updates: views of its tensors."""

    shapes: Mapping[str, tuple[int, ...]]

    def gather(self, pieces: Mapping[str, Tensor]) -> list[Tensor]:
        """Return views of the tensors as stacks of matrices, with heads split."""
        return [p.view(-1, *self.shapes[name][-2:]) for name, p in pieces.items()]

    def scatter(self, matrices: Sequence[Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors with the matrices' values, whether changed in place or not."""
        for matrix, piece in zip(matrices, like.values(), strict=True):
            if matrix.untyped_storage()._cdata != piece.untyped_storage()._cdata:
                piece.copy_(matrix.view(piece.shape))
        return dict(like)


class Optimizer(ABC):
    """Updates parameters in place from their ``grad``; frozen ones are ignored.

    ``params`` maps global names to parameters, or to this rank's elements of them: flat in the last
    dim, with the parameter's number of dims. A tensor that requires no gradient when the optimizer
    is built has no state and never changes. State is float32, or float64 for float64 parameters.

    Optimizers are built by ``build(record, params)``. Raises ``ValueError`` if a tensor has two
    names.
    """

    group = 0
    """Elements per row of a state tensor ``*_groups``; 0 without such tensors."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self.params = {name: p for name, p in params.items() if p.requires_grad}
        self._state: dict[str, Tensor] = {}
        names: dict[int, str] = {}
        for name, p in self.params.items():
            first = names.setdefault(id(p), name)
            if first != name:
                raise ValueError(f"{first} and {name} are the same parameter; use one name")

    @abstractmethod
    def step(self, scale: float = 1.0, lr_factor: float = 1.0) -> None:
        """Update every parameter once from ``grad * scale``, at ``lr_factor`` times its rate.

        Gradients are undefined afterwards. A zero gradient is a gradient: counters, momentum and
        weight decay continue. Raises ``ValueError`` for a missing gradient or a scale that is not a
        finite number above zero, before anything is changed.
        """

    @abstractmethod
    def lr(self, lr_factor: float = 1.0) -> dict[str, float]:
        """Return the learning rate of each group of parameters, by kind."""

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """Return a description of how each group is computed, by kind."""

    def state(self) -> dict[str, Tensor]:
        """Return the state as ``optim.<parameter>.<what>``: live tensors, not copies."""
        return dict(self._state)

    def tensors(self) -> Iterable[Tensor]:
        """Return the tensors of the state where they are, even if their values are elsewhere."""
        return self.state().values()

    def _add_state(self, name: str, what: str, tensor: Tensor) -> Tensor:
        """Register a tensor of a parameter's state, to be saved and loaded.

        Raises:
            ValueError: unless it has the parameter's shape or no dims: where ranks share a
                parameter, this rank's part of another shape would be unknown.
        """
        shape = self.params[name].shape
        if tensor.dim() and tensor.shape != shape and not what.endswith("_groups"):
            raise ValueError(
                f"state {what} of {name} has shape {list(tensor.shape)}; it must have the "
                f"parameter's shape, {list(shape)}, or no dims"
            )
        self._state[f"{PREFIX}.{name}.{what}"] = tensor
        return tensor

    def _gradients(self, scale: float) -> dict[str, Tensor]:
        """Return every gradient in the dtype of its state; raise if any is missing."""
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"gradient scale {scale} is not a finite number above zero")
        missing = [name for name, p in self.params.items() if p.grad is None]
        if missing:
            raise ValueError(
                "parameters without a gradient (freeze them before the optimizer is built, or let"
                " them take part in the loss): " + ", ".join(missing)
            )
        return {n: p.grad.to(state_dtype(p)) for n, p in self.params.items() if p.grad is not None}


def state_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's optimizer state: float64 for float64, else float32."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def zeros_for(param: Tensor) -> Tensor:
    """Return zeroed state of the parameter's shape and layout, on its device."""
    return torch.zeros_like(param, dtype=state_dtype(param), requires_grad=False)
