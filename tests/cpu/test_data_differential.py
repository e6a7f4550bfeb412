"""Drawn conversations through templates and folders: ids and labels are those of transformers."""

from pathlib import Path

from tests.differential import FOLDERS, MARKED, NAMES, PAIRS, outcomes
from tests.differential_texts import KINDS, text_outcomes

SEED, COUNT = 137, 18
"""With which nearly all templates and all folders are there."""


def test_drawn_conversations_are_the_references_or_refused_for_a_reason(tmp_path: Path) -> None:
    found = list(outcomes(seed=SEED, count=COUNT, folder=tmp_path))
    assert len(found) == COUNT * PAIRS
    wrong = [(o.template, o.folder, o.refusal, o.difference) for o in found if o.difference]
    assert not wrong, wrong[:3]
    # Refusals must not be all that is compared.
    equal = [outcome for outcome in found if not outcome.refusal]
    assert len(equal) > len(found) / 3
    assert {outcome.folder for outcome in equal} == {*FOLDERS}
    templates = {outcome.template for outcome in equal}
    assert len({name.removesuffix(MARKED) for name in templates}) >= len(NAMES) - 2
    assert sum(name.endswith(MARKED) for name in templates) >= 10  # whose labels are the masks'


def test_drawn_texts_and_pairs_are_those_of_transformers_and_trl(tmp_path: Path) -> None:
    found = list(text_outcomes(seed=0, count=3, folder=tmp_path))
    assert len(found) == 3 * len(KINDS) * len(FOLDERS)
    wrong = [outcome for outcome in found if outcome.found != outcome.wanted]
    assert not wrong, wrong[:2]
