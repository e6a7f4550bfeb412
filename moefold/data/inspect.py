"""What token files hold, and whether it is what was written."""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np

from moefold.data.config import read_json
from moefold.data.index import Indexed, check_ids
from moefold.data.sources.indexed import said_file
from moefold.data.tokenizer import Tokenizer

_CHUNK = 1 << 22


@dataclass(frozen=True)
class Inspection:
    """Facts about a pair of token files, every token read."""

    bin: Path
    documents: int
    empty: int
    """Documents without a token."""
    tokens: int
    dtype: str
    lowest: int
    highest: int
    """Lowest and highest token id; -1 where there is none."""
    shortest: int
    median: float
    longest: int
    """Tokens of a document."""
    file_bytes: int
    said: dict
    """What their maker wrote beside them; empty for other makers' files."""
    as_written: bool | None
    """Whether every byte has the digest that their maker wrote; None where there is none."""


def inspect(prefix: str | Path, tokenizer: Tokenizer | None = None) -> Inspection:
    """Read token files from end to end.

    Args:
        prefix: path of the files, with or without ``.bin`` or ``.idx``.
        tokenizer: where given, every id must be one of its tokens.

    Raises:
        DataError: where the index is not sound, or an id is none of the tokenizer's.
    """
    indexed = Indexed(prefix)
    lowest, highest = [], []
    for start in range(0, indexed.tokens, _CHUNK):
        ids = indexed.read(start, min(start + _CHUNK, indexed.tokens))
        lowest.append(int(ids.min()))
        highest.append(int(ids.max()))
        if tokenizer is not None and (lowest[-1] < 0 or highest[-1] >= tokenizer.size):
            _name_bad_id(indexed, start, ids, tokenizer.size)
    lengths = np.diff(indexed.rows_1)
    said = read_json(said_file(prefix)) if said_file(prefix).is_file() else {}
    return Inspection(
        bin=indexed.bin,
        documents=len(indexed),
        empty=int(np.count_nonzero(lengths == 0)),
        tokens=indexed.tokens,
        dtype=indexed.dtype.name,
        lowest=min(lowest, default=-1),
        highest=max(highest, default=-1),
        shortest=int(lengths.min()) if len(lengths) else 0,
        median=float(np.median(lengths)) if len(lengths) else 0.0,
        longest=int(lengths.max(initial=0)),
        file_bytes=indexed.bin.stat().st_size + indexed.idx.stat().st_size,
        said=said,
        as_written=full_digest(indexed) == said["digest"] if "digest" in said else None,
    )


def full_digest(indexed: Indexed) -> str:
    """Return the SHA-256 over every byte of both files, as their writer took it."""
    seen = sha256()
    for file in (indexed.bin, indexed.idx):
        with file.open("rb") as content:
            while chunk := content.read(_CHUNK):
                seen.update(chunk)
    return seen.hexdigest()


def _name_bad_id(indexed: Indexed, start: int, ids: np.ndarray, vocab: int) -> None:
    """Refuse the first id outside the vocabulary, by its document and position."""
    at = start + int(np.flatnonzero((ids < 0) | (ids >= vocab))[0])
    document = int(np.searchsorted(indexed.rows_1, at, side="right")) - 1
    check_ids(indexed.document(document), vocab, f"{indexed.bin}: document {document}")
