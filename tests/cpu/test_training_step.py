"""One step as a whole: how balance terms enter it, what it reports, when biases move."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moefold.config.base import Record
from moefold.config.load import load
from moefold.data.batch import MicroBatch
from moefold.model.config import Decoder
from moefold.model.decoder import DecoderModel
from moefold.moe.config import Aux, Router, Z
from moefold.run import Run
from moefold.training.step import StepFigures
from moefold.training.trainer import Trainer
from tests.cpu.runs import raw_run
from tests.cpu.small import (
    GQA,
    TERMS,
    decoder,
    gradients,
    model_of,
    moe,
    padded_rows,
    relative,
    same,
)

ROUTERS = tuple(f"layers.{i}.moe.router.weight" for i in range(2))


def sparse(*balance: Record, **changes: Any) -> Decoder:
    """Return two layers with experts and the given terms."""
    return decoder(GQA, *[moe(balance=balance, **changes)] * 2)


def step(
    model: DecoderModel, *batches: MicroBatch, policy: Record | None = None
) -> tuple[StepFigures, dict[str, Tensor]]:
    """Return the figures and every gradient of one step."""
    figures = gradients(model, batches, policy, 16)
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return figures, grads


def strong(times: float = 1.0) -> tuple[Record, ...]:
    """Return every term, with coefficients at which the terms matter."""
    return tuple(t.model_copy(update={"coefficient": t.coefficient * 50 * times}) for t in TERMS)


@pytest.mark.parametrize("times", [2, 4])
def test_a_step_of_equal_micro_batches_is_that_of_one(times: int) -> None:
    """Plant: add the terms of each micro-batch whole; divide them by the number of steps."""
    model, rows = model_of(sparse(*strong())), padded_rows((9, 5), 2)
    want, theirs = step(model, rows)
    found, ours = step(model, *[rows] * times)
    same(ours, theirs, 1e-12)
    assert found.router_terms == pytest.approx(want.router_terms, rel=1e-12)
    assert found.lm_loss == pytest.approx(want.lm_loss, rel=1e-12)


def test_micro_batches_weigh_by_their_valid_rows() -> None:
    """Sequences of 9 and 4 rows, together or apart: terms of single sequences do not notice."""
    terms = (Aux(over="sequence", coefficient=0.5), Z(coefficient=0.05))
    model, ids = model_of(sparse(*terms)), padded_rows((9, 4), 0)
    parts = [padded_part(ids, 0, 9), padded_part(ids, 9, 13)]
    want, theirs = step(model, ids)
    found, ours = step(model, *parts)
    same(ours, theirs, 1e-11)
    assert found.router_terms == pytest.approx(want.router_terms, rel=1e-12)


def padded_part(whole: MicroBatch, start: int, end: int) -> MicroBatch:
    """Return one segment of a micro-batch with 3 rows of padding after it."""
    alone = padded_rows((end - start,), 3)
    alone.ids_T[: end - start] = whole.ids_T[start:end]
    alone.labels_T[: end - start] = whole.labels_T[start:end]
    return alone


def test_what_the_terms_add_doubles_with_their_coefficients() -> None:
    """In training itself. Plant: leave the terms out of the backward pass, or the coefficients."""
    rows, found = padded_rows((9, 5), 2), []
    for terms in ((), strong(), strong(2)):
        found.append(step(model_of(sparse(*terms)), rows)[1])
    none, once, twice = found
    for name in ROUTERS:
        added = once[name] - none[name]
        assert added.norm() > 1e-3 * none[name].norm()
        assert relative(twice[name] - none[name], 2 * added) < 1e-9


def test_a_step_reports_loss_and_terms_apart() -> None:
    """Whatever the coefficients. Plant: add the terms to the reported loss, or weigh them."""
    rows = padded_rows((9, 5), 2)
    plain, _ = step(model_of(sparse()), rows)
    once, _ = step(model_of(sparse(*strong())), rows)
    twice, _ = step(model_of(sparse(*strong(2))), rows)
    assert plain.router_terms == {} and set(once.router_terms) == {
        "aux_micro_batch", "aux_sequence", "aux_global_batch", "z"
    }  # fmt: skip
    assert once.lm_loss == twice.lm_loss == plain.lm_loss
    assert once.router_terms == twice.router_terms


@pytest.mark.parametrize("over", ["micro_batch", "sequence", "global_batch"])
def test_layers_that_collapse_onto_different_experts_do_not_cancel(over: Any) -> None:
    """Each layer sends all to an expert of its own. Plant: count over layers together."""
    router = Router(experts=2, top_k=1, renormalise=False)
    model = model_of(sparse(Aux(over=over, coefficient=1.0), router=router))
    for i, mixture in model.moe_layers():
        sure_E = torch.tensor([300.0, 0.0], dtype=torch.float64).roll(i)
        mixture.router._logits = lambda x_TD, flow, sure_E=sure_E: sure_E + 0 * x_TD[:, :1]
    out = model.micro_batch_loss(padded_rows((8, 6), 2))
    assert out.router_terms[f"aux_{over}"].item() == 2.0
    assert (out.loss - out.lm_loss).item() == pytest.approx(2 * 2.0, rel=1e-12)


def test_every_layer_moves_its_bias_once_a_step(tmp_path: Path) -> None:
    """Dense layers in between, several micro-batches. Plant: stop after the first layer."""
    model = {
        "family": "custom",
        "decoder": {
            "vocab": 300,
            "hidden": 16,
            "stacks": [{"blocks": [block(kind) for kind in ("moe", "dense", "bare", "moe")]}],
        },
    }
    train = {"steps": 8, "batch": 3, "micro_batch": 1, "precision": "fp32"}
    run = load(Run, raw_run(tmp_path, train=train) | {"model": model}).record
    with Trainer(run, tmp_path / "out", cache=tmp_path / "prepared") as job:
        mixtures = dict(job.model.moe_layers())
        assert list(mixtures) == [0, 2, 3]
        hands = {i: torch.zeros(5) for i in (0, 3)}
        for _ in range(3):
            job.step()
            for i, bias_E in hands.items():
                load_E = mixtures[i].balance.counters.load_E
                assert int(load_E.sum()) == 3 * 16 * 2
                bias_E += 0.01 * (load_E.double().mean() - load_E).sign().float()
                found_E = mixtures[i].router.selection_bias
                assert found_E is not None and int(load_E.max()) > int(load_E.min())
                assert torch.allclose(found_E, bias_E, rtol=0, atol=1e-7)
        untouched = mixtures[2].router.selection_bias
        assert untouched is not None and not untouched.any()


def block(kind: str) -> dict[str, Any]:
    """Return a layer: dense, with experts whose bias moves, or with experts whose bias stays."""
    ffn: dict[str, Any] = {"kind": "dense", "width": 16}
    if kind != "dense":
        router = {"experts": 5, "top_k": 2, "score": "sigmoid", "selection_bias": True}
        ffn = {"kind": "moe", "width": 16, "router": router}
        ffn["balance"] = [{"kind": "bias", "rate": 0.01}] if kind == "moe" else []
    return {"attention": {"kind": "gqa", "heads": 2, "kv_heads": 1, "head_dim": 8}, "ffn": ffn}
