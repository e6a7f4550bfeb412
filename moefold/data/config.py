"""Records of the data: what is read, how it becomes tokens, how long sequences are.

Torch-free, so that the planner can read it.
"""

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from hashlib import sha256
from operator import index
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from moefold.config.base import Record
from moefold.config.errors import MISSING, REMOVE, Violation
from moefold.config.fields import OnDisk
from moefold.config.slot import Slot
from moefold.files import read_json

TOKENIZER = Slot("tokenizer")
SOURCE = Slot("source", tag="source")

BYTES = 256
MAX_IDS = 1 << 24
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE_FILE, GENERATION_CONFIG = "chat_template.jinja", "generation_config.json"
BESIDE = (TOKENIZER_CONFIG, TEMPLATE_FILE, GENERATION_CONFIG, "special_tokens_map.json")
"""Files beside a ``tokenizer.json`` that belong to it, from import to export."""
Files = Annotated[
    tuple[Annotated[str, Field(min_length=1), OnDisk(globs=True)], ...],
    Field(min_length=1, examples=[["corpus/*.txt"]]),
]
"""Paths and glob patterns (``**`` too), from the folder of the run file; read in sorted order."""


class DataError(ValueError):
    """Data that cannot be used: names the file, the place in it, and what to do."""


class TokenizerRecord(Record):
    """Base of the records in the tokenizer slot."""

    def vocab_size(self) -> int:
        """Return how many rows the embedding has."""
        raise NotImplementedError(f"{type(self).__name__} does not say its vocabulary's size")

    def stamp(self) -> str:
        """Return what changes with the files that this tokenizer is made from."""
        return ""


@TOKENIZER.register
class BpeTokenizer(TokenizerRecord):
    """A byte-level BPE trained on the training split; nothing is unknown to it."""

    owner = "moefold.data.tokenizer:train"
    kind: Literal["bpe"] = "bpe"
    vocab: Annotated[int, Field(ge=BYTES + 1)] = 2048
    """Tokens: the end of a document, 256 bytes, then merges. A small corpus may give fewer; the
    embedding keeps this many rows and the ids past the last token never occur."""
    sample_bytes: Annotated[int, Field(ge=1)] = 4_000_000
    """About how much text it is trained on, whole documents drawn over all training sources."""

    def vocab_size(self) -> int:
        """Return the number asked for."""
        return self.vocab


@TOKENIZER.register
class FileTokenizer(TokenizerRecord):
    """A ready ``tokenizer.json``, or a folder that holds one."""

    owner = "moefold.data.tokenizer:from_record"
    kind: Literal["file"] = "file"
    path: Annotated[str, Field(min_length=1, examples=["tokenizer.json"]), OnDisk()]
    end: str | None = None
    """Token that ends a document (default: ``eos_token`` of ``tokenizer_config.json`` beside it,
    or a well-known name)."""
    template: Annotated[str, Field(min_length=1), OnDisk()] | None = None
    """A file with the chat template (default: the one beside the tokenizer)."""
    start: str | None = None
    """Token that begins a document (default: ``bos_token`` of ``tokenizer_config.json``, else the
    one that ends it); the empty string for none."""

    def vocab_size(self) -> int:
        """Return the highest token id plus one, read from the file."""
        file = tokenizer_file(self.path)
        return ids_in(file, file.stat().st_mtime_ns)

    def stamp(self) -> str:
        """Return the SHA-256 of the tokenizer's files."""
        file = tokenizer_file(self.path)
        files = [file, *(file.with_name(name) for name in (*BESIDE, "config.json"))]
        files += [] if self.template is None else [Path(self.template)]
        read = [f.read_bytes() for f in files if f.is_file()]
        return sha256(b"\0".join(read)).hexdigest()


class SourceRecord(Record):
    """Base of the records in the source slot: what every source of data has."""

    source: str
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = None
    """Name in reports and files (default: the kind of source)."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the training sequences, relative to the other sources' weights."""
    holdout: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Share of the documents kept for validation, chosen by a hash of each document's text (of
    its number in token files), so that a document is on one side whatever its name or order."""

    @property
    def label(self) -> str:
        """The name, or the kind of source where none is given."""
        return self.name or self.source


@SOURCE.register
class PythonStdlib(SourceRecord):
    """The running interpreter's own standard library: real code, present wherever Python is."""

    owner = "moefold.data.sources:StdlibReader"
    source: Literal["python_stdlib"] = "python_stdlib"


class FileSource(SourceRecord):
    """Base of the sources that read files of documents."""

    files: Files
    bad: Literal["refuse", "skip"] = "refuse"
    """What happens to a document that cannot be read: stop and name it, or leave it out and
    count it in the report."""


@SOURCE.register
class Text(FileSource):
    """UTF-8 text files, also ``.gz``: each one document, or several told apart by ``split``."""

    owner = "moefold.data.sources:TextReader"
    source: Literal["text"] = "text"
    split: Annotated[str, Field(min_length=1)] | None = None
    """Text between two documents of a file; it belongs to neither."""


@SOURCE.register
class Jsonl(FileSource):
    """JSON lines, also ``.gz``: one object per line, the document in one of its fields."""

    owner = "moefold.data.sources:JsonlReader"
    source: Literal["jsonl"] = "jsonl"
    field: Annotated[str, Field(min_length=1)] = "text"


@SOURCE.register
class Parquet(FileSource):
    """Parquet files, streamed: one document per row, in a column of strings."""

    owner = "moefold.data.sources:ParquetReader"
    source: Literal["parquet"] = "parquet"
    column: Annotated[str, Field(min_length=1)] = "text"


@SOURCE.register
class Chat(FileSource):
    """Conversations in JSON lines (also ``.gz``), Parquet or Arrow files, or folders of the last.

    An example has ``messages``, or ``prompt`` and ``completion``, and may have ``tools``. Loss is
    taken on answers; whole conversations are packed into sequences.
    """

    owner = "moefold.data.conversations:ConversationReader"
    source: Literal["chat"] = "chat"
    answers: Literal["all", "last"] = "all"
    """Which answers of ``messages`` are trained."""
    long: Literal["refuse", "skip", "cut"] = "refuse"
    """What happens to a conversation that does not fit a sequence: stop and name it, leave it out
    and count it in the report, or drop its end."""


@SOURCE.register
class Preferences(FileSource):
    """Pairs of answers, in files as of ``chat``: ``prompt``, ``chosen`` and ``rejected``.

    All three are messages, or all three text; without ``prompt`` both answers are whole
    conversations. A pair is whole in a sequence, one answer after the other. For ``train.loss``.
    """

    owner = "moefold.data.conversations:PreferenceReader"
    source: Literal["preferences"] = "preferences"
    long: Literal["refuse", "skip"] = "refuse"
    """What happens to a pair that does not fit a sequence: stop and name it, or leave it out and
    count it in the report."""
    answers: Literal["last"] = "last"
    """What is compared: the last answers."""


@SOURCE.register
class IndexedTokens(SourceRecord):
    """Ready token files ``PREFIX.bin`` and ``PREFIX.idx`` in Megatron's format."""

    owner = "moefold.data.index:IndexedSource"
    source: Literal["indexed"] = "indexed"
    prefix: Annotated[str, Field(min_length=1, examples=["data/corpus"]), OnDisk()]
    other_tokenizer: Literal["refuse", "allow"] = "refuse"
    """What happens when the files say that another tokenizer made them."""


class Data(Record):
    """What a run is trained and evaluated on."""

    seq: Annotated[int, Field(ge=2)]
    """Tokens per sequence."""
    tokenizer: Annotated[TokenizerRecord, TOKENIZER] = BpeTokenizer()
    train: Annotated[
        tuple[Annotated[SourceRecord, SOURCE], ...],
        Field(min_length=1, examples=[[{"source": "python_stdlib", "holdout": 0.05}]]),
    ]
    """Sources of training documents, mixed by weight."""
    valid: tuple[Annotated[SourceRecord, SOURCE], ...] = ()
    """More sets to evaluate on, beside what the training sources hold out."""

    @property
    def vocab(self) -> int:
        """Rows of the embedding that the tokenizer asks for."""
        return self.tokenizer.vocab_size()

    @property
    def evaluation_sets(self) -> tuple[str, ...]:
        """Names of the sets that can be evaluated."""
        held = tuple(s.label for s in self.train if s.holdout)
        return held + tuple(s.label for s in self.valid)

    def rules(self) -> Iterator[Violation]:
        """Names tell sources apart; a validation set holds nothing out; token files fit."""
        places = [(("train", i), source) for i, source in enumerate(self.train)]
        places += [(("valid", i), source) for i, source in enumerate(self.valid)]
        taken, seen = {source.label for _, source in places}, Counter[str]()
        for path, source in places:
            label = source.label
            seen[label] += 1
            if seen[label] > 1:
                number = seen[label]
                while f"{label}_{number}" in taken:
                    number += 1
                taken.add(f"{label}_{number}")
                rule = f"each source needs its own name, {label!r} is taken"
                yield Violation((*path, "name"), label, rule, f"{label}_{number}")
        trains = isinstance(self.tokenizer, BpeTokenizer)
        for path, source in places:
            valid = path[0] == "valid"
            if valid and source.holdout:
                rule = "a validation set holds nothing out: all of it is evaluated"
                yield Violation((*path, "holdout"), source.holdout, rule, 0.0)
            if isinstance(source, IndexedTokens) and trains:
                rule = "token files need the tokenizer that made them (tokenizer: {kind: file})"
                nearest = REMOVE if valid else {"source": "python_stdlib"}
                yield Violation(path, source.prefix, rule, nearest)
            if isinstance(source, Chat | Preferences) and trains:
                rule = (
                    "conversations need a tokenizer that brings a chat template (tokenizer: "
                    "{kind: file, path: ...})"
                )
                yield Violation(path, source.files[0], rule, REMOVE if valid else MISSING)


def tokenizer_file(path: str) -> Path:
    """Return the ``tokenizer.json`` that a path (the file or its folder) stands for."""
    file = Path(path)
    if file.is_dir():
        file = file / "tokenizer.json"
    if not file.is_file():
        raise DataError(f"{file}: no such file; give the path of a tokenizer.json or its folder")
    return file


@lru_cache(maxsize=8)
def ids_in(file: Path, written_ns: int = 0) -> int:
    """Return the highest token id in a ``tokenizer.json`` as it was when written, plus one."""
    content = read_json(file, DataError)
    try:
        vocab = content["model"]["vocab"]
        added = content.get("added_tokens") or []
        ids = [token["id"] for token in added]
        highest = index(
            max([*ids, *(vocab.values() if isinstance(vocab, dict) else ())], default=0)
        )
        # The library numbers added tokens that the vocabulary lacks anew, behind it.
        known = vocab if isinstance(vocab, dict) else (piece[0] for piece in vocab)
        new = {token["content"] for token in added}.difference(known)
        highest = max(highest, len(vocab) + len(new) - 1)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f"{file}: has no model.vocab with ids; is it a tokenizer.json?") from error
    return demand_ids(highest + 1, file)


def demand_ids(size: int, source: str | Path) -> int:
    """Return the number of a tokenizer's ids, which all have a row of the embedding.

    Raises:
        DataError: where there are more of them than any model has.
    """
    if size > MAX_IDS:
        raise DataError(
            f"{source}: has the id {size - 1}, and the most are {MAX_IDS}; mend the file"
        )
    return size
