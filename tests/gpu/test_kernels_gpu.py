"""Kernels on a device: beyond 31-bit counts, without waiting for the host, on dirty memory."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from moefold.data.batch import from_ids
from moefold.kernels.grouped.choose import choose_kernel
from moefold.layers.config import Full
from moefold.layers.kinds.dense import Dense
from moefold.model.config import Decoder
from moefold.model.decoder import DecoderModel
from moefold.moe.config import Capacity, Router, Shared
from moefold.moe.dispatch.routing_plan import host_counts
from tests.cpu.mixtures import MIXTURES, run_mixture
from tests.cpu.small import (
    DEEP,
    GQA,
    MLA,
    decoder,
    gradients,
    ids_of,
    model_of,
    moe,
    padded_rows,
    relative,
    same,
)
from tests.large_rows import Size, check

DEVICE = "cuda"
# 2**19 + 128 rows of 4096: 2**31 + 2**19 elements, 4.3 GB in bf16; about 30 GB at the peak.
LARGE = Size(tokens=2**18 + 64, copies=2, hidden=4096, width=128, experts=16, device=DEVICE)
ROOM = 48 << 30


@pytest.mark.real_device
def test_more_elements_than_31_bits_count() -> None:
    """Permute, grouped products and combine. Plant: 32-bit places of elements."""
    assert LARGE.tokens * LARGE.copies * LARGE.hidden > 2**31
    if torch.cuda.mem_get_info()[0] < ROOM:
        pytest.skip("needs 48 GB of free device memory")
    check(LARGE, choose_kernel("grouped", torch.bfloat16, LARGE.hidden, LARGE.width))
    torch.cuda.empty_cache()


def on_device(record: Decoder, precision: str, **layout: Any) -> DecoderModel:
    """Return a model with drawn values, moved to the device as a whole."""
    return model_of(record, precision, **layout).to(DEVICE)


def on_host(model: DecoderModel) -> dict[str, Tensor]:
    """Return a copy of every gradient."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad.to("cpu", copy=True) for name, grad in found.items()}


# All experts are chosen, so that rounding moves no choice.
ALL = Router(experts=4, top_k=4)
SMOOTH = {
    "gqa": decoder(GQA, Dense(width=32), moe(router=ALL, shared=Shared(width=16, gate=True))),
    "mla": decoder(MLA.model_copy(update={"v_dim": 8}), moe(router=ALL), Dense(width=24)),
    "tied": decoder(GQA, moe(router=ALL), tied=True),
}


@pytest.mark.parametrize("shape", SMOOTH)
def test_a_step_in_bf16_follows_fp64_within_its_rounding(shape: str) -> None:
    rows = padded_rows((40, 17), 7)
    reference = model_of(SMOOTH[shape], "fp64")
    want = gradients(reference, [rows], None, 32)
    model = on_device(SMOOTH[shape], "bf16", experts="grouped")
    found = gradients(model, [rows.to(DEVICE)], None, 32)
    assert found.lm_loss == pytest.approx(want.lm_loss, rel=1e-2)
    same(on_host(model), on_host(reference), 16 * torch.finfo(torch.bfloat16).eps)


SPARSE = {
    "gqa": decoder(),
    "mla": decoder(MLA, Dense(width=24), moe(router=DEEP)),
    "capacity": decoder(GQA, moe(capacity=Capacity(factor=0.75)), moe()),
}


@pytest.mark.parametrize("shape", SPARSE)
def test_a_step_in_fp64_is_the_same_on_both_devices(shape: str) -> None:
    """Choices, drops, counts and gradients."""
    rows, batches = padded_rows((20, 9), 3), []
    for device in ("cpu", DEVICE):
        model = model_of(SPARSE[shape], "fp64").to(device)
        figures = gradients(model, [rows.to(device)], None, 16)
        counts = [m.balance.counters.sent_E.tolist() for _, m in model.moe_layers()]
        batches.append((figures, counts, on_host(model)))
    (want, counts, theirs), (found, ours_counts, ours) = batches
    assert ours_counts == counts
    # Rotary angles are fp32 everywhere, and their sines differ in the last bit.
    assert found.lm_loss == pytest.approx(want.lm_loss, rel=1e-5)
    assert found.router_terms == pytest.approx(want.router_terms, rel=1e-5)
    same(ours, theirs, 1e-4)


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.synchronize()
    set_mode("error")
    try:
        yield
    finally:
        set_mode("default")


def set_mode(mode: str) -> None:
    """Set what a wait for the device does; the call warns that it is a prototype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.parametrize("pads", [0, 8])
@pytest.mark.parametrize("kind", MIXTURES)
def test_the_mixture_never_waits_for_the_device(kind: str, pads: int) -> None:
    """Forward, backward, counters and all terms. The first runs load kernels and make room."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("older devices run grouped products one by one, and read the offsets for it")
    model = on_device(decoder(GQA, MIXTURES[kind]), "bf16", experts="grouped")
    (_, mixture), *_ = model.moe_layers()
    x_TD = torch.randn(56 + pads, 16, device=DEVICE).to(torch.bfloat16)
    for _ in range(2):
        want = run_mixture(
            mixture, model.precision_policy, padded_rows((40, 16), pads).to(DEVICE), x_TD
        )
    rows = padded_rows((40, 16), pads).to(DEVICE)
    for parameter in mixture.parameters():
        parameter.grad = None
    with waiting_is_an_error():
        found = run_mixture(mixture, model.precision_policy, rows, x_TD)
    assert relative(found.cpu(), want.cpu()) < 1e-2
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in mixture.parameters())


def test_waiting_is_noticed() -> None:
    x = torch.ones(4, device=DEVICE)
    with waiting_is_an_error(), pytest.raises(RuntimeError, match="synchroniz"):
        x.sum().item()


@pytest.mark.real_device
@pytest.mark.parametrize("kernel", ["grouped", "loop"])
def test_dirty_memory_reaches_nothing(kernel: str) -> None:
    """The allocator hands out NaN; two steps in a row. Plant: read rows past the last offset."""
    record = decoder(GQA, moe(capacity=Capacity(factor=0.5)), moe())
    model, rows = on_device(record, "bf16", experts=kernel), padded_rows((40, 16), 8).to(DEVICE)
    want = gradients(model, [rows], None, 32)
    theirs = on_host(model)
    for policy in (None, Full()):
        sizes = [2**power for power in range(9, 27)]
        dirty = [torch.full((size // 4,), float("nan"), device=DEVICE) for size in sizes * 8]
        torch.cuda.synchronize()
        del dirty
        found = gradients(model, [rows], policy, 32)
        assert found.lm_loss == pytest.approx(want.lm_loss, rel=1e-3)
        same(on_host(model), theirs, 1e-2)


def test_a_whole_step_gives_the_same_bits_twice_when_asked_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    model = on_device(decoder(GQA, moe()), "bf16", experts="grouped")
    rows = from_ids(ids_of(4, 32)).to(DEVICE)
    torch.use_deterministic_algorithms(True)
    try:
        gradients(model, [rows], None, 32)
        first = on_host(model)
        gradients(model, [rows], None, 32)
        second = on_host(model)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [n for n in first if not torch.equal(first[n], second[n])] == []


def test_counts_that_are_read_late_are_those_of_their_time() -> None:
    counts = torch.arange(8, device=DEVICE)
    read = host_counts(counts)
    counts.zero_()
    assert read() == list(range(8))
