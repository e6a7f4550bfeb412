"""Indexed token files in Megatron's format, and their documents as a ring of rows.

N tokens of a document, or of a piece of one.

``PREFIX.bin`` holds the token ids one after another. ``PREFIX.idx`` holds, little-endian: the magic
``MMIDIDX\\0\\0``, u64 version 1, u8 code of the ids' type, u64 number of sequences, u64 number of
document marks, int32 length of each sequence, int64 byte offset of each in ``.bin``, int64 marks
(the first sequence of each document, then the number of sequences), and optionally one int8 per
sequence, which is not read.

The writer streams, and publishes both files at the end. The reader checks every count, length,
offset and mark against the files' sizes before use.
"""

import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from hashlib import file_digest, sha256
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np

from moefold.data.blocks import BlockDigests, CheckedFile
from moefold.data.config import DataError, IndexedTokens
from moefold.data.derived import StoredFacts
from moefold.files import read_json

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
DTYPES: dict[int, type[np.integer]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
"""Dtypes of ids by code; codes 6 and 7 of the format are floating-point dtypes."""
_HEADER = struct.Struct("<9sQBQQ")
_UINT16_VOCAB = 65500  # from this size on, the format's writers use int32
_SAMPLE_BYTES = 1 << 16
_SAMPLE_COUNT = 64
_CHUNK = 1 << 20
"""Entries of an index that are checked at a time, so that memory is bounded."""


def dtype_for(vocab: int) -> type[np.integer]:
    """Return the dtype in which ids below ``vocab`` are stored."""
    return np.uint16 if vocab < _UINT16_VOCAB else np.int32


def token_files(prefix: str | Path) -> tuple[Path, Path]:
    """Return the ``.bin`` and ``.idx`` paths of a prefix, or of either file's own path."""
    text = str(prefix)
    text = text[:-4] if text.endswith((".bin", ".idx")) else text
    return Path(text + ".bin"), Path(text + ".idx")


def is_token_index(file: Path) -> bool:
    """Return whether an ``.idx`` file has this format, even if damaged; git uses the suffix too."""
    if file.with_suffix(".bin").is_file():
        return True
    with file.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC


class IndexWriter:
    """Writes documents one by one; the files appear if the ``with`` block ends without an error.

    ``prefix`` is the files' path without suffix; ids must be in ``[0, vocab)``.
    """

    def __init__(self, prefix: str | Path, vocab: int) -> None:
        self.vocab = vocab
        self.dtype = np.dtype(dtype_for(vocab)).newbyteorder("<")
        self.bin, self.idx = token_files(prefix)
        self.lengths = array("i")
        self.n_tokens = 0
        self._drafts = [f.with_name(f"{f.name}.{os.getpid()}.tmp") for f in (self.bin, self.idx)]
        self._hash = sha256()
        self._blocks = BlockDigests()
        self.bin.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._drafts[0].open("wb")

    def __enter__(self) -> "IndexWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with self._file as file:
                file.flush()
                os.fsync(file.fileno())
            if kind is not None:
                return
            lengths = np.frombuffer(self.lengths, dtype=np.int32).astype(np.int64)
            n = len(lengths)
            code = next(c for c, t in DTYPES.items() if np.dtype(t) == self.dtype.newbyteorder("="))
            offsets = (np.cumsum(lengths) - lengths) * self.dtype.itemsize
            with self._drafts[1].open("wb") as file:
                file.write(_HEADER.pack(MAGIC, VERSION, code, n, n + 1))
                file.write(lengths.astype("<i4").tobytes())
                file.write(offsets.astype("<i8").tobytes())
                file.write(np.arange(n + 1).astype("<i8").tobytes())
                file.flush()
                os.fsync(file.fileno())
            self._hash.update(self._drafts[1].read_bytes())
            self.idx.unlink(missing_ok=True)  # first: an index never belongs to another .bin file
            self._drafts[0].replace(self.bin)
            self._drafts[1].replace(self.idx)
        finally:
            for draft in self._drafts:
                draft.unlink(missing_ok=True)

    def add(self, ids_N: np.ndarray | Sequence[int], name: str = "") -> None:
        """Append a document of N >= 1 token ids; ``name`` is for error messages."""
        ids = np.asarray(ids_N)
        what = f"{self.bin}: document {len(self.lengths)}"
        if name:
            what += f" ({name})"
        if ids.size == 0:
            raise DataError(f"{what} has no tokens; leave it out")
        check_ids(ids, self.vocab, what)
        data = ids.astype(self.dtype).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self._blocks.update(data)
        self.lengths.append(len(ids))
        self.n_tokens += len(ids)

    def digest(self) -> str:
        """Return the SHA-256 over both files, once they are published."""
        return self._hash.hexdigest()

    def block_digests(self) -> list[str]:
        """Return the digest of each block of the ``.bin`` file."""
        return self._blocks.hexdigests()


class IndexedDataset:
    """Reads indexed token files: the index at once, ids on demand (:class:`CheckedFile`).

    A document is one or more sequences of the file. Tokens are numbered across documents.

    Raises:
        DataError: if the index is inconsistent; the message names the field and its byte offset.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.bin, self.idx = token_files(prefix)
        for file in (self.bin, self.idx):
            if not file.is_file():
                raise DataError(f"{file}: no such file; token files are pairs of .bin and .idx")
        self.file = CheckedFile(self.bin)
        """The ids."""
        lengths, offsets, marks_1 = self._read_index()
        self._check_entries(lengths, offsets, marks_1)
        n = len(lengths)
        self._sequence_starts_1 = np.zeros(n + 1, np.int64)
        np.cumsum(lengths, out=self._sequence_starts_1[1:])
        # Large indices are usual: what follows from the rest is not kept.
        one_each = len(marks_1) == n + 1 and all(
            np.array_equal(marks_1[at : at + _CHUNK], np.arange(at, min(at + _CHUNK, n + 1)))
            for at in range(0, n + 1, _CHUNK)
        )
        self.document_starts_1 = (
            self._sequence_starts_1 if one_each else self._sequence_starts_1[marks_1]
        )
        """int64 [documents + 1], first token of each document, then the total number of tokens."""
        item = self.dtype.itemsize
        dense = all(
            np.array_equal(
                offsets[at : at + _CHUNK],
                self._sequence_starts_1[at : at + _CHUNK][: n - at] * item,
            )
            for at in range(0, n, _CHUNK)
        )
        self._offsets = None if dense else offsets

    def _fail(self, field: str, byte: int, text: str, file: Path | None = None) -> NoReturn:
        raise DataError(f"{file or self.idx}: {field} at byte {byte}: {text}")

    def _check(
        self,
        wrong: np.ndarray,
        field: str,
        place: tuple[int, int, int],
        text: str,
        *values: np.ndarray,
    ) -> None:
        """Raise ``DataError`` for the first ``wrong`` entry.

        ``place`` has the byte of the field's first entry, the bytes of an entry, and the number of
        the first one in ``wrong``; ``text`` is a format string for the entry's ``values``.
        """
        first, step, at = place
        for i in np.flatnonzero(wrong)[:1]:
            entry = text.format(*(each[i] for each in values))
            self._fail(f"{field} {at + i}", first + step * int(at + i), entry)

    def _read_index(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return lengths and offsets of sequences, and marks of documents."""
        size = self.idx.stat().st_size
        at = _HEADER.size
        if size < at:
            self._fail("header", 0, f"the file has {size} bytes, fewer than the header's {at}")
        with self.idx.open("rb") as file:
            magic, version, code, n, marks = _HEADER.unpack(file.read(at))
        middle = at + 12 * n
        end = middle + 8 * marks
        need = f"need {{}} bytes, the file has {size}"
        for wrong, field, byte, text in (
            (magic != MAGIC, "magic", 0, f"is {magic!r}, not {MAGIC!r}: not a token index"),
            (version != VERSION, "version", 9, f"is {version}; only version {VERSION} can be read"),
            (code not in DTYPES, "dtype", 17, f"is {code}; integer types are {list(DTYPES)}"),
            (middle > size, "sequence count", 18, f"{n} sequences {need.format(middle)}"),
            (end > size, "document count", 26, f"{marks} marks {need.format(end)}"),
            (size not in (end, end + n), "end", end, f"{size - end} bytes follow the last field"),
            (marks < 1, "document count", 26, "is 0; must be the number of documents plus one"),
        ):
            if wrong:
                self._fail(field, byte, text)
        self.dtype = np.dtype(DTYPES[code]).newbyteorder("<")
        self._n_sequences = n
        with self.idx.open("rb") as file:
            file.seek(at)
            arrays = [np.fromfile(file, *form) for form in (("<i4", n), ("<i8", n), ("<i8", marks))]
        for array_read, number in zip(arrays, (n, n, marks), strict=True):
            if len(array_read) != number:
                self._fail("end", size, "the file became shorter while it was read")
        return arrays[0], arrays[1], arrays[2]

    def _check_entries(self, lengths: np.ndarray, offsets: np.ndarray, marks: np.ndarray) -> None:
        """Check that lengths are not negative and offsets are aligned, ascending and in bounds.

        Marks must start at 0, never decrease, and end with the number of sequences.
        """
        item = self.dtype.itemsize
        size = self.file.size
        n = len(lengths)
        end = 0
        for at in range(0, n, _CHUNK):
            part = slice(at, at + _CHUNK)
            end = self._check_sequences(at, lengths[part], offsets[part], end)
        if size % item:
            text = f"is not a multiple of {item}, the bytes of a token; the file is damaged"
            self._fail("end of file", size, text, self.bin)
        first = _HEADER.size + 12 * n
        for at in range(0, len(marks), _CHUNK):
            part = marks[at : at + _CHUNK]
            before = np.append(marks[at - 1] if at else 0, part[:-1])
            last = np.arange(at, at + len(part)) == len(marks) - 1
            for wrong, text in (
                (part[: at == 0] != 0, "is {}, not 0"),
                (part < before, "{} is less than the previous mark, {}"),
                (last & (part != n), f"the last mark is {{}}, not the number of sequences, {n}"),
            ):
                self._check(wrong, "document mark", (first, 8, at), text, part, before)

    def _check_sequences(self, at: int, lengths: np.ndarray, offsets: np.ndarray, end: int) -> int:
        """Check sequences from ``at`` on, which begin after byte ``end``; return the last's end."""
        item = self.dtype.itemsize
        size = self.file.size
        first = _HEADER.size
        place = first, 4, at
        self._check(lengths < 0, "length of sequence", place, "{} is negative", lengths)
        ends = offsets + lengths.astype(np.int64) * item
        before = np.append(end, ends[:-1])
        for wrong, text in (
            (offsets < 0, "{} is negative"),
            (offsets % item != 0, f"{{}} is not a multiple of {item}, the bytes of a token"),
            (offsets > size, f"{{}} is beyond the end of the .bin file, which has {size} bytes"),
            (offsets < before, "{} is before the end of the previous sequence, {}"),
        ):
            place = first + 4 * self._n_sequences, 8, at
            self._check(wrong, "offset of sequence", place, text, offsets, before)
        for i in np.flatnonzero(ends > size)[:1]:
            text = f"sequence {at + i} ends at byte {ends[i]}; "
            text += "truncated, or not the file of this index"
            self._fail("end of file", size, text, self.bin)
        return int(ends[-1])

    def __len__(self) -> int:
        return len(self.document_starts_1) - 1

    @property
    def n_tokens(self) -> int:
        """Number of tokens in all documents."""
        return int(self.document_starts_1[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return int64 ids of tokens ``start`` to ``stop``, numbered across documents."""
        assert 0 <= start <= stop <= self.n_tokens, (start, stop, self.n_tokens)
        item = self.dtype.itemsize
        parts = []
        s = int(np.searchsorted(self._sequence_starts_1, start, side="right")) - 1
        while start < stop:
            # Without offsets, sequences follow one another without a gap.
            end = stop
            at = start * item
            if self._offsets is not None:
                first = int(self._sequence_starts_1[s])
                end = min(stop, int(self._sequence_starts_1[s + 1]))
                at = int(self._offsets[s]) + (start - first) * item
            data = self.file.read(at, (end - start) * item)
            parts.append(np.frombuffer(data, self.dtype))
            start = end
            s += 1
        return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)

    def document(self, i: int) -> np.ndarray:
        """Return int64 ids of document ``i``."""
        return self.read(int(self.document_starts_1[i]), int(self.document_starts_1[i + 1]))

    def digest(self, full: bool = False) -> str:
        """Return a SHA-256 of the index, and of the size and 64 evenly spaced samples of ``.bin``.

        It identifies files that are too large to read at every start, but misses changes between
        the samples that keep all lengths. With ``full`` it covers every byte, like the writer's.
        """
        if full:
            with self.bin.open("rb") as file:
                whole = file_digest(file, "sha256")
            whole.update(self.idx.read_bytes())
            return whole.hexdigest()
        with self.idx.open("rb") as file:
            sampled = file_digest(file, "sha256")
        size = self.file.size
        sampled.update(str(size).encode())
        with self.bin.open("rb") as file:
            for i in range(_SAMPLE_COUNT):
                file.seek(max(size - _SAMPLE_BYTES, 0) * i // (_SAMPLE_COUNT - 1))
                sampled.update(file.read(_SAMPLE_BYTES))
        return sampled.hexdigest()


def check_ids(ids_N: np.ndarray, vocab: int, what: str, first: int = 0) -> None:
    """Raise ``DataError`` for an id outside ``[0, vocab)``; positions count from ``first``."""
    if len(ids_N) and (ids_N.min() < 0 or ids_N.max() >= vocab):
        wrong_N = (ids_N < 0) | (ids_N >= vocab)
        i = int(np.flatnonzero(wrong_N)[0])
        raise DataError(
            f"{what}, position {first + i}: token id {int(ids_N[i])} is not in [0, {vocab}); "
            "the tokens were made with another tokenizer, or the file is damaged"
        )


def metadata_file(prefix: str | Path) -> Path:
    """Return the path of the JSON file that describes token files, such as their tokenizer."""
    return token_files(prefix)[1].with_suffix(".json")


def read_metadata(prefix: str | Path) -> dict:
    """Return the metadata of token files; empty for files of other programs."""
    file = metadata_file(prefix)
    return read_json(file, DataError) if file.is_file() else {}


class UnfitTokens(DataError):
    """Existing token files are intact but do not fit the run."""


class IndexedSource:
    """Existing token files as a source: validated, and used in place."""

    def __init__(self, record: IndexedTokens) -> None:
        self._record = record
        self.prefix = Path(record.prefix)
        self.dataset = IndexedDataset(record.prefix)
        self.metadata = read_metadata(record.prefix)

    def check_tokenizer(self, fingerprint: str) -> None:
        """Raise ``UnfitTokens`` if another tokenizer made the files and the record forbids it."""
        made_by = self.metadata.get("tokenizer")
        if made_by in (None, fingerprint) or self._record.other_tokenizer == "allow":
            return
        raise UnfitTokens(
            f"{metadata_file(self.prefix)}: the tokens were made by the tokenizer {made_by[:12]}…, "
            f"but the run's is {fingerprint[:12]}…; use the former, prepare the text again, or "
            "set other_tokenizer: allow in the source"
        )

    def split(self, derived: StoredFacts) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of the training documents and of the held-out ones."""
        number = len(self.dataset)
        if not self._record.holdout:
            return np.arange(number), np.zeros(0, np.int64)
        held_out = derived.held_out(self._record.label, number, self._record.holdout)
        return _true_indices(~held_out), _true_indices(held_out)


def _true_indices(chosen: np.ndarray) -> np.ndarray:
    """Return the ascending indices of true entries, in half of int64's memory where they fit."""
    dtype = np.uint32 if len(chosen) < 2**32 else np.int64
    return np.flatnonzero(chosen).astype(dtype)


class DocumentPiece(NamedTuple):
    """The part of a document that is in one sequence."""

    document: int
    """Index of the document in its file."""
    start: int
    """Position of the piece's first token in the document."""
    ids_N: np.ndarray
    """int64 token ids."""
    next_token: int | None
    """Id of the token after the piece in the document, None at the document's end."""
    loss_mask_N: np.ndarray | None = None
    """bool, which tokens are labels; None if all are."""


class Corpus:
    """All or selected documents of a token file, concatenated.

    ``name`` is for messages; ids must be in ``[0, vocab)``; ``chosen`` has the indices of the
    selected documents, ascending (default: all).
    """

    def __init__(
        self, name: str, dataset: IndexedDataset, vocab: int, chosen: np.ndarray | None = None
    ) -> None:
        self.name = name
        self.dataset = dataset
        self.vocab = vocab
        # An index may have 10^8 documents: no array of that length is copied without need.
        lengths = np.diff(dataset.document_starts_1)
        if chosen is not None:
            lengths = lengths[chosen]
        has_tokens = lengths > 0
        if not has_tokens.all():
            lengths = lengths[has_tokens]
            chosen = _true_indices(has_tokens) if chosen is None else chosen[has_tokens]
        self._indices = np.arange(len(dataset)) if chosen is None else chosen
        self._starts_1 = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=self._starts_1[1:])

    @property
    def datasets(self) -> tuple[IndexedDataset, ...]:
        """The token files that are read."""
        return (self.dataset,)

    @property
    def n_documents(self) -> int:
        """Number of selected documents with at least one token."""
        return len(self._indices)

    @property
    def n_tokens(self) -> int:
        """Number of tokens in the selected documents."""
        return int(self._starts_1[-1])

    def slice(self, start: int, rows: int) -> Iterator[DocumentPiece]:
        """Yield the pieces in ``rows`` rows from ``start``, wrapping around at the end."""
        assert 0 <= start < self.n_tokens >= rows >= 0, (start, rows, self.n_tokens)
        d = int(np.searchsorted(self._starts_1, start, side="right")) - 1
        while rows:
            first = int(self._starts_1[d])
            end = int(self._starts_1[d + 1])
            taken = min(rows, end - start)
            number = int(self._indices[d])
            base = int(self.dataset.document_starts_1[number]) + start - first
            more = 1 if start + taken < end else 0
            ids = self.dataset.read(base, base + taken + more)
            check_ids(ids, self.vocab, f"{self.dataset.bin}: document {number}", start - first)
            following = int(ids[-1]) if more else None
            yield DocumentPiece(number, start - first, ids[:taken], following)
            rows -= taken
            d = (d + 1) % self.n_documents
            start = int(self._starts_1[d])

    def document(self, i: int) -> np.ndarray:
        """Return int64 ids of the i-th selected document."""
        return self.dataset.document(int(self._indices[i]))
