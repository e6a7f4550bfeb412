"""Indexed token files in Megatron's format, and their documents as a ring of rows.

N tokens of a document or of a piece of one.

``PREFIX.bin`` holds the token ids one after another. ``PREFIX.idx`` holds, little-endian: the magic
``MMIDIDX\\0\\0``, u64 version 1, u8 code of the ids' type, u64 number of sequences, u64 number of
document marks, int32 length of each sequence, int64 byte offset of each in ``.bin``, int64 marks
(the first sequence of each document, then the number of sequences), and optionally one int8 per
sequence, which is not read.

The writer streams, and publishes both files at the end. The reader trusts nothing: every count,
length, offset and mark is checked against the files' sizes before use.
"""

import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from hashlib import file_digest, sha256
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np

from moefold.data.config import DataError, IndexedTokens
from moefold.data.order import key_of
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
"""Dtypes of ids by code; the format's codes 6 and 7 are floating-point dtypes."""
_HEADER = struct.Struct("<9sQBQQ")
_UINT16_VOCAB = 65500  # from this size on, the format's writers use int32
_SAMPLE, _SAMPLES = 1 << 16, 64


def dtype_for(vocab: int) -> type[np.integer]:
    """Return the dtype in which ids below ``vocab`` are stored."""
    return np.uint16 if vocab < _UINT16_VOCAB else np.int32


def files_of(prefix: str | Path) -> tuple[Path, Path]:
    """Return the ``.bin`` and ``.idx`` files of a prefix, which may also be either file's name."""
    text = str(prefix)
    text = text[:-4] if text.endswith((".bin", ".idx")) else text
    return Path(text + ".bin"), Path(text + ".idx")


def is_index(file: Path) -> bool:
    """Return whether an ``.idx`` file is of this format, if damaged: git has others."""
    if file.with_suffix(".bin").is_file():
        return True
    with file.open("rb") as opened:
        return opened.read(len(MAGIC)) == MAGIC


class IndexWriter:
    """Writes documents one by one; the files appear when the ``with`` block ends without error.

    ``prefix`` is the files' path without suffix; ids must be in ``[0, vocab)``.
    """

    def __init__(self, prefix: str | Path, vocab: int) -> None:
        self.vocab = vocab
        self.dtype = np.dtype(dtype_for(vocab)).newbyteorder("<")
        self.bin, self.idx = files_of(prefix)
        self.lengths = array("i")
        self.tokens = 0
        self._drafts = [f.with_name(f"{f.name}.{os.getpid()}.tmp") for f in (self.bin, self.idx)]
        self._hash = sha256()
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
            self.idx.unlink(missing_ok=True)  # first, so that no index is that of another file
            self._drafts[0].replace(self.bin)
            self._drafts[1].replace(self.idx)
        finally:
            for draft in self._drafts:
                draft.unlink(missing_ok=True)

    def add(self, ids_N: np.ndarray | Sequence[int], name: str = "") -> None:
        """Append one document of N >= 1 token ids; ``name`` is for the error message."""
        ids = np.asarray(ids_N)
        what = f"{self.bin}: document {len(self.lengths)}" + (f" ({name})" if name else "")
        if ids.size == 0:
            raise DataError(f"{what} has no tokens; leave it out")
        check_ids(ids, self.vocab, what)
        data = ids.astype(self.dtype).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self.lengths.append(len(ids))
        self.tokens += len(ids)

    def digest(self) -> str:
        """Return the SHA-256 over both files, once they are published."""
        return self._hash.hexdigest()


class Indexed:
    """Reads indexed token files through memory maps.

    A document is one or more sequences of the file; tokens are numbered over all documents.

    Raises:
        DataError: if the index is inconsistent; names the field and its byte.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.bin, self.idx = files_of(prefix)
        for file in (self.bin, self.idx):
            if not file.is_file():
                raise DataError(f"{file}: no such file; token files are pairs of .bin and .idx")
        self._read_index()
        self._check_entries()
        self._rows_1 = np.cumsum(np.append(0, self.lengths), dtype=np.int64)
        self.rows_1 = self._rows_1[self.documents_1]
        """int64 [documents + 1], first token of each document, then the number of tokens."""
        self._ids = np.memmap(self.bin, self.dtype, "r") if self.bin.stat().st_size else None

    def _refuse(self, field: str, byte: int, said: str, file: Path | None = None) -> NoReturn:
        raise DataError(f"{file or self.idx}: {field} at byte {byte}: {said}")

    def _check(
        self, wrong: np.ndarray, what: str, first: int, step: int, said: str, *values: np.ndarray
    ) -> None:
        """Raise ``DataError`` for the first ``wrong`` entry; entry i is at byte first + step * i.

        ``said`` is a format string for the entry's ``values``.
        """
        for i in np.flatnonzero(wrong)[:1]:
            entry = said.format(*(each[i] for each in values))
            self._refuse(f"{what} {i}", first + step * int(i), entry)

    def _read_index(self) -> None:
        size, at = self.idx.stat().st_size, _HEADER.size
        if size < at:
            self._refuse("header", 0, f"the file has {size} bytes, fewer than the header's {at}")
        with self.idx.open("rb") as file:
            magic, version, code, n, marks = _HEADER.unpack(file.read(at))
        middle = at + 12 * n
        end = middle + 8 * marks
        need = f"need {{}} bytes, the file has {size}"
        for wrong, field, byte, said in (
            (magic != MAGIC, "magic", 0, f"is {magic!r}, not {MAGIC!r}: not a token index"),
            (version != VERSION, "version", 9, f"is {version}; only version {VERSION} can be read"),
            (code not in DTYPES, "dtype", 17, f"is {code}; integer types are {list(DTYPES)}"),
            (middle > size, "sequence count", 18, f"{n} sequences {need.format(middle)}"),
            (end > size, "document count", 26, f"{marks} marks {need.format(end)}"),
            (size not in (end, end + n), "end", end, f"{size - end} bytes follow the last field"),
            (marks < 1, "document count", 26, "is 0; must be the number of documents plus one"),
        ):
            if wrong:
                self._refuse(field, byte, said)
        self.dtype = np.dtype(DTYPES[code]).newbyteorder("<")
        raw = np.memmap(self.idx, np.uint8, "r")
        self.lengths = raw[at : at + 4 * n].view("<i4")
        self.offsets = raw[at + 4 * n : middle].view("<i8")
        self.documents_1 = raw[middle:end].view("<i8")

    def _check_entries(self) -> None:
        """Check that lengths are not negative, and offsets aligned, in order and inside ``.bin``.

        Marks must begin at 0, not decrease, and end with the number of sequences.
        """
        lengths, offsets = self.lengths, self.offsets.astype(np.int64)
        item, size, first = self.dtype.itemsize, self.bin.stat().st_size, _HEADER.size
        self._check(lengths < 0, "length of sequence", first, 4, "{} is negative", lengths)
        first += 4 * len(lengths)
        ends = offsets + lengths.astype(np.int64) * item
        before = np.append(0, ends)[:-1]
        for wrong, said in (
            (offsets < 0, "{} is negative"),
            (offsets % item != 0, f"{{}} is not a multiple of {item}, the bytes of a token"),
            (offsets > size, f"{{}} is beyond the end of the .bin file, which has {size} bytes"),
            (offsets < before, "{} is before the end of the previous sequence, {}"),
        ):
            self._check(wrong, "offset of sequence", first, 8, said, offsets, before)
        for i in np.flatnonzero(ends > size)[:1]:
            said = f"sequence {i} ends at byte {ends[i]}; truncated, or not the file of this index"
            self._refuse("end of file", size, said, self.bin)
        if size % item:
            said = f"is not a multiple of {item}, the bytes of a token; the file is damaged"
            self._refuse("end of file", size, said, self.bin)
        marks, n = self.documents_1, len(lengths)
        last = np.arange(len(marks)) == len(marks) - 1
        for wrong, said in (
            (marks[:1] != 0, "is {}, not 0"),
            (marks < np.append(0, marks)[:-1], "{} is less than the previous mark, {}"),
            (last & (marks != n), f"the last mark is {{}}, not the number of sequences, {n}"),
        ):
            first = _HEADER.size + 12 * n
            self._check(wrong, "document mark", first, 8, said, marks, np.append(0, marks)[:-1])

    def __len__(self) -> int:
        return len(self.documents_1) - 1

    @property
    def tokens(self) -> int:
        """Number of tokens in all documents."""
        return int(self.rows_1[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return int64 ids of the tokens ``start`` to ``stop``, numbered over all documents."""
        assert 0 <= start <= stop <= self.tokens, (start, stop, self.tokens)
        item, parts = self.dtype.itemsize, []
        s = int(np.searchsorted(self._rows_1, start, side="right")) - 1
        while start < stop:
            assert self._ids is not None
            end = min(stop, int(self._rows_1[s + 1]))
            at = int(self.offsets[s]) // item + start - int(self._rows_1[s])
            parts.append(self._ids[at : at + end - start])
            start, s = end, s + 1
        return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)

    def document(self, i: int) -> np.ndarray:
        """Return int64 ids of document ``i``."""
        return self.read(int(self.rows_1[i]), int(self.rows_1[i + 1]))

    def digest(self, every: bool = False) -> str:
        """Return a SHA-256 over the index, the size of ``.bin``, and 64 pieces spread over it.

        It identifies files that are too large to be read at every start; changes between the
        pieces that keep all lengths go unnoticed. With ``every`` it covers each byte of both
        files, like the writer's digest.
        """
        if every:
            with self.bin.open("rb") as file:
                whole = file_digest(file, "sha256")
            whole.update(self.idx.read_bytes())
            return whole.hexdigest()
        seen = sha256(self.idx.read_bytes())
        size = self.bin.stat().st_size
        seen.update(str(size).encode())
        with self.bin.open("rb") as file:
            for i in range(_SAMPLES):
                file.seek(max(size - _SAMPLE, 0) * i // (_SAMPLES - 1))
                seen.update(file.read(_SAMPLE))
        return seen.hexdigest()


def check_ids(ids_N: np.ndarray, vocab: int, what: str, first: int = 0) -> None:
    """Raise ``DataError`` for an id outside ``[0, vocab)``; names its position, from ``first``."""
    if len(ids_N) and (ids_N.min() < 0 or ids_N.max() >= vocab):
        i = int(np.flatnonzero((ids_N < 0) | (ids_N >= vocab))[0])
        raise DataError(
            f"{what}, position {first + i}: token id {int(ids_N[i])} is not in [0, {vocab}); "
            "the tokens were made with another tokenizer, or the file is damaged"
        )


def facts_file(prefix: str | Path) -> Path:
    """Return the path of the JSON file with facts about token files, such as their tokenizer."""
    return files_of(prefix)[1].with_suffix(".json")


def read_facts(prefix: str | Path) -> dict:
    """Return the facts about token files; empty for files of other programs."""
    file = facts_file(prefix)
    return read_json(file, DataError) if file.is_file() else {}


class UnfitTokens(DataError):
    """Existing token files that are undamaged, but do not fit the run."""


class IndexedSource:
    """Existing token files as a source: checked, and used in place without tokenization."""

    def __init__(self, record: IndexedTokens) -> None:
        self._record = record
        self.prefix = Path(record.prefix)
        self.indexed = Indexed(record.prefix)
        self.facts = read_facts(record.prefix)

    def check_tokenizer(self, fingerprint: str) -> None:
        """Raise ``UnfitTokens`` if another tokenizer made the files and the record forbids it."""
        made_by = self.facts.get("tokenizer")
        if made_by in (None, fingerprint) or self._record.other_tokenizer == "allow":
            return
        raise UnfitTokens(
            f"{facts_file(self.prefix)}: the tokens were made by the tokenizer {made_by[:12]}…, "
            f"but the run's is {fingerprint[:12]}…; use the former, prepare the text again, or "
            "set other_tokenizer: allow in the source"
        )

    def split(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the training documents and of the held-out ones."""
        numbers = np.arange(len(self.indexed))
        if not self._record.holdout:
            return numbers, numbers[:0]
        limit = int(self._record.holdout * 2**64)
        held = np.fromiter((key_of("holdout", int(n)) < limit for n in numbers), bool, len(numbers))
        return numbers[~held], numbers[held]


class DocumentPiece(NamedTuple):
    """The part of a document in a sequence."""

    document: int
    """Number of the document in its file."""
    start: int
    """First token of the piece inside the document."""
    ids_N: np.ndarray
    """int64 token ids."""
    following: int | None
    """The token after the piece in the same document, None at the document's end."""
    trained_N: np.ndarray | None = None
    """bool, which of the tokens are labels; None if all are."""


class Corpus:
    """The documents of a token file, or a selection of them, concatenated.

    ``name`` is for messages; ids must be in ``[0, vocab)``; ``chosen`` has the numbers of the
    selected documents, ascending (default: all).
    """

    def __init__(
        self, name: str, indexed: Indexed, vocab: int, chosen: np.ndarray | None = None
    ) -> None:
        self.name, self.indexed, self.vocab = name, indexed, vocab
        lengths = np.diff(indexed.rows_1)
        numbers = np.arange(len(indexed)) if chosen is None else chosen
        self._numbers = numbers[lengths[numbers] > 0]
        self._ends_1 = np.append(0, np.cumsum(lengths[self._numbers], dtype=np.int64))

    @property
    def documents(self) -> int:
        """Number of documents with at least one token."""
        return len(self._numbers)

    @property
    def tokens(self) -> int:
        """Number of tokens in all documents of the selection."""
        return int(self._ends_1[-1])

    def cut(self, start: int, rows: int) -> Iterator[DocumentPiece]:
        """Yield the pieces in ``rows`` rows from ``start`` on, around the ring of documents."""
        assert 0 <= start < self.tokens and 0 <= rows <= self.tokens, (start, rows, self.tokens)
        d = int(np.searchsorted(self._ends_1, start, side="right")) - 1
        while rows:
            first, end = int(self._ends_1[d]), int(self._ends_1[d + 1])
            taken = min(rows, end - start)
            number = int(self._numbers[d])
            base = int(self.indexed.rows_1[number]) + start - first
            more = 1 if start + taken < end else 0
            ids = self.indexed.read(base, base + taken + more)
            check_ids(ids, self.vocab, f"{self.indexed.bin}: document {number}", start - first)
            yield DocumentPiece(number, start - first, ids[:taken], int(ids[-1]) if more else None)
            rows -= taken
            d = (d + 1) % self.documents
            start = int(self._ends_1[d])

    def document(self, i: int) -> np.ndarray:
        """Return int64 ids of the i-th document of the selection."""
        return self.indexed.document(int(self._numbers[i]))
