"""Which weights are read as codes, and what a run that asks for it may not ask besides."""

from typing import Any

import pytest

from moefold.config.errors import RunError
from moefold.run import Run, load_run
from moefold.spec.decoder import model_weights
from moefold.spec.quantised import narrow_weights


def run_of(*overrides: str) -> Run:
    return load_run("tiny", list(overrides))


def test_b52_products_of_blocks_are_narrow_and_nothing_else() -> None:
    """By the layers' descriptions. Plant: a narrow router."""
    assert narrow_weights(run_of().decoder()) == {}
    decoder = run_of("train.quantise=nvfp4").decoder()
    names = narrow_weights(decoder)
    wide = [w for w in model_weights(decoder) if w.name not in names]
    assert all(len(w.shape) > 1 for w in model_weights(decoder) if w.name in names)
    words = {w.name.removesuffix(".weight").rsplit(".", 1)[-1] for w in wide if len(w.shape) > 1}
    assert {"embed", "router"} <= words <= {"embed", "head", "router", "gate"}
    assert len(set(names.values())) == len(names)


def test_what_is_kept_wide_is_by_block_and_by_name() -> None:
    """And the numbers of the others stay."""
    every = narrow_weights(run_of("train.quantise=mxfp8").decoder())
    blocks = len(run_of().decoder().blocks)
    some = narrow_weights(
        run_of("train.quantise={kind: mxfp8, keep_first: 1, keep: ['*.attention.*']}").decoder()
    )
    expected = {
        name: number
        for name, number in every.items()
        if not name.startswith("layers.0.") and ".attention." not in name
    }
    assert some == expected and blocks > 1 and expected


@pytest.mark.parametrize(
    ("overrides", "path", "said"),
    [
        (("train.quantise=nvfp4", "layout.sizes=tp2"), "layout.sizes", "leave out tp"),
        (("train.quantise=mxfp8", "layout.sizes=ep2"), "layout.sizes", "leave out ep"),
        (("train.quantise=fp6",), "train.quantise", "nvfp4"),
        (("train.quantise={kind: mxfp8, scales: fp32}",), "train.quantise.scales", "up"),
        (("train.quantise={kind: mxfp8, keep: ['*.atention.*']}",), "keep", "attention"),
        (("train.quantise={kind: mxfp8, keep: ['*.w_in']}",), "keep", "both matrices"),
        (("train.quantise={kind: mxfp8, keep_last: 99}",), "keep_first", "must leave one"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(
    overrides: tuple[str, ...], path: str, said: str
) -> None:
    with pytest.raises(RunError) as caught:
        run_of(*overrides)
    text = str(caught.value)
    assert path in text and said in text


def test_all_that_is_wrong_is_said_at_once() -> None:
    """The layout and the pattern."""
    quantise: Any = "train.quantise={kind: nvfp4, keep: ['*.none.*']}"
    with pytest.raises(RunError) as caught:
        run_of(quantise, "layout.sizes=tp2")
    assert len(caught.value.violations) == 2
