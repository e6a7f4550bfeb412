"""Steps with clones of hot experts give one rank's gradients; what is sent for them, and how often.

P ranks of ep, s slots, e experts at home on each rank.
"""

from typing import Any, NamedTuple

import pytest
import torch

from moefold.comm.recorder import BACKWARD, FORWARD
from moefold.comm.world import World
from moefold.layers.config import Full
from moefold.mesh.folding import Folding
from moefold.model.init import initial_values
from moefold.moe.clone_weights import reduce_clone_gradients
from moefold.moe.dispatch.config import Clones, Spread
from moefold.parallel.apply import build_parts
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.spec.decoder import model_needs
from moefold.training.step import gradients
from tests.cpu.small import relative
from tests.gloo.harness import Reference, run_ranks
from tests.gloo.test_moe_dispatch_layouts import batches, small

MICRO, CHUNK = 8, 16
FITS = Spread(max_rows=46)
"""Room that is not enough for the fullest rank of ``ep4`` without clones, and is with two slots."""
FEW: dict[str, dict[str, Any]] = {
    "fixed": {"sizes": "ep4", "zero": 0, "dispatch": FITS},
    "pairs": {"sizes": "pp2 ep2", "zero": 3, "schedule": "merged", "recompute": Full()},
}
MORE: dict[str, dict[str, Any]] = {
    "exact": {"sizes": "ep4", "zero": 1},
    "full": {"sizes": "ep2", "zero": 3, "recompute": Full()},
    "slices": {"sizes": "ep2 etp2", "zero": 0, "dispatch": "allgather"},
    "deferred": {"sizes": "pp2 ep2", "zero": 2, "schedule": "zb_h1"},
}


class Step(NamedTuple):
    """What a step gave on one rank."""

    pieces: dict[str, tuple[Any, torch.Tensor]]
    needed: int
    calls: dict[tuple[str, str], int]
    """Calls in a pass of a layer for its clones, by operation and direction."""


def step_of(layout: Layout, world: World) -> Step:
    """Run forward and backward of a step."""
    parts = build_parts(small(), "fp64", layout, world)
    data = ShardedState(parts)
    data.fill(initial_values(parts.model.record, 1))
    dp, here = world.folding.dp, world.attention.dp
    mine = [batch for j, batch in enumerate(batches(MICRO)) if j % dp == here]
    world.recorder.clear()
    figures = gradients(data, mine, CHUNK)
    passes = len(mine) * len(list(parts.model.moe_layers()))
    calls: dict[tuple[str, str], int] = {}
    for site, (count, _) in world.recorder.totals.items():
        if site.label.endswith(("moe.clones", "moe.experts")) and not site.op.startswith("reduce"):
            key = site.op, site.direction
            calls[key] = calls.get(key, 0) + count
    calls = {key: count // passes for key, count in calls.items()}
    pieces = {held.name: (held.box, held.tensor.clone()) for held in data.gradients()}
    return Step(pieces, figures.needed_rows, calls)


@Reference
def one_rank() -> dict[str, torch.Tensor]:
    """Return whole gradients of one rank without clones."""
    found = step_of(Layout(), World.single()).pieces
    return {name: tensor for name, (_, tensor) in found.items()}


def compare(
    rank: int, cases: dict[str, dict[str, Any]]
) -> dict[str, tuple[float, bool, int, dict[tuple[str, str], int]]]:
    """Return each case's largest error, whether its bits repeat, and what it needed and sent."""
    found, whole = {}, one_rank()
    for name, given in cases.items():
        layout = Layout(**given, clones=Clones(slots=2))
        world = World.open(Folding(layout.split, 4), "cpu", 20)
        step, again = step_of(layout, world), step_of(layout, world)
        same = all(torch.equal(t, again.pieces[n][1]) for n, (_, t) in step.pieces.items())
        error = max(
            relative(t, whole[n][tuple(slice(*ends) for ends in box)])
            for n, (box, t) in step.pieces.items()
        )
        found[name] = error, same, step.needed, step.calls
    world = World.open(Folding(Layout(sizes="ep4").split, 4), "cpu", 20)
    bare = step_of(Layout(sizes="ep4", dispatch=FITS, zero=0), world)
    found["bare"] = 0.0, True, bare.needed, bare.calls
    return found


def check(cases: dict[str, dict[str, Any]]) -> None:
    """Hold layouts with clones to one rank's gradients, to their bits, and to what they send."""
    one_rank()
    ran = run_ranks(compare, 4, cases, time_out_s=90, references=[one_rank])
    for rank, found in enumerate(ran):
        *_, needed, calls = found.pop("bare")
        assert needed > FITS.max_rows and not calls, needed
        for name, (error, same, needed, calls) in found.items():
            assert error <= 1e-10 and same and not needed, (rank, name, error, needed)
            # Counts once, whatever runs again: the plan is part of the decision.
            if "pp2" in cases[name]["sizes"] and rank < 2:
                assert not calls, "a stage without experts"
                continue
            assert calls.pop(("all_gather", FORWARD)) == 1, (rank, name)
            again = "recompute" in cases[name]
            ways = {FORWARD: 4, BACKWARD: 2} if again else {FORWARD: 2, BACKWARD: 4}
            assert calls == {("all_to_all", way): n for way, n in ways.items()}, (rank, name)


def test_gradients_with_clones_are_those_of_one_rank() -> None:
    """By fixed room and in pairs, with fetches in backward, and bit for bit the same again."""
    check(FEW)


@pytest.mark.matrix
def test_gradients_of_more_layouts_with_clones_are_those_of_one_rank() -> None:
    check(MORE)


def added(rank: int) -> bool:
    """Return whether the clones of one expert on all ranks are added up one rank after another."""
    world = World.open(Folding(Layout(sizes="ep4").split, 4), "cpu", 20)
    parts = [
        torch.randn(1, 3, 5, generator=torch.Generator().manual_seed(at)) * 10**at
        for at in range(4)
    ]
    at_Ps = torch.zeros(4, 1, dtype=torch.int64)
    (home,) = reduce_clone_gradients([parts[rank]], at_Ps, 4, world.group("ep"), "clones")
    want = sum(parts, torch.zeros(1, 3, 5))
    return torch.equal(home, want) if rank == 0 else not home.any()


def test_gradients_of_clones_are_added_in_the_order_of_ranks() -> None:
    """Whatever comes first: a repeated run has the same bits."""
    assert all(run_ranks(added, 4))


@pytest.mark.parametrize(
    ("sizes", "more", "path", "nearest"),
    [
        ("tp2", {}, (), None),
        ("ep4", {"slots": 7}, ("slots",), 6),
        ("ep8", {"slots": 8}, ("slots",), 7),
        ("ep4", {"dispatch": "deep_ep"}, (), None),
    ],
)
def test_clones_that_a_layout_cannot_have(
    sizes: str, more: dict[str, Any], path: tuple[str, ...], nearest: int | None
) -> None:
    """On the experts of other ranks, of which there are so many, and by ways that know of seats."""
    slots = more.pop("slots", 2)
    layout = Layout(sizes=sizes, clones=Clones(slots=slots), **more)
    broken = [one for one in layout.violations(model_needs(small())) if one.path[0] == "clones"]
    assert [(one.path, one.nearest) for one in broken] == [(("clones", *path), nearest)]
    assert not list(Layout(sizes="ep4", clones=Clones()).violations(model_needs(small())))
