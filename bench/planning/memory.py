"""Memory of a case, by the planner's memory model."""

from moefold.planner.case import Case
from moefold.planner.memory import totals


def memory_of(case: Case) -> tuple[float | None, bool | None]:
    """Return decimal GB of the fullest rank and whether they fit; nothing for unplanned kinds."""
    try:
        needed = max(totals(case))
    except ValueError:
        return None, None
    return round(needed / 1e9, 2), needed <= case.cluster.device.memory_bytes
