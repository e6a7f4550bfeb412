"""A part of the matrix: one small case for each choice. Torch-free."""

from dataclasses import replace
from itertools import islice
from typing import Any

from moefold.proof.case import ProofCase
from moefold.proof.matrix import matrix

BY_MODEL = ("models",)
"""Rules whose models are choices too."""
UNSELECTED = {"shipped", "optimizers", "axes", "foldings", "precisions"}
"""Rules of which no choice is selected. Of few bits, as one number format rounds where another does
not a code differs, by a hundredth of a gradient: their layouts are compared in fp64 alone."""
EVERY = {
    "clones": 2,
    "multi_token": 2,
    "recomputes": 2,
    "offloads": 7,
    "states": 8,
}
"""Rules that cross what they are of, of whose choices each so manieth is selected."""
FOLDED = ("tp2 cp2 ep4 etp2", "tp2 pp2 ep4")
"""Foldings that are selected."""


def selection() -> tuple[ProofCase, ...]:
    """Return one small case for each choice.

    A choice is a rule's dispatcher, schedule, model or the like, whatever the sizes; which of the
    smallest layouts stands for it goes round.
    """
    choices: dict[Any, list[ProofCase]] = {}
    every = matrix()
    for name, cases in every.items():
        of_rule: dict[Any, list[ProofCase]] = {}
        for made in cases if name not in UNSELECTED else ():
            what = replace(made.subject, micro_batches=0) if name in BY_MODEL else None
            choice = made.layout.model_copy(update={"sizes": "", "stages": None})
            of_rule.setdefault((name, what, choice), []).append(made)
        choices |= islice(of_rule.items(), 0, None, EVERY.get(name, 1))
    chosen = []
    for turn, found in enumerate(choices.values()):
        fewest = min(made.world for made in found)
        smallest = [made for made in found if made.world == fewest]
        chosen.append(smallest[turn % len(smallest)])
    folded = [made for made in every["foldings"] if made.layout.sizes in FOLDED]
    return tuple(dict.fromkeys([*chosen, *folded]))
