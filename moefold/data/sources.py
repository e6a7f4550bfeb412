"""Sources of documents: text, JSON lines and Parquet files, and the Python standard library.

A source streams documents in a fixed order; an unreadable document is an error that names it, or
is counted if the record says ``bad: skip``. Existing token files are in ``index.py``.
"""

import glob
import gzip
import json
import os
import sysconfig
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np

from moefold.data.config import DataError, FileSource, Jsonl, Parquet, PythonStdlib, Text
from moefold.data.tokenizer import Tokenizer

NAMES_KEPT = 20
REFUSED = 8
"""Number of unreadable documents that an error lists."""
LONG = 10
"""Number of documents too long for a sequence that an error lists."""
_BATCH_CHARS, _BATCH_DOCUMENTS = 2_000_000, 1024
READ_BYTES, READ_ROWS = 1 << 20, 1024
"""Bytes of a split text file, and rows of a Parquet file, that are read at a time."""
TESTS = {"test", "tests", "idle_test"}
TABLES = {"encodings", "pydoc_data"}
NOT_LIBRARY = TESTS | TABLES | {"site-packages", "dist-packages", "__pycache__"}
"""Folders of the standard library that are left out because their text is repetitive: test suites
(twice the library's size) and generated tables."""


class Document(NamedTuple):
    """A document: a name that is stable from run to run, and its text."""

    name: str
    text: str


class Coded(NamedTuple):
    """A document as tokens."""

    name: str
    said: bytes
    """Bytes whose hash decides between training and validation."""
    ids_N: np.ndarray
    """int64 [N]."""
    trained_N: np.ndarray | None = None
    """[N], 1 for tokens that are labels (for pairs see ``packing.REJECTED``); None: all are."""


class BadDocument(ValueError):
    """An example that yields no document; arguments are the reason and the detail."""


class Skipped(dict[str, dict[str, Any]]):
    """Documents left out: ``{count, first names}`` by reason. Also collects errors."""

    def __init__(self) -> None:
        super().__init__()
        self._refused: list[str] = []
        self._long: list[tuple[int, str]] = []
        self._shorten = ""

    def refuse(self, what: str) -> None:
        """Collect an unreadable document; raises once ``REFUSED`` of them are collected."""
        self._refused.append(what)
        if len(self._refused) == REFUSED:
            self.demand_none()

    def refuse_long(self, what: str, tokens: int, remedy: str) -> None:
        """Collect a document too long for a sequence; the error names the length that fits all."""
        self._long.append((tokens, what))
        self._shorten = remedy

    def demand_none(self) -> None:
        """Raise ``DataError`` if any errors were collected."""
        said = list[str]()
        if self._refused:
            listed, skip = "\n  ".join(self._refused), setting("bad", "skip")
            said.append(f"{listed}; correct the data, or leave such documents out with {skip}")
        if self._long:
            listed = "\n  ".join(what for _, what in self._long[:LONG])
            more = f"\n  and {len(self._long) - LONG:,} more" if len(self._long) > LONG else ""
            longest = max(self._long)[0]
            said.append(f"{listed}{more}; raise data.seq to {longest:,}, or {self._shorten}")
        if said:
            raise DataError("\n".join(said))

    def note(self, name: str, reason: str) -> None:
        """Count a document that is left out, and record the first names."""
        left_out = self.setdefault(reason, {"count": 0, "first": []})
        left_out["count"] += 1
        if left_out["count"] <= NAMES_KEPT:
            left_out["first"].append(name)


class Source(ABC):
    """Base of sources: streams documents in a fixed order."""

    @abstractmethod
    def files(self) -> list[Path]:
        """Return the files that are read, in order."""

    whole = False
    """Whether documents are never cut; prepared data then depends on the sequence length."""

    def documents(self, skipped: Skipped) -> Iterator[Document]:
        """Yield the documents; those left out are counted in ``skipped``."""
        raise NotImplementedError(f"{type(self).__name__} must implement documents")

    def coded(self, tokenizer: Tokenizer, seq: int, skipped: Skipped) -> Iterator[list[Coded]]:
        """Yield the documents as tokens, in groups; ``seq`` is the length of sequences."""
        for batch in _batches(self, skipped):
            found = tokenizer.encode_documents([document.text for document in batch])
            pairs = zip(batch, found, strict=True)
            yield [Coded(document.name, utf8(document), ids) for document, ids in pairs]

    def stamp(self) -> list[tuple[str, int, int]]:
        """Return path, size and modification time of each file, to detect changes."""
        stats = [(str(f), f.stat()) for f in self.files()]
        return [(name, s.st_size, s.st_mtime_ns) for name, s in stats]

    def size(self) -> int:
        """Return the approximate number of bytes to read."""
        return sum(size for _, size, _ in self.stamp())


class FileReader(Source):
    """Base of the sources that read files, with the policy for unreadable documents."""

    def __init__(self, record: FileSource) -> None:
        self._patterns, self._bad = record.files, record.bad

    def files(self) -> list[Path]:
        """Return the files that the record's patterns match."""
        return expand(self._patterns)

    def refuse(self, where: str, reason: str, said: str, skipped: Skipped) -> None:
        """Collect an unreadable document as an error, or count it if the record says ``skip``."""
        if self._bad == "refuse":
            skipped.refuse(f"{where}: {reason}: {said}")
        else:
            skipped.note(where, reason)


class TextReader(FileReader):
    """Each file is a document named by its path, or with ``split`` several, numbered from 0."""

    def __init__(self, record: Text) -> None:
        super().__init__(record)
        self._split = record.split

    def documents(self, skipped: Skipped) -> Iterator[Document]:
        """Yield the documents of all files, with line ends unchanged."""
        for path in self.files():
            for name, start, data in self._pieces(path):
                try:
                    yield Document(name, data.decode() if start else decoded(data))
                except UnicodeDecodeError as error:
                    said = f"byte {start + error.start}: {error.reason}"
                    self.refuse(name, "not UTF-8", said, skipped)

    def _pieces(self, path: Path) -> Iterator[tuple[str, int, bytes]]:
        """Yield name, position in bytes and content of each document of a file."""
        with opened(path) as file:
            if self._split is None:
                yield path.as_posix(), 0, file.read()
                return
            mark, rest, start, number = self._split.encode(), bytearray(), 0, 0
            while chunk := file.read(READ_BYTES):
                seen = max(len(rest) - len(mark) + 1, 0)  # a separator may begin after this
                rest += chunk
                while (end := rest.find(mark, seen)) >= 0:
                    yield f"{path.as_posix()}#{number}", start, bytes(rest[:end])
                    del rest[: end + len(mark)]
                    start, number, seen = start + end + len(mark), number + 1, 0
            if rest:
                yield f"{path.as_posix()}#{number}", start, bytes(rest)


class JsonlReader(FileReader):
    """Each line is an object with the text in one field; blank lines are ignored."""

    def __init__(self, record: Jsonl) -> None:
        super().__init__(record)
        self._field = record.field

    def documents(self, skipped: Skipped) -> Iterator[Document]:
        """Yield the lines of all files, named ``path:line`` with lines counted from 1."""
        for path in self.files():
            for name, line in lines_of(path):
                try:
                    yield Document(name, self._text(line))
                except BadDocument as error:
                    self.refuse(name, *error.args, skipped=skipped)

    def _text(self, line: bytes) -> str:
        """Return the document of a line."""
        content = json_object(line)
        if self._field not in content:
            said = f"the line has {sorted(content)[:20]}; choose with {setting('field', 'NAME')}"
            raise BadDocument(f"no field {self._field!r}", said)
        text = content[self._field]
        if not isinstance(text, str):
            kind = "null" if text is None else f"a {type(text).__name__}"
            raise BadDocument(f"field {self._field!r} is not text", f"it holds {kind}")
        try:
            text.encode()  # JSON can encode half of a surrogate pair, which UTF-8 cannot
        except UnicodeEncodeError as error:
            said = f"character {error.start} is half of a surrogate pair"
            raise BadDocument("invalid text", said) from error
        return text


class ParquetReader(FileReader):
    """Each row is a document, in a column of strings; files are streamed."""

    def __init__(self, record: Parquet) -> None:
        super().__init__(record)
        self._column = record.column
        # An optional dependency: fail before anything is read.
        self._arrow, self._parquet = import_module("pyarrow"), import_module("pyarrow.parquet")

    def documents(self, skipped: Skipped) -> Iterator[Document]:
        """Yield the rows of all files, named ``path:row`` with rows counted from 0."""
        for path in self.files():
            try:
                with self._parquet.ParquetFile(path) as file:
                    self._check(path, file.schema_arrow)
                    yield from self._rows(path, file, skipped)
            except (self._arrow.ArrowException, OSError) as error:
                raise DataError(f"{path}: cannot be read as Parquet: {error}") from error

    def _check(self, path: Path, schema: Any) -> None:
        if self._column not in schema.names:
            raise DataError(
                f"{path}: has no column {self._column!r}; its columns are {schema.names}; "
                f"choose with {setting('column', 'NAME', 'field')}"
            )
        kind, types = schema.field(self._column).type, self._arrow.types
        inner = kind.value_type if types.is_dictionary(kind) else kind
        if not (types.is_string(inner) or types.is_large_string(inner)):
            raise DataError(f"{path}: column {self._column!r} holds {kind}, not strings")

    def _rows(self, path: Path, file: Any, skipped: Skipped) -> Iterator[Document]:
        batches = file.iter_batches(batch_size=READ_ROWS, columns=[self._column])
        values = (value for batch in batches for value in batch.column(0))
        for number, value in enumerate(values):
            name = f"{path.as_posix()}:{number}"
            try:
                text = value.as_py()
            except UnicodeDecodeError as error:
                self.refuse(name, "not UTF-8", f"byte {error.start}: {error.reason}", skipped)
                continue
            if text is None:
                self.refuse(name, f"column {self._column!r} is not text", "it holds null", skipped)
            else:
                yield Document(name, text)


class StdlibReader(Source):
    """Each ``.py`` file of the running interpreter's standard library: about 10 MB of real code.

    A document is named by its path inside the library.
    """

    def __init__(self, record: PythonStdlib) -> None:
        self._root = Path(sysconfig.get_path("stdlib"))

    def files(self) -> list[Path]:
        """Return the library's files in order of their path."""
        kept = []
        for folder, inside, names in os.walk(self._root):
            inside[:] = [name for name in inside if name not in NOT_LIBRARY]
            # The recorded settings of the build are generated too.
            sources = (name for name in names if not name.startswith("_sysconfigdata"))
            kept += [Path(folder, name) for name in sources if name.endswith(".py")]
        if not kept:
            raise DataError(
                f"{self._root}: contains no .py files of Python's standard library; use another "
                "Python installation, or a text source"
            )
        return sorted(kept, key=self._name)

    def _name(self, file: Path) -> str:
        return file.relative_to(self._root).as_posix()

    def documents(self, skipped: Skipped) -> Iterator[Document]:
        """Yield the files; the few that are not UTF-8 are counted and left out."""
        for file in self.files():
            name = self._name(file)
            try:
                yield Document(name, decoded(file.read_bytes()))
            except UnicodeDecodeError:
                skipped.note(name, "not UTF-8")


def _batches(source: Source, skipped: Skipped) -> Iterator[list[Document]]:
    """Yield documents in groups large enough to encode in parallel; empty ones are counted."""
    batch: list[Document] = []
    chars = 0
    for document in source.documents(skipped):
        if not document.text:
            skipped.note(document.name, "empty")
            continue
        batch.append(document)
        chars += len(document.text)
        if chars >= _BATCH_CHARS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def utf8(document: Document) -> bytes:
    """Return a document's text as UTF-8; raises ``DataError`` if that is not possible."""
    try:
        return document.text.encode()
    except UnicodeEncodeError as error:
        said = f"character {error.start} is half of a surrogate pair"
        raise DataError(f"{document.name}: {said}; correct the text") from error


def lines_of(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the lines of a file that are not blank, named ``path:line`` with lines from 1."""
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{path.as_posix()}:{number}", line


def json_object(line: bytes) -> dict[str, Any]:
    """Return the object in a line of JSON; raises ``BadDocument`` if there is none."""
    try:
        content = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        said = f"byte {error.start} of the line: {error.reason}"
        raise BadDocument("not UTF-8", said) from error
    except (ValueError, RecursionError) as error:
        raise BadDocument("not JSON", str(error)) from error
    if not isinstance(content, dict):
        raise BadDocument("not an object", f"the line holds a {type(content).__name__}")
    return content


def expand(patterns: tuple[str, ...]) -> list[Path]:
    """Return the files that paths and patterns match: sorted per pattern, each once."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        if Path(pattern).is_file():
            found[Path(pattern)] = None
            continue
        names = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
        files = [Path(n) for n in names if Path(n).is_file()]
        if not files:
            folder = any(Path(n).is_dir() for n in names)
            if folder:
                raise DataError(f"{pattern}: is a folder; add a pattern such as /**/*.txt")
            raise DataError(
                f"{pattern}: no file matches; name existing files (files: [...] in the source)"
            )
        found.update(dict.fromkeys(files))
    return list(found)


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading bytes, decompressed if its name ends in ``.gz``."""
    if path.suffix in (".zst", ".xz", ".bz2", ".zip"):
        raise DataError(f"{path}: {path.suffix} is not supported; decompress it, or use .gz")
    try:
        packed = path.suffix == ".gz"
        with cast(IO[bytes], gzip.open(path) if packed else path.open("rb")) as file:
            yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: is damaged: {error}; get a new copy") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def setting(field: str, value: str, flag: str | None = None) -> str:
    """Return a source's setting in words: in a run file, and as a flag of ``data prepare``."""
    return f"{field}: {value} in the source (data prepare: --{flag or field} {value})"


def decoded(data: bytes) -> str:
    """Decode a file's UTF-8 text, without a byte order mark."""
    return data.removeprefix(b"\xef\xbb\xbf").decode()
