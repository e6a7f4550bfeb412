"""Vocabularies that tp does not divide: some ranks have one row of embedding and head more.

Real ones: GPT-2's 50,257 tokens and 151,669 of a Qwen3 reranker, both odd.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from moefold.api import export
from moefold.cli.main import main
from moefold.comm.environment import RankInfo
from moefold.comm.launch import launch
from moefold.parallel.config import Layout
from moefold.proof.case import ProofCase, Subject, micro_batch_count
from moefold.proof.subjects import DENSE, MHA, SHARED, SUBJECTS, decoder, subject
from moefold.proof.verify import prove
from tests.gloo.test_parallel_generate import write

RELEASED = (50_257, 151_669)


def released(vocab: int) -> Subject:
    return subject(decoder(MHA, DENSE, SHARED, vocab=vocab))


def proof(name: str, sizes: str, world: int, vocab: int | None = None, **layout: int) -> ProofCase:
    model = SUBJECTS[name] if vocab is None else released(vocab)
    record = Layout(sizes=sizes, **layout)  # type: ignore[arg-type]
    model = replace(model, micro_batches=micro_batch_count(record, world))
    return ProofCase(f"{name} {vocab}: {sizes} {layout}", model, record, world)


def failures(cases: list[ProofCase]) -> dict[str, object]:
    found = prove(cases).verdicts
    return {v.layout: (v.problems, v.worst) for v in found if not v.passed}


def test_ranks_with_different_numbers_of_tokens_train_as_one() -> None:
    assert not failures(
        [
            proof("odd vocabulary", "tp4", 4),
            proof("odd vocabulary", "tp2", 4, zero=3),
            proof("odd vocabulary tied", "tp2", 4, zero=2),
        ]
    )


@pytest.mark.matrix
@pytest.mark.parametrize("vocab", RELEASED)
def test_released_vocabularies_train_as_on_one_rank(vocab: int) -> None:
    assert not failures([proof("released", f"tp{n}", n, vocab) for n in (2, 4, 8)])


def continued(info: RankInfo | None, vocab: int, sizes: str, routing: str) -> list[list[int]]:
    """Continue prompts with a model of ``vocab`` tokens, whose routing is recorded."""
    SUBJECTS["released"] = released(vocab)
    return write(info, "released", sizes, 0, True, routing)


@pytest.mark.parametrize(
    ("vocab", "worlds"),
    [(61, [4]), *(pytest.param(vocab, [2, 4, 8], marks=pytest.mark.matrix) for vocab in RELEASED)],
)
def test_shares_of_tokens_are_sampled_as_on_one_rank(
    vocab: int, worlds: list[int], tmp_path: Path
) -> None:
    """Of 61 tokens the first of four ranks has 16, the others 15."""
    alone = continued(None, vocab, "", str(tmp_path / "1"))
    for ranks in worlds:
        folder = str(tmp_path / str(ranks))
        assert launch(continued, ranks, vocab, f"tp{ranks}", folder, time_out_s=60) == alone


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_a_run_goes_from_layout_to_layout_to_a_folder_and_back(tmp_path: Path) -> None:
    """tp2, then one rank, then tp4: as one rank throughout; the export has all tokens, no more."""
    text = tmp_path / "words.txt"
    text.write_text(" ".join(f"{number} is {number * number % 97}," for number in range(3000)))
    source = f"{{source: text, files: [{text}], split: ',', holdout: 0.1}}"
    changes = [
        f"data.train=[{source}]",
        "data.seq=32",
        "data.tokenizer={kind: bpe, vocab: 301}",
        "model.shape.kv_heads=4",
        "train.precision=fp64",
        "train.steps=6",
        "watch.evaluate=null",
    ]
    alone, moved = (tmp_path / name for name in ("alone", "moved"))
    assert main(["train", "tiny", "--folder", str(alone), *changes]) == 0
    start = ["train", "tiny", "--folder", str(moved), *changes]
    assert main([*start, "--nproc", "2", "--layout", "tp2", "--until", "2"]) == 0
    resume = ["train", "--folder", str(moved)]
    assert main([*resume, "--layout", "", "--until", "4"]) == 0
    assert main([*resume, "--nproc", "4", "--layout", "tp4"]) == 0
    folders = [tmp_path / f"{run.name} exported" for run in (alone, moved)]
    for run, folder in zip((alone, moved), folders, strict=True):
        export(run, folder)
    expected, found = map(tensors, folders)
    assert expected.keys() == found.keys()
    assert found["model.embed_tokens.weight"].shape[0] == 301
    assert json.loads((folders[1] / "config.json").read_text())["vocab_size"] == 301
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-7)

    # From a folder, whose number of tokens is not the user's choice.
    tune = ["train", str(folders[0]), f"data.train=[{source}]", "data.seq=32", "train.steps=1"]
    tune += ["train.precision=fp64", "train.batch=2", "watch.evaluate=null"]
    losses = []
    for name, more in (("one", []), ("two", ["--nproc", "2", "--layout", "tp2"])):
        assert main([*tune, "--folder", str(tmp_path / name), *more]) == 0
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append(json.loads(lines[-1])["lm_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)
