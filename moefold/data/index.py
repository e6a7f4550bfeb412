"""Indexed token files in Megatron's format: ``PREFIX.bin`` and ``PREFIX.idx``.

``.bin`` holds the token ids one after another. ``.idx`` holds, little-endian: the magic
``MMIDIDX\\0\\0``, u64 version 1, u8 code of the ids' type, u64 number of sequences, u64 number of
document marks, int32 length of each sequence, int64 byte offset of each in ``.bin``, int64 marks
(the first sequence of each document, then the number of sequences), and optionally one int8 per
sequence, which is not read.

The writer streams, and publishes both files at once. The reader believes nothing: every count,
length, offset and mark is checked against the files' sizes before any of it is used.
"""

import os
import struct
from array import array
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import NoReturn

import numpy as np

from moefold.data.config import DataError

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
DTYPES: dict[int, type[np.number]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
_HEADER = struct.Struct("<9sQBQQ")
_UINT16_VOCAB = 65500  # the format's writers go over to int32 from here on
_SAMPLE, _SAMPLES = 1 << 16, 64


def dtype_for(vocab: int) -> type[np.number]:
    """Return the type in which ids below ``vocab`` are stored."""
    return np.uint16 if vocab < _UINT16_VOCAB else np.int32


def files_of(prefix: str | Path) -> tuple[Path, Path]:
    """Return the ``.bin`` and ``.idx`` files of a prefix; either file's own name will do too."""
    text = str(prefix)
    text = text[:-4] if text.endswith((".bin", ".idx")) else text
    return Path(text + ".bin"), Path(text + ".idx")


class IndexWriter:
    """Writes documents as they come; the files appear when the ``with`` block ends without error.

    Args:
        prefix: the files' path without suffix.
        vocab: ids must lie in ``[0, vocab)``.
        dtype: type of the stored ids (default: the smallest that fits).
    """

    def __init__(
        self, prefix: str | Path, vocab: int, dtype: type[np.number] | None = None
    ) -> None:
        self.vocab = vocab
        self.dtype = np.dtype(dtype or dtype_for(vocab)).newbyteorder("<")
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
            if kind is None:
                self._publish()
        finally:
            for draft in self._drafts:
                draft.unlink(missing_ok=True)

    def add(self, ids_N: np.ndarray | Sequence[int], name: str = "") -> None:
        """Append one document of N >= 1 token ids; ``name`` is for the error message."""
        ids = np.asarray(ids_N)
        what = f"document {len(self.lengths)}" + (f" ({name})" if name else "")
        if ids.size == 0:
            raise DataError(f"{self.bin}: {what} has no tokens; leave it out")
        check_ids(ids, self.vocab, f"{self.bin}: {what}")
        data = ids.astype(self.dtype).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self.lengths.append(len(ids))
        self.tokens += len(ids)

    def _publish(self) -> None:
        """Put both files in place; between the two steps there is no index at all."""
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
        self.idx.unlink(missing_ok=True)
        self._drafts[0].replace(self.bin)
        self._drafts[1].replace(self.idx)

    def digest(self) -> str:
        """Return the SHA-256 over both files, once they are published."""
        return self._hash.hexdigest()


class Indexed:
    """Reads indexed token files through memory maps.

    A document is one or more sequences of the file; tokens are numbered over all documents.

    Raises:
        DataError: naming the field and its byte, where the index contradicts itself or the files.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.bin, self.idx = files_of(prefix)
        for file in (self.bin, self.idx):
            if not file.is_file():
                raise DataError(f"{file}: no such file; token files are a .bin and an .idx")
        self._read_index()
        self._check_sequences()
        self._check_documents()
        sequence_ends = np.cumsum(np.append(0, self.lengths), dtype=np.int64)
        self._rows_1 = sequence_ends
        self.rows_1 = sequence_ends[self.documents_1]
        """int64 [documents + 1], first token of each document, then the number of tokens."""
        raw = self.bin.stat().st_size
        self._ids = np.memmap(self.bin, self.dtype, "r") if raw >= self.dtype.itemsize else None

    def _refuse(self, field: str, byte: int, said: str, file: Path | None = None) -> NoReturn:
        raise DataError(f"{file or self.idx}: {field} at byte {byte}: {said}")

    def _read_index(self) -> None:
        size = self.idx.stat().st_size
        if size < _HEADER.size:
            self._refuse("header", 0, f"the file has {size} bytes, the header alone {_HEADER.size}")
        with self.idx.open("rb") as file:
            magic, version, code, n, marks = _HEADER.unpack(file.read(_HEADER.size))
        if magic != MAGIC:
            self._refuse("magic", 0, f"is {magic!r}, not {MAGIC!r}: this is no token index")
        if version != VERSION:
            self._refuse("version", 9, f"is {version}; only version {VERSION} is known")
        if code not in DTYPES or not np.issubdtype(DTYPES[code], np.integer):
            whole = [c for c, t in DTYPES.items() if np.issubdtype(t, np.integer)]
            self._refuse("dtype", 17, f"is {code}; whole numbers have the codes {whole}")
        self.dtype = np.dtype(DTYPES[code]).newbyteorder("<")
        need = _HEADER.size + 12 * n
        if need > size:
            self._refuse("sequence count", 18, f"{n} sequences need {need} bytes, it has {size}")
        need += 8 * marks
        if need > size:
            self._refuse("document count", 26, f"{marks} marks need {need} bytes, it has {size}")
        if size not in (need, need + n):
            self._refuse("end", need, f"{size - need} bytes follow the last field")
        if marks < 1:
            self._refuse("document count", 26, "is 0; there is one mark more than documents")
        raw = np.memmap(self.idx, np.uint8, "r")
        at = _HEADER.size
        self.lengths = raw[at : at + 4 * n].view("<i4")
        self.offsets = raw[at + 4 * n : at + 12 * n].view("<i8")
        self.documents_1 = raw[at + 12 * n : need].view("<i8")

    def _check_sequences(self) -> None:
        """Lengths are not negative; offsets are whole, in order, and inside ``.bin``."""
        n, item, first = len(self.lengths), self.dtype.itemsize, _HEADER.size
        i = _first(self.lengths < 0)
        if i is not None:
            self._refuse(f"length of sequence {i}", first + 4 * i, f"is {self.lengths[i]}")
        first += 4 * n
        offsets = self.offsets.astype(np.int64)
        size = self.bin.stat().st_size
        for wrong, said in (
            (offsets < 0, "is negative"),
            (offsets % item != 0, f"is no multiple of {item}, the bytes of a token"),
            (offsets > size, f"lies outside {self.bin.name}, which has {size} bytes"),
        ):
            i = _first(wrong)
            if i is not None:
                field = f"offset of sequence {i}"
                self._refuse(field, first + 8 * i, f"{offsets[i]} {said}")
        ends = offsets + self.lengths.astype(np.int64) * item
        i = _first(offsets[1:] < ends[:-1])
        if i is not None:
            said = f"{offsets[i + 1]} lies before the end of the one before it, {ends[i]}"
            self._refuse(f"offset of sequence {i + 1}", first + 8 * (i + 1), said)
        i = _first(ends > size)
        if i is not None:
            said = f"sequence {i} ends at byte {ends[i]}; the file is cut off or of another index"
            self._refuse("end of file", size, said, self.bin)

    def _check_documents(self) -> None:
        """Marks begin at 0, do not go down, and end with the number of sequences."""
        marks, n = self.documents_1, len(self.lengths)
        first = _HEADER.size + 12 * n
        if marks[0] != 0:
            self._refuse("document mark 0", first, f"is {marks[0]}, not 0")
        i = _first(marks[1:] < marks[:-1])
        if i is not None:
            said = f"{marks[i + 1]} is below the one before it, {marks[i]}"
            self._refuse(f"document mark {i + 1}", first + 8 * (i + 1), said)
        if marks[-1] != n:
            last = len(marks) - 1
            said = f"the last one is {marks[-1]}, not the number of sequences, {n}"
            self._refuse(f"document mark {last}", first + 8 * last, said)

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

    def digest(self) -> str:
        """Return a SHA-256 over the index, the size of ``.bin``, and 64 pieces spread over it.

        Files too large to be read at every start are told apart by it; a change between the
        pieces that keeps every length is not seen.
        """
        seen = sha256(self.idx.read_bytes())
        size = self.bin.stat().st_size
        seen.update(str(size).encode())
        with self.bin.open("rb") as file:
            for i in range(_SAMPLES):
                file.seek(max(size - _SAMPLE, 0) * i // (_SAMPLES - 1))
                seen.update(file.read(_SAMPLE))
        return seen.hexdigest()


def check_ids(ids_N: np.ndarray, vocab: int, what: str, first: int = 0) -> None:
    """Refuse an id outside ``[0, vocab)``, naming its position (``first`` on) in ``what``."""
    if len(ids_N) and (ids_N.min() < 0 or ids_N.max() >= vocab):
        i = int(np.flatnonzero((ids_N < 0) | (ids_N >= vocab))[0])
        raise DataError(
            f"{what}, position {first + i}: token id {int(ids_N[i])} is not in [0, {vocab}); "
            "the tokens were made with another tokenizer, or the file is damaged"
        )


def _first(wrong: np.ndarray) -> int | None:
    """Return the first place that is true."""
    found = np.flatnonzero(wrong)
    return int(found[0]) if len(found) else None
