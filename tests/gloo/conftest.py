"""Tests whose ranks are processes of their own."""

import pytest

from tests.gloo.harness import load_in_fork_server


@pytest.fixture(scope="session", autouse=True)
def ranks_start_fast() -> None:
    """Before any test of this folder starts ranks, whichever comes first."""
    load_in_fork_server()
