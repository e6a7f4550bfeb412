"""A table as text: one line per rank, time to the right."""

from moefold.schedule.simulate import Span, StageCosts, simulate
from moefold.schedule.table import Pair, Table


def draw(table: Table, costs: StageCosts | None = None) -> str:
    """Return a drawing in which every step is as wide as it is long.

    ``F2`` is the forward of micro-batch 2, ``F2'1`` on the rank's chunk 1; ``F3+B2`` run side by
    side; dots are idle time. ``costs`` are those of ``simulate``; all times are whole numbers.
    """
    timeline = simulate(table, costs)
    spans = [span for line in timeline.spans for span in line]
    if any(not time.is_integer() for span in spans for time in (span.start, span.end)):
        raise ValueError("a drawing needs costs in whole numbers; simulate takes any")
    cell = max(-(-(len(str(span.step)) + 1) // _units(span)) for span in spans if _units(span))
    end = int(timeline.makespan)
    width = len(str(table.ranks - 1))
    return "\n".join(
        f"rank {rank:>{width}}  {_line(line, cell, end)}"
        for rank, line in enumerate(timeline.spans)
    )


def _units(span: Span) -> int:
    return int(span.end - span.start)


def _line(spans: tuple[Span, ...], cell: int, end: int) -> str:
    idle = ".".ljust(cell)
    text, at = "", 0
    for span in spans:
        text += idle * (int(span.start) - at)
        if wide := _units(span) * cell:
            fill = "=" if isinstance(span.step, Pair) else "-"
            text += str(span.step).ljust(wide - 1, fill) + " "
        at = int(span.end)
    return (text + idle * (end - at)).rstrip()
