"""What follows from token files and takes long to compute: stored beside the prepared data.

Digests of blocks (:mod:`moefold.data.blocks`), and which documents are held out. The first start on
files of another program takes the time of one pass over them; later starts read what was stored.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import numpy as np

from moefold.data.blocks import BLOCK_BYTES, CheckedFile
from moefold.data.config import DataError
from moefold.data.order import stable_hash
from moefold.files import read_json, write_json

Progress = Callable[[str, int, int], None]
"""Called with the stage, and what is done of a total."""
_CHUNK = 1 << 20
_log = logging.getLogger("moefold.data")


class StoredFacts:
    """The folder in which such facts are stored; ``writes`` is false for a trial run."""

    def __init__(self, folder: Path, on_progress: Progress, writes: bool = True) -> None:
        self._folder = folder
        self._on_progress = on_progress
        self._writes = writes

    def check(self, label: str, file: CheckedFile) -> str:
        """Let a file be compared with the digests of its blocks, computed at first use.

        They belong to the file of this size and time. Returns a SHA-256 of all of them; empty in a
        trial run, which reads no tokens.
        """
        mark = sha256(repr(tuple(file.opened)).encode()).hexdigest()[:16]
        path = self._folder / f"{label}.{mark}.blocks.json"
        digests = self._stored_blocks(path)
        if digests is None:
            if not self._writes:
                return ""
            _log.warning("%s: reads all bytes once, to notice later changes", file.path)
            digests = []
            for digest in file.iter_digests():
                digests.append(digest)
                done = min(len(digests) * BLOCK_BYTES, file.size)
                self._on_progress(f"checking {label}", done, file.size)
            self._store(path, lambda: write_json(path, {"blocks": digests}))
        file.expect(digests)
        return sha256("".join(digests).encode()).hexdigest()

    def held_out(self, label: str, number: int, share: float) -> np.ndarray:
        """Return which of ``number`` documents are held out: bool, by a hash of their numbers."""
        path = self._folder / f"{label}.{number}.heldout"
        with suppress(OSError):
            packed = np.fromfile(path, np.uint8)
            if len(packed) == -(-number // 8):
                return np.unpackbits(packed, count=number).view(bool)
        limit = int(share * 2**64)
        held = np.zeros(number, bool)
        if number > _CHUNK:
            _log.warning("%s: chooses the held-out of %s documents, once", label, f"{number:,}")
        for start in range(0, number, _CHUNK):
            numbers = range(start, min(start + _CHUNK, number))
            hashes = (stable_hash("holdout", n) < limit for n in numbers)
            held[start : numbers.stop] = np.fromiter(hashes, bool, len(numbers))
            self._on_progress(f"choosing held-out documents of {label}", numbers.stop, number)
        if self._writes:
            self._store(path, lambda: _write_bytes(path, np.packbits(held).tobytes()))
        return held

    def _stored_blocks(self, path: Path) -> list[str] | None:
        with suppress(OSError, DataError):
            stored = read_json(path, DataError).get("blocks")
            if isinstance(stored, list) and all(isinstance(item, str) for item in stored):
                return stored
        return None

    def _store(self, path: Path, write: Callable[[], None]) -> None:
        """Write a file; where that is not possible, the next start computes it again."""
        try:
            write()
        except OSError as error:
            _log.warning("%s: cannot be stored, so each start computes it: %s", path, error)


def _write_bytes(path: Path, data: bytes) -> None:
    # Processes that write it at once write the same bytes, and readers check their number.
    draft = path.with_name(f".{path.name}.part")
    try:
        draft.write_bytes(data)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
