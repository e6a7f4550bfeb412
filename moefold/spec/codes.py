"""Bytes of codes and scales that training holds for quantised products; without torch.

For backward a quantised product saves codes along its rows, with scales, once for all weights that
read the rows (``moefold/kernels/scaled``). Rows with other consumers are saved wide as well. A
weight has codes along both of its dims, in a single copy if blocks are square.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import NamedTuple, cast

from moefold.kernels.quantise.config import QUANTISE, Fp8Tensor, Quantise
from moefold.model.config import Block, Decoder
from moefold.spec.decoder import block_saved, sublayers
from moefold.spec.layer import (
    GATHER,
    INDEX,
    NOTHING,
    STATISTIC,
    LayerSpec,
    Module,
    Rows,
    Saved,
    SavedKind,
    Shape,
    Weight,
)
from moefold.spec.quantised import quantised_weight_names

SCALE = {"fp8_tensor": 0, "fp8_block": 4, "mxfp8": 1, "nvfp4": 1}
"""Bytes of the scale of a block."""
MATRIX_SCALE = {"fp8_tensor": 4, "nvfp4": 4}
"""Bytes of the scale of a whole matrix, for kinds that have one."""
CHECKPOINTED = ("ffn", "shared", "experts")
"""Modules whose recompute reruns their products."""


class CodedBlock(Block):
    """A block with quantised products."""

    quantise: Quantise
    coded_names: tuple[str, ...] = ()
    """Names, within the block, of the weights of quantised products."""


@dataclass(frozen=True)
class CodedWeight(Weight):
    """A weight of quantised products."""

    quantise: Quantise = field(kw_only=True)


def with_recipe(decoder: Decoder, recipe: str) -> Decoder:
    """Return a decoder quantised by a recipe: its own record, if of this kind, or the default."""
    own = getattr(decoder.quantise, "kind", None)
    if own == (recipe if recipe in SCALE else None):
        return decoder
    record = QUANTISE.kinds[recipe]() if recipe in SCALE else None
    return decoder.model_copy(update={"quantise": record})


def coded_blocks(decoder: Decoder) -> tuple[Block, ...]:
    """Return the blocks of a decoder, those with quantised products as :class:`CodedBlock`."""
    quantise = decoder.quantise
    blocks = list(decoder.blocks)
    if not isinstance(quantise, Quantise):
        return decoder.blocks
    names = list(quantised_weight_names(decoder))
    for number, block in enumerate(blocks):
        prefix = f"layers.{number}."
        coded = tuple(name.removeprefix(prefix) for name in names if name.startswith(prefix))
        if coded:
            fields = dict(block) | {"quantise": quantise, "coded_names": coded}
            blocks[number] = CodedBlock.model_construct(**fields)
    return tuple(blocks)


def with_codes(weights: tuple[Weight, ...], block: Block, prefix: str) -> tuple[Weight, ...]:
    """Return a block's weights, named with a prefix, quantised ones as :class:`CodedWeight`."""
    if not isinstance(block, CodedBlock):
        return weights
    coded = {prefix + name for name in block.coded_names}
    quantise = block.quantise
    return tuple(
        CodedWeight(**vars(w), quantise=quantise) if w.name in coded else w for w in weights
    )


class WeightProduct(NamedTuple):
    """Shape of the product of rows and a weight on one rank."""

    weight: Weight
    rows: int
    runs: int
    """Number of equal runs of rows with scales of their own."""
    outputs: float
    inputs: float


def weight_products(block: Block, shape: Shape) -> list[tuple[str, WeightProduct]]:
    """Return the products of a block, each with its weight's name, which may occur twice."""
    products = list[tuple[str, WeightProduct]]()
    for sublayer, spec in sublayers(block):
        for _, matmul, weights in spec.products(shape.hidden):
            rows = num_rows(matmul.rows, spec, shape)
            runs = 1
            if matmul.rows == "routed" and isinstance(block, CodedBlock):
                # One for each expert and each micro-batch that meets in a group of expert ranks.
                assert spec.routing is not None
                micro_batches = max(shape.ep * shape.etp // (shape.tp * shape.cp), 1)
                micro_batches = micro_batches if block.quantise.scales_per_run else 1
                runs = max(spec.routing.experts // shape.ep, 1) * micro_batches
            for weight in weights:
                outputs, inputs, _ = weight.local_matrix(shape.tp, shape.ep, shape.etp)
                product = WeightProduct(weight, rows, runs, outputs, inputs)
                products.append((f"{spec.prefix or sublayer}.{weight.name}", product))
    return products


def num_rows(kind: Rows, spec: LayerSpec, shape: Shape) -> int:
    """Return the number of rows that an operation reads on a rank."""
    if kind == "routed":
        assert spec.routing is not None
        return shape.received_rows(spec.routing)
    return shape.rows if kind == "own" else shape.piece


def code_bytes(record: Quantise, features: float, rows: int, runs: int) -> int:
    """Return the bytes of codes along rows [features, rows], with their scales."""
    length = record.block or record.block_length
    each = MATRIX_SCALE.get(record.kind, 0)
    if record.block_length is None or length is None:
        return round(features * rows) + runs * each
    blocks = runs * ceil(rows / runs / length)
    codes = blocks * length / 2 if record.kind == "nvfp4" else rows
    return round(features * (codes + blocks * SCALE[record.kind])) + runs * each


def gradient_bytes(block: Block, name: str, product: WeightProduct, shape: Shape) -> float:
    """Return the bytes of a product's output gradient, as the weight gradient reads it."""
    rows = product.rows
    outputs = product.outputs
    quantise = (
        block.quantise if isinstance(block, CodedBlock) and name in block.coded_names else None
    )
    if quantise is not None and quantise.wgrad == "narrow":
        return code_bytes(quantise, outputs, rows, product.runs)
    return rows * outputs * (shape.width if product.weight.product else STATISTIC)


def weight_bytes(record: Quantise, outputs: float, inputs: float, matrices: float) -> float:
    """Return the bytes of codes of a rank's matrices along both dims, with their scales.

    Delayed scaling also stores the largest magnitude of each matrix.
    """
    length = record.block or record.block_length
    each = MATRIX_SCALE.get(record.kind, 0)
    if record.block_length is None or length is None:
        return matrices * (outputs * inputs + each + STATISTIC * (record.scaling == "delayed"))
    down = ceil(outputs / length)
    across = ceil(inputs / length)
    if record.kind == "mxfp8":
        scales = outputs * across + inputs * down
        return matrices * (2 * outputs * inputs + scales * SCALE[record.kind])
    codes = outputs * across * length / 2 if record.kind == "nvfp4" else outputs * inputs
    return matrices * (codes + down * across * SCALE[record.kind] + each)


def history_bytes(weight: CodedWeight) -> int:
    """Return the bytes of the amax history of delayed scaling, which each rank holds whole."""
    record = weight.quantise
    if not isinstance(record, Fp8Tensor) or record.scaling == "current":
        return 0
    # The current scale, the history, and the maximum of the present step.
    matrices = weight.shape[0] if weight.is_expert else 1
    return 3 * matrices * (record.history + 2) * STATISTIC


def coded_saved(block: Block, shape: Shape) -> Iterator[Saved]:
    """Yield what a block saves for backward, with codes in place of rows of quantised products."""
    parts = list(block_saved(block, shape))
    if not isinstance(block, CodedBlock):
        yield from parts
        return
    products = dict(weight_products(block, shape))
    record = block.quantise
    coded = {*block.coded_names}
    w_in = "moe.experts.w_in"
    if record.scales_per_run and shape.ep * shape.etp > 1 and w_in in coded:
        yield Saved("experts.order", products[w_in].rows * INDEX, module="moe")
    # Inputs for recomputing gathered rows, which codes replace.
    gathered = (p for p in parts if p.kind is SavedKind.GATHERED and p.also_saved is None)
    only_codes = {p.sublayer for p in gathered if coded.issuperset(p.operand_of)}
    for part in parts:
        readers = [name for name in part.operand_of if name in coded]
        is_unneeded = part.kind is SavedKind.NORM_OUTPUT and part.sublayer in only_codes
        if part.needed_by and is_unneeded:
            part = replace(part, needed_by=part.needed_by - GATHER)
            if not part.needed_by:
                continue
        if part.kind is SavedKind.LATENT_ROWS and w_in in coded and record.wgrad != "wide":
            # Copies have codes: only experts that run again read these rows.
            part = replace(part, only_beside=frozenset(("experts",)))
        if part.result_of:
            yield _saved_hidden(part, block, products)
            continue
        if readers and part.kind is SavedKind.EXPERT_ENDS:  # no rows
            continue
        if not readers or record.wgrad == "wide":
            # Wide weight gradients also save the activation, which only forward quantises.
            yield replace(part, from_forward=True) if readers else part
            continue
        if others := tuple(name for name in part.operand_of if name not in coded):
            yield replace(part, operand_of=others)
        elif part.also_saved is not None:
            yield part.also_saved
        yield _saved_codes(part.name, readers, products[readers[0]], record)


def _saved_hidden(part: Saved, block: CodedBlock, products: Mapping[str, WeightProduct]) -> Saved:
    """Return a pre-activation as it is saved: wide, or as codes with scales."""
    length = block.quantise.hidden_block
    if not length or part.result_of not in block.coded_names:
        return part
    product = products[part.result_of]
    rows = product.rows
    outputs = product.outputs
    blocks = 2 * ceil(outputs / 2 / length)
    size = rows * (outputs + blocks * SCALE["fp8_block"])
    return replace(part, bytes=round(size))


def _saved_codes(name: str, weights: list[str], product: WeightProduct, record: Quantise) -> Saved:
    """Return the saved codes of the rows that ``weights`` read."""
    size = code_bytes(record, product.inputs, product.rows, product.runs)
    path = weights[0].split(".")
    module = cast("Module", next((kind for kind in CHECKPOINTED if kind in path), path[0]))
    freed_by = frozenset((module,)) if module in CHECKPOINTED else NOTHING
    codes = Saved(f"{name}.codes", size, freed_by, module=module, kind=SavedKind.CODES)
    return replace(codes, operand_of=tuple(weights))
