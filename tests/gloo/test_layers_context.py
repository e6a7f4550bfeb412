"""Attention across context ranks, every kind, against the reference on one rank.

T rows of a rank, H query heads, G key-value heads, d and v dims per head.
"""

import itertools
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from moefold.comm.recorder import BACKWARD, FORWARD, CallRecord
from moefold.comm.world import World
from moefold.data.batch import MicroBatch, zigzag_rows
from moefold.layers.config import Context, Gathered, Mixed, Ring, Ulysses
from moefold.layers.context.attend import attend
from moefold.layers.flow import Flow
from moefold.layers.precision import PrecisionPolicy
from moefold.mesh.config import Sizes
from moefold.mesh.folding import Folding
from tests import references
from tests.cpu.small import padded_rows
from tests.gloo.harness import run_ranks

SCALE = 0.35
KINDS: dict[str, Context] = {
    "ring": Ring(),
    "all_gather": Gathered(),
    "all_to_all": Ulysses(),
    "mixed of 1": Mixed(heads=1),
    "mixed of 2": Mixed(heads=2),
    "mixed of 4": Mixed(heads=4),
}
# Lengths of segments, cut off at the last row; a rank holds two pieces of 4. The rest is padding.
CASES: dict[str, tuple[int, ...]] = {
    "one document": (8, 8, 8, 8),
    "a segment over every border": (3, 11, 2, 1, 1, 10, 4),
    "ends at borders": (4, 12, 8, 8),
    "shorter than a piece": (1, 3, 2, 2, 3, 1, 4, 1, 1, 1, 1) * 2,
    "padded": (5, 9),
    "one row": (1,),
    "all padding": (),
}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
NARROW = ("one document", "a segment over every border")
HEADS = {"grouped": (8, 4, 8, 8), "latent": (4, 4, 12, 6)}
"""Query heads, key-value heads, query-key dims, value dims."""
CELLS = [(case, heads, "fp64") for case in CASES for heads in HEADS]
CELLS += [(case, "grouped", number) for case in NARROW for number in ("fp32", "bf16")]


class Found(NamedTuple):
    """What one rank saw of one case."""

    errors: dict[str, float]
    """Of the output and the gradients of queries, keys and values, against the largest value."""
    sent: dict[tuple[str, str], int]
    """Bytes by operation and direction."""
    order: list[tuple[str, int, str, str]]
    """Operations by channel and number."""
    padding: float
    """The largest value in a padding row."""


def batch_of(case: str, cp: int) -> MicroBatch:
    """Return the micro-batch of a case, of 8 rows on each of ``cp`` ranks."""
    rows, lengths = 8 * cp, list[int]()
    wanted = [rows] if case == "one document" else CASES[case]
    for length in wanted:
        lengths.append(min(length, rows - sum(lengths)))
    kept = tuple(n for n in lengths if n)
    return padded_rows(kept, rows - sum(kept))


def values(rows: int, heads: str) -> list[Tensor]:
    """Return queries, keys, values and the output's gradient of a whole micro-batch."""
    h, g, d, v = HEADS[heads]
    drawn = torch.Generator().manual_seed(3)
    shapes = ((h, d), (g, d), (g, v), (h, v))
    return [torch.randn(rows, *s, dtype=torch.float64, generator=drawn) for s in shapes]


def expected(given: list[Tensor], lengths: tuple[int, ...]) -> list[Tensor]:
    """Return output and gradients on one rank in fp64; padding gives zeros."""
    q, k, v = fresh = [x.clone().requires_grad_() for x in given[:3]]
    if not lengths:
        return [torch.zeros_like(x) for x in (given[3], *fresh)]
    out = references.attention(q, k, v, lengths, SCALE)
    out.backward(given[3])
    return [out.detach(), *(x.grad for x in fresh if x.grad is not None)]


def attended(
    world: World, kind: Context, batch: MicroBatch, heads: str, dtype: torch.dtype
) -> Found:
    """Attend across ranks and compare this rank's rows."""
    given = [x.to(dtype) for x in values(batch.rows, heads)]
    whole = expected([x.double() for x in given], batch.lengths)
    part = batch.select_rows(zigzag_rows(batch.rows, world.attention.cp, world.folding.sizes.cp))
    assert part.row_T is not None
    q, k, v = mine = [x[part.row_T].requires_grad_() for x in given[:3]]
    flow = Flow(part, PrecisionPolicy("fp32"), world=world, context=kind)
    recorder = world.recorder
    recorder.clear()
    with recorder.module("here"):
        out = attend(q, k, v, SCALE, flow)
    out.backward(given[3][part.row_T])
    got = [out.detach(), *(x.grad for x in mine if x.grad is not None)]
    assert len(got) == 4 and all(x.dtype == dtype for x in got)
    names = ("out", "dq", "dk", "dv")
    errors = {}
    for name, ours, of_all in zip(names, got, whole, strict=True):
        largest = float(of_all.abs().max()) or 1.0
        errors[name] = float((ours.double() - of_all[part.row_T]).abs().max()) / largest
    assert all(site.label == "here" for site in recorder.totals)
    return Found(
        errors,
        {(site.op, site.direction): total.bytes for site, total in recorder.totals.items()},
        [_said(record) for record in recorder.last()],
        max(_largest(x[part.n_valid :]) for x in got),
    )


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _said(record: CallRecord) -> tuple[str, int, str, str]:
    return record.channel, record.number, record.site.op, record.site.direction


def rank_finds(rank: int, cp: int) -> dict[Any, Found]:
    """Run every kind and case of a number of context ranks on this rank."""
    found = {}
    with World.open(Folding(Sizes(cp=cp), cp), "cpu", 20) as world:
        for name in kinds_of(cp):
            for group, inner in KINDS[name].splits(world.folding.sizes):
                world.split(group, inner)
        for name in kinds_of(cp):
            for case, heads, number in CELLS:
                batch, dtype = batch_of(case, cp), DTYPES[number]
                found[name, case, heads, number] = attended(world, KINDS[name], batch, heads, dtype)
    return found


def kinds_of(cp: int) -> list[str]:
    """Return the kinds that a number of context ranks allows with four key-value heads."""
    names = ["ring", "all_gather"]
    names += ["all_to_all"] if 4 % cp == 0 else []
    return names + [f"mixed of {inner}" for inner in (1, 2, 4) if cp == 4]


@cache
def finds(cp: int) -> list[dict[Any, Found]]:
    return run_ranks(rank_finds, cp, cp, time_out_s=60)


WORLDS = [(cp, kind) for cp in (2, 3, 4) for kind in kinds_of(cp)]
BOUND = {"fp64": 1e-13, "fp32": 8 * 2**-23, "bf16": 4 * 2**-8}
"""Largest error against the tensor's largest value: bf16 rounds the output, each share of a
visitor's gradient and the sum."""


@pytest.mark.parametrize(("cp", "kind"), WORLDS)
def test_every_kind_equals_one_rank(cp: int, kind: str) -> None:
    for rank in finds(cp):
        for case, heads, number in CELLS:
            errors = rank[kind, case, heads, number].errors
            assert all(e <= BOUND[number] for e in errors.values()), (case, heads, number, errors)


@pytest.mark.parametrize(("cp", "kind"), WORLDS)
def test_padding_gives_zeros_and_gets_no_gradient(cp: int, kind: str) -> None:
    ranks = finds(cp)
    assert {rank[kind, *cell].padding for rank in ranks for cell in CELLS} == {0.0}


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_all_ranks_of_a_group_do_the_same_in_the_same_order(cp: int) -> None:
    """Operations by channel, forward and backward; a rank with nothing to say takes its turn."""
    said: dict[str, list[Any]] = {}
    for rank in finds(cp):
        mine: dict[str, list[Any]] = {}
        for found in rank.values():
            for channel, *rest in found.order:
                mine.setdefault(channel, []).append(rest)
        for channel, operations in mine.items():
            assert said.setdefault(channel, operations) == operations, channel


def lent(case: str, cp: int, groups: int, rank: int) -> tuple[int, int]:
    """Return how many rows of one group of ranks others see, and how many of others' it sees.

    From the mask written out; ``groups`` share the micro-batch in zigzag pieces.
    """
    batch = batch_of(case, cp)
    segment = torch.full((batch.rows,), -1)
    segment[: batch.n_valid] = batch.segment_T
    sees = ((segment[:, None] == segment) & (segment[:, None] >= 0)).tril()
    places = [
        torch.cat([torch.arange(p.start, p.stop) for p in zigzag_rows(batch.rows, group, groups)])
        for group in range(groups)
    ]

    def seen(asking: int, owner: int) -> int:
        return int(sees[places[asking]][:, places[owner]].any(0).sum())

    others = set(range(groups)) - {rank}
    return sum(seen(a, rank) for a in others), sum(seen(rank, o) for o in others)


@pytest.mark.parametrize(("cp", "kind"), WORLDS)
def test_bytes_sent_are_those_of_the_formulas(cp: int, kind: str) -> None:
    """As docs/communication.md has them."""
    rows, inner = 8, {"all_to_all": cp, "ring": 1}.get(kind)
    inner = int(kind.rpartition(" ")[2]) if inner is None and "mixed" in kind else inner
    for rank, found in enumerate(finds(cp)):
        for case, heads, number in CELLS:
            h, g, d, v = HEADS[heads]
            size = DTYPES[number].itemsize
            keys = g * (d + v) * size
            expected: dict[tuple[str, str], int] = {}
            if kind == "all_gather":
                each = (cp - 1) * rows * keys
                expected = {("all_gather", FORWARD): each, ("reduce_scatter", BACKWARD): each}
            elif inner is not None:
                groups = cp // inner
                out, back = lent(case, cp, groups, rank // inner)
                if inner > 1:
                    each = (inner - 1) * rows * (keys + h * (d + v) * size) // inner
                    expected |= {("all_to_all", way): each for way in (FORWARD, BACKWARD)}
                if groups > 1:
                    expected["shift", FORWARD] = out * keys // inner
                    expected["shift", BACKWARD] = (out + back) * keys // inner
            assert found[kind, case, heads, number].sent == expected, (rank, case, heads, number)


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_a_ring_with_one_document_sends_three_quarters_of_what_a_whole_one_would(cp: int) -> None:
    _, g, d, v = HEADS["grouped"]
    half = 4 * g * (d + v) * 8
    sent = [found["ring", "one document", "grouped", "fp64"].sent for found in finds(cp)]
    forward = [each["shift", FORWARD] for each in sent]
    assert forward == [(cp - 1 + rank) * half for rank in range(cp)]
    assert {each["shift", BACKWARD] for each in sent} == {3 * (cp - 1) * half}
    assert sum(forward) * 4 == 3 * cp * (cp - 1) * 2 * half


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_documents_inside_pieces_send_nothing(cp: int) -> None:
    for found in finds(cp):
        assert not any(found["ring", "shorter than a piece", "grouped", "fp64"].sent.values())


def rank_finds_windows(rank: int, cp: int) -> dict[Any, tuple[float, Tensor, Tensor]]:
    """Attend in windows with sinks; of every kind the largest error here, the gradient of the sinks
    from the rows here, and from all rows on one rank.
    """
    found = {}
    names = ("one document", "a segment over every border", "shorter than a piece", "padded")
    with World.open(Folding(Sizes(cp=cp), cp), "cpu", 20) as world:
        for name in kinds_of(cp):
            for group, inner in KINDS[name].splits(world.folding.sizes):
                world.split(group, inner)
        for name, case, window in itertools.product(kinds_of(cp), names, (1, 5, None)):
            batch = batch_of(case, cp)
            given = values(batch.rows, "grouped")
            sinks = torch.linspace(-1, 2, HEADS["grouped"][0], dtype=torch.float64)
            fresh = [x.clone().requires_grad_() for x in (*given[:3], sinks)]
            q, k, v, sinks_H = fresh
            out = references.attention(q, k, v, batch.lengths, SCALE, window, sinks_H)
            expected = [out, *torch.autograd.grad(out, fresh, given[3])]
            part = batch.select_rows(zigzag_rows(batch.rows, world.attention.cp, cp))
            assert part.row_T is not None
            mine = [x[part.row_T].requires_grad_() for x in given[:3]]
            sinks_H = sinks.clone().requires_grad_()
            flow = Flow(part, PrecisionPolicy("fp64"), world=world, context=KINDS[name])
            out = attend(mine[0], mine[1], mine[2], SCALE, flow, window, sinks_H)
            grads = torch.autograd.grad(out, (*mine, sinks_H), given[3][part.row_T])
            pairs = zip((out, *grads[:3]), expected[:4], strict=True)
            error = max(float((x - y[part.row_T]).abs().max().detach()) for x, y in pairs)
            found[name, case, window] = (error, grads[3].detach(), expected[4].detach())
    return found


@pytest.mark.parametrize("cp", [2, 4])
def test_windows_and_sinks_equal_one_rank_in_every_kind(cp: int) -> None:
    ranks = run_ranks(rank_finds_windows, cp, cp, time_out_s=60)
    for key in ranks[0]:
        assert max(found[key][0] for found in ranks) < 1e-13, key
        summed = torch.stack([found[key][1] for found in ranks]).sum(0)
        assert torch.allclose(summed, ranks[0][key][2], rtol=1e-12, atol=1e-13), key
