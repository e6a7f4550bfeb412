"""Adapters of experts as PEFT writes them, now and where each expert had linear layers."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moefold import api
from moefold.convert.adapter import AdapterTensors
from moefold.files import read_json, write_json
from moefold.model.families.folder import read_config
from moefold.model.families.peft import CONFIG, TENSORS
from moefold.model.families.peft_reading import read_adapter
from tests.cpu.families import reference, wide
from tests.cpu.hubs import same_bits
from tests.cpu.test_adapters_peft import IDS, tuned
from tests.family_draws import draw

pytestmark = [
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*target_parameters.*"),
]
PREFIX = "base_model.model."


def base_of(family: str, folder: Path, **sizes: Any) -> Any:
    """Write a drawn model; return it in fp64."""
    config = draw(family, Random(f"peft {family}")) | sizes
    model = reference(family, config, 6)
    model.save_pretrained(folder)
    return model.double().eval()


def logits_of(model: Any) -> Tensor:
    """Return what transformers computes, router included, in fp64."""
    with torch.no_grad(), wide(model):
        return model(IDS).logits


def name_base(adapter: Path, base: Path, **settings: Any) -> Path:
    """Let an adapter name its base's folder."""
    named = {"base_model_name_or_path": str(base)}
    write_json(adapter / CONFIG, read_json(adapter / CONFIG) | named | settings)
    return adapter


BOTH = ["experts.gate_up_proj", "experts.down_proj"]
OF_PEFT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt_oss": ("gpt_oss", {}, {"r": 2, "target_parameters": BOTH}),
    "gpt_oss square": (
        "gpt_oss",
        {"hidden_size": 16, "intermediate_size": 16},
        {"r": 2, "target_parameters": BOTH[1:]},
    ),
    "gpt_oss attention too": (
        "gpt_oss",
        {},
        {"r": 3, "target_modules": ["q_proj", "o_proj"], "target_parameters": BOTH,
         "use_rslora": True, "lora_alpha": 5},
    ),
    "gpt_oss patterns": (
        "gpt_oss",
        {},
        {"r": 2, "target_parameters": BOTH, "rank_pattern": {"experts.down_proj": 3},
         "alpha_pattern": {r"layers\.0\.mlp\.experts\.gate_up_proj": 11}},
    ),
    "llama4_text": ("llama4_text", {}, {"r": 2, "target_parameters": BOTH}),
    "llama4_text one": ("llama4_text", {}, {"r": 2, "target_parameters": BOTH[:1]}),
    "qwen3_moe": (
        "qwen3_moe",
        {},
        {"r": 2, "target_modules": ["v_proj"], "target_parameters": [*BOTH, "mlp.gate.weight"]},
    ),
    "qwen3_next joined": (
        "qwen3_next",
        {},
        {"r": 2, "target_modules": ["q_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"]},
    ),
    "granitemoeshared joined": (
        "granitemoeshared",
        {},
        {"r": 2, "target_modules": ["q_proj", "input_linear", "output_linear"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OF_PEFT)
def test_adapters_give_the_logits_of_pefts_merged_model(case: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs the package peft")
    family, sizes, settings = OF_PEFT[case]
    model = base_of(family, tmp_path / "base", **sizes)
    plain = logits_of(model)
    config = peft.LoraConfig(**({"target_modules": [], "lora_alpha": 4} | settings))
    adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    draws = torch.Generator().manual_seed(3)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            weight.data = torch.randn(weight.shape, generator=draws).double() * 0.2
    adapted.float().save_pretrained(str(tmp_path / "adapter"))
    want = logits_of(adapted.double().merge_and_unload())
    assert (want - plain).abs().max() > 0.02
    adapter = name_base(tmp_path / "adapter", tmp_path / "base")
    found = api.load_model(adapter, "float64").logits(IDS)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5)


# ------------------------------------------------------------- a linear layer for each expert


def linear_adapter(
    base: Path, names: Mapping[str, tuple[int, float]], **settings: Any
) -> dict[str, Tensor]:
    """Write an adapter of linear layers, given (rank, scale) by name; return merged weights."""
    held = load_file(base / "model.safetensors")
    stored: dict[str, Tensor] = {}
    draws = torch.Generator().manual_seed(4)
    for name, (rank, scale) in names.items():
        out, into = held[f"{name}.weight"].shape
        a = torch.randn((rank, into), generator=draws) * 0.2
        b = torch.randn((out, rank), generator=draws) * 0.2
        stored |= {f"{PREFIX}{name}.lora_A.weight": a, f"{PREFIX}{name}.lora_B.weight": b}
        merged = held[f"{name}.weight"].double() + scale * (b.double() @ a.double())
        held[f"{name}.weight"] = merged
    folder = base.parent / "adapter"
    folder.mkdir()
    save_file(stored, folder / TENSORS, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "peft_version": "0.17.1"}))
    name_base(folder, base, **settings)
    return held


def of_experts(base: Path, *leaves: str) -> list[str]:
    """Return the names of linear layers whose last parts are among ``leaves``."""
    held = load_file(base / "model.safetensors")
    names = (name.removesuffix(".weight") for name in held if name.endswith(".weight"))
    return sorted(name for name in names if name.rpartition(".")[2] in leaves)


GATED = ("gate_proj", "up_proj", "down_proj")


def linear_cases(base: Path, case: str) -> tuple[dict[str, tuple[int, float]], dict[str, Any]]:
    """Return (rank, scale) by name, and the settings that say so."""
    leaves = ("w1", "w2", "w3") if case == "mixtral" else GATED
    settings: dict[str, Any] = {"r": 2, "lora_alpha": 3, "target_modules": list(leaves)}
    if case == "rslora":
        names = of_experts(base, *leaves, "q_proj")
        return dict.fromkeys(names, (2, 3 / math.sqrt(2))), settings | {"use_rslora": True}
    if case == "patterns":
        ranks = {"gate_proj": (2, 1.5), "up_proj": (3, 4 / 3), "down_proj": (2, 7 / 2)}
        patterns = {"rank_pattern": {"up_proj": 3}}
        patterns |= {"alpha_pattern": {"up_proj": 4, r"mlp\..*down_proj": 7}}
        sizes = {name: ranks[name.rpartition(".")[2]] for name in of_experts(base, *leaves)}
        return sizes, settings | patterns
    if case == "some experts":
        names = [name for name in of_experts(base, *leaves) if ".experts.1." in name]
        return dict.fromkeys(names, (2, 1.5)), settings
    if case == "gate alone":
        return dict.fromkeys(of_experts(base, "gate_proj"), (2, 1.5)), settings
    names = of_experts(base, *leaves, *(("gate",) if case == "router" else ()))
    return dict.fromkeys(names, (2, 1.5)), settings


LINEAR = {
    "mixtral": "mixtral",
    "qwen3_moe": "qwen3_moe",
    "rslora": "qwen3_moe",
    "patterns": "qwen3_moe",
    "some experts": "olmoe",
    "gate alone": "deepseek_v3",
    "router": "deepseek_v3",
}


@pytest.mark.parametrize("case", LINEAR)
def test_linear_layers_of_experts_are_merged(case: str, tmp_path: Path) -> None:
    """As the sums of weights; and where PEFT converts such adapters itself, with its logits."""
    base = tmp_path / "base"
    # PEFT converts adapters of experts, and loses those of dense feed-forwards beside them.
    alone = {"mlp_only_layers": [], "decoder_sparse_step": 1} if case == "qwen3_moe" else {}
    model = base_of(LINEAR[case], base, **alone)
    sizes, settings = linear_cases(base, case)
    merged = linear_adapter(base, sizes, **settings)
    save_file(merged, base.parent / "merged.safetensors")
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "config.json").write_text((base / "config.json").read_text())
    save_file(merged, tmp_path / "whole" / "model.safetensors", {"format": "pt"})
    want = api.load_model(tmp_path / "whole", "float64").logits(IDS)
    found = api.load_model(tmp_path / "adapter", "float64").logits(IDS)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5)
    assert (found - api.load_model(base, "float64").logits(IDS)).abs().max() > 0.02
    if case in ("mixtral", "qwen3_moe"):
        peft = pytest.importorskip("peft", reason="needs the package peft")
        adapted = peft.PeftModel.from_pretrained(
            model, str(tmp_path / "adapter"), autocast_adapter_dtype=False
        )
        theirs = logits_of(adapted.merge_and_unload())
        torch.testing.assert_close(found, theirs, rtol=0, atol=1e-5)


def test_linear_layers_of_gpt_oss_are_those_of_its_interleaved_matrices(tmp_path: Path) -> None:
    """Unsloth loads each expert as linear layers with gate and up in turn, as they are stored."""
    base, folder = tmp_path / "base", tmp_path / "adapter"
    base_of("gpt_oss", base)
    held = load_file(base / "model.safetensors")
    stored = {}
    for name in [n for n in held if n.endswith(("gate_up_proj", "down_proj"))]:
        for expert, matrix in enumerate(held[name]):
            into, out = matrix.shape
            a, b = torch.randn(2, into) * 0.2, torch.randn(out, 2) * 0.2
            at = f"{PREFIX}{name}s.{expert}.lora_"
            stored |= {f"{at}A.weight": a, f"{at}B.weight": b}
            matrix += 1.5 * (b @ a).T
    folder.mkdir()
    save_file(stored, folder / TENSORS)
    write_json(folder / CONFIG, {"peft_type": "LORA", "r": 2, "lora_alpha": 3})
    name_base(folder, base)
    save_file(held, base / "merged.safetensors", {"format": "pt"})
    found = api.load_model(folder, "float64").logits(IDS)
    (base / "merged.safetensors").rename(base / "model.safetensors")
    torch.testing.assert_close(
        found, api.load_model(base, "float64").logits(IDS), rtol=0, atol=1e-5
    )


def test_linear_layers_of_experts_are_trained_further_and_go_out(tmp_path: Path) -> None:
    """With the sizes of the folder; PEFT gives what was trained."""
    first = {"kind": "lora", "rank": 2, "targets": ["attention"]}
    with tuned(tmp_path, "none", first, train={"steps": 3}) as job:
        plain = job.model.logits(IDS)
    hub = tmp_path / "hub"
    names = of_experts(hub, "q_proj", *GATED)
    names += of_experts(hub, "w1", "w2", "w3")
    linear_adapter(hub, dict.fromkeys(names, (2, 1.5)), r=2, lora_alpha=3)
    start = {"kind": "lora", "from": str(tmp_path / "adapter")}
    with pytest.raises(ValueError, match=r"stored takes ranks|must name the"):
        tuned(tmp_path, "no", start)
    with tuned(tmp_path, "out", start | {"rank": "stored"}, train={"steps": 3}) as job:
        begun = api.load_model(tmp_path / "adapter").logits(IDS)
        torch.testing.assert_close(job.model.logits(IDS), begun, rtol=1e-4, atol=1e-4)
        assert (begun - plain).abs().max() > 0.02
        job.train()
        trained = job.model.logits(IDS)
    api.export(tmp_path / "out", tmp_path / "alone")
    found = api.load_model(tmp_path / "alone").logits(IDS)
    torch.testing.assert_close(found, trained, rtol=1e-4, atol=1e-4)
    peft = pytest.importorskip("peft", reason="needs the package peft")
    from transformers import AutoModelForCausalLM

    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(hub, **how).double()
    adapted = peft.PeftModel.from_pretrained(
        model, str(tmp_path / "alone"), autocast_adapter_dtype=False
    )
    torch.testing.assert_close(logits_of(adapted), found.double(), rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------- what is refused


@pytest.fixture
def broken(tmp_path: Path) -> Iterator[Path]:
    """An adapter of one matrix, to be broken."""
    base_of("olmoe", tmp_path / "base")
    linear_adapter(tmp_path / "base", {Q: (2, 1.5)}, r=2, lora_alpha=3)
    yield tmp_path / "adapter"


Q = "model.layers.0.self_attn.q_proj"
AT = f"{PREFIX}{Q}.lora_"
SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"r": 0}, "r 0 must be positive"),
    ({"rank_pattern": ["q_proj"]}, r"rank_pattern is \['q_proj'\]; must be an object"),
    ({"use_dora": True}, "use_dora is True, which is not supported; merge it with: python -c"),
    ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; supported: 'LORA'; merge others with"),
    ({"use_qalora": True}, "use_qalora is True"),
    ({"r": 4}, "expected .* with rank 4 in adapter_config.json; use the base model that it"),
    ({"trainable_token_indices": [1]}, r"trainable_token_indices is \[1\]"),
]


@pytest.mark.parametrize(("changes", "said"), SETTINGS)
def test_settings_that_are_not_read_are_refused(
    broken: Path, changes: dict[str, Any], said: str
) -> None:
    write_json(broken / CONFIG, read_json(broken / CONFIG) | changes)
    with pytest.raises(ValueError, match=said):
        api.load_model(broken)


NAMES: list[tuple[str, str]] = [
    (
        f"{PREFIX}lm_head.weight",
        r"is a whole weight \(modules_to_save is \['lm_head'\]\), which is",
    ),
    (f"{PREFIX}model.embed_tokens.lora_embedding_A", "adapters of an embedding are not read"),
    (f"{PREFIX}{Q}.lora_magnitude_vector.weight", "magnitudes of DoRA are not read"),
    (f"{AT}A.default.weight", "has the adapter's name in it, as in a state dict"),
    (f"{PREFIX}model.layers.0.self_attn.k_proj.lora_A.weight", "is without its B; copy the file"),
    (f"{PREFIX}{Q}.token_adapter.trainable", "matches no weight of the base model"),
]


@pytest.mark.parametrize(("name", "said"), NAMES)
def test_tensors_that_are_not_read_are_refused_by_name(broken: Path, name: str, said: str) -> None:
    held = load_file(broken / TENSORS)
    save_file(held | {name: torch.zeros(2, 2)}, broken / TENSORS)
    write_json(broken / CONFIG, read_json(broken / CONFIG) | {"modules_to_save": ["lm_head"]})
    with pytest.raises(ValueError, match=f"{name}.*{said}"):
        api.load_model(broken)


def test_damaged_files_and_values_are_refused_with_their_file(broken: Path) -> None:
    held = load_file(broken / TENSORS)
    for value, said in ((torch.nan, "NaN"), (torch.inf, "an infinity")):
        sick = held[f"{AT}B.weight"].clone()
        sick[1, 1] = value
        save_file(held | {f"{AT}B.weight": sick}, broken / TENSORS)
        with pytest.raises(ValueError, match=rf"{TENSORS}:\s+{AT}B.weight contains {said}"):
            api.load_model(broken)
    save_file(held, broken / TENSORS)
    content = (broken / TENSORS).read_bytes()
    for cut in (4, 60, len(content) - 1):
        (broken / TENSORS).write_bytes(content[:cut])
        with pytest.raises(ValueError, match=f"{TENSORS} is not a complete safetensors file"):
            api.load_model(broken)
    (broken / TENSORS).unlink()
    with pytest.raises(ValueError, match=f"has {CONFIG} but no {TENSORS}; copy that file too"):
        api.load_model(broken)


def test_unread_fields_and_files_beside_an_adapter_are_said(broken: Path) -> None:
    write_json(broken / CONFIG, read_json(broken / CONFIG) | {"new_switch": 1})
    (broken / "adapter_model.bin").touch()
    decoder = read_config(broken.parent / "base").decoder
    with closing(AdapterTensors(read_adapter(broken, decoder))) as found:
        (field, file) = found.peft.notes
        (name,) = found.peft.adapters
        assert same_bits(found[f"{name}_lora_a"], load_file(broken / TENSORS)[f"{AT}A.weight"])
    assert field.endswith("not read: new_switch") and "adapter_model.bin is not read" in file
