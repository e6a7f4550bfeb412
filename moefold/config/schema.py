"""JSON schemas of records, so that editors complete and check run files while they are written.

``moefold explain --schema`` prints the one of run files.
"""

from typing import Any

from pydantic.json_schema import (
    GenerateJsonSchema,
    JsonSchemaMode,
    JsonSchemaValue,
    models_json_schema,
)
from pydantic_core import core_schema

from moefold.config.base import Record
from moefold.config.errors import MISSING
from moefold.config.fields import specs
from moefold.config.slot import Slot

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_MARK = "x-slot"
_MODE: JsonSchemaMode = "validation"
_BASE = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    "description": "File or recipe to build on, relative to this file; or a list of them.",
}
Refs = dict[type[Record], JsonSchemaValue]


def json_schema(cls: type[Record], partial: bool = False) -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a record class.

    A slot is a choice of all kinds registered at this moment, told apart by their tag, or the bare
    name of a kind that needs nothing else.

    Args:
        cls: class of the record.
        partial: for files that may build on another: allows ``base`` and requires nothing.
    """
    models: list[type[Record]] = [cls]
    while True:
        refs, definitions, slots = _generated(models, partial)
        missing = [kind for slot in slots for kind in slot.kinds.values() if kind not in models]
        if not missing:
            break
        models += dict.fromkeys(missing)
    choices = [_choice(slot, refs, partial) for slot in slots]
    found = _with_choices(definitions, choices)
    if partial:
        own = found[refs[cls]["$ref"].rsplit("/", 1)[1]]
        own["properties"] = {"base": _BASE, **own["properties"]}
    return {"$schema": DRAFT, **refs[cls], "$defs": found}


def _generated(
    models: list[type[Record]], partial: bool
) -> tuple[Refs, dict[str, JsonSchemaValue], list[Slot]]:
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

        def field_is_required(self, field: Any, total: bool) -> bool:
            return not partial and super().field_is_required(field, total)

    given: list[tuple[type[Any], JsonSchemaMode]] = [(model, _MODE) for model in models]
    refs, definitions = models_json_schema(given, schema_generator=Marking)
    return {model: refs[(model, _MODE)] for model in models}, definitions["$defs"], slots


def _with_choices(value: Any, choices: list[JsonSchemaValue]) -> Any:
    """Return a schema with each marked slot written out."""
    if isinstance(value, list):
        return [_with_choices(item, choices) for item in value]
    if not isinstance(value, dict):
        return value
    found = {key: _with_choices(item, choices) for key, item in value.items() if key != _MARK}
    return found | (choices[value[_MARK]] if _MARK in value else {})


def _choice(slot: Slot, refs: Refs, partial: bool) -> JsonSchemaValue:
    """Return the schema of a slot: its kinds, and the names of those that need nothing."""
    if not slot.kinds:
        return {"not": {}}
    mapping = {kind: refs[record]["$ref"] for kind, record in slot.kinds.items()}
    # Kinds whose tag may be left out: a key says the kind, or it is the default.
    implied = {*slot.implied.values(), slot.default, *(mapping if partial else ())}
    choices: list[JsonSchemaValue] = [
        {"$ref": ref} if kind in implied else {"$ref": ref, "required": [slot.tag]}
        for kind, ref in mapping.items()
    ]
    needless = (
        kind
        for kind, record in slot.kinds.items()
        if not any(spec.default is MISSING for spec in specs(record).values())
    )
    if simple := list(slot.kinds if partial else needless):
        choices.append({"enum": simple})
    of = "anyOf" if partial else "oneOf"  # a mapping without its tag may match several kinds
    return {of: choices, "discriminator": {"propertyName": slot.tag, "mapping": mapping}}
