"""The page of errors: every fault has tests that exist, every error a line."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text()
CASES = 40
BASES = {"ValueError", "RuntimeError", "Exception", "CheckpointError", "OSError", "Failure"}


def functions(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }


def test_every_fault_has_tests_that_exist() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\| (`tests/[^|]*) \|$", PAGE, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, CASES + 1))
    for number, tests in rows:
        for file, name in re.findall(r"`(tests/[^:`]+)::(\w+)`", tests):
            assert name in functions(ROOT / file), f"case {number}: {file} has no {name}"
        assert tests.count("::"), f"case {number} has no test"


def errors() -> set[str]:
    """Public classes of the package that are raised as errors."""
    found = set()
    for path in (ROOT / "moefold").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                found |= {node.name} if bases & BASES else set()
    return found


def test_every_error_is_explained_by_its_name() -> None:
    named = set(re.findall(r"`([A-Z]\w+)`", PAGE))
    assert not errors() - named
    gone = set(re.findall(r"^\| `([A-Z]\w+)` \|", PAGE, re.MULTILINE)) - errors()
    assert not gone, f"explained and no longer there: {gone}"
