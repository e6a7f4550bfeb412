"""A line under construction: counts micro-batches, so that phases only say what comes next."""

from collections import deque

from moefold.schedule.table import Action, Kind, Line, Pair, Step


class Lanes:
    """Writes one rank's line; each chunk's forwards and backwards come in ascending order."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._next: dict[tuple[str, int], int] = {}
        self._weights: deque[Action] = deque()

    def forward(self, chunk: int) -> None:
        """Add the next forward of a chunk."""
        self._steps.append(self._take("F", chunk))

    def backward(self, chunk: int) -> None:
        """Add the next backward of a chunk, inputs and weights at once."""
        self._steps.append(self._take("B", chunk))

    def inputs(self, chunk: int) -> None:
        """Add the next input gradient of a chunk and put its weight gradient off."""
        action = self._take("I", chunk)
        self._steps.append(action)
        self._weights.append(action._replace(kind="W"))

    def weights(self) -> None:
        """Add the oldest weight gradient that was put off."""
        self._steps.append(self._weights.popleft())

    def pair(self, forward: int, backward: int) -> None:
        """Add the next forward of one chunk beside the next backward of another."""
        self._steps.append(Pair(self._take("F", forward), self._take("B", backward)))

    def line(self) -> Line:
        """Return the line, once no weight gradient is put off any more."""
        assert not self._weights, "weight gradients are left over"
        return tuple(self._steps)

    def _take(self, kind: Kind, chunk: int) -> Action:
        way = "forward" if kind == "F" else "backward"
        micro = self._next.get((way, chunk), 0)
        self._next[way, chunk] = micro + 1
        return Action(kind, chunk, micro)
