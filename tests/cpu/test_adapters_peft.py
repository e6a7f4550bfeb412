"""Adapters in PEFT's format, there and back, on their base and on no other."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moefold import api
from moefold.config.errors import RunError, dotted
from moefold.config.load import load
from moefold.convert.adapter import AdapterTensors, write_adapter
from moefold.convert.importer import import_folder
from moefold.convert.source import ConvertError
from moefold.files import read_json, write_json
from moefold.model.config import Decoder, LowRank, to_stacks
from moefold.model.decoder import DecoderModel
from moefold.model.families.folder import read_config
from moefold.model.families.peft import CONFIG, TENSORS
from moefold.model.families.peft_reading import read_adapter
from moefold.model.families.registry import from_hf
from moefold.run import Run
from moefold.spec.decoder import LORA_B
from moefold.training.trainer import Trainer
from tests.cpu.families import fill, places, stored_value
from tests.cpu.hubs import on_disk, same_bits, weights_of, write_hub
from tests.cpu.runs import job_of, raw_run

PEFT = Path(__file__).parents[1] / "data" / "peft"
IDS = torch.arange(24).view(2, 12)
KINDS = ("whole", "down")


def adapted(decoder: Decoder, adapters: Mapping[str, LowRank]) -> Decoder:
    """Return a decoder with adapters of these weights."""

    def of(at: str) -> tuple[LowRank, ...]:
        held = ((n.removeprefix(at), one) for n, one in adapters.items() if n.startswith(at))
        return tuple(one.model_copy(update={"weight": name}) for name, one in held)

    blocks = (
        block.model_copy(update={"adapters": of(f"layers.{number}.")})
        for number, block in enumerate(decoder.blocks)
    )
    outside = tuple(one for name, one in adapters.items() if not name.startswith("layers."))
    return decoder.model_copy(update={"stacks": to_stacks(blocks), "adapters": outside})


@contextmanager
def stored(folder: Path) -> Iterator[AdapterTensors]:
    """Open one of PEFT's adapters of the stored base."""
    found = AdapterTensors(read_adapter(folder, from_hf(read_json(PEFT / "config.json")).decoder))
    with closing(found):
        yield found


def base_model() -> DecoderModel:
    """Return the stored base in fp64."""
    reading = from_hf(read_json(PEFT / "config.json"))
    model = DecoderModel(reading.decoder, "fp64")
    shapes = {piece.name: piece.shape for _, piece in places(model, reading.model)}
    fill(model, reading.model, {n: stored_value(n, shape) for n, shape in shapes.items()})
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_peft_gives_its_logits(kind: str) -> None:
    base = base_model()
    with stored(PEFT / kind) as held:
        model = DecoderModel(adapted(base.record, held.peft.adapters), "fp64")
        values = dict(base.named_parameters()) | dict(base.named_buffers())
        with torch.no_grad():
            for name, target in (*model.named_parameters(), *model.named_buffers()):
                target.copy_(held[name] if "_lora_" in name else values[name])
    want = load_file(PEFT / f"{kind}.safetensors")["logits"]
    found = model.logits(IDS)
    assert (want - base.logits(IDS)).abs().max() > 0.05
    torch.testing.assert_close(found, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_go_to_peft_bit_for_bit(kind: str, tmp_path: Path) -> None:
    decoder = base_model().record
    with stored(PEFT / kind) as held:
        write_adapter(decoder, held.peft.adapters, held, tmp_path / "out", ("base", "id"))
        want, found = (load_file(at / TENSORS) for at in (PEFT / kind, tmp_path / "out"))
        assert want.keys() == found.keys()
        assert all(same_bits(want[name], found[name]) for name in want)
        with stored(tmp_path / "out") as back:
            assert back.peft.adapters == held.peft.adapters and back.peft.identity == "id"
            assert all(same_bits(back[name], held[name]) for name in held)
    said, theirs = (read_json(at / CONFIG) for at in (tmp_path / "out", PEFT / kind))
    assert set(said["target_parameters"]) == set(theirs["target_parameters"])
    assert set(said["target_modules"]) == set(theirs["target_modules"])


def turned(source: Path, folder: Path, release: str) -> Path:
    """Write an adapter of experts as releases before 0.19.1 did: of the transposed matrices."""
    shutil.copytree(source, folder)
    write_json(folder / CONFIG, read_json(source / CONFIG) | {"peft_version": release})
    held = load_file(source / TENSORS)
    for name in [n for n in held if ".experts." in n and "lora_A" in n]:
        other, experts = name.replace("lora_A", "lora_B"), 4
        a, b = held[name].unflatten(0, (experts, -1)), held[other].unflatten(1, (-1, experts))
        held[name] = b.permute(2, 1, 0).flatten(0, 1).contiguous()  # [E * r, out]
        held[other] = a.permute(2, 1, 0).flatten(1).contiguous()  # [in, r * E]
        # What that release computed: "o r e, e r i -> e i o".
        new = torch.einsum("ore,eri->eoi", b, a)
        older = held[name].unflatten(0, (experts, -1)), held[other].unflatten(1, (-1, experts))
        torch.testing.assert_close(torch.einsum("ore,eri->eio", older[1], older[0]), new)
    save_file(held, folder / TENSORS)
    return folder


def test_adapters_of_older_releases_are_of_the_transposed_matrix(tmp_path: Path) -> None:
    with (
        stored(PEFT / "whole") as held,
        stored(turned(PEFT / "whole", tmp_path / "old", "0.18.1")) as old,
    ):
        assert held.peft.adapters == old.peft.adapters
        assert all(same_bits(held[name], old[name]) for name in held)


def test_of_square_experts_the_release_tells(tmp_path: Path) -> None:
    said = read_json(PEFT / "config.json") | {"moe_intermediate_size": 16}
    decoder = from_hf(said).decoder
    name = "layers.1.moe.experts.w_out"
    own = {name: LowRank(weight=name, rank=2, scale=1.0)}
    tensors = {name + "_lora_a": torch.randn(4, 2, 16), name + LORA_B: torch.randn(4, 16, 2)}
    write_adapter(decoder, own, tensors, tmp_path / "new", ("base", "id"))
    for release, same in (("0.21.2", True), ("0.19.1", True), ("0.19.0", False), ("0.18.0", False)):
        folder = turned(tmp_path / "new", tmp_path / release, release)
        with closing(AdapterTensors(read_adapter(folder, decoder))) as found:
            assert torch.equal(found[name + LORA_B], tensors[name + LORA_B]) != same


def based(tmp_path: Path, kind: str, seed_of: int = 0) -> Path:
    """Write a base, and one of PEFT's adapters that names it."""
    decoder = from_hf(read_json(PEFT / "config.json")).decoder
    values = {n: v * (1 + seed_of) for n, v in weights_of(decoder).items()}
    write_hub(tmp_path / "base", decoder, on_disk(decoder, values))
    shutil.copytree(PEFT / kind, tmp_path / "adapter")
    config = tmp_path / "adapter" / CONFIG
    write_json(config, read_json(config) | {"base_model_name_or_path": str(tmp_path / "base")})
    return tmp_path / "adapter"


def test_an_adapters_folder_is_its_base_and_the_scaled_product_in_it(tmp_path: Path) -> None:
    folder = based(tmp_path, "whole")
    raw = load_file(folder / TENSORS)
    with import_folder(tmp_path / "base") as base, import_folder(folder) as found:
        for name in base.tensors:
            more = found.tensors[name] - base.tensors[name]
            if not name.startswith("layers.1.moe.experts."):
                assert bool(more.any()) == (name in found.adapter.peft.adapters)  # type: ignore[union-attr]
                continue
            at = "base_model.model.model.layers.1.mlp.experts" + ".base_layer" * ("w_in" in name)
            a, b = (raw[f"{at}.lora_{which}.weight"] for which in "AB")
            want = torch.einsum("ore,eri->eoi", b.view(-1, 2, 4), a.view(4, 2, -1)) * (4 / 2)
            torch.testing.assert_close(more, want.view(more.shape), rtol=1e-4, atol=1e-6)
        box = ((1, 3), (0, 2), (2, 5), (4, 9))
        cut = tuple(slice(*at) for at in box)
        name = "layers.1.moe.experts.w_in"
        torch.testing.assert_close(found.tensors.read_box(name, box), found.tensors[name][cut])


def edited(folder: Path, **changes: Any) -> None:
    """Change an adapter's settings."""
    write_json(folder / CONFIG, read_json(folder / CONFIG) | changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"init_lora_weights": "olora"}, "'olora', which changes the base model; save"),
        ({"alora_invocation_tokens": [1, 2]}, r"alora_invocation_tokens is \[1, 2\]"),
        ({"r": 5}, r"lora_A.weight and B have shapes \(\(3, 8\), \(16, 3\)\), expected"),
        ({"r": None}, "r None must be"),
        ({"r": True}, "r True must be"),
        ({"lora_alpha": -4}, "lora_alpha -4 must be positive"),
        ({"rank_pattern": {"(": 3}}, "not a valid regular expression"),
        ({"base_model_name_or_path": "org/base"}, "'org/base', which is not a local Hugging Face"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    ],
)
def test_what_is_no_adapter_of_the_base_is_refused(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = based(tmp_path, "whole")
    edited(folder, **changes)
    with pytest.raises(ValueError, match=said):
        import_folder(folder)


@pytest.mark.parametrize("shape", [(-1,), (8, -1, 1)])
def test_tensors_that_are_no_matrices_are_named(shape: tuple[int, ...], tmp_path: Path) -> None:
    folder = based(tmp_path, "down")
    held = load_file(folder / TENSORS)
    name = next(name for name in held if "lora_A" in name)
    save_file(held | {name: held[name].reshape(shape)}, folder / TENSORS)
    with pytest.raises(ValueError, match=rf"{name} and B have .* expected"):
        import_folder(folder)


def test_tensors_without_a_place_are_named(tmp_path: Path) -> None:
    folder = based(tmp_path, "down")
    held = load_file(folder / TENSORS)
    other = {f"base_model.model.model.other.lora_{which}.weight": IDS.clone() for which in "AB"}
    save_file(held | other, folder / TENSORS)
    with pytest.raises(ValueError, match=r"other.lora_A.weight: matches no weight of the base"):
        import_folder(folder)
    (folder / TENSORS).write_bytes(b"\1")
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        import_folder(folder)
    (folder / TENSORS).unlink()
    (folder / "adapter_model.bin").touch()
    with pytest.raises(ValueError, match="is a pickle"):
        import_folder(folder)


# ------------------------------------------------------------------------------------- of runs

LORA = {"kind": "lora", "rank": 4, "alpha": 6.0, "targets": ["all", "router", "head"]}


def tuned(tmp_path: Path, out: str, adapter: Mapping[str, Any], **changes: Any) -> Trainer:
    """Open a run that tunes ``hub``, made where it is not there."""
    hub = tmp_path / "hub"
    if not hub.exists():
        with job_of(tmp_path, "base", train={"steps": 3}) as job:
            job.train()
        api.export(tmp_path / "base", hub)
    raw = raw_run(tmp_path, adapter=dict(adapter), **changes)
    raw["model"] = {"family": "folder", "from": str(hub)}
    raw["data"]["tokenizer"] = {"kind": "file", "path": str(hub)}
    return Trainer(load(Run, raw).record, tmp_path / out, cache=tmp_path / "prepared")


def test_a_runs_adapter_goes_out_alone_and_others_begin_as_it(tmp_path: Path) -> None:
    with tuned(tmp_path, "out", LORA, train={"steps": 3}) as job:
        with pytest.raises(ValueError, match="moefold export, with --merged"):
            list(api.export_stream(job))
        job.train()
        want, held = job.model.logits(IDS), {n: p.detach() for n, p in job.state.params.items()}
    (note,) = api.export(tmp_path / "out", tmp_path / "alone")
    assert str(tmp_path / "hub") in note
    size = sum(file.stat().st_size for file in (tmp_path / "alone").glob("*.safetensors"))
    assert size < 0.6 * (tmp_path / "hub" / "model.safetensors").stat().st_size
    found = api.load_model(tmp_path / "alone").logits(IDS)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    with tuned(tmp_path, "on", LORA | {"from": str(tmp_path / "alone")}) as job:
        for name, parameter in job.state.params.items():
            if "_lora_" in name:
                assert same_bits(parameter.detach(), held[name]), name


def test_adapters_of_another_base_rank_or_target_are_refused(tmp_path: Path) -> None:
    with tuned(tmp_path, "out", LORA, train={"steps": 3}) as job:
        job.train()
    api.export(tmp_path / "out", tmp_path / "alone")
    start = LORA | {"from": str(tmp_path / "alone")}
    nearest = {
        ("rank", 8): 4,
        ("alpha", 5.0): 6.0,
        ("targets", ("experts",)): ["attention", "experts", "router", "head"],
        ("from", str(tmp_path / "hub")): None,
    }
    for (field, value), want in nearest.items():
        asked = list(value) if isinstance(value, tuple) else value
        with pytest.raises(RunError) as caught:
            tuned(tmp_path, "no", start | {field: asked})
        first = caught.value.violations[0]
        assert (dotted(first.path), first.nearest) == (f"adapter.{field}", want)
    decoder = read_config(tmp_path / "hub").decoder
    shutil.rmtree(tmp_path / "hub")
    write_hub(tmp_path / "hub", decoder, on_disk(decoder, weights_of(decoder)))
    shutil.copy(tmp_path / "alone" / "tokenizer.json", tmp_path / "hub")
    for refused in (
        lambda: tuned(tmp_path, "no", start),
        lambda: api.load_model(tmp_path / "alone"),
    ):
        with pytest.raises(ConvertError, match="a base model with other weights than"):
            refused()
    with pytest.raises(ConvertError, match="--merged"):
        api.export(tmp_path / "out", tmp_path / "again")
    api.export(tmp_path / "out", tmp_path / "again", merged=True)


def test_an_adapter_of_no_folder_goes_out_merged_alone(tmp_path: Path) -> None:
    with job_of(tmp_path, "out", adapter={"kind": "lora", "rank": 2}) as job:
        job.save()
    with pytest.raises(ConvertError, match="not a Hugging Face folder; --merged"):
        api.export(tmp_path / "out", tmp_path / "alone")
