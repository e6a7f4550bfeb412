"""Bytes of weights, gradients, master weights and moments on each rank.

D hidden, F width, E experts, V vocabulary. Parameters are listed with global names and shapes, as
the built model has them: what decays, what an optimizer keeps and what tp cuts follow from both.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import gcd, prod
from typing import Any, NamedTuple

from moefold.config.base import Record
from moefold.layers.config import Dense, Gqa, Mla
from moefold.mesh.pipeline import Place
from moefold.model.config import Block, Decoder
from moefold.moe.config import Moe
from moefold.planner.case import Case, Numbers
from moefold.planner.foreign import DeltaNet, Mamba2, Nothing, PlainMoe
from moefold.planner.held import Held, kinds
from moefold.planner.remember import remembered

CODE_BYTES = {"fp8_tensor": 2.0, "fp8_block": 2.0, "mxfp8": 2.0625, "nvfp4": 1.125}
"""Bytes per element of a weight's codes and scales where products run in few bits: one copy for the
product and one, transposed, for the gradient of its input."""

WIDE_BYTES = 2
"""Bytes per element of what stays in bfloat16 beside codes."""


@dataclass(frozen=True)
class Weight:
    """One parameter of the model."""

    name: str
    shape: tuple[int, ...]
    cut: int | None = None
    """The dim that tp cuts, or etp where it is an expert's; None leaves it whole."""
    expert: bool = False
    """Whether ep shares its first dim."""
    product: bool = True
    """Whether products read it in the compute dtype; others read the master itself."""

    @property
    def elements(self) -> int:
        """Number of elements of the whole parameter."""
        return prod(self.shape)

    def local(self, case: Case) -> float:
        """Return the elements that one rank holds before data ranks share them."""
        return self.part(case.sizes.tp, case.sizes.ep, case.sizes.etp)

    def part(self, tp: int, ep: int, etp: int) -> float:
        """Return the same for sizes of the axes that cut it."""
        if self.expert:
            return self.elements / (ep * (etp if self.cut is not None else 1))
        return self.elements / (tp if self.cut is not None else 1)


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


def model_weights(decoder: Decoder) -> tuple[Weight, ...]:
    """Return every parameter of a model once, in its order."""
    blocks = enumerate(decoder.blocks)
    layers = (w for i, block in blocks for w in block_weights(block, decoder.hidden, i))
    head = () if decoder.tied else (_matrix(decoder, "head.weight"),)
    norm = _norm("norm.weight", decoder.hidden)
    return (embedding(decoder), *layers, norm, *head)


def block_weights(block: Block, hidden: int, layer: int) -> tuple[Weight, ...]:
    """Return the parameters of one block; a half that is not there has no norm."""
    found: list[Weight] = []
    halves = (("attention", block.attention), ("ffn", block.ffn))
    for norm, record in halves:
        if isinstance(record, Nothing):
            continue
        half = "moe" if isinstance(record, Moe) else norm
        named = ((f"layers.{layer}.{half}.", w) for w in _of(record, hidden))
        found += [_norm(f"layers.{layer}.{norm}_norm.weight", hidden)]
        found += [Weight(at + w.name, w.shape, w.cut, w.expert, w.product) for at, w in named]
    return tuple(found)


def multi_token_weights(decoder: Decoder, layer: int) -> tuple[Weight, ...]:
    """Return what a multi-token prediction layer adds: a block like the last, joined by a matrix.

    Embedding and head are the model's own (DeepSeek-V3, arXiv 2412.19437, section 2.2).
    """
    hidden, at = decoder.hidden, f"layers.{layer}"
    norms = (_norm(f"{at}.{name}.weight", hidden) for name in ("embed_norm", "row_norm", "norm"))
    join = Weight(f"{at}.join.weight", (hidden, 2 * hidden), 0)
    return (*block_weights(decoder.blocks[-1], hidden, layer), join, *norms)


def place_weights(case: Case, place: Place) -> tuple[Weight, ...]:
    """Return the parameters of one thing that a stage computes, without embedding and head."""
    decoder = case.decoder
    if place.kind == "layer":
        return block_weights(decoder.blocks[place.index], decoder.hidden, place.index)
    if place.kind == "multi_token":
        return multi_token_weights(decoder, len(decoder.blocks) + place.index)
    return (_norm("norm.weight", decoder.hidden),) if place.kind == "loss" else ()


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
            return (_norm("norm.weight", decoder.hidden),)
        return (_matrix(decoder, "head.weight") if name == "head" else embedding(decoder),)

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


def _norm(name: str, width: int) -> Weight:
    return Weight(name, (width,), product=False)


def embedding(decoder: Decoder) -> Weight:
    """Return the matrix of tokens, which is the head too where they are tied."""
    return Weight("embed.weight", (decoder.vocab, decoder.hidden), 0, product=decoder.tied)


def _matrix(decoder: Decoder, name: str) -> Weight:
    return Weight(name, (decoder.vocab, decoder.hidden), 0)


def _of(record: Record, hidden: int) -> Iterator[Weight]:
    """Yield the parameters of a half: as its kind says, or as the kind that it inherits from."""
    for kind in type(record).__mro__:
        if kind in KINDS:
            return KINDS[kind](record, hidden)
    name = type(record).__name__
    raise ValueError(
        f"{name}'s weights are not listed: inherit from a kind that is, or set "
        f"moefold.planner.memory_state.KINDS[{name}]"
    )


def _gqa(record: Gqa, hidden: int) -> Iterator[Weight]:
    queries, keys = record.heads * record.head_dim, record.kv_heads * record.head_dim
    for name, width in (("q", queries), ("k", keys), ("v", keys)):
        yield Weight(f"{name}.weight", (width, hidden), 0)
    yield Weight("o.weight", (hidden, queries), 1)
    if record.qk_norm == "none":
        return
    for name, width in (("q", queries), ("k", keys)):
        whole = record.qk_norm == "projection"
        size = width if whole else record.head_dim
        yield Weight(f"{name}_norm.weight", (size,), 0 if whole else None, product=False)


def _mla(record: Mla, hidden: int) -> Iterator[Weight]:
    heads, rank = record.heads, record.q_rank
    queries = heads * (record.nope_dim + record.rope_dim)
    if rank is None:
        yield Weight("q.weight", (queries, hidden), 0)
    else:
        yield Weight("q_down.weight", (rank, hidden))
        yield _norm("q_norm.weight", rank)
        yield Weight("q_up.weight", (queries, rank), 0)
    yield Weight("kv_down.weight", (record.kv_rank + record.rope_dim, hidden))
    yield _norm("kv_norm.weight", record.kv_rank)
    yield Weight("kv_up.weight", (heads * (record.nope_dim + record.v_dim), record.kv_rank), 0)
    yield Weight("o.weight", (hidden, heads * record.v_dim), 1)


def _dense(record: Dense, hidden: int) -> Iterator[Weight]:
    yield Weight("w_in", (2, record.width, hidden), 1)
    yield Weight("w_out", (hidden, record.width), 1)


def _moe(record: Moe, hidden: int) -> Iterator[Weight]:
    experts, width, shared = record.router.experts, record.width, record.shared
    yield Weight("router.weight", (experts, hidden), product=False)
    yield Weight("experts.w_in", (experts, 2, width, hidden), 2, expert=True)
    yield Weight("experts.w_out", (experts, hidden, width), 2, expert=True)
    if shared is not None:
        yield Weight("shared.w_in", (2, shared.width, hidden), 1)
        yield Weight("shared.w_out", (hidden, shared.width), 1)
        if shared.gate:
            yield Weight("shared.gate.weight", (1, hidden))


def _plain_moe(record: PlainMoe, hidden: int) -> Iterator[Weight]:
    experts, width, shared = record.router.experts, record.width, record.shared
    inner = record.latent or hidden
    yield Weight("router.weight", (experts, hidden), product=False)
    yield Weight("experts.w_in", (experts, width, inner), 1, expert=True)
    yield Weight("experts.w_out", (experts, inner, width), 2, expert=True)
    if record.latent is not None:
        yield Weight("down.weight", (inner, hidden))
        yield Weight("up.weight", (hidden, inner))
    if shared is not None:
        yield Weight("shared.w_in", (shared.width, hidden), 0)
        yield Weight("shared.w_out", (hidden, shared.width), 1)


def _mamba(record: Mamba2, hidden: int) -> Iterator[Weight]:
    yield Weight("in.weight", (record.projected, hidden), 0)
    yield Weight("conv.weight", (record.width + 2 * record.groups * record.state, 4), 0)
    yield Weight("norm.weight", (record.width,), 0, product=False)
    yield Weight("out.weight", (hidden, record.width), 1)


def _delta(record: DeltaNet, hidden: int) -> Iterator[Weight]:
    keys, values = record.key_heads * record.key_dim, record.value_heads * record.value_dim
    yield Weight("in.weight", (2 * keys + 2 * values + 2 * record.value_heads, hidden), 0)
    yield Weight("conv.weight", (2 * keys + values, 4), 0)
    yield _norm("norm.weight", record.value_dim)
    yield Weight("out.weight", (hidden, values), 1)


KINDS: dict[type[Record], Callable[[Any, int], Iterator[Weight]]] = {
    Gqa: _gqa,
    Mla: _mla,
    Dense: _dense,
    Moe: _moe,
    PlainMoe: _plain_moe,
    Mamba2: _mamba,
    DeltaNet: _delta,
}
"""The parameters of each kind of half, by their names within it."""
