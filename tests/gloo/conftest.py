"""Tests of several processes run one after another: each already fills the machine."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep every test of this folder on one worker."""
    for item in items:
        if "tests/gloo/" in item.path.as_posix():
            item.add_marker(pytest.mark.xdist_group("gloo"))
