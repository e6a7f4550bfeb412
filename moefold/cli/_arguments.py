"""Arguments that several commands take, and how the help of all of them is laid out."""

import argparse
from typing import Any


class Help(argparse.HelpFormatter):
    """Help that fits the terminal: paragraphs are wrapped, lists keep their lines, defaults stand.

    A default that is a value is added to what is said of its option; one that is worked out when
    the command runs is in that text itself.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)

    def _get_help_string(self, action: argparse.Action) -> str:
        said = action.help or ""
        shown = action.option_strings and action.nargs != 0 and "default" not in said
        if shown and action.default not in (None, [], argparse.SUPPRESS):
            said += " (default: %(default)s)"
        return said


class Parser(argparse.ArgumentParser):
    """A parser, of the program or of a command, that lays its help out so."""

    def __init__(self, **how: Any) -> None:
        super().__init__(formatter_class=Help, **how)


def add_uses(parser: argparse.ArgumentParser) -> None:
    """Describe ``--uses``: files that a model with parts from outside is made of."""
    parser.add_argument(
        "--uses",
        metavar="FILE",
        action="append",
        default=[],
        help="Python file with parts of the model from outside; repeatable (default: none)",
    )
