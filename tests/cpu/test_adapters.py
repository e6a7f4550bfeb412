"""Low-rank adapters: as their merged weights, in value and gradient; what is refused, and bytes."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from moefold import api
from moefold.config.base import Record
from moefold.config.errors import RunError, dotted
from moefold.config.load import load
from moefold.kernels.linear.dropout import Dropout
from moefold.layers.kinds.dense import Dense
from moefold.layers.linear import Adaptable
from moefold.model.config import Decoder
from moefold.model.decoder import DecoderModel
from moefold.model.init import draw_normal
from moefold.parallel.apply import single_rank_parts
from moefold.parallel.data.sharding import ShardedState
from moefold.planner.count import count
from moefold.planner.hardware import parse_cluster
from moefold.planner.memory import fullest_rank
from moefold.planner.task import task_from_run
from moefold.run import Run, load_run
from moefold.spec.decoder import LORA_A, LORA_B, model_weights
from moefold.spec.tuning import adapt, without_tuning
from moefold.training.config import ADAPTER, Lora
from moefold.training.evaluate import evaluate
from moefold.training.step import gradients
from moefold.training.trainer import Trainer
from tests.cpu.runs import job_of, raw_run, run_of
from tests.cpu.small import GQA, MLA, decoder, model_of, moe, padded_rows

LORA = Lora(rank=4, alpha=6.0, targets=("all", "router", "head"))
ROWS = padded_rows((40, 23), 3)


def adapted(record: Decoder, lora: Lora = LORA, precision: str = "fp64") -> DecoderModel:
    """Return a model whose adapters add something."""
    model = model_of(adapt(record, lora), precision)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(LORA_B):
                parameter.copy_(draw_normal(7, name, tuple(parameter.shape), 0.2))
    return model


def scale_of(model: DecoderModel, name: str) -> float:
    """Return the scale of a weight's adapter."""
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    assert isinstance(owner, Adaptable)
    return owner.adapters[leaf].scale


def merged(model: DecoderModel, name: str) -> Tensor:
    """Return ``scale * B A`` of a weight, in its shape, written as one sum of products."""
    held = dict(model.named_parameters())
    a, b = held[name + LORA_A].detach(), held[name + LORA_B].detach()
    scale = scale_of(model, name)
    lead = "ej"[: a.dim() - 2]
    if ".experts.w_in" in name:
        return scale * torch.einsum("eri,ejor->ejoi", a, b)
    return scale * torch.einsum(f"{lead}ri,{lead}or->{lead}oi", a, b)


def whole(record: Decoder, model: DecoderModel) -> DecoderModel:
    """Return the model without adapters that computes what one with them does."""
    plain = model_of(without_tuning(record))
    held = {n: p.detach().clone() for n, p in model.named_parameters() if "_lora_" not in n}
    for name in {n.removesuffix(LORA_A) for n, _ in model.named_parameters() if LORA_A in n}:
        held[name] += merged(model, name)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(held[name])
    return plain


@pytest.mark.parametrize("attention", [GQA, MLA], ids=["gqa", "mla"])
def test_adapters_compute_what_their_merged_weights_do(attention: Any) -> None:
    record = decoder(attention)
    model = adapted(record)
    plain = whole(record, model)
    found = []
    for each in (model, plain):
        data = ShardedState(single_rank_parts(each))
        figures = gradients(data, [ROWS], loss_chunk=16)
        found.append((figures.lm_loss, {n: p.grad for n, p in data.params.items()}))
    (loss, grads), (want, wholes) = found
    assert loss == pytest.approx(want, rel=1e-12)
    held, seen = dict(model.named_parameters()), 0
    for name, grad in grads.items():
        assert (grad is None) == ("_lora_" not in name)
        if not name.endswith(LORA_A):
            continue
        # The chain rule: of W + s B A.
        base, seen = name.removesuffix(LORA_A), seen + 1
        a, b, dw = held[name].detach(), held[base + LORA_B].detach(), wholes[base]
        scale = scale_of(model, base)
        lead = "ej"[: a.dim() - 2]
        inner, outer = f"{lead}ri", f"{lead}or"
        if ".experts.w_in" in name:
            inner, outer, lead = "eri", "ejor", "ej"
        da = scale * torch.einsum(f"{outer},{lead}oi->{inner}", b, dw)
        db = scale * torch.einsum(f"{lead}oi,{inner}->{outer}", dw, a)
        torch.testing.assert_close(grad, da, rtol=1e-9, atol=1e-13)
        torch.testing.assert_close(grads[base + LORA_B], db, rtol=1e-9, atol=1e-13)
    assert seen == sum(w.name.endswith(LORA_A) for w in model_weights(model.record)) > 8


def test_gradients_are_those_of_what_dropout_left() -> None:
    """Along a random direction, of all adapters; evaluation leaves nothing out."""
    record = decoder(GQA, Dense(width=24), moe(balance=()))
    model = adapted(record, LORA.model_copy(update={"dropout": 0.25}))
    plain, data = adapted(record), ShardedState(single_rank_parts(model))
    trained = {n: p for n, p in data.params.items() if "_lora_" in n}
    ways = {name: draw_normal(3, name, tuple(p.shape), 1.0).double() for name, p in trained.items()}

    def loss(step: int, way: float = 0.0) -> float:
        model.precision_policy.step = step
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.add_(ways[name], alpha=way)
        found = gradients(data, [ROWS], loss_chunk=16).lm_loss
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.sub_(ways[name], alpha=way)
        return found

    slope = (loss(1, 1e-5) - loss(1, -1e-5)) / 2e-5
    first = loss(1)
    grads = [(name, p.grad) for name, p in trained.items()]
    along = sum(float((grad * ways[n]).sum()) for n, grad in grads if grad is not None)
    assert slope == pytest.approx(along, rel=1e-6)
    assert loss(1) == first and abs(loss(2) - first) > 1e-6
    ids = torch.arange(24).view(2, 12)
    assert torch.equal(model.logits(ids), plain.logits(ids))
    (total,), labels, _ = evaluate(data.parts, [ROWS], 16)
    without = gradients(ShardedState(single_rank_parts(plain)), [ROWS], loss_chunk=16).lm_loss
    assert total / labels == pytest.approx(without, rel=1e-12)


def test_dropout_leaves_its_share_out_and_keeps_the_mean() -> None:
    rows = torch.arange(400)
    drop = Dropout(0.25, (1, 7), 3, range(64), rows)
    kept = drop(torch.ones(400, 64, dtype=torch.float64))
    assert set(kept.unique().tolist()) == {0.0, 1 / 0.75}
    assert kept.mean() == pytest.approx(1, abs=0.02)
    part = drop._replace(columns=range(24, 40), number_N=rows[5:9])
    assert torch.equal(part(torch.ones(4, 16, dtype=torch.float64)), kept[5:9, 24:40])
    for other in ({"key": (2, 7)}, {"key": (1, 8)}, {"step": 4}, {"number_N": rows + 400}):
        found = drop._replace(**other)(torch.ones(400, 64))
        assert 0.3 < ((found == 0) == (kept == 0)).double().mean() < 0.7


def test_every_routed_experts_adapter_has_a_gradient() -> None:
    data = ShardedState(single_rank_parts(adapted(decoder())))
    gradients(data, [ROWS], loss_chunk=16)
    for name, parameter in data.params.items():
        if ".experts." in name and parameter.grad is not None:
            assert (parameter.grad.flatten(1).norm(dim=1) > 0).all(), name


def test_adapters_begin_by_adding_nothing() -> None:
    record = adapt(decoder(), LORA)
    model = model_of(record)
    plain = whole(decoder(), model)
    for name, parameter in model.named_parameters():
        assert not name.endswith(LORA_B) or not parameter.any()
    ids = torch.arange(24).view(2, 12)
    assert torch.equal(model.logits(ids), plain.logits(ids))


@pytest.mark.parametrize("experts", ["loop", "grouped"])
def test_adapters_in_bf16_are_near_those_in_fp64(experts: str) -> None:
    record = decoder()
    ids = torch.arange(48).view(2, 24)
    want = adapted(record).logits(ids)
    found = adapted(record, precision="bf16").logits(ids).double()
    assert (found - want).norm() / want.norm() < 0.05


def test_a_divided_rank_is_that_of_experts_alone() -> None:
    lora = Lora(rank=4, targets=("all",), divided=True)
    shapes = {w.name: w.shape for w in model_weights(adapt(decoder(), lora))}
    assert shapes["layers.1.moe.experts.w_in" + LORA_A] == (8, 2, 16)
    assert shapes["layers.1.moe.shared.w_in" + LORA_A] == (2, 4, 16)


def test_targets_that_match_nothing_and_ranks_that_do_not_divide_are_refused(
    tmp_path: Path,
) -> None:
    asked = {"kind": "lora", "rank": 3, "targets": ["atention", "*.q.wieght"], "divided": True}
    with pytest.raises(RunError) as caught:
        run_of(tmp_path, adapter=asked)
    found = {dotted(one.path): one.nearest for one in caught.value.violations}
    assert found == {
        "adapter.targets[0]": "attention",
        "adapter.targets[1]": "*.q.weight",
        "adapter.rank": 4,
    }
    asked = {"kind": "lora", "dropout": 0.1}
    layout = {"graphs": "step", "dispatch": {"kind": "deep_ep"}}
    with pytest.raises(RunError, match=r"(?s)recorded step, but adapter\.dropout.*row numbers"):
        run_of(tmp_path, adapter=asked, layout=layout)


def test_an_adapter_of_a_kind_that_is_no_lora_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be left out silently; one that inherits from it is read as it is."""

    class Apart(Record):
        kind: Literal["apart"] = "apart"

    class Halved(Lora):
        # A record's tag is a type of one value, which each kind replaces.
        kind: Literal["halved"] = "halved"  # type: ignore[assignment]

        def rank_of(self, top_k: int | None) -> int:
            return super().rank_of(top_k) // 2

    monkeypatch.setattr(ADAPTER, "_kinds", dict(ADAPTER.kinds))
    for kind in (Apart, Halved):
        ADAPTER.register(kind)
    with pytest.raises(RunError, match=r"Apart must inherit from .*Lora"):
        load(Run, raw_run(tmp_path, adapter={"kind": "apart"}))
    halved = load(Run, raw_run(tmp_path, adapter={"kind": "halved", "rank": 6})).record
    assert {a.rank for block in halved.decoder.blocks for a in block.adapters} == {3}


def test_a_run_trains_its_adapters_alone(tmp_path: Path) -> None:
    asked = {"kind": "lora", "rank": 4}
    with job_of(tmp_path, "out", adapter=asked, train={"precision": "bf16"}) as job:
        before = {name: p.detach().clone() for name, p in job.state.params.items()}
        job.train()
        for name, parameter in job.state.params.items():
            assert torch.equal(before[name], parameter) != ("_lora_" in name), name


def test_a_folder_is_tuned_and_goes_out_with_its_adapters_in_it(tmp_path: Path) -> None:
    asked = {"kind": "lora", "rank": 4, "targets": ["all", "router", "head"]}
    with job_of(tmp_path, "base") as job:
        job.save()
    api.export(tmp_path / "base", tmp_path / "hub")
    raw = raw_run(tmp_path, adapter=asked)
    raw["model"] = {"family": "folder", "from": str(tmp_path / "hub")}
    raw["data"]["tokenizer"] = {"kind": "file", "path": str(tmp_path / "hub")}
    run = load(Run, raw).record
    with Trainer(run, tmp_path / "out", cache=tmp_path / "prepared") as job:
        job.train()
        ids = torch.arange(24).view(2, 12)
        want = job.model.logits(ids)
    with Trainer(run, tmp_path / "out", cache=tmp_path / "prepared") as job:
        assert job.resumed_from is not None
        assert torch.equal(want, job.model.logits(ids))
    api.export(tmp_path / "out", tmp_path / "tuned", merged=True)
    base, tuned = (api.load_model(tmp_path / name).logits(ids) for name in ("hub", "tuned"))
    torch.testing.assert_close(tuned, want, rtol=1e-4, atol=1e-5)
    assert (base - want).norm() > 100 * (tuned - want).norm()


def test_a_lora_run_of_qwen3_30b_fits_one_device_of_80_gb() -> None:
    run = load_run(
        "qwen3_30b_a3b",
        [
            "adapter={kind: lora, rank: 16}",
            "train.batch=1",
            "train.precision=bf16",
            "layout.sizes=''",
            "layout.recompute={kind: full}",
        ],
    )
    task, layout = task_from_run(run, parse_cluster("h100x1"))
    memory = fullest_rank(task.case(layout))
    weights = list(model_weights(run.decoder))
    trained = sum(w.elements for w in weights if not w.frozen)
    fixed = sum(w.elements * (2 if w.reads_compute_dtype else 4) for w in weights if w.frozen)
    assert memory.state.weights == fixed + 2 * trained
    assert memory.state.master == 4 * trained and memory.state.moments == 8 * trained
    assert memory.total < 80e9
    total = count(run.decoder)
    assert total.parameters == sum(w.elements for w in weights)
    assert total.flops([16]) < 0.7 * count(without_tuning(run.decoder)).flops([16])
