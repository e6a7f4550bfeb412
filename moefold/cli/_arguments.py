"""Arguments that several commands take."""

import argparse


def add_uses(parser: argparse.ArgumentParser) -> None:
    """Describe ``--uses``: files that a model with parts from outside is made of."""
    parser.add_argument(
        "--uses",
        metavar="FILE",
        action="append",
        default=[],
        help="Python file with parts of the model from outside; repeatable",
    )
