"""Which weights are read as codes, and what a run that asks for it may not ask besides."""

from typing import Any

import pytest

from moefold.config.errors import RunError
from moefold.run import Run, load_run
from moefold.spec.decoder import model_weights
from moefold.spec.quantised import quantised_weight_names


def run_of(*overrides: str) -> Run:
    return load_run("tiny", list(overrides))


def test_products_of_blocks_are_narrow_and_nothing_else() -> None:
    """By the layers' descriptions. Plants: a narrow router, a narrow head."""
    assert quantised_weight_names(run_of().decoder) == {}
    decoder = run_of("train.quantise=nvfp4").decoder
    names = quantised_weight_names(decoder)
    wide = [w for w in model_weights(decoder) if w.name not in names]
    assert all(name.startswith("layers.") for name in names)
    assert all(len(w.shape) > 1 for w in model_weights(decoder) if w.name in names)
    words = {w.name.removesuffix(".weight").rsplit(".", 1)[-1] for w in wide if len(w.shape) > 1}
    assert {"embed", "router"} <= words <= {"embed", "head", "router", "gate"}
    assert len(set(names.values())) == len(names)


def test_what_is_kept_wide_is_by_block_and_by_name() -> None:
    """And the numbers of the others stay."""
    every = quantised_weight_names(run_of("train.quantise=mxfp8").decoder)
    blocks = len(run_of().decoder.blocks)
    some = quantised_weight_names(
        run_of("train.quantise={kind: mxfp8, keep_first: 1, keep: ['*.attention.*']}").decoder
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
        (("train.quantise=fp6",), "train.quantise", "nvfp4"),
        (("train.quantise={kind: mxfp8, scales: fp32}",), "train.quantise.scales", "up"),
        (("train.quantise={kind: mxfp8, keep: ['*.atention.*']}",), "keep", "attention"),
        (("train.quantise={kind: mxfp8, keep: ['*.w_in']}",), "keep", "both matrices"),
        (("train.quantise={kind: mxfp8, keep_first: 99}",), "keep_first", "must leave one"),
        (("train.quantise={kind: mxfp8, keep_last: 99}",), "quantise.keep_last", "must leave one"),
        (("train.quantise={kind: nvfp4, wire: codes}",), "quantise.wire", "powers of two"),
        (("train.quantise={kind: mxfp8, scaling: delayed}",), "train.quantise.scaling", "current"),
        (
            ("train.quantise={kind: fp8_block, scales: fp32, wire: codes}",),
            "train.quantise.wire",
            "wide",
        ),
        (
            ("train.quantise={kind: mxfp8, hidden: codes, keep: ['*.experts.*', '*.ffn.*']}",),
            "train.quantise.hidden",
            "the model has none",
        ),
        (
            ("train.quantise={kind: mxfp8, wire: codes, keep: ['*.experts.*']}",),
            "train.quantise.wire",
            "the model has none",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(
    overrides: tuple[str, ...], path: str, said: str
) -> None:
    with pytest.raises(RunError) as caught:
        run_of(*overrides)
    text = str(caught.value)
    assert path in text and said in text


WIDE = (
    "model.shape={hidden: 256, layers: 2, heads: 8, kv_heads: 4, head_dim: 64, experts: 8, "
    "top_k: 2, expert_width: 256}",
    "data.seq=512",
)


HIDDEN = "{kind: nvfp4, hidden: codes}"


@pytest.mark.parametrize(
    ("quantise", "sizes", "said", "nearest"),
    [
        ("fp8_block", "tp4", "tp * 128 must divide k.weight", "tp2 ep2"),
        ("mxfp8", "etp16 ep4", "etp * 32 must divide experts.w_in", "ep4 etp8"),
        ("nvfp4", "cp32 ep8 etp4", "2 * cp * 16 must divide", "cp16 ep8 etp4"),
        ("nvfp4", "tp2", "must be on one rank", "tp2 ep2"),
        ("fp8_tensor", "tp2 cp2 ep2", "must be on one rank", "tp2 cp2 ep4"),
        (HIDDEN, "ep2 etp4", "etp * 128 must divide experts.w_in", "ep2 etp2"),
    ],
)
def test_a_cut_through_what_shares_a_scale_is_refused(
    quantise: str, sizes: str, said: str, nearest: str
) -> None:
    """With the nearest layout that holds whole blocks. Plants: blocks are not counted, those of
    pre-activations too."""
    run_of(*WIDE, f"train.quantise={quantise}", f"layout.sizes={nearest}")
    with pytest.raises(RunError) as caught:
        run_of(*WIDE, f"train.quantise={quantise}", f"layout.sizes={sizes}")
    found = [v for v in caught.value.violations if said in v.rule]
    assert found and found[0].nearest == nearest, caught.value


def test_ways_out_of_the_rules_about_rows() -> None:
    """Wide weight gradients where blocks alone are asked, rows by rank, and scales known before."""
    delayed = "{kind: fp8_tensor, scaling: delayed}"
    for quantise in ("{kind: mxfp8, wgrad: wide}", "{kind: nvfp4, rows: rank}", delayed):
        run_of(*WIDE, f"train.quantise={quantise}", "layout.sizes=tp2")
    with pytest.raises(RunError):
        run_of(*WIDE, "train.quantise={kind: nvfp4, wgrad: wide}", "layout.sizes=tp2")


@pytest.mark.parametrize(
    ("asked", "moves"),
    [
        ("adapter={kind: lora, dropout: 0.1, targets: [attention]}", False),
        ("adapter={kind: lora, dropout: 0.1, targets: [experts]}", True),
        ("train.quantise={kind: mxfp8, keep: ['*.experts.*']}", False),
        ("train.quantise={kind: mxfp8, wgrad: wide}", True),
    ],
)
def test_dispatchers_of_other_packages_are_refused_where_experts_need_row_numbers(
    asked: str, moves: bool
) -> None:
    """Graphs are refused for whatever draws or finds row positions on the host."""
    layout = ["layout.sizes=ep2", "layout.dispatch=deep_ep", "layout.graphs=partial"]
    with pytest.raises(RunError) as caught:
        run_of(asked, *layout)
    rules = [violation.rule for violation in caught.value.violations]
    assert any("exact row numbers" in rule for rule in rules) is moves, rules
    assert any("replays a recorded step" in rule for rule in rules)


def test_all_that_is_wrong_is_said_at_once() -> None:
    """The layout and the pattern."""
    quantise: Any = "train.quantise={kind: nvfp4, keep: ['*.none.*']}"
    with pytest.raises(RunError) as caught:
        run_of(quantise, "layout.sizes=tp2")
    paths = {violation.path[0] for violation in caught.value.violations}
    assert paths == {"train", "layout"}
