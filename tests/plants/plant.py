"""A planted bug: one place of the package, changed as the bug would change it."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Plant:
    """One bug, and the test that must fail while it is there."""

    said: str
    """What is wrong while it is planted."""
    test: str
    """The test, as pytest names it, without parameters."""
    file: str
    """The file, below the package, that held the text when the plant was written; from the root
    where it is one of ``tests/``."""
    old: str
    """Text that stands there exactly once."""
    new: str
    """What stands there instead."""

    @cached_property
    def path(self) -> str:
        """The file from the root of the project: where the text went, if to one other file."""
        named = ROOT / (self.file if self.file.startswith("tests/") else f"moefold/{self.file}")
        if not named.exists() or self.old not in named.read_text("utf-8"):
            files = sorted((ROOT / "moefold").rglob("*.py"))
            having = [file for file in files if self.old in file.read_text("utf-8")]
            named = having[0] if len(having) == 1 else named
        return named.relative_to(ROOT).as_posix()

    def into(self, source: str) -> str:
        """Return the source with the bug in it.

        Raises:
            ValueError: where the old text does not stand there exactly once.
        """
        times = source.count(self.old)
        if times != 1:
            raise ValueError(
                f"{self.said}: the text to change stands {times} times in {self.path}; "
                "write the plant anew for the code as it is"
            )
        return source.replace(self.old, self.new)
