"""``moefold report``: a run's curves, expert health and time well spent, as a page."""

import argparse
from typing import Any


def add(subparsers: Any) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "report",
        help="a run's curves and expert health as a self-contained page",
        description="Reads what a run wrote, finished or not, and makes one HTML file of it that "
        "needs no network.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="a run's folder")
    parser.add_argument("--html", metavar="FILE", help="where to (default: FOLDER/report.html)")
    parser.add_argument("--json", action="store_true", help="answer in figures, write no page")


def run(args: argparse.Namespace) -> int:
    """Carry out the command; return its exit status."""
    from moefold.cli._report import report

    return report(args)
