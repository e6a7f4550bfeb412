"""One micro-batch's visit to a chunk: weights come before their use and go after it.

The next unit's weights are on their way while one computes.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from moefold.layers.weights import EMBEDDING
from moefold.parallel.data.bucket import Bucket

Units = Mapping[str, Sequence[Bucket]]


class Reduction:
    """When the gradients of a unit are summed: after each of its passes, or after the last.

    Args:
        units: buckets by unit.
        uses: how often each unit is part of a step.
        each_pass: whether sums are made after each pass, and whole gradients then let go.
    """

    def __init__(self, units: Units, uses: Mapping[str, int], each_pass: bool) -> None:
        self._units, self._left, self._each_pass = units, dict(uses), each_pass
        self._under_way: Sequence[Bucket] = ()

    def completed(self, unit: str) -> None:
        """Note that one use of a unit has added all its gradients."""
        self._left[unit] = self._left.get(unit, 0) - 1
        if not self._each_pass and self._left[unit]:
            return
        # One at a time: whole gradients of more than two units never exist at once.
        for bucket in self._under_way if self._each_pass else ():
            bucket.settle()
        self._under_way = self._units.get(unit, ())
        for bucket in self._under_way:
            bucket.reduce()


class Visit:
    """One micro-batch's way through a chunk, there and back: told as :class:`Weights` says.

    Args:
        units: buckets by unit.
        order: the chunk's units in the order of forward.
        reduction: told of units whose gradients are complete; None outside training.
        deferred: whether weights' products wait for :meth:`collect` and :meth:`end`.
    """

    def __init__(
        self,
        units: Units,
        order: Sequence[str],
        reduction: Reduction | None = None,
        deferred: bool = False,
    ) -> None:
        self._units, self._order = units, order
        self._reduction, self._deferred = reduction, deferred
        self._coming: set[str] = set()
        self._awaited: list[str] = []
        self._returned: set[str] = set()

    def enter(self, unit: str) -> None:
        """See ``Weights``."""
        self._hold(unit, 1)

    def leave(self, unit: str) -> None:
        """See ``Weights``."""
        self._release(unit)
        if self._reduction is not None:
            self._awaited.append(unit)

    @contextmanager
    def using(self, unit: str) -> Iterator[None]:
        """See ``Weights``."""
        self._take(unit)
        if self._reduction is not None:
            self._open(unit)
        yield
        self._release(unit)
        if self._reduction is not None:
            self._reduction.completed(unit)

    def returns(self, unit: str) -> None:
        """See ``Weights``."""
        if unit != EMBEDDING:  # adding rows to a table reads none of it
            self._hold(unit, -1)
            self._returned.add(unit)
        if not self._deferred:
            self._open(unit)

    def returned(self, unit: str) -> None:
        """See ``Weights``."""
        self._returned.discard(unit)
        self._release(unit)
        if not self._deferred:
            self._complete(unit)

    def collect(self) -> None:
        """See ``Weights``."""
        for unit in self._awaited:
            self._open(unit)

    def end(self) -> None:
        """See ``Weights``."""
        # Also of units whose inputs had no use for a gradient, and of those put off.
        for unit in [*self._returned, *self._coming]:
            self._release(unit)
        self._returned, self._coming = set(), set()
        for unit in list(self._awaited):
            self._complete(unit)

    def _hold(self, unit: str, way: int) -> None:
        """Have a unit's weights here, and those of the next (way 1) or last (-1) on their way."""
        self._take(unit)
        place = self._order.index(unit) + way
        follows = self._order[place] if 0 <= place < len(self._order) else EMBEDDING
        if follows != EMBEDDING and follows not in self._coming:
            self._acquire(follows)
            self._coming.add(follows)

    def _release(self, unit: str) -> None:
        """Let a unit's weights go."""
        for bucket in self._units.get(unit, ()):
            bucket.release()

    def _take(self, unit: str) -> None:
        if unit not in self._coming:
            self._acquire(unit)
        self._coming.discard(unit)
        for bucket in self._units.get(unit, ()):
            bucket.ready()

    def _acquire(self, unit: str) -> None:
        for bucket in self._units.get(unit, ()):
            bucket.acquire()

    def _open(self, unit: str) -> None:
        for bucket in self._units.get(unit, ()):
            bucket.settle()
            bucket.open()

    def _complete(self, unit: str) -> None:
        assert self._reduction is not None, "backward belongs to training"
        self._awaited.remove(unit)
        self._reduction.completed(unit)
