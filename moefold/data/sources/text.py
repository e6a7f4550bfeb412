"""Plain text files as documents."""

from collections.abc import Iterator
from pathlib import Path

from moefold.data.config import Text as Record
from moefold.data.sources.base import Document, FileReader, Skipped, decoded, opened

_CHUNK = 1 << 20


class Text(FileReader):
    """Each file is a document named by its path, or several numbered from 0 where it is split."""

    def __init__(self, record: Record) -> None:
        super().__init__(record)
        self._split = record.split

    def documents(self, skipped: Skipped) -> Iterator[Document]:
        """Yield the documents of all files, line ends as they are."""
        for path in self.files():
            for name, start, data in self._pieces(path):
                try:
                    text = data.decode("utf-8") if start else decoded(data)
                    yield Document(name, text)
                except UnicodeDecodeError as error:
                    said = f"byte {start + error.start}: {error.reason}"
                    self.refuse(name, "not UTF-8", said, skipped)

    def _pieces(self, path: Path) -> Iterator[tuple[str, int, bytes]]:
        """Yield name, first byte and content of each document of a file."""
        with opened(path) as file:
            if self._split is None:
                yield path.as_posix(), 0, file.read()
                return
            mark, rest, start, number = self._split.encode(), b"", 0, 0
            while True:
                chunk = file.read(_CHUNK)
                *whole, rest = (rest + chunk).split(mark) if chunk else [rest]
                for piece in whole:
                    yield f"{path.as_posix()}#{number}", start, piece
                    start, number = start + len(piece) + len(mark), number + 1
                if not chunk:
                    break
            if rest:
                yield f"{path.as_posix()}#{number}", start, rest
