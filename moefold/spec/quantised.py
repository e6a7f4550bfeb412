"""Weights of quantised products of a decoder, and layouts that they permit; without torch."""

from collections.abc import Iterator
from itertools import product
from math import lcm, prod
from typing import NamedTuple

from moefold.config.errors import REMOVE, Violation
from moefold.kernels.quantise.config import Fp8Tensor, Quantise
from moefold.mesh.config import Sizes
from moefold.model.config import Decoder
from moefold.moe.dispatch.config import FixedShape, ThirdParty
from moefold.optim.config import Optim, matches
from moefold.parallel.config import Layout
from moefold.spec.decoder import ModelNeeds, model_needs, model_weights, sublayers
from moefold.spec.layer import Rows, Units, Weight
from moefold.spec.tuning import nearest_name

CUT = "blocks of train.quantise cannot be split"


def quantised_weight_names(decoder: Decoder) -> dict[str, int]:
    """Return the global names of the weights that the decoder's recipe quantises, with numbers.

    These are the weights in products that blocks do not describe as wide. The number identifies a
    weight in stochastic rounding, and does not depend on which others are kept wide.
    """
    record = decoder.quantise
    if not isinstance(record, Quantise):
        return {}
    last = len(decoder.blocks) - record.keep_last
    return {
        name: number
        for number, (name, *_) in enumerate(_quantisable_weights(decoder))
        if record.keep_first <= int(name.split(".")[1]) < last and not matches(name, record.keep)
    }


def _quantises_experts(decoder: Decoder) -> bool:
    """Return whether products of routed experts are quantised."""
    names = quantised_weight_names(decoder)
    weights = _quantisable_weights(decoder)
    return any(weight.is_expert and name in names for name, weight, _ in weights)


def _quantisable_weights(decoder: Decoder) -> Iterator[tuple[str, Weight, Rows]]:
    """Yield name, description and rows of each weight that may be quantised."""
    for number, block in enumerate(decoder.blocks):
        for sublayer, spec in sublayers(block):
            prefix = f"layers.{number}.{spec.prefix or sublayer}."
            for operation, matmul, weights in spec.products(decoder.hidden):
                for weight in weights:
                    if not (operation.wide or weight.stacked):
                        yield prefix + weight.name, weight, matmul.rows


class _QuantisedCuts(NamedTuple):
    """How a layout may cut the operands of quantised products."""

    units: tuple[Units, ...]
    """Units, of whole blocks of codes, that axes must divide."""
    block_rows: int
    """Rows of a block, if products read a tensor rank's own rows; otherwise 0."""
    whole_experts: bool
    """Whether an expert's rows of a micro-batch share scales or blocks, and need one rank."""

    @classmethod
    def of(cls, decoder: Decoder, record: Quantise, seq: int) -> "_QuantisedCuts":
        """Derive the cuts from the descriptions of quantised weights."""
        names = set(quantised_weight_names(decoder))
        distinct = dict[Units, None]()
        block = record.block or record.block_length or 1
        along_rows = block if record.wgrad == "narrow" else 1
        has_own_rows = has_experts = False
        for name, weight, rows in _quantisable_weights(decoder):
            if name not in names:
                continue
            has_own_rows |= rows == "own"
            has_experts |= weight.is_expert
            multiple = lcm(block, record.hidden_block or 1) if name.endswith(".w_in") else block
            for dim, units in weight.cuts:
                if units.axis != "ep" and multiple > 1:
                    axis = units.axis
                    size = weight.shape[dim]
                    text = f"{weight.name} ({size} wide)"
                    rule = f"{axis} must be 1, or {axis} * {multiple} must divide {text}: {CUT}"
                    number = size // multiple if size % multiple == 0 else 1
                    distinct[Units(axis, number, text, said=rule)] = None
        if not record.scales_per_run:
            return cls(tuple(distinct), 0, False)
        if along_rows > 1:
            number = seq // (2 * block) if seq % (2 * block) == 0 else 1
            rule = f"cp must be 1, or 2 * cp * {block} must divide the sequence length ({seq})"
            distinct[Units("cp", number, "blocks of rows", said=f"{rule}: {CUT}")] = None
        share_scales = record.has_matrix_scale or along_rows > 1
        block_rows = along_rows if has_own_rows and along_rows > 1 else 0
        return cls(tuple(distinct), block_rows, has_experts and share_scales)

    def violated_rules(self, sizes: Sizes, seq: int) -> Iterator[str]:
        """Yield the rules that the sizes of a layout violate."""
        by_axis = dict(sizes)
        yield from (units.rule for units in self.units if units.number % by_axis[units.axis])
        if self.block_rows and sizes.tp > 1 and seq % (sizes.tp * sizes.cp * self.block_rows):
            rule = f"tp * cp * {self.block_rows} must divide the sequence length ({seq})"
            yield f"tp must be 1, or {rule}, as tensor ranks project own rows to latents: {CUT}"
        if self.whole_experts and (sizes.ep * sizes.etp) % (sizes.tp * sizes.cp):
            yield (
                f"tp * cp ({sizes.tp * sizes.cp}) must divide ep * etp ({sizes.ep * sizes.etp}): "
                "an expert's rows of a micro-batch share scales or blocks and must be on one rank; "
                "or set train.quantise.rows=rank"
            )

    def violations(self, decoder: Decoder, layout: Layout, seq: int) -> Iterator[Violation]:
        """Yield the rules that a layout violates, with the nearest sizes that satisfy all."""
        sizes = layout.split
        if rules := list(self.violated_rules(sizes, seq)):
            nearest = self.nearest_sizes(sizes, model_needs(decoder, seq), seq).text
            yield from (Violation(("sizes",), sizes.text, rule, nearest) for rule in rules)

    def nearest_sizes(self, sizes: Sizes, model: ModelNeeds, seq: int) -> Sizes:
        """Return the legal sizes with the least product of ratios to the given ones."""
        axes = ("tp", "cp", "ep", "etp")
        divisors = list[list[int]]()
        for axis in axes:
            largest = 2 * max(sizes.tp * sizes.cp, getattr(sizes, axis))
            units = [u for u in (*model.units, *self.units) if u.axis == axis]
            divisors.append([n for n in range(1, largest + 1) if all(u.allows(n) for u in units)])
        candidates = (
            sizes.model_copy(update=dict[str, int](zip(axes, values, strict=True)))
            for values in product(*divisors)
        )
        legal = (c for c in candidates if not any(self.violated_rules(c, seq)))

        def distance(candidate: Sizes) -> tuple[float, int, int]:
            pairs = [(getattr(candidate, axis), getattr(sizes, axis)) for axis in axes]
            ratio = prod(max(a / b, b / a) for a, b in pairs)
            return ratio, -candidate.smallest_world, candidate.etp

        return min(legal, key=distance)


def legal_rows_setting(decoder: Decoder, sizes: Sizes, seq: int) -> str | None:
    """Return the value of ``train.quantise.rows`` with which a recipe is legal in a layout.

    This is the recipe's own value or, if that does not fit, ``rank``; None if neither fits.
    """
    record = decoder.quantise
    if not isinstance(record, Quantise) or any(True for _ in quantise_violations(decoder)):
        return None
    for rows in (record.rows, "rank"):
        cuts = _QuantisedCuts.of(decoder, record.model_copy(update={"rows": rows}), seq)
        if not any(cuts.violated_rules(sizes, seq)):
            return rows
    return None


def cut_violations(decoder: Decoder, layout: Layout, seq: int) -> Iterator[Violation]:
    """Yield parts of a layout that would cut blocks of codes or rows that share a matrix's scale,
    or that do not transport the row numbers needed for random numbers."""
    record = decoder.quantise
    if any(layout.rules()):
        return
    if not isinstance(record, Quantise):
        records = (decoder, *decoder.blocks)
        adapters = [adapter for r in records for adapter in r.adapters if adapter.dropout]
        if adapters:
            experts = any("experts." in adapter.weight for adapter in adapters)
            yield from _draw_violations(layout, "adapter.dropout", experts, experts)
            if layout.clones is not None and experts:
                rule = "cannot be used with adapter.dropout, which needs the clones' expert numbers"
                yield Violation(("clones",), layout.clones, rule, None)
        return
    cuts = _QuantisedCuts.of(decoder, record, seq)
    yield from cuts.violations(decoder, layout, seq)
    experts = _quantises_experts(decoder)
    if layout.clones is not None and experts:
        rule = "copies the experts' weights but not their quantised codes"
        yield Violation(("clones",), layout.clones, rule, None)
    if layout.offload is not None and layout.offload.pages is not None and experts:
        rule = "cannot be used with quantised experts: they save codes, pages hold wide rows"
        yield Violation(("offload", "pages"), layout.offload.pages, rule, None)
    yield from _draw_violations(layout, "train.quantise", cuts.whole_experts, experts)
    dispatch = layout.dispatch
    sizes = layout.split
    sends_codes = getattr(dispatch, "supports_codes", False) or sizes.ep * sizes.etp == 1
    if record.wire == "codes" and not (sends_codes or isinstance(dispatch, ThirdParty)):
        rule = "cannot send quantised rows, which train.quantise.wire: codes requires"
        yield Violation(("dispatch",), getattr(dispatch, "kind", ""), rule, "alltoall")


def moment_violations(
    decoder: Decoder, optim: Optim, layout: Layout, seq: int
) -> Iterator[Violation]:
    """Yield axes that would cut a group of elements whose optimizer moments share a scale."""
    group = optim.group
    distinct = dict[tuple[str, int], Units]()
    if not group or any(layout.rules()):
        return
    for weight in model_weights(decoder):
        size = weight.shape[-1]
        last = len(weight.shape) - 1
        for cut in (units for dim, units in weight.cuts if dim == last > 0):
            axis = cut.axis
            text = f"{weight.name} ({size} wide)"
            rule = f"{axis} must be 1, or {axis} * {group} must divide {text}: "
            rule += "groups of optim.moments cannot be split"
            number = size // group if size % group == 0 else 1
            # Report only the first weight for each axis and number of units.
            distinct.setdefault((axis, number), Units(axis, number, text, said=rule))
    yield from _QuantisedCuts(tuple(distinct.values()), 0, False).violations(decoder, layout, seq)


def _draw_violations(
    layout: Layout, option: str, one_round: bool, experts: bool
) -> Iterator[Violation]:
    """Yield parts of a layout in which rows' numbers, and thus random numbers, are unknown.

    ``experts``: whether it concerns routed experts; ``one_round``: whether their rows must also
    arrive in one round.
    """
    if layout.graphs != "none":
        rule = f"replays a recorded step, but {option} has row positions or draws from the host"
        yield Violation(("graphs",), layout.graphs, rule, "none")
    repeats = isinstance(layout.dispatch, FixedShape) and layout.dispatch.on_overflow == "again"
    if repeats and one_round and layout.split.ep * layout.split.etp > 1:
        rule = f"repeats a step in rounds that send no row numbers, which {option} needs"
        yield Violation(("dispatch", "on_overflow"), "again", rule, "stop")
    if isinstance(layout.dispatch, ThirdParty) and experts:
        rule = f"sends only bf16 rows, but {option} also needs their exact row numbers"
        yield Violation(("dispatch",), layout.dispatch.kind, rule, "alltoall")


def quantise_violations(decoder: Decoder) -> Iterator[Violation]:
    """Yield settings of the recipe that do not fit the decoder or each other."""
    record = decoder.quantise
    if not isinstance(record, Quantise):
        return
    kind = record.kind
    path = ("train", "quantise")
    if any(part.adapters for part in (decoder, *decoder.blocks)):
        yield Violation(path, kind, "cannot be combined with adapters", REMOVE)
    if any(getattr(block.ffn, "has_expert_variant", False) for block in decoder.blocks):
        rule = "needs experts with plain SwiGLU, without biases, and with weigh: output"
        yield Violation(path, kind, rule, REMOVE)
    if record.scaling == "delayed" and not isinstance(record, Fp8Tensor):
        rule = "needs fp8_tensor, the only kind with a single scale per matrix"
        yield Violation((*path, "scaling"), record.scaling, rule, "current")
    if record.wire == "codes" and (record.has_matrix_scale or record.scale_rule == "fp32"):
        rule = "needs blocks with powers of two as scales: mxfp8, or fp8_block with scales: power"
        yield Violation((*path, "wire"), record.wire, rule, "wide")
    if record.wire == "codes" and not _quantises_experts(decoder):
        rule = "needs experts with quantised products, and the model has none"
        yield Violation((*path, "wire"), record.wire, rule, "wide")
    quantised = quantised_weight_names(decoder)
    if record.hidden == "codes" and not any(name.endswith(".w_in") for name in quantised):
        rule = "needs a feed-forward with quantised products, and the model has none"
        yield Violation((*path, "hidden"), record.hidden, rule, "wide")
    names = [name for name, *_ in _quantisable_weights(decoder)]
    for index, pattern in enumerate(record.keep):
        if not any(matches(name, (pattern,)) for name in names):
            rule = "must match a weight that would otherwise be quantised"
            yield Violation((*path, "keep", index), pattern, rule, nearest_name(pattern, names))
    for name in names:
        pair = name.removesuffix("w_in") + "w_out"
        if name.endswith(".w_in") and matches(name, record.keep) != matches(pair, record.keep):
            rule = "must match both matrices of a feed-forward, or neither"
            nearest = [*record.keep, name.replace("w_in", "*")]
            yield Violation((*path, "keep"), list(record.keep), rule, nearest)
            break
    limit = len(decoder.blocks) - 1
    first = record.keep_first
    last = record.keep_last
    if first + last > limit:
        rule = f"must leave one of the {limit + 1} blocks to quantise"
        values = ("keep_first", first, last) if last <= limit else ("keep_last", last, first)
        field, value, other = values
        yield Violation((*path, field), value, rule, max(0, limit - other))
