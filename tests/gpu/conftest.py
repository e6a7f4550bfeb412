"""Tests that need a CUDA device; where there is none, most run on a stand-in for it.

What a CPU can run too takes the fixture ``device``, and runs on both.
"""

from collections.abc import Generator, Iterator

import pytest
import torch
from gpu.device import Bench

from tests.gpu import stand_in

RESULTS = pytest.StashKey[dict[str, bool]]()
"""Whether each test passed on a device, with all its parameters."""


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where a test runs."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def some_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Stand in for a device where a test wants one and the machine has none."""
    if stand_in.HAS_DEVICE or request.node.get_closest_marker("gpu") is None:
        yield
        return
    with stand_in.opened():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder that wants a device, and skip those that a stand-in tells
    nothing."""
    for item in items:
        given = getattr(item, "callspec", None)
        on_cpu = given is not None and given.params.get("device") == "cpu"
        if "tests/gpu/" not in item.path.as_posix() or on_cpu:
            continue
        item.add_marker(pytest.mark.gpu)
        if not stand_in.HAS_DEVICE and item.get_closest_marker("real_device"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write down which tests have passed on the machine's device, beside those that had before."""
    results = session.config.stash.get(RESULTS, dict[str, bool]())
    if not stand_in.HAS_DEVICE or not results:
        return
    bench = Bench("tests")
    bench.read()
    bench.rows = [row for row in bench.rows if results.get(row["name"], True)]
    known = {row["name"] for row in bench.rows}
    for name in sorted(name for name, passed in results.items() if passed and name not in known):
        bench.add(name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Function, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note whether a test of a device passed with all its parameters."""
    report = yield
    if report.when == "call" and not report.skipped and item.get_closest_marker("gpu"):
        results = item.config.stash.setdefault(RESULTS, {})
        name = f"{item.path.name}::{item.originalname}"
        results[name] = results.get(name, True) and report.passed
    return report
