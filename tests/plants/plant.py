"""A planted bug: one place of the package, changed as the bug would change it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Plant:
    """One bug, and the test that must fail while it is there."""

    bug: str
    """Its class: the letters and digits after ``test_`` in the test's name."""
    said: str
    """What is wrong while it is planted."""
    test: str
    """The test, as pytest names it, without parameters."""
    file: str
    """The file, below the package; from the root where it is one of ``tests/``."""
    old: str
    """Text that stands there exactly once."""
    new: str
    """What stands there instead."""

    @property
    def path(self) -> str:
        """The file from the root of the project."""
        return self.file if self.file.startswith("tests/") else f"moefold/{self.file}"

    def into(self, source: str) -> str:
        """Return the source with the bug in it.

        Raises:
            ValueError: where the old text does not stand there exactly once.
        """
        times = source.count(self.old)
        if times != 1:
            raise ValueError(
                f"{self.bug}, {self.said}: the text to change stands {times} times in {self.path}; "
                "write the plant anew for the code as it is"
            )
        return source.replace(self.old, self.new)
