"""Every recipe resolves to its golden dump, and to itself when written out and read back."""

from pathlib import Path

import pytest

from moefold.config.dump import dump_yaml
from moefold.run import load_run, recipes
from tests.golden import golden
from tests.refresh_golden import FOLDER, golden_file

REFRESH = "run `python -m tests.refresh_golden` and look at the difference"


@pytest.mark.parametrize("name", recipes())
def test_recipe_resolves_to_its_golden_dump(name: str) -> None:
    file = golden_file(name)
    assert file.is_file(), f"{file.name} is missing; {REFRESH}"
    assert golden(load_run(name)) == file.read_text("utf-8"), REFRESH


def test_no_golden_dump_is_left_over() -> None:
    assert {file.stem for file in FOLDER.glob("*.txt")} == set(recipes()), REFRESH


@pytest.mark.parametrize("name", recipes())
def test_resolved_recipe_reads_back_as_itself(name: str, tmp_path: Path) -> None:
    run = load_run(name)
    file = tmp_path / "run.yaml"
    file.write_text(dump_yaml(run), "utf-8")
    assert load_run(file) == run


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 10])
@pytest.mark.parametrize("name", recipes())
def test_a_recipe_runs_for_as_few_steps_as_one_likes(name: str, steps: int) -> None:
    assert load_run(name, [f"train.steps={steps}"]).train.steps == steps
