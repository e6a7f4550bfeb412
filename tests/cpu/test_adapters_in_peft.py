"""Adapters in ``peft`` itself, on ``transformers``: of a run, and drawn for each family."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moefold import api
from moefold.convert.adapter import write_adapter
from moefold.convert.importer import import_folder
from moefold.model.config import Decoder, LowRank
from moefold.model.decoder import DecoderModel
from moefold.model.families.folder import read_config
from moefold.model.families.peft import TENSORS, adapter_sites
from moefold.training.model_checkpoint import fill
from tests.cpu.families import reference, wide
from tests.cpu.hubs import same_bits
from tests.cpu.test_adapters_peft import IDS, LORA, adapted, tuned
from tests.family_draws import FAMILIES, draw

# PEFT 0.21 looks for ranks of parameters among modules alone, says so, and uses them all the same.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]


def in_peft(base: Path, folder: Path) -> Any:
    """Load an adapter's folder onto its base in fp64; each tensor of it must find its place."""
    # Here, as every worker collects this file, and one of them runs it: seconds for each.
    peft = pytest.importorskip("peft", reason="needs the package peft")
    from transformers import AutoModelForCausalLM

    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(base, **how).double()
    return peft.PeftModel.from_pretrained(model, str(folder), autocast_adapter_dtype=False).eval()


def logits_of(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits with the adapter, and without."""
    with torch.no_grad(), wide(model.get_base_model()):
        found = model(IDS).logits
        with model.disable_adapter():
            return found, model(IDS).logits


def test_the_adapter_of_a_run_gives_its_logits_in_peft(tmp_path: Path) -> None:
    with tuned(tmp_path, "out", LORA, train={"steps": 3}) as job:
        job.train()
        trained = job.model.logits(IDS)
    api.export(tmp_path / "out", tmp_path / "alone")
    found, without = logits_of(in_peft(tmp_path / "hub", tmp_path / "alone"))
    assert (found - without).abs().max() > 0.02
    want = api.load_model(tmp_path / "alone", "float64").logits(IDS)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-6)
    torch.testing.assert_close(found, trained.double(), rtol=1e-4, atol=1e-5)


def drawn_adapters(decoder: Decoder) -> tuple[dict[str, LowRank], dict[str, torch.Tensor]]:
    """Return adapters of all that PEFT can adapt, of two ranks and scales, and their values."""
    draws = torch.Generator().manual_seed(7)
    weights = {site.weight.name: site.weight for site in adapter_sites(decoder)}
    adapters, values = {}, {}
    for place, (name, weight) in enumerate(weights.items()):
        rank = 3 if weight.is_expert else 2
        adapters[name] = LowRank(weight=name, rank=rank, scale=(0.5, 1.25)[place % 2])
    model = DecoderModel(adapted(decoder, adapters), "fp64")
    for name, parameter in model.named_parameters():
        if "_lora_" in name:
            values[name] = torch.randn(parameter.shape, generator=draws) * 0.2
    return adapters, values


@pytest.mark.matrix
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_each_family_give_the_same_logits_in_peft(family: str, tmp_path: Path) -> None:
    """And what PEFT saves of them has the same bits."""
    base, alone = tmp_path / "base", tmp_path / "alone"
    reference(family, draw(family, Random(f"peft {family}")), 6).save_pretrained(base)
    decoder = read_config(base).decoder
    adapters, values = drawn_adapters(decoder)
    model = DecoderModel(adapted(decoder, adapters), "fp64")
    with import_folder(base) as imported:
        plain = DecoderModel(decoder, "fp64")
        fill(plain, imported.tensors)
        held = dict(plain.state_dict())
    model.load_state_dict({name: values.get(name, held.get(name)) for name in model.state_dict()})
    write_adapter(decoder, adapters, values, alone, (str(base), "id"))
    theirs = in_peft(base, alone)
    found, without = logits_of(theirs)
    assert (found - without).abs().max() > 0.05
    # Rotary angles are fp32 here and there. Where a model scales them, both round on their own.
    rounding = float((without - plain.logits(IDS).detach()).abs().max())
    assert rounding < 5e-6
    torch.testing.assert_close(found, model.logits(IDS), rtol=0, atol=max(1e-6, 4 * rounding))
    theirs.float().save_pretrained(str(tmp_path / "again"), save_embedding_layers=False)
    ours, back = (load_file(at / TENSORS) for at in (alone, tmp_path / "again"))
    assert all(same_bits(ours[name], back[name]) for name in ours)
