"""Sources of documents: text, JSON lines and tables, and the Python standard library.

A source streams documents in a fixed order. An unreadable document is an error that names it, or
is skipped and counted if the record says ``bad: skip``. Existing token files are in ``index.py``.
"""

import glob
import os
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moefold.data.config import DataError, FileSource, Jsonl, Parquet, PythonStdlib, Text
from moefold.data.corpora.ahead import map_ahead
from moefold.data.corpora.records import (
    BadDocument,
    hint,
    iter_objects,
    parse_json_object,
    text_field,
)
from moefold.data.corpora.streams import (
    MAX_DOCUMENT,
    READ_BYTES,
    check_size,
    decode_utf8,
    open_stream,
)
from moefold.data.corpora.tables import is_saved, is_text, open_saved, open_table
from moefold.data.tokenizer import Tokenizer, in_groups, parallel_encoding

MAX_NAMES = 20
MAX_REFUSED = 8
"""Maximum number of unreadable documents in an error."""
MAX_LONG = 10
"""Maximum number of overlong documents in an error."""
_BATCH_DOCUMENTS = 1024
"""Most documents of a batch, which has as many characters as are encoded at a time."""
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


class Skipped(dict[str, dict[str, Any]]):
    """Skipped documents: count and first names by reason. Also collects errors."""

    def __init__(self) -> None:
        super().__init__()
        self._refused: list[str] = []
        self._long: list[tuple[int, str]] = []
        self._remedy = ""
        self._columns: set[str] = set()

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
            listed = "\n  ".join(self._refused)
            skip = hint("bad", "skip")
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

    def note_file(self, name: str, reason: str) -> None:
        """Count a file that is not read, and keep the first names."""
        self.note(name, reason)
        self[reason]["unit"] = "file"

    def note_columns(self, names: Iterable[str]) -> None:
        """Keep the names of columns that are not read, each once."""
        reason = "not read"
        for name in names:
            if name not in self._columns:
                self._columns.add(name)
                self.note(name, reason)
                self[reason]["unit"] = "column"


class Source(ABC):
    """Base of sources: streams documents in a fixed order."""

    @abstractmethod
    def files(self) -> list[Path]:
        """Return the files that are read, in order."""

    whole_documents = False
    """Whether documents are never cut, so that prepared data depends on the sequence length."""

    def end_ids(self, tokenizer: Tokenizer) -> list[int]:
        """Return the ids of tokens that end generated texts because documents end with them."""
        return [tokenizer.end_id]

    def documents(self, skipped: Skipped) -> Iterator[Document]:
        """Yield the documents; count the others in ``skipped``."""
        raise NotImplementedError(f"{type(self).__name__} must implement documents")

    def encode(self, tokenizer: Tokenizer, seq: int, skipped: Skipped) -> Iterator[list[Encoded]]:
        """Yield tokenized documents, in groups; ``seq`` is the sequence length."""

        def encode_batch(batch: list[Document]) -> list[Encoded]:
            encoded = tokenizer.encode_documents([document.text for document in batch])
            pairs = zip(batch, encoded, strict=True)
            return [Encoded(document.name, encode_utf8(document), ids) for document, ids in pairs]

        with parallel_encoding():
            yield from map_ahead(encode_batch, _batches(self, skipped))

    def template_values(self) -> list[dict[str, Any]]:
        """Return the template's values of the conversations read so far, if they are any."""
        return []

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
        self._patterns = record.files
        self._bad = record.bad

    tables = False
    """Whether folders that ``datasets`` saved are read."""

    def files(self) -> list[Path]:
        """Return the files that the record's patterns match."""
        return list(self._expand().columns)

    def _expand(self) -> "Expansion":
        return expand_patterns(self._patterns, self.tables)

    def _table_files(self, skipped: Skipped) -> Iterator[tuple[Path, list[str] | None]]:
        """Yield the files and the columns to read (None for all); note files that are left out."""
        found = self._expand()
        for name in found.left_out:
            skipped.note_file(name, "not named by state.json")
        yield from found.columns.items()

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
        with open_stream(path) as file:
            if self._split is None:
                remedy = "divide the file, or give what separates its documents with split"
                data = file.read(MAX_DOCUMENT + 1)
                check_size(path.as_posix(), len(data), remedy)
                yield path.as_posix(), 0, data
                return
            sep = self._split.encode()
            rest = bytearray()
            start = 0
            number = 0
            while chunk := file.read(READ_BYTES):
                searched = max(len(rest) - len(sep) + 1, 0)  # a separator may begin after this
                rest += chunk
                while (end := rest.find(sep, searched)) >= 0:
                    yield f"{path.as_posix()}#{number}", start, bytes(rest[:end])
                    del rest[: end + len(sep)]
                    start += end + len(sep)
                    number += 1
                    searched = 0
                remedy = "use another separator (split), or divide the document"
                check_size(f"{path.as_posix()}#{number}", len(rest), remedy)
            if rest:
                yield f"{path.as_posix()}#{number}", start, bytes(rest)


class JsonlReader(FileReader):
    """Each line, or item of an array, is an object with the text in one field.

    Blank lines are ignored.
    """

    def __init__(self, record: Jsonl) -> None:
        super().__init__(record)
        self._field = record.field

    def documents(self, skipped: Skipped) -> Iterator[Document]:
        """Yield the lines of all files, named ``path:line`` from 1, or items ``path[item]``."""
        for path in self.files():
            for name, line in iter_objects(path):
                try:
                    yield Document(name, text_field(parse_json_object(line), self._field))
                except BadDocument as error:
                    self.refuse(name, *error.args, skipped=skipped)


class ParquetReader(FileReader):
    """Each row is a document, in a column of strings; files are streamed."""

    tables = True

    def __init__(self, record: Parquet) -> None:
        super().__init__(record)
        self._column = record.column
        import_module("pyarrow.parquet")  # an optional dependency: fail before anything is read

    def documents(self, skipped: Skipped) -> Iterator[Document]:
        """Yield the rows of all files, named ``path:row`` with rows counted from 0."""
        for path, shown in self._table_files(skipped):
            with open_table(path, [self._column]) as table:
                self._check(path, table.schema, shown)
                values = (value for batch in table.batches for value in batch.column(0))
                yield from self._rows(path, values, skipped)

    def _check(self, path: Path, schema: Any, shown: list[str] | None) -> None:
        columns = [name for name in schema.names if shown is None or name in shown]
        if self._column not in columns:
            hidden = f" ({path.parent}/state.json shows no others)" if shown else ""
            raise DataError(
                f"{path}: has no column {self._column!r}; its columns are {columns}{hidden}; "
                f"choose with {hint('column', 'NAME', 'field')}"
            )
        kind = schema.field(self._column).type
        if not is_text(kind):
            raise DataError(
                f"{path}: column {self._column!r} holds {kind}, not strings; choose another with "
                f"{hint('column', 'NAME', 'field')}"
            )

    def _rows(self, path: Path, values: Iterator[Any], skipped: Skipped) -> Iterator[Document]:
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
                check_size(name, len(text), "divide it, or leave it out")
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
    return in_groups(
        _with_text(source, skipped), lambda document: len(document.text), _BATCH_DOCUMENTS
    )


def _with_text(source: Source, skipped: Skipped) -> Iterator[Document]:
    for document in source.documents(skipped):
        if document.text:
            yield document
        else:
            skipped.note(document.name, "empty")


def encode_utf8(document: Document) -> bytes:
    """Return a document's text as UTF-8; raise ``DataError`` if that is not possible."""
    try:
        return document.text.encode()
    except UnicodeEncodeError as error:
        problem = f"character {error.start} is half of a surrogate pair"
        raise DataError(f"{document.name}: {problem}; correct the text") from error


class Expansion(NamedTuple):
    """The files that patterns match."""

    columns: dict[Path, list[str] | None]
    """The columns to read of each file, in order; None for all."""
    left_out: list[str]
    """Files that belong to no set."""


def expand_patterns(patterns: tuple[str, ...], tables: bool = False) -> Expansion:
    """Return the files that match paths and patterns, each once, sorted per pattern.

    With ``tables``, a folder that ``datasets`` saved stands for the files of its set.
    """
    found = Expansion({}, [])
    for pattern in patterns:
        if Path(pattern).is_file():
            found.columns[Path(pattern)] = None
            continue
        if Path(pattern).is_dir():
            paths = [Path(pattern)]
        else:
            matches = glob.glob(os.path.expanduser(pattern), recursive=True)
            paths = [Path(name) for name in sorted(matches)]
        if files := [path for path in paths if path.is_file()]:
            found.columns.update(dict.fromkeys(files))
        else:
            _expand_folders(pattern, [path for path in paths if path.is_dir()], tables, found)
    return found


def _expand_folders(pattern: str, folders: list[Path], tables: bool, found: Expansion) -> None:
    """Add the sets in folders that ``datasets`` saved to ``found``; raise if there are none."""
    saved = [folder for folder in folders if is_saved(folder)]
    if saved and not tables:
        raise DataError(f"{saved[0]}: is a folder of datasets; read it with source: parquet")
    for folder in saved:
        content = open_saved(folder)
        found.columns.update(dict.fromkeys(content.files, content.columns))
        found.left_out.extend(map(str, content.left_out))
    if saved:
        return
    if folders:
        raise DataError(f"{pattern}: is a folder; add a pattern such as /**/*.txt")
    raise DataError(f"{pattern}: no file matches; name existing files (files: [...] in the source)")
