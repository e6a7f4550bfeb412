"""Every collective against arithmetic on all ranks' inputs, and its gradient against autograd's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moefold.comm import collectives as comm
from moefold.comm.group import SELF_GROUP, Group
from moefold.comm.world import World
from moefold.mesh.config import Sizes
from moefold.mesh.folding import Folding
from tests.gloo.harness import run_ranks

COUNTS = {2: [3, 0], 3: [2, 0, 5], 4: [1, 4, 0, 2]}
SENT = {  # rows from each rank (row) to each rank (column); one rank sends none, one gets none
    2: [[2, 0], [3, 0]],
    3: [[1, 0, 2], [0, 0, 0], [4, 0, 1]],
    4: [[0, 3, 0, 1], [2, 1, 0, 1], [0, 0, 0, 0], [1, 1, 0, 5]],
}


class Case:
    """A collective, what each rank puts in, and what each gets as a function of all inputs."""

    def __init__(
        self,
        rows: Callable[[int, int], int],
        call: Callable[[Tensor, Group], Tensor],
        expected: Callable[[list[Tensor]], list[Tensor]],
    ) -> None:
        self.rows, self.call, self.expected = rows, call, expected


def columns(n: int, to: int) -> list[int]:
    return [SENT[n][source][to] for source in range(n)]


def exchanged(xs: list[Tensor]) -> list[Tensor]:
    n = len(xs)
    pieces = [x.split(SENT[n][source]) for source, x in enumerate(xs)]
    return [torch.cat([pieces[source][to] for source in range(n)]) for to in range(n)]


CASES = {
    "all_gather": Case(lambda r, n: 2, comm.all_gather, lambda xs: [torch.cat(xs)] * len(xs)),
    "all_gather of columns": Case(
        lambda r, n: 2,
        lambda x, g: comm.all_gather(x, g, dim=1),
        lambda xs: [torch.cat(xs, 1)] * len(xs),
    ),
    "all_gather of nothing": Case(
        lambda r, n: 0, comm.all_gather, lambda xs: [torch.cat(xs)] * len(xs)
    ),
    "reduce_scatter": Case(
        lambda r, n: 2 * n,
        comm.reduce_scatter,
        lambda xs: list(torch.stack(xs).sum(0).chunk(len(xs))),
    ),
    "reduce_scatter of columns": Case(
        lambda r, n: 5,
        lambda x, g: comm.reduce_scatter(x, g, dim=-1),
        lambda xs: list(torch.stack(xs).sum(0).chunk(len(xs), dim=1)),
    ),
    "sum_over": Case(lambda r, n: 3, comm.sum_over, lambda xs: [torch.stack(xs).sum(0)] * len(xs)),
    "all_to_all": Case(
        lambda r, n: sum(SENT[n][r]),
        lambda x, g: comm.all_to_all(x, g, SENT[g.size][g.index], columns(g.size, g.index)),
        exchanged,
    ),
    "all_to_all of nothing": Case(
        lambda r, n: 0,
        lambda x, g: comm.all_to_all(x, g, [0] * g.size, [0] * g.size),
        lambda xs: [xs[0] for _ in xs],
    ),
    "gather_rows": Case(
        lambda r, n: COUNTS[n][r],
        lambda x, g: comm.gather_rows(x, g, COUNTS[g.size]),
        lambda xs: [torch.cat(xs)] * len(xs),
    ),
    "gather_rows, as many each": Case(
        lambda r, n: 3,
        lambda x, g: comm.gather_rows(x, g, [3] * g.size),
        lambda xs: [torch.cat(xs)] * len(xs),
    ),
    "scatter_rows": Case(
        lambda r, n: sum(COUNTS[n]),
        lambda x, g: comm.scatter_rows(x, g, COUNTS[g.size]),
        lambda xs: list(torch.stack(xs).sum(0).split(COUNTS[len(xs)])),
    ),
}

# The last steps of a loss: gradients arrive dense, expanded from one number, and transposed.
LOSSES: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda y, w: (y * w).sum(),
    lambda y, w: y.sum() * w.flatten()[:1].sum(),
    lambda y, w: (y.t() * w.t().contiguous()).sum(),
]


def opened(n: int) -> Group:
    return World.open(Folding(Sizes(), n), "cpu", 20.0).group("world")


def inputs(n: int, case: Case) -> list[Tensor]:
    seeds = (torch.Generator().manual_seed(rank) for rank in range(n))
    shapes = ((case.rows(rank, n), 4 * 3) for rank in range(n))
    return [
        torch.randn(shape, generator=seed, dtype=torch.float64).requires_grad_()
        for shape, seed in zip(shapes, seeds, strict=True)
    ]


def weights_like(outs: list[Tensor]) -> list[Tensor]:
    seeds = (torch.Generator().manual_seed(100 + rank) for rank in range(len(outs)))
    return [
        torch.randn(out.shape, generator=seed, dtype=out.dtype)
        for out, seed in zip(outs, seeds, strict=True)
    ]


def check_gradients(rank: int, n: int) -> list[str]:
    group = opened(n)
    for name, case in CASES.items():
        for which, loss in enumerate(LOSSES):
            xs = inputs(n, case)
            outs = case.expected(xs)
            weights = weights_like(outs)
            total = sum(loss(out, w) for out, w in zip(outs, weights, strict=True))
            (wanted,) = torch.autograd.grad(total, xs[rank], allow_unused=True)
            x = xs[rank].detach().requires_grad_()
            out = case.call(x, group)
            assert out.is_contiguous(), name
            torch.testing.assert_close(out, outs[rank], rtol=1e-14, atol=1e-14, msg=name)
            loss(out, weights[rank]).backward()
            wanted = torch.zeros_like(x) if wanted is None else wanted
            assert x.grad is not None, name
            what = f"{name}, loss {which}: {x.grad} is not {wanted}"
            torch.testing.assert_close(x.grad, wanted, rtol=1e-13, atol=1e-13, msg=what)
    return list(CASES)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_results_and_gradients_are_those_of_one_process(world: int) -> None:
    assert run_ranks(check_gradients, world, world) == [list(CASES)] * world


def values(rank: int, dtype: torch.dtype) -> Tensor:
    numbers = torch.arange(6).reshape(2, 3) + 10 * rank
    return numbers % 2 == rank % 2 if dtype is torch.bool else numbers.to(dtype)


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool)


def check_plain(rank: int, n: int) -> bool:
    group = opened(n)
    for dtype in DTYPES:
        every = [values(r, dtype) for r in range(n)]
        mine, stack = every[rank], torch.stack(every)
        total = stack.any(0) if dtype is torch.bool else stack.sum(0).to(dtype)
        same(comm.sum_(mine.clone(), group), total)
        same(comm.max_(mine.clone(), group), stack.max(0).values)
        same(comm.gather(mine, group), stack)
        for asynchronous in (False, True):
            out = torch.empty((2 * n, 3), dtype=dtype)
            comm.all_gather_into(out, mine, group, asynchronous=asynchronous).wait()
            same(out, torch.cat(every))
        same(comm.broadcast_(mine.clone(), group, n - 1), every[-1])
        sent, received = [2, *[0] * (n - 1)], [2 if rank == 0 else 0] * n
        same(
            comm.exchange(mine, group, sent, received),
            torch.cat(every) if rank == 0 else mine[:0],
        )
        if dtype is not torch.bool:
            out = torch.empty((2, 3), dtype=dtype)
            comm.reduce_scatter_into(out, mine.repeat(n, 1), group, asynchronous=True).wait()
            same(out, total)
        strided = mine.t().contiguous().t()
        assert not strided.is_contiguous()
        same(comm.sum_(strided, group), total)
    return True


def same(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == wanted.dtype and torch.equal(found, wanted), f"{found} is not {wanted}"


@pytest.mark.parametrize("world", [2, 3])
def test_plain_collectives_take_every_dtype(world: int) -> None:
    assert run_ranks(check_plain, world, world) == [True] * world


def check_messages(rank: int, n: int) -> list[Any]:
    group = opened(n)
    after, before = (rank + 1) % n, (rank - 1) % n
    buffers = [torch.empty(3), torch.empty(0, 2), torch.empty(2, dtype=torch.int64)]
    pending = [comm.receive(buffer, before, group) for buffer in buffers]
    sent = [torch.full((6,), float(rank))[::2], torch.empty(0, 2), torch.tensor([rank, 7])]
    pending += [comm.send(tensor, after, group) for tensor in sent]
    for work in pending:
        work.wait()
        work.wait()
    words = comm.gather_objects({"rank": rank, "text": "é" * rank}, group)
    return [[buffer.tolist() for buffer in buffers], words]


def test_messages_and_small_data() -> None:
    words = [{"rank": rank, "text": "é" * rank} for rank in range(3)]
    answers = run_ranks(check_messages, 3, 3)
    for rank, answer in enumerate(answers):
        before = (rank - 1) % 3
        assert answer == [[[before] * 3, [], [before, 7]], words]


def check_bits(rank: int, n: int) -> bool:
    group = opened(n)
    for dtype in (torch.float32, torch.bfloat16):
        for size in (1, 5, 1000, 70_001):
            torch.manual_seed(rank)
            x = torch.randn(size).to(dtype)
            for result in (
                comm.sum_(x.clone(), group),
                comm.sum_over(x, group),
                comm.all_gather(comm.reduce_scatter(x.repeat(n), group), group),
                comm.gather_rows(
                    comm.scatter_rows(x, group, [size, *[0] * (n - 1)]),
                    group,
                    [size, *[0] * (n - 1)],
                ),
            ):
                every = comm.gather(result.view(torch.uint8), group)
                assert (every == every[0]).all(), f"{dtype}, {size}: ranks have different bits"
    return True


@pytest.mark.parametrize("world", [3, 4])
def test_a_sum_has_the_same_bits_on_all_ranks(world: int) -> None:
    assert run_ranks(check_bits, world, world) == [True] * world


def test_one_rank_alone_gets_back_what_it_gives() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    for result in (
        comm.all_gather(x, SELF_GROUP, 1),
        comm.reduce_scatter(x, SELF_GROUP),
        comm.sum_over(x, SELF_GROUP),
        comm.all_to_all(x, SELF_GROUP, [3], [3]),
        comm.gather_rows(x, SELF_GROUP, [3]),
        comm.scatter_rows(x, SELF_GROUP, [3]),
        comm.sum_(x.detach(), SELF_GROUP),
        comm.max_(x.detach(), SELF_GROUP),
        comm.broadcast_(x.detach(), SELF_GROUP, 0),
        comm.exchange(x, SELF_GROUP, [3], [3]),
    ):
        assert result.data_ptr() == x.data_ptr()
    out = torch.empty(3, 2)
    comm.all_gather_into(out, x.detach(), SELF_GROUP).wait()
    assert torch.equal(out, x)
    comm.reduce_scatter_into(out.zero_(), x.detach(), SELF_GROUP, asynchronous=True).wait()
    assert torch.equal(out, x)
    assert torch.equal(comm.gather(x.detach(), SELF_GROUP), x[None])
    assert comm.gather_objects({"a": 1}, SELF_GROUP) == [{"a": 1}]
    assert not SELF_GROUP.recorder.totals and not SELF_GROUP.recorder.last()
