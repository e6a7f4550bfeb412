"""Families turn a few sizes into a description, refuse what cannot be, and know their names."""

import inspect
import json
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest

from moefold.config.check import check
from moefold.config.errors import Rename, RunError
from moefold.config.schema import json_schema
from moefold.layers.kinds.delta import DeltaNet
from moefold.layers.kinds.dense import Dense
from moefold.layers.kinds.gqa import Gqa
from moefold.layers.kinds.mla import Mla
from moefold.model.config import MODEL, Decoder
from moefold.model.families import custom, folder, registry  # noqa: F401  (they register themselves)
from moefold.model.families.base import Family
from moefold.model.families.mixed_sizes import BoundedDeltaNet, ChannelDeltaNet, LowRankDeltaNet
from moefold.model.families.names import detect_layout, find_mappings, pieces
from moefold.moe.config import Aux, Bias, Moe, Router
from moefold.run import Run, load_run
from tests.family_draws import draw
from tests.mutations import repair

SIZES = {"hidden": 32, "layers": 3, "heads": 4, "experts": 4, "top_k": 2, "expert_width": 12}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"shape": SIZES | {"kv_heads": 2}},
    "qwen3_moe": {"shape": SIZES | {"kv_heads": 2, "dense_layers": [0]}},
    "olmoe": {"shape": SIZES | {"kv_heads": 4}},
    "deepseek_v3": {
        "shape": SIZES | {"dense_layers": 1, "kv_rank": 8, "nope_dim": 6, "rope_dim": 4},
        "groups": {"count": 2, "keep": 1},
    },
    "dots1": {"shape": SIZES | {"kv_heads": 2, "window": 5, "full_layers": [1], "dense_layers": 1}},
    "glm4_moe": {"shape": SIZES | {"kv_heads": 2, "dense_layers": 1}, "qk_norm": "head"},
}
"""Models of a few kinds, as run files state them."""


def model_of(family: str, **changes: Any) -> Any:
    """Build a family's record as a run file does."""
    data = {"family": family, **MODELS[family], **changes}
    return MODEL.kinds[family].model_validate(data)


@pytest.mark.parametrize("family", registry.families())
def test_sizes_become_a_description_and_are_found_again_in_it(family: str) -> None:
    """Of every family, with a few draws of its options; a run file states what a folder does."""
    for seed in range(2):
        config = draw(family, Random(f"{family} {seed}")) | {"model_type": family}
        read = registry.from_hf(config).model
        stated = type(read).model_validate(read.model_dump())
        assert stated == read
        decoder = stated.describe(9)
        assert decoder.vocab == config["vocab_size"]
        assert decoder.hidden == config["hidden_size"]
        assert decoder.layers == config["num_hidden_layers"]
        assert type(read).of(decoder).describe(9) == decoder
        assert registry.family_of(decoder) is type(read)
        assert Decoder.model_validate_json(decoder.model_dump_json()) == decoder


def test_heads_widths_and_patterns() -> None:
    qwen = model_of("qwen3_moe").describe(100)
    first, *rest = qwen.blocks
    assert isinstance(first.ffn, Dense)
    assert first.ffn.width == 24
    assert all(isinstance(b.ffn, Moe) and b.ffn.width == 12 for b in rest)
    assert [s.repeat for s in qwen.stacks] == [1, 2]
    assert isinstance(first.attention, Gqa)
    assert first.attention.head_dim == 8
    assert first.attention.qk_norm == "head"
    assert model_of("olmoe").describe(9).blocks[0].attention.qk_norm == "projection"

    deepseek = model_of("deepseek_v3").describe(100)
    assert isinstance(deepseek.blocks[0].attention, Mla)
    assert isinstance(deepseek.blocks[0].ffn, Dense)
    assert deepseek.blocks[0].ffn.width == 2 * 12 + 12
    sparse = deepseek.blocks[1].ffn
    assert isinstance(sparse, Moe)
    assert sparse.shared is not None
    assert sparse.shared.width == 12
    assert sparse.router.score == "sigmoid"
    assert sparse.router.selection_bias
    assert sparse.balance == (Bias(), Aux(over="sequence", coefficient=1e-4))


def test_an_embedding_has_a_row_for_every_token() -> None:
    roomy = model_of("mixtral", shape=MODELS["mixtral"]["shape"] | {"vocab": 128})
    assert roomy.describe(100).vocab == 128
    with pytest.raises(ValueError, match=r"model\.shape\.vocab is 128.*tokens, 200"):
        roomy.describe(200)
    (broken,) = roomy.violations(200)
    assert (broken.path, broken.nearest) == (("shape", "vocab"), 200)


WRONG: list[tuple[str, dict[str, Any], tuple[Any, ...], Any]] = [
    ("mixtral", {"heads": 5}, ("shape", "hidden"), 30),
    ("mixtral", {"hidden": 36}, ("shape", "hidden"), 32),
    ("mixtral", {"kv_heads": 3}, ("shape", "kv_heads"), 2),
    ("mixtral", {"kv_heads": 9}, ("shape", "kv_heads"), 4),
    ("mixtral", {"head_dim": 7}, ("shape", "head_dim"), 8),
    ("mixtral", {"top_k": 5}, ("shape", "top_k"), 4),
    ("mixtral", {"top_k": 1}, ("shape", "top_k"), 2),
    ("qwen3_moe", {"top_k": 1}, ("renormalise",), False),
    ("qwen3_moe", {"dense_layers": [0, 1, 2]}, ("shape", "dense_layers"), [0, 1]),
    ("qwen3_moe", {"dense_layers": [2, 7]}, ("shape", "dense_layers"), [2]),
    ("qwen3_moe", {"dense_layers": [1, 0]}, ("shape", "dense_layers"), [0, 1]),
    ("olmoe", {"hidden": 33}, ("shape", "hidden"), 32),
    ("deepseek_v3", {"dense_layers": 3}, ("shape", "dense_layers"), 2),
    ("deepseek_v3", {"shared_width": 20}, ("shape", "shared_width"), 24),
    ("deepseek_v3", {"rope_dim": 5}, ("shape", "rope_dim"), 6),
    ("deepseek_v3", {"experts": 3}, ("groups", "count"), 1),
    ("glm4_moe", {"head_dim": 6}, ("rope", "fraction"), 1.0),
    ("dots1", {"full_layers": [4]}, ("shape", "full_layers"), []),
    ("dots1", {"window": None}, ("shape", "full_layers"), []),
]


@pytest.mark.parametrize(("family", "change", "path", "nearest"), WRONG)
def test_impossible_sizes_are_refused_with_one_that_is_possible(
    family: str, change: dict[str, Any], path: tuple[Any, ...], nearest: Any
) -> None:
    data = {"family": family, **MODELS[family], "shape": MODELS[family]["shape"] | change}
    record = MODEL.kinds[family]
    verdict = check(record, data)
    assert verdict.record is None
    assert (path, nearest) in [(v.path, v.nearest) for v in verdict.violations]
    assert check(record, repair(record, data, verdict.violations)).record is not None


CLASHES = [
    ("qwen3_moe", {"router": {"experts": 4}}, ("router", "experts")),
    ("qwen3_moe", {"router": {}, "renormalise": False}, ("renormalise",)),
    ("deepseek_v3", {"router": {}, "groups": None}, ("balance", 0)),
    ("olmoe", {"router": {"groups": {"count": 3, "keep": 1}}}, ("router", "groups", "count")),
    (
        "mixtral",
        {"router": {}, "shape": {**SIZES, "kv_heads": 2, "top_k": 1}},
        ("router", "renormalise"),
    ),
    ("mixtral", {"balance": [{"kind": "bias"}]}, ("balance", 0)),
    ("olmoe", {"balance": [{"kind": "z"}, {"kind": "z"}]}, ("balance", 1)),
    ("mixtral", {"rope": {"layout": "interleaved"}}, ("rope", "layout")),
    ("deepseek_v3", {"groups": {"count": 2, "keep": 1, "score": "max"}}, ("groups", "score")),
    ("deepseek_v3", {"groups": {"count": 2, "keep": 1, "best": 1}}, ("groups", "best")),
    (
        "qwen3_moe",
        {"rope": {"yarn": {"factor": 4, "original_length": 64, "mscale_all_dim": 1}}},
        ("rope", "yarn", "mscale_all_dim"),
    ),
]


@pytest.mark.parametrize(("family", "change", "path"), CLASHES)
def test_what_a_family_does_not_have_is_refused(
    family: str, change: dict[str, Any], path: tuple[Any, ...]
) -> None:
    data = {"family": family, **MODELS[family], **change}
    record = MODEL.kinds[family]
    verdict = check(record, data)
    assert path in [v.path for v in verdict.violations]
    assert check(record, repair(record, data, verdict.violations)).record is not None


def test_a_router_in_place_of_the_family_s_keeps_its_sizes_and_is_no_longer_the_family_s() -> None:
    """Any score under any family; a folder of the family cannot hold it, and says so."""
    decoder = model_of("qwen3_moe", router={"score": "sigmoid", "renormalise": False}).describe(9)
    moe: Any = decoder.blocks[1].ffn
    wanted = Router(experts=4, top_k=2, score="sigmoid", renormalise=False)
    assert moe.router == wanted
    with pytest.raises(ValueError, match=r"router\.score is 'sigmoid', expected"):
        registry.family_of(decoder)


def test_a_router_without_its_kind_is_the_one_that_older_descriptions_mean() -> None:
    decoder = model_of("mixtral").describe(9)
    plain = decoder.model_dump()
    for block in plain["stacks"][0]["blocks"]:
        assert block["ffn"]["router"].pop("kind") == "topk"
    assert Decoder.model_validate(plain) == decoder


def test_a_decoder_of_no_family_is_told_why() -> None:
    decoder = model_of("olmoe").describe(100)
    odd = decoder.model_copy(
        update={"stacks": (*decoder.stacks, *model_of("mixtral").describe(9).stacks)}
    )
    with pytest.raises(ValueError, match="cannot be written") as caught:
        registry.family_of(odd)
    for said in ("mixtral", "olmoe", "deepseek_v3", r"layers[0].attention.qk_norm"):
        assert said in str(caught.value)


def test_the_start_of_weights_is_no_part_of_a_family() -> None:
    decoder = model_of("olmoe").describe(100).model_copy(update={"init_out_scale": 0.5})
    assert registry.family_of(decoder).model_type == "olmoe"


def test_custom_is_the_whole_description() -> None:
    decoder = model_of("mixtral").describe(100)
    data = {"family": "custom", "decoder": decoder.model_dump()}
    model: Any = MODEL.kinds["custom"].model_validate(data)
    assert model.describe(64) == decoder
    with pytest.raises(ValueError, match=r"model\.decoder\.vocab is 100"):
        model.describe(101)


def test_a_run_file_may_leave_the_family_out_where_it_says_from(tmp_path: Path) -> None:
    name = tmp_path / "olmoe-1b"
    name.mkdir()
    config = registry.families()["olmoe"].to_hf(model_of("olmoe").describe(600))
    (name / "config.json").write_text(json.dumps(config))
    run = load_run("tiny", [f"model={{from: '{name}', balance: [{{kind: z}}]}}"])
    assert isinstance(run.model, folder.Folder)
    decoder = run.decoder
    assert decoder.vocab == 600
    moe = decoder.blocks[0].ffn
    assert isinstance(moe, Moe)
    assert [t.kind for t in moe.balance] == ["z"]  # type: ignore[attr-defined]

    data = run.model_dump() | {"model": {"from": str(tmp_path / "olmoe-1")}}
    verdict = check(Run, data)
    assert [(v.path, v.nearest) for v in verdict.violations] == [(("model", "from"), str(name))]


def test_a_family_is_a_table() -> None:
    """At most 80 lines; what it is made of stands once, in sizes, fields and names."""
    for family in registry.families().values():
        lines = Path(inspect.getfile(family)).read_text("utf-8").splitlines()
        assert len(lines) <= 80, family.model_type


@pytest.mark.parametrize("family", registry.families().values(), ids=lambda f: f.model_type)
def test_no_two_tensors_share_a_name(family: type[Family]) -> None:
    # Of a layer with a delta net the names are those of one with attention.
    twice = any(row.param.endswith("q_taps") for row in family.tensors)
    other = tuple(f"attention.{n}.weight" for n in ("q", "o", "out_gate")) if twice else ()
    for layout in ("per_expert", "packed"):
        names: list[str] = []
        for row in family.tensors:
            if row.param.endswith(other):
                continue
            shape = (3, 2, 4, 5) if row.param.endswith("experts.w_in") else (3, 4, 5)
            shape = shape if len(row.hf_names) == 1 or "{e}" in row.hf_names[0] else (2, 4, 5)
            if row.joined[1:2] != (row.param,) and row.param not in row.joined[2:]:
                names += [p.name for p in pieces(row, 7, shape, layout)]  # type: ignore[arg-type]
        assert len(set(names)) == len(names)
        assert not [n for n in names if "{" in n]


def test_pieces_fill_a_parameter_once_in_either_layout() -> None:
    table = registry.families()["mixtral"].tensors
    ours = "layers.2.moe.experts.w_in"
    ((row, layer),) = find_mappings(table, [ours]).values()
    assert layer == 2
    apart = pieces(row, layer, (3, 2, 4, 5), "per_expert")
    assert [p.index for p in apart] == [(e, g) for e in range(3) for g in range(2)]
    assert apart[3].name == "model.layers.2.block_sparse_moe.experts.1.w3.weight"
    assert {p.shape for p in apart} == {(4, 5)}
    (whole,) = pieces(row, layer, (3, 2, 4, 5), "packed")
    assert whole.shape == (3, 8, 5)
    assert (whole.name, whole.index) == ("model.layers.2.mlp.experts.gate_up_proj", ())
    assert detect_layout(row, layer, {whole.name: 0}) == (row, "packed")
    assert detect_layout(row, layer, {apart[0].name: 0}) == (row, "per_expert")


def test_a_parameter_without_a_name_is_refused() -> None:
    table = registry.families()["mixtral"].tensors
    with pytest.raises(ValueError, match=r"layers\.0\.attention\.q_norm\.weight, layers\.1\.odd"):
        find_mappings(table, ["layers.1.odd", "norm.weight", "layers.0.attention.q_norm.weight"])


def test_an_editor_accepts_from_without_the_family() -> None:
    whole = json_schema(Run)
    model = whole["$defs"]["Run"]["properties"]["model"]
    schema = {"$defs": whole["$defs"], **model}
    jsonschema.validate({"from": "./folder"}, schema)
    jsonschema.validate({"family": "folder", "from": "./folder"}, schema)
    jsonschema.validate({"family": "mixtral", **MODELS["mixtral"]}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"family": "olmoe", "from": "./folder"}, schema)


@pytest.mark.parametrize("base", [LowRankDeltaNet, BoundedDeltaNet])
def test_fields_that_a_subclass_adds_to_a_delta_net_reach_it(base: type[ChannelDeltaNet]) -> None:
    # No type checker follows a base that is known only as the test runs.
    class Additive(base):  # type: ignore[misc, valid-type]
        def made(self, heads: int, **own: Any) -> DeltaNet:
            return super().build(heads, delta=False, **own)

    net, plain = Additive(head_dim=8).made(2), base(head_dim=8).build(2)
    assert net == plain.model_copy(update={"delta": False})


def test_a_router_can_be_chosen_by_an_override_under_any_family() -> None:
    router = load_run("tiny", ["model.router.score=sigmoid"]).model.router  # type: ignore[attr-defined]
    assert router.score == "sigmoid"
    with pytest.raises(RunError) as caught:
        load_run("tiny", ["model.ruter.score=sigmoid"])
    (item,) = caught.value.violations
    assert (item.path, item.nearest) == (("model", "ruter"), Rename("router"))
    assert item.where == "model.ruter.score=sigmoid"
