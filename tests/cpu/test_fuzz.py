"""300 mutated inputs of every kind; ``make fuzz`` tries 3,000 of a new seed."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import fuzz
from tests.fuzz_inputs import CANARY, Input

TRIES, SEED = 300, 1


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_mutated_inputs_are_answered(kind: str) -> None:
    found = [fuzz.attempt(kind, number, SEED) for number in range(TRIES // len(fuzz.KINDS))]
    failures = [each.failure for each in found if each.failure is not None]
    text = "\n\n".join(f"{each.kind}:{each.number}\n{each.what}" for each in failures)
    assert not failures, f"python -m tests.fuzz --seed {SEED} --only {kind}:NUMBER\n{text}"
    readable = sum(each.parses for each in found)
    assert 2 * readable >= len(found), "most inputs end at the first check"


def hang() -> None:
    while True:
        pass


def crash() -> None:
    raise KeyError("a bug")


def run_it() -> None:
    Path(CANARY).touch()


def grow() -> None:
    bytearray(b"x") * (300 << 20)


def answer() -> None:
    time.sleep(0.01)
    raise ValueError("the input is wrong")


@pytest.mark.parametrize(
    "wrong, said",
    [(hang, "hang"), (crash, "a bug"), (run_it, "executed"), (grow, "GiB"), (answer, "")],
)
def test_what_is_wrong_is_noticed(
    wrong: Callable[[], None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fuzz.KINDS, "wrong", lambda draw, at: Input(True, wrong))
    monkeypatch.setattr(fuzz, "SECONDS", 0.2)
    monkeypatch.setattr(fuzz, "GIGABYTE", 100 << 10)
    failure = fuzz.attempt("wrong", 0, 1).failure
    assert (failure is None) == (not said)
    if failure is not None:
        assert said in failure.what
