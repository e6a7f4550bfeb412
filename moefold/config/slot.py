"""Slots: places in a run file where one of several kinds of part is chosen by its ``kind``."""

from importlib import import_module
from typing import Any

from moefold.config.base import Record


class Slot:
    """A named choice between record classes, told apart by the literal in their tag field.

    A field that offers the choice is written ``Annotated[Record, SLOT]``. Parts from outside the
    package register a record of their own and are chosen exactly like ours.
    """

    def __init__(self, name: str, tag: str = "kind") -> None:
        self.name = name
        self.tag = tag
        self.kinds: dict[str, type[Record]] = {}

    def register(self, record: type[Record]) -> type[Record]:
        """Add a record class under the value of its tag field; usable as a decorator."""
        kind = record.model_fields[self.tag].default
        if not isinstance(kind, str):
            raise TypeError(f"{record.__name__}.{self.tag} needs a string default to be registered")
        present = self.kinds.get(kind)
        if present is not None and present.__qualname__ != record.__qualname__:
            raise ValueError(f"{self.name} {kind!r} is already taken by {present.__name__}")
        self.kinds[kind] = record
        return record


def build(record: Record, *args: Any, **kwargs: Any) -> Any:
    """Build what ``record`` describes: call its owner with the record and the given arguments."""
    owner = type(record).owner
    if owner is None:
        raise TypeError(f"{type(record).__name__} names no owner")
    if isinstance(owner, str):
        module, _, name = owner.partition(":")
        owner = getattr(import_module(module), name)
    return owner(record, *args, **kwargs)
