"""The products of an optimizer that makes its updates orthogonal: Muon's Newton-Schulz."""

from math import prod

from moefold.config.base import Record
from moefold.model.config import Decoder
from moefold.optim.config import Muon
from moefold.planner.case import Case
from moefold.planner.curves import Product, Rates, product_seconds
from moefold.planner.memory_state import place_weights
from moefold.spec.decoder import model_weights


def orthogonal_flops(decoder: Decoder, rule: Record) -> int:
    """Return the FLOPs of a step's Newton-Schulz over all matrices, each computed once.

    Of sides s and l, s the smaller, an iteration takes two products of s * s * l and one of s
    cubed.
    """
    if not isinstance(rule, Muon):
        return 0
    total = 0
    for weight in model_weights(decoder):
        if rule.orthogonalises(weight.name, weight.shape):
            short, long = sorted(weight.shape[-2:])
            total += prod(weight.shape[:-2]) * (2 * short * short * long + short**3)
    return 2 * rule.ns_steps * total


def orthogonal_seconds(case: Case, stage: int, rates: Rates) -> float:
    """Return the seconds that a rank of a pipeline rank spends on its share of the matrices.

    Data ranks share them out; a matrix that tensor ranks cut is made whole by each of them.
    """
    rule = case.numbers.optimizer
    if not isinstance(rule, Muon):
        return 0.0
    peak, folding, total = case.cluster.device.peak("bf16"), case.folding, 0.0
    for chunk in case.places[stage]:
        for weight in (one for place in chunk for one in place_weights(case, place)):
            if not rule.orthogonalises(weight.name, weight.shape):
                continue
            short, long = sorted(weight.shape[-2:])
            count = prod(weight.shape[:-2]) / (case.sizes.ep if weight.expert else 1)
            if case.keeping.zero:
                count /= folding.edp if weight.expert else folding.dp * case.sizes.cp
            products = (
                Product(short, short, long, 2 * count),
                Product(short, short, short, count),
            )
            total += sum(product_seconds(one, rates, peak, False) for one in products)
    return rule.ns_steps * total
