"""State that lies on the host or on disk: the bits of state on the device, in every layout."""

import pytest

from tests.gloo.offloading import BY_HOST, PLACES, Trip, comparisons
from tests.gloo.shares import Case

SELECTED = (
    Trip(Case(zero=1), Case("ep2", 3)),
    Trip(Case(zero=0, optim="muon"), Case("tp2", 2, "muon")),
)
WIDE = (
    *(Trip(Case(zero=z), Case("ep2", 3 - z)) for z in (0, 2, 3)),
    *(Trip(Case(zero=z, optim="muon"), Case("ep2 etp2", 3 - z, "muon")) for z in (1, 2, 3)),
    Trip(Case("pp2", 1, model="tied", micro_batches=8), Case("tp2", 3, model="tied"), "fp32"),
    Trip(Case("cp2", 3, model="latent"), Case("tp2 ep4", 0, model="latent"), "fp64"),
    Trip(Case(zero=3, more=(("zero_ranks", 2),)), Case("pp2 vpp2", 2, micro_batches=8), "fp32"),
)
MATRIX = pytest.mark.matrix
TRIPS = [*SELECTED, *(pytest.param(trip, marks=MATRIX) for trip in WIDE)]
BOUND = 1e-6


@pytest.mark.parametrize("trip", TRIPS)
def test_state_elsewhere_is_saved_resumed_and_updated_to_the_same_bits(trip: Trip) -> None:
    for rank in comparisons(SELECTED if trip in SELECTED else WIDE, PLACES):
        for count, differ, _ in rank[trip]:
            assert count > 20
            assert not differ


@pytest.mark.parametrize("trip", [p for p in TRIPS if "muon" not in str(p)])
def test_a_step_of_the_host_is_a_step_of_the_device(trip: Trip) -> None:
    trips = tuple(t for t in (SELECTED if trip in SELECTED else WIDE) if t.first.optim == "adamw")
    for rank in comparisons(trips, BY_HOST):
        for _, _, far in rank[trip]:
            assert far <= BOUND
