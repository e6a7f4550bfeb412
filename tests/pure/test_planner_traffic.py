"""What ranks send in a step: closed forms, and what must hold whatever the layout."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from moefold.layers.config import Full, Gathered, Mixed, Ulysses
from moefold.layers.kinds.gqa import Gqa
from moefold.mesh.config import Sizes
from moefold.model.config import Block, Decoder, Stack
from moefold.moe.config import Groups, Moe, Router
from moefold.parallel.config import Layout
from moefold.planner.case import Case
from moefold.planner.hardware import parse_cluster
from tests.planning import relaid
from tests.traffic.calls import BACKWARD, FORWARD
from tests.traffic.experts import expert, spread
from tests.traffic.step import tensor, traffic

GQA = Gqa(heads=8, kv_heads=4, head_dim=16)
MOE = Moe(width=64, router=Router(experts=16, top_k=4))
LAYERS, HIDDEN, SEQ, MICRO = 8, 128, 64, 8


def case(text: str, world: int = 16, **changes: Any) -> Case:
    sizes = Sizes.parse(text)
    dp = world // (sizes.pp * sizes.cp * sizes.tp)
    stack = Stack(repeat=LAYERS, blocks=(Block(attention=GQA, ffn=MOE),))
    one = Case(
        Decoder(vocab=512, hidden=HIDDEN, stacks=(stack,)),
        SEQ,
        MICRO * dp,
        1,
        replace(parse_cluster(f"h100x{world}"), domain=changes.pop("domain", 8)),
        Layout(sizes=text),
        1.0,
    )
    return relaid(one, **changes)


def total(one: Case, rank: int = 0, **want: str) -> float:
    calls = traffic(one, rank)
    return sum(c.total for c in calls if all(getattr(c, k) == v for k, v in want.items()))


def test_one_rank_sends_nothing() -> None:
    assert traffic(case("", world=1, dispatch="local"), 0) == ()


def test_exchange_of_copies_by_hand() -> None:
    """Every copy but those for experts here, as a row and its weight; results come back as rows."""
    one = case("ep4", world=4)
    sent = SEQ * 4 * 3 / 4 * LAYERS * MICRO
    assert total(one, group="ep", part="dispatch", direction=FORWARD) == sent * (2 * HIDDEN + 4)
    assert total(one, group="ep", part="combine", direction=FORWARD) == sent * 2 * HIDDEN
    assert total(one, group="ep", direction=FORWARD) == total(one, group="ep", direction=BACKWARD)


def test_rows_of_tensor_ranks_by_hand() -> None:
    """Rows are gathered for attention and given back as scattered sums, and so is backward."""
    one = case("tp4", world=4, dispatch="local")
    row = SEQ // 4 * HIDDEN * 2
    calls = [c for c in tensor(one, 0) if c.part == "attention"]
    assert [c.bytes for c in calls] == [3 * row] * 4
    assert [c.op for c in calls] == ["all_gather", "reduce_scatter"] * 1 + [
        "reduce_scatter",
        "all_gather",
    ]
    assert {c.count for c in calls} == {LAYERS * MICRO}


def test_stages_send_what_neighbours_take() -> None:
    """As many outputs as micro-batches to the next stage, and as many gradients back."""
    one = case("pp4 vpp2", world=4, dispatch="local")
    row = SEQ * HIDDEN * 2
    sent = [total(one, rank, group="pp") / row for rank in range(4)]
    # Seven borders between eight stages, each crossed by every micro-batch both ways.
    assert sum(sent) == 2 * 7 * MICRO
    assert sent == [24, 32, 32, 24]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_sums_and_gathers_of_copies_by_hand(zero: int) -> None:
    one = case("ep4", world=8, zero=zero)
    experts = LAYERS * 3 * 16 * 64 * HIDDEN / 4  # of each layer a multiple of the alignment
    reduced = {0: 2, 1: 1, 2: MICRO, 3: MICRO}[zero] * experts * 4 / 2
    gathered = {0: 0, 1: 1, 2: 1, 3: 2 * MICRO}[zero] * experts * 2 / 2
    assert total(one, group="edp") == reduced + gathered


def test_recompute_repeats_forward_exchanges_alone() -> None:
    plain = case("tp2 ep4", world=8)
    again = relaid(plain, recompute=Full())
    for group in ("tp", "ep"):
        parts = {"tp": "attention", "ep": "dispatch"}
        want = {"group": group, "part": parts[group]}
        forward = total(plain, direction=FORWARD, **want)
        assert total(again, direction=FORWARD, **want) == 2 * forward
        assert total(again, direction=BACKWARD, **want) == total(plain, direction=BACKWARD, **want)


def test_a_token_lies_on_as_many_places_as_its_choices_do() -> None:
    """All choices of four out of sixteen, counted one by one."""
    router, each = MOE.router, 4
    chosen = [set(c) for c in product(range(16), repeat=4) if list(c) == sorted(set(c))]
    places = [len({e // each for e in one}) for one in chosen]
    assert spread(MOE, 4) == pytest.approx(sum(places) / len(places))
    assert spread(MOE, 1) == 1
    limited = router.model_copy(update={"groups": Groups(count=4, keep=2)})
    assert spread(MOE.model_copy(update={"router": limited}), 4) < 2


def test_fewer_rows_cross_where_they_are_sent_once() -> None:
    """One row per rank is less than one per copy, and one per node is less across nodes."""
    sent = {
        kind: sum(c.total for c in expert(case("ep8", dispatch=kind, domain=4), 0))
        for kind in ("alltoall", "alltoall_once", "allgather")
    }
    assert sent["alltoall_once"] < sent["alltoall"] < sent["allgather"]
    two = case("ep8", dispatch="two_level", domain=4)
    across = total(two, group="ep outer 4", direction=FORWARD, part="combine")
    plain = total(case("ep8"), group="ep", direction=FORWARD, part="combine")
    assert 0 < across < plain / 2


def test_context_ranks_send_keys_and_values() -> None:
    one = case("cp4", world=4, dispatch="local")
    keys = SEQ / 4 * 2 * 4 * 16 * 2
    ring = [total(one, rank, group="cp", direction=FORWARD) for rank in range(4)]
    # Of a zigzag, later ranks see the first piece of earlier ones; earlier ranks see both.
    assert ring == [(3 + rank) / 2 * keys * LAYERS * MICRO for rank in range(4)]
    gathered = relaid(one, context=Gathered())
    assert total(gathered, group="cp", direction=FORWARD) == 3 * keys * LAYERS * MICRO
    heads = relaid(one, context=Ulysses())
    every = SEQ / 4 * 2 * (4 + 8) * 16 * 2 * 3 / 4
    assert total(heads, group="cp", direction=FORWARD) == every * LAYERS * MICRO
    mixed = relaid(one, context=Mixed(heads=2))
    assert total(mixed, group="cp inner 2", direction=FORWARD) == every * 2 / 3 * LAYERS * MICRO
    # Two pairs go round: the rows of one are the first piece, or both, of the other.
    round_ = [total(mixed, rank, group="cp outer 2", direction=FORWARD) for rank in range(4)]
    assert round_ == [keys / 2 * LAYERS * MICRO * n for n in (1, 1, 2, 2)]
