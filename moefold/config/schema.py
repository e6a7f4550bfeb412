"""JSON schemas of records, so that editors complete and check run files while they are written."""

from typing import Any

from pydantic.json_schema import (
    GenerateJsonSchema,
    JsonSchemaMode,
    JsonSchemaValue,
    models_json_schema,
)
from pydantic_core import core_schema

from moefold.config.base import Record
from moefold.config.fields import keys
from moefold.config.slot import Slot

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_MARK = "x-slot"
_MODE: JsonSchemaMode = "validation"


def json_schema(cls: type[Record], partial: bool = False) -> dict[str, Any]:
    """Return the JSON schema of a record class.

    A slot is a ``oneOf`` of all kinds registered at this moment, told apart by their tag, or the
    bare name of a kind that needs nothing else.

    Args:
        cls: class of the record.
        partial: for files that may build on another: allows ``base`` and requires nothing.
    """
    models: list[type[Record]] = [cls]
    while True:
        refs, definitions, slots = _generate(models)
        missing = [kind for slot in slots for kind in slot.kinds.values() if kind not in models]
        if not missing:
            break
        models += dict.fromkeys(missing)
    found = _expanded(definitions, slots, refs)
    own = refs[cls]["$ref"].rsplit("/", 1)[1]
    schema = {"$schema": DRAFT, **found["$defs"].pop(own), **found}
    if _points_at(schema, refs[cls]["$ref"]):
        schema["$defs"][own] = {key: item for key, item in schema.items() if key[0] != "$"}
    return _partial(schema) if partial else schema


def _generate(
    models: list[type[Record]],
) -> tuple[dict[type[Record], JsonSchemaValue], JsonSchemaValue, list[Slot]]:
    """Return a reference to each model, their definitions with slots marked, and the slots."""
    slots: list[Slot] = []

    class Marking(GenerateJsonSchema):
        def function_plain_schema(
            self, schema: core_schema.PlainValidatorFunctionSchema
        ) -> JsonSchemaValue:
            slot = schema.get("metadata", {}).get("slot")
            if not isinstance(slot, Slot):
                return super().function_plain_schema(schema)
            if slot not in slots:
                slots.append(slot)
            return {_MARK: slots.index(slot)}

    given: list[tuple[type[Any], JsonSchemaMode]] = [(model, _MODE) for model in models]
    refs, definitions = models_json_schema(given, schema_generator=Marking)
    return {model: refs[(model, _MODE)] for model in models}, definitions, slots


def _expanded(value: Any, slots: list[Slot], refs: dict[type[Record], JsonSchemaValue]) -> Any:
    """Return a schema with each marked slot written out."""
    if isinstance(value, list):
        return [_expanded(item, slots, refs) for item in value]
    if not isinstance(value, dict):
        return value
    found = {key: _expanded(item, slots, refs) for key, item in value.items() if key != _MARK}
    if _MARK in value:
        found |= _choice(slots[value[_MARK]], refs)
    return found


def _choice(slot: Slot, refs: dict[type[Record], JsonSchemaValue]) -> JsonSchemaValue:
    if not slot.kinds:
        return {"not": {}}
    mapping = {kind: refs[record]["$ref"] for kind, record in slot.kinds.items()}
    implied = {
        *slot.implied.values(),
        slot.default,
    }  # its key says the kind, so the tag may be left out
    choices: list[JsonSchemaValue] = [
        {"$ref": ref} if kind in implied else {"$ref": ref, "required": [slot.tag]}
        for kind, ref in mapping.items()
    ]
    simple = [kind for kind, record in slot.kinds.items() if _needs_nothing(record)]
    if simple:
        choices.append({"enum": simple})
    if not choices:  # only parts from outside the package stand there
        return {"type": ["object", "string"]}
    return {"oneOf": choices, "discriminator": {"propertyName": slot.tag, "mapping": mapping}}


def _needs_nothing(record: type[Record]) -> bool:
    return not any(info.is_required() for info in keys(record).values())


def _points_at(value: Any, ref: str) -> bool:
    if isinstance(value, dict):
        return value.get("$ref") == ref or any(_points_at(item, ref) for item in value.values())
    return isinstance(value, list) and any(_points_at(item, ref) for item in value)


def _partial(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that asks for nothing and allows ``base``."""
    loose = _asking_nothing(schema)
    text = {"type": "string"}
    named = {"anyOf": [text, {"type": "array", "items": text}]}
    about = "File or recipe to build on, relative to this file; or a list of them."
    loose["properties"] = {"base": {**named, "description": about}, **loose["properties"]}
    return loose


def _asking_nothing(value: Any, names: bool = False) -> Any:
    """Drop ``required`` keywords, and let a mapping without its tag match any kind."""
    if isinstance(value, list):
        return [_asking_nothing(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {}
    for key, item in value.items():
        if key == "default":
            found[key] = item
            continue
        if key == "required" and not names:
            continue
        kept = "anyOf" if key == "oneOf" and not names else key
        found[kept] = _asking_nothing(item, names=not names and key in ("properties", "$defs"))
    return found
