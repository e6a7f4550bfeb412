"""JSON schemas: they accept what loads, refuse what does not, and know every kind."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from pydantic import Field

from moefold.cli.main import main
from moefold.config.base import Record, to_dict
from moefold.config.schema import json_schema
from moefold.config.slot import Slot
from moefold.run import RECIPES, Run, load_run, recipes
from tests.config_toys import Train, full, smallest

TREE = Slot("tree")


@TREE.register
class Node(Record):
    """Points at its own slot."""

    kind: Literal["node"] = "node"
    left: Annotated[Record, TREE] | None = None
    twin: "Node | None" = None
    """Itself without a slot between."""


@TREE.register
class Leaf(Record):
    """Needs a weight."""

    kind: Literal["leaf"] = "leaf"
    weight: int


class Branch(Node):
    """Has another default for an inherited field, and a key that is no name in Python."""

    twin: Node | None = Node()
    where: int = Field(default=1, alias="from")
    """Where it grows."""
    bare: int = 1


def checked(schema: dict[str, Any], data: Any) -> None:
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema).validate(data)


def test_what_loads_is_accepted() -> None:
    for data in (full(), smallest(), to_dict(Train.model_validate(full()))):
        checked(json_schema(Train), data)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("engine", {"kind": "sail"}),
        ("engine", {"kind": "steam", "litres": 3.0}),
        ("engine", {"pressure": "3.0"}),
        ("engine", "sail"),
        ("wheels", [{"family": "iron", "spokes": "8"}]),
        ("crew", 0),
        ("colour", "blue"),
        ("no_such_key", 1),
    ],
)
def test_what_does_not_load_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ValidationError):
        checked(json_schema(Train), {**full(), key: value})


def test_a_slot_is_a_choice_with_a_discriminator() -> None:
    schema = json_schema(Train)
    engine = schema["$defs"]["Train"]["properties"]["engine"]
    refs = {"steam": "#/$defs/Steam", "diesel": "#/$defs/Diesel"}
    assert engine["discriminator"] == {"propertyName": "kind", "mapping": refs}
    assert [choice.get("$ref") for choice in engine["anyOf"]] == [*refs.values(), None]
    assert engine["anyOf"][-1] == {"enum": ["steam", "diesel"]}, "or a kind by its name alone"
    assert schema["$defs"]["Iron"]["description"] == "A kind told apart by another tag."


def test_records_that_point_at_themselves() -> None:
    tree = {"left": {"kind": "node", "left": {"kind": "leaf", "weight": 1}}, "twin": {"left": None}}
    checked(json_schema(Node), tree)
    with pytest.raises(ValidationError):
        checked(json_schema(Node), {"left": {"kind": "leaf", "weight": "heavy"}})
    twin = json_schema(Node)["$defs"]["Node"]["properties"]["twin"]
    assert twin["description"] == "Itself without a slot between."


def test_fields_are_described_by_the_docstrings_below_them() -> None:
    found = json_schema(Branch)["$defs"]["Branch"]["properties"]
    assert found["twin"]["description"] == "Itself without a slot between.", "as inherited"
    assert found["from"]["description"] == "Where it grows."
    assert "description" not in found["bare"]
    shell: dict[str, Any] = {"Record": Record, "__name__": __name__}
    exec("class Typed(Record):\n    size: int = 1\n    'Not to be found.'", shell)
    assert "description" not in json_schema(shell["Typed"])["$defs"]["Typed"]["properties"]["size"]


def test_kinds_registered_later_are_in_the_schema_at_once() -> None:
    slot = Slot("late")

    class Choice(Record):
        """Offers it."""

        part: Annotated[Record, slot]

    class Late(Record):
        """Comes after."""

        kind: Literal["late"] = "late"

    with pytest.raises(ValidationError):
        checked(json_schema(Choice), {"part": {"kind": "late"}})
    slot.register(Late)
    checked(json_schema(Choice), {"part": {"kind": "late"}})


def test_a_partial_file_needs_nothing_and_may_have_a_base() -> None:
    schema = json_schema(Train)
    checked(schema, {"base": "demo", "engine": {"litres": 3.0}, "wheels": ["iron"]})
    checked(schema, {"base": ["a.yaml", "b.yaml"]})
    for wrong in ({"base": 3}, {"engine": {"no_such_key": 1}}, {"crew": "x"}, {"bse": "demo"}):
        with pytest.raises(ValidationError):
            checked(schema, wrong)


PLUG_IN = """
from typing import Literal
from moefold.data.config import SOURCE, SourceRecord

@SOURCE.register
class Brought(SourceRecord):
    "Of the test."
    source: Literal["brought_by_a_plug_in"] = "brought_by_a_plug_in"
"""


def test_the_command_line_prints_the_schema_of_run_files(capsys: Any, tmp_path: Path) -> None:
    """With a run, the kinds that its plug-in brings are in it too."""
    assert main(["explain", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    for name in recipes():
        validator.validate(yaml.safe_load((RECIPES / f"{name}.yaml").read_text()))
    assert not validator.is_valid({"train": {"steps": 0}})
    (tmp_path / "plug_in.py").write_text(PLUG_IN)
    assert "brought_by_a_plug_in" not in json.dumps(schema)
    uses = f"uses={json.dumps([str(tmp_path / 'plug_in.py')])}"
    assert main(["explain", "tiny", uses, "--schema"]) == 0
    assert "brought_by_a_plug_in" in capsys.readouterr().out


def test_the_schema_of_a_run_accepts_every_recipe() -> None:
    schema = json_schema(Run)
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    for name in recipes():
        validator.validate(to_dict(load_run(name)))
