"""Records and slots: strictness, kinds registered later, instances, building, parts from files."""

import hashlib
import pickle
import sys
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import ValidationError

from moefold.config.base import Record
from moefold.config.plugins import import_plugins
from moefold.config.slot import Slot, build
from tests.config_toys import ENGINE, Colour, Diesel, Iron, Limits, Steam, Train, full, smallest


class Nested(Record):
    """Points at itself, and has every sort of container."""

    inner: "Nested | None" = None
    pairs: tuple[tuple[int, str], ...] = ()
    names: frozenset[str] = frozenset()
    colour: Colour = Colour.RED
    place: Path | None = None


def test_records_are_frozen_and_strict() -> None:
    record = Steam()
    with pytest.raises(ValidationError):
        record.pressure = 3.0  # type: ignore[misc]
    for value in ("10", True, float("nan"), float("inf"), None):
        with pytest.raises(ValidationError):
            Steam(pressure=value)  # type: ignore[arg-type]
    with pytest.raises(ValidationError):
        Steam(presure=3.0)  # type: ignore[call-arg]
    assert Steam(pressure=3).pressure == 3.0 and type(Steam(pressure=3).pressure) is float


def test_containers_are_taken_from_plain_data_and_stay_strict_inside() -> None:
    data = {"pairs": [[1, "a"]], "names": ["x"], "colour": "green", "place": "a/b"}
    record = Nested.model_validate({**data, "inner": data})
    assert record.pairs == ((1, "a"),) and record.names == {"x"}
    assert record.inner is not None and record.inner.pairs == ((1, "a"),)
    assert (record.colour, record.place) == (Colour.GREEN, Path("a/b"))
    assert record.inner.colour is Colour.GREEN
    with pytest.raises(ValidationError):
        Nested.model_validate({"pairs": [["1", "a"]]})
    with pytest.raises(ValidationError):
        Nested.model_validate({"inner": {"pairs": [[1.0, "a"]]}})


def test_aliases_work_in_both_directions() -> None:
    assert Train(**smallest(), from_="here").model_dump()["from"] == "here"


SHAPE = Slot("shape")


class Drawing(Record):
    """Made before any shape is known."""

    shape: Annotated[Record, SHAPE]
    more: tuple[Annotated[Record, SHAPE], ...] = ()
    named: dict[str, Annotated[Record, SHAPE]] = {}
    maybe: Annotated[Record, SHAPE] | None = None


@SHAPE.register
class Circle(Record):
    """Registered after the class that offers the choice."""

    kind: Literal["circle"] = "circle"
    radius: float = 1.0
    owner: ClassVar = "fractions:Fraction"


class Group(Record):
    """Holds shapes itself."""

    kind: Literal["group"] = "group"
    of: tuple[Annotated[Record, SHAPE], ...] = ()


SHAPE.register(Group)


def test_kinds_are_looked_up_when_a_value_is_validated() -> None:
    circle = {"kind": "circle", "radius": 2.0}
    drawing = Drawing.model_validate(
        {"shape": {"kind": "group", "of": [circle]}, "more": ["circle"], "named": {"a": circle}}
    )
    assert drawing.shape == Group(of=(Circle(radius=2.0),))
    assert drawing.more == (Circle(),)
    assert drawing.model_dump(mode="json") == {
        "shape": {"kind": "group", "of": [circle]},
        "more": [{"kind": "circle", "radius": 1.0}],
        "named": {"a": circle},
        "maybe": None,
    }
    assert Drawing.model_validate(drawing.model_dump()) == drawing
    assert pickle.loads(pickle.dumps(drawing)) == drawing
    assert Drawing(shape=Circle(radius=3.0)).shape == Circle(radius=3.0)


@pytest.mark.parametrize(
    "value",
    [3, None, [], {}, {"kind": "star"}, {"kind": 3}, {"kind": []}, "star", Steam(), Record()],
)
def test_what_is_no_registered_kind_is_refused(value: Any) -> None:
    with pytest.raises(ValidationError):
        Drawing(shape=value)


def test_a_kind_without_the_base_of_its_field_is_refused() -> None:
    """What reads it would ask it what only the base answers."""
    slot = Slot("tool")

    class Tool(Record):
        """What the room reads."""

    class Bench(Record):
        """A field of that."""

        tool: Annotated[Tool, slot]

    @slot.register
    class Stone(Record):
        """A kind from outside that is none."""

        kind: Literal["stone"] = "stone"

    for given in ("stone", Stone()):
        with pytest.raises(ValidationError, match=r"Stone must inherit from .*Tool"):
            Bench.model_validate({"tool": given})


def test_errors_inside_a_kind_carry_the_whole_path() -> None:
    with pytest.raises(ValidationError) as caught:
        Drawing.model_validate(
            {"shape": {"kind": "group", "of": [{"kind": "circle", "radius": "x"}]}}
        )
    assert [item["loc"] for item in caught.value.errors()] == [("shape", "of", 0, "radius")]


def test_registering_holds_names_apart() -> None:
    slot = Slot("part")

    class One(Record):
        kind: Literal["one"] = "one"

    class Other(Record):
        kind: Literal["one"] = "one"

    class Untold(Record):
        size: int = 1

    assert slot.register(One) is One and slot.register(One) is One
    with pytest.raises(ValueError, match="already taken"):
        slot.register(Other)
    with pytest.raises(TypeError, match="string default"):
        slot.register(Untold)


def test_building() -> None:
    class Owned(Record):
        owner: ClassVar = dict

        def __iter__(self) -> Any:
            yield "a", 1

    assert build(Owned(), b=2) == {"a": 1, "b": 2}
    with pytest.raises(TypeError, match="names no owner"):
        build(Limits())

    class Lazy(Record):
        owner: ClassVar = "builtins:isinstance"

    assert build(Lazy(), Record) is True


# ---------------------------------------------------------------- parts from files


@pytest.fixture
def part(tmp_path: Path) -> Any:
    kinds = dict(ENGINE.kinds)
    file = tmp_path / "part.py"
    file.write_text(
        "from typing import Literal\n"
        "from moefold.config.base import Record\n"
        "from tests.config_toys import ENGINE\n"
        "@ENGINE.register\n"
        "class Sail(Record):\n"
        "    kind: Literal['sail'] = 'sail'\n"
        "    area: float = 1.0\n",
        "utf-8",
    )
    yield file
    ENGINE.kinds.clear()
    ENGINE.kinds.update(kinds)


def test_a_file_is_brought_once_and_known_by_its_hash(part: Path) -> None:
    digest = hashlib.sha256(part.read_bytes()).hexdigest()
    assert import_plugins([part.parent / "part.py"]) == {str(part): digest}
    first = ENGINE.kinds["sail"]
    assert import_plugins([part]) == {str(part): digest}
    assert ENGINE.kinds["sail"] is first
    assert sys.modules[first.__module__].__file__ == str(part)
    record = Train.model_validate({**full(), "engine": {"kind": "sail", "area": 2.0}})
    assert pickle.loads(pickle.dumps(record)) == record


def test_an_edited_file_replaces_its_parts(part: Path) -> None:
    import_plugins([part])
    part.write_text(part.read_text("utf-8").replace("area", "size"), "utf-8")
    import_plugins([part])
    assert list(ENGINE.kinds["sail"].model_fields) == ["kind", "size"]


def test_two_files_may_not_take_one_name(part: Path) -> None:
    import_plugins([part])
    other = part.with_name("other.py")
    other.write_text(part.read_text("utf-8"), "utf-8")
    with pytest.raises(ValueError, match="already taken"):
        import_plugins([other])


def test_two_files_of_one_name_are_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "my-part.v2.py").write_text(f"NAME = {name!r}\n", "utf-8")
    found = import_plugins(tmp_path / name / "my-part.v2.py" for name in "ab")
    modules = [m for m in sys.modules.values() if getattr(m, "__file__", None) in found]
    assert sorted(m.NAME for m in modules) == ["a", "b"]


@pytest.mark.parametrize("text", ["import no_such_module", "def (", "1 / 0", "raise SystemError"])
def test_a_file_that_fails_leaves_nothing_behind(text: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(text, "utf-8")
    before = set(sys.modules)
    with pytest.raises(ValueError, match="failed while it was imported"):
        import_plugins([file])
    assert not [name for name in set(sys.modules) - before if "bad" in name]


def test_only_python_files_are_brought(tmp_path: Path) -> None:
    (tmp_path / "part.txt").write_text("", "utf-8")
    for name in ("part.txt", "."):
        with pytest.raises(ValueError, match="is not a Python file"):
            import_plugins([tmp_path / name])
    with pytest.raises(ValueError, match=r"absent\.py does not exist"):
        import_plugins([tmp_path / "absent.py"])


def test_toys_are_what_they_say() -> None:
    assert Train.model_validate(smallest()).engine == Diesel(litres=3.0, cylinders=6)
    assert Train.model_validate(smallest()).wheels == (Iron(),)
