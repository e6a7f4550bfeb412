"""Seconds of what ``make chaos`` does for an hour: each kind of fault, on four ranks."""

from pathlib import Path

import pytest
from fault_injection import Fire, Injector, measured, same, trained

from tests.cpu.runs import own_data
from tests.gloo.harness import one_at_a_time

RANKS = 4
FIRE = Fire(seconds=1.5, every_s=0.2)


@pytest.mark.slow
def test_a_run_under_fire_is_the_run_in_peace(tmp_path: Path) -> None:
    fire, peace = tmp_path / "fire", tmp_path / "peace"
    data = own_data(tmp_path)
    with one_at_a_time():
        injector = Injector(fire, RANKS, FIRE)
        ours = trained(fire, RANKS, injector=injector, changes=data)
        injector.join(60)
        peace.mkdir()
        (peace / ".prepared").symlink_to(fire / ".prepared")
        trained(peace, RANKS, until=len(ours.lines), changes=data)
    assert not injector.error
    found = measured(ours, injector.made)
    lost = [fault for fault in injector.made if fault["kind"] not in {"full", "slow", "stop"}]
    assert found["faults"] == 7 and len(lost) == 4 and found["recoveries"] >= 4
    assert all(fault.get("recoveries") for fault in lost)
    assert found["steps_lost"] == 1
    assert found["back_most_s"] < 30, "what died is started anew in seconds"
    assert same(fire, peace) == {
        "steps_compared": len(ours.lines),
        "first_difference": None,
        "curve_equal": True,
        "each_step_once": True,
        "samples_equal": True,
    }
