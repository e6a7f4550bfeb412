"""The table of planted bugs is true of the code as it is; ``make plants`` runs it."""

import builtins
import re
from dataclasses import replace
from pathlib import Path
from symtable import symtable

import pytest

from tests.plants.__main__ import main
from tests.plants.plant import Plant
from tests.plants.table import PLANTS, REQUIRED

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"^\s*def test_((?:b\d\d_)+)", re.MULTILINE)


def classes_tested() -> set[str]:
    """Return the bug classes that some test off the GPU is named after."""
    files = [f for f in (ROOT / "tests").glob("*/test_*.py") if f.parent.name != "gpu"]
    found = [m for f in files for m in NAME.findall(f.read_text("utf-8"))]
    return {bug for names in found for bug in names.strip("_").split("_")}


def undefined(source: str) -> set[str]:
    """Return the names that code reads and neither its scopes, its module nor Python define."""
    module = symtable(source, "planted", "exec")
    scopes = [module]
    for scope in scopes:
        scopes += scope.get_children()
    read = {s.get_name() for scope in scopes for s in scope.get_symbols() if s.is_global()}
    read |= {s.get_name() for s in module.get_symbols() if s.is_referenced()}
    defined = {s.get_name() for s in module.get_symbols() if s.is_assigned() or s.is_imported()}
    return read - defined - {*dir(builtins), "__file__"}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda p: f"{p.bug} {p.said}")
def test_a_plant_changes_one_place_and_names_what_is_defined(plant: Plant) -> None:
    assert (ROOT / plant.path).exists(), "the file is gone, and no other one has the text"
    changed = plant.into((ROOT / plant.path).read_text("utf-8"))
    assert plant.old != plant.new
    assert not undefined(changed), "the bug would be noticed by its names alone"


@pytest.mark.parametrize("plant", PLANTS, ids=lambda p: f"{p.bug} {p.said}")
def test_a_plant_names_a_test_of_its_class(plant: Plant) -> None:
    file, _, name = plant.test.partition("::")
    assert plant.bug in name.split("_")
    assert f"def {name}(" in (ROOT / file).read_text("utf-8")


def test_every_class_has_a_test_and_a_plant() -> None:
    planted = {plant.bug for plant in PLANTS if re.fullmatch(r"b\d\d", plant.bug)}
    tested = classes_tested()
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


def test_names_that_are_gone_are_noticed() -> None:
    """In whatever scope: ``self`` of a method is none of a function beside it."""
    source = "class C:\n    def f(self): return self\n    @classmethod\n    def g(cls): return {}\n"
    assert undefined(source.format("self")) == {"self"}
    assert undefined(source.format("[max(one) for one in cls.x]")) == set()


def test_words_that_name_no_plant_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Not said to be "0 plants, 0 problems", as if something had been tried."""
    with pytest.raises(SystemExit):
        main(["b1O"])
    assert "no plant is named by b1O" in capsys.readouterr().err
