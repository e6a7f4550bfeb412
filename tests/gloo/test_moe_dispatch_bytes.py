"""Each way of sending rows sends what its formula says, to the byte."""

import pytest

from moefold.comm.world import World
from tests.gloo import dispatch_bytes as formula
from tests.gloo.dispatch_bytes import Setting
from tests.gloo.dispatching import (
    ROOM,
    WAYS,
    D,
    E,
    expert_weights,
    here,
    open_world,
    routed,
    sources,
    there_and_back,
)
from tests.gloo.harness import run_ranks

CASES = ("dropped", "idle", "one_rank", "top_8")
LAYOUTS = {"ep4": 4, "ep2 etp2": 4}
FORMULAS = {
    "alltoall": formula.alltoall,
    "once": formula.alltoall_once,
    "two_level": formula.two_level,
    "allgather": formula.allgather,
    "padded": lambda s, p, i: formula.padded(s, p, i, ROOM),
    "spread": lambda s, p, i: formula.spread(s, p, i, 3 * ROOM),
}


def setting(case: str, world: World) -> Setting:
    """Return the sizes and routing of a case for the ranks that share this rank's experts."""
    routing = {}
    for rank in sources(world):
        spot = world.folding.expert_coordinates(rank)
        routing[spot.ep, spot.etp] = routed(case, rank).experts_TK.tolist()
    top_k = routed(case, 0).experts_TK.shape[1]
    sizes = world.folding.sizes
    return Setting(sizes.ep, sizes.etp, E, D, top_k, 8, routing)


def sent(rank: int, sizes: str, ranks: int) -> dict[tuple[str, str], tuple[int, int]]:
    """Return bytes recorded and bytes by formula."""
    world = open_world(sizes, ranks)
    world.split("ep", 2)
    spot, weights, found = world.experts, here(world, *expert_weights()), {}
    for case in CASES:
        facts = setting(case, world)
        for way, record in WAYS.items():
            world.recorder.clear()
            there_and_back(record, routed(case, rank), *weights, world)
            want = FORMULAS[way](facts, spot.ep, spot.etp)
            found[case, way] = (sum(total.bytes for total in world.recorder.totals.values()), want)
    return found


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_bytes_are_those_of_the_formula(sizes: str) -> None:
    answers = run_ranks(sent, LAYOUTS[sizes], sizes, LAYOUTS[sizes])
    for rank, found in enumerate(answers):
        broken = {key: pair for key, pair in found.items() if pair[0] != pair[1]}
        assert not broken, (rank, broken)
        assert len(found) == len(CASES) * len(WAYS)
    assert all(any(found[key][0] for found in answers) for key in answers[0])


def first_rows(rank: int) -> tuple[int, int]:
    """Return the rows that this rank sends away, and the distinct ranks of its tokens elsewhere."""
    world = open_world("ep4", 4)
    rows = routed("dropped", rank)
    world.recorder.clear()
    there_and_back(WAYS["once"], rows, *here(world, *expert_weights()), world)
    tokens = next(r for r in world.recorder.last() if r.site.op == "all_to_all")
    away = [{e // 2 for e in token if e < E} - {rank} for token in rows.experts_TK.tolist()]
    return tokens.bytes // (8 * D), sum(map(len, away))


def test_a_token_is_sent_once_to_each_of_its_ranks() -> None:
    answers = run_ranks(first_rows, 4)
    assert all(rows == distinct for rows, distinct in answers)
    assert sum(rows for rows, _ in answers) > 0


def orders(rank: int) -> list[list[tuple[str, int, str]]]:
    """Return the operations of each way in order, by channel and call-site."""
    world = open_world("ep2 etp2", 4)
    world.split("ep", 2)
    found = []
    for way in WAYS.values():
        before = len(world.recorder.last())
        there_and_back(way, routed("idle", rank), *here(world, *expert_weights()), world)
        done = world.recorder.last()[before:]
        found.append([(r.site.group, r.site.op + r.site.direction) for r in done])
    return found  # type: ignore[return-value]


def test_ranks_talk_in_one_order() -> None:
    """A rank without rows, and one with padding alone, take part in everything, like all others."""
    first, *others = run_ranks(orders, 4)
    assert all(other == first for other in others)
    assert all(len(done) > 4 for done in first)
