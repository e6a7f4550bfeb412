"""Optimizer steps of one rank of a layout on random tokens with even routing, timed by part.

The same steps run among real ranks and on a rank without the others (:mod:`moefold.comm.lone`): the
choice of experts depends on a row's place on its rank alone, so that all ranks send each other as
many rows, and a rank on its own knows what the others would send.

E experts, T token rows, K experts per token.
"""

import os
import time
from collections import defaultdict
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from moefold.comm.collectives import gather_objects
from moefold.comm.environment import RankInfo
from moefold.comm.recorder import CallSite, Total
from moefold.comm.world import World
from moefold.data.batch import random_batches
from moefold.model.init import initial_values
from moefold.moe.config import Router
from moefold.moe.router import RoutingContext, TopKRouter
from moefold.optim.norm import clip_scale
from moefold.parallel.apply import build_parts
from moefold.parallel.data.sharding import ShardedState
from moefold.parallel.pipeline.executor import Executor, StepExecutor, StepResult, run_step
from moefold.parallel.pipeline.lanes import Lanes
from moefold.planner.case import Case
from moefold.run import Run
from moefold.schedule.table import Action, Step
from moefold.training.step import gradients

PASSES = {"F": "forward", "B": "backward", "I": "backward", "W": "weight gradients"}
"""Parts of a step's time by the kind of an action."""
PAIR = "forward with backward"
"""Part of two actions that run concurrently."""
SUMS = "gradients and sums"
UPDATE = "optimizer"
PARTS = (*dict.fromkeys(PASSES.values()), PAIR, SUMS, UPDATE)
CHOSEN = 2.0
"""Score of a chosen expert, above all others: a selection bias stays far below."""


class Stopwatch:
    """Sums seconds by part; on a CPU those of all threads of the process."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = defaultdict[str, float](float)
        self._device = device
        self._last = self._now()

    def lap(self, part: str) -> None:
        """End a part, and begin the next."""
        now = self._now()
        self.seconds[part] += now - self._last
        self._last = now

    def _now(self) -> float:
        if self._device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize(self._device)
        return time.perf_counter()


class TimedExecutor(Executor):
    """Runs a step's line, and sums the time of its actions by kind."""

    def __init__(self, times: Stopwatch, *args: Any) -> None:
        super().__init__(*args)
        self._times = times

    def _step(self, step: Step, lanes: Lanes) -> None:
        self._times.lap(SUMS)
        super()._step(step, lanes)
        self._times.lap(PASSES[step.kind] if isinstance(step, Action) else PAIR)


class RankStep:
    """A rank of a case with drawn weights, which runs steps.

    Args:
        world: the rank, among others or on its own.
        run: states optimizer, seed and rows of a loss's chunk.
        case: the step that is run: model, batch and layout.
    """

    def __init__(self, world: World, run: Run, case: Case) -> None:
        decoder = case.decoder
        precision = case.number_formats.precision
        parts = build_parts(decoder, precision, case.layout, world, "meta")
        self.world = world
        self.state = ShardedState(parts)
        self.state.fill(initial_values(decoder, run.seed))
        self.optimizer = self.state.optimizer(run.optim)
        self.loss_chunk = run.train.loss_chunk
        self._clip_norm = run.optim.clip_norm
        shape = case.micro_batch, case.seq
        batches = random_batches(decoder.vocab, shape, case.num_micro_batches, run.seed)
        self.batches = [batch.to(world.device) for batch in batches]
        for number, mixture in parts.model.moe_layers():
            choose_evenly(mixture.router, int(number))

    def timed(self) -> dict[str, float]:
        """Run a step with its update; return its seconds by part."""
        times = Stopwatch(self.world.device)

        def run(*args: Any) -> StepResult:
            return TimedExecutor(times, *args).run()

        self._step(run, times)
        return dict(times.seconds)

    def totals(self) -> dict[CallSite, Total]:
        """Run a step; return this rank's exchanges by call site."""
        self.world.recorder.clear()
        self._step(run_step, Stopwatch(self.world.device))
        return dict(self.world.recorder.totals)

    def _step(self, executor: StepExecutor, times: Stopwatch) -> None:
        policy = self.state.parts.model.precision_policy
        figures = gradients(self.state, self.batches, self.loss_chunk, executor=executor)
        times.lap(SUMS)
        self.optimizer.step(clip_scale(figures.grad_norm, self._clip_norm))
        self.state.end_step()
        policy.step += 1
        times.lap(UPDATE)


def step_among_ranks(info: RankInfo, run: Run, case: Case, steps: int) -> list[dict[str, Any]]:
    """Run steps of a case among as many real ranks, on one thread each.

    Returns:
        For each rank what ``figures_of`` returns.
    """
    torch.set_num_threads(1)
    with World.open(case.folding, "cpu", run.watch.time_out_s) as world:
        return gather_objects(figures_of(RankStep(world, run, case), steps), world.on_host)


def figures_of(rank: RankStep, steps: int) -> dict[str, Any]:
    """Run steps of a rank on a CPU.

    Returns:
        ``user`` and ``system`` seconds of the process in each step after the first, and ``totals``
        of a step: call site, calls and bytes.
    """
    rank.timed()
    times = [os.times()]
    for _ in range(steps):
        rank.timed()
        times.append(os.times())
    totals = [[*site, *total] for site, total in rank.totals().items()]
    user = [after.user - before.user for before, after in pairwise(times)]
    system = [after.system - before.system for before, after in pairwise(times)]
    return {"user": user, "system": system, "totals": totals}


def choose_evenly(router: TopKRouter, layer: int) -> None:
    """Let a router that chooses by scores choose evenly among its experts, whatever the scores.

    Routers that choose in another way are left alone.
    """
    if type(router).choose is not TopKRouter.choose:
        return
    drawn: dict[int, Tensor] = {}

    def choose(scores_TE: Tensor, context: RoutingContext) -> Tensor:
        rows = scores_TE.shape[0]
        if rows not in drawn:
            drawn[rows] = even_choices(router.record, rows, layer).to(scores_TE.device)
        even_TE = torch.zeros_like(scores_TE).scatter_(1, drawn[rows], CHOSEN)
        return TopKRouter.choose(router, even_TE, context)

    router.choose = choose


def even_choices(record: Router, rows: int, seed: int) -> Tensor:
    """Return int64 experts [T, K] of rows: all experts in turn, in drawn orders, within groups.

    Every E / K consecutive rows have each expert once, where the numbers divide.
    """
    draw = torch.Generator().manual_seed(seed)
    groups = record.groups
    number, keep = (1, 1) if groups is None else (groups.count, groups.keep)
    members_GE = torch.arange(record.choices).view(number, -1)
    dealt = list[Tensor]()
    dealt_rows = 0
    while dealt_rows < rows:
        order_G = torch.randperm(number, generator=draw)
        hands = [_deal(members_GE[some].flatten(), record.top_k, draw)
                 for some in order_G.split(keep) if len(some) == keep]  # fmt: skip
        dealt.append(torch.stack(hands, 1).flatten(0, 1))
        dealt_rows += len(dealt[-1])
    return torch.cat(dealt)[:rows]


def _deal(experts_E: Tensor, top_k: int, draw: torch.Generator) -> Tensor:
    """Return experts [E // K, K], none twice, in a drawn order."""
    mixed_E = experts_E[torch.randperm(len(experts_E), generator=draw)]
    return mixed_E[: len(mixed_E) // top_k * top_k].view(-1, top_k)
