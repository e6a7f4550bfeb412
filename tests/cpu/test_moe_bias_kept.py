"""The selection bias is saved, converted and, where its router is frozen, left as it is."""

from pathlib import Path

import torch
from torch import Tensor

from moefold.convert.exporter import export_folder
from moefold.convert.importer import import_folder
from moefold.training.trainer import Trainer
from tests.cpu.hubs import decoder_of, same_bits, weights_of
from tests.cpu.runs import job_of

MODEL = {
    "family": "deepseek_v3",
    "shape": {
        "hidden": 16,
        "layers": 3,
        "heads": 2,
        "experts": 4,
        "top_k": 2,
        "expert_width": 16,
        "dense_layers": 1,
        "q_rank": 8,
        "kv_rank": 8,
        "nope_dim": 4,
        "rope_dim": 4,
        "v_dim": 4,
    },
    "groups": {"count": 2, "keep": 1},
    "balance": [{"kind": "bias", "rate": 0.01}],
}


def biases(job: Trainer) -> list[Tensor]:
    found = [mixture.router.selection_bias for _, mixture in job.model.moe_layers()]
    assert len(found) == 2
    return [bias_E for bias_E in found if bias_E is not None]


def test_a_checkpoint_holds_the_bias(tmp_path: Path) -> None:
    """It comes back to the bit, and moves on from there."""
    with job_of(tmp_path, model=MODEL) as job:
        for _ in range(3):  # an odd number of moves of one size never ends at zero
            job.step()
        job.save()
        kept = [bias_E.clone() for bias_E in biases(job)]
    assert all(bias_E.any() for bias_E in kept)
    with job_of(tmp_path, model=MODEL) as job:
        assert job.step_number == 3
        assert [same_bits(a, b) for a, b in zip(biases(job), kept, strict=True)] == [True, True]


def test_a_folder_holds_the_bias(tmp_path: Path) -> None:
    decoder = decoder_of("deepseek_v3")
    weights = weights_of(decoder)
    names = [name for name in weights if name.endswith("selection_bias")]
    export_folder(decoder, weights, tmp_path / "out", dtype="bfloat16")
    with import_folder(tmp_path / "out") as found:
        assert len(names) == 2 and all(weights[name].any() for name in names)
        assert all(same_bits(found.tensors[name], weights[name]) for name in names)


def test_a_frozen_router_keeps_its_bias(tmp_path: Path) -> None:
    with job_of(tmp_path, model=MODEL) as job:
        (_, first), (_, second) = job.model.moe_layers()
        first.router.weight.requires_grad_(False)
        before = [bias_E.clone() for bias_E in biases(job)]
        for _ in range(5):
            for mixture in (first, second):
                mixture.balance.counters.load_E.copy_(torch.tensor([9, 0, 4, 3]))
                mixture.balance.finish_step(mixture.router)
        assert torch.equal(biases(job)[0], before[0])
        assert not torch.equal(biases(job)[1], before[1])
