"""Bytes of weights, gradients, master weights and moments on each rank.

They follow from the names and global shapes of parameters, which are those of the built model.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import gcd
from operator import add
from typing import Literal, NamedTuple

from moefold.model.config import Decoder
from moefold.planner.case import Case, NumberFormats, StageContents, distinct_blocks
from moefold.planner.layouts import OptimizerOnHost
from moefold.planner.memoize import memoize
from moefold.spec.codes import CodedWeight, history_bytes, weight_bytes, with_codes
from moefold.spec.decoder import block_weights, embedding_weight, final_norm_weight, head_weight
from moefold.spec.layer import Weight

WEIGHT_CODE_BYTES = {"fp8_tensor": 2.0, "fp8_block": 2.0, "mxfp8": 2.0625, "nvfp4": 1.125}
"""Bytes per element of a weight's codes and scales in low-precision products: one copy for the
product and one, transposed, for the gradient of its input."""
GATHERED_CODE_BYTES = {"fp8_tensor": 1.0, "fp8_block": 1.0, "nvfp4": 0.5}
"""Bytes per element that data ranks gather of a weight, where one set of codes serves all of its
products."""
OPTIONAL_PARTS = ("pages", "graphs", "reference")
"""Parts of memory that are listed only where there are some."""
BF16_BYTES = 2
"""Bytes per element of bfloat16 weights next to codes."""
Part = int | Literal["norm", "head", "embedding"]
"""Part of a model: a kind of block, by its index in :func:`moefold.planner.case.kinds`, or another
module by name."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank that last from step to step, and gradients."""

    weights: float = 0.0
    """Weights as products read them: a copy in the compute dtype, and codes."""
    gradients: float = 0.0
    master: float = 0.0
    moments: float = 0.0
    offloaded_master: float = 0.0
    """Master weights on the host or on disk between steps; not part of the total."""
    offloaded_moments: float = 0.0
    pages: float = 0.0
    """Pages of experts' saved rows."""
    offloaded_pages: float = 0.0
    """Pages in host memory; not part of the total."""
    graphs: float = 0.0
    """Static inputs and outputs of CUDA graphs."""
    reference: float = 0.0
    """Weights of a teacher, and what the loss reads of its results."""

    def __add__(self, other: "StateBytes") -> "StateBytes":
        return StateBytes(*map(add, vars(self).values(), vars(other).values()))

    def __mul__(self, count: int) -> "StateBytes":
        return StateBytes(*(value * count for value in vars(self).values()))

    @property
    def total(self) -> float:
        """All bytes on the device."""
        return sum(self.on_device.values())

    @property
    def on_device(self) -> dict[str, float]:
        """Bytes on the device by part."""
        sizes = {
            name: size for name, size in vars(self).items() if not name.startswith("offloaded_")
        }
        absent = [name for name in OPTIONAL_PARTS if not sizes[name]]
        return {name: size for name, size in sizes.items() if name not in absent}

    @property
    def offloaded(self) -> float:
        """Bytes of offloaded master weights and moments."""
        return self.offloaded_master + self.offloaded_moments


class StateSharding(NamedTuple):
    """Inputs that decide which part of a parameter and of its state is on a rank."""

    tp_ep_etp: tuple[int, int, int]
    """Sizes of these three axes."""
    dense_copies: int
    """Ranks with the same part of a parameter outside routed experts."""
    expert_copies: int
    """Ranks with the same part of a routed expert's parameter."""
    numbers: NumberFormats
    zero: int
    zero_ranks: int | None
    device_share: float
    """Share of master weights and moments on the device."""
    stack: str
    resident_weights: bool = False
    """Whether weights for products stay on the device where their masters are offloaded."""

    @classmethod
    def of(cls, case: Case) -> "StateSharding":
        """Return the sharding of a case."""
        sizes = case.sizes
        folding = case.folding
        layout = case.layout
        share = layout.state.offloaded_share
        # Without offloaded state nothing asks for it.
        resident = share > 0 and not isinstance(layout.state, OptimizerOnHost)
        return cls(
            (sizes.tp, sizes.ep, sizes.etp), folding.dp * sizes.cp, folding.edp,
            case.number_formats, layout.zero, layout.zero_ranks, 1 - share,
            case.software.stack, resident,
        )  # fmt: skip

    def shards_and_replicas(self, expert: bool) -> tuple[int, int]:
        """Return over how many ranks ZeRO shards a parameter, and how often the shards exist."""
        copies = self.expert_copies if expert else self.dense_copies
        shards = gcd(self.zero_ranks or copies, copies) if self.zero else 1
        return shards, copies // shards

    def local_state(self, weights: Iterable[Weight]) -> StateBytes:
        """Return the state of some parameters on one rank."""
        return sum((self._weight_state(weight) for weight in weights), StateBytes())

    def _weight_state(self, weight: Weight) -> StateBytes:
        numbers = self.numbers
        local = weight.local_elements(*self.tp_ep_etp)
        shards, _ = self.shards_and_replicas(weight.is_expert)
        elements = [local / (shards if self.zero >= stage else 1) for stage in range(4)]
        copy = numbers.weight_bytes
        master_bytes = numbers.master_bytes
        if self.stack == "moefold" and self.zero == 3 and shards > 1:
            copy = 0  # gathered from masters for each pass
        elif self.stack == "moefold" and not (weight.product and copy):
            # Read in the master's dtype: a gathered copy where masters are sharded.
            copy = master_bytes if self.zero in (1, 2) and shards > 1 else 0
        quantise = None
        history = 0
        if isinstance(weight, CodedWeight):
            quantise = weight.quantise
            history = history_bytes(weight)
        codes = self._code_bytes(weight, local)
        if weight.frozen:
            stored = (weight.reads_compute_dtype and numbers.weight_bytes) or master_bytes
            return StateBytes(
                weights=elements[3] * (stored + (codes if quantise else 0.0)) + history
            )
        if quantise is not None:
            # Codes in two directions are recomputed in each pass from the gathered weights.
            gathered = 0 < self.zero < 3 and shards > 1 and quantise.kind == "mxfp8"
            copy, codes = (BF16_BYTES, 0.0) if gathered else (0, codes)
        elif codes and not weight.product:
            copy = max(copy, BF16_BYTES)
            codes = 0.0
        resident = self.device_share
        offloaded = 1 - self.device_share
        if self.resident_weights and quantise is None:
            read = numbers.weight_bytes if weight.product else 0
            copy = copy * resident + (read or master_bytes) * offloaded
        moments = len(numbers.optimizer.state_names(weight.name, weight.shape))
        moments *= numbers.optimizer.moment_bytes(weight.shape, numbers.moment_bytes)
        master = elements[1] * master_bytes
        moment = elements[1] * moments
        return StateBytes(
            weights=elements[3] * (copy + codes) + history,
            gradients=elements[2] * numbers.gradient_bytes,
            master=master * resident,
            moments=moment * resident,
            offloaded_master=master * offloaded,
            offloaded_moments=moment * offloaded,
        )

    def _code_bytes(self, weight: Weight, local: float) -> float:
        """Return the bytes per element of the codes of a weight."""
        if self.stack != "moefold":
            return WEIGHT_CODE_BYTES.get(self.numbers.recipe, 0.0)
        if not isinstance(weight, CodedWeight):
            return 0.0
        return weight_bytes(weight.quantise, *weight.local_matrix(*self.tp_ep_etp)) / local


def layers_and_norm(stage: StageContents) -> Iterator[tuple[Part, int]]:
    """Yield each part of a rank besides embedding and head, with how often it is there."""
    yield from stage.layers
    yield "norm", int(stage.has_norm)


@memoize(1 << 10)
def part_weights(decoder: Decoder, part: Part) -> tuple[Weight, ...]:
    """Return the parameters of a part."""
    if isinstance(part, int):
        block = distinct_blocks(decoder)[0][part]
        weights = tuple(block_weights(block, decoder.hidden, part))
        return with_codes(weights, block, f"layers.{part}.")
    if part == "norm":
        return (final_norm_weight(decoder),)
    return (head_weight(decoder) if part == "head" else embedding_weight(decoder),)


class StateEstimator:
    """State of the parts of a model, cached by part."""

    def __init__(self, decoder: Decoder, sharding: StateSharding) -> None:
        self.decoder = decoder
        self.sharding = sharding
        self._by_part: dict[Part, StateBytes] = {}

    def part_state(self, part: Part) -> StateBytes:
        """Return the state of one part."""
        if part not in self._by_part:
            self._by_part[part] = self.sharding.local_state(part_weights(self.decoder, part))
        return self._by_part[part]

    def layers_state(self, stage: StageContents) -> StateBytes:
        """Return the state of a rank without embedding and head."""
        parts = (self.part_state(part) * count for part, count in layers_and_norm(stage) if count)
        return sum(parts, StateBytes())

    def rank_state(self, stage: StageContents) -> StateBytes:
        """Return the state of a rank."""
        return sum((self.part_state(part) for part in self._ends(stage)), self.layers_state(stage))

    def update_peak(self, stage: StageContents) -> float:
        """Return the peak of offloaded state on the device during its update.

        That is two units, or all offloaded state if the optimizer updates all parameters together.
        """
        if not self.sharding.numbers.optimizer.elementwise:
            return self.rank_state(stage).offloaded
        units = [self.part_state(part).offloaded for part in self._ends(stage)]
        for part, count in layers_and_norm(stage):
            units += [self.part_state(part).offloaded] * min(count, 2)
        return sum(sorted(units)[-2:])

    def _ends(self, stage: StageContents) -> Iterator[Part]:
        tied = self.decoder.tied
        if stage.embedding or stage.multi_token or (stage.loss and tied):
            yield "embedding"
        if stage.loss and not tied:
            yield "head"


state_estimator = memoize(1 << 12)(StateEstimator)
"""Return the cached :class:`StateEstimator` of a model, common to all cases with equal sharding."""
