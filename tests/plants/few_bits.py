"""What the proof sees where one part of what keeps few bits the same in every layout is broken.

Each break is a plant of :mod:`tests.plants.quantise`, tried alone in a copy of the project, in
every kind that it concerns and a layout that shows it: ``python -m tests.plants.few_bits
[WORD...]``. A line says the condition of ``docs/precision.md``, and of each kind the largest error
of a gradient and of a weight after three updates. Without the break the case passes, or is refused.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from moefold.kernels.quantise.config import QUANTISE
from moefold.layers.kinds.dense import Dense
from moefold.moe.config import Shared
from moefold.parallel.config import Layout
from moefold.proof.case import BOUND, ProofCase, micro_batch_count
from moefold.proof.matrix import quantised
from moefold.proof.subjects import GQA, SUBJECTS, decoder, moe, subject
from moefold.proof.verify import prove
from tests.plants.__main__ import copy_project
from tests.plants.quantise import PLANTS

KINDS = tuple(QUANTISE.kinds)
BLOCKS = ("fp8_block", "mxfp8", "nvfp4")
MATRICES = ("fp8_tensor", "nvfp4")
ODD = "odd widths"
SUBJECTS[ODD] = subject(decoder(GQA, Dense(width=12), moe(width=12, shared=Shared(width=12))))
SUBJECTS["uneven rows"] = replace(SUBJECTS["gqa"], rows=24)


class Break(NamedTuple):
    """A part that is broken, and where that shows."""

    condition: int
    said: str
    """The plant's."""
    kinds: tuple[str, ...]
    sizes: str
    world: int = 2
    model: str = "gqa"
    zero: int = 0

    @property
    def cases(self) -> list[ProofCase]:
        """One for each kind, in blocks of four."""
        layout, found = Layout.model_validate({"sizes": self.sizes, "zero": self.zero}), []
        for kind in self.kinds:
            record = QUANTISE.kinds[kind].model_validate({"block": 4})
            made = quantised(self.model, record)
            made = replace(made, micro_batches=micro_batch_count(layout, self.world))
            found.append(ProofCase(kind, made, layout, self.world))
        return found


BREAKS = (
    Break(1, "a cut through a block is legal", BLOCKS, "tp2 ep2", model=ODD),
    Break(1, "a cut through a block of rows is legal", BLOCKS, "cp2 ep2", model="uneven rows"),
    Break(2, "an expert's rows of a micro-batch may lie on several ranks", KINDS, "tp2"),
    Break(2, "an expert's rows stay as they come", BLOCKS, "cp2 ep4", 4),
    Break(2, "blocks go on from one micro-batch to the next", KINDS, "ep2"),
    Break(3, "the largest number of rows is that of one rank", MATRICES, "tp2 ep2"),
    Break(3, "the largest number of gradients is that of one rank", MATRICES, "tp2 ep2"),
    Break(3, "the largest number of a weight is that of one rank", MATRICES, "tp2 ep2"),
    Break(3, "rows of latents are taken for those of the tensor group", MATRICES, "tp2 ep2",
          model="mla"),
    Break(3, "the largest of a block that ranks share is that of the part that is here",
          ("fp8_tensor", "fp8_block", "nvfp4"), "", 2, zero=1),
    Break(4, "chance goes by columns of this rank", ("nvfp4",), "tp2 ep2"),
    Break(4, "chance goes by rows of this rank", ("nvfp4",), "cp2 ep2"),
    Break(4, "chance goes by experts of this rank", ("nvfp4",), "ep2"),
)  # fmt: skip


def seen(one: Break) -> dict[str, str]:
    """Return what the proof says of each kind, and whether it passes, as the code is here."""
    said = dict[str, str]()
    for case in one.cases:
        if refused := list(case.broken_rules()):
            said[case.name] = f"refused: {refused[0]}"
            continue
        (found,) = prove([case]).verdicts
        errors = (found.errors.get(name) for name in ("gradients", "weights"))
        text = ", ".join("-" if error is None else f"{error:.1e}" for error in errors)
        text = (found.problems[0].splitlines()[-1] if found.problems else "") or text
        said[case.name] = f"{'passes' if found.passed else 'fails'}: {text}"
    return said


def main(words: list[str]) -> int:
    """Try breaks, first without and then with each; print what was seen, 1 where one was not."""
    plants, missed = {plant.said: plant for plant in PLANTS}, 0
    with tempfile.TemporaryDirectory(prefix="few-bits-") as name:
        folder = Path(name)
        copy_project(folder)
        for one in (b for b in BREAKS if not words or any(word in b.said for word in words)):
            plant = plants[one.said]
            file = folder / plant.path
            sound = file.read_text("utf-8")
            print(f"{one.condition} {one.said} ({one.sizes or f'dp{one.world}'})", flush=True)
            for what, source in (("sound", sound), ("broken", plant.into(sound))):
                file.write_text(source, "utf-8")
                command = [sys.executable, "-m", "tests.plants.few_bits", "--here", one.said]
                env = os.environ | {"PYTHONPATH": str(folder)}
                done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
                if done.returncode:
                    print(done.stderr[-2000:])
                    missed += 1
                    continue
                for kind, said in json.loads(done.stdout.splitlines()[-1]).items():
                    right = said.startswith("fails") == (what == "broken")
                    missed += not right
                    print(f"    {what:7}{kind:11}{said}{'' if right else '   WRONG'}", flush=True)
            file.write_text(sound, "utf-8")
    print(f"{missed} wrong; the bound is {BOUND:.0e}")
    return int(bool(missed))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        print(json.dumps(seen(next(one for one in BREAKS if one.said == sys.argv[2]))))
    else:
        sys.exit(main(sys.argv[1:]))
