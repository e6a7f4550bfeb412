"""Baselines for a model: bits per byte of n-gram tables and of ``xz`` on held-out text.

N pairs of a context and the id after it.

Each table has P(next | context) = (count + 1) / (count of the context + vocabulary), counted on
the training split (Laplace's rule), and predicts every byte of the held-out text:

- ``bigram``: the next token given the token before it, over the run's own tokens;
- ``byte_bigram``: the next byte given the byte before it;
- ``byte_trigram``: the next byte given the two bytes before it.

``xz`` is the size of all held-out documents, concatenated, under ``xz -9e``.
"""

import lzma
from collections.abc import Iterator, Sequence

import numpy as np

from moefold.data.config import DataError
from moefold.data.index import Corpus
from moefold.data.order import evenly_spaced
from moefold.data.packing import MaskedCorpus
from moefold.data.prepare import PreparedData

_TRAIN_TOKENS = 20_000_000
_TEXT_BYTES = 16_000_000
_DENSE_CELLS = 1 << 24  # larger tables are counted by sorting
Pairs = tuple[np.ndarray, np.ndarray]
"""int64 [N] contexts and int64 [N] the ids that follow them."""


def compute_baselines(prepared: PreparedData) -> dict[str, float]:
    """Return the baselines of the first held-out set in bits per byte; seconds for tens of MB.

    Larger data is sampled by evenly spaced documents: about 20 million tokens to count and 16 MB
    to evaluate.
    """
    if not prepared.valid:
        raise DataError(
            "watch.evaluate.baselines needs held-out text; set holdout on a source, add a set to "
            "data.valid, or set baselines: []"
        )
    if any(isinstance(p.corpus, MaskedCorpus) for p in (*prepared.train, prepared.valid[0])):
        raise DataError(
            "watch.evaluate.baselines cannot be measured on conversations, in which only answers "
            "are predicted; set baselines: []"
        )
    size = prepared.tokenizer.size
    token_bytes = prepared.tokenizer.token_bytes
    held_out = list(_sample_documents(prepared.valid[0].corpus, _TEXT_BYTES))
    tokens_per_part = max(_TRAIN_TOKENS // max(len(prepared.train), 1), 1)
    train = [ids for p in prepared.train for ids in _sample_documents(p.corpus, tokens_per_part)]
    held_out_text = [_text(ids, token_bytes) for ids in held_out]
    train_text = [_text(ids, token_bytes) for ids in train]
    n_bytes = sum(map(len, held_out_text)) * prepared.valid[0].byte_ratio  # of the text itself
    held_out_bytes = [np.frombuffer(text, np.uint8).astype(np.int64) for text in held_out_text]
    train_bytes = [np.frombuffer(text, np.uint8).astype(np.int64) for text in train_text]
    packed = lzma.compress(b"".join(held_out_text), preset=9 | lzma.PRESET_EXTREME)
    bits = {
        "bigram": _bits(_ngrams(train, 1, size), _ngrams(held_out, 1, size), size),
        "byte_bigram": _byte_ngram_bits(train_bytes, held_out_bytes, 1),
        "byte_trigram": _byte_ngram_bits(train_bytes, held_out_bytes, 2),
        "xz": 8 * len(packed),
    }
    return {name: n / n_bytes for name, n in bits.items()}


def _sample_documents(corpus: Corpus, tokens: int) -> Iterator[np.ndarray]:
    """Yield all documents, or evenly spaced ones with about ``tokens`` tokens in total."""
    chosen = corpus.n_documents
    if corpus.n_tokens > tokens:
        chosen = max(corpus.n_documents * tokens // corpus.n_tokens, 1)
    for i in evenly_spaced(corpus.n_documents, chosen):
        yield corpus.document(i)


def _text(ids: np.ndarray, token_bytes: Sequence[bytes]) -> bytes:
    """Return the bytes of a document's tokens."""
    return b"".join(map(token_bytes.__getitem__, ids.tolist()))


def _ngrams(documents: list[np.ndarray], order: int, vocab: int) -> Pairs:
    """Return each context of ``order`` ids, encoded as one number, and the id after it."""
    contexts = [np.zeros(0, np.int64)]
    following = [np.zeros(0, np.int64)]
    for ids in documents:
        n = len(ids) - order
        if n > 0:
            context = np.zeros(n, np.int64)
            for i in range(order):
                context = context * vocab + ids[i : i + n]
            contexts.append(context)
            following.append(ids[order:])
    return np.concatenate(contexts), np.concatenate(following)


def _byte_ngram_bits(train: list[np.ndarray], held_out: list[np.ndarray], order: int) -> float:
    """Return the bits of the held-out bytes; a document's first ``order`` count 8 bits each."""
    first = sum(min(order, len(ids)) for ids in held_out)
    return 8.0 * first + _bits(_ngrams(train, order, 256), _ngrams(held_out, order, 256), 256)


def _bits(train: Pairs, held_out: Pairs, vocab: int) -> float:
    """Return the bits of the held-out pairs under the table of ``train``."""
    cells = _counts(train[0] * vocab + train[1], held_out[0] * vocab + held_out[1])
    probability = (cells + 1.0) / (_counts(train[0], held_out[0]) + float(vocab))
    return float(-np.log2(probability).sum())


def _counts(codes: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Return how often each of ``queries`` occurs in ``codes``."""
    if not len(codes):
        return np.zeros(len(queries), np.int64)
    if codes.max() < _DENSE_CELLS:
        table = np.bincount(codes, minlength=_DENSE_CELLS)
        return np.where(queries < _DENSE_CELLS, table[np.minimum(queries, _DENSE_CELLS - 1)], 0)
    known, counts = np.unique(codes, return_counts=True)
    place = np.minimum(np.searchsorted(known, queries), len(known) - 1)
    return np.where(known[place] == queries, counts[place], 0)
