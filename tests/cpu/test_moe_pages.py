"""Rows in pages: what is taken is what was put, overflow is noticed, and no page is lost."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moefold.kernels.fused import force_triton
from moefold.kernels.pages.ring import PageRing
from moefold.layers.config import OffloadToPages
from moefold.layers.offload import OffloadedLayers
from moefold.layers.stash import PagedRows, PagedStash, Pages
from moefold.offload.slots import AsyncCopies

CPU = torch.device("cpu")
WIDTH = 5
RECORDED = json.loads(Path(__file__).parents[1].joinpath("data/recorded_counts.json").read_text())


class Life(NamedTuple):
    """Rows that are in pages."""

    page_M: Tensor
    rows_RD: Tensor
    count: Tensor
    pages: int
    """That they have."""


def lives(seed: int, refused: bool) -> Iterator[tuple[int, int]]:
    """Put and take rows of drawn sizes in drawn order; yield pages that are free and should be.

    With ``refused`` there is no room for some.
    """
    draw, g = Random(seed), torch.Generator().manual_seed(seed)
    page = draw.choice((1, 4, 7, 16))
    most = draw.choice((12, 20, 40))
    ring = PageRing(most, page, WIDTH, torch.float32, CPU)
    ring.rows_SD.fill_(torch.nan)
    alive, free, lost = list[Life](), most, 0
    for _ in range(60):
        rows = draw.randrange(1, 4 * page * most // 10 + 2)
        count = draw.choice((0, rows, draw.randrange(rows + 1)))
        need = -(-count // page)
        if alive and (draw.random() < 0.4 or (need > free and not refused)):
            one = alive.pop(draw.randrange(len(alive)))
            back_RD = ring.take(one.page_M, one.count, len(one.rows_RD))
            assert back_RD.shape == one.rows_RD.shape
            end = int(one.count) if one.pages or not int(one.count) else 0
            assert torch.equal(back_RD[:end], one.rows_RD[:end])
            free += one.pages
        elif need <= free or refused:
            x_RD = torch.randn(rows, WIDTH, generator=g)
            x_RD[count:] = torch.nan
            fits = need <= free
            page_M = ring.put(x_RD, torch.tensor(count, dtype=torch.int32))
            assert ((page_M < most).sum() == (need if fits else 0)) and len(page_M) == -(
                -rows // page
            )
            alive.append(Life(page_M, x_RD, torch.tensor(count), need if fits else 0))
            free -= need if fits else 0
            lost += 0 if fits else need
        assert int(ring.refused) == lost
        yield int(ring.pages - ring.allocated + ring.freed), free


@pytest.mark.parametrize("refused", [False, True])
def test_what_is_taken_is_what_was_put(refused: bool) -> None:
    """To the bit, in any order of lives, whatever stands past the last row; what has no room is
    counted, and what comes after it is kept again.
    """
    for seed in range(20):
        for free, wanted in lives(seed, refused):
            assert free == wanted


@pytest.mark.matrix
@pytest.mark.parametrize("refused", [False, True])
def test_so_it_is_in_many_orders_of_lives(refused: bool) -> None:
    for seed in range(20, 1020):
        for free, wanted in lives(seed, refused):
            assert free == wanted


def stash(
    pages: int, page: int = 4, width: int = WIDTH, host: int = 0, on_way: int = 1
) -> PagedStash:
    found = PagedStash(OffloadToPages(page=page), CPU, on_way)
    found.begin_step(0, lambda: Pages({width * 4: pages}, {width * 4: host}))
    return found


def test_rows_that_nobody_takes_give_their_pages_back() -> None:
    """And those of a step that was given up take none of the next one's."""
    held, ends_E = stash(4), torch.tensor([3, 9])
    x_RD = torch.randn(16, WIDTH)
    kept = held.save(x_RD, ends_E)
    assert kept is not None and held.save(torch.randn(16, 3), ends_E) is None
    (ring,) = held.rings.values()
    assert int(ring.allocated - ring.freed) == 3
    del kept
    assert int(ring.allocated - ring.freed) == 0
    kept = held.save(x_RD, ends_E)
    held.begin_step(0, lambda: Pages({}, {}))
    assert (int(ring.allocated), int(ring.freed), int(held.shortage())) == (0, 0, 0)
    del kept
    assert int(ring.freed) == 0
    again = held.save(x_RD, ends_E)
    assert again is not None
    first, second = again.load(), again.load()
    assert first is second and torch.equal(first[:9], x_RD[:9])
    assert int(ring.freed) == 3
    del again
    assert int(ring.freed) == 3


class Late(AsyncCopies):
    """Copies as late as may be: each begins when it is waited for."""

    def start(self, copy: Callable[[], None]) -> "Future[None]":  # type: ignore[override]
        class Waited(Future[None]):
            def result(self, timeout: float | None = None) -> None:
                if not self.done():
                    copy()
                    self.set_result(None)

            def exception(self, timeout: float | None = None) -> None:
                self.result()

        return Waited()


@pytest.mark.parametrize("on_way", [1, 2])
def test_what_comes_back_from_the_host_is_what_was_put(on_way: int) -> None:
    """To the bit, of passes in drawn order, some sent for early, and copies as late as may be, in
    as many pages as layers on their way have; none is lost on either side.
    """
    layers, draw, g = 4, Random(on_way), torch.Generator().manual_seed(on_way)
    held = stash(4 * (4 * on_way + 1), host=4 * layers * 3, on_way=on_way)
    held.copies = Late(CPU)
    alive = list[tuple[OffloadedLayers, list[tuple[Tensor, PagedRows]]]]()
    for _ in range(40):
        if alive and (len(alive) == 3 or draw.random() < 0.5):
            departed, rows = alive.pop(draw.randrange(len(alive)))
            departed.prefetch()
            for other, _ in alive[: draw.randrange(2)]:
                other.prefetch()
            while rows:
                x_RD, kept = rows.pop()
                assert torch.equal(kept.load()[: len(x_RD)], x_RD)
                del kept
            continue
        departed, rows = OffloadedLayers(on_way), []
        for layer in range(layers):
            x_RD = torch.randn(16, WIDTH, generator=g)
            count = draw.randrange(17)
            kept = held.save(x_RD, torch.tensor([count]), (departed.prefetch, layer))
            assert kept is not None
            departed.add(layer, kept)
            rows.append((x_RD[:count], kept))
        alive.append((departed, rows))
    assert int(held.shortage()) == 0
    rows = kept = None
    alive.clear()
    for ring in (*held.rings.values(), *held.host.values()):
        assert int(ring.allocated) == int(ring.freed) > 0


def test_copies_of_a_step_that_was_given_up_end_before_the_next_one_puts_rows() -> None:
    """Theirs would write on pages that others have by then."""
    held, departed, rows_NRD = stash(8, host=12), OffloadedLayers(1), torch.randn(3, 16, WIDTH)
    held.copies = Late(CPU)
    old = held.save(rows_NRD[0], torch.tensor([16]), (departed.prefetch, 0))
    held.begin_step(0, lambda: Pages({}, {}))
    kept = [
        held.save(x, torch.tensor([16]), (departed.prefetch, at)) for at, x in enumerate(rows_NRD)
    ]
    assert old is not None and kept[0] is not None
    old.wait_fetched()
    assert torch.equal(kept[0].load(), rows_NRD[0])


def test_rows_without_kernels_of_their_own_go_to_the_host_and_back() -> None:
    """Where tensors have a GPU and no values: what says where rows lie goes to where they are."""
    with FakeTensorMode(), force_triton(False):
        given = 4, 4, WIDTH, torch.float64, torch.device("cuda")
        here, host = PageRing(*given), PageRing(*given, on_host=True)
        x_RD = torch.zeros(8, WIDTH, dtype=torch.float64, device="cuda")
        count = torch.zeros((), dtype=torch.int64, device="cuda")
        page_M, away_M = here.put(x_RD, count), host.allocate(count, 8)
        here.copy(page_M, count, host, away_M)
        host.copy(away_M, count, here, page_M)
        assert (here.rows_SD.device.type, host.rows_SD.device.type) == ("cuda", "cpu")


def test_overflow_says_how_much_is_missing() -> None:
    """In thousandths of the pages, rounded up."""
    held, ends_E = stash(7), torch.tensor([16])
    kept = [held.save(torch.randn(16, WIDTH), ends_E) for _ in range(3)]
    assert int(held.shortage()) == 1143  # eight pages of seven
    del kept
    assert int(held.shortage()) == 1143


def test_pages_hold_what_came_and_room_what_could_have() -> None:
    """Recorded routings of 8 ranks, in pages of the 512th part of what each has on average: static
    room of the fullest that was seen is 2.3 and 2.6 times the rows, that for any routing 8 times.
    """
    for model, fullest in (("none", 2.28), ("aux", 2.59)):
        of_N8 = torch.tensor(RECORDED[model]).view(-1, 8, 8).sum(2)
        rows_N = (of_N8 / of_N8.double().mean(1, keepdim=True) * 1024).long().flatten()
        room, total = int(rows_N.max()), int(rows_N.sum())
        ring = PageRing(total, 2, 0, torch.float32, CPU)
        for count in rows_N:
            ring.put(torch.zeros(room, 0), count)
        held = int(ring.allocated) * 2
        assert 0 <= held - total <= len(rows_N) and held / total < 1.0008
        assert room * len(rows_N) / held > fullest and 8 * 1024 * len(rows_N) / held > 7.99
