"""``moefold explain --layout``: grids, stages, experts and groups as a person and a program see."""

import json
import re
from typing import Any

import pytest

from moefold.cli.explain import format_groups, format_ranks
from moefold.cli.main import main
from moefold.mesh.config import Sizes
from moefold.mesh.folding import GROUP_KINDS, Folding


def said(capsys: Any, *words: str, status: int = 0) -> str:
    """What ``explain demo`` prints, the run itself left out."""
    assert main(["explain", "demo", "--given", *words]) == status
    return capsys.readouterr().out.partition("derived values")[2]


def test_grids_are_drawn(capsys: Any) -> None:
    """A rank in each cell: rows are pp and dp, columns what lies within."""
    lines = [
        " ".join(line.split()) for line in said(capsys, "--layout", "tp2 pp2 ep4").splitlines()
    ]
    start = lines.index("attention: pp2 dp2 cp1 tp2")
    assert lines[start + 1 : start + 6] == [
        "tp0 tp1", "pp0 dp0 0 1", "pp0 dp1 2 3", "pp1 dp0 4 5", "pp1 dp1 6 7",
    ]  # fmt: skip
    start = lines.index("experts: pp2 edp1 ep4 etp1")
    assert lines[start + 1 : start + 4] == ["ep0 ep1 ep2 ep3", "pp0 0 1 2 3", "pp1 4 5 6 7"]
    start = lines.index("stages: Ett|ttL")
    assert lines[start + 2 : start + 4] == ["pp0 embedding, layers 0–1", "pp1 layers 2–3, loss"]
    start = lines.index("experts of a layer, by expert-parallel rank")
    assert lines[start + 1 : start + 5] == ["ep0 0–1", "ep1 2–3", "ep2 4–5", "ep3 6–7"]
    rows = {
        line.split()[0]: line
        for line in lines
        if line.split()[:1] and line.split()[0] in GROUP_KINDS
    }
    assert set(rows) == set(GROUP_KINDS), "every kind of group"
    assert rows["tp"].startswith("tp 2 4 0–1 | 2–3 | 4–5 | 6–7 ")
    assert "as tp_dp" in rows["ep"] and "each rank alone" in rows["cp"]


def test_a_program_gets_every_rank(capsys: Any) -> None:
    assert main(["explain", "demo", "--layout", "tp2 pp2 ep4", "--world", "16", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)["layout"]
    folding = Folding(Sizes.parse("tp2 pp2 ep4"), 16)
    assert answer["groups"] == {k: [list(g) for g in folding.groups(k)] for k in GROUP_KINDS}
    assert answer["grids"]["experts"] == {"etp": 1, "ep": 4, "edp": 2, "pp": 2}
    assert (answer["world"], answer["dp"], answer["edp"]) == (16, 4, 2)
    assert answer["violations"] == [] and answer["stages"]["text"] == "Ett|ttL"
    assert answer["experts"] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_what_is_not_legal_is_drawn_and_listed(capsys: Any) -> None:
    """All rules that the model breaks, and what all of them together leave near."""
    text = said(capsys, "--layout", "tp3 pp8 ep5", status=2)
    assert "attention: pp8 dp5 cp1 tp3" in text and "groups of 120 ranks" in text
    listed = text.partition("not legal: tp3 pp8 ep5 on 120 ranks")[2]
    rules = ("attention heads (4)", "key-value heads (4)",
             "the number of experts (8)", "pp * vpp (8) must be at most 4")  # fmt: skip
    assert all(rule in listed for rule in rules)
    assert listed.count("nearest: 'tp4 pp4 ep4'") == listed.count("nearest") == len(rules)
    assert main(["explain", "demo", "--layout", "tp3 pp8 ep5", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)["layout"]["violations"]
    assert len(found) == len(rules)
    assert {(*item["path"], item["nearest"]) for item in found} == {
        ("layout", "sizes", "tp4 pp4 ep4")
    }


def test_ranks_that_do_not_fit(capsys: Any) -> None:
    """No grid can be drawn; the nearest number is said."""
    text = said(capsys, "--layout", "tp2 pp2 ep4", "--world", "12", status=2)
    assert "attention:" not in text and "stages: Ett|ttL" in text
    assert "world = 12" in text and "nearest: 8" in text and "8 or 16" in text


def test_other_parts_of_an_illegal_layout_are_kept(capsys: Any) -> None:
    """Stages and order of the run stay what they are, and are listed too."""
    words = ["layout.sizes=pp2", "layout.stages=Et|t*3L", "layout.order=tp-cp-ep-pp-dp"]
    assert "stages: Et|t*3L" in said(capsys, *words)
    text = said(capsys, "--layout", "tp2 pp3", *words, status=2)
    assert "pp * vpp (3) stages, not 2" in text and "same ranks on a stage" in text
    assert "attention:" not in text and "layout      tp2 pp3" in text


def test_a_stage_of_one_layer_holds_a_layer(capsys: Any) -> None:
    words = ["layout.sizes=pp2", "layout.stages=Et|t*3L", "model.shape.dense_layers=[0]"]
    text = " ".join(said(capsys, *words).split())
    assert "pp0 embedding, layer 0 pp1 layers 1–3, loss" in text, text
    assert "layer 0 attention" in text and "layers 1–3 attention" in text


def test_stages_in_the_shape_of_a_v_go_there_and_back(capsys: Any) -> None:
    """The first rank holds the embedding and, on the way back, the loss."""
    words = ["--layout", "pp2 vpp2", "layout.schedule={kind: zb_v}", "train.batch=32"]
    assert main(["explain", "demo", *words, "--json"]) == 0
    first, last = json.loads(capsys.readouterr().out)["layout"]["stages"]["table"]
    assert first[0][0][0] == "embedding" and first[1][-1][0] == "loss"
    assert [kind for stage in last for kind, _ in stage] == ["layer", "layer"]


def test_a_layout_of_thousands_stays_small(capsys: Any) -> None:
    text = said(capsys, "--layout", "tp2 pp2 ep8", "--world", "8192")
    assert len(text.splitlines()) < 110 and "pp1 dp2047" in text and "…" in text
    assert re.search(r"dp +2048 +4", text)


def test_one_rank_needs_no_picture(capsys: Any) -> None:
    assert "attention:" not in said(capsys)
    assert "attention: pp1 dp4 cp1 tp1" in said(capsys, "--world", "4")


@pytest.mark.parametrize("words", [["tp2 tp4"], ["xp2"], ["tp0"]])
def test_text_that_is_no_layout(words: list[str], capsys: Any) -> None:
    assert main(["explain", "demo", "--layout", *words]) == 2
    assert words[0].split()[0] in capsys.readouterr().err


def test_another_mistake_in_the_run_is_said_first(capsys: Any) -> None:
    assert main(["explain", "demo", "--layout", "tp3", "train.steps=-1"]) == 2
    assert "train.steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((0,), "0"), ((0, 1, 2, 3), "0–3"), ((0, 4), "0 4"), ((0, 1, 8, 9), "0–1 8–9"),
        (tuple(range(0, 32, 4)), "0 4 … 28"), ((0, 3, 4, 9, 11, 20), "0 3–4 … 20"),
    ],
)  # fmt: skip
def test_ranks_in_short(ranks: tuple[int, ...], text: str) -> None:
    assert format_ranks(ranks) == text


def test_groups_in_short() -> None:
    assert format_groups([(0,), (1,)]) == "each rank alone"
    assert format_groups([(i, i + 1) for i in range(0, 12, 2)]) == "0–1 | 2–3 | … | 10–11"
