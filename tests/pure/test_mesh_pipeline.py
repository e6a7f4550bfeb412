"""Pipeline layouts as text: read, written, balanced, refused and mended."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moefold.mesh.pipeline import StagePart, Stages

DENSE_FIRST = (False,) * 3 + (True,) * 58


def test_a_published_layout() -> None:
    """61 layers and one for two tokens ahead on 16 ranks with two virtual stages each."""
    stages = Stages.parse("Et*3|(tt|)*29m|L")
    assert stages.letters == ("Ettt", *["tt"] * 29, "m", "L")
    assert stages.layers == 61 and not stages.broken_rules(32, DENSE_FIRST, multi_token=1)
    table = stages.table(16)
    names = {rank: [[p.kind for p in stage] for stage in table[rank]] for rank in (0, 13, 14, 15)}
    two = ["layer", "layer"]
    assert names[0] == [["embedding", "layer", "layer", "layer"], two]
    assert names[13] == [two, two]
    assert names[14] == [two, ["multi_token"]]
    assert names[15] == [two, ["loss"]]
    assert table[1][1] == (StagePart("layer", 35), StagePart("layer", 36))


@pytest.mark.parametrize(
    ("text", "letters"),
    [
        ("Et*4|(tttt|)*14tmL", ("Etttt", *["tttt"] * 14, "tmL")),
        ("Et*4|(t*4|)*14tmL", ("Etttt", *["tttt"] * 14, "tmL")),
        ("EttL", ("EttL",)),
        ("E|(t|)*2 t, L", ("E", "t", "t", "tL")),
        ("E||tt|||L", ("E", "", "tt", "", "", "L")),
        ("Et|*3L", ("Et", "", "", "L")),
        ("((t*2|)*2 x|)*2", ("tt", "tt", "x", "tt", "tt", "x", "")),
        ("Et(t)*0 L", ("EtL",)),
        ("Ed*2|x|L", ("Edd", "x", "L")),
    ],
)
def test_text_written_out(text: str, letters: tuple[str, ...]) -> None:
    assert Stages.parse(text).letters == letters


@pytest.mark.parametrize(
    ("letters", "text"),
    [
        (("Ettt", *["tt"] * 29, "m", "L"), "Et*3|(tt|)*29m|L"),
        (("Et", "", "", "", "tL"), "Et||*3tL"),
        (("Et", "t", "ttL"), "Et|t|ttL"),
    ],
)
def test_text_is_folded(letters: tuple[str, ...], text: str) -> None:
    assert Stages(letters).text == text


@given(st.lists(st.text(alphabet="EtdxmL", max_size=6), min_size=1, max_size=12))
def test_text_says_what_it_was_made_from(letters: list[str]) -> None:
    stages = Stages(tuple(letters))
    assert Stages.parse(stages.text) == stages


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Et*|L", r"'\*' needs a number after it \(character 3 of"),
        ("*3t", r"'\*' needs a letter or group before it \(character 1"),
        ("E(t|L", r"'\(' has no '\)' \(character 6"),
        ("Et)|L", r"'\)' has no '\(' \(character 3"),
        ("Eq|L", r"'q' is not one of E t d x m L .*character 2"),
        ("Et*99999999|L", "more than 10,000 letters"),
        ("((t*999)*9)*9", "more than 10,000 letters"),
        ("t*9999 " * 3, "more than 10,000 letters"),
    ],
)
def test_slips_are_named_with_their_place(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Stages.parse(text)


@pytest.mark.parametrize(
    ("text", "count", "rule"),
    [
        ("Ettt|tL", 4, "must have pp * vpp (4) stages, not 2"),
        ("tttt|L", 2, "must be one E, then layers, then any m, then one L"),
        ("Ettt|t", 2, "must be one E, then layers, then any m, then one L"),
        ("Ettm|tL", 2, "must be one E, then layers, then any m, then one L"),
        ("EEtt|ttL", 2, "must be one E, then layers, then any m, then one L"),
        ("|Ett|ttL", 3, "must have E in the first stage and L in the last"),
        ("Ett|ttL|", 3, "must have E in the first stage and L in the last"),
        ("Ett|tL", 2, "must have the model's 4 layers, not 3"),
        ("Ett|ttmL", 2, "must have as many m as the model has multi-token layers (0)"),
        ("Edx|xxL", 2, "layer 1 has no experts, so its letter cannot be 'x'"),
        ("Edd|dxL", 2, "layer 2 has experts, so its letter cannot be 'd'"),
    ],
)
def test_what_a_layout_breaks(text: str, count: int, rule: str) -> None:
    """The model has two dense layers, then two with experts. What is near is legal."""
    mixtures = (False, False, True, True)
    stages = Stages.parse(text)
    assert rule in stages.broken_rules(count, mixtures)
    assert stages.nearest(count, mixtures).broken_rules(count, mixtures) == []


@pytest.mark.parametrize("text", ["Edd|xxL", "Etttt||L", "E|||ddxx|L", "E|t|t|t|t|L"])
def test_legal_layouts(text: str) -> None:
    stages = Stages.parse(text)
    assert stages.broken_rules(len(stages.letters), (False, False, True, True)) == []


@pytest.mark.parametrize(
    ("text", "layers", "near"),
    [
        ("Ett|tt|tL", 6, "Ett|tt|ttL"),
        ("Ett|tt|tL", 4, "Ett|t|tL"),
        ("Et|t*5|L", 4, "Et|t*3|L"),
        ("Et|x*3|L", 6, "Ett|t*3|tL"),
        ("E|t||L", 3, "Et|t|t|L"),
        ("Et|t|m|L", 4, "Et|t|t|tL"),
        ("Et|L", 100, "Et*50|t*50L"),
    ],
)
def test_a_layer_more_or_less(text: str, layers: int, near: str) -> None:
    """Taken from the fullest stage, given to the emptiest; else balanced anew."""
    found = Stages.parse(text).nearest(text.count("|") + 1, (True,) * layers)
    assert found == Stages.parse(near)
    assert not found.broken_rules(text.count("|") + 1, (True,) * layers)


@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 40), st.integers(0, 2))
def test_balanced_layouts(pp: int, vpp: int, layers: int, multi_token: int) -> None:
    for way in ("round", "v"):
        stages = Stages.balanced(pp, vpp, layers, multi_token, way)
        assert stages.broken_rules(pp * vpp, (True,) * layers, multi_token) == []
        counts = [len(re.findall("t", letters)) for letters in stages.letters]
        table = stages.table(pp, way)
        on_rank = [sum(p.kind == "layer" for s in rank for p in s) for rank in table]
        assert max(counts) - min(counts) <= 1 and max(on_rank) - min(on_rank) <= 1
        assert counts[-1] == min(counts) and sum(on_rank) == layers
        assert [len(rank) for rank in table] == [vpp] * pp


def test_there_and_back() -> None:
    """The rank with the embedding has the loss too, and each rank meets itself at the turn."""
    stages = Stages.parse("Et|t|t|t|t|tL")
    numbers = [
        [[p.index for p in s if p.kind == "layer"] for s in rank] for rank in stages.table(3)
    ]
    assert numbers == [[[0], [3]], [[1], [4]], [[2], [5]]]
    turned = stages.table(3, "v")
    assert turned[0][1][-1] == StagePart("loss") and turned[2][1] == (StagePart("layer", 3),)
    with pytest.raises(ValueError, match="6 stages cannot be divided evenly among pp4"):
        stages.table(4)
