"""JSON lines as documents."""

import json
from collections.abc import Iterator

from moefold.data.config import Jsonl as Record
from moefold.data.sources.base import Document, FileReader, Skipped, opened, setting


class Jsonl(FileReader):
    """Each line is an object with the text in one field; lines of white space hold nothing."""

    def __init__(self, record: Record) -> None:
        super().__init__(record)
        self._field = record.field

    def documents(self, skipped: Skipped) -> Iterator[Document]:
        """Yield the lines of all files, named ``path:line`` with lines counted from 1."""
        for path in self.files():
            with opened(path) as file:
                for number, line in enumerate(file, 1):
                    if not line.strip():
                        continue
                    name = f"{path.as_posix()}:{number}"
                    try:
                        text = self._text(line)
                    except (ValueError, RecursionError) as error:
                        reason, said = _reason(error)
                        self.refuse(name, reason, said, skipped)
                    else:
                        yield Document(name, text)

    def _text(self, line: bytes) -> str:
        """Return the document of a line, or raise what is wrong with it."""
        content = json.loads(line.decode("utf-8-sig"))
        if not isinstance(content, dict):
            raise _Wrong("no object", f"the line holds a {type(content).__name__}")
        if self._field not in content:
            said = f"the line has {sorted(content)[:20]}; name one with {setting('field', 'NAME')}"
            raise _Wrong(f"no field {self._field!r}", said)
        text = content[self._field]
        if not isinstance(text, str):
            kind = "null" if text is None else f"a {type(text).__name__}"
            raise _Wrong(f"field {self._field!r} is no text", f"it holds {kind}")
        text.encode("utf-8")  # JSON can spell half of a surrogate pair, which no text can hold
        return text


class _Wrong(ValueError):
    """A line that is JSON but holds no document: reason and detail."""


def _reason(error: Exception) -> tuple[str, str]:
    if isinstance(error, _Wrong):
        return error.args
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8", f"byte {error.start} of the line: {error.reason}"
    if isinstance(error, UnicodeEncodeError):
        return "broken text", f"character {error.start} is half of a surrogate pair"
    return "not JSON", str(error)
