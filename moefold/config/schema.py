"""JSON schemas of records, with which editors complete and check run files.

``moefold explain --schema`` prints the schema of run files.
"""

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

from moefold.config.base import Record
from moefold.config.slot import Slot

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_BASE = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    "description": "File or recipe to build on, relative to this file; or a list of them.",
}


def json_schema(cls: type[Record]) -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a file that holds a record and may have a ``base``.

    A slot is a choice of all kinds registered so far, distinguished by their tag, or the name of a
    kind alone. No key is required, as a base may set it.
    """
    schemas: dict[type[Record], JsonSchemaValue] = {}

    class Generator(GenerateJsonSchema):
        def function_plain_schema(
            self, schema: core_schema.PlainValidatorFunctionSchema
        ) -> JsonSchemaValue:
            slot = schema.get("metadata", {}).get("slot")
            if not isinstance(slot, Slot):
                return super().function_plain_schema(schema)
            mapping = {kind: self.reference(record) for kind, record in slot.kinds.items()}
            if not mapping:
                return {"not": {}}
            choices: list[JsonSchemaValue] = [{"$ref": ref} for ref in mapping.values()]
            # A mapping without a tag may match several kinds.
            return {
                "anyOf": [*choices, {"enum": list(mapping)}],
                "discriminator": {"propertyName": slot.tag, "mapping": mapping},
            }

        def reference(self, record: type[Record]) -> str:
            """Return the reference to a record; records may be recursive."""
            if record not in schemas:
                core: Any = record.__pydantic_core_schema__
                name = core["ref"] if "ref" in core else core["schema"]["schema_ref"]
                schemas[record] = self.get_cache_defs_ref_schema(name)[1]
                self.generate_inner(core)
            return schemas[record]["$ref"]

        def field_is_required(self, field: Any, total: bool) -> bool:
            return False

    refs, definitions = models_json_schema([(cls, "validation")], schema_generator=Generator)
    ref, definitions_by_name = refs[cls, "validation"], definitions["$defs"]
    own = definitions_by_name[ref["$ref"].rsplit("/", 1)[1]]
    own["properties"] = {"base": _BASE, **own["properties"]}
    return {"$schema": DRAFT, **ref, "$defs": definitions_by_name}
