"""Linear attention in chunks beside the recurrence, and as a layer on packed documents."""

from collections.abc import Iterator
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from moefold.data.batch import pack
from moefold.kernels.convolution.short import short_convolution
from moefold.kernels.delta.chunked import chunked_scan, recurrent_step
from moefold.kernels.operand import Operand
from moefold.layers.flow import Flow
from moefold.layers.placement import REPLICATED, Shard
from moefold.model.decoder import DecoderModel
from moefold.model.init import initial_values, initialise
from moefold.proof.subjects import SUBJECTS

FORMS = list(product((False, True), (False, True)))
"""Decays of each channel or head; by the delta rule or not."""
EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


def recurrent(
    q_TGk: Tensor,
    k_TGk: Tensor,
    v_THv: Tensor,
    decay_THk: Tensor,
    beta_TH: Tensor | None,
    positions_T: Tensor,
) -> Tensor:
    """Return ``o_THv`` row by row: the reference."""
    state_Hkv = v_THv.new_zeros(v_THv.shape[1], k_TGk.shape[2], v_THv.shape[2])
    out = list[Tensor]()
    for t in range(len(v_THv)):
        at = slice(t, t + 1)
        beta_1H = None if beta_TH is None else beta_TH[at]
        before = (state_Hkv * (positions_T[t] > 0))[None]
        row, after = recurrent_step(before, q_TGk[at], k_TGk[at], v_THv[at], decay_THk[at], beta_1H)
        state_Hkv = after[0]
        out.append(row[0])
    return torch.stack(out)


def lengths(rows: int, random: Random) -> Iterator[int]:
    """Draw the lengths of documents that have so many rows together."""
    while rows:
        length = min(random.randint(1, 60), rows)
        rows -= length
        yield length


def drawn(rows: int, by_channel: bool, delta: bool, seed: int) -> tuple[Tensor | None, ...]:
    """Draw what a scan reads; decays reach from almost none to almost all."""
    random, key_heads, shared, dims = Random(seed), 2, seed % 2 + 1, 10
    torch.manual_seed(seed)
    heads = key_heads * shared
    q, k = torch.randn(2, rows, key_heads, dims, dtype=torch.float64)
    v = torch.randn(rows, heads, 5, dtype=torch.float64)
    g = torch.randn(rows, heads, dims if by_channel else 1, dtype=torch.float64).exp()
    beta = torch.rand(rows, heads, dtype=torch.float64) if delta else None
    positions = torch.cat([torch.arange(n) for n in lengths(rows, random)])
    return q, k / k.norm(dim=-1, keepdim=True), v, -random.choice((0.01, 1.0)) * g, beta, positions


def compare(rows: int, chunk: int, by_channel: bool, delta: bool) -> None:
    """Compare values and gradients of both forms."""
    *given, positions_T = drawn(rows, by_channel, delta, rows)
    read = [x.requires_grad_() for x in given if x is not None]
    wanted = recurrent(*given, positions_T)  # type: ignore[arg-type]
    found, _ = chunked_scan(*given, positions_T, chunk=chunk)  # type: ignore[arg-type]
    torch.testing.assert_close(found, wanted, **EXACT)
    weight = torch.randn_like(wanted)
    mine, theirs = (torch.autograd.grad((x * weight).sum(), read) for x in (found, wanted))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize(("by_channel", "delta"), FORMS)
def test_chunks_compute_what_the_recurrence_does(by_channel: bool, delta: bool) -> None:
    for rows, chunk in ((1, 64), (5, 2), (40, 7), (66, 64), (70, 100)):
        compare(rows, chunk, by_channel, delta)


@pytest.mark.matrix
@pytest.mark.parametrize(("by_channel", "delta"), FORMS)
def test_chunks_of_any_length_compute_what_the_recurrence_does(
    by_channel: bool, delta: bool
) -> None:
    for rows in range(1, 201):
        for chunk in {1 + rows * 7 % 90, (1, 2, 3, 16, 64, 200)[rows % 6]}:
            compare(rows, chunk, by_channel, delta)


@pytest.mark.parametrize(("by_channel", "delta"), FORMS)
def test_runs_that_lie_apart_are_joined_by_their_states(by_channel: bool, delta: bool) -> None:
    *given, positions_T = drawn(60, by_channel, delta, 3)
    wanted = recurrent(*given, positions_T)  # type: ignore[arg-type]
    out, states = chunked_scan(*given, positions_T, chunk=16, runs=4)  # type: ignore[arg-type]
    state, found = torch.zeros_like(states[0, ..., :5]), list[Tensor]()
    for rows, after in zip(out.unflatten(0, (4, -1)), states, strict=True):
        found.append(rows[..., :5] + torch.einsum("thk,hkv->thv", rows[..., 5:], state))
        state = after[..., :5] + after[..., 5:] @ state
    torch.testing.assert_close(torch.cat(found), wanted, **EXACT)


def test_decays_of_bounded_numbers_stay_finite_in_fp32() -> None:
    q, k, v = torch.randn(3, 128, 1, 4)
    decay = torch.full((128, 1, 4), -80.0)
    decay[::2] = -1e-4
    for g in (decay, decay[..., :1]):
        out, state = chunked_scan(q, k, v, g, torch.ones(128, 1), torch.arange(128))
        assert out.isfinite().all() and state.isfinite().all()


def test_documents_are_convolved_by_themselves_without_gates() -> None:
    torch.manual_seed(0)
    parts = (1, 7, 2, 6)
    x = torch.randn(18, 3, dtype=torch.float64)
    dy = torch.randn(18, 3, dtype=torch.float64)
    x[16:] = dy[16:] = torch.nan
    x.requires_grad_()
    weight = torch.randn(3, 1, 4, dtype=torch.float64, requires_grad=True)
    positions = torch.cat([torch.arange(n) for n in (*parts, 1, 1)])
    how: dict[str, Any] = {"gated": False, "n_valid": 16}
    found = short_convolution(x, None, Operand(weight, weight), positions, **how)
    apart = [
        torch.conv1d(rows.t()[None], weight, padding=3, groups=3)[0, :, : len(rows)].t()
        for rows in x[:16].split(list(parts))
    ]
    wanted = torch.nn.functional.silu(torch.cat(apart))
    torch.testing.assert_close(found[:16], wanted, **EXACT)
    mine = torch.autograd.grad(found, (x, weight), dy)
    theirs = torch.autograd.grad(wanted, (x, weight), dy[:16])
    torch.testing.assert_close(mine[0][:16], theirs[0][:16], **EXACT)
    torch.testing.assert_close(mine[1], theirs[1], **EXACT)


@pytest.mark.parametrize("name", ["delta", "channels", "bounded"])
def test_documents_and_padding_leak_nothing_into_states(name: str) -> None:
    decoder = SUBJECTS[name].decoder
    model = DecoderModel(decoder, "fp64")
    initialise(model, decoder, 1)
    mixer, texts = model.get_submodule("layers.0.attention"), ([3, 4, 5], [6], [7, 8, 9, 10, 11])
    whole = pack(texts, 4)
    assert whole.n_valid == 9 < whole.rows
    x = torch.randn(whole.rows, decoder.hidden, dtype=torch.float64)
    dy = torch.randn_like(x)
    x[9:] = dy[9:] = torch.nan

    def run(rows: Tensor, flow: Flow, dy: Tensor) -> tuple[Tensor, list[Any]]:
        model.zero_grad()
        out = mixer(rows, flow)
        out.backward(dy)
        return out, [p.grad for p in mixer.parameters()]

    found, grads = run(x, Flow(whole, model.precision_policy), dy)
    apart, total = list[Tensor](), [torch.zeros_like(g) for g in grads]
    for text, rows, back in zip(
        texts, x[:9].split([3, 1, 5]), dy[:9].split([3, 1, 5]), strict=True
    ):
        out, own = run(rows, Flow(pack([text]), model.precision_policy), back)
        apart.append(out)
        total = [a + b for a, b in zip(total, own, strict=True)]
    torch.testing.assert_close(found[:9], torch.cat(apart), **EXACT)
    for one, other in zip(grads, total, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_decays_begin_spread_over_their_range() -> None:
    decoder = SUBJECTS["channels"].decoder

    def started(name: str, size: int, first: int, end: int) -> Tensor:
        return initial_values(decoder, 1)(Shard(name, (size,), ((first, end),), REPLICATED))

    rates = started("layers.0.attention.a_log", 8, 0, 8).exp()
    assert rates.min() > 1 and rates.max() < 16 and rates.diff().min() > 1
    steps = torch.nn.functional.softplus(started("layers.0.attention.dt_bias", 32, 0, 32))
    assert 1e-3 < steps.min() < 2e-3 and 5e-2 < steps.max() < 1e-1
    half = started("layers.0.attention.dt_bias", 32, 16, 32)
    assert torch.equal(half, started("layers.0.attention.dt_bias", 32, 0, 32)[16:])
