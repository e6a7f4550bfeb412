"""Pipeline schedules for tests: every kind, and sizes inside its domain."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from moefold.schedule.config import (
    SCHEDULE,
    DualPipeV,
    GPipe,
    GroupedSchedule,
    Interleaved,
    Schedule,
    ZeroBubbleH1,
    ZeroBubbleV,
)
from moefold.schedule.table import Action, Table

FILE = Path(__file__).parent / "data" / "pipeline_schedules.json"
KINDS = sorted(SCHEDULE.kinds)
THEIRS: dict[str, Schedule] = {
    "ScheduleLoopedBFS": GPipe(),
    "ScheduleInterleaved1F1B": Interleaved(),
    "ScheduleInterleavedZeroBubble": ZeroBubbleH1(),
    "ScheduleZBVZeroBubble": ZeroBubbleV(),
    "ScheduleDualPipeV": DualPipeV(),
}
"""The schedules of torch.distributed.pipelining that the stored rows were timed on, and ours."""

Sizes = tuple[Schedule, int, int, int]


@cache
def stored() -> list[dict[str, Any]]:
    """Return the stored rows."""
    return json.loads(FILE.read_text())["cases"]


def schedule(kind: str, group: int | None = None) -> Schedule:
    """Return the record of a kind, with a group where it has one."""
    record = SCHEDULE.kinds[kind]
    made = record(group=group) if group and issubclass(record, GroupedSchedule) else record()
    assert isinstance(made, Schedule)
    return made


@st.composite
def any_sizes(draw: st.DrawFn, ranks: int = 16) -> Sizes:
    """Draw a schedule and sizes, inside its domain or not."""
    record = schedule(draw(st.sampled_from(KINDS)), draw(st.none() | st.integers(1, 20)))
    p, v = draw(st.integers(1, ranks)), draw(st.integers(1, 4))
    return record, p, v, draw(st.integers(1, 3 * p))


@st.composite
def legal_sizes(draw: st.DrawFn, ranks: int = 16) -> Sizes:
    """Draw a schedule and sizes inside its domain."""
    return mended(*draw(any_sizes(ranks)))


def mended(record: Schedule, p: int, v: int, m: int) -> Sizes:
    """Return the sizes with the nearest legal values put in."""
    nearest = {wrong.path[0]: wrong.nearest for wrong in record.violations(p, v, m)}
    if "group" in nearest:
        record = record.model_copy(update={"group": nearest.pop("group")})
    return record, p, nearest.pop("vpp", v), nearest.pop("micro_batches", m)


def one_by_one(record: Schedule, p: int, v: int, m: int) -> Table:
    """A schedule from outside the package: each micro-batch there and back before the next."""
    line = tuple(Action(kind, 0, micro) for micro in range(m) for kind in ("F", "B"))
    return Table((line,) * p, chunks=v, micro_batches=m)
