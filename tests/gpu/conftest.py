"""Tests that need a CUDA device; each is reported as skipped where there is none.

What a CPU can run too takes the fixture ``device``, and runs on both.
"""

import pytest
import torch


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where a test runs."""
    return torch.device(request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder that wants a device, and skip it on a machine without CUDA."""
    for item in items:
        given = getattr(item, "callspec", None)
        on_cpu = given is not None and given.params.get("device") == "cpu"
        if "tests/gpu/" not in item.path.as_posix() or on_cpu:
            continue
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
