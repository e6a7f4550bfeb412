"""Kernels that bring rows to their pages and back: those that count, to the bit, and no other."""

import pytest
import torch

from moefold.kernels.fused import force_triton
from moefold.kernels.pages import fused
from moefold.kernels.pages.ring import PageRing
from tests.triton.values import DTYPES, bits, watched
from tests.triton.watch import Watch

SHAPES = ((37, 3, 80, 16), (9, 9, 1, 4), (5, 0, 2100, 2), (33, 32, 64, 5))
"""Rows of room, those that count, their width, and rows of a page."""


def put(ring: PageRing, x_RD: torch.Tensor, page_M: torch.Tensor, count: int) -> torch.Tensor:
    """Return pages that held NaN, with rows put there."""
    pages_SD = torch.full_like(ring.rows_SD, torch.nan)
    fused.put(x_RD, page_M, torch.tensor([count]), pages_SD, ring.page)
    return pages_SD


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pages_are_those_of_the_plain_way(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    """Rows past the last are neither read nor written, in rooms and in pages."""
    room, count, width, page = shape
    g = torch.Generator().manual_seed(room)
    x_RD = torch.randn(room, width, generator=g).to(dtype)
    x_RD[count:] = torch.nan
    ring = PageRing(20, page, width, dtype, x_RD.device)
    with force_triton(False):
        ring.put(x_RD[:page], torch.tensor(page))
        page_M = ring.put(x_RD, torch.tensor(count, dtype=torch.int32))
    got_SD = watched(lambda: put(ring, x_RD, page_M, count), whole=False, waste=None)
    row_R = torch.arange(count)
    place_R = page_M[row_R // page] * page + row_R % page
    assert torch.equal(bits(got_SD[place_R]), bits(x_RD[:count]))
    assert int((~got_SD.isnan()).all(1).sum()) == count
    back_RD = watched(
        lambda: fused.take(got_SD, page_M, torch.tensor([count]), room, page),
        whole=False,
        waste=None,
    )
    assert torch.equal(bits(back_RD[:count]), bits(x_RD[:count]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pages_are_copied_to_pages_of_another_ring(dtype: torch.dtype) -> None:
    """Rows that count and no other, and none where either ring had no page for them."""
    room, count, width, page = SHAPES[0]
    rings = [PageRing(n, page, width, dtype, torch.device("cpu"), on_host=n == 7) for n in (20, 7)]
    x_RD, counted = torch.randn(room, width).to(dtype), torch.tensor([count])
    with force_triton(False):
        page_M, into_M = rings[0].put(x_RD, counted[0]), rings[1].allocate(counted[0], room)

    def copied(into_M: torch.Tensor) -> torch.Tensor:
        rings[1].rows_SD.fill_(torch.nan)
        given = rings[0].rows_SD, page_M, into_M, counted, rings[1].rows_SD, page
        fused.copy(*given)
        return rings[1].rows_SD

    got_SD = watched(lambda: copied(into_M), whole=False, waste=None)
    assert torch.equal(bits(got_SD[into_M[0] * page :][:count]), bits(x_RD[:count]))
    assert int((~got_SD.isnan()).all(1).sum()) == count
    none_SD = watched(lambda: copied(torch.full_like(into_M, 7)), whole=False, waste=None)
    assert none_SD.isnan().all()


def test_only_rows_that_count_are_moved() -> None:
    """A fifth of the room: as many bytes as they have, beside numbers of pages."""
    room, count, width, page = 64, 13, 128, 8
    ring = PageRing(10, page, width, torch.float32, torch.device("cpu"))
    with force_triton(True), Watch(1) as watch:
        page_M = ring.put(torch.ones(room, width), torch.tensor(count))
    moved = count * width * 4
    assert watch.stores == moved and moved <= watch.loads <= moved + 1024
    with force_triton(True), Watch(1) as watch:
        ring.take(page_M, torch.tensor(count), room)
    assert watch.stores == moved and moved <= watch.loads <= moved + 1024


def test_what_has_no_room_leaves_pages_alone() -> None:
    ring = PageRing(2, 4, 8, torch.float32, torch.device("cpu"))
    with force_triton(True), Watch(1):
        first_M = ring.put(torch.ones(8, 8), torch.tensor(8))
        ring.put(torch.zeros(8, 8), torch.tensor(5))
        back_RD = ring.take(first_M, torch.tensor(8), 8)
    assert int(ring.refused) == 2 and torch.equal(back_RD, torch.ones(8, 8))


def test_torch_knows_the_operations() -> None:
    checks = ("test_schema", "test_faketensor")
    page_M, count = torch.tensor([1, 0]), torch.tensor([5])
    given = torch.ones(8, 4), page_M, count, torch.zeros(12, 4), 4
    torch.library.opcheck(fused.put.overload, given, test_utils=checks)
    other = given[3], page_M, page_M, count, torch.ones(12, 4), 4
    torch.library.opcheck(fused.copy.overload, other, test_utils=checks)
    torch.library.opcheck(fused.take.overload, (given[3], page_M, count, 8, 4), test_utils=checks)
