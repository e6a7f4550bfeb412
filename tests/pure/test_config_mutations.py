"""Every field broken in every way is refused at once, with a nearest value that mends it."""

import random
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.config.check import check
from moefold.config.load import load
from tests.config_toys import Train, full, smallest
from tests.mutations import Judge, Mutation, may_stay, mutations, repair

SOURCES = {"full": full, "smallest": smallest}


@pytest.mark.parametrize("name", SOURCES)
def test_every_mutation_is_refused_and_can_be_mended(name: str) -> None:
    data = SOURCES[name]()
    judge = Judge(Train, lambda raw: load(Train, raw), data)
    found = list(mutations(Train, data))
    assert len(found) > {"full": 500, "smallest": 50}[name]
    for mutation in found:
        judge(mutation)


FULL = list(mutations(Train, full()))


@pytest.mark.parametrize("seed", range(8))
def test_several_mutations_at_once_are_all_reported_and_mended(seed: int) -> None:
    data = _several(random.Random(seed), 2 + seed % 5)
    verdict = check(Train, data)
    mended = repair(Train, data, verdict.violations)
    again = check(Train, mended)
    left = {item.path for item in again.violations}
    assert left <= may_stay(verdict.violations), (data, verdict.violations, again.violations)


def _several(chance: random.Random, count: int) -> Any:
    """Return data with several mutations, each made on the data that the last one left."""
    data = full()
    for _ in range(count):
        found = list(mutations(Train, data))
        data = chance.choice(found).data
    return data


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(st.integers(0, 2**32), JUNK)
def test_junk_anywhere_can_be_mended(seed: int, junk: Any) -> None:
    chosen: Mutation = random.Random(seed).choice(FULL)
    data = deepcopy(chosen.data)
    holder = data
    for part in chosen.path[:-1]:
        holder = holder[part]
    if chosen.path and (isinstance(holder, dict) or chosen.path[-1] < len(holder)):
        holder[chosen.path[-1]] = junk
    verdict = check(Train, data)
    left = {item.path for item in check(Train, repair(Train, data, verdict.violations)).violations}
    assert left <= may_stay(verdict.violations)


@settings(max_examples=30, deadline=None, database=None, derandomize=True)
@given(JUNK)
def test_junk_as_a_whole_run_can_be_mended(junk: Any) -> None:
    verdict = check(Train, junk)
    assert check(Train, repair(Train, junk, verdict.violations)).record is not None
