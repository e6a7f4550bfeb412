"""What dispatchers ask of a layout, with the nearest value."""

import numpy as np
import pytest

from moefold.config.errors import RunError
from moefold.layers.kinds.gqa import Gqa
from moefold.mesh.config import Sizes
from moefold.model.config import Block, Decoder, Stack
from moefold.moe.config import ExpertChoice, Idle, IdleRouter, Moe, Router
from moefold.moe.dispatch.config import Spread
from moefold.parallel.config import Layout
from moefold.proof.subjects import DENSE, GQA, decoder, moe
from moefold.run import load_run
from moefold.spec.decoder import model_needs

MODEL = model_needs(
    Decoder(
        vocab=64,
        hidden=16,
        stacks=(
            Stack(
                blocks=(
                    Block(
                        attention=Gqa(heads=4, kv_heads=4, head_dim=4),
                        ffn=Moe(width=16, router=Router(experts=8, top_k=2)),
                    ),
                )
            ),
        ),
    )
)


def broken(sizes: str, **dispatch: object) -> list[tuple[tuple[object, ...], object]]:
    """Return path and nearest value of everything that does not fit."""
    layout = Layout(sizes=sizes, dispatch=dispatch)  # type: ignore[arg-type]
    return [(found.path, found.nearest) for found in layout.violations(MODEL)]


@pytest.mark.parametrize("sizes", ["ep2", "etp2", "ep4 etp2"])
def test_local_sends_nothing(sizes: str) -> None:
    assert broken(sizes, kind="local") == [(("dispatch", "kind"), "alltoall")]
    assert broken("", kind="local") == []


@pytest.mark.parametrize(
    ("sizes", "node", "nearest"), [("ep8", 3, 2), ("ep4", 8, 4), ("ep8", 6, 4), ("ep2", 3, 2)]
)
def test_nodes_are_of_equal_size(sizes: str, node: int, nearest: int) -> None:
    assert broken(sizes, kind="two_level", node=node) == [(("dispatch", "node"), nearest)]
    assert broken(sizes, kind="two_level", node=nearest) == []


def test_packages_from_outside_send_over_ep_alone() -> None:
    foreign = {"deep_ep": {}, "hybrid_ep": {}, "nccl_ep": {"max_rows": 8}}
    for kind, more in foreign.items():
        assert broken("ep2 etp2", kind=kind, **more) == [(("dispatch", "kind"), "alltoall_once")]
        assert broken("ep2", kind=kind, **more) == []


def test_numbers_of_ranks_that_deep_ep_has_no_settings_for() -> None:
    for sizes, fits in (("ep2", True), ("ep8", True), ("", True)):
        assert (broken(sizes, kind="deep_ep") == []) is fits
    odd = Layout(sizes="ep32", dispatch={"kind": "deep_ep"}).dispatch  # type: ignore[arg-type]
    (found,) = odd.violations(Sizes(ep=12))
    assert found.nearest == "alltoall_once" and "2, 4, 8, 16, 24" in found.rule


def test_what_refuses_to_run_deterministically_is_refused() -> None:
    asked = ["deterministic=true", "layout.sizes=ep2", "layout.dispatch=deep_ep"]
    with pytest.raises(RunError) as error:
        load_run("tiny", asked)
    assert [(v.path, v.nearest) for v in error.value.violations] == [(("deterministic",), False)]
    assert load_run("tiny", asked[1:]).layout.sizes == "ep2"


@pytest.mark.parametrize(
    ("sizes", "kind", "least"),
    [("ep2", "padded", 128), ("ep2", "spread", 256), ("tp2 ep4", "padded", 32), ("", "spread", 1)],
)
def test_room_below_the_mean_is_refused(sizes: str, kind: str, least: int) -> None:
    """Two copies of each of 128 tokens; on one rank no row needs room."""

    def asked(rows: int) -> list[str]:
        return [f'layout.sizes="{sizes}"', f"layout.dispatch={{kind: {kind}, max_rows: {rows}}}"]

    load_run("tiny", asked(least))
    if sizes:
        with pytest.raises(RunError, match="if routing is perfectly balanced") as error:
            load_run("tiny", asked(least - 1))
        (found,) = error.value.violations
        assert (found.path, found.nearest) == (("layout", "dispatch", "max_rows"), least)


@pytest.mark.parametrize(
    "router",
    [
        IdleRouter(experts=8, top_k=4, idle=Idle(identity=8)),
        ExpertChoice(experts=8, top_k=4, most=2),
    ],
)
def test_room_for_fewer_copies_than_top_k_is_no_fault_where_a_token_may_have_fewer(
    router: Router,
) -> None:
    """Half of the choices compute nothing, or no token keeps more than half of its experts."""
    model = model_needs(decoder(GQA, DENSE, moe(router=router)), 32)
    padded = {"kind": "padded", "max_rows": 40}
    layout = Layout(sizes="ep2", dispatch=padded)  # type: ignore[arg-type]
    assert [found.rule for found in layout.violations(model, 32)] == []


PADDED = ["layout.sizes=ep4", "layout.dispatch={kind: padded, max_rows: 4096}"]


@pytest.mark.parametrize(
    ("overrides", "path", "nearest"),
    [
        ([*PADDED, "layout.offload={pages: {page: 0}}"], "layout.offload.pages.page", 1),
        ([*PADDED, "layout.offload={pages: {load: 0.9}}"], "layout.offload.pages.load", 1.0),
        ([*PADDED, "layout.offload={pages: {spill: 2}}"], "layout.offload.pages.spill", 1.0),
        (
            [*PADDED, "layout={graphs: partial, offload: {pages: {spill: 1}}}"],
            "layout.graphs",
            "none",
        ),
        (
            [*PADDED, "layout.offload={pages: {}, host: {modules: [experts, block]}}"],
            "layout.offload.host.modules",
            ["block"],
        ),
        (["layout.sizes=ep4", "layout.offload={pages: {}}"], "layout.offload.pages", None),
        ([*PADDED[1:], "layout.offload={pages: {}}"], "layout.offload.pages", None),
        (
            [*PADDED, "layout.offload={pages: {}}", "layout.recompute={kind: full}"],
            "layout.offload.pages",
            None,
        ),
        (
            [*PADDED, "layout.offload={pages: {}}", "train.quantise={kind: mxfp8}"],
            "layout.offload.pages",
            None,
        ),
        (["layout.offload={}"], "layout.offload.host", {"modules": ["experts"]}),
    ],
)
def test_pages_that_no_rows_can_have_are_refused(
    overrides: list[str], path: str, nearest: object
) -> None:
    with pytest.raises(RunError) as error:
        load_run("tiny", overrides)
    assert (path, nearest) in [
        (".".join(map(str, v.path)), v.nearest) for v in error.value.violations
    ]


def test_a_split_of_groups_is_stated_where_it_is_needed() -> None:
    two_level = {"kind": "two_level", "node": 2}
    assert ("ep", 2) in Layout(sizes="ep4", dispatch=two_level).split_groups  # type: ignore[arg-type]
    for kind in ("alltoall", "alltoall_once", "allgather"):
        assert ("ep", 2) not in Layout(sizes="ep4", dispatch=kind).split_groups  # type: ignore[arg-type]


def routings(ranks: int, copies: int, chance: np.random.Generator) -> np.ndarray:
    """Return copies [N, source, target] of drawn routings and of uneven ones, dropped ones too."""
    even = np.full((ranks, ranks), copies // ranks)
    own, shifted = np.eye(ranks, dtype=int) * copies, np.roll(np.eye(ranks, dtype=int), 1, 0)
    one = np.zeros((ranks, ranks), int)
    one[:, 0] = copies
    some = [even, own, shifted * copies, one]
    for power in (0.1, 1.0, 10.0):
        shares = chance.dirichlet(np.full(ranks, power), size=(200, ranks))
        some += list((shares * copies * chance.random((200, 1, 1))).astype(int))
    return np.stack(some)


def dealt(counts: np.ndarray) -> np.ndarray:
    """Return copies [N, dealer, target] of routings [N, source, target], each dealt in turn."""
    ends, ranks = counts.cumsum(2), counts.shape[2]
    # Of the places before one, each rank is dealt those of its turn.
    upto_end, upto_start = (
        (at[..., None] - np.arange(ranks) + ranks - 1) // ranks for at in (ends, ends - counts)
    )
    return (upto_end - upto_start).sum(1)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 16])
def test_spread_has_room_for_every_routing(ranks: int) -> None:
    """In which no rank gets, or sends, more rows than are stated; and not for much more."""
    chance, most = np.random.default_rng(ranks), 0.0
    for copies in (1, 7, 64, 1000):
        counts = routings(ranks, copies, chance)
        for routing, got in zip(counts, dealt(counts), strict=True):
            rows = max(routing.sum(0).max(), routing.sum(1).max())
            if rows:
                record = Spread(max_rows=int(rows))
                assert record.dealt_rows(ranks) * ranks >= routing.sum(1).max()
                assert got.max() <= record.rows_per_pair(ranks)
                most = max(most, got.max() / record.rows_per_pair(ranks))
    assert most > 0.5
