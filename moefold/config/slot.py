"""Slots: fields of a run file that hold one of several kinds of record, selected by ``kind``."""

import sys
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, TypeVar

from pydantic import GetCoreSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from moefold.config.base import Record, iter_records

RecordClass = TypeVar("RecordClass", bound=type[Record])


class Slot:
    """Registry of record classes, distinguished by the default of their tag field.

    A field with this choice is annotated ``Annotated[Record, SLOT]``. In a run file it holds a
    mapping with the tag (``{kind: muon, lr: 0.01}``) or the tag alone (``muon``). The class is
    looked up when a value is validated, so plugins can register records later, which are selected
    exactly like those of the package.
    """

    def __init__(
        self, name: str, tag: str = "kind", package: str | None = None, default: str | None = None
    ) -> None:
        self.name = name
        self.tag = tag
        self.default = default
        """Kind of a mapping without a tag; None if the tag is required."""
        self._package = package
        """Package whose modules register kinds; imported when ``kinds`` is first read."""
        self._kinds: dict[str, type[Record]] = {}
        self.implied: dict[str, str] = {}
        """Kinds by the key that implies them: ``from`` without a tag means ``family: folder``."""

    @property
    def kinds(self) -> dict[str, type[Record]]:
        """Record classes by kind: those of the package sorted by module, then all others."""
        folder = self._package
        self._package = None
        if folder is not None:
            for module in iter_modules(import_module(folder).__path__):
                import_module(f"{folder}.{module.name}")
            own = [item for item in self._kinds.items() if item[1].__module__.startswith(folder)]
            others = [item for item in self._kinds.items() if item not in own]
            self._kinds.clear()
            self._kinds.update(sorted(own, key=lambda item: item[1].__module__) + others)
        return self._kinds

    def register(self, record: RecordClass) -> RecordClass:
        """Register a record class under the default of its tag field; usable as a decorator."""
        field = record.model_fields.get(self.tag)
        kind = None if field is None else field.default
        if not isinstance(kind, str):
            raise TypeError(f"{record.__name__}.{self.tag} needs a string default to be registered")
        in_package = self._package is not None and record.__module__.startswith(self._package)
        earlier = (self._kinds if in_package else self.kinds).get(kind, record)
        # A notebook cell or edited file may register its class again.
        modules = [sys.modules.get(cls.__module__) for cls in (earlier, record)]
        first, second = (getattr(module, "__file__", None) for module in modules)
        same_file = earlier.__module__ == record.__module__ or first == second is not None
        if earlier.__qualname__ != record.__qualname__ or not same_file:
            raise ValueError(
                f"{self.name} {kind!r} is already taken by {earlier.__module__}.{earlier.__name__}"
            )
        self._kinds[kind] = record
        return record

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Validate with the class that is registered under the tag at validation time.

        It must inherit from the field's annotated class, which readers of the field rely on.
        """
        pick = partial(self._validate, source)
        return core_schema.with_info_plain_validator_function(pick, metadata={"slot": self})

    def _validate(self, base: type[Record], value: Any, info: ValidationInfo) -> Record:
        """Return the record for a tag, a mapping with a tag, or an instance."""
        if isinstance(value, Record):
            record = type(value)
            if not isinstance(value, tuple(self.kinds.values())):
                raise PydanticCustomError("slot_type", "not a registered kind")
        else:
            if isinstance(value, str):
                value = {self.tag: value}
            if not isinstance(value, Mapping):
                raise PydanticCustomError("slot_type", "not a mapping with a tag")
            value = self.with_tag(value)
            if self.tag not in value:
                raise PydanticCustomError("slot_missing", "the tag is missing", {"tag": self.tag})
            record = self.lookup(value[self.tag])
            if record is None:
                raise PydanticCustomError("slot_unknown", "no such kind", {"tag": self.tag})
        if not issubclass(record, base):
            context = {"kind": record.__name__, "base": f"{base.__module__}.{base.__qualname__}"}
            raise PydanticCustomError("value_error", "{kind} must inherit from {base}", context)
        if isinstance(value, Record):
            return value
        return record.model_validate(value, context=info.context)

    def with_tag(self, value: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a mapping with its tag, added if a key or the default implies one."""
        kind = next((self.implied[key] for key in value if key in self.implied), self.default)
        return value if kind is None or self.tag in value else {self.tag: kind, **value}

    def lookup(self, kind: Any) -> type[Record] | None:
        """Return the record class registered under ``kind``, if any."""
        return self.kinds.get(kind) if isinstance(kind, str) else None


def record_modules(base: type[Record] = Record) -> set[str]:
    """Return the modules of this package that define loaded records, and those of their owners.

    Owners of hooks are excluded, as hooks run on the first rank only.
    """
    modules = {module for record in base.__subclasses__() for module in record_modules(record)}
    modules.add(base.__module__)
    if isinstance(base.owner, str) and ".hooks." not in base.owner:
        modules.add(base.owner.partition(":")[0])
    return {module for module in modules if module.startswith(__name__.partition(".")[0] + ".")}


def modules_to_preload(records: Any) -> list[str]:
    """Return the modules that the records in a value want imported before ranks are forked."""
    return sorted({module for _, record in iter_records(records) for module in record.preloads})


def build(record: Record, *args: Any, **kwargs: Any) -> Any:
    """Call the owner of ``record`` with the record and the arguments; return the result."""
    owner = type(record).owner
    if owner is None:
        raise TypeError(f"{type(record).__name__} names no owner")
    if isinstance(owner, str):
        module, _, name = owner.partition(":")
        owner = getattr(import_module(module), name)
    return owner(record, *args, **kwargs)
