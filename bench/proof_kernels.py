"""What a layout may not change, with every operation through own kernels: in ranks' interpreters.

Each rank's rows go through Triton's interpreter, which computes as a device does; the reference is
one rank in fp64, which goes the plain way. Writes ``results/proof_kernels_<part>.json``, and fails
where a kernel of the package has not run.

    python bench/proof_kernels.py fp32          # a selection of layouts
    python bench/proof_kernels.py bf16
    python bench/proof_kernels.py matrix        # every layout, in fp32: hours
    python bench/proof_kernels.py controls      # each exchange of two ranks broken, in fp32
    python bench/proof_kernels.py few           # what the tests run; nothing is written
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from proof import RESULTS, Lines, every_case, machine, summary
from proof_selection import selection

from moefold.comm.fork_server import PRELOAD
from moefold.layers.config import Precision
from moefold.proof.case import ProofCase
from moefold.proof.negative_controls import Control, choose_covering, faults_of, run_faults
from moefold.proof.verify import Proof, low_precision_case, prove_low_precision

PACKAGE = Path(__file__).parents[1] / "moefold"
FORCED = "tests.triton.everywhere"
"""Imported by the server that ranks fork from, before anything else."""
RUN = "KERNELS_RUN"
FEW = (
    "gqa: tp2 ep2 on 2",
    "mla: cp2 on 2, context ring",
    "gqa: ep2 on 2, dispatch padded max_rows 256 on_overflow again, offload pages experts",
)


def every_kernel() -> set[str]:
    """Return what the package launches, ``module:function``."""
    files = {path: path.read_text() for path in (PACKAGE / "kernels").rglob("*.py")}
    return {
        f"{'.'.join(path.relative_to(PACKAGE.parent).with_suffix('').parts)}:{name}"
        for path, text in files.items()
        for name in re.findall(r"@jit\ndef (_\w+)", text)
        if f" {name}[" in text
    }


def narrow(cases: Sequence[ProofCase], precision: Precision) -> Proof:
    """Hold cases through own kernels against fp64."""
    return prove_low_precision(cases, precision, Lines(len(cases)).verdict, "triton")


def run_lowered(precision: Precision, cases: Sequence[ProofCase]) -> dict[str, Any]:
    """Prove cases in a number format; ``passed`` and ``layouts`` say how many do, of how many."""
    started = time.monotonic()
    return summary(narrow(cases, precision), started)


def run_few() -> dict[str, Any]:
    """Prove two layouts, in which every kernel runs, in fp32."""
    named = {case.name: case for case in every_case()}
    first, ring, paged = (named[name] for name in FEW)
    given = {"sizes": "cp2 ep2", "context": ring.layout.context}
    both = replace(ring, layout=paged.layout.model_copy(update=given), name="the last two at once")
    return run_lowered("fp32", [first, both])


def run_controls() -> dict[str, Any]:
    """Break every exchange that the selection's cases of two ranks make, each in one of them."""
    cases, started = [case for case in selection() if case.world == 2], time.monotonic()
    proof = narrow(cases, "fp32")
    lowered = [low_precision_case(case, "fp32", "triton") for case in cases]
    recorded = [(case, found.sites) for case, found in zip(lowered, proof.verdicts, strict=True)]
    planned = faults_of(choose_covering(recorded))
    lines = Lines(len(planned))

    def told(found: Control) -> None:
        lines.say(found.noticed, f"{found.fault.text} | {found.case} | {found.evidence[-160:]}")

    found = run_faults(planned, told)
    return {
        **machine(),
        "seconds": round(time.monotonic() - started),
        "layouts": len(planned),
        "passed": sum(row.noticed for row in found),
        "failed": [f"{row.fault.text} in {row.case}" for row in found if not row.noticed],
    }


PARTS = {
    "fp32": lambda: run_lowered("fp32", selection()),
    "bf16": lambda: run_lowered("bf16", selection()),
    "matrix": lambda: run_lowered("fp32", every_case()),
    "controls": run_controls,
    "few": run_few,
}


def main() -> int:
    """Run one part and return 1 where something is not as it should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", choices=PARTS)
    part = parser.parse_args().part
    PRELOAD.insert(0, FORCED)
    os.environ["TRITON_INTERPRET"] = "1"
    with tempfile.TemporaryDirectory(prefix="moefold-kernels-") as folder:
        os.environ[RUN] = folder
        found = PARTS[part]()
        ran = set(os.listdir(folder))
    found |= {"kernels_run": sorted(ran), "kernels_not_run": sorted(every_kernel() - ran)}
    if part != "few":
        path = RESULTS / f"proof_kernels_{part}.json"
        path.write_text(json.dumps(found, indent=1) + "\n")
    good, total = found["passed"], found["layouts"]
    print(f"{good} of {total} in {found['seconds']} s; {len(ran)} kernels ran")
    for name in found["kernels_not_run"]:
        print(f"never ran: {name}")
    return 0 if good == total and not found["kernels_not_run"] else 1


if __name__ == "__main__":
    sys.exit(main())
