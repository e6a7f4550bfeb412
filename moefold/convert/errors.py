"""Errors of conversion, for people."""

from collections.abc import Sequence
from pathlib import Path

SHOWN = 40
"""Problems that one message lists; the rest are counted."""


class ConvertError(ValueError):
    """A folder cannot be converted: where, and every reason found."""

    def __init__(self, where: Path | str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        listed = "".join(f"\n  {p}" for p in self.problems[:SHOWN])
        left = len(self.problems) - SHOWN
        super().__init__(f"{where}:{listed}" + (f"\n  and {left} more" if left > 0 else ""))
