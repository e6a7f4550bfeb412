"""``moefold doctor``: what it reports, and when it fails."""

import json

import pytest
import torch

from moefold.cli import doctor
from moefold.cli.doctor import Finding
from moefold.cli.main import main

NAMES = ["torch", "threads", "bf16", "cuda", "mps", "gloo", "nccl", "grouped_mm", "triton"]
NAMES += [
    "quantise",
    "transformer_engine",
    "deep_ep",
    "tokenizers",
    "pyarrow",
    "transformers",
    "wandb",
]


def report(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict]:
    status = main(["doctor", "--json", *words])
    return status, json.loads(capsys.readouterr().out)


def test_every_back_end_is_judged_with_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    status, answer = report(capsys)
    by_name = {found["name"]: found for found in answer["backends"]}
    assert status == 0 and answer["missing"] == []
    assert by_name.keys() >= {*NAMES, "tensorboard"}
    assert by_name["torch"]["version"] == torch.__version__
    assert by_name["threads"]["version"] == str(torch.get_num_threads())
    assert by_name["cuda"]["chosen"] == torch.cuda.is_available()
    assert set(doctor.PROBES) < set(by_name), "each finding has the name that --need takes"
    for found in by_name.values():
        assert found["chosen"] <= found["found"]
        assert found["chosen"] or found["why"], found


def test_only_what_is_needed_and_missing_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(capsys, "--need", "gloo", "--need", "torch")[0] == 0
    if not torch.cuda.is_available():
        status, answer = report(capsys, "--need", "cuda", "--need", "gloo")
        assert (status, answer["missing"]) == (doctor.UNUSABLE, ["cuda"])


def test_an_unknown_need_is_wrong_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--need", "cude"]) == 2
    assert "nearest: cuda" in capsys.readouterr().err


def test_a_grouped_product_that_is_wrong_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    from moefold.kernels.grouped import grouped

    assert doctor._grouped_mm().chosen
    if not torch.cuda.is_available():
        assert doctor._grouped_mm().why.endswith("on cpu; used for experts in bf16 here")
        assert doctor._quantise().why.startswith("fp8_tensor, fp8_block, mxfp8, nvfp4: all emul")
    true_product = grouped.product
    monkeypatch.setattr(grouped, "product", lambda *args: true_product(*args) * 1.5)
    found = doctor._grouped_mm()
    assert found.found and not found.chosen and "WRONG RESULT" in found.why

    def refuse(*args: object) -> None:
        raise RuntimeError("no kernel here\nlong story")

    monkeypatch.setattr(grouped, "product", refuse)
    found = doctor._grouped_mm()
    assert not found.found and found.why == "the loop runs instead: no kernel here"


def test_without_torch_the_rest_is_still_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = doctor.is_installed
    monkeypatch.setattr(doctor, "is_installed", lambda name: name != "torch" and there(name))
    by_name = {found.name: found for found in doctor.probe_all()}
    assert not by_name["torch"].found and "pip install torch" in by_name["torch"].why
    assert by_name["numpy"].found and "cuda" not in by_name
    status, answer = report(capsys, "--need", "cuda")
    assert (status, answer["missing"]) == (doctor.UNUSABLE, ["cuda"])


def test_the_table_shows_remedies_untouched(capsys: pytest.CaptureFixture[str]) -> None:
    remedy = "pip install 'moefold[wandb]'"
    doctor._print_table([Finding("wandb", False, "", False, remedy)])
    assert remedy in capsys.readouterr().out
