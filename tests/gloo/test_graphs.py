"""Steps whose passes run by graphs, in layouts of several ranks: the bits of steps that run as they
are."""

from typing import Any

import pytest
import torch

from moefold.comm.world import World
from moefold.data.batch import pack
from moefold.mesh.folding import Folding
from moefold.model.init import initial_values
from moefold.optim.config import AdamW
from moefold.optim.norm import clip_scale
from moefold.parallel.apply import build_parts
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.parallel.pipeline.graphs import build_executor
from moefold.training.step import gradients
from tests.cpu.tape import Tapes
from tests.gloo.harness import run_ranks
from tests.gloo.test_moe_dispatch_layouts import batches, small

PADDED, SPREAD = {"kind": "padded", "max_rows": 64}, {"kind": "spread", "max_rows": 150}
TIGHT = {"kind": "padded", "max_rows": 20}
"""Room that some of the steps lack, which are made again and not by graphs."""
PARTS = {"kind": "selective", "modules": ["norms", "experts", "permute"]}
PAGES = {"pages": {"page": 4, "load": 4.0}}
FEWER = {"pages": {"page": 4, "load": 1.0}}
FEW: tuple[dict[str, Any], ...] = (
    {"sizes": "pp2 ep2", "graphs": "partial", "dispatch": PADDED, "schedule": "zb_h1"},
)
MORE: tuple[dict[str, Any], ...] = (
    {"sizes": "ep4", "graphs": "partial"},
    {"sizes": "tp2 ep2", "graphs": "partial", "dispatch": SPREAD, "recompute": {"kind": "full"}},
    {"sizes": "ep2 etp2", "graphs": "partial", "dispatch": PADDED, "recompute": PARTS},
    {"sizes": "ep4", "graphs": "partial", "dispatch": SPREAD, "clones": {"slots": 1}},
    {"sizes": "pp2 vpp2", "graphs": "partial", "schedule": "interleaved"},
    {"sizes": "pp2 vpp2 ep2", "graphs": "partial", "schedule": "zb_v", "dispatch": PADDED},
    {"sizes": "pp2 tp2", "graphs": "partial", "schedule": "gpipe", "zero": 0},
    {"sizes": "pp2 ep2", "graphs": "partial", "dispatch": PADDED, "offload": PAGES},
    {"sizes": "cp2 ep4", "graphs": "partial", "dispatch": PADDED, "graph_experts": False},
    {"sizes": "cp2 tp2 ep2", "graphs": "partial", "recompute": {"kind": "full"}},
    {"sizes": "cp2", "graphs": "partial", "context": "all_gather", "recompute": PARTS},
    {"sizes": "pp2 ep2", "graphs": "partial", "schedule": "merged", "dispatch": PADDED},
    {"sizes": "pp2 vpp2 ep2", "graphs": "partial", "schedule": "dualpipe_v"},
    {"sizes": "ep4", "graphs": "step", "dispatch": PADDED, "offload": PAGES, "zero": 0},
    {"sizes": "tp2 ep2", "graphs": "step", "dispatch": PADDED, "zero": 0},
    {"sizes": "ep4", "graphs": "step", "dispatch": SPREAD, "clones": {"slots": 1}, "zero": 0},
    {"sizes": "ep4", "graphs": "step", "dispatch": PADDED},
    {"sizes": "tp2 ep2", "graphs": "step", "dispatch": SPREAD, "zero": 2},
    {"sizes": "cp2 ep4", "graphs": "step", "dispatch": PADDED, "recompute": {"kind": "full"}},
    {"sizes": "pp2", "graphs": "step"},
    {"sizes": "pp2 ep2", "graphs": "step", "dispatch": SPREAD, "schedule": "zb_h1", "zero": 2},
    {"sizes": "pp2 vpp2 ep2", "graphs": "step", "dispatch": PADDED, "schedule": "zb_v"},
    {"sizes": "pp2 vpp2", "graphs": "step", "schedule": "interleaved", "recompute": PARTS},
    {"sizes": "ep4", "graphs": "partial", "dispatch": TIGHT},
    {"sizes": "ep4", "graphs": "step", "dispatch": TIGHT, "zero": 2},
    {"sizes": "pp2 ep2", "graphs": "step", "dispatch": PADDED, "offload": FEWER},
)


def stepped(rank: int, cases: tuple[dict[str, Any], ...], steps: int) -> list[tuple[Any, ...]]:
    """Return what of each case differs from steps without graphs, and how much was recorded."""
    found: list[tuple[Any, ...]] = []
    for given in cases:
        ends, again = [], list[bool]()
        for graphs in ("none", given["graphs"]):
            layout = Layout.model_validate({"experts": "grouped", **given, "graphs": graphs})
            world = World.open(Folding(layout.split, 4), "cpu", 60)
            data = ShardedState(build_parts(small(), "bf16", layout, world))
            data.fill(initial_values(data.parts.model.record, 1))
            optimizer, Tapes.made = data.optimizer(AdamW(lr=0.01)), 0
            executor = build_executor(data, Tapes)
            dp, told = world.folding.dp, []
            for step in range(steps):
                mine = batches(8 * step + 8)[-8:][world.attention.dp :: dp]
                figures = gradients(data, mine, 16, executor=executor)
                told += [figures.lm_loss, figures.grad_norm, *figures.router_terms.values()]
                told += [figures.needed_rows, figures.needed_load]
                again.append(bool(figures.needed_rows or figures.needed_load))
                optimizer.step(clip_scale(figures.grad_norm, 1.0))
                data.refresh_weights()
                for _, mixture in data.parts.model.moe_layers():
                    mixture.balance.finish_step(mixture.router)
            held = {one.name: one.tensor.clone() for one in data.weights()}
            held |= {name: one.clone() for name, one in data.parts.model.named_buffers()}
            ends.append((told, held))
        (told, held), (others, weights) = ends
        wrong = [name for name in held if not torch.equal(held[name], weights[name])]
        found.append((told == others, wrong, Tapes.made, any(again) and not all(again)))
    return found


def check(cases: tuple[dict[str, Any], ...], steps: int = 10) -> None:
    """Hold steps by graphs to the bits of steps without."""
    for rank, found in enumerate(run_ranks(stepped, 4, cases, steps, time_out_s=120)):
        for given, (same, wrong, made, some) in zip(cases, found, strict=True):
            print(rank, given, same, wrong[:3], made)
            assert same and not wrong and made, (rank, given, wrong[:3], made)
            short = given.get("dispatch") == TIGHT or given.get("offload") == FEWER
            assert some == short, (rank, given)


def test_steps_by_graphs_are_the_steps() -> None:
    """Losses, norms, router terms and weights after updates, to the bit."""
    check(FEW, 6)


@pytest.mark.matrix
@pytest.mark.parametrize("number", range(len(MORE)))
def test_steps_by_graphs_are_the_steps_in_more_layouts(number: int) -> None:
    check(MORE[number : number + 1])


def recorded(rank: int, by: str) -> list[int]:
    """Return how many graphs there are after each step; the last rank's documents end elsewhere
    in some of them."""
    layout = Layout.model_validate({"sizes": "ep2", "graphs": by, "dispatch": PADDED})
    world = World.open(Folding(layout.split, 2), "cpu", 60)
    data = ShardedState(build_parts(small(), "fp32", layout, world))
    data.fill(initial_values(data.parts.model.record, 1))
    executor, made, Tapes.made = build_executor(data, Tapes), [], 0
    for step in range(9):
        texts = [[1] * 8, [2] * 8] if rank and step in (1, 3) else [[1] * 9, [2] * 7]
        gradients(data, [pack(texts), pack([[3] * 16])], 16, executor=executor)
        made.append(Tapes.made)
    return made


@pytest.mark.parametrize("by", ["step", "partial"])
def test_ranks_record_alike(by: str) -> None:
    """NCCL's rule, though only one rank's documents end where they did."""
    first, other = run_ranks(recorded, 2, by, time_out_s=120)
    assert first == other and first[-1] > 0, (first, other)
