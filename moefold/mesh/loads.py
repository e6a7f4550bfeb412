"""Splits of a sequence of weighted layers into stages, so that the heaviest rank is lightest."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

HALVINGS = 60
"""Halvings of the interval that contains the least possible load: all digits of a double."""
EQUAL = 1e-9
"""Relative difference of loads that differ by rounding only."""


def lightest_split(layers: Sequence[float], stages: int, first: float, last: float) -> list[int]:
    """Return the number of layers of each stage, so that the heaviest stage is lightest.

    The exact minimum; among such splits that of the least sum of squared loads, and of these one
    whose later stages have more layers. Stages may be empty.

    Args:
        layers: weight of each layer, in order.
        stages: number of stages.
        first: weight that the first stage has besides.
        last: weight that the last stage has besides.
    """
    total = first + sum(layers) + last
    low = 0.0
    high = total
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _fits(layers, stages, first, last, middle):
            high = middle
        else:
            low = middle
    return _even_split(layers, stages, first, last, high * (1 + EQUAL))


def _fits(layers: Sequence[float], stages: int, first: float, last: float, most: float) -> bool:
    """Return whether no stage need weigh more than ``most``: each takes as many as it can."""
    load = first
    used = 1
    for weight in layers:
        if load + weight > most:
            used += 1
            load = 0.0
        load += weight
        if load > most or used > stages:
            return False
    if used < stages:
        load = 0.0  # the last stage takes no layer, as others took all
    return first <= most and load + last <= most


def _even_split(
    layers: Sequence[float], stages: int, first: float, last: float, most: float
) -> list[int]:
    """Return the split of least sum of squared loads whose stages weigh at most ``most``."""
    start = [0.0, *accumulate(layers)]
    ends = range(len(layers) + 1)
    # For each number of layers in the stages so far: the sum of squares, and the splits' starts.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for stage in range(stages):
        besides = first if stage == 0 else 0.0
        if stage == stages - 1:
            besides += last
        reached = dict[int, tuple[float, tuple[int, ...]]]()
        for begin, (squares, bounds) in sorted(best.items()):
            for end in ends[begin:]:
                load = start[end] - start[begin] + besides
                if load > most:
                    break
                sum_ = squares + load**2
                if end not in reached or sum_ < reached[end][0] * (1 - EQUAL):
                    reached[end] = sum_, (*bounds, end)
        best = reached
    _, bounds = best[len(layers)]
    return [end - begin for begin, end in pairwise(bounds)]


def leveled_split(
    layers: Sequence[float], counts: Sequence[int], rank: Sequence[int], first: float, last: float
) -> list[int]:
    """Return a split with several stages per rank, near ``counts`` but with lighter ranks.

    One layer at a time is taken from a stage of the heaviest rank and given to one of the lightest,
    which shifts the stages between them, as long as that makes the heaviest rank lighter.

    Args:
        layers: weight of each layer, in order.
        counts: number of layers of each stage to begin with.
        rank: rank of each stage.
        first: weight that the first stage has besides.
        last: weight that the last stage has besides.
    """

    def loads(split: Sequence[int]) -> list[float]:
        return rank_loads(layers, split, rank, first, last)

    def moved() -> Iterator[list[int]]:
        """Yield the splits with one layer moved from the heaviest to the lightest rank."""
        heavy = by_rank.index(max(by_rank))
        light = by_rank.index(min(by_rank))
        takers = [k for k, owner in enumerate(rank) if owner == light]
        givers = [k for k, owner in enumerate(rank) if owner == heavy and best[k]]
        for giver in givers:
            for taker in takers:
                changed = list(best)
                changed[giver] -= 1
                changed[taker] += 1
                yield changed

    best = list(counts)
    while True:
        by_rank = loads(best)
        lightest = min(moved(), key=lambda split: max(loads(split)), default=best)
        if max(loads(lightest)) >= max(by_rank) * (1 - EQUAL):
            return best
        best = lightest


def rank_loads(
    layers: Sequence[float], counts: Sequence[int], rank: Sequence[int], first: float, last: float
) -> list[float]:
    """Return the load of each rank."""
    start = [0.0, *accumulate(layers)]
    by_rank = [0.0] * (max(rank) + 1)
    by_rank[rank[0]] += first
    by_rank[rank[-1]] += last
    for owner, (begin, end) in zip(rank, pairwise((0, *accumulate(counts))), strict=True):
        by_rank[owner] += start[end] - start[begin]
    return by_rank
