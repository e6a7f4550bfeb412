"""Drawings of tables, the one in the documents included."""

from pathlib import Path

import pytest

from moefold.schedule.config import Merged, OneFOneB, ZeroBubbleH1, ZeroBubbleV, build_table
from moefold.schedule.simulate import StageCosts
from tests.schedule_drawing import draw

DESIGN = Path(__file__).parents[2] / "docs" / "design.md"


def test_1f1b_drawn() -> None:
    assert draw(build_table(OneFOneB(), 2, 1, 2)).splitlines() == [
        "rank 0  F0 F1 .  .  B0--- .  B1---",
        "rank 1  .  F0 B0--- F1 B1--- .  .",
    ]


def test_pairs_and_chunks_drawn() -> None:
    assert draw(build_table(Merged(), 1, 2, 1)) == "rank 0  F0-- F0'1 B0'1----- B0-------"
    assert draw(build_table(Merged(), 1, 1, 2)) == "rank 0  F0 F1+B0=== B1---"


def test_the_drawing_is_as_wide_as_the_makespan() -> None:
    lines = draw(build_table(ZeroBubbleV(), 12, 2, 24)).splitlines()
    assert lines[0].startswith("rank  0  F0--- F1---") and lines[11].startswith("rank 11  .     .")
    assert {len(line) for line in lines[:11]} == {lines[0].rindex(".") + 1}
    assert lines[0].rindex(".") == len("rank  0  ") + 6 * (6 * 24 + 11 - 1)


def test_other_costs_other_widths() -> None:
    drawn = draw(build_table(OneFOneB(), 1, 1, 2), StageCosts(2, 0, 1))
    assert drawn == "rank 0  F0--- B0 F1--- B1"
    with pytest.raises(ValueError, match="whole numbers"):
        draw(build_table(OneFOneB(), 1, 1, 2), StageCosts(0.5))


def test_the_drawing_in_the_documents_is_what_is_drawn() -> None:
    for record in (OneFOneB(), ZeroBubbleH1()):
        drawn = draw(build_table(record, 3, 1, 4)).replace("\n", "\n    ")
        assert f"\n    {drawn}\n" in DESIGN.read_text()
