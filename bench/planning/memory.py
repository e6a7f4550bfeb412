"""Memory of a case, by the planner's memory model."""

from moefold.planner.case import Case


def memory_of(case: Case) -> tuple[float | None, bool | None]:
    """Return decimal GB of the fullest rank, and whether it fits."""
    return None, None
