"""The order of sequences: a pure function of seed and sequence number, with no state to save.

Sequence number k of a run (k = step x batch + place in the batch) is assigned to a source, becomes
the n-th sequence of that source, and thus a place in one of its shuffled epochs. All of it is
integer arithmetic that works for any k, so a run resumes exactly, and neither the number of ranks
nor the size of a micro-batch matters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from hashlib import blake2b
from math import isqrt, lcm

_MASK = (1 << 64) - 1
_ROUNDS = 6


def key_of(*parts: int | str) -> int:
    """Return a 64-bit hash of all parts that is equal on every machine and version."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def _scramble(x: int) -> int:
    """Apply the finaliser of SplitMix64 (Steele, Lea, Flood 2014), a bijection of 64 bits."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def shuffled(place: int, n: int, key: int) -> int:
    """Return the number at ``place`` of a permutation of ``range(n)`` determined by ``key``.

    A Feistel network over a grid of a x b >= n cells, iterated until it falls inside ``range(n)``
    (Black and Rogaway 2002): constant time for any place, without a table.
    """
    assert 0 <= place < n, (place, n)
    a = isqrt(n - 1) + 1
    b = -(-n // a)
    while True:
        left, right = divmod(place, b)
        for turn in range(_ROUNDS):
            if turn % 2:
                right = (right + _scramble(key ^ _scramble(left * _ROUNDS + turn))) % b
            else:
                left = (left + _scramble(key ^ _scramble(right * _ROUNDS + turn))) % a
        place = left * b + right
        if place < n:
            return place


@dataclass(frozen=True)
class Mixture:
    """Distributes a stream of sequences over sources, by weight and as evenly as possible.

    At any point a source's count differs from its exact share by less than the number of sources.
    """

    weights: tuple[float, ...]

    @cached_property
    def _whole(self) -> tuple[int, ...]:
        """The weights as integers, exact for their decimal notation."""
        exact = [Fraction(repr(float(w))) for w in self.weights]
        common = lcm(*(f.denominator for f in exact))
        return tuple(int(f * common) for f in exact)

    def pick(self, k: int) -> tuple[int, int]:
        """Return the source of sequence k, and the number of earlier sequences of that source."""
        before, after = self.counts(k), self.counts(k + 1)
        return next((i, n) for i, n in enumerate(before) if after[i] > n)

    def counts(self, k: int) -> tuple[int, ...]:
        """Return how many of the first k sequences come from each source."""
        rest, counts = sum(self._whole), []
        for weight in self._whole:
            counts.append((k * weight + rest // 2) // rest)
            k, rest = k - counts[-1], rest - weight
        return tuple(counts)


@dataclass(frozen=True)
class Epochs:
    """First rows of one source's sequences, epoch after epoch.

    The concatenated documents form a ring of ``tokens`` rows. Each epoch cuts it into whole
    sequences from a different first row and takes each once, in a different order; the
    ``tokens % seq`` rows that fill no sequence differ from epoch to epoch.
    """

    seed: int
    name: str
    tokens: int
    seq: int

    @property
    def sequences(self) -> int:
        """Number of sequences of an epoch."""
        return self.tokens // self.seq

    def start(self, n: int) -> int:
        """Return the first row of this source's n-th sequence, counted over all epochs."""
        epoch, place = divmod(n, self.sequences)
        key = key_of("epoch", self.seed, self.name, epoch)
        number = shuffled(place, self.sequences, key)
        return (_scramble(key) % self.tokens + number * self.seq) % self.tokens


def spread(n: int, chosen: int) -> Sequence[int]:
    """Return ``chosen`` numbers of ``range(n)``, evenly spread; all of them if n is less."""
    return range(n) if chosen >= n else [i * n // chosen for i in range(chosen)]
