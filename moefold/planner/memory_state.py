"""Bytes of weights, gradients, master weights and moments on each rank.

Parameters are listed with global names and shapes, as the built model has them: what decays, what
an optimizer keeps and what tp cuts follow from both.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

from moefold.mesh.pipeline import Place
from moefold.model.config import Decoder
from moefold.planner.case import Case, Numbers
from moefold.planner.held import Held, kinds
from moefold.planner.remember import remembered
from moefold.spec.decoder import (
    block_weights,
    embedding,
    head,
    last_norm,
    multi_token_weights,
)
from moefold.spec.layer import Weight

CODE_BYTES = {"fp8_tensor": 2.0, "fp8_block": 2.0, "mxfp8": 2.0625, "nvfp4": 1.125}
"""Bytes per element of a weight's codes and scales where products run in few bits: one copy for the
product and one, transposed, for the gradient of its input."""

WIDE_BYTES = 2
"""Bytes per element of what stays in bfloat16 beside codes."""


@dataclass(frozen=True)
class State:
    """Bytes on one rank that last from step to step, and gradients."""

    weights: float = 0.0
    """What products read: a copy in the compute dtype, and codes."""
    gradients: float = 0.0
    master: float = 0.0
    moments: float = 0.0

    def __add__(self, other: "State") -> "State":
        return State(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.master + other.master,
            self.moments + other.moments,
        )

    def times(self, number: int) -> "State":
        """Return the bytes of so many equal parts."""
        return State(
            self.weights * number,
            self.gradients * number,
            self.master * number,
            self.moments * number,
        )

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.master + self.moments


def place_weights(case: Case, place: Place) -> tuple[Weight, ...]:
    """Return the parameters of one thing that a stage computes, without embedding and head."""
    decoder = case.decoder
    if place.kind == "layer":
        return block_weights(decoder.blocks[place.index], decoder.hidden, place.index)
    if place.kind == "multi_token":
        return multi_token_weights(decoder, len(decoder.blocks) + place.index)
    return (last_norm(decoder),) if place.kind == "loss" else ()


class Split(NamedTuple):
    """What decides which part of a parameter, and of what belongs to it, a rank holds."""

    sizes: tuple[int, int, int]
    """tp, ep and etp."""
    copies: int
    """Ranks that hold the same part of what is no expert's."""
    expert_copies: int
    numbers: Numbers
    zero: int
    zero_ranks: int | None
    here: float
    """Share of master weights and moments that lies on the device."""
    stack: str

    @classmethod
    def of(cls, case: Case) -> "Split":
        """Return a case's."""
        sizes, folding, keeping = case.sizes, case.folding, case.keeping
        return cls(
            (sizes.tp, sizes.ep, sizes.etp), folding.dp * sizes.cp, folding.edp, case.numbers,
            keeping.zero, keeping.zero_ranks, 1 - keeping.optimizer_offload, case.software.stack,
        )  # fmt: skip

    def state(self, weights: Iterable[Weight]) -> State:
        """Return the state of some parameters on one rank."""
        return sum((self._state(weight) for weight in weights), State())

    def _state(self, weight: Weight) -> State:
        numbers, local = self.numbers, weight.part(*self.sizes)
        ranks = self.expert_copies if weight.expert else self.copies
        ranks = gcd(self.zero_ranks or ranks, ranks)
        share = [local / (ranks if self.zero >= stage else 1) for stage in range(4)]
        copied = numbers.weight_bytes
        if self.stack == "moefold" and not (weight.product and copied):
            # Read as the master is: gathered where that is shared.
            copied = numbers.master_bytes if self.zero in (1, 2) and ranks > 1 else 0
        codes = CODE_BYTES.get(numbers.recipe, 0.0)
        if codes and not weight.product:
            copied, codes = max(copied, WIDE_BYTES), 0.0
        moments = len(numbers.optimizer.state_names(weight.name, weight.shape))
        return State(
            weights=share[3] * (copied + codes),
            gradients=share[2] * numbers.gradient_bytes,
            master=share[1] * numbers.master_bytes * self.here,
            moments=share[1] * numbers.moment_bytes * moments * self.here,
        )


def elements_here(case: Case, weight: Weight) -> float:
    """Return the elements of a parameter that one rank holds before data ranks share them."""
    return weight.part(case.sizes.tp, case.sizes.ep, case.sizes.etp)


def state(case: Case, weights: Iterable[Weight]) -> State:
    """Return the state of some parameters on one rank."""
    return Split.of(case).state(weights)


class States:
    """The states of what ranks hold; of equal pieces one is counted."""

    def __init__(self, decoder: Decoder, split: Split) -> None:
        self.decoder, self.split = decoder, split
        self._known: dict[int | str, State] = {}

    def of(self, name: int | str) -> State:
        """Return that of a kind of block, or of what is named: ``multi_token``, ``norm``, ``head``
        or ``embedding``.
        """
        if name not in self._known:
            self._known[name] = self.split.state(self._weights(name))
        return self._known[name]

    def _weights(self, name: int | str) -> tuple[Weight, ...]:
        decoder = self.decoder
        if isinstance(name, int):
            return block_weights(kinds(decoder)[0][name], decoder.hidden, name)
        if name == "multi_token":
            return multi_token_weights(decoder, len(kinds(decoder)[1]))
        if name == "norm":
            return (last_norm(decoder),)
        return (head(decoder) if name == "head" else embedding(decoder),)

    def held(self, held: Held) -> State:
        """Return that of all that a rank holds."""
        found, tied = self.layers(held), self.decoder.tied
        if held.embedding or held.multi_token or (held.loss and tied):
            found += self.of("embedding")
        return found + self.of("head") if held.loss and not tied else found

    def layers(self, held: Held) -> State:
        """Return the same without embedding and head."""
        found = sum((self.of(kind).times(count) for kind, count in held.layers), State())
        if held.multi_token:
            found += self.of("multi_token").times(held.multi_token)
        return found + self.of("norm") if held.loss else found


def states_of(decoder: Decoder, split: Split) -> States:
    """Return the states of what ranks hold, the same for all cases split alike."""
    return _states(decoder, split)


_states = remembered(1 << 12)(States)


def stage_states(case: Case) -> tuple[State, ...]:
    """Return the state of one rank of each pipeline rank, from the first to the last."""
    states = states_of(case.decoder, Split.of(case))
    return tuple(states.held(held) for held in case.held)
