"""Every field of every recipe, broken by machine: refused in time, and what is suggested works.

By one way of many, in turns; ``make matrix`` tries eight times as many.
"""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from moefold.config.base import to_dict
from moefold.config.check import check
from moefold.config.dump import dump_yaml
from moefold.config.errors import RunError
from moefold.config.load import load
from moefold.config.reader import read_yaml
from moefold.run import Run, load_run, recipes
from tests.mutations import Judge, mutations

RECIPES = recipes()
MORE = pytest.mark.parametrize("more", [1, pytest.param(8, marks=pytest.mark.matrix)])


def test_there_are_recipes() -> None:
    assert "demo" in RECIPES


@MORE
@pytest.mark.parametrize("name", RECIPES)
def test_fields_that_a_recipe_states(name: str, more: int) -> None:
    """As the file says it, defaults left out; every field there is comes below."""
    data = read_yaml(RECIPES[name].read_bytes()).data
    if "base" in data:
        pytest.skip("states only what differs from its base; the resolved form covers it")
    judge = Judge(Run, lambda raw: load(Run, raw, (), RECIPES), data)
    for mutation in list(mutations(Run, data))[:: 32 // more]:
        judge(mutation)


@MORE
@pytest.mark.parametrize(("turn", "name"), list(enumerate(RECIPES)))
def test_every_field_that_a_recipe_has(turn: int, name: str, more: int) -> None:

    def judged(raw: Any) -> Any:
        verdict = check(Run, raw)
        if verdict.record is None:
            raise RunError(verdict.violations, raw)
        return verdict.record

    data = to_dict(load_run(name))
    judge = Judge(Run, judged, data)
    step = 56 // more
    for mutation in islice(mutations(Run, data), turn % step, None, step):
        judge(mutation)


@MORE
@pytest.mark.parametrize(("turn", "name"), list(enumerate(RECIPES)))
def test_some_fields_through_a_file(turn: int, name: str, more: int, tmp_path: Path) -> None:
    def from_file(raw: Any) -> Run:
        file = tmp_path / "run.yaml"
        file.write_text(dump_yaml(raw), "utf-8")
        return load_run(file)

    data = to_dict(load_run(name))
    judge = Judge(Run, from_file, data)
    for mutation in list(mutations(Run, data))[turn * 7 :: 1144 // more]:
        judge(mutation)
