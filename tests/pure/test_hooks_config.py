"""Records of what is watched: choices, defaults, and the rules between fields."""

import pytest
from pydantic import ValidationError

from moefold.training.hooks.config import Evaluate, Profile, Sample, Watch


def test_a_run_that_says_nothing_is_evaluated_saved_and_drawn() -> None:
    """What protects a run is on unless it is turned off."""
    watch = Watch()
    assert watch.evaluate and watch.health and watch.plots and watch.experts_page
    assert watch.checkpoint.every == 500
    assert watch.sample is None and watch.profile is None


def test_steps_to_profile_rise() -> None:
    """The nearest legal value holds the same steps."""
    (found,) = Profile(steps=(5, 3, 5)).rules()
    assert found.path == ("steps",) and found.nearest == [3, 5]
    assert not list(Profile(steps=(3, 5)).rules())


def test_each_baseline_stands_once() -> None:
    """The first of two stays."""
    (found,) = Evaluate(baselines=("xz", "bigram", "xz")).rules()
    assert found.nearest == ["xz", "bigram"]
    assert not list(Evaluate(baselines=("xz",)).rules())


@pytest.mark.parametrize(
    "given",
    [{"prompts": ()}, {"prompts": ("a",), "temperature": -1.0}, {"prompts": ("a",), "top_p": 0.0}],
)
def test_samples_need_a_prompt_and_a_distribution(given: dict) -> None:
    """No prompt, a negative temperature, or nothing to draw from."""
    with pytest.raises(ValidationError):
        Sample(**given)


def test_limits_of_a_wait_are_positive() -> None:
    """0 seconds would fail every collective."""
    with pytest.raises(ValidationError):
        Watch(time_out_s=0.0)
