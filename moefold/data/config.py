"""Records of the data: sources, tokenizer, sequence length. Imports no torch."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from itertools import accumulate, pairwise
from operator import index, itemgetter
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from moefold.config.base import Record
from moefold.config.errors import MISSING, REMOVE, Violation
from moefold.config.fields import OnDisk
from moefold.config.slot import Slot
from moefold.data.errors import DataError
from moefold.data.folder.files import CONFIG, read_sidecars, sidecar_paths
from moefold.data.folder.tokens import assemble
from moefold.files import read_json

TOKENIZER = Slot("tokenizer")
SOURCE = Slot("source", tag="source")

BYTES = 256
MAX_IDS = 1 << 24
SENTENCEPIECE = "tokenizer.model"
TEKKEN = "tekken.json"
"""Names of files with tokenizers that must be converted."""
MAX_HOLDOUT = 0.5
"""Of a source's documents, the largest share that may be held out."""
MAX_TRAINED = 1 << 20
"""Ids of a tokenizer that is trained; the library reserves memory for all of them at once."""
Files = Annotated[
    tuple[Annotated[str, Field(min_length=1), OnDisk(globs=True)], ...],
    Field(min_length=1, examples=[["corpus/*.txt"]]),
]
"""Paths and glob patterns (also ``**``), relative to the run file; read in sorted order."""


@dataclass(frozen=True)
class BatchSizes:
    """Sequences per step, which may change at certain steps."""

    stages: tuple[tuple[int, int], ...]
    """First step, from 0, and sequences per step of each stage, ascending."""

    def size(self, step: int) -> int:
        """Return the number of sequences of a step."""
        return self.stages[self._stage(step)][1]

    def before(self, step: int) -> int:
        """Return the number of sequences of all steps before ``step``."""
        stage = self._stage(step)
        first, size = self.stages[stage]
        return self._before[stage] + (step - first) * size

    def _stage(self, step: int) -> int:
        return max(bisect_right(self.stages, step, key=itemgetter(0)) - 1, 0)

    @cached_property
    def _before(self) -> list[int]:
        """Sequences before each stage."""
        sizes = ((b - a) * size for (a, size), (b, _) in pairwise(self.stages))
        return list(accumulate(sizes, initial=0))


class TokenizerRecord(Record):
    """Base of the records in the tokenizer slot."""

    def vocab_size(self) -> int:
        """Return the number of rows of the embedding."""
        raise NotImplementedError(f"{type(self).__name__} must implement vocab_size")

    def stamp(self) -> str:
        """Return a string that changes when the tokenizer's files change."""
        return ""


@TOKENIZER.register
class BpeTokenizer(TokenizerRecord):
    """A byte-level BPE trained on the training split; it has no unknown token."""

    owner = "moefold.data.tokenizer:train"
    kind: Literal["bpe"] = "bpe"
    vocab: Annotated[int, Field(ge=BYTES + 1, le=MAX_TRAINED)] = 2048
    """Number of tokens: the end of a document, 256 bytes, then merges. A small corpus may yield
    fewer; the embedding still has this many rows, and the ids past the last token never occur."""
    sample_bytes: Annotated[int, Field(ge=1, le=2**40)] = 4_000_000
    """Approximate bytes of text it is trained on, in pieces sampled over all training sources."""

    def vocab_size(self) -> int:
        """Return ``vocab``, even if training yields fewer tokens."""
        return self.vocab


@TOKENIZER.register
class FileTokenizer(TokenizerRecord):
    """An existing ``tokenizer.json``, or a folder that contains one."""

    owner = "moefold.data.tokenizer:from_record"
    kind: Literal["file"] = "file"
    path: Annotated[str, Field(min_length=1, examples=["tokenizer.json"]), OnDisk()]
    end: str | None = None
    """Token that ends a document (default: ``eos_token`` of its folder's files; if they name none,
    the only well-known one)."""
    template: Annotated[str, Field(min_length=1), OnDisk()] | None = None
    """A file with the chat template (default: the one in the tokenizer's folder)."""
    start: str | None = None
    """Token that begins a text (default: what ``tokenizer.json`` adds before each text, if
    anything); the empty string for none."""

    def vocab_size(self) -> int:
        """Return the highest token id plus one, read from the file."""
        file = tokenizer_file(self.path)
        files = [file, *(path for _, path in sidecar_paths(file.parent))]
        return read_vocab_size(file, max(each.stat().st_mtime_ns for each in files))

    def stamp(self) -> str:
        """Return the SHA-256 of the tokenizer's files."""
        file = tokenizer_file(self.path)
        files = [file, *(path for _, path in sidecar_paths(file.parent)), file.with_name(CONFIG)]
        files += [] if self.template is None else [Path(self.template)]
        read = [f.read_bytes() for f in files if f.is_file()]
        return sha256(b"\0".join(read)).hexdigest()


class SourceRecord(Record):
    """Base of the records in the source slot, with the fields of every source of data."""

    source: str
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = None
    """Name in reports and files (default: the kind of source)."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the training sequences, relative to the other sources' weights."""
    holdout: Annotated[float, Field(ge=0, le=MAX_HOLDOUT)] = 0.0
    """Share of the documents held out for validation, chosen by a hash of each document's text (in
    token files: of its number), so that a document's side depends on neither name nor order."""

    @property
    def label(self) -> str:
        """The name, by default the kind of source."""
        return self.name or self.source


@SOURCE.register
class PythonStdlib(SourceRecord):
    """The running interpreter's standard library: real code, available wherever Python is."""

    owner = "moefold.data.corpora.sources:StdlibReader"
    source: Literal["python_stdlib"] = "python_stdlib"


class FileSource(SourceRecord):
    """Base of the sources that read files of documents."""

    files: Files
    bad: Literal["refuse", "skip"] = "refuse"
    """Policy for a document that cannot be read: stop and name it, or leave it out and count it
    in the report."""


@SOURCE.register
class Text(FileSource):
    """UTF-8 text files, also compressed: each one document, or several separated by ``split``."""

    owner = "moefold.data.corpora.sources:TextReader"
    source: Literal["text"] = "text"
    split: Annotated[str, Field(min_length=1)] | None = None
    """Separator between two documents of a file, which is dropped."""


@SOURCE.register
class Jsonl(FileSource):
    """JSON lines, also compressed: one object per line, with the document in one of its fields.

    A file that holds one array of objects is read too.
    """

    owner = "moefold.data.corpora.sources:JsonlReader"
    source: Literal["jsonl"] = "jsonl"
    field: Annotated[str, Field(min_length=1)] = "text"


@SOURCE.register
class Parquet(FileSource):
    """Parquet or Arrow files, or folders that ``datasets`` saved: one document per row.

    The document is in a column of strings; files are streamed.
    """

    owner = "moefold.data.corpora.sources:ParquetReader"
    source: Literal["parquet"] = "parquet"
    column: Annotated[str, Field(min_length=1)] = "text"


class ExampleSource(FileSource):
    """Base of the sources whose documents have columns and messages."""

    ignore: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Columns, and fields of messages, that are left out before anything is read. Fields that
    neither the run nor the template reads are otherwise refused."""


@SOURCE.register
class WebDataset(FileSource):
    """Tars of the ``webdataset`` library, also compressed: one document per sample.

    A sample is the members with a common name up to the first dot.
    """

    owner = "moefold.data.shards:WebDatasetReader"
    source: Literal["webdataset"] = "webdataset"
    member: Annotated[str, Field(min_length=1)] = "txt"
    """Name of the member with the text, from the first dot on; ``json`` members hold an object."""
    field: Annotated[str, Field(min_length=1)] = "text"
    """Field of the object in a ``json`` member."""


@SOURCE.register
class Chat(ExampleSource):
    """Conversations in JSON lines (also compressed), Parquet or Arrow files, or saved folders.

    An example has ``messages``, ``conversations``, ``prompt`` and ``completion``, or
    ``instruction`` and ``output``, and may have ``tools``. Only answers have labels; whole
    conversations are packed into sequences.
    """

    owner = "moefold.data.chats.conversations:ConversationReader"
    source: Literal["chat"] = "chat"
    answers: Literal["auto", "all", "each", "last"] = "auto"
    """Which answers of ``messages`` are trained: all in one text, the last one, or each in the text
    that the template writes up to it; ``auto`` is ``all``, or ``each`` where the template writes
    earlier turns otherwise once others follow."""
    long: Literal["refuse", "skip", "cut"] = "refuse"
    """Policy for a conversation that does not fit a sequence: stop and name it, leave it out and
    count it in the report, or drop its end."""


@SOURCE.register
class Preferences(ExampleSource):
    """Pairs of answers, in the file formats of ``chat``: ``prompt``, ``chosen`` and ``rejected``.

    All three are messages, or all three text; without ``prompt`` both are whole conversations, or
    whole texts, whose common beginning is the prompt. A pair is in one sequence, one answer after
    the other. For losses like ``dpo``.
    """

    owner = "moefold.data.chats.conversations:PreferenceReader"
    source: Literal["preferences"] = "preferences"
    long: Literal["refuse", "skip"] = "refuse"
    """Policy for a pair that does not fit a sequence: stop and name it, or leave it out and count
    it in the report."""
    answers: Literal["last"] = "last"
    """Which answers are compared: those after the messages that both conversations begin with."""


@SOURCE.register
class IndexedTokens(SourceRecord):
    """Existing token files ``PREFIX.bin`` and ``PREFIX.idx`` in Megatron's format."""

    owner = "moefold.data.index:IndexedSource"
    source: Literal["indexed"] = "indexed"
    prefix: Annotated[str, Field(min_length=1, examples=["data/corpus"]), OnDisk()]
    other_tokenizer: Literal["refuse", "allow"] = "refuse"
    """Policy for files that were made with another tokenizer."""


class Data(Record):
    """Data on which a run is trained and evaluated."""

    seq: Annotated[int, Field(ge=2, le=MAX_IDS)]
    """Tokens per sequence."""
    tokenizer: Annotated[TokenizerRecord, TOKENIZER] = BpeTokenizer()
    train: Annotated[
        tuple[Annotated[SourceRecord, SOURCE], ...],
        Field(min_length=1, examples=[[{"source": "python_stdlib", "holdout": 0.05}]]),
    ]
    """Sources of training documents, mixed by weight."""
    valid: tuple[Annotated[SourceRecord, SOURCE], ...] = ()
    """Sets to evaluate on, besides those that the training sources hold out."""

    @property
    def vocab(self) -> int:
        """Number of rows of the embedding, by the tokenizer."""
        return self.tokenizer.vocab_size()

    @property
    def evaluation_sets(self) -> tuple[str, ...]:
        """Names of the sets that can be evaluated."""
        held_out = tuple(s.label for s in self.train if s.holdout)
        return held_out + tuple(s.label for s in self.valid)

    def rules(self) -> Iterator[Violation]:
        """Source names are unique, validation sets have no holdout, sources fit the tokenizer."""
        sources = [(("train", i), source) for i, source in enumerate(self.train)]
        sources += [(("valid", i), source) for i, source in enumerate(self.valid)]
        taken = {source.label for _, source in sources}
        seen = Counter[str]()
        for path, source in sources:
            label = source.label
            seen[label] += 1
            if seen[label] > 1:
                number = seen[label]
                while f"{label}_{number}" in taken:
                    number += 1
                taken.add(f"{label}_{number}")
                rule = "must differ from the names of the other sources"
                yield Violation((*path, "name"), label, rule, f"{label}_{number}")
        trains_tokenizer = isinstance(self.tokenizer, BpeTokenizer)
        for path, source in sources:
            valid = path[0] == "valid"
            if valid and source.holdout:
                rule = "must be 0 under data.valid, where all documents are used for evaluation"
                yield Violation((*path, "holdout"), source.holdout, rule, 0.0)
            if isinstance(source, IndexedTokens) and trains_tokenizer:
                rule = "needs the tokenizer of these tokens (data.tokenizer: {kind: file, ...})"
                nearest = REMOVE if valid else {"source": "python_stdlib"}
                yield Violation(path, source.prefix, rule, nearest)
            if isinstance(source, Chat | Preferences) and trains_tokenizer:
                rule = "needs a tokenizer with a chat template (data.tokenizer: {kind: file, ...})"
                yield Violation(path, source.files[0], rule, REMOVE if valid else MISSING)


def tokenizer_file(path: str) -> Path:
    """Return the ``tokenizer.json`` at a path, which is the file or its folder."""
    file = Path(path)
    if file.is_dir():
        foreign = (file / name for name in (SENTENCEPIECE, TEKKEN))
        others = [each for each in (*foreign, *sorted(file.glob("*.tiktoken"))) if each.is_file()]
        file = file / "tokenizer.json"
    else:
        others = [file] if file.name == TEKKEN or file.suffix in (".model", ".tiktoken") else []
    if others and (not file.is_file() or file in others):
        raise DataError(
            f"{others[0]}: is not a tokenizer.json; convert it with: "
            f"moefold data tokenizer {others[0]}"
        )
    if not file.is_file():
        raise DataError(f"{file}: no such file; give the path of a tokenizer.json or its folder")
    return file


@lru_cache(maxsize=8)
def read_vocab_size(file: Path, mtime_ns: int = 0) -> int:
    """Return the highest id of a folder's tokenizer plus one; ``mtime_ns`` is a cache key."""
    stored = read_json(file, DataError)
    content = assemble(stored, read_sidecars(file.parent), str(file.parent)).content
    try:
        vocab = content["model"]["vocab"]
        added = content.get("added_tokens") or []
        ids = [token["id"] for token in added]
        highest = index(
            max([*ids, *(vocab.values() if isinstance(vocab, dict) else ())], default=0)
        )
        # The library gives added tokens that the vocabulary lacks new ids after its last one.
        known = vocab if isinstance(vocab, dict) else (piece[0] for piece in vocab)
        new = {token["content"] for token in added}.difference(known)
        highest = max(highest, len(vocab) + len(new) - 1)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f"{file}: model.vocab or added_tokens is missing or malformed") from error
    return check_vocab_size(highest + 1, file)


def check_vocab_size(size: int, source: str | Path) -> int:
    """Return ``size``, a tokenizer's number of ids; raise ``DataError`` above ``MAX_IDS``."""
    if size > MAX_IDS:
        raise DataError(
            f"{source}: has the id {size - 1}, but ids must be below {MAX_IDS}; correct the file"
        )
    return size
