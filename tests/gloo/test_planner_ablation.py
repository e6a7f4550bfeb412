"""The ablation's policies on a shrunk model: what ranks hold is what is planned, to the byte."""

import pytest
from memory_ablation import OURS, execute

SOME = "mla_up + norms, experts on the host"
"""The one that runs each time; all do behind ``make matrix``."""
MARKED = [name if name == SOME else pytest.param(name, marks=pytest.mark.matrix) for name in OURS]


@pytest.mark.parametrize("name", MARKED)
def test_each_policy_is_executed_to_the_byte(name: str) -> None:
    found = execute(OURS[name])
    assert not found.wrong
    assert found.planned == found.executed > 0
