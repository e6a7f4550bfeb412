"""The table of planted bugs is true of the code as it is; ``make plants`` runs it."""

import builtins
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from symtable import symtable

import pytest

from tests.plants.__main__ import main
from tests.plants.plant import Plant
from tests.plants.table import PLANTS

ROOT = Path(__file__).parents[2]


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


@cache
def text_of(path: str) -> str:
    """Return a file's text."""
    return (ROOT / path).read_text("utf-8")


def problems_of(plant: Plant) -> list[str]:
    """Return what keeps a plant from being one bug of the code as it is, which its test notices."""
    file, _, name = plant.test.partition("::")
    problems = []
    if f"def {name}(" not in text_of(file):
        problems.append(f"{plant.test} is no test")
    if not (ROOT / plant.path).exists():
        return [*problems, f"{plant.path} is gone, and no other file has the text"]
    try:
        changed = plant.into(text_of(plant.path))
    except ValueError as error:
        return [*problems, str(error)]
    if plant.old == plant.new:
        problems.append("it changes nothing")
    if names := undefined(changed):
        problems.append(f"it would be noticed by its names alone: {names}")
    return problems


@pytest.mark.parametrize("file", sorted({plant.test.partition("::")[0] for plant in PLANTS}))
def test_a_plant_changes_one_place_and_names_what_is_defined_and_a_test(file: str) -> None:
    """Every plant that a test of the file notices."""
    here = [plant for plant in PLANTS if plant.test.startswith(f"{file}::")]
    wrong = [(plant.said, problems_of(plant)) for plant in here]
    assert [found for found in wrong if found[-1]] == []


def test_what_is_wrong_with_a_plant_is_said() -> None:
    plant = PLANTS[0]
    assert problems_of(plant) == []
    assert "changes nothing" in problems_of(replace(plant, new=plant.old))[0]
    assert "names alone" in problems_of(replace(plant, new=f"{plant.old} or no_such_name"))[-1]
    assert "0 times" in problems_of(replace(plant, old="text that stands nowhere"))[0]
    renamed = replace(plant, test=f"{plant.test}_of_old")
    assert "_of_old is no test" in problems_of(renamed)[0]
    nowhere = replace(plant, file="no/such/file.py", old="text that stands nowhere")
    assert "is gone" in problems_of(nowhere)[0]


def test_the_table_has_the_plants_of_every_file() -> None:
    """A file that the table forgets would show nothing, and nobody would miss it."""
    files = {file.stem for file in (ROOT / "tests/plants").glob("*.py")}
    topics = files - {"__init__", "__main__", "plant", "table"}
    modules = {topic: import_module(f"tests.plants.{topic}") for topic in topics}
    missed = {topic for topic, module in modules.items() if not set(module.PLANTS) <= set(PLANTS)}
    assert missed == set()


def test_text_that_is_gone_is_said() -> None:
    plant = Plant("nothing", "", "a.py", "old", "new")
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
