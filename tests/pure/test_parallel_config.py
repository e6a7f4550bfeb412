"""A layout's schedule is held to the sizes and to the step, with the nearest legal values."""

from typing import Any

import pytest

from moefold.config.errors import RunError
from moefold.parallel.config import Layout
from moefold.run import load_run


def refused(*overrides: str) -> dict[str, Any]:
    """Return the nearest legal value by path of everything wrong with the demo recipe."""
    with pytest.raises(RunError) as error:
        load_run("demo", overrides)
    return {".".join(map(str, v.path)): v.nearest for v in error.value.violations}


BATCH = "train.batch=4"
MICRO = "train.micro_batch=1"


def test_a_schedule_outside_its_chunks_names_the_nearest_sizes() -> None:
    given = ("layout.sizes=pp2", "layout.schedule={kind: dualpipe_v}", BATCH, MICRO)
    assert refused(*given) == {"layout.sizes": "pp2 vpp2"}
    given = ("layout.sizes=pp2 vpp2", "layout.schedule={kind: 1f1b}", BATCH, MICRO)
    assert refused(*given) == {"layout.sizes": "pp2"}


def test_a_v_without_a_pipeline_is_left_out() -> None:
    assert refused("layout.schedule={kind: zb_v}") == {"layout.schedule": None}


def test_groups_that_are_too_short_name_the_shortest() -> None:
    given = ("layout.sizes=pp2 vpp2", "layout.schedule={kind: zb_h1, group: 1}", BATCH, MICRO)
    assert refused(*given) == {"layout.schedule.group": 2}


def test_a_step_with_too_few_micro_batches_names_the_nearest_batch() -> None:
    given = ("layout.sizes=pp2 vpp2", "layout.schedule={kind: zb_v}", "train.batch=6")
    assert refused(*given, "train.micro_batch=2") == {"train.batch": 8}


def test_a_step_that_some_number_of_data_ranks_can_run_is_legal() -> None:
    # Of groups of five, six on one data rank leave one over; three on two fill one.
    given = {"sizes": "pp3 vpp2", "schedule": {"kind": "interleaved", "group": 5}}
    layout = Layout.model_validate(given)
    assert not list(layout.step_violations(6))
    assert [found.nearest for found in layout.step_violations(7)] == [8]


def test_a_step_of_any_number_of_micro_batches_is_judged_at_once() -> None:
    """By the numbers that data ranks could have of them, of which there are few."""
    given = {"sizes": "pp3 vpp2", "schedule": {"kind": "interleaved"}}
    assert not list(Layout.model_validate(given).step_violations(3 * 2**40))
    assert list(Layout.model_validate(given).step_violations(2**40))


@pytest.mark.parametrize("text", ["tp2,ep2", "tp2, ep2", "tp2ep2", "tp2;ep2"])
def test_sizes_that_are_written_otherwise_are_answered_with_sizes(text: str) -> None:
    with pytest.raises(RunError) as error:
        load_run("tiny", [f"layout.sizes={text!r}"])
    (found,) = error.value.violations
    assert found.nearest == "tp2 ep2"
    assert found.rule == "must be text of at most 200 characters of the form 'tp2 pp2 ep4'"


def test_where_state_lies_is_held_to_what_there_is() -> None:
    assert refused("layout.state={at: host, share: 1.5}") == {"layout.state.share": 1.0}
    assert refused("layout.state={at: host, share: -0.1}") == {"layout.state.share": 0.0}
    assert refused("layout.state={step: host}") == {"layout.state.step": "device"}
    assert refused("layout.state={at: disk}") == {"layout.state.folder": "./scratch"}
    assert refused("layout.state={at: host, folder: here}") == {"layout.state.folder": None}
    given = ("layout.state={at: host, step: host}", "optim={kind: muon}")
    assert refused(*given) == {"layout.state.step": "device"}
