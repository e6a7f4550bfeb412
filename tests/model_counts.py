"""Parameters and FLOPs of a built model, counted by module from its tensors' shapes alone.

The planner counts a description; this counts what was built from it, on any device (``meta`` too),
and takes nothing from the planner, so that each can be held against the other. A parameter's part
is known by its global name. The convention is the planner's: a multiply-add is 2 FLOPs, backward
is two forwards, norms, embedding look-up, router and the gate of a shared expert count nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Tally:
    """Counts of one module's own parameters, without those of its children."""

    parameters: int = 0
    active: int = 0
    """Of those, the ones a token passes through."""
    multiplied: int = 0
    """Multiply-adds per token in one forward."""
    attended: int = 0
    """Multiply-adds per token and per token it attends to, in one forward."""

    def __add__(self, other: "Tally") -> "Tally":
        mine, theirs = vars(self), vars(other)
        return Tally(**{name: mine[name] + theirs[name] for name in mine})

    def flops(self, seq: int, causal: bool = True) -> int:
        """Return forward and backward FLOPs of one sequence of ``seq`` tokens.

        Args:
            seq: tokens of the sequence.
            causal: whether attention counts the half that the mask leaves, or all of it.
        """
        return 6 * self.multiplied * seq + (3 if causal else 6) * self.attended * seq**2


def tally(model: nn.Module) -> dict[str, Tally]:
    """Return the counts of every module that has any, by its name.

    Raises:
        ValueError: naming an attention module without projections ``q`` (or ``q_up``) and ``o``.
    """
    names = {name for name, _ in model.named_parameters()}
    found: dict[str, Tally] = {}
    for name, module in model.named_modules():
        own = sum(p.numel() for p in module.parameters(recurse=False))
        counts = Tally(own, own, own * _products(name, names))
        parent, _, role = name.rpartition(".")
        if role == "experts":
            counts = _of_chosen(counts, model.get_submodule(parent))
        if role == "attention":
            counts += Tally(attended=_core(name, module))
        if counts != Tally():
            found[name] = counts
    return found


def total(tallies: Mapping[str, Tally]) -> Tally:
    """Return the sum over modules."""
    return sum(tallies.values(), Tally())


def _products(name: str, names: set[str]) -> int:
    """How often a module's own parameters enter a counted product per token: once or never."""
    parent, _, role = name.rpartition(".")
    if name == "embed":
        return int("head.weight" not in names)  # tied: the head is this matrix
    if role in ("q_norm", "kv_norm") and f"{parent}.kv_down.weight" in names:
        return 1  # the convention counts the norms on latents, alone among norms
    return int(not role.endswith("norm") and role not in ("router", "gate"))


def _of_chosen(experts: Tally, mixture: nn.Module) -> Tally:
    """Scale the counts of all experts to those that a token is sent to."""
    router: Any = mixture.get_submodule("router")
    top_k, among = router.record.top_k, router.weight.shape[0]
    return Tally(
        experts.parameters, experts.active * top_k // among, experts.multiplied * top_k // among
    )


def _core(name: str, attention: nn.Module) -> int:
    """Multiply-adds of a query with one key, and of the weight with that key's value."""
    shapes = {n: p.shape for n, p in attention.named_parameters()}
    query = shapes.get("q_up.weight", shapes.get("q.weight"))
    if query is None or "o.weight" not in shapes:
        kind = type(attention).__name__
        raise ValueError(f"{name} ({kind}) has no projections q and o to count its products by")
    return query[0] + shapes["o.weight"][1]
