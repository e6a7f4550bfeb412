"""Goodput against worked figures of its formula, and what scaling and bills follow from it."""

import itertools
import math
from dataclasses import replace

import pytest

from moefold.parallel.config import Layout
from moefold.planner.goodput import (
    Faults,
    Price,
    goodput,
    optimal_save_interval,
    run_cost,
    scaling_curve,
)
from moefold.planner.hardware import Cluster, cpu_device, parse_cluster
from moefold.planner.published import published_model
from moefold.planner.task import task_from_model

# 16,384 devices that fail 4.7e-4 times a day: stall, restart, minutes between saves, ETTR.
WORKED = [
    (148.8, 600, 30.5, 0.784),
    (6.3, 600, 6.3, 0.913),
    (1.0, 600, 2.5, 0.933),
    (1.0, 60, 2.5, 0.981),
]


@pytest.mark.parametrize(("stall", "restart", "minutes", "ettr"), WORKED)
def test_worked_figures(stall: float, restart: float, minutes: float, ettr: float) -> None:
    found = goodput(16384, Faults(4.7e-4, restart, stall))
    assert found.save_interval_s / 60 == pytest.approx(minutes, abs=0.05)
    assert found.ettr == pytest.approx(ettr, abs=5e-4)
    assert 1 - sum(found.lost_shares.values()) == pytest.approx(found.ettr)


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.1, 2.0])
def test_no_interval_beats_the_best(factor: float) -> None:
    faults, found = Faults(), goodput(4096)
    rate, best = faults.failures_per_second(4096), found.save_interval_s

    def lost(every: float) -> float:
        return faults.stall_s / every + rate * every / 2

    assert lost(best * factor) > lost(best)
    assert found.lost_shares["saving"] + found.lost_shares["again"] == pytest.approx(lost(best))


def test_without_failures_nothing_is_lost() -> None:
    found = goodput(1000, Faults(per_device_day=0.0))
    assert found.ettr == 1.0 and math.isinf(found.save_interval_s)
    assert optimal_save_interval(5.0, 0.0) == math.inf


def test_refuses_what_is_no_rate() -> None:
    with pytest.raises(ValueError, match="restart_s"):
        Faults(restart_s=-1.0)


def test_curves_reach_far_and_fall() -> None:
    task = task_from_model(published_model("OLMoE-1B-7B"), parse_cluster("h100x8"), 64)
    weak = scaling_curve(task, task.case(Layout()), "weak")
    assert weak[-1].devices == 65536 and weak[-1].batch == 8 * 65536
    assert all(b.ettr < a.ettr for a, b in itertools.pairwise(weak))
    strong = scaling_curve(task, task.case(Layout()), "strong")
    assert [point.devices for point in strong] == [1, 2, 4, 8, 16, 32, 64]
    assert {point.batch for point in strong} == {64}
    rates = [point.tflops_per_gpu for point in strong]
    assert rates == sorted(rates, reverse=True)


def test_a_bill() -> None:
    task = task_from_model(published_model("OLMoE-1B-7B"), parse_cluster("h100x8"), 64)
    found = run_cost(task, tokens_per_s=1e6, tokens=3.6e9, price=Price(2.0, pue=1.0))
    assert found.device_hours == pytest.approx(8.0) and found.cost == pytest.approx(16.0)
    assert found.energy_mwh == pytest.approx(8 * 700 * 1.35 / 1e6)
    assert run_cost(task, 1e6, 3.6e9).cost is None
    unknown = replace(task, cluster=Cluster(cpu_device(1e11, 1e10, 2**34), 1, 1, 1))
    assert run_cost(unknown, 1e6, 3.6e9).energy_mwh is None, "a device whose power nobody states"
