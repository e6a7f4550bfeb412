"""JSON schemas of records, with which editors complete and check run files.

``moefold explain --schema`` prints the schema of run files.
"""

import ast
import inspect
from contextlib import suppress
from functools import cache
from itertools import pairwise
from textwrap import dedent
from typing import Any, cast

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

        def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
            """Describe each field by its docstring."""
            made = super().model_schema(schema)
            record = schema["cls"]
            for name, text in _field_docstrings(record).items():
                if name in record.model_fields:
                    key = record.model_fields[name].alias or name
                    made["properties"][key].setdefault("description", text)
            return made

        def field_is_required(self, field: Any, total: bool) -> bool:
            return False

    refs, definitions = models_json_schema([(cls, "validation")], schema_generator=Generator)
    ref = refs[cls, "validation"]
    definitions_by_name = definitions["$defs"]
    own = definitions_by_name[ref["$ref"].rsplit("/", 1)[1]]
    own["properties"] = {"base": _BASE, **own["properties"]}
    return {"$schema": DRAFT, **ref, "$defs": definitions_by_name}


@cache
def _field_docstrings(record: type[Record]) -> dict[str, str]:
    """Return the docstrings below a record's fields, inherited ones too, by field.

    pydantic can collect them as it creates a class, but that is a third of the time in which the
    command line starts. A class that has no source, as in a shell, has none.
    """
    inherited = (base for base in reversed(record.__bases__) if issubclass(base, Record))
    docstrings = {
        name: text for base in inherited for name, text in _field_docstrings(base).items()
    }
    with suppress(OSError, TypeError, SyntaxError):
        (definition,) = ast.parse(dedent(inspect.getsource(record))).body
        for field, below in pairwise(cast(ast.ClassDef, definition).body):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    docstrings[name] = inspect.cleandoc(text)
    return docstrings
