"""Tokenizers: text to token ids and back, and the number of text bytes of each token.

V vocabulary, N tokens of a document.

A document is encoded as ``start, its text, end``. Every byte of it is then predicted exactly once,
which makes bits per byte comparable with a compressor's. A byte-level BPE trained here has one
token for both ends. Text that looks like a special token is encoded as text.
"""

import json
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from moefold.data.beside import Beside, content
from moefold.data.config import (
    BYTES,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG,
    BpeTokenizer,
    DataError,
    FileTokenizer,
    demand_ids,
    tokenizer_file,
)
from moefold.files import named, read_json, write_json

END = "<|endoftext|>"
_USUAL_ENDS = (END, "</s>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>", "[EOS]")
STDERR = 2
_HELD = threading.Lock()
Sample = Callable[[int], Iterator[str]]
"""Returns about so many bytes of text on which a tokenizer may be trained."""


class Tokenizer:
    """A tokenizer with a start and an end of documents.

    Args:
        text: content of a ``tokenizer.json``.
        end: token that ends a document.
        start: token that begins a document, or None.
        vocab: rows of the embedding (default: the number of ids).
        source: origin of the content, for error messages.
        files: content of the files next to it, by name (default: as for a tokenizer trained here).
    """

    def __init__(
        self,
        text: str,
        end: str,
        start: str | None,
        vocab: int | None = None,
        source: str = "tokenizer",
        files: Mapping[str, str] | None = None,
    ) -> None:
        with _library(source):
            self._inner = tokenizers.Tokenizer.from_str(text)
        self._inner.no_truncation()  # a stored limit would cut documents silently
        self._inner.no_padding()
        self._inner.encode_special_tokens = True  # in documents they are ordinary text
        self.text = text
        self.source = source
        self.template_source: str | None = None
        self.start, self.end = start, end
        self.end_id = self._id(end)
        self.start_id = None if start is None else self._id(start)
        own = Beside.of(end, self.end_id, start, self.start_id)
        self.files = own if files is None else Beside(files)
        self.size = demand_ids(max(self._inner.get_vocab().values()) + 1, source)
        """Highest token id plus one."""
        self.vocab = self.size if vocab is None else vocab
        """Rows of the embedding; the ids from ``size`` on never occur."""
        if self.vocab < self.size:
            raise DataError(f"{source}: {self.size} ids exceed the embedding's {self.vocab} rows")

    def _id(self, token: str) -> int:
        found = self._inner.token_to_id(token)
        if found is None:
            raise DataError(f"{self.source}: has no token {token!r}; name another as start or end")
        return found

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids of all tokens that end a text, the one that ends documents first."""
        return tuple(i for i in self.files.ends(self.end_id) if i < self.size)

    def encode(self, text: str) -> list[int]:
        """Return the ids of the text, without start and end."""
        text.encode()  # fails for text that is no UTF-8; the library's error would not name it
        with _library(self.source):
            return self._inner.encode(text, add_special_tokens=False).ids

    def prompt(self, text: str) -> list[int]:
        """Return the ids of the beginning of a document, for the model to continue."""
        head = [] if self.start_id is None else [self.start_id]
        return head + self.encode(text)

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return int64 [N] of each document: start, text, end."""
        head = [] if self.start_id is None else [self.start_id]
        with parallel(), _library(self.source):
            coded = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array([*head, *c.ids, self.end_id], dtype=np.int64) for c in coded]

    @cached_property
    def _chats(self) -> tokenizers.Tokenizer:
        """A tokenizer that recognises special tokens in text, as chat templates write them."""
        with _library(self.source):
            inner = tokenizers.Tokenizer.from_str(self.text)
        inner.no_truncation()
        inner.no_padding()
        return inner

    def encode_chats(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return for each rendered text int64 [N] ids, and [N, 2] the character span of each."""
        inner = self._chats
        with parallel(), _library(self.source):
            coded = inner.encode_batch(list(texts), add_special_tokens=False)
        return [
            (np.array(c.ids, np.int64), np.array(c.offsets, np.int64).reshape(-1, 2)) for c in coded
        ]

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Return the text of token ids; special tokens are left out unless ``special``."""
        with _library(self.source):
            return self._inner.decode(list(ids), skip_special_tokens=not special)

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The UTF-8 bytes of each token id in [0, vocab); empty for special and absent tokens.

        Tokens are spelt as in byte-level BPE, or as in SentencePiece and WordPiece: ``▁the``,
        ``<0x0A>``, ``##ing``.
        """
        table, added = [b""] * self.vocab, self._inner.get_added_tokens_decoder()
        said = json.loads(self.text)
        inner = said["model"].get("continuing_subword_prefix") or ""
        alphabet: dict[str, bytes] = {}
        if '"ByteLevel"' in json.dumps(said.get("decoder")):
            # As in GPT-2, printable Latin-1 represents itself, and the other bytes have the
            # characters from 256 on, in order.
            printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
            others = [b for b in range(BYTES) if b not in set(printable)]
            alphabet = {chr(b): bytes([b]) for b in printable}
            alphabet |= {chr(BYTES + i): bytes([b]) for i, b in enumerate(others)}
        for token, i in self._inner.get_vocab(with_added_tokens=True).items():
            if i in added:
                if not added[i].special and i not in (self.start_id, self.end_id):
                    table[i] = added[i].content.encode()
            elif alphabet:
                table[i] = b"".join(alphabet.get(c) or c.encode() for c in token)
            elif byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token):
                table[i] = bytes.fromhex(byte[1])
            else:
                table[i] = token.removeprefix(inner).replace("▁", " ").encode()
        return table

    @cached_property
    def n_bytes_V(self) -> np.ndarray:
        """int64 [V] number of bytes of each token's text."""
        return np.array([len(b) for b in self.token_bytes], dtype=np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the tokenizer's content, independent of the formatting of its file."""
        content = json.dumps(json.loads(self.text), sort_keys=True, ensure_ascii=True)
        return sha256(f"{content}\0{self.start!r}\0{self.end!r}".encode()).hexdigest()

    def first_difference(self, other: "Tokenizer") -> tuple[int, str | None, str | None] | None:
        """Return the lowest id with different tokens here and in ``other``, and both tokens."""
        tables = (t._inner.get_vocab(with_added_tokens=True) for t in (self, other))
        mine, theirs = ({i: token for token, i in table.items()} for table in tables)
        differing = [i for i in {*mine, *theirs} if mine.get(i) != theirs.get(i)]
        first = min(differing, default=None)
        return None if first is None else (first, mine.get(first), theirs.get(first))

    def save(self, file: Path) -> None:
        """Write ``tokenizer.json``, and next to it special tokens, vocabulary and other files."""
        file.write_text(self.text, encoding="utf-8")
        beside = {"eos_token": self.end, "bos_token": self.start, "vocab": self.vocab}
        beside |= {"files": self.files}
        write_json(file.with_name(TOKENIZER_CONFIG), beside)


def load(path: Path) -> Tokenizer:
    """Load a tokenizer that ``Tokenizer.save`` wrote."""
    beside_file = path.with_name(TOKENIZER_CONFIG)
    beside = read_json(beside_file, DataError)
    end, vocab = content(beside.get("eos_token")), beside.get("vocab")
    if end is None or not isinstance(vocab, int):
        raise DataError(f"{beside_file}: is damaged: eos_token or vocab is missing")
    start, files = content(beside.get("bos_token")), beside.get("files")
    return Tokenizer(_text(path), end, start, vocab=vocab, source=str(path), files=files)


def from_record(record: FileTokenizer, sample: Sample) -> Tokenizer:
    """Load the tokenizer of a file; ``sample`` is not used."""
    found = from_path(record.path, record.end, record.start)
    if record.template is not None:
        file = Path(record.template)
        found.files[TEMPLATE_FILE] = _text(file)
        found.template_source = str(file)
    if record.start is None and found.start is None:
        found.start, found.start_id = found.end, found.end_id  # to predict the first byte too
    return found


def from_path(path: str, end: str | None = None, start: str | None = None) -> Tokenizer:
    """Load a tokenizer from a ``tokenizer.json`` or its folder, as for :class:`FileTokenizer`.

    It has a start token only if the folder or ``start`` names one.
    """
    file = tokenizer_file(path)
    beside_file = file.with_name(TOKENIZER_CONFIG)
    beside = read_json(beside_file, DataError) if beside_file.is_file() else {}
    end = end or content(beside.get("eos_token"))
    if not end:
        added = read_json(file, DataError).get("added_tokens")
        tokens = added if isinstance(added, list) else []
        found = [content(each) for each in tokens]
        end = next((name for name in _USUAL_ENDS if name in found), None)
        if end is None:
            raise DataError(f"{file}: has no known end token; set data.tokenizer.end")
    files = Beside.read(file.parent, end, start)
    start = content(beside.get("bos_token")) if start is None else start or None
    found = Tokenizer(_text(file), end, start, source=str(file), files=files)
    of_template = TEMPLATE_FILE if TEMPLATE_FILE in files else TOKENIZER_CONFIG
    found.template_source = str(file.with_name(of_template))
    return found


def _text(file: Path) -> str:
    with named(file, DataError):
        return file.read_text(encoding="utf-8")


def train(record: BpeTokenizer, sample: Sample) -> Tokenizer:
    """Train a byte-level BPE on a sample of text; deterministic."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=record.vocab,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with parallel():
        inner.train_from_iterator(sample(record.sample_bytes), trainer)
    return Tokenizer(inner.to_str(), END, END, vocab=record.vocab, source="trained tokenizer")


@contextmanager
def parallel() -> Iterator[None]:
    """Let ``tokenizers`` use every core in the context.

    Afterwards ``TOKENIZERS_PARALLELISM`` is restored, or ``false`` if it was not set: otherwise
    the library prints a warning if the process forks later.
    """
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = before or "true"
    try:
        yield
    finally:
        os.environ[name] = before or "false"


@contextmanager
def _library(source: str) -> Iterator[None]:
    """Turn failures of ``tokenizers`` in the context into errors that name ``source``.

    When the library panics, it prints a stack trace directly to file descriptor 2. Output to it is
    therefore held back in the context, and dropped after a panic.

    Raises:
        DataError: instead of a panic, or of the bare ``Exception`` for malformed content.
    """
    panicked = False
    with _HELD, tempfile.TemporaryFile() as held:
        before = os.dup(STDERR)
        os.dup2(held.fileno(), STDERR)
        try:
            yield
        except BaseException as error:
            panicked = type(error).__name__ == "PanicException"  # not importable, no Exception
            if not panicked and type(error) is not Exception:
                raise
            raise DataError(
                f"{source}: is not a valid tokenizer.json: {error}; get a new copy"
            ) from error
        finally:
            os.dup2(before, STDERR)
            os.close(before)
            held.seek(0)
            if not panicked and (said := held.read()):
                os.write(STDERR, said)
