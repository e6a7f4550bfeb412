"""Tests that compute with torch on one CPU thread."""

from collections.abc import Iterator

import pytest
import torch

from tests.gloo.harness import load_in_fork_server


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Start each test from torch's own settings, and see to it that none leak into the next."""
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    # To ask for it, even for what is so, imports torch's compiler.
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session", autouse=True)
def ranks_start_fast() -> None:
    """Some tests here start ranks first, and what these fork from serves later tests too."""
    load_in_fork_server()
