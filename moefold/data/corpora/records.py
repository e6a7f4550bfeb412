"""JSON objects of a file: one per line, or the items of one array, streamed."""

import codecs
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from moefold.data.config import DataError
from moefold.data.corpora.streams import MAX_DOCUMENT, READ_BYTES, check_size, open_stream

_BOM = b"\xef\xbb\xbf"
_TABLE_NAME = re.compile(r"\.[ct]sv(\.\w+)?$")
_SPACE = " \t\r\n"
_SCANNER = json.JSONDecoder()
_MARGIN = 16
"""A JSON error this close to the end of the text, in characters, may be due to the end."""


class BadDocument(ValueError):
    """An unusable example; arguments are the reason and a detail."""


def iter_objects(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield name and JSON text of each object of a file.

    Lines that are not blank are named ``path:line`` with lines from 1, and the items of an array
    ``path[item]`` with items from 0. Whether each is an object is not checked.
    """
    with open_stream(path) as file:
        head = file.peek(64)[:64].removeprefix(_BOM).lstrip()
        if head and head[:1] not in b"[{" and _TABLE_NAME.search(path.name):
            raise _table_error(path)
        if head.startswith(b"[") and ".jsonl" not in path.suffixes:
            yield from _Array(path, file).items()
            return
        number = 0
        name = path.as_posix()
        while line := file.readline(MAX_DOCUMENT + 1):
            number += 1
            check_size(f"{name}:{number}", len(line), "divide the line, or leave it out")
            if line.strip():
                yield f"{name}:{number}", line


def _table_error(path: Path) -> DataError:
    """Return the error for a table of text."""
    sep = ", sep='\\t'" if ".tsv" in path.suffixes else ""
    convert = f"Dataset.from_csv('{path.name}'{sep}).to_parquet('NEW.parquet')"
    return DataError(
        f"{path}: is a table of text, not JSON; convert it, and read the result as Parquet: "
        f'python -c "from datasets import Dataset; {convert}"'
    )


class _Array:
    """Reads the items of a JSON array one by one."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")()
        self._text = ""
        self._at = 0
        self._ended = False
        self._number = 0

    def items(self) -> Iterator[tuple[str, bytes]]:
        """Yield name and JSON text of each item."""
        self._skip("[")
        if self._peek() != "]":
            yield self._item()
            while self._peek() == ",":
                self._skip(",")
                yield self._item()
        self._skip("]")
        if self._peek():
            raise self._error("text follows the array")

    def _name(self) -> str:
        return f"{self._path.as_posix()}[{self._number}]"

    def _error(self, reason: str) -> DataError:
        remedy = f"correct it, or convert it to JSON lines: jq -c '.[]' {self._path.name} > NEW"
        return DataError(f"{self._name()}: not JSON: {reason}; {remedy}")

    def _read(self) -> None:
        """Drop what was used, and at least double the rest."""
        rest = self._text[self._at :]
        data = self._file.read(max(READ_BYTES, len(rest)))
        self._ended = not data
        try:
            self._text = rest + self._utf8.decode(data, self._ended)
        except UnicodeDecodeError as error:
            raise self._error(f"not UTF-8: {error.reason}") from error
        self._at = 0

    def _peek(self) -> str:
        """Return the next character that is not white space; empty at the end of the file."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._read()

    def _skip(self, char: str) -> None:
        found = self._peek()
        if found != char:
            what = f"it has {found!r}" if found else "the file ends"
            raise self._error(f"{what} where {char!r} is expected")
        self._at += 1

    def _item(self) -> tuple[str, bytes]:
        self._peek()
        while True:
            try:
                _, end = _SCANNER.raw_decode(self._text, self._at)
            except (ValueError, RecursionError) as error:
                if self._ended or not self._is_cut(error):
                    raise self._error(str(error)) from error
            else:
                # A number at the end of the text may go on.
                if end < len(self._text) or self._ended:
                    break
            self._check_size(len(self._text))
            self._read()
        self._check_size(end)
        name = self._name()
        item = self._text[self._at : end]
        self._at = end
        self._number += 1
        return name, item.encode("utf-8", "surrogatepass")

    def _check_size(self, end: int) -> None:
        check_size(self._name(), end - self._at, "divide it, or leave it out")

    def _is_cut(self, error: Exception) -> bool:
        """Return whether an error may be due to the end of the text that was read."""
        if not isinstance(error, json.JSONDecodeError):
            return False
        open_string = error.msg.startswith("Unterminated string")
        return open_string or error.pos >= len(self._text) - _MARGIN


def parse_json_object(line: bytes) -> dict[str, Any]:
    """Return the object in a line of JSON; raise ``BadDocument`` if there is none."""
    try:
        content = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        detail = f"byte {error.start} of the line: {error.reason}"
        raise BadDocument("not UTF-8", detail) from error
    except (ValueError, RecursionError) as error:
        detail = str(error)
        if line.strip() in (b"{", b"["):
            detail += "; an object over several lines becomes one line with: jq -c . FILE > NEW"
        raise BadDocument("not JSON", detail) from error
    if not isinstance(content, dict):
        raise BadDocument("not an object", f"the line holds a {type(content).__name__}")
    return content


def text_field(content: Mapping[str, Any], field: str) -> str:
    """Return the text in a field of an object; raise ``BadDocument`` if there is none."""
    if field not in content:
        detail = f"the line has {sorted(content)[:20]}; choose with {hint('field', 'NAME')}"
        raise BadDocument(f"no field {field!r}", detail)
    text = content[field]
    if not isinstance(text, str):
        kind = "null" if text is None else f"a {type(text).__name__}"
        raise BadDocument(f"field {field!r} is not text", f"it holds {kind}")
    try:
        text.encode()  # JSON can encode half of a surrogate pair, which UTF-8 cannot
    except UnicodeEncodeError as error:
        detail = f"character {error.start} is half of a surrogate pair"
        raise BadDocument("invalid text", detail) from error
    return text


def hint(field: str, value: str, flag: str | None = None) -> str:
    """Describe how to set a source's field, in a run file and as a flag of ``data prepare``."""
    return f"{field}: {value} in the source (data prepare: --{flag or field} {value})"
