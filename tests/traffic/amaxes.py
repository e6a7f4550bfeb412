"""Largest magnitudes that ranks tell each other, by which codes of whole matrices are scaled.

A number for each run of rows when rows or their gradient come, twice as many where rows become
codes after a transform too; one for each matrix of a weight that no data ranks share, once a step.
Where steps before scale, all is one exchange. Recomputed is whole blocks, or nothing.
"""

from collections.abc import Iterator, Mapping, Sequence

from moefold.kernels.quantise.config import Quantise
from moefold.model.config import Block
from moefold.moe.config import Moe
from moefold.planner.case import Case
from moefold.planner.memory_saved import layer_shape
from moefold.spec.decoder import block_saved, sublayers
from moefold.spec.layer import Weight
from moefold.spec.quantised import quantised_weight_names
from tests.traffic.calls import BACKWARD, BALANCED, FORWARD, Call, Step, layers_of, runs, sums
from tests.traffic.data import AMAX, copies_of, levels

ROLES = 3
"""Operands whose histories a weight has: rows, itself, gradients."""


def amaxes(case: Case, rank: int, step: Step = BALANCED) -> Iterator[Call]:
    """Yield the maxima of a rank in a step, without those of weights that travel as codes."""
    record, told = case.decoder.quantise, 0
    if not isinstance(record, Quantise) or not record.has_matrix_scale:
        return
    names = set(quantised_weight_names(case.decoder))
    for number, block in layers_of(case, rank):
        found = dict(_weights(block, case.decoder.hidden))
        narrow = {name: one for name, one in found.items() if f"layers.{number}.{name}" in names}
        told += sum(weight.shape[0] if weight.is_expert else 1 for weight, _ in narrow.values())
        if record.scaling == "current":
            yield from _of_weights(case, narrow)
            if record.rows == "micro_batch":
                yield from _of_rows(case, rank, step, number, block, narrow)
    stage = case.folding.world // case.sizes.pp
    if record.scaling == "delayed" and stage > 1:
        yield Call("stage", "all_reduce_max", sums(ROLES * told * AMAX, stage), 1, part="weights")


def _weights(block: Block, hidden: int) -> Iterator[tuple[str, tuple[Weight, bool]]]:
    """Yield by name each weight of a block, and whether it reads a tensor rank's own rows."""
    for half, spec in sublayers(block):
        known = {weight.name: weight for weight in spec.weights(hidden)}
        for matmul in (m for operation in spec.operations(hidden) for m in operation.matmuls):
            for name in matmul.weights:
                yield f"{spec.prefix or half}.{name}", (known[name], matmul.rows == "own")


def _axis(weight: Weight, inputs: bool) -> str:
    """Return the axis that cuts a weight's inputs, or its outputs."""
    last = len(weight.shape) - 1
    cuts = [units.axis for dim, units in weight.cuts if (dim == last) == inputs]
    return "".join(axis for axis in cuts if axis != "ep")


def _of_weights(case: Case, narrow: dict[str, tuple[Weight, bool]]) -> Iterator[Call]:
    for weight, _ in narrow.values():
        axis = _axis(weight, True) + _axis(weight, False)
        if axis and levels(case, copies_of(weight))[0] == 1:
            ranks = getattr(case.sizes, axis)
            matrices = weight.shape[0] // case.sizes.ep if weight.is_expert else 1
            size = sums(matrices * AMAX, ranks)
            yield Call(axis, "all_reduce_max", size, int(ranks > 1), part="weights")


def _of_rows(
    case: Case,
    rank: int,
    step: Step,
    number: int,
    block: Block,
    narrow: dict[str, tuple[Weight, bool]],
) -> Iterator[Call]:
    record, assigned = case.decoder.quantise, list[tuple[str, ...]]()
    assert isinstance(record, Quantise) and step.choices is not None
    turned = 1 + (record.kind == "nvfp4" and record.wgrad == "narrow")
    for part in block_saved(block, layer_shape(case)):  # what several read is asked for once
        read = tuple(name for name in part.operand_of if name in narrow)
        if read and part.name != "offsets":  # no rows: it says where those of an expert end
            assigned.append(read)
    for micro in range(case.num_micro_batches):
        chosen = step.choices.get((number, micro), {})
        count = {True: _expert_runs(case, rank, block, chosen), False: 1}
        for names in assigned:
            weight, own = narrow[names[0]]
            for _ in range(runs(case)):
                yield _maximum(case, weight, own, True, count[weight.is_expert] * turned)
            for weight, own in (narrow[name] for name in names):
                yield _maximum(case, weight, own, False, count[weight.is_expert] * turned)


def _maximum(case: Case, weight: Weight, own: bool, rows: bool, numbers: int) -> Call:
    """Return the maximum of a weight's rows, or of their gradient, in one micro-batch."""
    sizes, cut = case.sizes, _axis(weight, rows)
    group = "etp" if weight.is_expert else "tp_cp" if own or cut else "cp"
    ranks = {"etp": sizes.etp, "tp_cp": sizes.tp * sizes.cp, "cp": sizes.cp}[group]
    asked = ranks > 1 and numbers > 0 and (bool(cut) or not weight.is_expert)
    size = sums(numbers * AMAX, ranks)
    return Call(group, "all_reduce_max", size, int(asked), FORWARD if rows else BACKWARD, "rows")


def _expert_runs(
    case: Case, rank: int, block: Block, chosen: Mapping[int, Sequence[Sequence[int]]]
) -> int:
    """Return how many pairs of an expert here and a micro-batch have rows."""
    if not isinstance(block.ffn, Moe):
        return 0
    folding, each = case.folding, block.ffn.router.experts // case.sizes.ep
    first = folding.expert_coordinates(rank).ep * each
    return len(
        {
            (expert, folding.attention_coordinates(other).dp)
            for other in folding.group("tp_ep", rank)
            for token in chosen[other]
            for expert in token
            if first <= expert < first + each
        }
    )
