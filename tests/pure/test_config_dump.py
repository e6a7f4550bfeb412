"""Writing records down: resolved files, golden dumps, differences, identities, walking."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from moefold.config.base import iter_records, to_dict
from moefold.config.dump import dump_yaml, identity
from moefold.config.load import load
from tests.config_toys import Coach, Diesel, Limits, Record, Steam, Train, full, smallest
from tests.golden import diff, golden


class Bag(Record):
    """Holds what has no order of its own."""

    names: frozenset[str] = frozenset()
    things: dict[str, float] = {}


def train(**changes: Any) -> Train:
    return load(Train, {**full(), **changes}).record


def test_the_resolved_file_reads_back_as_the_same_record(tmp_path: Path) -> None:
    for data in (
        smallest(),
        full(),
        {**smallest(), "name": "no", "from": "1e-4", "notes": "a\nb: c"},
    ):
        record = load(Train, data).record
        file = tmp_path / "run.yaml"
        file.write_text(dump_yaml(record), "utf-8")
        assert load(Train, file).record == record


def test_the_resolved_file_is_in_the_order_of_the_class() -> None:
    lines = dump_yaml(Diesel(litres=1e-5, spare=Steam())).splitlines()
    assert lines == [
        "kind: diesel",
        "litres: 1.0e-05",
        "cylinders: 4",
        "spare:",
        "  kind: steam",
        "  pressure: 10.0",
    ]
    assert "seats: 12\n    rows: 4" in dump_yaml(train())


def test_golden_dump() -> None:
    wheels = [{"family": "iron", "spokes": 2 * i} for i in range(1, 13)]
    record = load(
        Train, {**full(), "coaches": [{"seats": 2}] * 12, "wheels": wheels, "crew": 6}
    ).record
    lines = golden(record).splitlines()
    assert 'name: "express"' in lines and "engine.litres: 4.0" in lines and "uses: []" in lines
    spokes = [line for line in lines if "spokes" in line]
    assert spokes == [f"wheels[{i}].spokes: {2 * (i + 1)}" for i in range(12)], "10 comes after 9"


def test_diff() -> None:
    one, other = train(), train(crew=1, engine={"kind": "steam"}, load={"mail": 1.0})
    assert diff(one, one) == []
    assert diff(one, other) == [
        "crew: 2 -> 1",
        "engine.cylinders: 8 -> (nothing)",
        'engine.kind: "diesel" -> "steam"',
        "engine.litres: 4.0 -> (nothing)",
        "engine.pressure: (nothing) -> 10.0",
        'engine.spare.kind: "steam" -> (nothing)',
        "engine.spare.pressure: 12.5 -> (nothing)",
        "load.coal: 1.5 -> (nothing)",
        "load.mail: 0.0 -> 1.0",
    ]


def test_identity_is_of_what_is_said() -> None:
    one = train()
    assert identity(one) == identity(load(Train, dict(reversed(full().items()))).record)
    assert len(identity(one)) == 64
    assert identity(one) != identity(train(crew=1))
    assert identity(one, only=["name"]) == identity(train(crew=1), only=["name"])
    assert identity(Limits(low=0)) == identity(Limits(low=0.0))
    assert identity(Limits()) != identity(Limits(low=-0.5))


def test_identity_takes_parts_by_content_alone() -> None:
    one = train()
    assert identity(one, {"/a/x.py": "11", "/a/y.py": "22"}) == identity(
        one, {"/b/y.py": "22", "/b/x.py": "11"}
    )
    assert identity(one, {"/a/x.py": "11"}) != identity(one) != identity(one, {"/a/x.py": "12"})


def test_dumps_do_not_depend_on_the_process() -> None:
    """Sets of text are ordered differently in each process that has another hash seed."""
    code = (
        "from tests.pure.test_config_dump import Bag\n"
        "from moefold.config.dump import identity\n"
        "from tests.golden import golden\n"
        "bag = Bag(names=['b', 'a', 'c', 'd'], things={'y': 1.0, 'x': 2.0})\n"
        "print(golden(bag), identity(bag))\n"
    )
    root = str(Path(__file__).parents[2])
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": root},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(said) == 1 and 'names[0]: "a"' in said.pop()


def test_every_record_is_visited_children_first() -> None:
    found = [(path, type(record).__name__) for path, record in iter_records(train())]
    assert found == [
        (("coaches", 0), "Coach"),
        (("coaches", 1), "Coach"),
        (("engine", "spare"), "Steam"),
        (("engine",), "Diesel"),
        (("wheels", 0), "Iron"),
        (("wheels", 1), "Rubber"),
        (("limits",), "Limits"),
        ((), "Train"),
    ]


def test_plain_data_holds_nothing_but_data() -> None:
    assert to_dict({"a": (Coach(seats=2), {3, 1}), 5: Path("x/y")}) == {
        "a": [{"seats": 2, "rows": 1, "label": "coach"}, [1, 3]],
        "5": "x/y",
    }
