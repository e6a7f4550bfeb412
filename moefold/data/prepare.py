"""Preparation of data, once: train the tokenizer, split sources, encode, publish token files.

Results are in ``folder/<key>``, where the key is a hash of everything they depend on: records, the
code of plug-ins, tokenizer, and the files' paths, sizes and times. A folder under its final name is
complete.
"""

import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path

import numpy as np

from moefold.config.base import to_dict
from moefold.config.plugins import version_of
from moefold.config.slot import build
from moefold.data.config import Data, DataError, FileSource, SourceRecord
from moefold.data.index import (
    Corpus,
    Indexed,
    IndexedSource,
    IndexWriter,
    UnfitTokens,
    facts_file,
    files_of,
    read_facts,
)
from moefold.data.packing import Conversations
from moefold.data.sources import Skipped, Source, utf8
from moefold.data.tokenizer import Tokenizer, load
from moefold.files import folder_for, named, read_json, write_json

FORMAT = 1
MANIFEST = "manifest.json"
MASK = ".mask"
"""Suffix of the token files that mark which tokens are labels."""
_TOKENIZER = "tokenizer.json"
_PIECE = 1 << 14

Progress = Callable[[str, int, int], None]
"""Called with the current stage, the bytes done, and their total."""
Built = tuple[SourceRecord, Source | IndexedSource]


@dataclass(frozen=True)
class PreparedPart:
    """The training or the validation side of one source, as tokens."""

    name: str
    weight: float
    corpus: Corpus
    digest: str
    """Identifies the content: depends on every token."""
    n_bytes: int
    """UTF-8 bytes of the text; 0 if unknown."""
    byte_ratio: float
    """UTF-8 bytes of the text per byte of decoded tokens: 1 for a byte-level tokenizer."""


@dataclass(frozen=True)
class Prepared:
    """Everything that a loader needs: a tokenizer and token files."""

    folder: Path
    tokenizer: Tokenizer
    train: tuple[PreparedPart, ...]
    valid: tuple[PreparedPart, ...]
    skipped: dict[str, dict]
    """Documents left out of each source: reason -> count and first names."""
    seconds: float
    """Time that the preparation took when it was done."""

    def fingerprint(self) -> str:
        """Return a SHA-256 of the tokenizer and of every training and validation token."""
        parts = [[(p.name, p.digest) for p in side] for side in (self.train, self.valid)]
        return sha256(json.dumps([self.tokenizer.fingerprint, parts]).encode()).hexdigest()


def prepare(
    data: Data,
    folder: str | Path,
    progress: Progress | None = None,
    scratch: str | Path | None = None,
) -> Prepared:
    """Open the token files of a run's data below ``folder``, or make them.

    With ``scratch``, missing files are made there, and ``folder`` is left unchanged.

    Raises:
        DataError: if a source cannot be read or has no documents.
    """
    sources = [(record, _build(record)) for record in (*data.train, *data.valid)]
    key, home = _key(data, sources)[:16], Path(scratch or folder)
    for place in dict.fromkeys((Path(folder), home)):
        if (place / key).is_dir():
            try:
                return _open(place / key, data, sources)
            except UnfitTokens:  # the prepared files themselves are intact
                raise
            except DataError:  # damaged after preparation; everything can be prepared again
                if place == home:
                    shutil.rmtree(place / key)
    final = home / key
    with folder_for(home), named(home), _draft(home) as draft:
        _make(draft, data, sources, progress or (lambda *_: None))
        if _key(data, sources)[:16] != key:
            raise DataError(
                "files of the data changed while they were read; prepare the data again when "
                "nothing writes to them"
            )
        try:
            draft.rename(final)
        except OSError:
            if not (final / MANIFEST).is_file():  # else another process was first
                raise
    return _open(final, data, sources)


@contextmanager
def _draft(home: Path) -> Iterator[Path]:
    """Create a draft folder below ``home`` for the context; remove it at the end unless renamed.

    Drafts that killed processes of this machine left are removed too, if no process is preparing
    in ``home``: each holds the folder's lock, which the kernel releases however it ends.
    """
    mine = f".preparing-{socket.gethostname()}-"
    draft, handle = home / f"{mine}{os.getpid()}-{time.time_ns()}", os.open(home, os.O_RDONLY)
    try:
        with suppress(OSError):  # another process holds the lock, or folders cannot be locked
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for left in [folder for folder in home.iterdir() if folder.name.startswith(mine)]:
                shutil.rmtree(left, ignore_errors=True)
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_SH)
        draft.mkdir()
        yield draft
        os.fsync(handle)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        os.close(handle)


def _build(record: SourceRecord) -> Source | IndexedSource:
    try:
        return build(record)
    except ModuleNotFoundError as error:
        name = "pyarrow" if (error.name or "").startswith("pyarrow") else error.name
        raise DataError(
            f"source {record.label}: needs {name}, which is not installed (pip install {name})"
        ) from error


def _key(data: Data, sources: Sequence[Built]) -> str:
    """Return a SHA-256 of everything on which the token files depend."""
    said = []
    for record, source in sources:
        fields = {k: v for k, v in to_dict(record).items() if k != "weight"}
        made = isinstance(source, Source)
        said.append([fields, source.stamp() if made else None])
        said[-1] += [data.seq] if made and source.whole else []
        said[-1] += version_of(type(record))
    tokenizer = [to_dict(data.tokenizer), data.tokenizer.stamp()]
    tokenizer += version_of(type(data.tokenizer))
    return sha256(json.dumps([FORMAT, len(data.train), tokenizer, said]).encode()).hexdigest()


def _make(draft: Path, data: Data, sources: Sequence[Built], progress: Progress) -> None:
    """Write the tokenizer, the token files and the manifest into an empty folder."""
    started = time.monotonic()
    texts = [(record, source) for record, source in sources if isinstance(source, Source)]
    of_training = [(r, s) for r, s in texts if any(r is t for t in data.train)]
    tokenizer: Tokenizer = build(data.tokenizer, lambda size: _sample(of_training, size, progress))
    tokenizer.save(draft / _TOKENIZER)
    skipped: dict[str, Skipped] = {}
    for record, source in texts:
        skipped[record.label] = Skipped()
        _encode(draft, record, source, tokenizer, data.seq, skipped[record.label], progress)
    content = {
        "format": FORMAT,
        "tokenizer": tokenizer.fingerprint,
        "skipped": skipped,
        "seconds": round(time.monotonic() - started, 3),
    }
    write_json(draft / MANIFEST, content)


def _hash(data: bytes, purpose: bytes = b"holdout") -> float:
    """Return a hash of the text as a number in [0, 1)."""
    digest = blake2b(data, digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "big") / 2**64


def _sample(sources: Sequence[Built], size: int, progress: Progress) -> Iterator[str]:
    """Yield about ``size`` bytes of training text, in pieces sampled evenly over all sources."""
    total = sum(source.size() for _, source in sources if isinstance(source, Source))
    share, done, taken = size / max(total, 1), 0, 0
    for record, source in sources:
        assert isinstance(source, Source)
        skipped = Skipped()
        for document in source.documents(skipped):
            data = utf8(document)
            done += len(data)
            progress("training the tokenizer", min(done, total), total)
            if _hash(data) < record.holdout:
                continue
            for start in range(0, len(document.text), _PIECE):
                piece = document.text[start : start + _PIECE]
                if share >= 1 or not taken or _hash(piece.encode(), b"sample") < share:
                    taken += 1
                    yield piece
        skipped.demand_none()


def _encode(
    draft: Path,
    record: SourceRecord,
    source: Source,
    tokenizer: Tokenizer,
    seq: int,
    skipped: Skipped,
    progress: Progress,
) -> None:
    """Write a source's documents as token files, and their masks, one pair of files per side."""
    total, done = source.size(), 0
    sides = ["train", "valid"] if record.holdout else ["train"]
    n_bytes, n_spelt = dict.fromkeys(sides, 0), dict.fromkeys(sides, 0)
    with ExitStack() as stack:
        writers = {
            side: stack.enter_context(IndexWriter(_prefix(draft, record, side), tokenizer.size))
            for side in sides
        }
        masks = {
            side: stack.enter_context(IndexWriter(f"{_prefix(draft, record, side)}{MASK}", 4))
            for side in sides
            if source.whole
        }
        for batch in source.coded(tokenizer, seq, skipped):
            for name, said, ids, trained in batch:
                side = "valid" if _hash(said) < record.holdout else "train"
                writers[side].add(ids, name)
                if trained is not None:
                    masks[side].add(trained, name)
                spelt = int(tokenizer.n_bytes_V[ids].sum())
                n_bytes[side] += spelt if source.whole else len(said)
                n_spelt[side] += spelt
                done += len(said)
            progress(f"encoding {record.label}", min(done, total), total)
        skipped.demand_none()
    for side, writer in writers.items():
        if not writer.lengths:
            documents = sum(len(w.lengths) for w in writers.values())
            raise DataError(_nothing(record, side, documents, skipped))
        facts = {
            "tokenizer": tokenizer.fingerprint,
            "documents": len(writer.lengths),
            "tokens": writer.tokens,
            "bytes": n_bytes[side],
            "token_bytes": n_spelt[side],
            "digest": writer.digest(),
        }
        if side in masks:
            facts |= {"mask": masks[side].digest()}
        prefix = _prefix(draft, record, side)
        write_json(facts_file(prefix), facts | {"sampled": _sampled(prefix)})


def _sampled(prefix: Path) -> list[str]:
    """Return digests of samples of token files and their mask, cheap enough for every start."""
    mask = masks_of(prefix)
    return [indexed.digest() for indexed in (Indexed(prefix), mask) if indexed is not None]


def _nothing(record: SourceRecord, side: str, documents: int, skipped: Skipped) -> str:
    if not documents:
        said = f"source {record.label}: has no document with text"
        files = ", ".join(record.files) if isinstance(record, FileSource) else ""
        left = "".join(f"; left out: {found['count']} ({why})" for why, found in skipped.items())
        return f"{said}{files and f'; check {files}, or name other files'}{left}"
    said = f"source {record.label}: holdout {record.holdout} takes"
    if side == "train":
        return f"{said} all of its {documents} documents; lower it, or add documents"
    return f"{said} none of its {documents} documents; raise it, or add a source under data.valid"


def _prefix(folder: Path, record: SourceRecord, side: str) -> Path:
    return folder / f"{record.label}.{side}"


def masks_of(prefix: str | Path) -> Indexed | None:
    """Return the mask of token files, which marks labels; None if all tokens are labels."""
    mask = f"{files_of(prefix)[0].with_suffix('')}{MASK}"
    return Indexed(mask) if files_of(mask)[1].is_file() else None


def _open(folder: Path, data: Data, sources: Sequence[Built]) -> Prepared:
    """Open what ``_make`` wrote, and the existing token files of indexed sources."""
    said = folder / MANIFEST
    manifest = read_json(said, DataError) if said.is_file() else {}
    if manifest.get("format") != FORMAT:
        raise DataError(f"{said}: is missing, or its format is not {FORMAT}")
    tokenizer = load(folder / _TOKENIZER)
    train: list[PreparedPart] = []
    valid: list[PreparedPart] = []
    for i, (record, source) in enumerate(sources):
        first = train if i < len(data.train) else valid
        if isinstance(source, IndexedSource):
            source.check_tokenizer(tokenizer.fingerprint)
            for side, chosen in zip((first, valid), source.split(), strict=True):
                if side is first or record.holdout:
                    side.append(_ready_part(record, source, tokenizer, chosen))
            continue
        first.append(_made_part(folder, record, "train", tokenizer))
        if record.holdout:
            valid.append(_made_part(folder, record, "valid", tokenizer))
    return Prepared(
        folder, tokenizer, tuple(train), tuple(valid), manifest["skipped"], manifest["seconds"]
    )


def _made_part(folder: Path, record: SourceRecord, side: str, tokenizer: Tokenizer) -> PreparedPart:
    prefix = _prefix(folder, record, side)
    facts, indexed = read_facts(prefix), Indexed(prefix)
    found, said = (len(indexed), indexed.tokens), (facts.get("documents"), facts.get("tokens"))
    if found != said or facts.get("tokenizer") != tokenizer.fingerprint:
        raise DataError(f"{facts_file(prefix)}: does not match the token files beside it")
    if facts.get("sampled") not in (None, _sampled(prefix)):
        raise DataError(f"{indexed.bin}: the token files differ from those written")
    corpus, digest = Corpus(record.label, indexed, tokenizer.size), facts["digest"]
    if "mask" in facts:
        trained = Indexed(f"{prefix}{MASK}")
        corpus = Conversations(record.label, indexed, tokenizer.size, trained)
        digest = sha256(f"{digest}{facts['mask']}".encode()).hexdigest()
    ratio = facts["bytes"] / max(facts["token_bytes"], 1)
    return PreparedPart(record.label, record.weight, corpus, digest, facts["bytes"], ratio)


def _ready_part(
    record: SourceRecord, source: IndexedSource, tokenizer: Tokenizer, chosen: np.ndarray
) -> PreparedPart:
    facts, everything = source.facts, len(chosen) == len(source.indexed)
    corpus = Corpus(record.label, source.indexed, tokenizer.size, None if everything else chosen)
    if not corpus.documents:
        raise UnfitTokens(
            f"source {record.label}: training or validation gets none of the documents in "
            f"{source.prefix} with tokens (holdout {record.holdout}); change holdout"
        )
    ratio = facts["bytes"] / facts["token_bytes"] if facts.get("token_bytes") else 1.0
    digest = sha256(source.indexed.digest().encode() + chosen.tobytes()).hexdigest()
    n_bytes = facts.get("bytes", 0) if everything else 0
    return PreparedPart(record.label, record.weight, corpus, digest, n_bytes, ratio)
