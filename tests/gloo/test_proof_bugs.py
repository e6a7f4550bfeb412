"""Bugs that other systems had in steps over several ranks, each by the class it belongs to."""

from dataclasses import replace

import torch
from torch import Tensor

from moefold.comm import collectives as comm
from moefold.comm.world import World
from moefold.layers.placement import Box
from moefold.mesh.config import Sizes
from moefold.mesh.folding import Folding
from moefold.model.init import initialise
from moefold.parallel.apply import build_parts as build_parts
from moefold.parallel.config import Layout
from moefold.proof.case import BOUND, ProofCase, micro_batch_count
from moefold.proof.pool import run_cases
from moefold.proof.subjects import SUBJECTS
from tests.gloo.harness import run_ranks


def case(name: str, sizes: str, world: int = 2, **layout: object) -> ProofCase:
    record = Layout(sizes=sizes, **layout)  # type: ignore[arg-type]
    subject = replace(SUBJECTS[name], micro_batches=micro_batch_count(record, world))
    return ProofCase(f"{name}: {sizes or 'dp'} on {world}, {layout}", subject, record, world)


def wrong(cases: list[ProofCase], *quantities: str) -> dict[str, str]:
    """Return the cases in which one of the quantities is not that of one rank."""
    found = {}
    for made, outcome in zip(cases, run_cases(cases), strict=True):
        assert outcome.errors.keys() >= set(quantities), outcome.problems
        beyond = [name for name in quantities if not outcome.errors[name] <= BOUND]
        if beyond:
            found[made.name] = ", ".join(f"{name} of {outcome.where[name]}" for name in beyond)
    return found


def test_every_weight_counts_once_in_the_norm() -> None:
    """Experts, weights that tensor ranks hold whole, and weights in pieces; the factor follows."""
    cases = [case("gqa", "tp2 ep2"), case("gqa", "cp2 etp2", zero=2), case("gqa", "", zero=3)]
    assert not wrong(cases, "grad_norm", "clip")


CALLS = {
    "all_gather": lambda x, g: comm.all_gather(x, g),
    "reduce_scatter": lambda x, g: comm.reduce_scatter(x, g),
    "sum_over": lambda x, g: comm.sum_over(x, g),
    "all_to_all": lambda x, g: comm.all_to_all(x, g, [2, 2], [2, 2]),
    "gather_rows": lambda x, g: comm.gather_rows(x, g, [4, 4]),
    "scatter_rows": lambda x, g: comm.scatter_rows(x, g, [3, 1]),
    "gather": lambda x, g: comm.gather(x, g),
}
"""Calls that return a tensor; those that change what they are given end with ``_``."""


def changed(rank: int) -> list[str]:
    """Return the calls that changed what they were given, forward or backward."""
    group = World.open(Folding(Sizes(), 2), "cpu", 20.0).group("world")
    found = []
    for name, call in CALLS.items():
        x = torch.arange(8.0).view(4, 2) + rank
        given, x = x.clone(), x.requires_grad_(name != "gather")
        out: Tensor = call(x, group)
        seed = torch.ones_like(out)
        if out.requires_grad:
            out.backward(seed)
        if not torch.equal(x.detach(), given) or not bool((seed == 1).all()):
            found.append(name)
    return found


def test_a_collective_leaves_what_it_is_given() -> None:
    assert run_ranks(changed, 2) == [[], []]


def test_ranks_with_different_numbers_of_rows_share_their_terms() -> None:
    """A count of this rank alone that became everyone's would weigh rows by where they are."""
    cases = [case("idle ranks", sizes) for sizes in ("cp2", "")]
    assert not wrong(cases, "router/aux_sequence", "router/aux_global_batch", "gradients")


def test_each_pass_is_summed_over_ranks_once() -> None:
    """Two passes on each rank; groups of experts' copies of one rank and, by turns, of two."""
    cases = [case("gqa", ("", "ep2")[zero % 2], zero=zero) for zero in range(4)]
    cases.append(case("gqa", "ep2", zero=2))
    assert min(made.subject.micro_batches for made in cases) // 2 >= 2
    assert not wrong(cases, "gradients", "grad_norm")


SEED = 3
EXPERTS = SUBJECTS["gqa"].decoder


def start(rank: int, some: tuple[str, ...], ranks: int) -> list[dict[str, tuple[Box, Tensor]]]:
    """Return the pieces that a rank starts with in each layout."""
    return [pieces(Layout(sizes=sizes), ranks) for sizes in some]


def pieces(layout: Layout, ranks: int) -> dict[str, tuple[Box, Tensor]]:
    """Return the pieces that this rank starts with."""
    world = World.open(Folding(layout.split, ranks), "cpu", 20.0)
    parts = build_parts(EXPERTS, "fp32", layout, world)
    initialise(parts.model, EXPERTS, SEED, parts.shards)
    world.forget_groups()
    named = parts.model.named_parameters()
    return {name: (parts.shards[name].box, p.detach().clone()) for name, p in named}


def test_weights_start_alike_in_every_layout() -> None:
    """Copies are equal to the bit, experts all different, whichever ranks hold them."""
    parts = build_parts(EXPERTS, "fp32", Layout(), World.single())
    initialise(parts.model, EXPERTS, SEED)
    whole = dict(parts.model.named_parameters())
    for ranks in zip(*run_ranks(start, 2, ("ep2", "tp2", "etp2", "pp2"), 2), strict=True):
        assert {name for held in ranks for name in held} == whole.keys()
        for name, (box, values) in (one for held in ranks for one in held.items()):
            place = tuple(slice(*bounds) for bounds in box)
            assert torch.equal(values, whole[name].detach()[place]), name
    w_EFD = whole["layers.1.moe.experts.w_in"].detach().flatten(1)
    assert torch.pdist(w_EFD).min() > 0


def test_a_loss_over_a_shared_vocabulary_is_that_of_the_whole() -> None:
    """No logarithm of the number of ranks is added, and the label's own gradient is there."""
    cases = [case("dense", "tp2"), case("tied", "tp2")]
    assert not wrong(cases, "lm_loss", "evaluation", "gradients")
