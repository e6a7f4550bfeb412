"""One-time preparation of data: train the tokenizer, split sources, write token files.

Results are in ``folder/<key>``: a hash of everything they depend on, which is records, the code of
plug-ins, tokenizer, and files' paths, sizes and times. A folder under its final name is complete.
"""

import json
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path

import numpy as np

from moefold.config.base import to_dict
from moefold.config.plugins import plugin_hash
from moefold.config.slot import build
from moefold.data.chats.template_names import common_values
from moefold.data.config import MAX_HOLDOUT, Data, DataError, FileSource, SourceRecord
from moefold.data.corpora.sources import Skipped, Source, encode_utf8
from moefold.data.derived import Progress, StoredFacts
from moefold.data.index import (
    Corpus,
    IndexedDataset,
    IndexedSource,
    IndexWriter,
    UnfitTokens,
    metadata_file,
    read_metadata,
    token_files,
)
from moefold.data.packing import MaskedCorpus
from moefold.data.tokenizer import Tokenizer, load
from moefold.files import (
    draft_folder,
    folder_for,
    path_in_errors,
    read_json,
    reserve_handles,
    sync_folder,
    write_json,
)

FORMAT = 2
MANIFEST = "manifest.json"
MASK = ".mask"
"""Suffix of the token files that hold loss masks."""
_TOKENIZER = "tokenizer.json"
_PIECE = 1 << 14
_DRAFT = ".preparing-"

HANDLES = 4
"""Most files of a source that are open at once: tokens and masks of both sides."""
BuiltSource = tuple[SourceRecord, Source | IndexedSource]


@dataclass(frozen=True)
class PreparedPart:
    """The training or validation side of one source, as tokens."""

    name: str
    weight: float
    corpus: Corpus
    digest: str
    """Hash of every token."""
    n_bytes: int
    """UTF-8 bytes of the text; 0 if unknown."""
    byte_ratio: float
    """UTF-8 bytes of the text per byte of decoded tokens: 1 for a byte-level tokenizer."""
    blocks: str = ""
    """Hash of the digests of all blocks, if ``digest`` is of samples only."""


@dataclass(frozen=True)
class PreparedData:
    """Tokenizer and token files, ready for a loader."""

    folder: Path
    tokenizer: Tokenizer
    train: tuple[PreparedPart, ...]
    valid: tuple[PreparedPart, ...]
    skipped: dict[str, dict]
    """Documents left out of each source: reason -> count and first names."""
    seconds: float
    """Duration of the original preparation."""

    def fingerprint(self) -> str:
        """Return a SHA-256 of the tokenizer and of every training and validation token."""
        parts = [[(p.name, p.digest) for p in side] for side in (self.train, self.valid)]
        return sha256(json.dumps([self.tokenizer.fingerprint, parts]).encode()).hexdigest()

    def contents(self) -> str:
        """Return a SHA-256 of what :meth:`fingerprint` samples only; empty if it covers all."""
        blocks = [part.blocks for part in (*self.train, *self.valid)]
        return sha256("".join(blocks).encode()).hexdigest() if any(blocks) else ""

    def changes(self) -> list[str]:
        """Return which token files are no longer those that were opened, and what changed."""
        datasets = {
            id(dataset): dataset
            for part in (*self.train, *self.valid)
            for dataset in part.corpus.datasets
        }
        found = ((dataset.bin, dataset.file.change()) for dataset in datasets.values())
        return [f"{path} {change}" for path, change in found if change]


def prepare(
    data: Data,
    folder: str | Path,
    on_progress: Progress | None = None,
    scratch: str | Path | None = None,
) -> PreparedData:
    """Open the token files of a run's data below ``folder``, or create them.

    With ``scratch``, missing files are created there, and ``folder`` is left unchanged.

    Raises:
        DataError: if a source cannot be read or has no documents.
    """
    report = on_progress or (lambda *_: None)
    reserve_handles(HANDLES * len((*data.train, *data.valid)), "data.train and data.valid")
    sources = [(record, _build_source(record)) for record in (*data.train, *data.valid)]
    key = _cache_key(data, sources)[:16]
    root = Path(scratch or folder)
    for place in dict.fromkeys((Path(folder), root)):
        if (place / key).is_dir():
            try:
                derived = StoredFacts(place / key, report, writes=scratch is None or place == root)
                return _open_prepared(place / key, data, sources, derived)
            except UnfitTokens:  # the prepared files are intact
                raise
            except DataError:  # damaged after preparation: prepare again
                if place == root:
                    shutil.rmtree(place / key)
    final = root / key
    with folder_for(root), path_in_errors(root), draft_folder(root, _DRAFT) as draft:
        _write(draft, data, sources, report)
        if _cache_key(data, sources)[:16] != key:
            raise DataError(
                "files of the data changed while they were read; prepare the data again when "
                "nothing writes to them"
            )
        try:
            draft.rename(final)
        except OSError:
            if not (final / MANIFEST).is_file():  # else another process was first
                raise
        sync_folder(root)
    return _open_prepared(final, data, sources, StoredFacts(final, report))


def _build_source(record: SourceRecord) -> Source | IndexedSource:
    try:
        return build(record)
    except ModuleNotFoundError as error:
        name = "pyarrow" if (error.name or "").startswith("pyarrow") else error.name
        raise DataError(
            f"source {record.label}: needs {name}, which is not installed (pip install {name})"
        ) from error


def _cache_key(data: Data, sources: Sequence[BuiltSource]) -> str:
    """Return a SHA-256 of everything that the token files depend on."""
    parts = []
    for record, source in sources:
        fields = {k: v for k, v in to_dict(record).items() if k != "weight"}
        reads_text = isinstance(source, Source)
        parts.append([fields, source.stamp() if reads_text else None])
        parts[-1] += [data.seq] if reads_text and source.whole_documents else []
        parts[-1] += plugin_hash(type(record))
    tokenizer = [to_dict(data.tokenizer), data.tokenizer.stamp()]
    tokenizer += plugin_hash(type(data.tokenizer))
    return sha256(json.dumps([FORMAT, len(data.train), tokenizer, parts]).encode()).hexdigest()


def _write(draft: Path, data: Data, sources: Sequence[BuiltSource], on_progress: Progress) -> None:
    """Write the tokenizer, the token files and the manifest into an empty folder."""
    started = time.monotonic()
    texts = [(record, source) for record, source in sources if isinstance(source, Source)]
    training = [(r, s) for r, s in texts if any(r is t for t in data.train)]
    tokenizer: Tokenizer = build(data.tokenizer, lambda size: _sample(training, size, on_progress))
    for _, source in texts:
        tokenizer.add_ends(source.end_ids(tokenizer))
    tokenizer.save(draft / _TOKENIZER)
    skipped: dict[str, Skipped] = {}
    for record, source in texts:
        skipped[record.label] = Skipped()
        _encode(draft, record, source, tokenizer, data.seq, skipped[record.label], on_progress)
    values = [each for _, source in training for each in source.template_values()]
    if values:
        tokenizer.files.set_template_values(common_values(values))
        tokenizer.save(draft / _TOKENIZER)
    content = {
        "format": FORMAT,
        "tokenizer": tokenizer.fingerprint,
        "skipped": skipped,
        "seconds": round(time.monotonic() - started, 3),
    }
    write_json(draft / MANIFEST, content)


def _hash(data: bytes, purpose: bytes = b"holdout") -> float:
    """Hash bytes to a number in [0, 1)."""
    digest = blake2b(data, digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "big") / 2**64


def _sample(sources: Sequence[BuiltSource], size: int, on_progress: Progress) -> Iterator[str]:
    """Yield about ``size`` bytes of training text, in pieces sampled evenly over all sources."""
    total = sum(source.size() for _, source in sources if isinstance(source, Source))
    fraction = size / max(total, 1)
    done = 0
    taken = 0
    for record, source in sources:
        assert isinstance(source, Source)
        skipped = Skipped()
        for document in source.documents(skipped):
            data = encode_utf8(document)
            done += len(data)
            on_progress("training the tokenizer", min(done, total), total)
            if _hash(data) < record.holdout:
                continue
            for start in range(0, len(document.text), _PIECE):
                piece = document.text[start : start + _PIECE]
                if fraction >= 1 or not taken or _hash(piece.encode(), b"sample") < fraction:
                    taken += 1
                    yield piece
        skipped.raise_errors()


def _encode(
    draft: Path,
    record: SourceRecord,
    source: Source,
    tokenizer: Tokenizer,
    seq: int,
    skipped: Skipped,
    on_progress: Progress,
) -> None:
    """Write a source's documents, and their masks, as a pair of token files per side."""
    total = source.size()
    done = 0
    lowest = 1.0
    sides = ["train", "valid"] if record.holdout else ["train"]
    n_bytes = dict.fromkeys(sides, 0)
    n_token_bytes = dict.fromkeys(sides, 0)
    with ExitStack() as stack:
        writers = {
            side: stack.enter_context(IndexWriter(_prefix(draft, record, side), tokenizer.size))
            for side in sides
        }
        masks = {
            side: stack.enter_context(IndexWriter(f"{_prefix(draft, record, side)}{MASK}", 4))
            for side in sides
            if source.whole_documents
        }
        for batch in source.encode(tokenizer, seq, skipped):
            for name, split_key, ids, loss_mask in batch:
                split_point = _hash(split_key)
                lowest = min(lowest, split_point)
                side = "valid" if split_point < record.holdout else "train"
                writers[side].add(ids, name)
                if loss_mask is not None:
                    masks[side].add(loss_mask, name)
                token_bytes = int(tokenizer.n_bytes_V[ids].sum())
                n_bytes[side] += token_bytes if source.whole_documents else len(split_key)
                n_token_bytes[side] += token_bytes
                done += len(split_key)
            on_progress(f"encoding {record.label}", min(done, total), total)
        skipped.raise_errors()
    for side, writer in writers.items():
        if not writer.lengths:
            documents = sum(len(w.lengths) for w in writers.values())
            raise DataError(_no_documents_message(record, side, documents, lowest, skipped))
        metadata = {
            "tokenizer": tokenizer.fingerprint,
            "documents": len(writer.lengths),
            "tokens": writer.n_tokens,
            "bytes": n_bytes[side],
            "token_bytes": n_token_bytes[side],
            "digest": writer.digest(),
            "blocks": writer.block_digests(),
        }
        if side in masks:
            metadata |= {
                "mask": masks[side].digest(),
                "mask_blocks": masks[side].block_digests(),
            }
        prefix = _prefix(draft, record, side)
        write_json(metadata_file(prefix), metadata | {"sampled": _sample_digests(prefix)})


def _sample_digests(prefix: Path) -> list[str]:
    """Return sampled digests of token files and their mask, cheap enough for every start."""
    mask = open_mask(prefix)
    return [indexed.digest() for indexed in (IndexedDataset(prefix), mask) if indexed is not None]


def _no_documents_message(
    record: SourceRecord, side: str, documents: int, lowest: float, skipped: Skipped
) -> str:
    """Return why a side is empty; a holdout above ``lowest`` takes at least one document."""
    if not documents:
        text = f"source {record.label}: has no document with text"
        files = ", ".join(record.files) if isinstance(record, FileSource) else ""
        left = "".join(f"; left out: {entry['count']} ({why})" for why, entry in skipped.items())
        return f"{text}{files and f'; check {files}, or name other files'}{left}"
    text = f"source {record.label}: holdout {record.holdout} takes"
    if side == "train":
        return f"{text} all of its {documents} documents; lower it, or add documents"
    least = math.floor(lowest * 100 + 1) / 100
    is_enough = documents > 1 and least <= MAX_HOLDOUT
    remedy = f"{least:g} takes one" if is_enough else "add documents"
    return f"{text} none of its {documents} documents; {remedy}, or add a source under data.valid"


def _prefix(folder: Path, record: SourceRecord, side: str) -> Path:
    return folder / f"{record.label}.{side}"


def open_mask(prefix: str | Path) -> IndexedDataset | None:
    """Open the loss mask of token files; None if all tokens are labels."""
    mask = f"{token_files(prefix)[0].with_suffix('')}{MASK}"
    return IndexedDataset(mask) if token_files(mask)[1].is_file() else None


def _open_prepared(
    folder: Path, data: Data, sources: Sequence[BuiltSource], derived: StoredFacts
) -> PreparedData:
    """Open a prepared folder, and the token files of indexed sources."""
    file = folder / MANIFEST
    manifest = read_json(file, DataError) if file.is_file() else {}
    if manifest.get("format") != FORMAT:
        raise DataError(f"{file}: is missing, or its format is not {FORMAT}")
    tokenizer = load(folder / _TOKENIZER)
    train: list[PreparedPart] = []
    valid: list[PreparedPart] = []
    for i, (record, source) in enumerate(sources):
        first = train if i < len(data.train) else valid
        if isinstance(source, IndexedSource):
            source.check_tokenizer(tokenizer.fingerprint)
            for side, chosen in zip((first, valid), source.split(derived), strict=True):
                if side is first or record.holdout:
                    side.append(_indexed_part(record, source, tokenizer, chosen, derived))
            continue
        first.append(_open_part(folder, record, "train", tokenizer, derived))
        if record.holdout:
            valid.append(_open_part(folder, record, "valid", tokenizer, derived))
    return PreparedData(
        folder, tokenizer, tuple(train), tuple(valid), manifest["skipped"], manifest["seconds"]
    )


def _open_part(
    folder: Path, record: SourceRecord, side: str, tokenizer: Tokenizer, derived: StoredFacts
) -> PreparedPart:
    prefix = _prefix(folder, record, side)
    info = read_metadata(prefix)
    dataset = IndexedDataset(prefix)
    counts = (len(dataset), dataset.n_tokens)
    stored = (info.get("documents"), info.get("tokens"))
    if counts != stored or info.get("tokenizer") != tokenizer.fingerprint:
        raise DataError(f"{metadata_file(prefix)}: does not match the token files beside it")
    if info.get("sampled") not in (None, _sample_digests(prefix)):
        raise DataError(f"{dataset.bin}: the token files differ from those written")
    corpus = Corpus(record.label, dataset, tokenizer.size)
    digest = info["digest"]
    _expect_blocks(dataset, info, "blocks", derived, f"{record.label}.{side}")
    if "mask" in info:
        masks = IndexedDataset(f"{prefix}{MASK}")
        _expect_blocks(masks, info, "mask_blocks", derived, f"{record.label}.{side}{MASK}")
        corpus = MaskedCorpus(record.label, dataset, tokenizer.size, masks)
        digest = sha256(f"{digest}{info['mask']}".encode()).hexdigest()
    ratio = info["bytes"] / max(info["token_bytes"], 1)
    return PreparedPart(record.label, record.weight, corpus, digest, info["bytes"], ratio)


def _expect_blocks(
    dataset: IndexedDataset, info: dict, key: str, derived: StoredFacts, label: str
) -> None:
    """State the digests of a file's blocks; files of older versions have none in their metadata.

    Raises:
        DataError: if older files differ from those that were written.
    """
    if key in info:
        dataset.file.expect(info[key])
        return
    stored = info["digest"] if key == "blocks" else info["mask"]
    if derived.check(label, dataset.file) and dataset.digest(full=True) != stored:
        raise DataError(f"{dataset.bin}: the token files differ from those written")


def _indexed_part(
    record: SourceRecord,
    source: IndexedSource,
    tokenizer: Tokenizer,
    chosen: np.ndarray,
    derived: StoredFacts,
) -> PreparedPart:
    info = source.metadata
    all_chosen = len(chosen) == len(source.dataset)
    corpus = Corpus(record.label, source.dataset, tokenizer.size, None if all_chosen else chosen)
    if not corpus.n_documents:
        raise UnfitTokens(
            f"source {record.label}: training or validation gets none of the documents in "
            f"{source.prefix} with tokens (holdout {record.holdout}); change holdout"
        )
    ratio = info["bytes"] / info["token_bytes"] if info.get("token_bytes") else 1.0
    digest = sha256(source.dataset.digest().encode())
    for start in range(0, len(chosen), 1 << 20):
        digest.update(chosen[start : start + (1 << 20)].tobytes())
    n_bytes = info.get("bytes", 0) if all_chosen else 0
    blocks = derived.check(record.label, source.dataset.file)
    return PreparedPart(
        record.label, record.weight, corpus, digest.hexdigest(), n_bytes, ratio, blocks
    )
