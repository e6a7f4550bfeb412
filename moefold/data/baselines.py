"""Baselines for a model: bits per byte of n-gram tables and of ``xz`` on held-out text.

N pairs of a context and what follows it.

Each table has P(next | context) = (count + 1) / (count of the context + vocabulary), counted on
the training split (Laplace's rule), and predicts every byte of the held-out text:

- ``bigram``: the next token given the token before it, over the run's own tokens;
- ``byte_bigram``: the next byte given the byte before it;
- ``byte_trigram``: the next byte given the two bytes before it.

``xz`` is the size of all held-out documents, concatenated, under ``xz -9e``.
"""

import lzma
from collections.abc import Iterator

import numpy as np

from moefold.data.config import DataError
from moefold.data.index import Corpus
from moefold.data.order import spread
from moefold.data.packing import Conversations
from moefold.data.prepare import Prepared

_TRAIN_TOKENS, _TEXT_BYTES = 20_000_000, 16_000_000
_DENSE = 1 << 24  # maximum cells of a table that is counted directly rather than by sorting
Pairs = tuple[np.ndarray, np.ndarray]
"""int64 [N] contexts and int64 [N] the ids that follow them."""


def baselines(prepared: Prepared) -> dict[str, float]:
    """Return the baselines of the first held-out set in bits per byte; seconds for tens of MB.

    Of larger data, evenly spread documents are taken: about 20 million tokens for counting
    and 16 MB for evaluation.
    """
    if not prepared.valid:
        raise DataError(
            "watch.evaluate.baselines needs held-out text; set holdout on a source, add a set to "
            "data.valid, or set baselines: []"
        )
    if any(isinstance(p.corpus, Conversations) for p in (*prepared.train, prepared.valid[0])):
        raise DataError(
            "watch.evaluate.baselines cannot be measured on conversations, in which only answers "
            "are predicted; set baselines: []"
        )
    size, spelling = prepared.tokenizer.size, prepared.tokenizer.token_bytes
    held = list(_documents(prepared.valid[0].corpus, _TEXT_BYTES))
    share = max(_TRAIN_TOKENS // max(len(prepared.train), 1), 1)
    seen = [ids for p in prepared.train for ids in _documents(p.corpus, share)]
    held_text, seen_text = (
        [b"".join(map(spelling.__getitem__, ids.tolist())) for ids in documents]
        for documents in (held, seen)
    )
    n_bytes = sum(map(len, held_text)) * prepared.valid[0].byte_ratio  # of the text itself
    held_bytes, seen_bytes = (
        [np.frombuffer(text, np.uint8).astype(np.int64) for text in texts]
        for texts in (held_text, seen_text)
    )
    packed = lzma.compress(b"".join(held_text), preset=9 | lzma.PRESET_EXTREME)
    bits = {
        "bigram": _table(_pairs(seen, 1, size), _pairs(held, 1, size), size),
        "byte_bigram": _bytes(seen_bytes, held_bytes, 1),
        "byte_trigram": _bytes(seen_bytes, held_bytes, 2),
        "xz": 8 * len(packed),
    }
    return {name: n / n_bytes for name, n in bits.items()}


def _documents(corpus: Corpus, tokens: int) -> Iterator[np.ndarray]:
    """Yield the documents, or evenly spread ones with about ``tokens`` tokens in all."""
    chosen = corpus.documents
    if corpus.tokens > tokens:
        chosen = max(corpus.documents * tokens // corpus.tokens, 1)
    for i in spread(corpus.documents, chosen):
        yield corpus.document(i)


def _pairs(documents: list[np.ndarray], order: int, vocab: int) -> Pairs:
    """Return each context of ``order`` ids, as one number, and the next id in the document."""
    contexts, following = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for ids in documents:
        n = len(ids) - order
        if n > 0:
            context = np.zeros(n, np.int64)
            for i in range(order):
                context = context * vocab + ids[i : i + n]
            contexts.append(context)
            following.append(ids[order:])
    return np.concatenate(contexts), np.concatenate(following)


def _bytes(seen: list[np.ndarray], held: list[np.ndarray], order: int) -> float:
    """Return the bits of held-out bytes; the first ``order`` of a document count 8 bits each."""
    first = sum(min(order, len(ids)) for ids in held)
    return 8.0 * first + _table(_pairs(seen, order, 256), _pairs(held, order, 256), 256)


def _table(seen: Pairs, held: Pairs, vocab: int) -> float:
    """Return the bits of the held-out pairs under the table counted on ``seen``."""
    cells = _counts(seen[0] * vocab + seen[1], held[0] * vocab + held[1])
    chance = (cells + 1.0) / (_counts(seen[0], held[0]) + float(vocab))
    return float(-np.log2(chance).sum())


def _counts(codes: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Return how often each code in ``asked`` occurs in ``codes``."""
    if not len(codes):
        return np.zeros(len(asked), np.int64)
    if codes.max() < _DENSE:
        table = np.bincount(codes, minlength=_DENSE)
        return np.where(asked < _DENSE, table[np.minimum(asked, _DENSE - 1)], 0)
    known, counts = np.unique(codes, return_counts=True)
    place = np.minimum(np.searchsorted(known, asked), len(known) - 1)
    return np.where(known[place] == asked, counts[place], 0)
