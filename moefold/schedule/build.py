"""From a record to its table, inside the schedule's domain only."""

from moefold.config.problems import RunError, Violation
from moefold.config.slot import build
from moefold.schedule.config import Schedule
from moefold.schedule.table import Table


def tabulate(schedule: Schedule, p: int, v: int, m: int) -> Table:
    """Return the table of ``schedule`` for p ranks, v chunks per rank and m micro-batches.

    Raises:
        RunError: outside its domain, with the nearest legal values.
    """
    named = (("pp", p), ("vpp", v), ("micro_batches", m))
    wrong = [Violation((name,), size, "is at least 1", 1) for name, size in named if size < 1]
    wrong = wrong or list(schedule.misfits(p, v, m))
    if wrong:
        kind = type(schedule).model_fields["kind"].default
        raise RunError(wrong, source=f"schedule {kind} with pp{p} vpp{v}, {m} micro-batches")
    return build(schedule, p, v, m)
