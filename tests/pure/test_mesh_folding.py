"""Rank groups against nested loops written here, which know no strides."""

import math
import random
import time
from collections import defaultdict
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moefold.config.errors import RunError
from moefold.mesh.config import ORDERS, Order, Sizes
from moefold.mesh.folding import GROUP_KINDS, AttentionCoordinates, ExpertCoordinates, Folding

# The axes that a kind's ranks differ in, restated: in attention's grid, or in the experts'.
ATTENTION = {
    "tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp", "tp_cp": "tp cp", "dp_cp": "dp cp",
    "tp_dp": "tp dp", "tp_pp": "tp pp", "tp_cp_pp": "tp cp pp", "stage": "tp cp dp",
    "world": "tp cp dp pp",
}  # fmt: skip
EXPERTS = {
    "ep": "ep", "etp": "etp", "edp": "edp", "tp_ep": "etp ep", "ep_edp": "ep edp",
    "tp_ep_pp": "etp ep pp",
}  # fmt: skip

# Nodes, GPUs of each, tp, pp, cp, ep: small, odd and thousands, with ep over cp and dp.
ROWS = [
    (1, 1, 1, 1, 1, 1), (1, 2, 2, 1, 1, 1), (1, 2, 1, 2, 1, 1), (1, 2, 1, 1, 2, 2),
    (1, 8, 8, 1, 1, 1), (1, 8, 2, 2, 2, 1), (1, 8, 2, 2, 2, 2), (1, 8, 1, 1, 8, 8),
    (1, 8, 4, 1, 2, 8), (1, 6, 3, 2, 1, 3), (2, 8, 2, 4, 1, 4), (2, 8, 4, 4, 1, 4),
    (3, 8, 2, 3, 1, 4), (3, 8, 1, 3, 2, 8), (4, 8, 4, 2, 2, 16), (4, 8, 2, 8, 1, 2),
    (5, 8, 2, 5, 2, 8), (7, 8, 8, 7, 1, 4), (8, 8, 4, 8, 2, 8), (8, 8, 1, 16, 4, 4),
    (12, 8, 8, 4, 3, 24), (16, 8, 2, 4, 2, 32), (16, 8, 8, 16, 1, 8), (32, 8, 4, 4, 2, 64),
    (32, 8, 1, 8, 1, 32), (48, 8, 8, 12, 2, 16), (64, 8, 2, 16, 4, 32), (80, 8, 8, 10, 1, 64),
    (96, 8, 4, 6, 8, 128), (128, 8, 1, 4, 1, 256), (128, 8, 2, 8, 1, 64), (256, 8, 8, 8, 4, 32),
    (512, 8, 4, 16, 2, 256), (896, 8, 8, 16, 7, 56), (1344, 8, 8, 12, 2, 112),
]  # fmt: skip


def walk(folding: Folding, grid: str) -> Iterator[dict[str, int]]:
    """Count the ranks off one by one, tp within cp within dp within pp (or pp within dp)."""
    sizes, world = folding.sizes, folding.world
    data = world // (sizes.pp * sizes.tp * sizes.cp)
    if grid == "experts":
        data = world // (sizes.pp * sizes.ep * sizes.etp)
    inner = (sizes.cp, sizes.tp) if grid == "attention" else (sizes.ep, sizes.etp)
    names = ("cp", "tp", "dp") if grid == "attention" else ("ep", "etp", "edp")
    for outer in range(sizes.pp if folding.order.endswith("pp") else data):
        for middle in range(data if folding.order.endswith("pp") else sizes.pp):
            pp, dp = (outer, middle) if folding.order.endswith("pp") else (middle, outer)
            for high in range(inner[0]):
                for low in range(inner[1]):
                    yield {"pp": pp, names[2]: dp, names[0]: high, names[1]: low}


def brute(folding: Folding) -> dict[str, set[tuple[int, ...]]]:
    """Every kind of group, by collecting ranks that differ in the kind's axes alone."""
    found: dict[str, set[tuple[int, ...]]] = {}
    for grid, kinds in (("attention", ATTENTION), ("experts", EXPERTS)):
        spots = list(walk(folding, grid))
        for kind, axes in kinds.items():
            others = [axis for axis in spots[0] if axis not in axes.split()]
            members: dict[tuple[int, ...], list[int]] = defaultdict(list)
            for rank, spot in enumerate(spots):
                members[tuple(spot[axis] for axis in others)].append(rank)
            found[kind] = {tuple(ranks) for ranks in members.values()}
    found["embedding"] = {tuple(dict.fromkeys((p[0], p[-1]))) for p in found["pp"]}
    return found


def hold(folding: Folding) -> None:
    """Hold a folding to the brute force: coordinates, groups, and what is shared."""
    for grid, spot_of in (
        ("attention", folding.attention_coordinates),
        ("experts", folding.expert_coordinates),
    ):
        for rank, spot in enumerate(walk(folding, grid)):
            assert spot_of(rank)._asdict() == spot
            assert getattr(folding, grid).rank(spot) == rank
    wanted = brute(folding)
    assert set(wanted) == set(GROUP_KINDS)
    for kind, groups in wanted.items():
        made = folding.groups(kind)
        assert len(made) == len(groups) and set(made) == groups, kind
        assert [ranks[0] for ranks in made] == sorted(ranks[0] for ranks in groups)
    once: dict[tuple[int, ...], set[str]] = defaultdict(set)
    for kind, groups in wanted.items():
        for ranks in groups:
            once[ranks].add(kind)
    for kind, first in folding.first_equal_kinds().items():
        assert all({kind, first} <= once[ranks] for ranks in folding.groups(kind))
    assert sum(
        len(folding.groups(kind)) for kind in set(folding.first_equal_kinds().values())
    ) == len(once)


def foldings(most: int) -> Iterator[Folding]:
    """Sizes drawn by chance, of every number of ranks up to ``most`` alike in the logarithm."""
    chance = random.Random(7)
    while True:
        sizes = {axis: chance.choice((1, 1, 2, 2, 3, 4, 5, 8, 16)) for axis in Sizes.model_fields}
        sizes["vpp"] = 1
        made = Sizes(**sizes)
        times = chance.choice((1, 1, 2, 3, 4, 7, 8, 16, 64))
        order: Order = chance.choice(ORDERS)
        if order == ORDERS[1] and made.pp > 1 and made.tp * made.cp != made.ep * made.etp:
            continue
        if made.smallest_world * times <= most:
            yield Folding(made, made.smallest_world * times, order)


@pytest.mark.parametrize(("nodes", "gpus", "tp", "pp", "cp", "ep"), ROWS)
def test_rows_of_nodes_and_gpus(nodes: int, gpus: int, tp: int, pp: int, cp: int, ep: int) -> None:
    """Groups of the attention grid counted off by loops: tp fastest, then cp, dp, pp."""
    world = nodes * gpus
    folding = Folding(Sizes(tp=tp, pp=pp, cp=cp, ep=ep), world)
    dp = world // (tp * pp * cp)
    assert folding.dp == dp and folding.edp == world // (pp * ep)
    table, rank = {}, 0
    for p in range(pp):
        for d in range(dp):
            for c in range(cp):
                for t in range(tp):
                    table[p, d, c, t] = rank
                    rank += 1
    assert rank == world
    pps, dps, cps, tps = range(pp), range(dp), range(cp), range(tp)
    looped = {
        "tp": [tuple(table[p, d, c, t] for t in tps) for p in pps for d in dps for c in cps],
        "cp": [tuple(table[p, d, c, t] for c in cps) for p in pps for d in dps for t in tps],
        "dp": [tuple(table[p, d, c, t] for d in dps) for p in pps for c in cps for t in tps],
        "pp": [tuple(table[p, d, c, t] for p in pps) for d in dps for c in cps for t in tps],
    }
    for kind, groups in looped.items():
        assert list(folding.groups(kind)) == groups, kind


def test_small_foldings_agree_with_loops() -> None:
    found = foldings(200)
    orders = set()
    for _ in range(150):
        folding = next(found)
        orders.add((folding.order, folding.sizes.pp > 1))
        hold(folding)
    assert len(orders) == 4, "both orders, with and without a pipeline"


@pytest.mark.parametrize(
    ("sizes", "world", "order"),
    [
        ("tp8 cp2 pp4 ep64", 16_384, ORDERS[0]),
        ("tp4 cp2 pp8 ep4 etp2", 8_192, ORDERS[1]),
        ("tp2 cp3 pp5 ep7 etp4", 15_120, ORDERS[0]),
    ],
)
def test_large_foldings_agree_with_loops(sizes: str, world: int, order: Order) -> None:
    hold(Folding(Sizes.parse(sizes), world, order))


def test_a_folding_in_figures() -> None:
    """Experts over what tp and dp are to attention, on two stages."""
    folding = Folding(Sizes.parse("tp2 pp2 ep4"), 8)
    assert (folding.dp, folding.edp) == (2, 1)
    assert folding.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert folding.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert folding.groups("ep") == ((0, 1, 2, 3), (4, 5, 6, 7)) == folding.groups("stage")
    assert folding.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7)) == folding.groups("embedding")
    assert folding.groups("edp") == tuple((rank,) for rank in range(8))
    assert folding.attention_coordinates(6) == AttentionCoordinates(pp=1, dp=1, cp=0, tp=0)
    assert folding.expert_coordinates(6) == ExpertCoordinates(pp=1, edp=0, ep=2, etp=0)
    assert folding.rank_on_stage(6, 0) == 2
    assert folding.group("ep", 5) == folding.group("stage", 5) == (4, 5, 6, 7)


def test_pp_before_dp_puts_stages_next_to_each_other() -> None:
    folding = Folding(Sizes.parse("tp2 pp2 ep2"), 8, "tp-cp-ep-pp-dp")
    assert folding.groups("pp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert folding.groups("stage") == ((0, 1, 4, 5), (2, 3, 6, 7))


def test_one_group_alone_is_the_one_among_all() -> None:
    sizes = Sizes.parse("tp2 cp2 pp3 ep2 etp3")
    for rank in range(72):
        alone, whole = Folding(sizes, 72), Folding(sizes, 72)
        for kind in GROUP_KINDS:
            found = [ranks for ranks in whole.groups(kind) if rank in ranks]
            assert [alone.group(kind, rank)] == (found or [()])
            assert bool(found) or (
                kind == "embedding" and alone.attention_coordinates(rank).pp == 1
            )


def test_a_hundred_thousand_ranks_in_seconds() -> None:
    """Every kind of group: a quarter of a second on a quiet core.

    Comparing each rank with each would take minutes.
    """
    start = time.process_time()
    folding = Folding(Sizes.parse("tp8 cp2 pp5 ep50 etp2"), 100_000)
    assert all(folding.groups(kind) for kind in GROUP_KINDS)
    assert time.process_time() - start < 10


def test_one_rank_of_a_million_is_found_at_once() -> None:
    folding = Folding(Sizes.parse("tp8 pp16 ep64"), 2**20)
    start = time.process_time()
    assert len(folding.group("ep", 777_777)) == 64 and len(folding.group("tp", 777_777)) == 8
    assert time.process_time() - start < 2


@pytest.mark.parametrize("world", [0, -8, 7, 12, 23])
def test_a_number_of_ranks_that_does_not_fit(world: int) -> None:
    with pytest.raises(RunError) as caught:
        Folding(Sizes.parse("tp2 pp2 ep4"), world)
    (item,) = caught.value.violations
    assert item.path == ("world",) and item.nearest > 0 and item.nearest % 8 == 0
    assert abs(item.nearest - world) == min(abs(8 * n - world) for n in range(1, 5))


@given(
    st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.integers(1, 4)
)
def test_the_smallest_world(tp: int, cp: int, ep: int, etp: int, pp: int) -> None:
    """No fewer ranks than ``pp * lcm(tp * cp, ep * etp)`` hold both grids, and those do."""
    sizes = Sizes(tp=tp, cp=cp, ep=ep, etp=etp, pp=pp)
    fits = (n for n in range(1, 10**6) if n % (pp * tp * cp) == 0 and n % (pp * ep * etp) == 0)
    smallest = next(fits)
    assert sizes.smallest_world == smallest == pp * math.lcm(tp * cp, ep * etp)
    assert Folding(sizes, smallest).world == smallest


def test_grids_that_disagree_on_stages_are_refused() -> None:
    with pytest.raises(RunError, match="tp \\* cp \\(2\\) equal to ep \\* etp \\(4\\)") as caught:
        Folding(Sizes.parse("tp2 pp2 ep4"), 8, "tp-cp-ep-pp-dp")
    assert caught.value.violations[0].nearest == ORDERS[0]
    for sizes in ("tp2 ep4", "tp4 pp2 ep2 etp2"):
        assert Folding(Sizes.parse(sizes), 8, "tp-cp-ep-pp-dp").order == ORDERS[1]


def test_what_is_not_there_is_said() -> None:
    folding = Folding(Sizes.parse("tp2"), 4)
    with pytest.raises(ValueError, match="ranks run from 0 to 3"):
        folding.attention_coordinates(4)
    with pytest.raises(ValueError, match="no kind of group is called 'xp'"):
        folding.groups("xp")
    with pytest.raises(ValueError, match="dp 2: this axis runs from 0 to 1"):
        folding.attention.rank(AttentionCoordinates(0, 2, 0, 0)._asdict())
