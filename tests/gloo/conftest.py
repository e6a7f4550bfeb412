"""Tests whose ranks are processes of their own."""

import pytest

from moefold.comm.fork_server import fork_server
from tests.gloo.harness import load_in_fork_server


@pytest.fixture(scope="session", autouse=True)
def ranks_start_fast() -> None:
    """The server is started before the first test: some measure how soon ranks are there."""
    load_in_fork_server()
    fork_server()
