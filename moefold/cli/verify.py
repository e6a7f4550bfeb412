"""``moefold verify``: prove that layouts do not change what a run computes.

Shrinks the run's model but keeps its kinds of layers, trains it for three steps in fp64 on one rank
and in each layout, on processes of this machine, and compares loss, gradients, gradient norm and
clipping, and the weights and optimizer state after three steps.

exit status:
  0  every layout computes what one rank computes
  1  a layout does not, or with --controls a fault went unnoticed
  2  wrong input
"""

import argparse
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from moefold.cli._common import add_json, add_run, add_world, plain_table, print_json
from moefold.config.errors import RunError
from moefold.proof.matrix import RULES, matrix
from moefold.run import Run, load_run
from moefold.training.formatting import plural

if TYPE_CHECKING:
    from moefold.proof.negative_controls import Control
    from moefold.proof.verify import LayoutVerdict, Proof

FAILED = 1
MAX_LINE = 160
"""Maximum number of characters of a problem shown on one line."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_run(parser, "layout.zero=3", optional=True)
    text = 'axis sizes, such as "tp2 pp2 ep4"; repeatable (default: the run\'s own)'
    parser.add_argument("--layout", metavar="SIZES", action="append", help=text)
    add_world(parser)
    text = "use the run's number format, and allow a few times the error of reordered sums"
    parser.add_argument("--as-run", action="store_true", help=text)
    text = "instead of RUN: all layouts of a release, or those of each RULE (default: none)"
    parser.add_argument("--matrix", metavar="RULE", nargs="*", help=text)
    text = "with --matrix: compare one step in this format with fp64 (default: three in fp64)"
    parser.add_argument("--precision", choices=("fp32", "bf16"), help=text)
    text = "then break each exchange between ranks once, and check that each fault is noticed"
    parser.add_argument("--controls", action="store_true", help=text)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    run = _requested_run(args)

    from moefold.proof import verify as proving

    if run is None:
        rules = args.matrix or list(RULES)
        cases = [case for name, group in matrix().items() if name in rules for case in group]
        cases = [case for case in cases if args.world in (None, case.world)]
        if not cases:
            problem = "none of the matrix's layouts has this number of ranks"
            raise ValueError(f"--world {args.world}: {problem}")
    else:
        cases = proving.cases_of(run, args.layout, args.world, args.as_run)
    console = Console(soft_wrap=True)
    if run is not None and not args.json and getattr(run.train.quantise, "rows", "") == "rank":
        console.print("train.quantise.rows: verified as micro_batch, as rank depends on the layout")
    progress = VerdictPrinter(console, len(cases), quiet=args.json)
    if args.precision is not None:
        proof = proving.prove_low_precision(cases, args.precision, progress.show)
    elif args.as_run:
        proof = proving.prove_as_run(cases, progress.show)
    else:
        proof = proving.prove(cases, progress.show)
    controls = proving.run_controls(cases, proof, progress.show_control) if args.controls else []
    if args.json:
        print_json(results_json(proof, controls))
    else:
        _print_summary(console, proof, controls)
    noticed = all(control.noticed for control in controls)
    return 0 if proof.passed and noticed else FAILED


def _requested_run(args: argparse.Namespace) -> Run | None:
    """Check the arguments; return the run to prove, or None for the matrix."""
    if args.matrix is None:
        if args.source is None:
            raise ValueError("name a RUN, or give --matrix for the layouts of a release")
        if args.precision is not None:
            raise ValueError("--precision needs --matrix; for a RUN use --as-run")
        return _load_run(args.source, args.overrides, args.layout)
    if args.source is not None or args.layout or args.as_run:
        raise ValueError("--matrix has its own models and layouts: give no RUN, --layout, --as-run")
    unknown = [name for name in args.matrix if name not in RULES]
    if unknown:
        raise ValueError(f"--matrix {unknown[0]}: unknown rule; known are {', '.join(RULES)}")
    return None


def _load_run(source: str, overrides: list[str], layouts: list[str] | None) -> Run:
    """Load the run as ``train --layout`` does, in the first layout in which it is legal.

    It may be legal only in one of ``layouts``, as with stages of a pipeline; a layout in which it
    is not is reported with the others.
    """
    for sizes in layouts or ():
        with suppress(RunError):
            return load_run(source, [*overrides, f"layout.sizes={json.dumps(sizes)}"])
    return load_run(source, overrides)


class VerdictPrinter:
    """Prints each verdict when its layout finishes."""

    def __init__(self, console: Console, total: int, quiet: bool) -> None:
        self._console = console
        self._total = total
        self._quiet = quiet
        self._done = 0

    def show(self, verdict: "LayoutVerdict") -> None:
        """Print one line: whether the layout passed, and the quantity with the largest error."""
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
        complaints = [
            f"{row.quantity}: {row.max_relative_error:.1e} above {row.bound:.1e}, in {row.worst}"
            for row in verdict.rows
            if not row.max_relative_error <= row.bound  # NaN too
        ]
        for complaint in (*complaints, *map(_last_line, verdict.problems)):
            self._console.print(Text(f"    {complaint}", style="red"))

    def show_control(self, control: "Control") -> None:
        """Print one line: the fault, whether the proof noticed it, and by which quantity."""
        if not self._quiet:
            verdict = ("noticed ", "green") if control.noticed else ("MISSED ", "bold red")
            line = Text.assemble(verdict, control.fault.text)
            line.append(f"  in {control.case}, by {_last_line(control.evidence)}", style="dim")
            self._console.print(line)


def _last_line(problem: str) -> str:
    """Return the last line of a problem (the error, in a traceback), truncated."""
    line = problem.strip().splitlines()[-1]
    return line if len(line) <= MAX_LINE else line[: MAX_LINE - 1] + "…"


def _print_summary(console: Console, proof: "Proof", controls: "Sequence[Control]") -> None:
    rows = []
    for name in dict.fromkeys(row.quantity for row in proof.rows):
        of_it = (row for row in proof.rows if row.quantity == name)
        errors = ((row.max_relative_error, row) for row in of_it)
        error, worst = max(errors, key=lambda item: (math.isnan(item[0]), item[0]))
        rows.append((name, f"{error:.1e}", worst.layout, worst.worst))
    console.print()
    console.print(plain_table("quantity", "largest error", "in layout", "where", rows=rows))
    if floored := {name for verdict in proof.verdicts for name in verdict.floored}:
        console.print(Text(f"tiny, so compared with the norm of all: {', '.join(sorted(floored))}"))
    if coarse := {name for verdict in proof.verdicts for name in verdict.coarse}:
        words = "not compared, as rounding alone changes them by more than a quarter"
        console.print(Text(f"{words}: {', '.join(sorted(coarse))}"))
    if zero := {words for verdict in proof.verdicts for words in verdict.zero}:
        console.print(Text(f"always zero in this run: {'; '.join(sorted(zero))}"))
    if controls:
        seen = sum(control.noticed for control in controls)
        style = "bold green" if seen == len(controls) else "bold red"
        console.print(Text(f"injected faults: {seen} of {len(controls)} noticed", style=style))
    failed = sum(not verdict.passed for verdict in proof.verdicts)
    total = len(proof.verdicts)
    passed = f"{plural(total, 'layout')}, {'all ' * (total > 1)}equal to one rank"
    words = f"{failed} of {total} failed" if failed else passed
    console.print(Text(words, style="bold red" if failed else "bold green"))


def results_json(proof: "Proof", controls: "Sequence[Control]") -> dict[str, Any]:
    """Return all results, for ``--json``."""
    layouts = []
    for verdict in proof.verdicts:
        figures = {
            figure: {row.quantity: getattr(row, figure) for row in verdict.rows}
            for figure in ("max_relative_error", "bound", "worst")
        }
        layouts.append(
            {
                "layout": verdict.layout,
                "world": verdict.world,
                "passed": verdict.passed,
                **figures,
                "problems": list(verdict.problems),
                "at_the_floor": list(verdict.floored),
                "too_coarse": list(verdict.coarse),
                "zero_by_maths": list(verdict.zero),
                "seconds": verdict.seconds,
            }
        )
    answer: dict[str, Any] = {"passed": proof.passed, "layouts": layouts}
    if controls:
        answer["controls"] = [
            {"broken": c.fault.text, "layout": c.case, "noticed": c.noticed, "said": c.evidence}
            for c in controls
        ]
    return answer
