"""State saved in one layout is, bit for bit, the state in every other, and goes on alike.

Pain 8. A selection of the ordered pairs; ``make matrix`` makes all of them.
"""

from pathlib import Path

import pytest

from moefold.optim.config import OPTIMIZER
from tests.gloo.resharding import LAYOUTS, MODELS, SELECTED, case_of, pairs_fail, subject_of

ALWAYS = ("adamw", "muon")
"""Optimizers whose states differ; the others have states in the form of AdamW's."""
KINDS = [
    pytest.param(kind, model, marks=() if kind in ALWAYS else pytest.mark.matrix)
    for kind, model in zip(OPTIMIZER.kinds, [*MODELS] * len(OPTIMIZER.kinds), strict=False)
]
FP8 = pytest.param("adamw fp8", "tied", marks=pytest.mark.matrix)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "model"), [*KINDS, FP8])
def test_any_layout_loads_in_any_other_and_trains_on(kind: str, model: str, tmp_path: Path) -> None:
    places = [LAYOUTS[number] for number in SELECTED[kind]]
    assert pairs_fail(model, kind, places, places, tmp_path) == []


def test_the_layouts_of_the_matrix_are_legal_and_cover_the_axes() -> None:
    assert len(set(LAYOUTS)) == len(LAYOUTS) >= 24
    for model in MODELS:
        for place in LAYOUTS:
            case_of(subject_of(model, "adamw"), place)
    text = " ".join(sizes for sizes, _, _ in LAYOUTS)
    assert all(axis in text for axis in ("tp2", "pp2", "ep2", "etp2", "cp2", "vpp2"))
    assert {zero for _, _, zero in LAYOUTS} == {0, 1, 2, 3}
    assert {1, 2, 3, 4, 6, 8} == {world for _, world, _ in LAYOUTS}
