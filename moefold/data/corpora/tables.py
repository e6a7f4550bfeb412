"""Tables: Parquet and Arrow files, and folders that ``datasets`` saved, read batch by batch.

A folder of ``save_to_disk`` holds the files that its ``state.json`` names, in that order; other
Arrow files in it, such as ``cache-*.arrow``, are left out and named.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from moefold.data.config import DataError
from moefold.data.corpora.streams import PARQUET, READ_BYTES, find_kind, find_packing, read_head
from moefold.files import read_json

STATE = "state.json"
SETS = "dataset_dict.json"
SUFFIXES = (".parquet", ".arrow")
READ_ROWS = 1024
"""Maximum number of rows of a Parquet file that are read at a time."""
_STATE_BYTES = 1 << 24


class SavedSet(NamedTuple):
    """What a folder of ``datasets`` holds."""

    files: list[Path]
    columns: list[str] | None
    """Columns that the set shows; None for all."""
    left_out: list[Path]
    """Arrow files in the folder that do not belong to the set."""


def is_saved(folder: Path) -> bool:
    """Return whether a folder looks as if ``datasets`` saved a set, or several, there."""
    named = any((folder / name).is_file() for name in (STATE, SETS))
    return named or (folder.is_dir() and any(folder.glob("*.arrow")))


def open_saved(folder: Path) -> SavedSet:
    """Return the content of a folder with Arrow files, which ``datasets`` saved.

    Raises:
        DataError: if it holds several sets, or is not complete.
    """
    file = folder / STATE
    if not file.is_file():
        raise _no_state(folder)
    state = read_json(file, DataError, _STATE_BYTES)
    names = _data_files(file, state.get("_data_files"))
    for name in names:
        if Path(name).name != name:
            raise DataError(f"{file}: _data_files names {name!r}, which is not in the folder")
        if not (folder / name).is_file():
            raise DataError(f"{file}: names {name}, which is missing; copy the whole folder")
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise DataError(
            f"{file}: the set is a choice of rows (_indices_files), which is not read; save it "
            "again with datasets' flatten_indices() and save_to_disk"
        )
    columns = None if state.get("_output_all_columns") else state.get("_format_columns")
    if not isinstance(columns, list | None):
        raise DataError(f"{file}: _format_columns is not a list; save the set again")
    others = sorted(f for f in folder.glob("*.arrow") if f.name not in names)
    return SavedSet([folder / name for name in names], columns, others)


def _data_files(file: Path, entries: Any) -> list[str]:
    """Return the file names in ``_data_files`` of a ``state.json``."""
    names = list[str]()
    for entry in entries if isinstance(entries, list) else ():
        name = entry.get("filename") if isinstance(entry, dict) else None
        if not isinstance(name, str):
            raise DataError(f"{file}: _data_files has an entry without filename; save it again")
        names.append(name)
    if not names:
        raise DataError(f"{file}: _data_files names no files; save the set again (save_to_disk)")
    return names


def _no_state(folder: Path) -> DataError:
    """Return the error for a folder without ``state.json``."""
    file = folder / SETS
    if not file.is_file():
        return DataError(
            f"{folder}: has no {STATE}, which says which of its Arrow files belong to the set; "
            f"copy the whole folder, or name the files: {folder}/*.arrow"
        )
    sets = read_json(file, DataError, _STATE_BYTES).get("splits")
    names = [name for name in sets if isinstance(name, str)] if isinstance(sets, list) else []
    there = [name for name in names if (folder / name / STATE).is_file()]
    if missing := [name for name in names if name not in there]:
        return DataError(
            f"{file}: names the set {missing[0]!r}, which is not complete in the folder; copy the "
            f"whole folder, or name the folder of one of {there}"
        )
    example = f", such as {folder / there[0]}" if there else ""
    sets = f" ({', '.join(there)})" if there else ""
    return DataError(f"{folder}: contains several sets{sets}; name the folder of one{example}")


class OpenTable(NamedTuple):
    """An open table."""

    schema: Any
    batches: Iterator[Any]
    """Record batches, with the chosen columns only."""


@contextmanager
def open_table(path: Path, columns: Sequence[str] | None = None) -> Iterator[OpenTable]:
    """Open a Parquet or Arrow file; columns that it lacks are ignored.

    Raises:
        DataError: if it is another kind of file, or damaged.
    """
    arrow = import_module("pyarrow")
    head = read_head(path)
    kind = find_kind(head)
    name = kind.name if kind else "empty" if not head else find_packing(head) or "neither"
    try:
        with path.open("rb") as file:
            if kind is PARQUET:
                yield _with_names_once(_open_parquet(file, columns), path, columns)
            elif (kind and kind.is_table) or path.suffix == ".arrow":
                yield _with_names_once(_open_arrow(arrow, file, columns), path, columns)
            elif path.suffix == ".parquet":
                raise DataError(f"{path}: cannot be read as Parquet: it is {name}; get a new copy")
            else:
                raise DataError(
                    f"{path}: is not a Parquet or Arrow file ({name}); read text with source: "
                    "text or source: jsonl"
                )
    except (arrow.ArrowException, OSError) as error:
        what = "Arrow" if path.suffix == ".arrow" else "Parquet"
        raise DataError(f"{path}: cannot be read as {what}: {error}; get a new copy") from error


def _with_names_once(table: OpenTable, path: Path, columns: Sequence[str] | None) -> OpenTable:
    """Return a table unless several of its columns that are read have one name."""
    for name, count in Counter(table.schema.names).items():
        if count > 1 and (columns is None or name in columns):
            raise DataError(f"{path}: has {count} columns named {name!r}; rename all but one")
    return table


def _open_parquet(file: Any, columns: Sequence[str] | None) -> OpenTable:
    parquet = import_module("pyarrow.parquet")
    reader = parquet.ParquetFile(file, buffer_size=READ_BYTES)
    schema = reader.schema_arrow
    metadata = reader.metadata
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    # A batch of average rows has at most 16 times the bytes that are read at a time.
    row_bytes = max((g.total_byte_size // max(g.num_rows, 1) for g in groups), default=1)
    rows = min(max(16 * READ_BYTES // max(row_bytes, 1), 1), READ_ROWS)
    chosen = None if columns is None else [name for name in columns if name in schema.names]
    return OpenTable(schema, reader.iter_batches(batch_size=rows, columns=chosen))


def _open_arrow(arrow: Any, file: Any, columns: Sequence[str] | None) -> OpenTable:
    try:
        reader = arrow.ipc.open_stream(file)
        batches = iter(reader)
    except arrow.ArrowInvalid:  # the file format, not the stream format
        file.seek(0)
        reader = arrow.ipc.open_file(file)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
    schema = reader.schema
    names = schema.names if columns is None else [n for n in columns if n in schema.names]
    return OpenTable(schema, (_checked(arrow, batch.select(names)) for batch in batches))


def _checked(arrow: Any, batch: Any) -> Any:
    """Return a batch whose offsets are known to lie in its buffers; text may not be UTF-8."""
    for column in batch.columns:
        try:
            column.validate(full=True)
        except arrow.ArrowInvalid as error:
            kind = column.type
            if "UTF8" not in str(error) or not is_text(kind) or arrow.types.is_dictionary(kind):
                raise
            large = arrow.types.is_large_string(kind)
            column.view(arrow.large_binary() if large else arrow.binary()).validate(full=True)
    return batch


def is_text(kind: Any) -> bool:
    """Return whether a column's type is that of text."""
    types = import_module("pyarrow").types
    inner = kind.value_type if types.is_dictionary(kind) else kind
    return types.is_string(inner) or types.is_large_string(inner) or types.is_string_view(inner)


def is_table(path: Path) -> bool:
    """Return whether a file is a Parquet or Arrow file by its name or content."""
    if path.suffix in SUFFIXES:
        return True
    kind = find_kind(read_head(path))
    return kind is not None and kind.is_table
