"""Recordings of routers' choices that are damaged or foreign: an error that names the file."""

import json
import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from moefold.cli.main import main
from moefold.training.routing_trace import RoutingError, iter_figures

TOKENS = np.arange(6)
CHOSEN = np.array([[0, 1], [1, 2], [3, 4], [-1, 2], [3, 0], [2, 1]], np.int32)
GOOD = {"token": TOKENS, "id": TOKENS % 3, "layers.0": CHOSEN}
CHOICES = '{"layers.0": 4}'


def record(
    folder: Path,
    tensors: Mapping[str, np.ndarray] = GOOD,
    choices: str | None = CHOICES,
    name: str = "0-of-1",
    step: int = 0,
) -> Path:
    """Write a rank's choices of a step; return the file."""
    path = folder / f"step-{step:08d}" / f"{name}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), path, None if choices is None else {"choices": choices})
    return path


@pytest.mark.parametrize(
    "changed, choices, said",
    [
        ({}, None, "not a file of routers' choices"),
        ({}, "null", "not a mapping"),
        ({}, "[" * 3000, "recursion"),
        ({}, "{", "not a file of routers' choices"),
        ({}, "9" * 5000, "not a file of routers' choices"),
        ({}, '{"layers.0": true}', "has True experts"),
        ({}, json.dumps({"layers.0": 2**30}), "experts; 1 to 65536 are possible"),
        ({}, '{"layers.0": 2}', "choices outside"),
        ({"x": CHOSEN}, '{"x": 4}', "is not the name of a layer"),
        ({"layers.0": CHOSEN[:5]}, CHOICES, "for 6 tokens"),
        ({"layers.0": CHOSEN.astype(np.float32)}, CHOICES, "is F32"),
        ({"layers.0": CHOSEN[:, 0].copy()}, CHOICES, "not whole numbers in 2 dims"),
        ({"layers.0": CHOSEN[:, :0].copy()}, CHOICES, "have 1 to"),
        ({"layers.0": CHOSEN - 9}, CHOICES, "choices outside"),
        ({"id": TOKENS[:4]}, CHOICES, "numbers of tokens and 4 ids"),
        ({"id": TOKENS - 1}, CHOICES, "id has values outside"),
        ({"token": TOKENS + 2**40}, CHOICES, "token has values outside"),
        ({"token": TOKENS.reshape(2, 3)}, CHOICES, "not whole numbers in 1 dims"),
    ],
)
def test_a_damaged_recording_is_an_error_with_its_file(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changed: dict[str, np.ndarray],
    choices: str | None,
    said: str,
) -> None:
    path = record(tmp_path, GOOD | changed, choices)
    with pytest.raises(RoutingError) as refused:
        list(iter_figures(tmp_path))
    assert str(path) in str(refused.value) and said in str(refused.value)
    assert main(["routing", str(tmp_path)]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_files_and_steps_of_a_recording_must_belong_together(tmp_path: Path) -> None:
    record(tmp_path / "a", name="0-of-2")
    record(tmp_path / "a", GOOD | {"layers.0": CHOSEN[:, :1].copy()}, name="1-of-2")
    with pytest.raises(RoutingError, match="in another file of the step"):
        list(iter_figures(tmp_path / "a"))
    for names in (("0-of-2", "3-of-2"), ("one-of-us",), ("0-of-2",), ("0-of-1", "0-of-2")):
        folder = tmp_path / "-".join(names)
        for name in names:
            record(folder, name=name)
        with pytest.raises(RoutingError, match="name a folder in which"):
            list(iter_figures(folder))
    record(tmp_path / "b")
    record(tmp_path / "b", choices='{"layers.0": 5}', step=1)
    with pytest.raises(RoutingError, match="5 experts, but 4 in the step before"):
        list(iter_figures(tmp_path / "b"))
    (tmp_path / "c" / "step-00000000" / "0-of-1.safetensors").mkdir(parents=True)
    with pytest.raises(RoutingError, match="is not a file"):
        list(iter_figures(tmp_path / "c"))


def test_overlaps_are_those_of_counted_pairs(tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    steps = []
    for step in range(2):
        ids = draw.integers(0, 5 + step, 40)
        chosen = draw.integers(-5, 5, (40, 3)).astype(np.int32)
        record(tmp_path, {"token": np.arange(40), "id": ids, "layers.0": chosen}, step=step)
        steps.append((ids, np.where(chosen < 0, -1 - chosen, chosen)))
    counts = np.zeros((2, 6, 5))
    for step, (ids, experts) in enumerate(steps):
        for token, row in zip(ids, experts, strict=True):
            for expert in row:
                counts[step, token, expert] += 1
    counts = counts[:, :, :4]
    both = [i for i in range(6) if counts[0, i].sum() and counts[1, i].sum()]
    kept = sum(
        min(counts[0, i, e] / counts[0, i].sum(), counts[1, i, e] / counts[1, i].sum())
        * counts[1, i].sum()
        for i in both
        for e in range(4)
    )
    total = counts[1, both].sum()
    line = list(iter_figures(tmp_path))[1]
    assert line["choices_kept"] == pytest.approx(kept / total)
    assert line["ids_kept"] == pytest.approx(total / counts[1].sum())


def test_many_ids_and_experts_take_memory_by_tokens_not_by_pairs(tmp_path: Path) -> None:
    n = 50_000
    tensors = {
        "token": np.arange(n),
        "id": np.arange(n),
        "layers.0": np.arange(n, dtype=np.int32).reshape(n, 1),
    }
    for step in range(2):  # ids x experts would be 26 GB
        record(tmp_path, tensors, '{"layers.0": 65536}', step=step)
    assert list(iter_figures(tmp_path))[1]["choices_kept"] == pytest.approx(1.0)


def test_no_mutation_of_a_recording_ends_in_a_traceback(tmp_path: Path) -> None:
    path, draw = record(tmp_path), random.Random(11)
    data = path.read_bytes()
    refused = 0
    for _ in range(150):
        mutated = bytearray(data)
        for _ in range(draw.randint(1, 4)):
            mutated[draw.randrange(len(mutated))] = draw.randrange(256)
        path.write_bytes(bytes(mutated[: draw.choice((len(data), draw.randrange(len(data))))]))
        try:
            json.dumps(list(iter_figures(tmp_path)))
        except RoutingError as error:
            refused += str(path) in str(error)
    assert refused > 75
