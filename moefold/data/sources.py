"""Sources of documents: text, JSON lines and Parquet files, and the Python standard library.

A source streams documents in a fixed order. An unreadable document is an error that names it, or
is skipped and counted if the record says ``bad: skip``. Existing token files are in ``index.py``.
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

MAX_NAMES = 20
MAX_REFUSED = 8
"""Maximum number of unreadable documents in an error."""
MAX_LONG = 10
"""Maximum number of overlong documents in an error."""
_BATCH_CHARS, _BATCH_DOCUMENTS = 2_000_000, 1024
READ_BYTES, READ_ROWS = 1 << 20, 1024
"""Bytes of a split text file and rows of a Parquet file that are read at a time."""
TEST_FOLDERS = {"test", "tests", "idle_test"}
TABLE_FOLDERS = {"encodings", "pydoc_data"}
EXCLUDED_FOLDERS = TEST_FOLDERS | TABLE_FOLDERS | {"site-packages", "dist-packages", "__pycache__"}
"""Folders of the standard library that are skipped because their text is repetitive: test suites
(twice the library's size) and generated tables."""


class Document(NamedTuple):
    """A document: a name that is stable from run to run, and its text."""

    name: str
    text: str


class Encoded(NamedTuple):
    """A tokenized document."""

    name: str
    split_key: bytes
    """Bytes whose hash assigns the document to training or validation."""
    ids_N: np.ndarray
    """int64 [N]."""
    loss_mask_N: np.ndarray | None = None
    """[N], 1 for labels (for pairs see ``packing.REJECTED``); None if all tokens are labels."""


class BadDocument(ValueError):
    """An unusable example; arguments are the reason and a detail."""


class Skipped(dict[str, dict[str, Any]]):
    """Skipped documents: count and first names by reason. Also collects errors."""

    def __init__(self) -> None:
        super().__init__()
        self._refused: list[str] = []
        self._long: list[tuple[int, str]] = []
        self._remedy = ""

    def refuse(self, document: str) -> None:
        """Collect an unreadable document; raise once there are ``MAX_REFUSED``."""
        self._refused.append(document)
        if len(self._refused) == MAX_REFUSED:
            self.raise_errors()

    def refuse_long(self, document: str, tokens: int, remedy: str) -> None:
        """Collect a document that exceeds a sequence; the error names the length that fits all."""
        self._long.append((tokens, document))
        self._remedy = remedy

    def raise_errors(self) -> None:
        """Raise ``DataError`` if any errors were collected."""
        messages = list[str]()
        if self._refused:
            listed, skip = "\n  ".join(self._refused), hint("bad", "skip")
            messages.append(f"{listed}; correct the data, or leave such documents out with {skip}")
        if self._long:
            listed = "\n  ".join(what for _, what in self._long[:MAX_LONG])
            n_more = len(self._long) - MAX_LONG
            more = f"\n  and {n_more:,} more" if n_more > 0 else ""
            longest = max(self._long)[0]
            messages.append(f"{listed}{more}; raise data.seq to {longest:,}, or {self._remedy}")
        if messages:
            raise DataError("\n".join(messages))

    def note(self, name: str, reason: str) -> None:
        """Count a skipped document, and keep the first names."""
        left_out = self.setdefault(reason, {"count": 0, "first": []})
        left_out["count"] += 1
        if left_out["count"] <= MAX_NAMES:
            left_out["first"].append(name)


class Source(ABC):
    """Base of sources: streams documents in a fixed order."""

    @abstractmethod
    def files(self) -> list[Path]:
        """Return the files that are read, in order."""

    whole_documents = False
    """Whether documents are never cut, so that prepared data depends on the sequence length."""

    def documents(self, skipped: Skipped) -> Iterator[Document]:
        """Yield the documents; count the others in ``skipped``."""
        raise NotImplementedError(f"{type(self).__name__} must implement documents")

    def encode(self, tokenizer: Tokenizer, seq: int, skipped: Skipped) -> Iterator[list[Encoded]]:
        """Yield tokenized documents, in groups; ``seq`` is the sequence length."""
        for batch in _batches(self, skipped):
            encoded = tokenizer.encode_documents([document.text for document in batch])
            pairs = zip(batch, encoded, strict=True)
            yield [Encoded(document.name, encode_utf8(document), ids) for document, ids in pairs]

    def stamp(self) -> list[tuple[str, int, int]]:
        """Return path, size and modification time of each file, to detect changes."""
        stats = [(str(f), f.stat()) for f in self.files()]
        return [(name, s.st_size, s.st_mtime_ns) for name, s in stats]

    def size(self) -> int:
        """Return the approximate number of bytes to read."""
        return sum(size for _, size, _ in self.stamp())


class FileReader(Source):
    """Base of sources that read files, with the policy for unreadable documents."""

    def __init__(self, record: FileSource) -> None:
        self._patterns, self._bad = record.files, record.bad

    def files(self) -> list[Path]:
        """Return the files that the record's patterns match."""
        return expand_patterns(self._patterns)

    def refuse(self, where: str, reason: str, detail: str, skipped: Skipped) -> None:
        """Collect an unreadable document as an error, or count it if the record says ``skip``."""
        if self._bad == "refuse":
            skipped.refuse(f"{where}: {reason}: {detail}")
        else:
            skipped.note(where, reason)


class TextReader(FileReader):
    """Each file is a document named by its path, or with ``split`` several, numbered from 0."""

    def __init__(self, record: Text) -> None:
        super().__init__(record)
        self._split = record.split

    def documents(self, skipped: Skipped) -> Iterator[Document]:
        """Yield the documents of all files; line ends are unchanged."""
        for path in self.files():
            for name, start, data in self._pieces(path):
                try:
                    yield Document(name, data.decode() if start else decode_utf8(data))
                except UnicodeDecodeError as error:
                    detail = f"byte {start + error.start}: {error.reason}"
                    self.refuse(name, "not UTF-8", detail, skipped)

    def _pieces(self, path: Path) -> Iterator[tuple[str, int, bytes]]:
        """Yield name, position in bytes and content of each document of a file."""
        with open_binary(path) as file:
            if self._split is None:
                yield path.as_posix(), 0, file.read()
                return
            sep, rest, start, number = self._split.encode(), bytearray(), 0, 0
            while chunk := file.read(READ_BYTES):
                searched = max(len(rest) - len(sep) + 1, 0)  # a separator may begin after this
                rest += chunk
                while (end := rest.find(sep, searched)) >= 0:
                    yield f"{path.as_posix()}#{number}", start, bytes(rest[:end])
                    del rest[: end + len(sep)]
                    start, number, searched = start + end + len(sep), number + 1, 0
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
            for name, line in iter_lines(path):
                try:
                    yield Document(name, self._text(line))
                except BadDocument as error:
                    self.refuse(name, *error.args, skipped=skipped)

    def _text(self, line: bytes) -> str:
        content = parse_json_object(line)
        if self._field not in content:
            detail = f"the line has {sorted(content)[:20]}; choose with {hint('field', 'NAME')}"
            raise BadDocument(f"no field {self._field!r}", detail)
        text = content[self._field]
        if not isinstance(text, str):
            kind = "null" if text is None else f"a {type(text).__name__}"
            raise BadDocument(f"field {self._field!r} is not text", f"it holds {kind}")
        try:
            text.encode()  # JSON can encode half of a surrogate pair, which UTF-8 cannot
        except UnicodeEncodeError as error:
            detail = f"character {error.start} is half of a surrogate pair"
            raise BadDocument("invalid text", detail) from error
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
                f"choose with {hint('column', 'NAME', 'field')}"
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

    A document is named by its path in the library.
    """

    def __init__(self, record: PythonStdlib) -> None:
        self._root = Path(sysconfig.get_path("stdlib"))

    def files(self) -> list[Path]:
        """Return the library's files in order of their path."""
        kept = []
        for folder, inside, names in os.walk(self._root):
            inside[:] = [name for name in inside if name not in EXCLUDED_FOLDERS]
            # Recorded build settings are generated too.
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
        """Yield the files; skip and count the few that are not UTF-8."""
        for file in self.files():
            name = self._name(file)
            try:
                yield Document(name, decode_utf8(file.read_bytes()))
            except UnicodeDecodeError:
                skipped.note(name, "not UTF-8")


def _batches(source: Source, skipped: Skipped) -> Iterator[list[Document]]:
    """Yield documents in groups large enough to encode in parallel; count empty ones."""
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


def encode_utf8(document: Document) -> bytes:
    """Return a document's text as UTF-8; raise ``DataError`` if that is not possible."""
    try:
        return document.text.encode()
    except UnicodeEncodeError as error:
        problem = f"character {error.start} is half of a surrogate pair"
        raise DataError(f"{document.name}: {problem}; correct the text") from error


def iter_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the non-blank lines of a file, named ``path:line`` with lines from 1."""
    with open_binary(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{path.as_posix()}:{number}", line


def parse_json_object(line: bytes) -> dict[str, Any]:
    """Return the object in a line of JSON; raise ``BadDocument`` if there is none."""
    try:
        content = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        detail = f"byte {error.start} of the line: {error.reason}"
        raise BadDocument("not UTF-8", detail) from error
    except (ValueError, RecursionError) as error:
        raise BadDocument("not JSON", str(error)) from error
    if not isinstance(content, dict):
        raise BadDocument("not an object", f"the line holds a {type(content).__name__}")
    return content


def expand_patterns(patterns: tuple[str, ...]) -> list[Path]:
    """Return the files that match paths and patterns, each once, sorted per pattern."""
    matches: dict[Path, None] = {}
    for pattern in patterns:
        if Path(pattern).is_file():
            matches[Path(pattern)] = None
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
        matches.update(dict.fromkeys(files))
    return list(matches)


@contextmanager
def open_binary(path: Path) -> Iterator[IO[bytes]]:
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


def hint(field: str, value: str, flag: str | None = None) -> str:
    """Describe how to set a source's field, in a run file and as a flag of ``data prepare``."""
    return f"{field}: {value} in the source (data prepare: --{flag or field} {value})"


def decode_utf8(data: bytes) -> str:
    """Decode UTF-8, without a byte order mark."""
    return data.removeprefix(b"\xef\xbb\xbf").decode()
