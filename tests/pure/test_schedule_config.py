"""Domains: what is outside is refused with the nearest legal values; schedules are a slot."""

from typing import Annotated, Literal

import pytest
from hypothesis import given, settings

from moefold.config.base import Record
from moefold.config.errors import RunError
from moefold.schedule.config import SCHEDULE, Interleaved, Merged, OneFOneB, Schedule, build_table
from tests.schedules import KINDS, Sizes, any_sizes, mended, schedule


class Holder(Record):
    """A record that offers the choice."""

    schedule: Annotated[Record, SCHEDULE] = OneFOneB()


@given(any_sizes())
@settings(max_examples=120, deadline=None, database=None, derandomize=True)
def test_the_nearest_values_are_inside_the_domain(sizes: Sizes) -> None:
    assert list(mended(*sizes)[0].violations(*mended(*sizes)[1:])) == []


@given(any_sizes(ranks=5))
@settings(max_examples=60, deadline=None, database=None, derandomize=True)
def test_a_table_is_made_inside_the_domain_and_only_there(sizes: Sizes) -> None:
    wrong = list(sizes[0].violations(*sizes[1:]))
    if not wrong:
        assert build_table(*sizes).ranks == sizes[1]
        return
    with pytest.raises(RunError) as error:
        build_table(*sizes)
    assert list(error.value.violations) == wrong


OUTSIDE = [
    ("1f1b", None, (4, 2, 8), {"vpp": 1}),
    ("zb_v", None, (4, 2, 7), {"micro_batches": 8}),
    ("zb_v", None, (4, 1, 8), {"vpp": 2}),
    ("dualpipe_v", None, (4, 3, 2), {"vpp": 2, "micro_batches": 8}),
    ("interleaved", None, (4, 2, 9), {"micro_batches": 8}),
    ("interleaved", None, (4, 2, 10), {"micro_batches": 12}),
    ("interleaved", None, (4, 2, 1), {"micro_batches": 4}),
    ("interleaved", 6, (4, 2, 9), {"micro_batches": 10}),
    ("interleaved", 3, (4, 2, 9), {"group": 4, "micro_batches": 8}),
    ("zb_h1", None, (4, 2, 9), {"micro_batches": 8}),
    ("merged", None, (4, 2, 9), {"micro_batches": 8}),
    ("gpipe", None, (4, 2, 0), {"micro_batches": 1}),
]


@pytest.mark.parametrize(("kind", "group", "sizes", "nearest"), OUTSIDE)
def test_outside_the_nearest_is_named(
    kind: str, group: int | None, sizes: tuple[int, int, int], nearest: dict[str, int]
) -> None:
    with pytest.raises(RunError) as error:
        build_table(schedule(kind, group), *sizes)
    assert {wrong.path[0]: wrong.nearest for wrong in error.value.violations} == nearest
    assert f"schedule {kind} with pp{sizes[0]} vpp{sizes[1]}" in str(error.value)


INSIDE = [
    ("gpipe", None, (5, 3, 1)),
    ("1f1b", None, (5, 1, 2)),
    ("interleaved", None, (5, 1, 7)),
    ("interleaved", 6, (4, 2, 10)),
    ("zb_h1", None, (5, 1, 3)),
    ("zb_v", None, (3, 2, 6)),
    ("dualpipe_v", None, (3, 2, 7)),
    ("merged", None, (1, 3, 5)),
]


@pytest.mark.parametrize(("kind", "group", "sizes"), INSIDE)
def test_the_edge_of_a_domain_is_inside(
    kind: str, group: int | None, sizes: tuple[int, int, int]
) -> None:
    assert list(schedule(kind, group).violations(*sizes)) == []


def test_a_run_file_chooses_by_kind() -> None:
    assert Holder.model_validate({"schedule": {"kind": "interleaved"}}).schedule == Interleaved()
    assert Holder.model_validate({"schedule": "1f1b"}).schedule == OneFOneB()
    chosen = Holder.model_validate({"schedule": {"kind": "merged", "group": 8}}).schedule
    assert chosen == Merged(group=8)


def test_all_kinds_are_known() -> None:
    known = ["1f1b", "dualpipe_v", "gpipe", "interleaved", "merged", "zb_h1", "zb_v"]
    assert known == KINDS


def test_a_schedule_may_come_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SCHEDULE, "_kinds", dict(SCHEDULE.kinds))

    @SCHEDULE.register
    class Sequential(Schedule):
        kind: Literal["sequential"] = "sequential"
        owner = "tests.schedules:one_by_one"

    record = Holder.model_validate({"schedule": "sequential"}).schedule
    assert isinstance(record, Sequential)
    assert " ".join(map(str, build_table(record, 2, 1, 2).lines[1])) == "F0 B0 F1 B1"
