"""Every way of sending rows gives what one rank gives, values and gradients."""

import pytest
import torch

from tests.gloo.dispatching import (
    CASES,
    WAYS,
    expected,
    expert_weights,
    gap,
    here,
    open_world,
    routed,
    there_and_back,
)
from tests.gloo.harness import run_ranks

LAYOUTS = {
    "ep2": ("ep2", 2),
    "etp2": ("etp2", 2),
    "ep4": ("ep4", 4),
    "ep2 etp2": ("ep2 etp2", 4),
    "ep4 over tp2": ("tp2 ep4", 4),
    "two copies of ep2": ("ep2", 4),
}
SOME = [
    pytest.param(name, marks=pytest.mark.matrix if name.startswith(("ep4", "two")) else [])
    for name in LAYOUTS
]


def ways_of(sizes: str) -> list[str]:
    """Return the dispatchers that a layout can have."""
    return [way for way in WAYS if way != "two_level" or "ep" in sizes.replace("etp", "")]


def compare(rank: int, sizes: str, ranks: int) -> dict[tuple[str, str], tuple[float, bool]]:
    world = open_world(sizes, ranks)
    if "ep" in sizes.replace("etp", ""):
        world.split("ep", 2)
    weights = here(world, *expert_weights())
    found = {}
    for case in CASES:
        want = expected(case, world)
        for way in ways_of(sizes):
            rows = routed(case, rank)
            ours = there_and_back(WAYS[way], rows, *weights, world)
            again = there_and_back(WAYS[way], rows, *weights, world)
            same = all(torch.equal(ours.named()[n], t) for n, t in again.named().items())
            if ours.overflow is not None:
                assert int(ours.overflow) == 0
            found[case, way] = (gap(ours, want), same)
    return found


@pytest.mark.parametrize("layout", SOME)
def test_every_way_gives_what_one_rank_gives(layout: str) -> None:
    """Uneven and empty ranks, unused experts, drops, padding; NaN where nobody may read."""
    sizes, ranks = LAYOUTS[layout]
    for rank, found in enumerate(run_ranks(compare, ranks, sizes, ranks)):
        assert len(found) == len(CASES) * len(ways_of(sizes))
        # Not `> bound`: that would let a NaN pass.
        broken = {key: gap for key, (gap, _) in found.items() if not gap <= 1e-12}
        assert not broken, (rank, broken)
        assert all(same for _, same in found.values()), "the same bits each time"
