"""What ``moefold verify`` does."""

import argparse
import json
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moefold.proof.case import Case
from moefold.proof.controls import Control
from moefold.proof.lowered import lowered
from moefold.proof.matrix import RULES, matrix
from moefold.proof.verify import (
    Proof,
    Verdict,
    cases_of,
    controls_of,
    prove,
    within_spread,
)
from moefold.run import Run

FAILED = 1
SAID = 160
"""Letters of a problem that are shown on one line."""


def verify(run: Run | None, args: argparse.Namespace) -> int:
    """Carry out the command for a run, or for the matrix; return its exit status."""
    cases = _cases(run, args)
    console = Console(soft_wrap=True)
    progress = Progress(console, len(cases), quiet=args.json)
    if args.precision is not None:
        proof = lowered(cases, args.precision, progress.show)
    elif args.as_run:
        proof = within_spread(cases, progress.show)
    else:
        proof = prove(cases, progress.show)
    controls = controls_of(cases, proof, progress.show_control) if args.controls else []
    if args.json:
        print(json.dumps(facts(proof, controls), indent=2))
    else:
        _close(console, proof, controls)
    noticed = all(control.noticed for control in controls)
    return 0 if proof.passed and noticed else FAILED


def _cases(run: Run | None, args: argparse.Namespace) -> list[Case]:
    """Return what is asked to be run."""
    if run is not None:
        return cases_of(run, args.layout, args.world, args.as_run)
    chosen = args.matrix or list(RULES)
    cases = [case for name, found in matrix().items() if name in chosen for case in found]
    return [case for case in cases if args.world in (None, case.world)]


class Progress:
    """Prints each verdict as it comes."""

    def __init__(self, console: Console, total: int, quiet: bool) -> None:
        self._console, self._total, self._quiet, self._done = console, total, quiet, 0

    def show(self, verdict: Verdict) -> None:
        """Print one line: passed or not, how near to its bound, and of what."""
        self._done += 1
        if self._quiet:
            return
        line = Text.assemble(
            f"{self._done:>{len(str(self._total))}}/{self._total} ",
            ("passed " if verdict.passed else "FAILED ", "green" if verdict.passed else "bold red"),
            (verdict.layout, "bold"),
        )
        if verdict.worst is not None:
            line.append(f"  {verdict.worst.quantity} {verdict.worst.max_relative_error:.1e}")
        self._console.print(line.append(f"  {verdict.seconds:.1f} s", style="dim"))
        for said in _complaints(verdict):
            self._console.print(Text(f"    {said}", style="red"))

    def show_control(self, control: Control) -> None:
        """Print one line: what was broken, whether the proof noticed, and by what."""
        if not self._quiet:
            said = ("noticed ", "green") if control.noticed else ("MISSED ", "bold red")
            line = Text.assemble(said, control.broken.words)
            line.append(f"  in {control.case}, by {_short(control.said)}", style="dim")
            self._console.print(line)


def _complaints(verdict: Verdict) -> list[str]:
    """Return what is wrong with a layout, a line each."""
    beyond = [row for row in verdict.rows if not row.max_relative_error <= row.bound]
    lines = [
        f"{row.quantity}: {row.max_relative_error:.1e} above {row.bound:.1e}, worst {row.worst}"
        for row in beyond
    ]
    return lines + [_short(problem) for problem in verdict.problems]


def _short(problem: str) -> str:
    """Return the last line of a problem, which in a traceback is the error itself."""
    line = problem.strip().splitlines()[-1]
    return line if len(line) <= SAID else line[: SAID - 1] + "…"


def quantities(proof: Proof) -> list[tuple[str, float, str, str]]:
    """Return each quantity with its largest error over all layouts, the layout and the tensor."""
    worst: dict[str, tuple[float, str, str]] = {}
    for row in proof.rows:
        held = worst.get(row.quantity)
        error = row.max_relative_error
        if held is None or math.isnan(error) or error > held[0]:
            worst[row.quantity] = error, row.layout, row.worst
    return [(name, *found) for name, found in worst.items()]


def _close(console: Console, proof: Proof, controls: Sequence[Control]) -> None:
    table = Table(box=None, pad_edge=False, header_style="cyan")
    for title in ("quantity", "largest error", "in layout", "worst"):
        table.add_column(title, overflow="fold")
    for name, error, layout, worst in quantities(proof):
        table.add_row(name, f"{error:.1e}", Text(layout), Text(worst))
    console.print()
    console.print(table)
    floored = sorted({name for verdict in proof.verdicts for name in verdict.floored})
    if floored:
        console.print(Text(f"compared at the floor, being tiny: {', '.join(floored)}"))
    zero = sorted({words for verdict in proof.verdicts for words in verdict.zero})
    if zero:
        console.print(Text(f"zero by the run's own maths: {'; '.join(zero)}"))
    if controls:
        seen = sum(control.noticed for control in controls)
        style = "bold green" if seen == len(controls) else "bold red"
        console.print(Text(f"broken on purpose: {seen} of {len(controls)} noticed", style=style))
    failed = sum(not verdict.passed for verdict in proof.verdicts)
    total = len(proof.verdicts)
    words = f"{total} layouts, all as one rank" if not failed else f"{failed} of {total} failed"
    console.print(Text(words, style="bold red" if failed else "bold green"))


def facts(proof: Proof, controls: Sequence[Control]) -> dict[str, Any]:
    """Return everything for programs."""
    layouts = [
        {
            "layout": verdict.layout,
            "world": verdict.world,
            "passed": verdict.passed,
            "max_relative_error": {row.quantity: row.max_relative_error for row in verdict.rows},
            "bound": {row.quantity: row.bound for row in verdict.rows},
            "worst": {row.quantity: row.worst for row in verdict.rows},
            "problems": list(verdict.problems),
            "at_the_floor": list(verdict.floored),
            "zero_by_maths": list(verdict.zero),
            "seconds": verdict.seconds,
        }
        for verdict in proof.verdicts
    ]
    answer: dict[str, Any] = {"passed": proof.passed, "layouts": layouts}
    if controls:
        answer["controls"] = [
            {"broken": c.broken.words, "layout": c.case, "noticed": c.noticed, "said": c.said}
            for c in controls
        ]
    return answer
