"""What a source of documents is, and the helpers that sources of files share."""

import glob
import gzip
import os
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple, cast

from moefold.data.config import DataError, FileSource

_NAMED = 20


class Document(NamedTuple):
    """A document: a name that stays the same from run to run, and its text."""

    name: str
    text: str


@dataclass
class Skipped:
    """What was left out, by reason: how many, and the first names; nothing is lost silently."""

    counts: Counter[str] = field(default_factory=Counter)
    names: dict[str, list[str]] = field(default_factory=dict)

    def note(self, name: str, reason: str) -> None:
        """Count one document that is left out."""
        self.counts[reason] += 1
        named = self.names.setdefault(reason, [])
        if len(named) < _NAMED:
            named.append(name)

    def plain(self) -> dict[str, dict]:
        """Return ``{reason: {count, first}}``."""
        return {r: {"count": n, "first": self.names[r]} for r, n in self.counts.items()}


class Source(ABC):
    """Streams documents, always in the same order."""

    @abstractmethod
    def files(self) -> list[Path]:
        """Return the files that are read, in order."""

    @abstractmethod
    def documents(self, skipped: Skipped) -> Iterator[Document]:
        """Yield the documents; what is left out is noted in ``skipped``."""

    def stamp(self) -> list[tuple[str, int, int]]:
        """Return what changes when the files change: path, size and time of writing of each."""
        stats = [(str(f), f.stat()) for f in self.files()]
        return [(name, s.st_size, s.st_mtime_ns) for name, s in stats]

    def size(self) -> int:
        """Return about how many bytes there are to read."""
        return sum(size for _, size, _ in self.stamp())


def expand(patterns: tuple[str, ...]) -> list[Path]:
    """Return the files that paths and patterns stand for: sorted per pattern, each once."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        if Path(pattern).is_file():
            found[Path(pattern)] = None
            continue
        names = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
        files = [Path(n) for n in names if Path(n).is_file()]
        if not files:
            where = "it is a folder; add a pattern such as /**/*.txt" if names else str(Path.cwd())
            raise DataError(f"{pattern}: no file matches ({where})")
        found.update(dict.fromkeys(files))
    return list(found)


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading bytes, unpacked where its name ends in ``.gz``."""
    if path.suffix in (".zst", ".xz", ".bz2", ".zip"):
        raise DataError(f"{path}: {path.suffix} is not read here; unpack it, or pack it as .gz")
    try:
        packed = path.suffix == ".gz"
        with cast(IO[bytes], gzip.open(path) if packed else path.open("rb")) as file:
            yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: is damaged: {error}; fetch it again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


class FileReader(Source):
    """Base of the sources that read files, with the one rule for what cannot be read."""

    def __init__(self, record: FileSource) -> None:
        self._patterns, self._bad = record.files, record.bad

    def files(self) -> list[Path]:
        """Return the files that the record's patterns match."""
        return expand(self._patterns)

    def refuse(self, where: str, reason: str, said: str, skipped: Skipped) -> None:
        """Stop at something that cannot be read, or note it where the record says ``skip``."""
        if self._bad == "refuse":
            skip = setting("bad", "skip")
            raise DataError(f"{where}: {reason}: {said}; mend it, or leave such out with {skip}")
        skipped.note(where, reason)


def setting(field: str, value: str, flag: str | None = None) -> str:
    """Name a field of a source as a run file writes it, and as ``data prepare`` takes it."""
    return f"{field}: {value} at its source (data prepare: --{flag or field} {value})"


def decoded(data: bytes) -> str:
    """Return the UTF-8 text of a file; a byte order mark at its beginning is no part of it."""
    return data.removeprefix(b"\xef\xbb\xbf").decode("utf-8")
