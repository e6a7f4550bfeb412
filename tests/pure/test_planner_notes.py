"""What is said of a run before its first step, and of which runs nothing is."""

import json
from typing import Any

import pytest

from moefold.config.base import to_dict
from moefold.config.errors import RunError
from moefold.layers.kinds.dense import Dense
from moefold.layers.kinds.gqa import Gqa
from moefold.model.config import Block, Decoder, Stack
from moefold.planner.notes import run_notes
from moefold.run import load_run, recipes

KINDS = ("norms", "attention", "mla_up", "ffn", "shared", "experts", "permute", "gather")
SHAPE = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "experts": 4, "top_k": 2}
LATENT = SHAPE | {"expert_width": 16, "dense_layers": 1, "shared_width": 16}
LATENT.pop("kv_heads")
DENSE = Block(attention=Gqa(heads=4, kv_heads=2, head_dim=8), ffn=Dense(width=64))
MODELS: dict[str, dict[str, Any]] = {
    "dense": {
        "family": "custom",
        "decoder": to_dict(
            Decoder(vocab=2048, hidden=32, stacks=(Stack(repeat=2, blocks=(DENSE,)),))
        ),
    },
    "experts": {"family": "qwen3_moe", "shape": SHAPE | {"expert_width": 16}},
    "latents": {"family": "deepseek_v3", "shape": LATENT, "balance": []},
}
LACKS = {
    "dense": {"mla_up", "shared", "experts", "permute"},
    "experts": {"mla_up", "shared", "ffn"},
    "latents": set[str](),
}


def said(model: str, modules: tuple[str, ...], sizes: str = "") -> list[str]:
    recompute = {"kind": "selective", "modules": list(modules)}
    changes = {"model": MODELS[model], "layout": {"sizes": sizes, "recompute": recompute}}
    return list(
        run_notes(
            load_run("tiny", [f"{key}={json.dumps(value)}" for key, value in changes.items()])
        )
    )


def named(lines: list[str]) -> set[str]:
    """The kinds that lines are about."""
    return {line.split()[1] for line in lines if line.startswith("layout.recompute: ")}


@pytest.mark.parametrize("sizes", ["", "tp2", "pp2"])
@pytest.mark.parametrize("model", MODELS)
def test_kinds_that_a_model_or_a_layout_lacks_are_refused(model: str, sizes: str) -> None:
    """Asked for one by one and all together, with those that there are; these are accepted."""
    lacks = LACKS[model] | (set[str]() if "tp" in sizes else {"gather"})
    there = tuple(kind for kind in KINDS if kind not in lacks)
    assert named(said(model, there, sizes)) <= {"norms"}
    for modules in (*((kind,) for kind in lacks), *([KINDS] if lacks else [])):
        with pytest.raises(RunError) as refused:
            said(model, modules, sizes)
        (found,) = refused.value.violations
        none, gathers, _ = found.rule.partition("gather needs tp2")
        absent = none.strip("; ").removeprefix("the model has no modules of kind ").split(", ")
        assert {*absent} - {""} == LACKS[model] & {*modules}
        assert bool(gathers) == ("gather" in modules and "tp" not in sizes)
        assert tuple(found.nearest) == (there if len(modules) > 1 else ("norms",))


def test_norms_that_all_tensor_ranks_gather_save_nothing() -> None:
    """Unless a feed-forward that is recomputed would keep them, or routing does."""
    (line,) = said("dense", ("norms",), "tp2")
    assert "norms saves no memory" in line and "under tp2" in line
    assert not said("dense", ("norms",))
    assert not said("dense", ("norms", "ffn"), "tp2")
    assert not said("experts", ("norms",), "tp2")


def test_copies_of_rows_from_other_ranks_save_nothing() -> None:
    """Those rows would have to be kept in their place."""
    (line,) = said("experts", ("permute",), "ep2")
    assert "permute saves no memory" in line and "under ep2" in line
    assert not said("experts", ("permute",))


@pytest.mark.parametrize(
    ("context", "stretched", "longest"), [(64, None, 64), (64, 128, 128), (None, 128, 128)]
)
def test_sequences_above_what_a_model_knows_are_said(
    context: int | None, stretched: int | None, longest: int
) -> None:
    model: dict[str, Any] = dict(MODELS["experts"])
    if context is not None:
        model["context"] = context
    if stretched is not None:
        model["rope"] = {"yarn": {"factor": 4.0, "original_length": stretched // 4}}
    for seq, warned in ((longest, False), (longest + 2, True)):
        lines = run_notes(load_run("tiny", [f"model={json.dumps(model)}", f"data.seq={seq}"]))
        assert [line.startswith("data.seq: ") for line in lines] == [True] * warned
        assert all(str(longest) in line for line in lines)


@pytest.mark.parametrize("name", recipes())
def test_of_a_recipe_nothing_is_said(name: str) -> None:
    assert not run_notes(load_run(name))
