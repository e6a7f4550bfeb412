"""A rank without the others: results as if all had its tensors, and the bytes of real ranks."""

from collections.abc import Iterator

import pytest
import torch

from moefold.comm import collectives
from moefold.comm.lone import LoneWorld, join_alone, leave
from moefold.comm.world import World
from moefold.mesh.config import Sizes
from moefold.mesh.folding import Folding

SIZE = 4
RANK = 2


@pytest.fixture
def world() -> Iterator[World]:
    """Rank 2 of four, without the other three."""
    yield join_alone(Folding(Sizes.parse("ep4"), SIZE), RANK)
    leave()


def test_every_rank_says_what_this_one_says(world: World) -> None:
    group = world.group("ep")
    x_RD = torch.arange(12.0).view(6, 2)
    assert (group.index, group.size) == (RANK, SIZE)
    assert collectives.sum_(torch.tensor([1.5, 2]), group).tolist() == [6, 8]
    assert collectives.max_(torch.tensor([1.5, 2]), group).tolist() == [1.5, 2]
    assert collectives.sum_(torch.tensor([True, False]), group).tolist() == [True, False]
    assert collectives.gather(x_RD[0], group).tolist() == [[0, 1]] * SIZE
    part = collectives.reduce_scatter(torch.arange(8.0), group)
    assert part.tolist() == [SIZE * 4, SIZE * 5]
    assert collectives.gather_objects({"rank": RANK}, group) == [{"rank": RANK}] * SIZE
    counts = collectives.exchange(torch.tensor([1, 0, 2, 3]), group, [1] * SIZE, [1] * SIZE)
    assert counts.tolist() == [2] * SIZE  # what this rank sends to its own index
    received_RD = collectives.exchange(x_RD, group, [1, 0, 2, 3], counts.tolist())
    assert received_RD.tolist() == x_RD[1:3].tolist() * SIZE
    uneven = collectives.gather_uneven(x_RD[:3], group, [1, 2, 3, 2])
    assert uneven.shape == (8, 2) and bool(torch.isin(uneven, x_RD[:3]).all())


def test_messages_have_values_and_copies_take_time(world: World) -> None:
    with_stages = Folding(Sizes.parse("pp4"), SIZE)
    group = join_alone(with_stages, RANK).group("pp")
    buffer = torch.full((5, 3), torch.nan)
    collectives.receive(buffer, group.ranks[1], group).wait()
    collectives.send(buffer, group.ranks[3], group).wait()
    assert buffer.isfinite().all() and buffer.std() > 0.5
    sent = {site.op: total.bytes for site, total in group.recorder.totals.items()}
    assert sent == {"receive": 0, "send": buffer.nbytes}
    assert isinstance(world, LoneWorld) and not world.copy_seconds
    collectives.sum_(torch.ones(1 << 20), world.group("ep"))
    assert world.copy_seconds > 0


def test_a_process_is_one_rank_at_a_time(world: World) -> None:
    """Of another number of ranks the groups are made anew, and of one rank there are none."""
    assert join_alone(Folding(Sizes.parse("ep8"), 8), 5).group("ep").index == 5
    assert join_alone(Folding(Sizes.parse(""), 1), 0).size == 1
