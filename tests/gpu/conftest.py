"""Tests that need a CUDA device; each is reported as skipped where there is none."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder, and skip it on a machine without CUDA."""
    here = [item for item in items if "tests/gpu/" in item.path.as_posix()]
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
