"""``moefold doctor``: each back end: found, version, chosen or why not."""

import argparse
import difflib
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moefold.cli._probes import Finding

MISSING = 1


def add(subparsers: Any) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="each back end: found, version, chosen or why not",
        description="Looks for every back end, tries it where that is cheap, and says what runs. "
        "Exit status 1 if one named by --need is missing or does not work; else 0.",
    )
    parser.add_argument(
        "--need",
        metavar="NAME",
        action="append",
        default=[],
        help="fail without it; repeatable (default: none)",
    )
    parser.add_argument("--json", action="store_true", help="answer as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Look, report, and judge what was asked for."""
    from moefold.cli._probes import probe_all

    findings = probe_all()
    missing = lacking(findings, args.need)
    if args.json:
        backends = [asdict(finding) for finding in findings]
        print(json.dumps({"backends": backends, "missing": missing}, indent=2))
    else:
        _print_table(findings)
        for name in missing:
            print(f"needed and not usable: {name}", file=sys.stderr)
    return MISSING if missing else 0


def lacking(findings: "list[Finding]", needed: list[str]) -> list[str]:
    """Return which of the ``needed`` back ends are not chosen.

    Raises:
        ValueError: for a name that no back end has; it offers the nearest one.
    """
    known = {finding.name: finding for finding in findings}
    for name in needed:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise ValueError(
                f"--need {name}: no such back end; nearest: {near[0]}; all: {', '.join(known)}"
            )
    return [name for name in needed if not known[name].chosen]


def _print_table(findings: "list[Finding]") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    console = Console(soft_wrap=not sys.stdout.isatty())
    for title in ("back end", "found", "version", "chosen", "why, or why not"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        found, chosen = (
            Text("yes", "green") if flag else Text("no", "yellow")
            for flag in (finding.found, finding.chosen)
        )
        table.add_row(finding.name, found, finding.version, chosen, Text(finding.why))
    console.print(table)
