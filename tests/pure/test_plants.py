"""The table of planted bugs is true of the code as it is; ``make plants`` runs it."""

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.plants.plant import Plant
from tests.plants.table import PLANTS, REQUIRED

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"^\s*def test_((?:b\d\d_)+)", re.MULTILINE)


def classes_tested() -> set[str]:
    """Return the bug classes that some test off the GPU is named after."""
    files = [f for f in (ROOT / "tests").glob("*/test_*.py") if f.parent.name != "gpu"]
    found = [m for f in files for m in NAME.findall(f.read_text("utf-8"))]
    return {bug for names in found for bug in names.strip("_").split("_")}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda p: f"{p.bug} {p.said}")
def test_a_plant_changes_one_place_and_still_parses(plant: Plant) -> None:
    assert (ROOT / plant.path).exists(), "the file is gone, and no other one has the text"
    changed = plant.into((ROOT / plant.path).read_text("utf-8"))
    ast.parse(changed)
    assert plant.old != plant.new


@pytest.mark.parametrize("plant", PLANTS, ids=lambda p: f"{p.bug} {p.said}")
def test_a_plant_names_a_test_of_its_class(plant: Plant) -> None:
    file, _, name = plant.test.partition("::")
    assert f"_{plant.bug}_" in name
    assert f"def {name}(" in (ROOT / file).read_text("utf-8")


def test_every_class_has_a_test_and_a_plant() -> None:
    planted, tested = {plant.bug for plant in PLANTS}, classes_tested()
    assert set(REQUIRED) <= planted
    assert tested == planted, "a test named after a bug is shown to notice it: add a plant"


def test_text_that_is_gone_is_said() -> None:
    plant = Plant("b00", "nothing", "", "a.py", "old", "new")
    with pytest.raises(ValueError, match=r"stands 2 times in moefold/a\.py"):
        plant.into("old old")


def test_text_that_moved_to_another_file_is_found() -> None:
    plant = PLANTS[0]
    moved = replace(plant, file="no/such/file.py")
    assert moved.path == plant.path
    assert replace(moved, old="text that stands nowhere").path == "moefold/no/such/file.py"
