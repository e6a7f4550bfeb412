"""300 mutated inputs of every kind; ``make fuzz`` tries 3,000 of a new seed."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import fuzz

TRIES, SEED = 300, 1


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_mutated_inputs_are_answered(kind: str) -> None:
    found = [fuzz.attempt(kind, number, SEED) for number in range(TRIES // len(fuzz.KINDS))]
    failures = [failure for failure in found if failure is not None]
    text = "\n\n".join(f"{each.kind}:{each.number}\n{each.what}" for each in failures)
    assert not failures, f"python -m tests.fuzz --seed {SEED} --only {kind}:NUMBER\n{text}"


def hang(draw: random.Random, at: Path) -> None:
    while True:
        pass


def crash(draw: random.Random, at: Path) -> None:
    raise KeyError("a bug")


def run_it(draw: random.Random, at: Path) -> None:
    (at / fuzz.CANARY).touch()


def grow(draw: random.Random, at: Path) -> None:
    bytearray(b"x") * (300 << 20)


def answer(draw: random.Random, at: Path) -> None:
    time.sleep(0.01)
    raise ValueError("the input is wrong")


@pytest.mark.parametrize(
    "wrong, said",
    [(hang, "hang"), (crash, "a bug"), (run_it, "executed"), (grow, "GiB"), (answer, "")],
)
def test_what_is_wrong_is_noticed(
    wrong: Callable[[random.Random, Path], None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fuzz.KINDS, "wrong", wrong)
    monkeypatch.setattr(fuzz, "SECONDS", 0.2)
    monkeypatch.setattr(fuzz, "GIGABYTE", 100 << 10)
    failure = fuzz.attempt("wrong", 0, 1)
    assert (failure is None) == (not said)
    if failure is not None:
        assert said in failure.what
