"""Loading: bases, overrides, parts from outside, and where each value came from."""

from pathlib import Path
from typing import Any

import pytest

from moefold.config.errors import REMOVE, Rename, RunError, Violation
from moefold.config.load import LoadedRecord, load, parse_override
from moefold.run import load_run
from tests.config_toys import ENGINE, Coach, Diesel, Iron, Rubber, Steam, Train, full, smallest
from tests.mutations import repair

PART = """
from typing import Annotated, ClassVar, Literal
from pydantic import Field
from moefold.config.base import Record
from tests.config_toys import ENGINE

class Maker:
    def __init__(self, record, extra):
        self.power = record.power + extra

@ENGINE.register
class Outside(Record):
    "A part from outside."
    kind: Literal["{kind}"] = "{kind}"
    power: Annotated[int, Field(ge=1)] = 5
    owner: ClassVar = Maker
"""


@pytest.fixture(autouse=True)
def _engines_as_they_were() -> Any:
    kinds = dict(ENGINE.kinds)
    yield
    ENGINE.kinds.clear()
    ENGINE.kinds.update(kinds)


def write(folder: Path, **files: str) -> dict[str, Path]:
    paths = {}
    for name, text in files.items():
        paths[name] = folder / f"{name}.yaml"
        paths[name].write_text(text, "utf-8")
    return paths


def violations(source: Any, *overrides: str, **more: Any) -> tuple[Violation, ...]:
    with pytest.raises(RunError) as caught:
        load(Train, source, overrides, **more)
    return caught.value.violations


def origin(loaded: LoadedRecord[Any], *path: str | int) -> str:
    return str(loaded.origins[path])


# ---------------------------------------------------------------- bases


def test_a_run_builds_on_another(tmp_path: Path) -> None:
    (tmp_path / "deeper").mkdir()
    write(tmp_path / "deeper", first="name: first\ncoaches: [{seats: 8}]\nlimits: {low: -2.0}\n")
    write(tmp_path, second="base: deeper/first.yaml\nlimits:\n  high: 3.0\n")
    third = write(tmp_path, third="base: ./second.yaml\nname: third\ncoaches: [{seats: 6}]\n")
    loaded = load(Train, third["third"])
    assert (loaded.record.name, loaded.record.limits.low, loaded.record.limits.high) == (
        "third",
        -2.0,
        3.0,
    )
    assert loaded.record.coaches == (Coach(seats=6),), "lists replace"
    assert origin(loaded, "name") == f"file {tmp_path}/third.yaml:2"
    assert origin(loaded, "limits", "high") == f"base {tmp_path}/second.yaml:3"
    assert origin(loaded, "limits", "low") == f"base {tmp_path}/deeper/first.yaml:3"
    assert origin(loaded, "limits", "count") == "default"


def test_several_bases_and_recipes_by_name(tmp_path: Path) -> None:
    paths = write(
        tmp_path,
        one="name: one\ncoaches: [{seats: 8}]\ncrew: 3\n",
        two="name: two\n",
        run="base: [plain, two.yaml]\nbell: true\n",
    )
    loaded = load(Train, paths["run"], recipes={"plain": paths["one"]})
    assert (loaded.record.name, loaded.record.crew, loaded.record.bell) == ("two", 3, True)
    assert load(Train, "plain", recipes={"plain": paths["one"]}).record.name == "one"


def test_choosing_another_kind_leaves_the_old_knobs_behind(tmp_path: Path) -> None:
    paths = write(
        tmp_path,
        a="name: a\ncoaches: [{seats: 8}]\nengine: {kind: diesel, litres: 9.0, cylinders: 2}\n",
        b="base: a.yaml\nengine: {kind: steam, pressure: 3.0}\n",
        c="base: a.yaml\nengine: steam\n",
        d="base: a.yaml\nengine: {kind: diesel, cylinders: 4}\n",
        e="base: a.yaml\nengine: {cylinders: 6}\n",
    )
    assert load(Train, paths["b"]).record.engine == Steam(pressure=3.0)
    loaded = load(Train, paths["c"])
    assert loaded.record.engine == Steam()
    assert origin(loaded, "engine", "kind") == f"file {paths['c']}:2"
    assert origin(loaded, "engine", "pressure") == "default"
    assert load(Train, paths["d"]).record.engine == Diesel(litres=9.0, cylinders=4)
    assert load(Train, paths["e"]).record.engine == Diesel(litres=9.0, cylinders=6)


def test_where_a_value_came_from_goes_with_the_part_that_held_it(tmp_path: Path) -> None:
    spare = "engine: {{kind: diesel, litres: 9.0, spare: {}}}\n"
    paths = write(
        tmp_path,
        a="name: a\ncoaches: [{seats: 8}]\n" + spare.format("{kind: steam, pressure: 3.0}"),
        b="base: a.yaml\n" + spare.format("{kind: diesel, litres: 7.0}"),
        c="base: b.yaml\n" + spare.format("steam"),
    )
    loaded = load(Train, paths["c"])
    assert origin(loaded, "engine", "spare", "kind") == f"file {paths['c']}:2"
    assert origin(loaded, "engine", "spare", "pressure") == "default"


def test_a_misspelt_kind_keeps_the_knobs_that_it_means(tmp_path: Path) -> None:
    paths = write(
        tmp_path,
        a="name: a\ncoaches: [{seats: 8}]\nengine: {kind: diesel, litres: 9.0}\n",
        b="base: a.yaml\nengine: {kind: deisel}\n",
    )
    (item,) = violations(paths["b"])
    assert (item.path, item.nearest) == (("engine", "kind"), "diesel")


def test_bases_in_a_circle_are_refused(tmp_path: Path) -> None:
    paths = write(tmp_path, a="base: b.yaml\nname: a\n", b="base: a.yaml\ncoaches: [{seats: 2}]\n")
    (item,) = violations(paths["a"])
    assert item.id == "base"
    assert all(name in item.rule for name in ("a.yaml -> ", "b.yaml -> "))


@pytest.mark.parametrize("base", ["5", "nowhere.yaml", "[plain, 3]", "{a: 1}", "~"])
def test_a_base_that_is_none_is_refused_beside_all_else(base: str, tmp_path: Path) -> None:
    paths = write(tmp_path, run=f"base: {base}\nname: x\ncoaches: [{{seats: 0}}]\n")
    found = violations(paths["run"], recipes={"plain": paths["run"]})
    assert [item.id for item in found][-1] == "out-of-range"
    assert found[0].id == "base" and found[0].where.endswith("run.yaml:1")


def test_a_base_is_suggested_by_name(tmp_path: Path) -> None:
    paths = write(tmp_path, run="base: plian\n")
    (item,) = violations(paths["run"], recipes={"plain": paths["run"]})
    assert item.nearest == "plain", "and what it would bring is not told to be missing"


def test_a_source_that_is_none_is_refused() -> None:
    (item,) = violations("plian", recipes={"plain": Path("x")})
    assert (item.id, item.nearest) == ("no-file", "plain")


@pytest.mark.parametrize("text", ["", "- a", "text", "~"])
def test_a_file_must_hold_a_mapping(text: str, tmp_path: Path) -> None:
    (item,) = violations(write(tmp_path, run=text)["run"])
    assert item.id == "syntax"


def test_a_key_given_twice_is_told_beside_all_else(tmp_path: Path) -> None:
    run = write(tmp_path, run="name: a\nname: b\ncoaches: [{seats: x}]\n")["run"]
    found = violations(run)
    assert [item.id for item in found] == ["duplicate-key", "wrong-type"]
    assert [item.where for item in found] == [f"{run}:2", f"{run}:3"]


# ---------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("text", "path", "operator", "value"),
    [
        ("a=1", ("a",), "=", 1),
        ("a.b.2.c=1e-3", ("a", "b", 2, "c"), "=", 1e-3),
        ("a[0].b=no", ("a", 0, "b"), "=", "no"),
        ("a[0][1]=x=y", ("a", 0, 1), "=", "x=y"),
        ("a+={kind: z}", ("a",), "+=", {"kind": "z"}),
        ("a=", ("a",), "=", None),
        (" a = two words ", ("a",), "=", "two words"),
    ],
)
def test_overrides_are_read(text: str, path: Any, operator: str, value: Any) -> None:
    assert parse_override(text) == (path, operator, value)


def test_overrides_reach_everywhere() -> None:
    overrides = [
        "name=other",
        "coaches[0].seats=20",
        "coaches.1.label=sleeper",
        "coaches+={seats: 4}",
        "engine.spare.pressure=3",
        "wheels[1]=iron",
        "load.mail=2",
        "speed=auto",
        "from=south",
    ]
    loaded = load(Train, full(), overrides)
    record = loaded.record
    assert (record.name, record.coaches[0].seats, record.coaches[1].label) == (
        "other",
        20,
        "sleeper",
    )
    assert record.coaches[2] == Coach(seats=4)
    assert isinstance(record.engine, Diesel) and record.engine.spare == Steam(pressure=3.0)
    assert record.wheels[1] == Iron()
    assert (record.load["mail"], record.speed, record.from_) == (2.0, "auto", "south")
    assert origin(loaded, "coaches", 0, "seats") == "override coaches[0].seats=20"
    assert origin(loaded, "coaches", 0, "rows") == "given data"


def test_an_override_into_a_default_keeps_the_rest_of_it() -> None:
    loaded = load(Train, smallest(), ["engine.litres=5", "limits.low=-1"])
    assert loaded.record.engine == Diesel(litres=5.0, cylinders=6)
    assert loaded.record.limits.low == -1.0
    assert origin(loaded, "engine", "cylinders") == "default"
    assert origin(loaded, "engine", "litres") == "override engine.litres=5"


def test_an_override_of_the_kind_starts_that_part_anew() -> None:
    assert load(Train, full(), ["engine.kind=steam"]).record.engine == Steam()
    assert load(Train, full(), ["engine=steam", "engine.pressure=7"]).record.engine == Steam(
        pressure=7
    )
    assert (
        load(Train, full(), ["engine.kind=diesel"]).record.engine
        == load(Train, full()).record.engine
    )


def test_lists_in_defaults_can_be_added_to() -> None:
    data = {**smallest(), "coaches": [{"seats": 8}, {"seats": 8}]}
    loaded = load(Train, data, ["wheels+=rubber", "wheels[1].bar=2"])
    assert loaded.record.wheels == (Iron(), Rubber(bar=2.0))
    assert origin(loaded, "wheels", 0, "spokes") == "default"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("name", "write path=value"),
        ("=3", "write path=value"),
        ("name.x=3", "single value"),
        ("coaches.first.seats=3", "index of an item"),
        ("coaches[7].seats=3", "the next index is 2"),
        ("limits[0]=3", "not a list"),
        ("name+=x", "not a list"),
        ("crew=[1", "not valid YAML"),
        ("crew=!!python/name:os.system", "plain data"),
        ("crwe=2", "unknown key"),
        ("crew=.nan", "whole number"),
    ],
)
def test_overrides_that_cannot_be(override: str, said: str) -> None:
    found = violations(full(), override, "coaches[0].seats=0")
    assert said in found[0].rule + found[-1].rule
    assert any(item.where == override for item in found) or "unknown" in said
    assert any(item.path == ("coaches", 0, "seats") for item in found), "all else is told too"


# ---------------------------------------------------------------- parts from outside


def test_parts_from_outside_are_chosen_like_ours(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    part = tmp_path / "parts" / "my-engine.py"
    part.write_text(PART.format(kind="outside"), "utf-8")
    text = "uses: [parts/my-engine.py]\nname: x\ncoaches: [{seats: 2}]\n"
    run = write(tmp_path, run=text + "engine: {kind: outside, power: 7}\n")["run"]
    loaded = load(Train, run)
    assert loaded.record.engine.model_dump() == {"kind": "outside", "power": 7}
    assert loaded.record.uses == (str(part),)
    above = write(tmp_path / "parts", run="base: ../run.yaml\nengine: {power: 0}\n")["run"]
    (item,) = violations(above)
    assert (item.path, item.nearest) == (("engine", "power"), 1)


def test_what_all_layers_use_is_kept(tmp_path: Path) -> None:
    for kind in ("one", "two", "three"):
        (tmp_path / f"{kind}.py").write_text(PART.format(kind=kind), "utf-8")
    paths = write(
        tmp_path,
        a="uses: [one.py]\nname: a\ncoaches: [{seats: 2}]\n",
        b="base: a.yaml\nuses: [two.py, one.py]\nengine: {kind: diesel, litres: 2, spare: two}\n",
    )
    loaded = load(Train, paths["b"], [f"uses+={tmp_path}/three.py", "engine.spare=three"])
    assert [Path(path).stem for path in loaded.record.uses] == ["one", "two", "three"]
    assert origin(loaded, "uses", 0).endswith("a.yaml:1")


def test_parts_that_cannot_be_brought_are_told_beside_all_else(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_module\n", "utf-8")
    (tmp_path / "fine.py").write_text("", "utf-8")
    (tmp_path / "text.txt").write_text("", "utf-8")
    names = "[absent.py, fine.py, broken.py, text.txt]"
    run = write(tmp_path, run=f"uses: {names}\nname: x\ncoaches: [{{seats: 0}}]\n")["run"]
    with pytest.raises(RunError) as caught:
        load(Train, run)
    found = caught.value.violations
    assert [item.path for item in found if item.id == "uses"] == [("uses", i) for i in (3, 2, 0)]
    assert any("no_such_module" in item.rule for item in found)
    mended = load(Train, repair(Train, caught.value.data, found))
    assert [Path(path).name for path in mended.record.uses] == ["fine.py"]


def test_an_instance_in_raw_data_is_written_out() -> None:
    loaded = load(
        Train, {**smallest(), "engine": Steam(pressure=4.0), "coaches": (Coach(seats=3),)}
    )
    assert loaded.record.engine == Steam(pressure=4.0)


STEAM = {"kind": "steam", "pressure": 1.5}


def test_a_misspelt_override_is_the_key_that_a_file_gives() -> None:
    """It replaces that one's value alone, at any depth; beside one of the right name it is left
    out."""
    for text, name, fixed in (
        ("nmae=slow", "name", "slow"),
        ("crewe=3", "crew", 3),
        ("limitz.low=0.5", "limits", {"low": 0.5, "high": 2.0, "count": 5}),
        ("enginee.spare.pressure=1.5", "engine", full()["engine"] | {"spare": STEAM}),
        ("enginee.kind=steam", "engine", {"kind": "steam"}),
    ):
        (item,) = violations(full(), text)
        assert item.nearest == Rename(name)
        with pytest.raises(RunError) as caught:
            load(Train, full(), [text])
        assert repair(Train, caught.value.data, [item])[name] == fixed
    (item,) = violations(full(), "crew=3", "crewe=2")
    assert item.nearest == REMOVE and "did you mean crew? It is already set" in item.rule
    (item,) = violations(full() | {"crewe": 3})
    assert item.nearest == REMOVE


def test_a_key_as_it_is_spelt_elsewhere_is_no_other_one_here() -> None:
    """``steps`` at the top is no misspelt ``uses``."""
    with pytest.raises(RunError) as caught:
        load_run("tiny", ["steps=5"])
    (item,) = caught.value.violations
    assert item.nearest == REMOVE and "(steps belongs at train.steps)" in item.rule


@pytest.mark.parametrize("said", ["false", "off", "None"])
def test_what_is_switched_off_is_null(said: str) -> None:
    """The nearest of a field that may be null, whatever its default is."""
    with pytest.raises(RunError) as caught:
        load_run("tiny", [f"watch.evaluate={said}"])
    (item,) = caught.value.violations
    assert item.nearest is None


def test_what_is_computed_from_a_run_is_computed_anew_for_a_copy() -> None:
    run = load_run("tiny")
    assert run.decoder is run.decoder, "derived once"
    assert run.needs.heads
    before = run.decoder.quantise
    other = run.model_copy(update={"train": load_run("tiny", ["train.quantise=mxfp8"]).train})
    assert other.decoder.quantise is not None and run.decoder.quantise is before is None
    longer = run.model_copy(update={"data": run.data.model_copy(update={"seq": 2 * run.data.seq})})
    assert longer.needs != run.needs
