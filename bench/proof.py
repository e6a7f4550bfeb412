"""What a layout may not change, shown for every layout: the matrix, its controls, narrow formats.

Writes ``results/proof_<part>.json``. A line is printed for each layout or break as it is known. The
controls take their call-sites from the few cases that ``results/proof_matrix.json`` names, which
between them make every exchange that any case of the matrix makes.

    python bench/proof.py matrix          # every layout against one rank, fp64
    python bench/proof.py controls        # every exchange between ranks broken, at 2, 4, 8 ranks
    python bench/proof.py fp32            # a case for each choice in a narrow format against fp64
    python bench/proof.py bf16
"""

import argparse
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import moefold  # noqa: F401  (before torch: it says how threads wait)

# isort: split
import torch
from proof_selection import selection

from moefold.proof.case import ProofCase
from moefold.proof.matrix import matrix
from moefold.proof.negative_controls import Control, choose_covering, faults_of, run_faults
from moefold.proof.verify import LayoutVerdict, Proof, prove, prove_low_precision

RESULTS = Path(__file__).parent / "results"


class Lines:
    """Prints a line for each of so many things."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._started = total, 0, time.monotonic()

    def say(self, good: bool, words: str) -> None:
        """Print how far it is, after how long, whether this one is as it should be, and words."""
        self._done += 1
        seconds = time.monotonic() - self._started
        mark = "ok    " if good else "FAILED"
        print(f"{self._done:>4}/{self._total} {seconds:>6.0f} s {mark} {words}", flush=True)

    def verdict(self, verdict: LayoutVerdict) -> None:
        """Print what a layout came to."""
        worst = verdict.worst
        said = f"{worst.quantity} {worst.max_relative_error:.1e} {worst.worst}" if worst else ""
        problems = [problem.strip().splitlines()[-1] for problem in verdict.problems]
        self.say(verdict.passed, " | ".join([verdict.layout, said, *problems]))


def machine() -> dict[str, Any]:
    """Return what ran it."""
    return {"torch": torch.__version__, "processor": platform.machine(), "cores": os.cpu_count()}


def summary(proof: Proof, started: float) -> dict[str, Any]:
    """Return what layouts came to, the largest error of each quantity with its layout."""
    worst: dict[str, dict[str, Any]] = {}
    for row in proof.rows:
        held = worst.get(row.quantity)
        if held is None or not row.max_relative_error <= held["error"]:
            found = {"error": row.max_relative_error, "bound": row.bound, "layout": row.layout}
            worst[row.quantity] = found
    failed = {
        verdict.layout: [*verdict.problems, *(str(r) for r in verdict.rows if not _within(r))]
        for verdict in proof.verdicts
        if not verdict.passed
    }
    return {
        **machine(),
        "seconds": round(time.monotonic() - started),
        "layouts": len(proof.verdicts),
        "passed": sum(verdict.passed for verdict in proof.verdicts),
        "by_ranks": dict(sorted(Counter(verdict.world for verdict in proof.verdicts).items())),
        "largest_error": worst,
        "failed": failed,
    }


def _within(row: Any) -> bool:
    return row.max_relative_error <= row.bound


def every_case() -> list[ProofCase]:
    """Return the whole matrix."""
    return [case for cases in matrix().values() for case in cases]


def run_matrix() -> dict[str, Any]:
    """Prove every layout, and choose the cases whose exchanges are all that any makes."""
    cases, started = every_case(), time.monotonic()
    proof = prove(cases, Lines(len(cases)).verdict)
    recorded = [(case, found.sites) for case, found in zip(cases, proof.verdicts, strict=True)]
    chosen = choose_covering(recorded)
    facts = {**summary(proof, started), "call_sites": sum(len(sites) for _, sites in chosen)}
    return {**facts, "cover": [case.name for case, _ in chosen]}


def run_controls() -> dict[str, Any]:
    """Break every exchange that the covering cases make, once at each number of ranks.

    What is known is written as it comes; each run tries all of them anew.
    """
    named = json.loads((RESULTS / "proof_matrix.json").read_text())
    by_name = {case.name: case for case in every_case()}
    if gone := [name for name in named["cover"] if name not in by_name]:
        sys.exit(f"the matrix has no {gone[0]!r} any more: run `bench/proof.py matrix` anew")
    cases, started = [by_name[name] for name in named["cover"]], time.monotonic()
    proof = prove(cases, Lines(len(cases)).verdict)
    recorded = [(case, found.sites) for case, found in zip(cases, proof.verdicts, strict=True)]
    covering = choose_covering(recorded)
    call_sites = sum(len(sites) for _, sites in covering)
    assert call_sites == named["call_sites"], "the matrix makes other exchanges: run it anew"
    planned = faults_of(covering)
    path = RESULTS / "proof_controls.json"
    rows: list[dict[str, Any]] = []
    lines = Lines(len(planned))

    def facts() -> dict[str, Any]:
        return {
            **machine(),
            "seconds": round(time.monotonic() - started),
            "layouts": len(covering),
            "call_sites": call_sites,
            "breaks": len(planned),
            "tried": len(rows),
            "noticed": sum(row["noticed"] for row in rows),
            "controls": rows,
        }

    def told(found: Control) -> None:
        words, case, said = found.fault.text, found.case, found.evidence[-160:]
        lines.say(found.noticed, f"{words} | {case} | {said}")
        rows.append({"broken": words, "in": case, "noticed": found.noticed, "by": said})
        path.write_text(json.dumps(facts(), indent=1) + "\n")

    run_faults(planned, told)
    return facts()


def run_lowered(precision: Any, cases: Sequence[ProofCase]) -> dict[str, Any]:
    """Hold a case for each choice in a narrow format against fp64."""
    started = time.monotonic()
    return summary(prove_low_precision(cases, precision, Lines(len(cases)).verdict), started)


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "matrix": run_matrix,
    "controls": run_controls,
    "fp32": lambda: run_lowered("fp32", selection()),
    "bf16": lambda: run_lowered("bf16", selection()),
}


def main() -> int:
    """Run one part, write what it came to, and return 1 where something is not as it should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", choices=PARTS)
    args = parser.parse_args()
    found = PARTS[args.part]()
    (RESULTS / f"proof_{args.part}.json").write_text(json.dumps(found, indent=1) + "\n")
    total, good = (found.get(name) for name in ("layouts", "passed"))
    if args.part == "controls":
        total, good = found["breaks"], found["noticed"]
    print(f"{good} of {total} in {found['seconds']} s")
    return 0 if total == good else 1


if __name__ == "__main__":
    sys.exit(main())
