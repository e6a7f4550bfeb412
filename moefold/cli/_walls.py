"""How a measured step's walls are shown beside its plan."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from moefold.cli._common import plain_table
from moefold.planner.walls import WALLS

MAX_RANKS_SHOWN = 16


def print_walls(console: Console, facts: Mapping[str, Any]) -> None:
    """Print what ``beside_plan`` returns: the wall, all parts, the ranks, and the change."""
    wall = facts["wall"]
    seconds = facts["seconds"]
    planned = facts["planned"]
    share = facts["parts"][wall] / seconds
    line = f"wall: {WALLS[wall]}, {share:.0%} of a step of {seconds:.4g} s"
    console.print(Text(line, style="bold"), soft_wrap=True)
    if facts["evidence"]:
        console.print(Text(facts["evidence"]), soft_wrap=True)
    right = ("measured", "share", "planned")
    console.print(plain_table("part", *right, right=right, rows=_rows(facts, planned)))
    if len(facts["ranks"]) > 1:
        shown = list(enumerate(facts["parts_by_rank"]))[:MAX_RANKS_SHOWN]
        names = [name for name in WALLS if any(parts[name] for _, parts in shown)]
        rows = [(str(rank), *(f"{parts[name]:.4g}" for name in names)) for rank, parts in shown]
        console.print(plain_table("rank", *names, right=names, rows=rows))
    change = facts["change"]
    if planned is None:
        text = "no plan: this machine's rates are unknown (`moefold bench` measures a CPU)"
        console.print(Text(text, style="dim"), soft_wrap=True)
    else:
        text = "the planner knows no single change of the layout that is faster"
        if change is not None:
            text = (
                f"the planner's best change: {change['change']} ({change['saved_share']:.0%} of "
                "the planned step)"
            )
        console.print(Text(text), soft_wrap=True)


def _rows(
    facts: Mapping[str, Any], planned: Mapping[str, Any] | None
) -> Iterator[tuple[str, str, str, str]]:
    total = facts["seconds"]

    def row(title: str, seconds: float, expected: float | None) -> tuple[str, str, str, str]:
        plan = "" if expected is None else f"{expected:.4g} s"
        return title, f"{seconds:.4g} s", f"{seconds / total:.1%}", plan

    for name, title in WALLS.items():
        expected = None if planned is None else planned["parts"][name]
        if facts["parts"][name] or expected:
            yield row(title, facts["parts"][name], expected)
    whole = None if planned is None else planned["seconds"]
    hidden = None if planned is None else planned["hidden_exchange"]
    yield row("step", sum(facts["parts"].values()), whole)
    if facts["hidden_exchange"] or hidden:
        yield row("besides: exchange, hidden", facts["hidden_exchange"], hidden)
