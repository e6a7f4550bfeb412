"""The form of a served plan: texts become the command's inputs, errors find their field."""

import json
import shlex

import pytest

from moefold.planner.page import page_data
from moefold.planner.plan import plan, search_steps
from moefold.planner.serve.form import RefusedQuestion, ask, first_values

TINY = {"model": "tiny", "cluster": "h100x2"}


@pytest.mark.parametrize(
    ("wrong", "field", "said", "nearest"),
    [
        ({"batch": "0"}, "batch", "--batch 0: must be", "1"),
        ({"batch": "1,024"}, "batch", "argument --batch: invalid int", "1024"),
        ({"batch": "nothing"}, "batch", "invalid int value: 'nothing'", None),
        ({"load": "nan"}, "load", "--load nan", "1"),
        ({"load": "0.5"}, "load", "load 0.5", "1"),
        ({"memory": "1e30"}, "memory", "at most", "1e+18"),
        ({"cluster": "h1000x8"}, "cluster", "unknown device", "h100x8"),
        ({"cluster": "h100x99999999"}, "cluster", "at most", "h100x1000000"),
        ({"cluster": "h100"}, "cluster", "such as h100x8", "h100x8"),
        ({"model": "qwen3_30b_a3c"}, "model", "not a run file", "qwen3_30b_a3b"),
        ({"model": "Mixtral-8x7B"}, "batch", "needs --batch", None),
        ({"model": ""}, "model", "required", "tiny"),
        ({"precision": "fp9"}, "precision", "must be fp8 or one of", "fp8"),
        ({"precision": "nvfp4"}, "precision", "has no units", "fp8_tensor"),
        ({"seq": "-1"}, "seq", "--seq -1", "1"),
        ({"adapter": "{kind: lora, rank: 0}"}, "adapter", "of at least 1", None),
        ({"adapter": "{kind: lore}"}, "adapter", "lora", None),
        ({"freeze": "[nothing.*]"}, "freeze", "must match a parameter", None),
        ({"links": "mash"}, "links", "must be switch, mesh or pcie", "mesh"),
        ({"node": "0"}, "node", "--node 0", "1"),
        ({"zero": "7"}, "zero", "must be one of 0, 1, 2, 3", "0"),
        ({"layout": "pp4"}, "layout", "layout.sizes", "pp2"),
        ({"recompute": "sometimes"}, "recompute", "layout.recompute", "full"),
        ({"overrides": "train.nothing=1"}, "overrides", "train.nothing", None),
        ({"overrides": "'"}, "overrides", "No closing quotation", None),
        ({"batch": "1" * 3000}, "batch", "at most 2,000 characters", None),
        ({"colour": "red"}, "model", "no field 'colour'", None),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_of_its_field(
    wrong: dict[str, str], field: str, said: str, nearest: str | None
) -> None:
    with pytest.raises(RefusedQuestion) as refused:
        ask(TINY | wrong)
    complaint = refused.value.complaints[0]
    assert complaint.field == field and said in complaint.message, complaint
    if nearest is not None:
        assert complaint.nearest == nearest, complaint


def test_all_wrong_numbers_are_said_at_once() -> None:
    with pytest.raises(RefusedQuestion) as refused:
        ask(TINY | {"batch": "0", "load": "x", "zero": "9"})
    assert [one.field for one in refused.value.complaints] == ["batch", "zero", "load"]


def test_a_page_asks_what_its_command_asks() -> None:
    """What the page ends with is the plan of the command line that it shows."""
    texts = {"batch": "64", "seq": "128", "precision": "fp32", "zero": "2", "load": "1.5"}
    question = ask(TINY | texts)
    words = shlex.split(question.command)
    assert words[:5] == ["moefold", "plan", "tiny", "--cluster", "h100x2"]
    overrides = [word for word in words[5:] if "=" in word]
    assert "data.seq=128" in overrides and "layout.zero=2" in overrides
    *steps, found = [question.plan, *search_steps(question.plan)]
    assert [step.complete for step in (*steps, found)] == [False, False, True]
    assert steps[0].shortfall is None and steps[0].recommended is None
    assert steps[1].trainable == found.trainable
    same = plan("tiny", "h100x2", batch=64, load=1.5, overrides=overrides)
    assert json.dumps(page_data(found, None)) == json.dumps(page_data(same, None))


@pytest.mark.parametrize(
    ("wrong", "field", "nearest"),
    [({"layout": "ep4"}, "layout", "ep2"), ({"batch": "3"}, "batch", "4")],
)
def test_a_layout_that_does_not_suit_the_cluster_does_not_end_the_search(
    wrong: dict[str, str], field: str, nearest: str
) -> None:
    question = ask(TINY | wrong)
    (note,) = question.notes
    assert (note.field, note.nearest) == (field, nearest)
    assert note.message == question.plan.given_problem


def test_nothing_is_said_to_be_missing_before_the_search() -> None:
    found = ask({"model": "Mixtral-8x7B", "cluster": "h100x8", "batch": "8"}).plan
    assert found.given is None and found.recommended is None
    assert found.shortfall is None


def test_the_page_begins_with_what_the_command_states() -> None:
    options = {"source": "tiny", "cluster": "h100x2", "batch": 32, "load": 1.2, "tokens": 1e9}
    overrides = ['layout.sizes="pp2"', "layout.zero=2", "train.steps=7", "adapter={kind: lora}"]
    assert first_values(options, overrides) == {
        "model": "tiny",
        "cluster": "h100x2",
        "batch": "32",
        "tokens": "1e+09",
        "layout": "pp2",
        "zero": "2",
        "adapter": "{kind: lora}",
        "overrides": "train.steps=7",
    }
    assert first_values({}, [])["model"] == "qwen3_30b_a3b"


def test_a_fragment_is_offered_where_training_executes_the_layout() -> None:
    data = page_data(plan("tiny", "h100x2", batch=32), None)
    rows = [data["today"], *data["layouts"], data["given"]]
    assert any(row["not_yet"] for row in rows)
    assert all("fragment" in row for row in rows if not row["not_yet"])
    assert all("no_fragment" in row for row in rows if row["not_yet"])
    assert "sizes:" in data["today"]["fragment"]
