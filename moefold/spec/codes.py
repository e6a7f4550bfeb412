"""Bytes of codes that training holds where products read few bits; without torch.

What backward keeps of a product's rows are codes along the rows with their scales, once for all
weights that read them (``moefold/kernels/scaled``). What something else reads too stays wide beside
them. A weight's codes lie along both of its dims, in one copy where blocks are as wide as long.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import NamedTuple

from moefold.kernels.quantise.config import QUANTISE, Fp8Tensor, Quantise
from moefold.model.config import Block, Decoder
from moefold.spec.decoder import block_saved, halves
from moefold.spec.layer import (
    GATHER,
    INDEX,
    NOTHING,
    STATISTIC,
    LayerSpec,
    Modules,
    Rows,
    Saved,
    Shape,
    Weight,
)
from moefold.spec.quantised import narrow_weights

SCALE = {"fp8_tensor": 0, "fp8_block": 4, "mxfp8": 1, "nvfp4": 1}
"""Bytes of a block's scale."""
MATRIX_SCALE = {"fp8_tensor": 4, "nvfp4": 4}
"""Bytes of the scale of a whole matrix, of kinds that have one."""
CHECKPOINTED = ("ffn", "shared", "experts")
"""Modules whose recompute runs their products again."""


class CodedBlock(Block):
    """A block some of whose products read codes."""

    codes: Quantise
    narrow: tuple[str, ...] = ()
    """Weights that are read as codes, by their names within the block."""


@dataclass(frozen=True)
class CodedWeight(Weight):
    """A weight that products read as codes."""

    codes: Quantise = field(kw_only=True)


def coded(decoder: Decoder, recipe: str) -> Decoder:
    """Return a decoder whose products run in a recipe: its own record of that kind, or another."""
    own = getattr(decoder.quantise, "kind", None)
    if own == (recipe if recipe in SCALE else None):
        return decoder
    record = QUANTISE.kinds[recipe]() if recipe in SCALE else None
    return decoder.model_copy(update={"quantise": record})


def coded_blocks(decoder: Decoder) -> tuple[Block, ...]:
    """Return the blocks of a decoder, those whose products read codes as such."""
    record, blocks, found = decoder.quantise, decoder.blocks, list[Block]()
    if not isinstance(record, Quantise):
        return blocks
    names = list(narrow_weights(decoder))
    for number, block in enumerate(blocks):
        at = f"layers.{number}."
        narrow = tuple(name.removeprefix(at) for name in names if name.startswith(at))
        if narrow:
            block = CodedBlock.model_construct(**dict(block), codes=record, narrow=narrow)
        found.append(block)
    return tuple(found)


def with_codes(weights: tuple[Weight, ...], block: Block, at: str) -> tuple[Weight, ...]:
    """Return weights of a block, whose names begin with ``at``, with what they are read in."""
    if not isinstance(block, CodedBlock):
        return weights
    narrow, record = {at + name for name in block.narrow}, block.codes
    return tuple(CodedWeight(**vars(w), codes=record) if w.name in narrow else w for w in weights)


class WeightProduct(NamedTuple):
    """What the product of a weight reads and gives on a rank."""

    weight: Weight
    rows: int
    runs: int
    """Runs that the rows come in, all as long."""
    outputs: float
    inputs: float


def products(block: Block, shape: Shape) -> list[tuple[str, WeightProduct]]:
    """Return the products of a block with the names of their weights, which some read twice."""
    found = list[tuple[str, WeightProduct]]()
    for half, spec in halves(block):
        for _, matmul, weights in spec.products(shape.hidden):
            rows, runs = rows_of(matmul.rows, spec, shape), 1
            if matmul.rows == "routed" and isinstance(block, CodedBlock):
                runs = _runs(spec, shape, block.codes)
            for weight in weights:
                outputs, inputs, _ = weight.matrix(shape.tp, shape.ep, shape.etp)
                one = WeightProduct(weight, rows, runs, outputs, inputs)
                found.append((f"{spec.prefix or half}.{weight.name}", one))
    return found


def rows_of(kind: Rows, spec: LayerSpec, shape: Shape) -> int:
    """Return the rows that an operation reads on a rank."""
    if kind == "routed":
        assert spec.routing is not None
        return shape.received(spec.routing)
    return shape.rows if kind == "own" else shape.piece


def _runs(spec: LayerSpec, shape: Shape, record: Quantise) -> int:
    """Return how many runs experts' rows come in: of each expert, and of each micro-batch."""
    assert spec.routing is not None
    together = shape.ep * shape.etp // (shape.tp * shape.cp)
    micro_batches = max(together, 1) if record.by_run else 1
    return max(spec.routing.experts // shape.ep, 1) * micro_batches


def code_bytes(record: Quantise, features: float, rows: int, runs: int) -> int:
    """Return the bytes of codes along rows [features, rows], and of their scales."""
    length = record.block or record.length
    each = MATRIX_SCALE.get(record.kind, 0)
    if record.length is None or length is None:
        return round(features * rows) + runs * each
    blocks = runs * ceil(rows / runs / length)
    codes = blocks * length / 2 if record.kind == "nvfp4" else rows
    return round(features * (codes + blocks * SCALE[record.kind])) + runs * each


def gradient_bytes(block: Block, name: str, product: WeightProduct, shape: Shape) -> float:
    """Return the bytes of the gradient of what a product gives, as that of its weight reads it."""
    rows, outputs = product.rows, product.outputs
    if isinstance(block, CodedBlock) and name in block.narrow and block.codes.wgrad == "narrow":
        return code_bytes(block.codes, outputs, rows, product.runs)
    return rows * outputs * (shape.width if product.weight.product else STATISTIC)


def weight_bytes(record: Quantise, outputs: float, inputs: float, matrices: float) -> float:
    """Return the bytes of the codes of a rank's matrices for either dim, with their scales.

    Where steps before scale, the largest number of each stays beside them for every step.
    """
    length, each = record.block or record.length, MATRIX_SCALE.get(record.kind, 0)
    if record.length is None or length is None:
        return matrices * (outputs * inputs + each + STATISTIC * (record.scaling == "delayed"))
    down, across = ceil(outputs / length), ceil(inputs / length)
    if record.kind == "mxfp8":
        scales = outputs * across + inputs * down
        return matrices * (2 * outputs * inputs + scales * SCALE[record.kind])
    codes = outputs * across * length / 2 if record.kind == "nvfp4" else outputs * inputs
    return matrices * (codes + down * across * SCALE[record.kind] + each)


def history_bytes(weight: CodedWeight) -> int:
    """Return the bytes of what scales a weight's operands by steps before, whole on each rank."""
    record = weight.codes
    if not isinstance(record, Fp8Tensor) or record.scaling == "current":
        return 0
    # What scales now, the history, and what the present step has seen.
    return 3 * (weight.shape[0] if weight.expert else 1) * (record.history + 2) * STATISTIC


def coded_saved(block: Block, shape: Shape) -> Iterator[Saved]:
    """Yield what a block saves for backward: codes in place of rows where products read those."""
    parts = list(block_saved(block, shape))
    if not isinstance(block, CodedBlock):
        yield from parts
        return
    known, record = dict(products(block, shape)), block.codes
    first, sent = "moe.experts.w_in", shape.ep * shape.etp > 1
    if record.by_run and sent and first in block.narrow:
        yield Saved("experts.order", known[first].rows * INDEX, module="moe")
    # What recompute of gathered rows starts from, where nobody keeps these.
    gone = {
        part.name.replace(".gathered", "_norm.output")
        for part in parts
        if part.operand and set(part.operand) <= {*block.narrow} and part.beside is None
    }
    for part in parts:
        narrow = [name for name in part.operand if name in block.narrow]
        if part.only and part.name in gone:
            part = replace(part, only=part.only - GATHER)
            if not part.only:
                continue
        if part.only and part.name == "latent.rows" and first in block.narrow:
            part = part if record.wgrad == "wide" else _Copied(**vars(part))
        if part.name == f"{part.module}.hidden":
            yield _hidden(part, block, known)
            continue
        if narrow and part.name == "offsets":  # no rows: it says where those of an expert end
            continue
        if not narrow or record.wgrad == "wide":
            # Wide products keep their activation too, whose codes are made in forward alone.
            yield replace(part, kept=True) if narrow else part
            continue
        others = tuple(name for name in part.operand if name not in block.narrow)
        if others:
            yield replace(part, operand=others)
        elif part.beside is not None:
            yield part.beside
        yield _codes(part.name, narrow, known[narrow[0]], record)


@dataclass(frozen=True)
class _Copied(Saved):
    """Rows whose copies are made again, which nothing keeps but where experts are made again."""

    def stays(self, recompute: Modules) -> bool:
        """Return whether they are kept under a recompute policy."""
        return "experts" in recompute and super().stays(recompute)


def _hidden(part: Saved, block: CodedBlock, known: Mapping[str, WeightProduct]) -> Saved:
    """Return a pre-activation as backward reads it."""
    path = {"experts": "moe.experts.w_in", "shared": "moe.shared.w_in"}.get(part.module, "ffn.w_in")
    length = block.codes.hidden_block
    if not length or path not in block.narrow:
        return part
    one = known[path]
    size = one.rows * (one.outputs + 2 * ceil(one.outputs / 2 / length) * SCALE["fp8_block"])
    return replace(part, bytes=round(size))


def _codes(name: str, weights: list[str], product: WeightProduct, record: Quantise) -> Saved:
    """Return the codes of the rows that weights read."""
    size = code_bytes(record, product.inputs, product.rows, product.runs)
    path = weights[0].split(".")
    module = next((one for one in CHECKPOINTED if one in path), path[0])
    dropped = frozenset((module,)) if module in CHECKPOINTED else NOTHING
    return Saved(f"{name}.codes", size, dropped, module=module, operand=tuple(weights))  # type: ignore[arg-type]
