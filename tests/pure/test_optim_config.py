"""Schedules at points known in closed form, and the rules that need only names and shapes."""

import math
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from moefold.config.base import Record
from moefold.optim.config import (
    LR_SCHEDULE,
    OPTIMIZER,
    AdamW,
    Constant,
    Cosine,
    LinearDecay,
    LrSchedule,
    Muon,
    Wsd,
)

ANY_OPTIMIZER = TypeAdapter(Annotated[Record, OPTIMIZER])


@pytest.mark.parametrize(
    ("schedule", "step", "factor"),
    [
        (Constant(warmup=3), 0, 1 / 4),
        (Constant(warmup=3), 2, 3 / 4),
        (Constant(warmup=3), 3, 1),
        (Constant(warmup=3), 99, 1),
        (LinearDecay(), 0, 1),
        (LinearDecay(), 25, 0.75),
        (LinearDecay(final=0.2), 50, 0.6),
        (LinearDecay(final=0.2), 100, 0.2),
        (LinearDecay(warmup=20), 60, 0.5),
        (Cosine(final=0.0), 50, 0.5),
        (Cosine(final=0.1, warmup=20), 60, 0.55),
        (Cosine(final=0.0, warmup=10), 40, 0.75),  # a third of the way: (1 + cos 60°) / 2
        (Cosine(final=0.1), 100, 0.1),
        (Wsd(warmup=20, decay=40), 19, 20 / 21),
        (Wsd(warmup=20, decay=40), 20, 1),
        (Wsd(warmup=20, decay=40), 60, 1),
        (Wsd(warmup=20, decay=40), 70, 0.75),
        (Wsd(warmup=20, decay=40, final=0.1), 80, 0.55),
        (Wsd(decay=40, shape="cosine"), 80, 0.5),
        (Wsd(decay=40, shape="sqrt"), 70, 0.5),
        (Wsd(decay=40, shape="sqrt"), 99, 1 - math.sqrt(39 / 40)),
        (Wsd(decay=40, final=0.3), 100, 0.3),
        (Wsd(decay=0), 99, 1),
        (Wsd(decay=100), 50, 0.5),
    ],
)
def test_factor_at_known_points(schedule: LrSchedule, step: int, factor: float) -> None:
    """Runs of 100 steps."""
    assert schedule.factor(step, 100) == pytest.approx(factor, abs=1e-15)


def test_a_run_longer_than_planned_keeps_the_end_value() -> None:
    """A folder continued past its planned end does not rise again."""
    for schedule in (LinearDecay(final=0.1), Cosine(final=0.1), Wsd(final=0.1)):
        assert schedule.factor(150, 100) == pytest.approx(0.1)


def test_a_fraction_means_the_steps_it_rounds_to() -> None:
    """0.2 of 70 steps is 14 steps; 0 and 0.0 are the same."""
    by_share, by_steps = Wsd(warmup=0.1, decay=0.2), Wsd(warmup=7, decay=14)
    assert [by_share.factor(s, 70) for s in range(70)] == [
        by_steps.factor(s, 70) for s in range(70)
    ]
    assert LinearDecay(warmup=0.0).factor(0, 70) == LinearDecay(warmup=0).factor(0, 70) == 1


spans = st.one_of(st.integers(0, 60), st.floats(0, 0.999))


@given(
    warmup=spans,
    decay=spans,
    total=st.integers(1, 50),
    kind=st.sampled_from([Constant, LinearDecay, Cosine, Wsd]),
)
def test_what_fits_has_one_peak_and_what_does_not_is_mended(
    warmup: int | float, decay: int | float, total: int, kind: type[LrSchedule]
) -> None:
    """After each nearest value is put in, the schedule fits, rises, reaches 1 and falls."""
    schedule = Wsd(warmup=warmup, decay=decay) if kind is Wsd else kind(warmup=warmup)
    assert not list(schedule.rules())
    mended = {str(v.path[0]): v.nearest for v in schedule.violations(total)}
    schedule = schedule.model_copy(update=mended)
    assert not list(schedule.violations(total))
    factors = [schedule.factor(step, total) for step in range(total)]
    peak = factors.index(max(factors))
    assert factors[peak] == 1
    assert factors[: peak + 1] == sorted(set(factors[: peak + 1]))
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert min(factors) > 0


def test_violations_name_the_place_in_the_optimizer() -> None:
    """The composite learns where in the record the value stands."""
    (warmup,) = AdamW(schedule_lr=LinearDecay(warmup=20)).violations(10)
    assert (warmup.path, warmup.value, warmup.nearest) == (("schedule_lr", "warmup"), 20, 9)
    (decay,) = Muon(schedule_lr=Wsd(warmup=6, decay=0.5)).violations(10)
    assert (decay.path, decay.value, decay.nearest) == (("schedule_lr", "decay"), 0.5, 4)
    assert not list(AdamW().violations(1))


@pytest.mark.parametrize(("span", "nearest"), [(-3, 0), (-0.5, 0), (1.0, 1), (1.2, 1), (20.0, 20)])
def test_a_span_is_steps_or_a_fraction(span: int | float, nearest: int) -> None:
    """1.0 could mean one step or the whole run, so it is refused."""
    (violation,) = Wsd(decay=span).rules()
    assert violation.path == ("decay",)
    assert violation.nearest == nearest
    assert not list(Wsd(decay=nearest).rules())


def test_the_run_file_shape() -> None:
    """The documented form of a run file's ``optim`` is read as it is meant."""
    read = ANY_OPTIMIZER.validate_python(
        {
            "kind": "muon",
            "lr": 0.01,
            "rest": {"kind": "adamw", "lr": 0.006},
            "schedule_lr": {"kind": "wsd", "warmup": 20},
        }
    )
    assert isinstance(read, Muon)
    assert (read.lr, read.rest.lr, read.schedule_lr) == (0.01, 0.006, Wsd(warmup=20))
    assert ANY_OPTIMIZER.validate_python("adamw") == AdamW()
    assert set(OPTIMIZER.kinds) == {"adamw", "lion", "muon", "sgd"}
    assert {"constant", "linear", "cosine", "wsd"} <= set(LR_SCHEDULE.kinds)
    assert list(Muon.model_fields)[:2] == list(AdamW.model_fields)[:2] == ["kind", "lr"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": -1.0},
        {"lr": "0.1"},
        {"betas": [0.9]},
        {"betas": [0.9, 1.0]},
        {"eps": 0.0},
        {"clip_norm": 0.0},
        {"schedule_lr": {"kind": "step"}},
        {"schedule_lr": {"kind": "wsd", "warmup": "20"}},
        {"schedule_lr": {"kind": "wsd", "warmup": True}},
        {"schedule_lr": {"kind": "linear", "final": 1.5}},
        {"momentum": 0.9},
    ],
)
def test_fields_out_of_range_are_refused(wrong: dict) -> None:
    """Types are strict, ranges are those of the formulas."""
    with pytest.raises(ValidationError):
        ANY_OPTIMIZER.validate_python({"kind": "adamw", **wrong})


def test_the_rest_has_no_schedule_of_its_own() -> None:
    """One schedule drives both groups."""
    with pytest.raises(ValidationError):
        ANY_OPTIMIZER.validate_python({"kind": "muon", "rest": {"schedule_lr": "linear"}})


@pytest.mark.parametrize(
    ("name", "shape", "decays"),
    [
        ("embedding.weight", (100, 16), True),
        ("head.weight", (100, 16), True),
        ("layers.0.attention.q.weight", (16, 16), True),
        ("layers.0.moe.experts.w_in", (4, 32, 16), True),
        ("layers.0.moe.router.weight", (4, 16), True),
        ("layers.0.norm.weight", (16,), False),
        ("layers.0.attention.sinks", (4,), False),
        ("layers.0.attention.q.bias", (16,), False),
        ("layers.0.moe.experts.in_bias", (4, 2, 32), False),  # two dims, and still a bias
    ],
)
def test_what_decays(name: str, shape: tuple[int, ...], decays: bool) -> None:
    """Weight decay takes matrices, embeddings included, and no norm or bias."""
    assert AdamW().decays(name, shape) is decays
    assert AdamW(no_decay=("*",)).decays(name, shape) is False


@pytest.mark.parametrize(
    ("name", "shape", "matrix"),
    [
        ("layers.0.attention.qkv.weight", (48, 16), True),
        ("layers.0.moe.shared.w_in", (2, 32, 16), True),
        ("layers.0.moe.shared.w_out", (16, 8), True),
        ("layers.0.attention.heads_out.weight", (16, 16), True),
        ("layers.0.moe.shared.gate.weight", (1, 16), False),  # a row is a vector
        ("embedding.weight", (100, 16), False),
        ("embed.weight", (100, 16), False),
        ("head.weight", (100, 16), False),
        ("mtp.0.head.weight", (100, 16), False),
        ("layers.0.moe.router.weight", (4, 16), False),
        ("layers.0.norm.weight", (16,), False),
        ("layers.0.attention.q_norm.weight", (4, 16), False),  # a vector for each head
        ("layers.0.moe.experts.w_in", (4, 2, 32, 16), True),
        ("layers.0.moe.experts.in_bias", (4, 2, 32), False),
    ],
)
def test_what_muon_takes(name: str, shape: tuple[int, ...], matrix: bool) -> None:
    """Matrices and stacks of them, but not those whose rows belong to tokens or experts."""
    assert Muon().orthogonalises(name, shape) is matrix
    kept = Muon().state_names(name, shape)
    assert kept == (("momentum",) if matrix else AdamW().state_names(name, shape))
