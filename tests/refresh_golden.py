"""Writes the golden dump of every recipe anew: ``python -m tests.refresh_golden``.

The table of families in the documents is made anew too.

A golden dump is the resolved run as sorted ``path: value`` lines. It is kept beside the recipes,
so that what a change of a default or a rule does to every recipe is seen in review.
"""

from pathlib import Path

from moefold.run import RECIPES, load_run, recipes
from tests import families_page
from tests.golden import golden

FOLDER = RECIPES / "golden"


def golden_file(name: str) -> Path:
    """Return where the golden dump of a recipe is kept."""
    return FOLDER / f"{name}.txt"


def main() -> None:
    """Write every dump, take away those of recipes that are gone, and say what changed."""
    FOLDER.mkdir(exist_ok=True)
    for name in recipes():
        file, text = golden_file(name), golden(load_run(name))
        if not file.is_file() or file.read_text("utf-8") != text:
            file.write_text(text, "utf-8")
            print(f"written: {file.name}")
    for file in FOLDER.glob("*.txt"):
        if file.stem not in recipes():
            file.unlink()
            print(f"removed: {file.name}")
    families_page.write()


if __name__ == "__main__":
    main()
