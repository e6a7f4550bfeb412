"""Bytes of weights, gradients, master weights and moments on each rank.

They follow from the global names and shapes of parameters, which are those of the built model.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import gcd
from operator import add
from typing import Literal, NamedTuple

from moefold.model.config import Decoder
from moefold.planner.case import Case, Held, Numbers, kinds
from moefold.planner.remember import remembered
from moefold.spec.codes import CodedWeight, history_bytes, weight_bytes, with_codes
from moefold.spec.decoder import block_weights, embedding, head, last_norm
from moefold.spec.layer import Weight

CODE_BYTES = {"fp8_tensor": 2.0, "fp8_block": 2.0, "mxfp8": 2.0625, "nvfp4": 1.125}
"""Bytes per element of a weight's codes and scales in low-precision products: one copy for the
product and one, transposed, for the gradient of its input."""
GATHERED = {"fp8_tensor": 1.0, "fp8_block": 1.0, "nvfp4": 0.5}
"""Bytes per element that data ranks gather of a weight, where one set of codes serves all of its
products."""
WIDE_BYTES = 2
"""Bytes per element of bfloat16 weights next to codes."""
Part = int | Literal["norm", "head", "embedding"]
"""Part of a model: a kind of block by its number in ``case.kinds``, or one of these by name."""


@dataclass(frozen=True)
class State:
    """Bytes on one rank that last from step to step, and gradients."""

    weights: float = 0.0
    """Weights as products read them: a copy in the compute dtype, and codes."""
    gradients: float = 0.0
    master: float = 0.0
    moments: float = 0.0
    away_master: float = 0.0
    """Master weights on the host or on disk between steps; not part of the total."""
    away_moments: float = 0.0
    pages: float = 0.0
    """Pages of experts' saved rows."""
    away_pages: float = 0.0
    """Pages in host memory; not part of the total."""
    graphs: float = 0.0
    """Static inputs and outputs of CUDA graphs."""

    def __add__(self, other: "State") -> "State":
        return State(*map(add, vars(self).values(), vars(other).values()))

    def times(self, number: int) -> "State":
        """Return the bytes of ``number`` equal parts."""
        return State(*(value * number for value in vars(self).values()))

    @property
    def total(self) -> float:
        """All bytes on the device."""
        return sum(self.here.values())

    @property
    def here(self) -> dict[str, float]:
        """Bytes on the device by part."""
        found = {name: value for name, value in vars(self).items() if name[:5] != "away_"}
        return {n: size for n, size in found.items() if size or n not in ("pages", "graphs")}

    @property
    def away(self) -> float:
        """Bytes of offloaded master weights and moments."""
        return self.away_master + self.away_moments


class Split(NamedTuple):
    """Inputs that decide which part of a parameter and of its state a rank holds."""

    sizes: tuple[int, int, int]
    """tp, ep and etp."""
    copies: int
    """Ranks that hold the same part of parameters outside routed experts."""
    expert_copies: int
    numbers: Numbers
    zero: int
    zero_ranks: int | None
    here: float
    """Share of master weights and moments on the device."""
    stack: str
    narrowed: bool = False
    """Whether weights for products stay on the device where their masters are offloaded."""

    @classmethod
    def of(cls, case: Case) -> "Split":
        """Return the split of a case."""
        sizes, folding, keeping = case.sizes, case.folding, case.keeping
        return cls(
            (sizes.tp, sizes.ep, sizes.etp), folding.dp * sizes.cp, folding.edp, case.numbers,
            keeping.zero, keeping.zero_ranks, 1 - keeping.optimizer_offload, case.software.stack,
            keeping.state_step is not None,
        )  # fmt: skip

    def levels(self, expert: bool) -> tuple[int, int]:
        """Return the number of ranks that shard a copy of a parameter, and the number of copies."""
        ranks = self.expert_copies if expert else self.copies
        inner = gcd(self.zero_ranks or ranks, ranks) if self.zero else 1
        return inner, ranks // inner

    def state(self, weights: Iterable[Weight]) -> State:
        """Return the state of some parameters on one rank."""
        return sum((self._state(weight) for weight in weights), State())

    def _state(self, weight: Weight) -> State:
        numbers, local = self.numbers, weight.part(*self.sizes)
        ranks, _ = self.levels(weight.expert)
        share = [local / (ranks if self.zero >= stage else 1) for stage in range(4)]
        copied, passing = numbers.weight_bytes, self.stack == "moefold" and self.zero == 3
        if passing and ranks > 1:
            copied = 0  # gathered from masters for each pass
        elif self.stack == "moefold" and not (weight.product and copied):
            # Read in the master's dtype: a gathered copy where masters are sharded.
            copied = numbers.master_bytes if self.zero in (1, 2) and ranks > 1 else 0
        record, past = None, 0
        if isinstance(weight, CodedWeight):
            record, past = weight.codes, history_bytes(weight)
        codes = self._codes(weight, local)
        if weight.frozen:
            narrow = weight.narrow and numbers.weight_bytes
            wide = numbers.weight_bytes if narrow else numbers.master_bytes
            return State(weights=share[3] * (wide + (codes if record else 0.0)) + past)
        if record is not None:
            # Codes in two directions are recomputed in each pass from the gathered weights.
            shared = 0 < self.zero < 3 and ranks > 1 and record.kind == "mxfp8"
            copied, codes = (WIDE_BYTES, 0.0) if shared else (0, codes)
        elif codes and not weight.product:
            copied, codes = max(copied, WIDE_BYTES), 0.0
        if self.narrowed and record is None:
            read = numbers.weight_bytes if weight.product else 0
            copied = copied * self.here + (read or numbers.master_bytes) * (1 - self.here)
        moments = len(numbers.optimizer.state_names(weight.name, weight.shape))
        moments *= numbers.optimizer.moment_bytes(weight.shape, numbers.moment_bytes)
        return State(
            weights=share[3] * (copied + codes) + past,
            gradients=share[2] * numbers.gradient_bytes,
            master=share[1] * numbers.master_bytes * self.here,
            moments=share[1] * moments * self.here,
            away_master=share[1] * numbers.master_bytes * (1 - self.here),
            away_moments=share[1] * moments * (1 - self.here),
        )

    def _codes(self, weight: Weight, local: float) -> float:
        """Return the bytes per element of the codes of a weight."""
        if self.stack != "moefold":
            return CODE_BYTES.get(self.numbers.recipe, 0.0)
        if not isinstance(weight, CodedWeight):
            return 0.0
        return weight_bytes(weight.codes, *weight.matrix(*self.sizes)) / local


def inner_parts(held: Held) -> Iterator[tuple[Part, int]]:
    """Yield each part of a rank besides embedding and head, with its number."""
    yield from held.layers
    yield "norm", int(held.loss)


@remembered(1 << 10)
def part_weights(decoder: Decoder, part: Part) -> tuple[Weight, ...]:
    """Return the parameters of a part."""
    if isinstance(part, int):
        block = kinds(decoder)[0][part]
        found = tuple(block_weights(block, decoder.hidden, part))
        return with_codes(found, block, f"layers.{part}.")
    if part == "norm":
        return (last_norm(decoder),)
    return (head(decoder) if part == "head" else embedding(decoder),)


class States:
    """State of the parts of a model, cached by part."""

    def __init__(self, decoder: Decoder, split: Split) -> None:
        self.decoder, self.split = decoder, split
        self._known: dict[Part, State] = {}

    def of(self, part: Part) -> State:
        """Return the state of one part."""
        if part not in self._known:
            self._known[part] = self.split.state(part_weights(self.decoder, part))
        return self._known[part]

    def inner(self, held: Held) -> State:
        """Return the state of a rank without embedding and head."""
        return sum((self.of(part).times(n) for part, n in inner_parts(held) if n), State())

    def held(self, held: Held) -> State:
        """Return the state of a rank."""
        return sum((self.of(part) for part in self._ends(held)), self.inner(held))

    def coming(self, held: Held) -> float:
        """Return the peak of offloaded state on the device during its update.

        That is two units, or all offloaded state if the optimizer updates all parameters together.
        """
        if not self.split.numbers.optimizer.elementwise:
            return self.held(held).away
        parts: list[tuple[Part, int]] = [*inner_parts(held)]
        units = [self.of(part).away for part, n in parts for _ in range(min(n, 2))]
        units += [self.of(part).away for part in self._ends(held)]
        return sum(sorted(units)[-2:])

    def _ends(self, held: Held) -> Iterator[Part]:
        tied = self.decoder.tied
        if held.embedding or held.multi_token or (held.loss and tied):
            yield "embedding"
        if held.loss and not tied:
            yield "head"


states_of = remembered(1 << 12)(States)
"""Cached :class:`States`, common to all cases with an equal split."""
