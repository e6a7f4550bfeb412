"""Tokenizers: text to token ids and back, and the number of text bytes of each token.

V vocabulary, N tokens of a document.

A document is encoded as its text, with the tokens that the tokenizer adds around each text, then
the end token. No token that begins or ends a text is written twice. A byte-level BPE trained here
has one token for both start and end, so that every byte is predicted exactly once and bits per byte
are comparable with a compressor's; documents that contain that token's text get it as text.
"""

import json
import math
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from moefold.data.config import (
    BYTES,
    BpeTokenizer,
    DataError,
    FileTokenizer,
    check_vocab_size,
    tokenizer_file,
)
from moefold.data.cuts import divide, find_places
from moefold.data.folder.files import TEMPLATE_FILE, TOKENIZER_CONFIG, read_sidecars, unread_notes
from moefold.data.folder.post_processor import added_around, around_texts
from moefold.data.folder.tokens import assemble, is_byte_level, token_text
from moefold.data.tokenizer_files import TokenizerFiles
from moefold.files import path_in_errors, read_json, write_json

END = "<|endoftext|>"
_KNOWN_END_TOKENS = (END, "</s>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>", "[EOS]")
_SPACED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
"""Text whose spaces ``clean_up_tokenization_spaces`` removes, in this order (transformers 5.24)."""
GROUP = 250_000
"""Characters that are encoded at a time, unless one text that cannot be divided has more.

While they are, each takes about 100 bytes.
"""
Item = TypeVar("Item")
STDERR = 2
_STDERR_LOCK = threading.Lock()
TextSampler = Callable[[int], Iterator[str]]
"""Yields about the given number of bytes of text to train a tokenizer on."""


class Tokenizer:
    """A tokenizer with tokens for the start and end of documents.

    Args:
        text: content of a ``tokenizer.json``.
        end: token that ends a document.
        start: token that begins each text, the empty string for none; None: as ``text`` says.
        vocab: rows of the embedding (default: the number of ids).
        source: origin of the content, for error messages.
        files: content of its sidecar files by name (default: those of a tokenizer trained here).
        special_as_text: encode special tokens in documents as text, whatever the files say.
    """

    def __init__(
        self,
        text: str,
        end: str,
        start: str | None = None,
        vocab: int | None = None,
        source: str = "tokenizer",
        files: Mapping[str, str] | None = None,
        special_as_text: bool = False,
    ) -> None:
        with _library_errors(source):
            self._backend = tokenizers.Tokenizer.from_str(text)
        self._backend.no_truncation()  # a stored limit would silently cut documents
        self._backend.no_padding()
        self.text = text
        self.source = source
        self.template_source: str | None = None
        self.notes: tuple[str, ...] = ()
        """Notes on fields and files of its folder that are not used."""
        self.end = end
        self.end_id = self._id(end)
        processor = self._backend.post_processor
        stored = None if processor is None else json.loads(processor.__getstate__())
        self.head, self.tail = added_around(stored)
        """Ids of the tokens that the tokenizer adds before and after each text."""
        if start is not None:
            self._set_start(start)
        default_files = TokenizerFiles.of(end, self.end_id, self.start, self.start_id)
        self.files = default_files if files is None else TokenizerFiles(files)
        self.special_as_text = special_as_text
        self._backend.encode_special_tokens = special_as_text or self.files.splits_special
        self.size = check_vocab_size(max(self._backend.get_vocab().values()) + 1, source)
        """Highest token id plus one."""
        self.vocab = self.size if vocab is None else vocab
        """Rows of the embedding; the ids from ``size`` on never occur."""
        if self.vocab < self.size:
            raise DataError(f"{source}: {self.size} ids exceed the embedding's {self.vocab} rows")

    def _set_start(self, start: str) -> None:
        """Make ``start`` the only token that is added before each text; none if it is empty."""
        before = {start: self._id(start)} if start else {}
        if self.head == tuple(before.values()):
            return
        after = {str(self._backend.id_to_token(i)): i for i in self.tail}
        content = json.loads(self.text) | {"post_processor": around_texts(before, after)}
        self.text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
        self.head = tuple(before.values())

    @property
    def start_id(self) -> int | None:
        """Id of the token that begins each text; None if there is none, or there are several."""
        return self.head[0] if len(self.head) == 1 else None

    @property
    def start(self) -> str | None:
        """The token that begins each text; None if there is none, or there are several."""
        return None if self.start_id is None else self._backend.id_to_token(self.start_id)

    def _id(self, token: str) -> int:
        token_id = self._backend.token_to_id(token)
        if token_id is None:
            raise DataError(f"{self.source}: has no token {token!r}; name another as start or end")
        return token_id

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids of all tokens that end a text, first the one that ends documents."""
        return tuple(i for i in self.files.end_ids(self.end_id) if i < self.size)

    @property
    def ends(self) -> list[str]:
        """All tokens that end a text, first the one that ends documents."""
        return [self.decode([token_id], special=True) for token_id in self.end_ids]

    def add_ends(self, ids: Iterable[int]) -> None:
        """Make more tokens ends of generated texts, also in exported settings."""
        for token_id in ids:
            self.files.add_end(self.end_id, token_id)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a piece of a document, without tokens around it."""
        text.encode()  # fails for invalid UTF-8; the library's error would not name it
        with _library_errors(self.source):
            return self._backend.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a text that the model continues."""
        return self.encode_texts([text])[0].tolist()

    def encode_texts(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return int64 [N] ids of each text, with the tokens that the tokenizer adds around it.

        Special tokens in a text are recognised; one that is at its place already is not added.
        """
        return [
            self._with_added(ids_N, self._missing_tail(ids_N))
            for ids_N, _ in self.encode_chats(texts)
        ]

    def _with_added(self, ids_N: np.ndarray, tail: tuple[int, ...]) -> np.ndarray:
        """Return a text's ids with the tokens before it that it lacks, and ``tail``."""
        head = () if tuple(ids_N[: len(self.head)].tolist()) == self.head else self.head
        return np.concatenate([np.array(head, np.int64), ids_N, np.array(tail, np.int64)])

    def _missing_tail(self, ids_N: np.ndarray) -> tuple[int, ...]:
        """Return the ids to add after a text, unless it ends with them."""
        n = len(self.tail)
        if n and tuple(ids_N[-n:].tolist()) == self.tail:
            return ()
        return self.tail

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return int64 [N] ids of each document: a text as by :meth:`encode_texts`, then end."""
        documents = []
        for ids_N in self._encode_parts(texts):
            tail = self._missing_tail(ids_N)
            last = tail[-1:] or tuple(ids_N[-1:].tolist())
            ends = tail if last == (self.end_id,) else (*tail, self.end_id)
            documents.append(self._with_added(ids_N, ends))
        return documents

    @cached_property
    def _places(self) -> re.Pattern[str] | None:
        """Where a text can be cut; None if it has to stay whole (:mod:`moefold.data.cuts`)."""
        return find_places(json.loads(self.text))

    def _encode_parts(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return int64 [N] ids of each text alone; long ones are encoded in parts."""
        found: list[list[np.ndarray]] = [[] for _ in texts]
        parts = (
            (number, part)
            for number, text in enumerate(texts)
            for part in (divide(text, self._places) if self._places else (text,))
        )
        for group in in_groups(parts, lambda numbered: len(numbered[1])):
            with parallel_encoding(), _library_errors(self.source):
                encodings = self._backend.encode_batch_fast(
                    [part for _, part in group], add_special_tokens=False
                )
            for (number, _), encoding in zip(group, encodings, strict=True):
                found[number].append(np.array(encoding.ids, np.int64))
        return [np.concatenate(ids) for ids in found]

    @cached_property
    def _chat_backend(self) -> tokenizers.Tokenizer:
        """A tokenizer that recognises special tokens in text, as rendered chats contain them.

        Without its post-processor, which may move a token's span to trim spaces off it.
        """
        with _library_errors(self.source):
            inner = tokenizers.Tokenizer.from_str(self.text)
        inner.no_truncation()
        inner.no_padding()
        inner.post_processor = None  # type: ignore[assignment]
        inner.encode_special_tokens = self.files.splits_special
        return inner

    def encode_chats(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return int64 [N] ids of each rendered text, and [N, 2] their character spans."""
        inner = self._chat_backend
        with parallel_encoding(), _library_errors(self.source):
            chats = inner.encode_batch(list(texts), add_special_tokens=False)
        return [
            (np.array(c.ids, np.int64), np.array(c.offsets, np.int64).reshape(-1, 2)) for c in chats
        ]

    def token_at_start(self, text: str) -> int | None:
        """Return the id of the longest added token with which a text begins, or None."""
        added = self._backend.get_added_tokens_decoder()
        found = [(len(t.content), i) for i, t in added.items() if text.startswith(t.content)]
        return max(found, default=(0, None))[1]

    def special_ids_in(self, text: str) -> list[int]:
        """Return the ids of the special tokens in a text, in their order."""
        ((ids_N, _),) = self.encode_chats([text])
        added = self._backend.get_added_tokens_decoder()
        return [i for i in ids_N.tolist() if i in added and added[i].special]

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Return the text of token ids; special tokens are included only if ``special``."""
        with _library_errors(self.source):
            text = self._backend.decode(list(ids), skip_special_tokens=not special)
        if self.files.cleans_spaces and not isinstance(self._backend.model, models.BPE):
            for spaced in _SPACED:
                text = text.replace(spaced, spaced.strip())
        return text

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """Texts of the special tokens."""
        added = self._backend.get_added_tokens_decoder().values()
        return tuple(token.content for token in added if token.special)

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """UTF-8 bytes of each token id in [0, vocab); empty for special and absent tokens.

        Tokens are spelt as in byte-level BPE, SentencePiece or WordPiece: ``▁the``, ``<0x0A>``,
        ``##ing``.
        """
        table = [b""] * self.vocab
        added = self._backend.get_added_tokens_decoder()
        config = json.loads(self.text)
        subword_prefix = config["model"].get("continuing_subword_prefix") or ""
        alphabet: dict[str, bytes] = {}
        if '"ByteLevel"' in json.dumps(config.get("decoder")):
            # As in GPT-2, printable Latin-1 represents itself, and the other bytes are the
            # characters from 256 on, in order.
            printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
            others = [b for b in range(BYTES) if b not in set(printable)]
            alphabet = {chr(b): bytes([b]) for b in printable}
            alphabet |= {chr(BYTES + i): bytes([b]) for i, b in enumerate(others)}
        for token, i in self._backend.get_vocab(with_added_tokens=True).items():
            if i in added:
                if not added[i].special and i not in (*self.head, self.end_id):
                    table[i] = added[i].content.encode()
            elif alphabet:
                table[i] = b"".join(alphabet.get(c) or c.encode() for c in token)
            elif byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token):
                table[i] = bytes.fromhex(byte[1])
            else:
                table[i] = token.removeprefix(subword_prefix).replace("▁", " ").encode()
        return table

    @cached_property
    def n_bytes_V(self) -> np.ndarray:
        """int64 [V] number of UTF-8 bytes of each token."""
        return np.array([len(b) for b in self.token_bytes], dtype=np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the tokenizer's content, independent of the formatting of its file."""
        parts = json.loads(self.text) | {"post_processor": None}
        content = json.dumps(parts, sort_keys=True, ensure_ascii=True)
        facts = f"{content}\0{self.start!r}\0{self.end!r}"
        if len(self.head) > 1 or self.tail:
            facts += f"\0{self.head}\0{self.tail}"
        return sha256(facts.encode()).hexdigest()

    def first_difference(self, other: "Tokenizer") -> tuple[int, str | None, str | None] | None:
        """Return the lowest id whose token differs in ``other``, and both tokens."""
        tables = (t._backend.get_vocab(with_added_tokens=True) for t in (self, other))
        mine, theirs = ({i: token for token, i in table.items()} for table in tables)
        differing = [i for i in {*mine, *theirs} if mine.get(i) != theirs.get(i)]
        first = min(differing, default=None)
        return None if first is None else (first, mine.get(first), theirs.get(first))

    def save(self, file: Path) -> None:
        """Write ``tokenizer.json`` and a file with special tokens, vocabulary and sidecar files."""
        file.write_text(self.text, encoding="utf-8")
        config = {"eos_token": self.end, "bos_token": self.start, "vocab": self.vocab}
        config |= {"files": self.files, "special_as_text": self.special_as_text}
        config |= {"notes": self.notes}
        write_json(file.with_name(TOKENIZER_CONFIG), config)


def in_groups(
    items: Iterable[Item], count_chars: Callable[[Item], int], most: float = math.inf
) -> Iterator[list[Item]]:
    """Yield items in groups of at most ``GROUP`` characters and ``most`` items, or of one item."""
    group: list[Item] = []
    chars = 0
    for item in items:
        added = count_chars(item)
        if group and (chars + added > GROUP or len(group) == most):
            yield group
            group = []
            chars = 0
        group.append(item)
        chars += added
    if group:
        yield group


def load(path: Path) -> Tokenizer:
    """Load a tokenizer that ``Tokenizer.save`` wrote."""
    config_file = path.with_name(TOKENIZER_CONFIG)
    config = read_json(config_file, DataError)
    end = token_text(config.get("eos_token"))
    vocab = config.get("vocab")
    if end is None or not isinstance(vocab, int):
        raise DataError(f"{config_file}: is damaged: eos_token or vocab is missing")
    start = token_text(config.get("bos_token"))
    files = config.get("files")
    tokenizer = Tokenizer(
        _read_text(path),
        end,
        start,
        vocab=vocab,
        source=str(path),
        files=files,
        special_as_text=config.get("special_as_text") is True,
    )
    tokenizer.notes = tuple(config.get("notes") or ())
    return tokenizer


def from_record(record: FileTokenizer, sample: TextSampler) -> Tokenizer:
    """Load the tokenizer of a file; ``sample`` is unused."""
    tokenizer = from_path(record.path, record.end, record.start)
    if record.template is not None:
        file = Path(record.template)
        tokenizer.files.replace_template(_read_text(file))
        tokenizer.template_source = str(file)
    return tokenizer


def from_path(path: str, end: str | None = None, start: str | None = None) -> Tokenizer:
    """Load a tokenizer from a ``tokenizer.json`` or its folder, as for :class:`FileTokenizer`.

    Texts begin with ``start``, the empty string for none; None: as the folder says.
    """
    file = tokenizer_file(path)
    text = _read_text(file)
    content = read_json(file, DataError)
    sidecars = read_sidecars(file.parent)
    found = assemble(content, sidecars, str(file.parent))
    if found.changed:
        text = json.dumps(found.content, ensure_ascii=False, separators=(",", ":"))
    end = end or found.named.get("eos_token") or _known_end(found.content, file)
    files = TokenizerFiles.read(file.parent, end, start, is_byte_level(content))
    known = Tokenizer(text, end, start, source=str(file), files=files)
    template_file = TEMPLATE_FILE if TEMPLATE_FILE in files else TOKENIZER_CONFIG
    known.template_source = str(file.with_name(template_file))
    known.notes = (*found.notes, *unread_notes(file.parent))
    return known


def _known_end(content: Mapping[str, Any], file: Path) -> str:
    """Return the well-known end token of a ``tokenizer.json`` for which no file names one."""
    present = {token["content"] for token in content.get("added_tokens") or []}
    known = [name for name in _KNOWN_END_TOKENS if name in present]
    if len(known) == 1:
        return known[0]
    found = f"has the end tokens {' and '.join(known)}" if known else "has no known end token"
    raise DataError(f"{file}: {found}; set data.tokenizer.end")


def _read_text(file: Path) -> str:
    with path_in_errors(file, DataError):
        return file.read_text(encoding="utf-8")


def train(record: BpeTokenizer, sample: TextSampler) -> Tokenizer:
    """Train a byte-level BPE on a sample of text; deterministic."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=record.vocab,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with parallel_encoding():
        backend.train_from_iterator(sample(record.sample_bytes), trainer)
    return Tokenizer(
        backend.to_str(),
        END,
        END,
        vocab=record.vocab,
        source="trained tokenizer",
        special_as_text=True,
    )


@contextmanager
def parallel_encoding() -> Iterator[None]:
    """Let ``tokenizers`` use every core in the context.

    Afterwards ``TOKENIZERS_PARALLELISM`` is restored, or ``false`` if it was unset: otherwise the
    library prints a warning when the process forks.
    """
    name = "TOKENIZERS_PARALLELISM"
    previous = os.environ.get(name)
    os.environ[name] = previous or "true"
    try:
        yield
    finally:
        os.environ[name] = previous or "false"


@contextmanager
def _library_errors(source: str) -> Iterator[None]:
    """Turn failures of ``tokenizers`` in the context into errors that name ``source``.

    On a panic the library prints a stack trace directly to file descriptor 2. Output there is
    therefore buffered in the context, and dropped after a panic.

    Raises:
        DataError: instead of a panic, or of the bare ``Exception`` for malformed content.
    """
    panicked = False
    with _STDERR_LOCK, tempfile.TemporaryFile() as captured:
        saved_stderr = os.dup(STDERR)
        os.dup2(captured.fileno(), STDERR)
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
            os.dup2(saved_stderr, STDERR)
            os.close(saved_stderr)
            captured.seek(0)
            if not panicked and (output := captured.read()):
                os.write(STDERR, output)
