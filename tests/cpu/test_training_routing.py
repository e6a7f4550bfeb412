"""Routers' choices on disk: what is replayed is what was recorded, by layer and token."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from moefold.cli.main import main
from moefold.config.errors import RunError
from moefold.config.load import load
from moefold.data.batch import from_ids, pack
from moefold.kernels.gradients import AUTOGRAD_SINK
from moefold.layers.flow import Flow
from moefold.layers.saved_tensors import RoutingDecisions
from moefold.layers.unshard import RESIDENT
from moefold.run import Run
from moefold.training.trainer import Trainer
from tests.cpu import small
from tests.cpu.runs import Notes, equal, raw_run, run_of, weights

MODEL = {"router": {"score": "sigmoid"}, "capacity": {"factor": 0.9}}
TRAIN = {"steps": 3, "batch": 4, "micro_batch": 2, "precision": "fp64"}


def trained(
    folder: Path, name: str, train: dict[str, Any], **more: Any
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return what a run ends with, and its figures."""
    notes = Notes()
    run = run_of(folder, train=TRAIN | train, **{"model": MODEL} | more)
    with Trainer(run, folder / name, [notes], cache=folder / "prepared") as job:
        job.train()
        return weights(job), notes.steps


def rewritten(folder: Path, change: Callable[[Tensor], Tensor]) -> None:
    """Change all choices, and lay those of each step into two files, every other token in each."""
    for path in list(folder.glob("*/0-of-1.safetensors")):
        with safe_open(path, "pt") as file:
            keys, said = file.keys(), file.metadata()
            held = {key: file.get_tensor(key) for key in keys}
        changed = {k: change(v) if k.startswith("layers") else v for k, v in held.items()}
        for part in range(2):
            every = {key: value[part::2].contiguous() for key, value in changed.items()}
            save_file(every, path.with_name(f"{part}-of-2.safetensors"), said)
        path.unlink()


def test_a_replay_is_the_run_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Drops among them. Plants: choices of the micro-batch before; what was dropped is sent."""
    at = str(tmp_path / "routing")
    recorded, _ = trained(tmp_path, "one", {"routing": {"record": at}})
    plain, _ = trained(tmp_path, "two", {})
    replayed, _ = trained(tmp_path, "three", {"routing": {"replay": at}})
    assert not equal(recorded, plain) and not equal(recorded, replayed)
    assert main(["routing", at, "--tokens"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["step"], line["layer"]) for line in lines] == [
        (step, f"layers.{layer}") for step in (0, 1, 2) for layer in (0, 1)
    ]
    assert any(line["dropped"] for line in lines)
    for line in lines:
        experts = torch.tensor(line["experts"])
        load_E = torch.where(experts < 0, -1 - experts, experts).flatten().bincount(minlength=4)
        assert line["load"] == pytest.approx((load_E / load_E.sum()).tolist(), abs=1e-6)
        assert line["max_over_mean"] == pytest.approx(4 * max(line["load"]), abs=1e-5)
        assert line["dropped"] == pytest.approx((experts < 0).float().mean().item(), abs=1e-6)
        assert ("choices_kept" in line) == (line["step"] > 0)
        assert line["step"] == 0 or 0 < line["choices_kept"] <= 1 >= line["load_kept"] > 0


def test_choices_are_those_of_their_tokens(tmp_path: Path) -> None:
    """Whoever recorded, and in whatever micro-batches: and drifted ones teach the router."""
    at, draw = tmp_path / "routing", torch.Generator().manual_seed(0)
    model = {"model": {"router": {"score": "sigmoid"}, "balance": []}}
    usual, _ = trained(tmp_path, "one", {"routing": {"record": str(at)}}, **model)
    ranks = torch.rand(10_000, 4, generator=draw)
    rewritten(at, lambda chosen_NK: ranks[: len(chosen_NK)].argsort(1)[:, :2].to(torch.int32))
    runs = [
        trained(
            tmp_path, f"of {size}", {"routing": {"replay": str(at)}, "micro_batch": size}, **model
        )
        for size in (2, 4)
    ]
    (drifted, figures), (other, others) = runs
    for name, value in drifted.items():
        torch.testing.assert_close(value, other[name], rtol=1e-9, atol=1e-12)
    assert [one["lm_loss"] for one in figures] == pytest.approx(
        [one["lm_loss"] for one in others], rel=1e-12
    )
    routers = [name for name in usual if name.endswith("router.weight")]
    assert routers and not any(torch.equal(drifted[n], usual[n]) for n in routers)


def test_a_pass_may_be_given_its_decisions() -> None:
    """Those of a sampler: other weights than training's chose, whose router learns all the same."""
    described = small.decoder(small.GQA, small.moe())
    sampler, model = (small.model_of(described, seed=seed) for seed in (1, 2))
    rows, told = from_ids(torch.arange(24).view(2, 12)), dict[str, Any]()
    tell = told.__setitem__
    sampler(
        Flow(
            rows, sampler.precision_policy, training=False, decisions=RoutingDecisions(on_new=tell)
        )
    )
    flow = Flow(rows, model.precision_policy, decisions=RoutingDecisions(told)).for_chunk(
        AUTOGRAD_SINK, RESIDENT, True
    )
    x_TD, _ = model(flow)
    ((key, given),) = told.items()
    assert torch.equal(flow.decisions[key].experts_TK, given.experts_TK)
    own = Flow(rows, model.precision_policy)
    assert not torch.allclose(model(own)[0], x_TD)
    assert not torch.equal(own.decisions[key].experts_TK, given.experts_TK)
    x_TD.square().sum().backward()
    assert model.get_parameter("layers.0.moe.router.weight").grad.abs().max() > 0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"seed": 2}, "replay a recording of the same data in the same order"),
        ({"train": {"steps": 4}}, "step-00000003: has no choices"),
        ({"model": {"shape": {"top_k": 3}}}, "layers.0 chose 2 of 4 experts, but chooses 3 of 4"),
        ({"model": {"shape": {"layers": 3}}}, "no choice of layers.2 for token 0"),
        ({"train": {"batch": 8}}, "no choice of layers.0 for token 64"),
    ],
)
def test_what_was_recorded_of_another_run_is_refused(
    tmp_path_factory: pytest.TempPathFactory,
    recorded: Path,
    changed: dict[str, Any],
    said: str,
) -> None:
    model = {**changed.get("model", {})}
    if "shape" in model:
        model["shape"] = run_of(recorded).model.shape.model_dump() | model["shape"]  # type: ignore[attr-defined]
    train = {"routing": {"replay": str(recorded / "routing")}, **changed.get("train", {})}
    rest = {key: value for key, value in changed.items() if key not in ("model", "train")}
    with pytest.raises(ValueError, match=said):
        trained(recorded, tmp_path_factory.mktemp("out").name, train, model=model, **rest)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of three steps and its choices."""
    folder = tmp_path_factory.mktemp("recorded")
    train = {"routing": {"record": str(folder / "routing")}}
    trained(folder, "one", train, model={})
    return folder


def test_what_no_choice_can_come_of_is_refused(tmp_path: Path) -> None:
    for routing in ({}, {"record": "a", "replay": "b"}):
        with pytest.raises(RunError, match=r"train\.routing\.replay"):
            run_of(tmp_path, train=TRAIN | {"routing": routing})
    with pytest.raises(RunError, match=r"layout\.graphs"):
        run_of(tmp_path, train=TRAIN | {"routing": {"record": "a"}}, layout={"graphs": "step"})
    block = {"attention": {"kind": "gqa", "heads": 2, "kv_heads": 1, "head_dim": 8}}
    dense = {**block, "ffn": {"kind": "dense", "width": 16}}
    decoder = {"vocab": 300, "hidden": 16, "stacks": [{"repeat": 1, "blocks": [dense]}]}
    raw = raw_run(tmp_path, train=TRAIN | {"routing": {"record": "a"}})
    with pytest.raises(RunError, match="no layer of the model has a router"):
        load(Run, raw | {"model": {"family": "custom", "decoder": decoder}})
    assert main(["routing", str(tmp_path)]) == 2


def test_a_step_replays_the_experts_of_generated_texts(tmp_path: Path) -> None:
    """Texts of one prompt, a window that moves; then routers that would choose otherwise."""
    at = str(tmp_path / "routing")
    train = TRAIN | {"routing": {"replay": at}}
    model = {"router": {"score": "sigmoid"}}
    run = run_of(tmp_path, train=train, model=model)
    prompts = [[5, 9, 3], [5, 9, 3], [5, 2]]
    with Trainer(run, tmp_path / "out", cache=tmp_path / "prepared") as job:
        new = job.generate(prompts, routing=at, tokens=9, window=6, temperature=1.0, top_k=2)
        texts = [[*prompt, *answer] for prompt, answer in zip(prompts, new, strict=True)]
        seen: dict[str, Any] = {}
        decisions = RoutingDecisions(on_new=seen.__setitem__)
        rows = pack(texts)
        assert rows.rows == 35
        job.model(Flow(rows, job.model.precision_policy, decisions=decisions, dropless=True))
        path = tmp_path / "routing" / "step-00000000" / "0-of-1.safetensors"
        stored = load_file(path)
        assert stored["id"].tolist() == rows.ids_T.tolist()
        for key, decision in seen.items():
            assert stored[key].tolist() == decision.experts_TK.tolist()
        with torch.no_grad():
            for name, parameter in job.model.named_parameters():
                if "router" in name:
                    parameter.neg_()
        job.state.refresh_weights()
        job.step([pack(texts)])
        for layer in job.health():
            chosen = stored[f"layers.{layer['layer']}"].flatten()
            load = torch.bincount(chosen, minlength=len(layer["load"])) / len(chosen)
            torch.testing.assert_close(torch.tensor(layer["load"]), load)
