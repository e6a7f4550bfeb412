"""Which weights of a decoder enter products in few bits, without torch."""

from collections.abc import Iterator

from moefold.config.errors import REMOVE, Violation
from moefold.layers.config import Quantise
from moefold.mesh.config import Sizes
from moefold.model.config import Decoder
from moefold.optim.config import matches
from moefold.parallel.config import Layout
from moefold.spec.decoder import halves
from moefold.spec.tuning import nearest_name

CUTS = ("tp", "cp", "ep", "etp")
"""Axes that cut blocks, or the rows that share one."""


def narrow_weights(decoder: Decoder) -> dict[str, int]:
    """Return the weights that the decoder's recipe quantises by global name, with a number each.

    They are those that the descriptions of its blocks name in products that are not wide; the
    number tells them apart for stochastic rounding, whatever is kept wide.
    """
    record = decoder.quantise
    if not isinstance(record, Quantise):
        return {}
    last = len(decoder.blocks) - record.keep_last
    return {
        name: number
        for number, (block, name) in enumerate(_products(decoder))
        if record.keep_first <= block < last and not matches(name, record.keep)
    }


def _products(decoder: Decoder) -> Iterator[tuple[int, str]]:
    for number, block in enumerate(decoder.blocks):
        for name, spec in halves(block):
            at = f"layers.{number}.{spec.prefix or name}."
            for operation in spec.operations(decoder.hidden):
                for product in operation.matmuls if not operation.wide else ():
                    yield from ((number, at + weight) for weight in product.weights)


def quantise_misfits(decoder: Decoder, layout: Layout) -> Iterator[Violation]:
    """Yield what the recipe keeps that is not there, and axes of a layout that it does not go with.

    Blocks and the scales of matrices are of the numbers on one rank, so that a layout which cuts
    features, or rows of a micro-batch or of an expert, would compute something else.
    """
    record = decoder.quantise
    if not isinstance(record, Quantise):
        return
    kind = record.kind
    sizes = Sizes() if any(layout.rules()) else layout.split
    for axis in CUTS:
        if getattr(sizes, axis) > 1:
            rule = f"must leave out {axis} where train.quantise is {kind}: it would change blocks"
            nearest = sizes.model_copy(update=dict.fromkeys(CUTS, 1)).text
            yield Violation(("layout", "sizes"), sizes.text, rule, nearest)
            break
    if layout.graphs != "none":
        rule = f"replays a step's draws, and {kind} draws anew"
        yield Violation(("layout", "graphs"), layout.graphs, rule, "none")
    at = ("train", "quantise")
    if any(one.adapters for one in (decoder, *decoder.blocks)):
        yield Violation(at, kind, "reads codes of weights, to which no adapter adds", REMOVE)
    names = [name for _, name in _products(decoder)]
    for place, pattern in enumerate(record.keep):
        if not any(matches(name, (pattern,)) for name in names):
            rule = "must match a weight that is quantised"
            yield Violation((*at, "keep", place), pattern, rule, nearest_name(pattern, names))
    for name in names:
        pair = name.removesuffix("w_in") + "w_out"
        if name.endswith(".w_in") and matches(name, record.keep) != matches(pair, record.keep):
            rule = "must keep both matrices of a feed-forward, or none"
            nearest = [*record.keep, name.replace("w_in", "*")]
            yield Violation((*at, "keep"), list(record.keep), rule, nearest)
            break
    most = len(decoder.blocks) - 1
    if record.keep_first + record.keep_last > most:
        rule = f"must leave one of {most + 1} blocks to quantise"
        nearest = max(0, most - record.keep_last)
        yield Violation((*at, "keep_first"), record.keep_first, rule, nearest)
