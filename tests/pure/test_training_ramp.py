"""A ramp of the batch: sizes of all steps, compared with a plain list."""

from itertools import accumulate
from math import gcd

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.config.check import check
from moefold.data.config import BatchSizes
from moefold.run import load_run
from moefold.training.config import BatchRamp, Train, batch_sizes

QUICK = settings(max_examples=150, deadline=None, database=None)


def check_sums(sizes: BatchSizes, steps: int) -> list[int]:
    """The sequences before each step are the sum of the sizes of the steps before."""
    listed = [sizes.size(step) for step in range(steps)]
    assert [sizes.before(step) for step in range(steps + 1)] == list(accumulate(listed, initial=0))
    return listed


@QUICK
@given(st.integers(1, 40), st.integers(1, 60), st.integers(1, 50))
def test_a_ramp_over_steps_rises_in_a_line(start: int, more: int, steps: int) -> None:
    batch = start + more
    listed = check_sums(batch_sizes(batch, 8, BatchRamp(**{"from": start, "steps": steps})), 60)
    unit = gcd(start, batch)
    expected = [start + unit * (min(i, steps) * (more // unit) // steps) for i in range(60)]
    assert listed == expected


@QUICK
@given(st.integers(1, 12), st.integers(1, 30), st.integers(1, 4000))
def test_a_ramp_over_tokens_gives_each_size_its_share(start: int, more: int, tokens: int) -> None:
    batch, seq = start + more, 8
    sizes = batch_sizes(batch, seq, BatchRamp(**{"from": start, "tokens": tokens}))
    listed = check_sums(sizes, 600)
    unit = gcd(start, batch)
    increments, read = more // unit, 0
    for size in listed:
        done = min(read * seq * increments // tokens, increments)
        assert size == start + unit * done
        read += size
    assert listed[-1] == batch or read * seq < tokens


def test_a_constant_batch_has_one_stage() -> None:
    assert Train(steps=9, batch=4).sizes(8) == BatchSizes(((0, 4),))
    assert BatchSizes(((0, 4),)).before(7) == 28


@pytest.mark.parametrize(
    ("ramp", "path"),
    [
        ({"from": 4, "steps": 3}, "train.ramp.from"),
        ({"from": 1, "steps": 3}, "train.ramp.from"),
        ({"from": 2}, "train.ramp.tokens"),
        ({"from": 2, "steps": 3, "tokens": 9}, "train.ramp.tokens"),
        ({"from": 0, "steps": 3}, "train.ramp.from"),
    ],
)
def test_a_ramp_that_does_not_fit_is_refused(ramp: dict, path: str) -> None:
    raw = {"steps": 8, "batch": 4, "micro_batch": 2, "ramp": ramp}
    found = check(Train, raw).violations
    assert [".".join(map(str, ("train", *violation.path))) for violation in found] == [path]


def test_a_pipeline_runs_the_first_batch_too() -> None:
    """Interleaved stages need as many micro-batches as a multiple of the stages."""
    words = ["layout.sizes=pp2 vpp2", "layout.schedule={kind: interleaved}", "train.batch=8"]
    words += ["model.shape.layers=4", "train.micro_batch=1"]
    load_run("tiny", [*words, "train.ramp={from: 4, steps: 5}"])
    with pytest.raises(ValueError, match=r"train\.ramp\.from"):
        load_run("tiny", [*words, "train.ramp={from: 1, steps: 5}"])


def test_plans_and_explanations_count_the_tokens_of_a_ramp() -> None:
    run = load_run("tiny", ["train.ramp={from: 2, steps: 10}"])
    assert run.train.sizes(run.data.seq).before(20) == 10 * 2 + 10 * 4
