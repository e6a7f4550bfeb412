"""The examples of docs/extending.md, written out as their readers would."""

import csv
import re
from pathlib import Path
from typing import Any

import yaml

from tests.cpu.runs import WORDS, corpus

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    """The code blocks of a page, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def examples() -> dict[str, tuple[str, str]]:
    """Each file that the page shows, with the run file that uses it."""
    pairs = zip(blocks(PAGE, "python"), blocks(PAGE, "yaml"), strict=True)
    return {code.splitlines()[0].removeprefix("# "): (code, run) for code, run in pairs}


EXAMPLES = examples()


def written(folder: Path, name: str) -> Path:
    """Write an example's two files, and what they read; return the run file."""
    code, run = EXAMPLES[name]
    (folder / name).write_text(code)
    with (folder / "notes.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["id", "body"])
        rows.writerows([i, f"{i} " + " ".join(WORDS) * 3] for i in range(40))
    raw: dict[str, Any] = yaml.safe_load(run)
    if "data" in raw:
        raw["data"]["train"][0]["files"] = [str(folder / "notes.csv")]
    else:
        source = {"source": "text", "files": [str(corpus(folder / "corpus"))], "holdout": 0.2}
        raw["data"] = {"train": [source]}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path
