"""What a pipeline rank holds after each action of a step, against what is planned for it."""

from itertools import chain, product
from typing import Any
from unittest import mock

import pytest
import torch

from moefold.comm.world import World
from moefold.data.batch import from_ids
from moefold.mesh.folding import Folding
from moefold.mesh.pipeline import Stages
from moefold.model.config import Decoder, Stack
from moefold.optim.config import AdamW
from moefold.parallel.apply import build
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.parallel.pipeline import p2p
from moefold.parallel.pipeline.executor import Executor
from moefold.parallel.pipeline.lanes import Chain, LaneTask
from moefold.parallel.pipeline.subgraph import Subgraph
from moefold.planner.case import Case, Keeping, Numbers, recomputed
from moefold.planner.hardware import Cluster, processor
from moefold.planner.memory import _chunks_of, steps_of
from moefold.schedule.table import Action, Step
from moefold.training import step as training_step
from tests.cpu.alive import HIDDEN, Made
from tests.cpu.test_planner_kept import BLOCKS
from tests.gloo.harness import run_ranks

SEQ, ROWS, VOCAB, LAYERS, MICRO = 32, 2, 64, 4, 4
POLICIES: tuple[tuple[str, ...] | None, ...] = (
    None,
    ("block",),
    ("norms", "experts"),
    ("mla_up", "attention", "permute"),
)


def decoder(block: str) -> Decoder:
    """Return layers of one kind."""
    stack = Stack(repeat=LAYERS, blocks=(BLOCKS[block],))
    return Decoder(vocab=VOCAB, hidden=HIDDEN, stacks=(stack,))


def layout_of(sizes: str, schedule: str, policy: tuple[str, ...] | None) -> Layout:
    again = {"kind": "selective", "modules": policy} if policy else None
    again = {"kind": "full"} if policy == ("block",) else again
    given = {"sizes": sizes, "schedule": {"kind": schedule}, "zero": 0, "recompute": again}
    return Layout.model_validate(given)


class Weighing(Executor):
    """An executor that weighs after each step what passes have made and nobody else holds."""

    def run(self) -> Any:
        self.left: list[int] = []
        placed = self._placed
        self._known = {t.untyped_storage()._cdata for t in placed.model.parameters()}
        WEIGHED.append(self)
        self._sent = set[int]()
        given = p2p.send

        def send(tensor: torch.Tensor, *to: Any) -> Any:
            self._sent.add(tensor.untyped_storage()._cdata)
            return given(tensor, *to)

        with Made() as self._made, mock.patch.object(p2p, "send", send):
            return super().run()

    def _chain(self, action: Action) -> Chain:
        """Return the action's chain, whose exchanges are seen on their own thread too."""
        chain = super()._chain(action)
        away = [isinstance(task, LaneTask) and task.exchanges for task in chain.tasks]
        tasks = [
            LaneTask(self._seen(task.run), True) if exchanges else task
            for task, exchanges in zip(chain.tasks, away, strict=True)
        ]
        return Chain(chain.state, tasks)

    def _seen(self, run: Any) -> Any:
        made = Made()
        made.storages = self._made.storages

        def seen(*state: Any) -> Any:
            with made:
                return run(*state)

        return seen

    def _step(self, step: Step, lanes: Any) -> None:
        super()._step(step, lanes)
        lanes._thread.submit(int).result()  # the thread lets go of its last task with the next one
        messages, model = self._messages, self._placed.model
        apart = [*messages._here.values(), *(buffer for buffer, _ in messages._coming.values())]
        apart += [p.grad for p in model.parameters() if p.grad is not None]
        seeds: list[Any] = []
        for held in self._held.values():
            angles = held.flow._angles.values()
            apart += [t for a in angles for t in (a.cos_Tp, a.sin_Tp)]
            tasks = chain.from_iterable(held.way._back)
            parts = [getattr(task.run, "__self__", None) for task in tasks]
            # The share of the loss that a router's term has: one element.
            seeds += [part.seeds for part in parts if isinstance(part, Subgraph)]
        figures = [*self._ran.losses, *(terms for _, _, terms in self._ran.terms)]
        rows = [vars(flow.rows).values() for flow in self._flows]
        apart += [
            t for t in chain(figures, model.buffers(), *rows, *seeds) if isinstance(t, torch.Tensor)
        ]
        known = self._known | self._sent | {t.untyped_storage()._cdata for t in apart}
        self.left.append(self._made.alive(known))


WEIGHED: list[Weighing] = []


def asked(schedule: str) -> list[tuple[str, tuple[str, ...] | None]]:
    """Return blocks and policies: all where it takes most to be right, and of each some."""
    if schedule in ("zb_h1", "dualpipe_v"):
        return list(product(BLOCKS, POLICIES))
    return list(zip(BLOCKS, chain(POLICIES, POLICIES), strict=False))


def executed(rank: int, sizes: str, schedule: str) -> dict[Any, list[int]]:
    """Return the bytes after each step of a rank's line, by block and policy."""
    split = layout_of(sizes, schedule, None).split
    world = World.open(Folding(split, split.pp), "cpu", 30)
    found: dict[Any, list[int]] = {}
    for block, policy in asked(schedule):
        placed = build(decoder(block), "fp32", layout_of(sizes, schedule, policy), world)
        for parameter in placed.model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        draw = torch.Generator().manual_seed(0)
        ids = [torch.randint(0, VOCAB, (ROWS, SEQ), generator=draw) for _ in range(MICRO)]
        with mock.patch.object(training_step, "Executor", Weighing):
            training_step.gradients(ShardedState(placed), [from_ids(one) for one in ids], 64)
        found[block, policy] = WEIGHED.pop().left
    return found


def planned(block: str, layout: Layout) -> list[list[int]]:
    sizes = layout.split
    way = "v" if layout.schedule.kind in ("zb_v", "dualpipe_v") else "round"
    case = Case(
        decoder=decoder(block),
        seq=SEQ,
        batch=ROWS * MICRO,
        micro_batch=ROWS,
        cluster=Cluster(processor(1e11, 1e10, 2**34), sizes.pp, 1, 1),
        sizes=sizes,
        stages=Stages.balanced(sizes.pp, sizes.vpp, LAYERS, way=way),
        schedule=layout.schedule,
        dispatch="local",
        load=1.0,
        numbers=Numbers("fp32", AdamW(lr=1e-3), weight_bytes=0),
        keeping=Keeping(zero=0, recompute=recomputed(layout.recompute)),
    )
    found: list[list[int]] = []
    for rank, line in enumerate(case.table.lines):
        stage = _chunks_of(case).stage(case, rank)
        before = [stage.there_before(step) for step in steps_of(line, sizes.vpp)]
        # What is there after a step is there before the next one, and nothing after the last.
        found.append([round(sum(there)) for there in [*before[1:], (0.0, 0.0)]])
    return found


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [
        ("pp2", "gpipe"),
        ("pp2", "1f1b"),
        ("pp2 vpp2", "interleaved"),
        ("pp2", "zb_h1"),
        ("pp2 vpp2", "zb_v"),
        ("pp2", "merged"),
        ("pp2 vpp2", "dualpipe_v"),
    ],
)
def test_after_each_action_a_rank_holds_what_is_planned(sizes: str, kind: str) -> None:
    """Activations, operands of products that wait for W, and nothing else; messages apart."""
    by_rank = run_ranks(executed, 2, sizes, kind, time_out_s=60)
    for block, policy in asked(kind):
        found = [lines[block, policy] for lines in by_rank]
        wanted = planned(block, layout_of(sizes, kind, policy))
        if policy == ("block",) and kind in ("merged", "dualpipe_v"):
            # Of a block in a pair the last exchange runs once: it keeps where its rows go, by
            # which a rank holds up to three ids a row more than is planned.
            at_most = 1 + 3 * 8 / (HIDDEN * 4)
            for line, plan in zip(found, wanted, strict=True):
                pairs = list(zip(line, plan, strict=True))
                assert all(plan <= left <= plan * at_most for left, plan in pairs), (block, pairs)
        else:
            assert found == wanted, (block, policy)
