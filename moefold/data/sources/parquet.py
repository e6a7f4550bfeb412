"""Parquet files as documents; needs ``pyarrow``."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from moefold.data.config import DataError
from moefold.data.config import Parquet as Record
from moefold.data.sources.base import Document, FileReader, Skipped, setting

_ROWS = 1024


class Parquet(FileReader):
    """Each row is a document, in a column of strings; files are streamed, never read whole."""

    def __init__(self, record: Record) -> None:
        super().__init__(record)
        self._column = record.column

    def documents(self, skipped: Skipped) -> Iterator[Document]:
        """Yield the rows of all files, named ``path:row`` with rows counted from 0."""
        for path in self.files():
            try:
                with pq.ParquetFile(path) as file:
                    self._check(path, file.schema_arrow)
                    yield from self._rows(path, file, skipped)
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{path}: cannot be read as Parquet: {error}") from error

    def _check(self, path: Path, schema: pa.Schema) -> None:
        if self._column not in schema.names:
            raise DataError(
                f"{path}: has no column {self._column!r}; its columns are {schema.names}: "
                f"name one with {setting('column', 'NAME', 'field')}"
            )
        kind = schema.field(self._column).type
        inner = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not any(check(inner) for check in (pa.types.is_string, pa.types.is_large_string)):
            raise DataError(f"{path}: column {self._column!r} holds {kind}, not strings")

    def _rows(self, path: Path, file: pq.ParquetFile, skipped: Skipped) -> Iterator[Document]:
        number = 0
        for batch in file.iter_batches(batch_size=_ROWS, columns=[self._column]):
            for value in batch.column(0):
                name = f"{path.as_posix()}:{number}"
                number += 1
                try:
                    text = value.as_py()
                except UnicodeDecodeError as error:
                    self.refuse(name, "not UTF-8", f"byte {error.start}: {error.reason}", skipped)
                    continue
                if text is None:
                    reason = f"column {self._column!r} is no text"
                    self.refuse(name, reason, "it holds null", skipped)
                    continue
                yield Document(name, text)
