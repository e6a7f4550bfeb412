"""What ranks hold and send when they share: memory and bytes against formulas; bf16."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch

from moefold.mesh.partition import ALIGN
from moefold.parallel.data.bucket import Bucket
from moefold.planner.case import NumberFormats, Recipe, StageContents, distinct_blocks
from moefold.planner.hardware import Cluster, cpu_device
from moefold.planner.memory_chunk import two_largest, unsharded_units
from moefold.planner.memory_state import StateSharding
from moefold.planner.task import TrainingTask
from moefold.spec.decoder import model_weights
from moefold.training.step import gradients
from tests.gloo.harness import run_ranks
from tests.gloo.shares import CHUNK, DECODERS, OPTIMIZERS, Case, opened, own, update

RANKS = 4
ZEROS = (1, 2, 3)


@contextmanager
def watched(peaks: dict[str, int]) -> Iterator[None]:
    """Note the most elements of whole weights and of whole gradients that are there at once."""
    alive: dict[str, dict[int, int]] = {"weights": {}, "gradients": {}}

    def note(what: str, bucket: Bucket, elements: int) -> None:
        alive[what][id(bucket)] = elements
        peaks[what] = max(peaks.get(what, 0), sum(alive[what].values()))

    resize, opening, close = Bucket._resize, Bucket.open_gradients, Bucket.free_gradients

    def resized(self: Bucket, elements: int) -> None:
        note("weights", self, elements)
        resize(self, elements)

    def opened_(self: Bucket) -> None:
        opening(self)
        note("gradients", self, 0 if self.gradients is None else self.gradients.numel())

    def closed(self: Bucket) -> None:
        close(self)
        note("gradients", self, 0)

    Bucket._resize, Bucket.open_gradients, Bucket.free_gradients = resized, opened_, closed  # type: ignore
    try:
        yield
    finally:
        Bucket._resize, Bucket.open_gradients, Bucket.free_gradients = resize, opening, close  # type: ignore


def look(case: Case, precision: str) -> dict[str, Any]:
    """Make two steps without clipping; return what was held and sent, and the weights."""
    peaks: dict[str, int] = {}
    with watched(peaks):
        data = opened(case, RANKS, precision)
        optimizer = data.optimizer(OPTIMIZERS["adamw"])
        recorder = data.parts.world.recorder
        recorder.clear()
        for _ in range(2):
            figures = gradients(data, own(case, data), CHUNK)
            update(data, optimizer, figures.grad_norm, clip=None)
    buckets = list(data.buckets)
    state = sum(t.numel() for t in optimizer.state().values() if t.dim())
    kept = {t.untyped_storage().data_ptr(): t for t in data.params.values()}
    return {
        "peaks": peaks,
        "buckets": [(b.unit, b.length, b.values.element_size(), len(b.slots)) for b in buckets],
        "state": state,
        "masters": sum(t.untyped_storage().nbytes() for t in kept.values()),
        "handles": sum(
            p.untyped_storage().nbytes()
            for name, p in data.parts.model.named_parameters()
            if p is not data.params.get(name)
        ),
        "sent": {
            label: sum(t.bytes for site, t in recorder.totals.items() if site.label == label)
            for label in ("weights", "gradients")
        },
        "whole": sum(p.numel() for p in data.parts.model.parameters()),
        "weights": {(held.name, held.box): held.tensor.detach().clone() for held in data.weights()},
    }


def looks(rank: int) -> dict[tuple[str, int], dict[str, Any]]:
    """Look at all stages in both precisions."""
    return {
        (precision, zero): look(Case(zero=zero, micro_batches=8), precision)
        for precision in ("fp64", "fp32", "bf16")
        for zero in ZEROS
    }


@cache
def seen() -> list[dict[tuple[str, int], dict[str, Any]]]:
    """Return what each rank saw."""
    return run_ranks(looks, RANKS, time_out_s=90)


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_masters_and_state_are_divided(precision: str, zero: int) -> None:
    by_rank = [rank[precision, zero] for rank in seen()]
    whole = by_rank[0]["whole"]
    # Two moments of each element, on one rank each; a run is padded, state is not.
    assert sum(rank["state"] for rank in by_rank) == 2 * whole
    width = 8 if precision == "fp64" else 4
    for rank in by_rank:
        slots = sum(count for *_, count in rank["buckets"])
        padding = ALIGN * (slots / RANKS + len(rank["buckets"]))
        assert rank["masters"] <= width * (whole / RANKS + padding)
        assert rank["state"] <= 2 * (whole / RANKS + padding)
        assert rank["handles"] == slots * width, "a handle holds one NaN"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", [1, 2])
def test_state_is_what_the_planner_says(precision: Recipe, zero: int) -> None:
    """To the byte, but for the padding of runs."""
    case = Case(zero=zero)
    record, device = DECODERS[case.model], cpu_device(1e11, 1e10, 2**34)
    numbers = NumberFormats(precision, OPTIMIZERS[case.optim])
    task = TrainingTask(
        "held", record, 24, 4 * RANKS, Cluster(device, RANKS, RANKS, RANKS), numbers
    )
    planned = StateSharding.of(task.case(case.layout)).local_state(model_weights(record))
    for rank in (seen[precision, zero] for seen in seen()):
        runs = [(length * RANKS, width) for _, length, width, _ in rank["buckets"]]
        padding = 4 * (sum(length for length, _ in runs) - rank["whole"])
        weights = sum(length * width for length, width in runs)
        assert rank["peaks"]["weights"] == sum(length for length, _ in runs), "all at once"
        assert 0 <= weights - planned.weights <= padding
        assert 0 <= rank["masters"] - planned.master <= padding
    held = sum(seen[precision, zero]["state"] for seen in seen())
    assert 4 * held == pytest.approx(RANKS * planned.moments)


@pytest.mark.parametrize("zero", [2, 3])
def test_what_passes_have_whole_is_what_the_planner_says(zero: int) -> None:
    """Of two units at once: no less than there is, and no more than a norm or a table beyond it."""
    case, record = Case(zero=zero), DECODERS[Case().model]
    where = Cluster(cpu_device(1e11, 1e10, 2**34), RANKS, RANKS, RANKS)
    numbers = NumberFormats("fp32", OPTIMIZERS[case.optim], weight_bytes=0)
    task = TrainingTask("held", record, 24, 4 * RANKS, where, numbers)
    split = StateSharding.of(task.case(case.layout))
    held = StageContents(tuple((kind, 1) for kind in distinct_blocks(record)[1]), 0, True, True)
    weights, gradients = map(two_largest, unsharded_units(record, split, held))
    for rank in seen():
        looked = rank["fp32", zero]
        small = 4 * sum(length * RANKS for unit, length, *_ in looked["buckets"] if unit == "norm")
        table = 4 * sum(length * RANKS for unit, length, *_ in looked["buckets"] if unit == "embed")
        assert 0 <= 4 * looked["peaks"]["gradients"] - gradients <= table
        if zero == 3:
            assert 0 <= 4 * looked["peaks"]["weights"] - weights <= small


def test_stages_let_go_what_they_divide() -> None:
    for rank in seen():
        for precision in ("fp64", "bf16"):
            looked = {zero: rank[precision, zero] for zero in (1, 2, 3)}
            everything = sum(length * RANKS for _, length, *_ in looked[1]["buckets"])
            units: dict[str, int] = {}
            for unit, length, *_ in looked[1]["buckets"]:
                units[unit] = units.get(unit, 0) + length * RANKS
            two = sum(sorted(units.values())[-2:])
            assert looked[1]["peaks"]["gradients"] == everything
            assert looked[1]["peaks"]["weights"] == looked[2]["peaks"]["weights"] == everything
            for zero in (2, 3):
                assert looked[zero]["peaks"]["gradients"] <= two + units["embed"] < everything
            assert looked[3]["peaks"]["weights"] <= two + units["norm"] < everything


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_bytes_are_those_of_the_formulas(precision: str, zero: int) -> None:
    """Rings: each rank sends (n - 1) runs of a bucket, for its weights and for its gradients."""
    steps, micro_batches = 2, 2
    for rank in seen():
        looked = rank[precision, zero]
        weights = sums = 0
        for unit, length, width, _ in looked["buckets"]:
            # There and back; the table is not read on the way back, the head is used once.
            visits = 1 if unit in ("embed", "head") else 2
            gathers = steps if zero < 3 else steps * micro_batches * visits
            weights += gathers * (RANKS - 1) * length * width
            master = 8 if precision == "fp64" else 4
            sums += steps * (micro_batches if zero > 1 else 1) * (RANKS - 1) * length * master
        assert looked["sent"]["weights"] == weights
        assert looked["sent"]["gradients"] == sums


def test_bf16_gathers_half_of_fp32_but_for_what_is_read_wide() -> None:
    for rank in seen():
        widths: dict[str, set[int]] = {}
        for unit, _, width, _ in rank["bf16", 1]["buckets"]:
            widths.setdefault(unit, set()).add(width)
        layers = {f"layers.{number}": {2, 4} for number in range(2)}
        assert widths == {"embed": {4}, **layers, "norm": {4}, "head": {2}}


def test_weights_that_come_and_go_give_the_bits_of_those_that_stay() -> None:
    """Whether weights stay whole changes no bit."""
    for rank in seen():
        for place, values in rank["bf16", 2]["weights"].items():
            assert torch.equal(values, rank["bf16", 3]["weights"][place])
