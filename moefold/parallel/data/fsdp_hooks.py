"""FSDP hooks for one micro-batch: all-gather a unit's weights before use, free them after.

The next unit's weights are gathered while one computes. Gradients are reduce-scattered when a
unit's backward has run.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from moefold.layers.unshard import EMBEDDING, UnshardHooks
from moefold.parallel.data.bucket import Bucket

Units = Mapping[str, Sequence[Bucket]]


class GradReducer:
    """Reduces a unit's gradients over data ranks after each of its passes, or after the last.

    ``uses`` is the number of passes through each unit in a step. With ``each_pass``, unsharded
    gradients are freed after every pass.
    """

    def __init__(self, units: Units, uses: Mapping[str, int], each_pass: bool) -> None:
        self._units = units
        self._remaining = dict(uses)
        self._each_pass = each_pass
        self._reducing: Sequence[Bucket] = ()

    def mark_complete(self, unit: str) -> None:
        """Register that one pass has added all of its gradients to a unit."""
        self._remaining[unit] = self._remaining.get(unit, 0) - 1
        if not self._each_pass and self._remaining[unit]:
            return
        # One at a time, so that unsharded gradients of at most two units exist at once.
        for bucket in self._reducing if self._each_pass else ():
            bucket.wait_reduce()
        self._reducing = self._units.get(unit, ())
        for bucket in self._reducing:
            bucket.reduce(in_place=not self._each_pass)


class FsdpHooks(UnshardHooks):
    """Unshards and reshards the units of a chunk for one micro-batch's forward and backward.

    Args:
        units: buckets by unit.
        order: the chunk's units in forward order.
        reducer: notified of units whose gradients are complete; None outside training.
        deferred: whether weight gradients are computed after :meth:`pre_weight_gradients`.
        forward_only: number of the first units that have no backward.
    """

    def __init__(
        self,
        units: Units,
        order: Sequence[str],
        reducer: GradReducer | None = None,
        deferred: bool = False,
        forward_only: int = 0,
    ) -> None:
        self._units = units
        self._order = order
        self._reducer = reducer
        self._deferred = deferred
        self._forward_only = forward_only
        self._prefetched: set[str] = set()
        self._awaiting_gradients: list[str] = []
        self._in_backward: set[str] = set()

    def pre_forward(self, unit: str) -> None:
        """Unshard the unit, and prefetch the next."""
        if unit == EMBEDDING and self._awaiting_gradients:
            self._unshard(unit)  # for a multi-token layer; the next unit is already being gathered
        else:
            self._unshard_and_prefetch(unit, 1)

    def post_forward(self, unit: str) -> None:
        """Reshard the unit, whose gradients are awaited from now on."""
        self._reshard(unit)
        if self._reducer is not None:
            self._awaiting_gradients.append(unit)

    @contextmanager
    def unsharded(self, unit: str) -> Iterator[None]:
        """Unshard the unit in this context; its gradients are complete on exit."""
        self._unshard(unit)
        if self._reducer is not None:
            self._open_gradients(unit)
        yield
        self._reshard(unit)
        if self._reducer is not None:
            self._reducer.mark_complete(unit)

    def pre_backward(self, unit: str) -> None:
        """Unshard the unit, and prefetch the one whose backward comes next."""
        if unit != EMBEDDING:  # the backward of a look-up reads no weights
            self._unshard_and_prefetch(unit, -1)
            self._in_backward.add(unit)
        if not self._deferred:
            self._open_gradients(unit)

    def post_backward(self, unit: str) -> None:
        """Reshard the unit, and reduce its gradients unless weight gradients are deferred."""
        self._in_backward.discard(unit)
        self._reshard(unit)
        if not self._deferred:
            self._complete(unit)

    def pre_weight_gradients(self) -> None:
        """Allocate unsharded gradients of the units whose forward has run."""
        for unit in self._awaiting_gradients:
            self._open_gradients(unit)

    def post_weight_gradients(self) -> None:
        """Reshard units that are still unsharded, and reduce gradients still awaited."""
        # Autograd skips post_backward of units whose inputs need no gradient.
        for unit in [*self._in_backward, *self._prefetched]:
            self._reshard(unit)
        self._in_backward = set()
        self._prefetched = set()
        for unit in list(self._awaiting_gradients):
            self._complete(unit)

    def _unshard_and_prefetch(self, unit: str, step: int) -> None:
        """Unshard a unit, and start to unshard the next (step 1) or the previous one (-1)."""
        self._unshard(unit)
        index = self._order.index(unit) + step
        first = 0 if step > 0 else self._forward_only
        next_unit = self._order[index] if first <= index < len(self._order) else EMBEDDING
        if next_unit != EMBEDDING and next_unit not in self._prefetched:
            self._start_unshard(next_unit)
            self._prefetched.add(next_unit)

    def _unshard(self, unit: str) -> None:
        if unit not in self._prefetched:
            self._start_unshard(unit)
        self._prefetched.discard(unit)
        for bucket in self._units.get(unit, ()):
            bucket.wait_unshard()

    def _start_unshard(self, unit: str) -> None:
        for bucket in self._units.get(unit, ()):
            bucket.unshard()

    def _reshard(self, unit: str) -> None:
        for bucket in self._units.get(unit, ()):
            bucket.reshard()

    def _open_gradients(self, unit: str) -> None:
        for bucket in self._units.get(unit, ()):
            bucket.wait_reduce()
            bucket.open_gradients()

    def _complete(self, unit: str) -> None:
        assert self._reducer is not None, "backward belongs to training"
        self._awaiting_gradients.remove(unit)
        self._reducer.mark_complete(unit)
