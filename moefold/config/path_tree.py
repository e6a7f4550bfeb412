"""Values by path of a run file, found at, below and around a path without a search."""

from collections.abc import Iterator
from typing import Generic, TypeVar

from moefold.config.errors import MISSING, FieldPath, PathPart

T = TypeVar("T")


class _Node(Generic[T]):
    """A path's value, or MISSING, and what lies below it."""

    def __init__(self) -> None:
        self.value: T = MISSING
        self.children: dict[PathPart, _Node[T]] = {}

    def items(self, path: FieldPath) -> Iterator[tuple[FieldPath, T]]:
        if self.value is not MISSING:
            yield path, self.value
        for part, child in self.children.items():
            yield from child.items((*path, part))


class PathTree(Generic[T]):
    """A mapping of paths to values; each call takes time by the length of its path.

    Every branch ends in a value.
    """

    def __init__(self) -> None:
        self._root: _Node[T] = _Node()

    def __setitem__(self, path: FieldPath, value: T) -> None:
        node = self._root
        for part in path:
            node = node.children.setdefault(part, _Node())
        node.value = value

    def get(self, path: FieldPath, default: T) -> T:
        """Return the value at a path."""
        node: _Node[T] | None = self._root
        for part in path:
            node = None if node is None else node.children.get(part)
        return default if node is None or node.value is MISSING else node.value

    def items(self) -> Iterator[tuple[FieldPath, T]]:
        """Yield each path and its value."""
        return self._root.items(())

    def drop(self, path: FieldPath) -> None:
        """Remove all values at or below a path."""
        if not path:
            self._root = _Node()
            return
        above: list[tuple[_Node[T], PathPart]] = []
        node = self._root
        for part in path:
            above.append((node, part))
            child = node.children.get(part)
            if child is None:
                return
            node = child
        for parent, part in reversed(above):
            del parent.children[part]
            if parent.children or parent.value is not MISSING:
                return

    def nearest(self, path: FieldPath, default: T) -> T:
        """Return the first value at or below a path, or else below the nearest path around it.

        What is only at or below the empty path does not count.
        """
        node = self._root
        for part in path:
            if part not in node.children:
                break
            node = node.children[part]
        if node is self._root:
            return default
        return next(node.items(()))[1]
