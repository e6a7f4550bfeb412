"""Checks sizes against a number of ranks and a model: all violations and nearest legal values.

The nearest values of one result are legal together.
"""

from collections.abc import Iterator

from moefold.config.errors import Violation
from moefold.mesh.config import EVEN, ORDERS, Order, Sizes
from moefold.mesh.pipeline import Stages
from moefold.mesh.shares import divisors
from moefold.spec.decoder import ModelNeeds

SPLIT_AXES = ("pp", "tp", "cp", "ep", "etp")
"""Axes that split ranks, in the order in which nearest legal sizes are chosen."""


def folding_violations(sizes: Sizes, world: int, order: Order = ORDERS[0]) -> list[Violation]:
    """Return why sizes cannot be applied to ``world`` ranks in a given order."""
    return [*world_violations(sizes, world), *order_violations(sizes, order)]


def size_violations(
    sizes: Sizes,
    model: ModelNeeds,
    world: int | None = None,
    order: Order = ORDERS[0],
    stages: str | None = None,
) -> list[Violation]:
    """Return all violations of requested sizes, each with the nearest legal value.

    ``world`` is the number of ranks, if fixed; ``stages`` are chosen if not given, or ``even``.
    """
    stages = None if stages == EVEN else stages
    parsed = None
    parse_error = ""
    try:
        parsed = None if stages is None else Stages.parse(stages)
    except ValueError as error:
        parse_error = str(error)
    most = max(model.layers, len(parsed.letters) if parsed else 0)
    fits = world is not None and world > 0 and world % sizes.smallest_world == 0
    nearest = nearest_sizes(sizes, model, world if fits else None, most)
    broken = size_rules(sizes, model, most)
    violations = [Violation(("sizes",), sizes.text, rule, nearest.text) for rule in broken]
    if world is not None:
        violations += world_violations(nearest, world, model, most)
    violations += order_violations(nearest, order)
    if parse_error:
        violations.append(Violation(("stages",), stages, parse_error, None))
    if parsed is not None:
        need = nearest.pp * nearest.vpp, model.moe_layers, model.multi_token
        rules = parsed.broken_rules(*need)
        if sum("m" in stage for stage in parsed.letters) > 1:
            rules.append("must have every m in one stage")
        legal = parsed.nearest(*need).text if rules else None
        violations += [Violation(("stages",), stages, rule, legal) for rule in rules]
    return violations


def size_rules(sizes: Sizes, model: ModelNeeds, most: int) -> list[str]:
    """Return the rules that sizes break; ``most`` bounds the number of stages, ``pp * vpp``."""
    rules = []
    if sizes.vpp > 1 and sizes.pp == 1:
        rules.append("vpp needs pp2 or more: virtual stages are parts of a pipeline")
    requested = dict(sizes)
    rules += [need.rule for need in model.units if not need.allows(requested[need.axis])]
    if sizes.pp * sizes.vpp > most:
        rules.append(
            f"pp * vpp ({sizes.pp * sizes.vpp}) must be at most {most}, the number of layers or "
            "of stages in layout.stages"
        )
    return rules


def world_violations(
    sizes: Sizes, world: int, model: ModelNeeds | None = None, most: int | None = None
) -> Iterator[Violation]:
    """Yield a violation if the number of ranks is not a multiple of what both grids need."""
    smallest = sizes.smallest_world
    if world > 0 and world % smallest == 0:
        return
    below = max(world, 0) // smallest * smallest
    above = below + smallest
    nearest = above if below == 0 or above - world < world - below else below
    others = f"{below} or {above}" if below else f"{above}"
    rule = f"must be a multiple of pp * lcm(tp * cp, ep * etp) = {smallest}, such as {others}"
    if world > 0:
        rule += f"; or set layout.sizes to {nearest_sizes(sizes, model, world, most).text!r}"
    yield Violation(("world",), world, rule, nearest)


def order_violations(sizes: Sizes, order: Order) -> Iterator[Violation]:
    """Yield a violation if the grids disagree on which ranks form a stage."""
    attention = sizes.tp * sizes.cp
    experts = sizes.ep * sizes.etp
    if order.endswith("pp") or sizes.pp == 1 or attention == experts:
        return
    rule = (
        f"pp before dp needs tp * cp ({attention}) equal to ep * etp ({experts}), or pp1, so that "
        "attention and experts have the same ranks on a stage"
    )
    yield Violation(("order",), order, rule, ORDERS[0])


def nearest_sizes(
    sizes: Sizes, model: ModelNeeds | None = None, world: int | None = None, most: int | None = None
) -> Sizes:
    """Return the legal sizes nearest to ``sizes``: each axis by ratio, in the order of SPLIT.

    ``most`` bounds the number of stages.
    """
    requested = dict(sizes)
    chosen = dict[str, int]()
    # Schedules with virtual stages need two or more per rank, so pp is reduced for them.
    deepest = most
    if most is not None and sizes.vpp > 1:
        deepest = most // 2 or most
    for axis in SPLIT_AXES:
        if axis == "pp":
            legal = None if deepest is None else range(1, deepest + 1)  # None: all sizes
        else:
            legal = None if model is None else model.legal_sizes(axis)
        if world is not None:
            fitting = [d for d in divisors(world) if legal is None or d in legal]
            legal = [d for d in fitting if world % Sizes(**chosen, **{axis: d}).smallest_world == 0]
        size = requested[axis]
        # The nearest by ratio; in a tie the smaller.
        candidates = legal or (size,)
        chosen[axis] = min(candidates, key=lambda d: (max(d / size, size / d), d))
    virtual = sizes.vpp if most is None else min(sizes.vpp, most // chosen["pp"])
    return Sizes(**chosen, vpp=1 if chosen["pp"] == 1 else virtual)
