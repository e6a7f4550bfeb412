"""Counts of built models: full-size ones on the meta device, against published numbers."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moefold.model.decoder import DecoderModel
from moefold.planner.count import count
from tests.cpu.small import GQA, MLA, decoder, moe
from tests.model_counts import Tally, tally, total
from tests.published import FAMILIES, qk_norms, reference
from tests.published import decoder as published

MODELS = reference()["models"]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_built_model_counts_as_published(name: str) -> None:
    """Parameters, active ones and FLOPs, of the full size. Plant: count every expert's products."""
    want = MODELS[name]
    model = DecoderModel(published(name), device="meta")
    found = total(tally(model))
    assert found.parameters == want["hf_params_exact"]["total"]
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.active - qk_norms(name) == want["megatron_params"]["active"]
    for length, (per_sequence, per_token) in want["flops"].items():
        assert found.flops(int(length)) == per_sequence == per_token * int(length)
    bias = want["hf_params_exact"]["correction_bias_buffers"]
    biases = [m.router.selection_bias for _, m in model.moe_layers()]
    assert sum(b.numel() for b in biases if b is not None) == bias


@pytest.mark.parametrize("name", FAMILIES)
def test_the_two_counts_agree(name: str) -> None:
    record = published(name)
    built, planned = total(tally(DecoderModel(record, device="meta"))), count(record)
    assert built.parameters == planned.parameters
    assert built.active == planned.active_parameters
    for length in (1, 777, 4096):
        for causal in (True, False):
            assert built.flops(length, causal) == planned.flops([length], causal)


@pytest.mark.parametrize("attention", [GQA, MLA, MLA.model_copy(update={"q_rank": None})])
@pytest.mark.parametrize("tied", [False, True])
def test_the_two_counts_agree_on_uneven_shapes(attention: object, tied: bool) -> None:
    record = decoder(attention, tied=tied)  # type: ignore[arg-type]
    built, planned = total(tally(DecoderModel(record, device="meta"))), count(record)
    assert (built.parameters, built.active) == (planned.parameters, planned.active_parameters)
    assert built.flops(96) == planned.flops([96])


class NewTensors(TorchDispatchMode):
    """Notes the device of every tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.devices |= {t.device.type for t in tree_leaves(out) if isinstance(t, Tensor)}
        return out


def test_a_full_size_model_on_the_meta_device_takes_no_memory_and_little_time() -> None:
    """671 billion parameters; the bound on time is loose, since machines are busy."""
    started = time.perf_counter()
    with NewTensors() as new:
        model = DecoderModel(published("deepseek-v3"), device="meta")
    assert time.perf_counter() - started < 20
    assert new.devices == {"meta"}
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"meta"}


def test_counts_are_told_module_by_module() -> None:
    record = decoder(GQA, moe())
    found = tally(DecoderModel(record, device="meta"))
    assert found["embed"] == Tally(64 * 16, 64 * 16, 0)
    assert found["head"] == Tally(64 * 16, 64 * 16, 64 * 16)
    assert found["layers.0.attention"] == Tally(attended=2 * 4 * 8)
    assert found["layers.0.attention.q"].multiplied == 16 * 32
    assert found["layers.0.attention.q_norm"] == Tally(8, 8, 0)
    assert found["layers.0.moe.router"] == Tally(8 * 16, 8 * 16, 0)
    all_experts = 8 * 3 * 16 * 32
    assert found["layers.0.moe.experts"] == Tally(all_experts, all_experts // 4, all_experts // 4)


def test_an_attention_that_cannot_be_counted_is_refused() -> None:
    model = DecoderModel(decoder(GQA, moe()), device="meta")
    model.layers["0"].attention = nn.Linear(16, 16, device=torch.device("meta"))
    with pytest.raises(ValueError, match=r"layers\.0\.attention \(Linear\) has no projections"):
        tally(model)
