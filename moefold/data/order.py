"""The order of sequences: a pure function of seed, source, epoch and position.

Sequence number k of a run (k = step x batch + index in the batch) is assigned to a source, becomes
the n-th sequence of that source, and thus a position in one of its shuffled epochs. All of it is
integer arithmetic that works for any k, so a run resumes exactly, and neither the number of ranks
nor the size of a micro-batch matters.

A run that goes on with another mixture, length of sequences or seed begins a new order
(:class:`OrderStart`), in which each source continues where it stopped (:class:`Given`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from hashlib import blake2b
from math import isqrt, lcm
from typing import Any

_MASK = (1 << 64) - 1
_ROUNDS = 6


def stable_hash(*parts: int | str) -> int:
    """Return a 64-bit hash of all parts, equal on every machine and Python version."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def _splitmix64(x: int) -> int:
    """Apply the SplitMix64 finaliser (Steele, Lea, Flood 2014), a bijection of 64 bits."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def permuted_index(position: int, n: int, key: int) -> int:
    """Return element ``position`` of the permutation of ``range(n)`` that ``key`` selects.

    A Feistel network over a grid of a x b >= n cells, iterated until it falls inside ``range(n)``
    (Black and Rogaway 2002): constant time for any position, without a table.
    """
    assert 0 <= position < n, (position, n)
    a = isqrt(n - 1) + 1
    b = -(-n // a)
    while True:
        left, right = divmod(position, b)
        for round_number in range(_ROUNDS):
            if round_number % 2:
                drawn = _splitmix64(key ^ _splitmix64(left * _ROUNDS + round_number))
                right = (right + drawn) % b
            else:
                drawn = _splitmix64(key ^ _splitmix64(right * _ROUNDS + round_number))
                left = (left + drawn) % a
        position = left * b + right
        if position < n:
            return position


@dataclass(frozen=True)
class Mixture:
    """Interleaves the sequences of several sources by weight, as evenly as possible.

    At any point a source's count differs from its exact share by less than the number of sources.
    """

    weights: tuple[float, ...]

    @cached_property
    def _integer_weights(self) -> tuple[int, ...]:
        """The weights as integers, exact for their decimal notation."""
        exact = [Fraction(repr(float(w))) for w in self.weights]
        common = lcm(*(f.denominator for f in exact))
        return tuple(int(f * common) for f in exact)

    def pick(self, k: int) -> tuple[int, int]:
        """Return the source of sequence k, and how many earlier sequences came from it."""
        before = self.counts(k)
        after = self.counts(k + 1)
        return next((i, n) for i, n in enumerate(before) if after[i] > n)

    def counts(self, k: int) -> tuple[int, ...]:
        """Return how many of the first k sequences come from each source."""
        rest = sum(self._integer_weights)
        counts = []
        for weight in self._integer_weights:
            counts.append((k * weight + rest // 2) // rest)
            k -= counts[-1]
            rest -= weight
        return tuple(counts)


@dataclass(frozen=True)
class Epochs:
    """First rows of one source's sequences, epoch after epoch.

    The concatenated documents form a ring of ``tokens`` rows. Each epoch cuts it into sequences
    from another row and takes each once in a new order; the ``tokens % seq`` rows left over vary.
    """

    seed: int
    name: str
    tokens: int
    seq: int

    @property
    def n_sequences(self) -> int:
        """Number of sequences of an epoch."""
        return self.tokens // self.seq

    @property
    def rows(self) -> int:
        """Number of rows of an epoch's sequences."""
        return self.n_sequences * self.seq

    def start_row(self, n: int) -> int:
        """Return the first row of this source's n-th sequence, counted over all epochs."""
        epoch, position = divmod(n, self.n_sequences)
        key = epoch_key(self.seed, self.name, epoch)
        index = permuted_index(position, self.n_sequences, key)
        return (_splitmix64(key) % self.tokens + index * self.seq) % self.tokens

    def stretch(self, epoch: int, start: int, rows: int) -> Iterator[tuple[int, int]]:
        """Yield (first row in the ring, rows) of a stretch of an epoch's sequences, end to end."""
        end = start + rows
        while start < end:
            n, skipped = divmod(start, self.seq)
            first = self.start_row(epoch * self.n_sequences + n)
            taken = min(self.seq - skipped, end - start)
            yield (first + skipped) % self.tokens, taken
            start += taken


@dataclass(frozen=True)
class Given:
    """What a source has given: every epoch before ``epoch``, and a part of that one.

    It is stated for the source alone, so that it holds in any mixture.
    """

    name: str
    """Name of the source when the epoch began; with ``seed`` and ``epoch`` it sets the order."""
    digest: str
    """Hash of the source's tokens, by which another run recognises the source."""
    seed: int
    cuts: tuple[tuple[int, int], ...]
    """Tokens per sequence, and sequences given at that length. The first cut divides the whole
    epoch, each later one the part that those before it left."""
    epoch: int = 0

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "Given":
        """Read from a checkpoint's JSON data."""
        return cls(**{**stored, "cuts": tuple((seq, n) for seq, n in stored["cuts"])})

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON data."""
        return {**vars(self), "cuts": [list(cut) for cut in self.cuts]}

    @property
    def key(self) -> int:
        """Selects the order of the epoch in progress."""
        return epoch_key(self.seed, self.name, self.epoch)

    @property
    def is_between_epochs(self) -> bool:
        """Whether nothing of the epoch is given yet, so that it can be cut and ordered anew."""
        return not any(n for _, n in self.cuts)

    def more(self, seq: int, n: int) -> "Given":
        """Return what is given after ``n`` further sequences of ``seq`` tokens of the epoch."""
        *before, (last, count) = self.cuts
        if n and last != seq:
            return replace(self, cuts=(*self.cuts, (seq, n)))
        return replace(self, cuts=(*before, (last, count + n)))


@dataclass(frozen=True)
class OrderStart:
    """Where an order of sequences begins: at the start of a run, or where a fork changed it."""

    first: int = 0
    """Number of the first sequence in this order, counted from the start of the run."""
    given: tuple[Given, ...] = ()
    """What sources have given before, those that are no longer read too. A source that is missing
    here has given nothing."""

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "OrderStart":
        """Read from a checkpoint's JSON data."""
        return cls(stored["first"], tuple(map(Given.from_dict, stored["given"])))


def match_given(
    given: Sequence[Given], sources: Sequence[tuple[str, str]]
) -> tuple[list[Given | None], list[Given]]:
    """Find what each source, a (name, digest), has given; return also what is of none of them.

    Sources are recognised by their tokens, by name only among equals.
    """
    left = list(given)
    found: list[Given | None] = [None] * len(sources)
    for by_name in (True, False):
        for i, (name, digest) in enumerate(sources):
            for one in left if found[i] is None else ():
                if one.digest == digest and (one.name == name or not by_name):
                    found[i] = one
                    left.remove(one)
                    break
    return found, left


def epoch_key(seed: int, name: str, epoch: int) -> int:
    """Return the key of an epoch's permutation."""
    return stable_hash("epoch", seed, name, epoch)


def evenly_spaced(n: int, count: int) -> Sequence[int]:
    """Return ``count`` evenly spaced numbers of ``range(n)``, or all if n is smaller."""
    if count >= n:
        return range(n)
    return [i * n // count for i in range(count)]
