"""What a model and a number of ranks allow, said with what would be legal, and in run files."""

import itertools
import random
import time
from typing import Any

import pytest

from moefold.config.base import to_dict
from moefold.config.check import check
from moefold.config.errors import RunError
from moefold.layers.config import ATTENTION
from moefold.layers.kinds.dense import Dense
from moefold.layers.kinds.gqa import Gqa
from moefold.layers.kinds.mla import Mla
from moefold.mesh.config import ORDERS, Order, Sizes
from moefold.mesh.legality import nearest_sizes, size_violations
from moefold.mesh.shares import divisors
from moefold.model.config import Block, Decoder, Stack
from moefold.moe.config import Moe, Router, Shared
from moefold.run import Run, load_run
from moefold.spec.decoder import ModelNeeds, model_needs
from moefold.spec.layer import Units
from tests.mutations import Judge, mutations, repair

GQA = Gqa(heads=12, kv_heads=4, head_dim=16)
MIXTURE = Moe(width=96, router=Router(experts=24, top_k=2), shared=Shared(width=80))
DECODER = Decoder(
    vocab=2000,
    hidden=64,
    stacks=(
        Stack(blocks=(Block(attention=GQA, ffn=Dense(width=200)),)),
        Stack(repeat=5, blocks=(Block(attention=GQA, ffn=MIXTURE),)),
    ),
)
MODEL = model_needs(DECODER, seq=120)


def legal(tp: int, cp: int, pp: int, vpp: int, ep: int, etp: int) -> bool:
    """The rules for the model above, restated as plainly as can be."""
    dims = (2000, 12, 4, 200, 80)
    return (
        all(dim % tp == 0 for dim in dims)
        and (cp == 1 or 120 % (2 * cp) == 0)
        and 24 % ep == 0
        and 96 % etp == 0
        and pp * vpp <= 6
        and (pp > 1 or vpp == 1)
    )


def test_what_a_model_asks() -> None:
    asked = {(need.axis, need.number) for need in MODEL.units}
    assert asked == {
        ("tp", 2000), ("tp", 12), ("tp", 4), ("tp", 200), ("tp", 80),
        ("cp", 60), ("ep", 24), ("etp", 96),
    }  # fmt: skip
    assert MODEL.moe_layers == (False, True, True, True, True, True)


def test_what_latent_attention_asks() -> None:
    block = Block(attention=Mla(heads=6), ffn=Dense(width=64))
    model = model_needs(Decoder(vocab=64, hidden=8, stacks=(Stack(blocks=(block,)),)))
    assert {(n.axis, n.number) for n in model.units} == {
        ("tp", 64), ("tp", 6), ("ep", 1), ("etp", 1),
    }  # fmt: skip
    found = size_violations(Sizes.parse("ep2"), model)
    assert [(v.rule, v.nearest) for v in found] == [("ep needs layers with experts", "")]


def test_a_kind_from_outside_brings_its_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Windowed(Gqa):
        """Attention of another package."""

        def units(self, hidden: int) -> tuple[Units, ...]:
            return (Units("cp", 9, "windows"),) if self.heads == 9 else super().units(hidden)

    monkeypatch.setitem(ATTENTION.kinds, "windowed", Windowed)
    found = []
    for heads in (8, 9):
        attention = Windowed(heads=heads, kv_heads=heads, head_dim=8)
        stack = Stack(blocks=(Block(attention=attention, ffn=Dense(width=64)),))
        decoder = Decoder(vocab=64, hidden=8, stacks=(stack,))
        found.append({need[:2] for need in model_needs(decoder).units})
    assert ("tp", 8) in found[0]
    assert ("cp", 9) in found[1] and ("tp", 9) not in found[1]


def test_legal_sizes_are_those_that_break_no_rule() -> None:
    """All of a few sizes of each axis, and what is suggested is legal and nearest by one axis."""
    wanted = itertools.product(
        (1, 2, 3, 4, 5), (1, 2, 7, 12), (1, 2, 3, 7), (1, 2, 4), (1, 5, 8), (1, 3, 9)
    )
    count = 0
    for tp, cp, pp, vpp, ep, etp in wanted:
        sizes = Sizes(tp=tp, cp=cp, pp=pp, vpp=vpp, ep=ep, etp=etp)
        found = size_violations(sizes, MODEL)
        assert bool(found) != legal(tp, cp, pp, vpp, ep, etp), sizes
        near = Sizes.parse(found[0].nearest) if found else sizes
        assert {item.nearest for item in found} <= {near.text}
        assert legal(**dict(near)), (sizes, near)
        for axis in ("tp", "cp", "ep", "etp"):
            kept = {**dict.fromkeys(Sizes.model_fields, 1), axis: dict(sizes)[axis]}
            assert not legal(**kept) or dict(near)[axis] == dict(sizes)[axis], (sizes, near)
        count += bool(found)
    assert count > 500


def test_every_broken_rule_is_listed() -> None:
    found = size_violations(Sizes.parse("tp3 cp7 pp7 vpp2 ep5 etp9"), MODEL, world=100)
    assert sorted(item.rule for item in found if item.path == ("sizes",)) == [
        "cp must be 1, or 2 * cp must divide the sequence length (120)",
        "ep must divide the number of experts (24)",
        "etp must divide the expert width (96)",
        "pp * vpp (14) must be at most 6, the number of layers or of stages in layout.stages",
        "tp must divide the feed-forward width (200)",
        "tp must divide the number of key-value heads (4)",
        "tp must divide the shared expert width (80)",
    ]
    (near,) = {item.nearest for item in found if item.path == ("sizes",)}
    assert near == "tp4 cp6 pp3 vpp2 ep6 etp8"
    (world,) = [item for item in found if item.path == ("world",)]
    assert world.nearest == Sizes.parse(near).smallest_world == 144


def test_together_the_nearest_are_legal() -> None:
    """Whatever is asked, of whichever number of ranks, order and stages."""
    chance = random.Random(3)
    seen = set()
    for _ in range(600):
        sizes = Sizes(**{a: chance.choice((1, 1, 2, 3, 4, 6, 8)) for a in Sizes.model_fields})
        world = chance.choice((1, 6, 8, 12, 24, 48, 96, 1000))
        order: Order = chance.choice(ORDERS)
        stages = chance.choice(
            (None, None, "Ettt|tttL", "Et|t|t|tttL", "E||t*6|L", "E(t", "Edx|x*4L")
        )
        found = size_violations(sizes, MODEL, world, order, stages)
        seen |= {(item.path[0], bool(found)) for item in found}
        mended: dict[Any, Any] = {"sizes": sizes.text, "world": world, "order": order}
        mended |= {"stages": stages} | {item.path[0]: item.nearest for item in found}
        near = Sizes.parse(mended["sizes"])
        again = size_violations(near, MODEL, mended["world"], mended["order"], mended["stages"])
        assert not again, (sizes.text, world, order, stages, found, mended, again)
    assert {path for path, _ in seen} == {"sizes", "world", "order", "stages"}


def test_sizes_that_fit_the_ranks_still_do_when_mended() -> None:
    """ep 5 does not divide 24 experts, 6 does; 20 ranks have room for 4 and not for 6."""
    for world, near in ((None, "tp2 ep6"), (30, "tp2 ep6"), (20, "tp2 ep4"), (10, "tp2 ep2")):
        (item,) = size_violations(Sizes.parse("tp2 ep5"), MODEL, world)
        assert item.nearest == near


def test_ranks_that_do_not_fit_are_told_what_does() -> None:
    (item,) = size_violations(Sizes.parse("tp4 pp2 ep8"), MODEL, world=24)
    assert item.value == 24 and item.nearest == 16 and item.id
    assert "= 16, such as 16 or 32; or set layout.sizes to 'tp4 pp2 ep6'" in item.rule


def test_odd_sequences_are_not_cut() -> None:
    model = model_needs(DECODER, seq=121)
    assert nearest_sizes(Sizes.parse("cp2"), model) == Sizes()
    assert size_violations(Sizes.parse("cp2"), model_needs(DECODER)) == [], (
        "a length that is not known"
    )


def test_huge_sizes_are_refused_at_once() -> None:
    text = "tp999983 cp999983 pp999983 vpp999983 ep999983"
    start = time.process_time()
    found = size_violations(Sizes.parse(text), MODEL, world=10**12, stages="EttttttL")
    assert {item.nearest for item in found if item.path == ("sizes",)} == {"tp4 cp60 pp3 vpp2 ep24"}
    assert time.process_time() - start < 10, "numbers are walked through one by one"


def test_more_ranks_than_any_machine_has_are_refused() -> None:
    for size in ("1000001", "9" * 5000):
        with pytest.raises(ValueError, match="is more than 1,000,000 ranks"):
            Sizes.parse(f"pp2 tp{size}")


def test_divisors() -> None:
    for number in (1, 2, 36, 97, 360):
        assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


# ------------------------------------------------------------------------------ run files


def demo(**layout: Any) -> dict[str, Any]:
    """The demo recipe with a layout: 4 layers of 4 heads, 8 experts of width 128, 256 tokens.

    Its step is in two micro-batches, as virtual stages ask.
    """
    data = to_dict(load_run("demo"))
    data["train"]["micro_batch"] = 4
    data["layout"] |= layout
    return data


@pytest.mark.parametrize(
    "sizes",
    ["tp2 pp2 ep4", "tp4 ep8", "cp4 ep2", "ep8 etp2", "pp2 vpp2", "cp128", "pp4", "  ", "tp2 cp2"],
)
def test_a_run_may_have_a_layout(sizes: str) -> None:
    assert check(Run, demo(sizes=sizes)).violations == ()


@pytest.mark.parametrize(
    ("layout", "path", "rule", "near"),
    [
        ({"sizes": "tp3 ep4"}, "sizes", "must divide the number of attention heads (4)", "tp4 ep4"),
        ({"sizes": "tp8"}, "sizes", "tp must divide the number of key-value heads (4)", "tp4"),
        ({"sizes": "ep16"}, "sizes", "ep must divide the number of experts (8)", "ep8"),
        ({"sizes": "etp3"}, "sizes", "etp must divide the expert width (128)", "etp4"),
        ({"sizes": "cp3"}, "sizes", "2 * cp must divide the sequence length (256)", "cp4"),
        ({"sizes": "pp8"}, "sizes", "pp * vpp (8) must be at most 4", "pp4"),
        ({"sizes": "pp2 vpp4"}, "sizes", "pp * vpp (8) must be at most 4", "pp2 vpp2"),
        ({"sizes": "vpp2"}, "sizes", "vpp needs pp2 or more", ""),
        ({"sizes": "tp2 tp4"}, "sizes", "must name each axis once", "tp4"),
        (
            {"sizes": "tp2 pp2", "order": "tp-cp-ep-pp-dp"},
            "order", "same ranks on a stage", "tp-cp-ep-dp-pp",
        ),
        ({"sizes": "pp2", "stages": "Ett|t|tL"}, "stages", "pp * vpp (2) stages", "Ett|ttL"),
        ({"sizes": "pp2", "stages": "Ett|tL"}, "stages", "the model's 4 layers", "Ett|ttL"),
        ({"sizes": "pp2", "stages": "Ed|t*3L"}, "stages", "layer 0 has experts", "Et|t*3L"),
        ({"sizes": "pp2", "stages": "E(tt|ttL"}, "stages", "'(' has no ')'", None),
        ({"stages": "Ett|ttL"}, "stages", "pp * vpp (1) stages", "Et*4L"),
    ],
)  # fmt: skip
def test_a_run_that_has_none_is_told_what_is_near(
    layout: dict[str, Any], path: str, rule: str, near: Any
) -> None:
    verdict = check(Run, demo(**layout))
    (item,) = verdict.violations
    assert item.path == ("layout", path) and rule in item.rule
    assert item.nearest == near
    assert check(Run, repair(Run, demo(**layout), verdict.violations)).record is not None


def test_a_stage_may_be_empty_where_it_is_said() -> None:
    assert check(Run, demo(sizes="pp8", stages="E|t|t||t|t||L")).violations == ()
    (item,) = check(Run, demo(sizes="pp16", stages="E|t|t||t|t||L")).violations[:1]
    assert item.path == ("layout", "sizes") and item.nearest == "pp8"


def test_a_layout_is_refused_where_the_run_is_loaded() -> None:
    with pytest.raises(RunError, match=r"layout\.sizes = 'tp3'.*\n.*attention heads"):
        load_run("demo", ["layout.sizes=tp3"])


@pytest.mark.parametrize(
    "layout",
    [
        {"sizes": "tp2 cp2 pp2 vpp2 ep4 etp2"},
        {"sizes": "tp4 pp2 ep2 etp2", "order": "tp-cp-ep-pp-dp", "stages": "Et*3|tL"},
    ],
)
def test_a_model_that_moves_under_a_layout(layout: dict[str, Any]) -> None:
    """Every number of the model and the data, moved: what is suggested is legal together."""

    def judged(raw: Any) -> Any:
        verdict = check(Run, raw)
        if verdict.record is None:
            raise RunError(verdict.violations, raw)
        return verdict.record

    data = demo(**layout)
    judge = Judge(Run, judged, data)
    told = set()
    for mutation in list(mutations(Run, data))[::9]:
        if mutation.path[0] in ("model", "layout") or mutation.path == ("data", "seq"):
            told |= {item.path for item in judge(mutation)}
    assert ("layout", "sizes") in told


def test_models_from_recipes_state_needs() -> None:
    """Both kinds of attention, dense and shared widths of a published shape."""
    run = load_run("deepseek_v3")
    model: ModelNeeds = model_needs(run.decoder, 4096)
    assert {("tp", 128), ("ep", 256), ("etp", 2048), ("tp", 18432), ("tp", 2048)} <= {
        need[:2] for need in model.units
    }
    assert model.layers == 61 and model.moe_layers.index(True) == 3
    found = size_violations(
        Sizes.parse("tp2 pp16 vpp2 ep64"), model, 1024, stages="Ed*3|(xx|)*29|L"
    )
    assert found == []
