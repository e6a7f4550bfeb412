"""The running interpreter's standard library as a corpus: about 10 MB of real code.

Taken: every ``.py`` file of the library folder, in order of its path. Left out, because they make
text predictable rather than real: test suites (twice the library's size, much of it repeated),
the generated tables in ``encodings`` and ``pydoc_data``, and the build's recorded settings.
"""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from moefold.data.config import DataError
from moefold.data.config import PythonStdlib as Record
from moefold.data.sources.base import Document, Skipped, Source, decoded

LEFT_OUT = frozenset(
    {
        "test",
        "tests",
        "idle_test",
        "encodings",
        "pydoc_data",
        "site-packages",
        "dist-packages",
        "__pycache__",
    }
)


class PythonStdlib(Source):
    """Each file is a document, named by its path inside the library."""

    def __init__(self, record: Record) -> None:
        self._root = Path(sysconfig.get_path("stdlib"))

    def files(self) -> list[Path]:
        """Return the library's files in order of their path."""
        kept = []
        for folder, inside, names in os.walk(self._root):
            inside[:] = [name for name in inside if name not in LEFT_OUT]
            kept += [Path(folder, name) for name in names if _is_source(name)]
        if not kept:
            raise DataError(
                f"{self._root}: holds no .py files, so this interpreter brings no sources; "
                "use one that does, or a text source"
            )
        return sorted(kept, key=self._name)

    def _name(self, file: Path) -> str:
        return file.relative_to(self._root).as_posix()

    def documents(self, skipped: Skipped) -> Iterator[Document]:
        """Yield the files; the few that are not UTF-8 are noted and left out."""
        for file in self.files():
            name = self._name(file)
            try:
                yield Document(name, decoded(file.read_bytes()))
            except UnicodeDecodeError:
                skipped.note(name, "not UTF-8")


def _is_source(name: str) -> bool:
    return name.endswith(".py") and not name.startswith("_sysconfigdata")
