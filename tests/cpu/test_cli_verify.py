"""``moefold verify``: what it answers, to people and to programs, and its exit status."""

import json
import math

import pytest

import moefold
from moefold.cli.main import main
from moefold.proof.case import ProofCase
from moefold.proof.verify import LayoutVerdict, Proof


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["verify", *words])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_a_layout_of_a_run_is_proved(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tiny", "--layout", "tp2 ep2", "--layout", "pp2", "--json"]
    status, out, _ = asked(capsys, *words)
    answer = json.loads(out)
    assert status == 0 and answer["passed"]
    assert [row["layout"] for row in answer["layouts"]] == ["tp2 ep2", "pp2"]
    for row in answer["layouts"]:
        assert row["passed"] and row["world"] == 2 and row["seconds"] > 0
        errors = row["max_relative_error"]
        assert errors.keys() >= {"lm_loss", "gradients", "grad_norm", "clip", "weights", "counts"}
        assert all(error <= 1e-10 for error in errors.values())


def test_from_python_the_rows_are_the_same_and_any_world_will_do() -> None:
    run = moefold.load_run("tiny")
    proof = moefold.verify(run, layouts=["ep2"], world=4)
    assert proof.passed and {row.layout for row in proof.rows} == {"ep2"}
    assert all(row.max_relative_error <= 1e-10 for row in proof.rows)
    assert proof.verdicts[0].world == 4


def test_legal_runs_of_one_expert_a_token_are_proved(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the first rows leave an expert out by chance, and where a gradient is zero by maths."""
    top_1 = ["model.shape.top_k=1", "model.renormalise=false", "--layout", "tp2"]
    status, out, _ = asked(capsys, "demo", *top_1)
    assert status == 0 and "always zero" not in out
    status, out, _ = asked(capsys, "tiny", *top_1, "model.shape.experts=1", "model.balance=[aux]")
    assert status == 0
    assert "layers.1.moe.router.weight: a softmax over one expert is always 1" in out


WRONG = [
    (["tiny", "--layout", "tp3"], "tp"),
    (["tiny", "--layout", "tp2", "--world", "3"], "multiple of"),
    (["tiny", "--layout", "xp2"], "xp2"),
    (["--layout", "tp2"], "name a RUN"),
    (["tiny", "--matrix"], "its own models"),
    (["--matrix", "no_such_rule"], "unknown rule"),
    (["--matrix", "--world", "7"], "none of the matrix"),
    (["tiny", "--world", "0"], "world = 0"),
    (["tiny", "--precision", "bf16"], "--as-run"),
]


@pytest.mark.parametrize(("words", "said"), WRONG, ids=lambda item: " ".join(item)[:40])
def test_wrong_input_is_worded(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    status, out, err = asked(capsys, *words)
    assert status == 2 and said in err and not out


def verdict_of(error: float, problems: tuple[str, ...] = ()) -> LayoutVerdict:
    worst = {"gradients": "layers.0.attention.q.weight"}
    return LayoutVerdict({"gradients": error}, worst, problems=problems, layout="tp2", world=2)


FAILURES = [
    verdict_of(1e-9),
    verdict_of(math.nan),
    verdict_of(0.0, ("gradients of x: the ranks have 1 of 2 elements",)),
    LayoutVerdict(layout="tp2", world=2),
]


@pytest.mark.parametrize("failed", FAILURES, ids=["beyond", "nan", "problem", "nothing"])
def test_what_fails_is_named_and_ends_in_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failed: LayoutVerdict
) -> None:
    def prove(cases: list[ProofCase], told) -> Proof:
        told(failed)
        return Proof((failed,))

    monkeypatch.setattr("moefold.proof.verify.prove", prove)
    status, out, _ = asked(capsys, "tiny", "--layout", "tp2")
    assert status == 1 and "FAILED" in out and "1 of 1 failed" in out
    for row in failed.rows:
        if not row.max_relative_error <= row.bound:
            assert row.worst in out
    assert all(problem in out for problem in failed.problems)
    monkeypatch.setattr("moefold.proof.verify.prove", lambda cases, told: Proof((failed,)))
    assert asked(capsys, "tiny", "--layout", "tp2", "--json")[0] == 1


def test_a_proof_of_nothing_is_none() -> None:
    assert not Proof(()).passed
