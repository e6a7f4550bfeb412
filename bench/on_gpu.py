"""Measures this machine's GPU; without one each part runs on the CPU in a smoke size.

    python bench/on_gpu.py ceilings     # products, memory, attention, links: what bounds them
    python bench/on_gpu.py operations   # each own operation in each form, against its bound
    python bench/on_gpu.py steps        # whole steps of four models, and one rank of ep8
    python bench/on_gpu.py state        # steps whose masters and moments lie on the host or on disk
    python bench/on_gpu.py offload      # activations on host and disk: bytes, step, what hides
    python bench/on_gpu.py memory       # bytes by part and at the peak, planned beside executed
    python bench/on_gpu.py capture      # steps of fixed shapes: no read, and as one graph
    python bench/on_gpu.py stash        # rows in pages: rate beside copies, steps with and without
    python bench/on_gpu.py clones       # plans of clones, and rows from which one pays
    python bench/on_gpu.py tables       # the tables of docs/gpu.md and their picture

In this order: ``operations`` needs the ceilings, ``steps`` writes the file that ``moefold plan``
plans with. ``make gpu`` runs all of it behind ``tests/gpu``, each part within ten minutes.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from gpu.tables import PARTS


def main(words: Sequence[str] | None = None) -> int:
    """Run one part; returns 1 where something in it failed."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--smoke", action="store_true", help="small sizes, on a device too")
    parser.add_argument("--compiled", action="store_true", help="operations by torch.compile too")
    parser.add_argument("--folder", type=Path, help="of the results (default: bench/results/gpu)")
    asked = parser.parse_args(words)
    part = import_module(f"gpu.{asked.part}")
    if asked.part == "tables":
        return part.run(asked.folder)
    return part.run(part.Bench(asked.part, asked.folder, asked.smoke, asked.compiled))


if __name__ == "__main__":
    sys.exit(main())
