"""What one rank of a large layout runs on its own: the step, made small if need be, and its plan.

A smaller step has widths, vocabulary and sequences divided by a factor, and fewer micro-batches.
Layers, heads, experts, their choice, the layout, its stages and its schedule are those of the run.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import ceil, lcm

from moefold.config.base import to_dict
from moefold.config.errors import RunError, Violation
from moefold.kernels.quantise.config import Quantise
from moefold.model.config import Block, Decoder, to_stacks
from moefold.moe.dispatch.config import FixedShape, ThirdParty
from moefold.parallel.config import Layout
from moefold.planner.case import Case
from moefold.planner.curves import Rates
from moefold.planner.hardware import Cluster, Device
from moefold.planner.memory import StageMemory, estimate_memory
from moefold.planner.network import (
    DispatchRows,
    GroupReach,
    exchange_seconds,
    listed_reach,
    ring_seconds,
    strided_reach,
)
from moefold.planner.task import task_from_run
from moefold.planner.time import StepTime, estimate_time, model_flops
from moefold.planner.time_work import build_setting
from moefold.run import Run, require_fit
from moefold.spec.decoder import model_needs
from moefold.spec.layer import LayerSpec, round_up
from moefold.spec.quantised import cut_violations
from moefold.training.losses.config import CrossEntropy

MULTIPLE = 8
"""What widths of a smaller model are rounded up to, times what axes divide."""
MOST_FACTOR = 1 << 10
ROUNDS = 2
"""Micro-batches of a smaller step for each pipeline rank: a pipeline fills, and runs full."""
CPU_FLOPS = 3e11
"""Most model FLOPs of a step of one rank that runs on a CPU, unless a factor is stated: about ten
seconds of one thread."""
MEMORY_SHARE = 0.5
"""Share of a machine's memory that a rank's planned peak may take."""


@dataclass(frozen=True)
class LoneRank:
    """One rank of a run's layout, the step that it runs on its own, and the plan of that step.

    Attributes:
        run: the run.
        rank: number of the rank.
        full: the run's step.
        case: the step that is run, on a cluster of this machine's devices.
        factor: what widths and sequences of ``full`` were divided by.
    """

    run: Run
    rank: int
    full: Case
    case: Case
    factor: int

    @property
    def pipeline_rank(self) -> int:
        """Place of the rank in its pipeline."""
        return self.case.folding.attention_coordinates(self.rank).pp

    @property
    def place(self) -> dict[str, int]:
        """The rank's coordinates in the grids of attention and of experts."""
        folding = self.case.folding
        attention = folding.attention_coordinates(self.rank)
        experts = folding.expert_coordinates(self.rank)
        return {**attention._asdict(), **experts._asdict()}

    @property
    def stage(self) -> str:
        """Layers of the rank's stages, as a run file writes them: those of a chunk after a bar."""
        table = self.case.table
        chunks = range(table.chunks)
        stages = (table.stage_of(self.pipeline_rank, chunk) for chunk in chunks)
        return "stage " + "|".join(self.case.stages.letters[stage] for stage in stages)

    @cached_property
    def time(self) -> StepTime:
        """Planned time of the rank's part of the step."""
        return estimate_time(self.case, rank=self.pipeline_rank)

    @cached_property
    def memory(self) -> StageMemory:
        """Planned memory of the rank."""
        return estimate_memory(self.case)[self.pipeline_rank]

    @cached_property
    def _rates(self) -> Rates:
        case = self.case
        numbers = case.number_formats
        options = numbers.recipe_options
        return build_setting(case.cluster, case.software, numbers.recipe, options).rates

    def exchange_seconds(self, op: str, sent: int, calls: int, ranks: Sequence[int]) -> float:
        """Return the seconds of exchanges by the links of the planner, none of it hidden.

        Args:
            op: the operation, as a recorder names it.
            sent: bytes that this rank sends in all of them.
            calls: number of operations.
            ranks: the ranks that take part.
        """
        if not sent:
            return 0.0
        cluster = self.case.cluster
        rates = self._rates
        size = len(ranks)
        each = sent / calls
        whole = each * size / (size - 1)
        reach = _reach(cluster, ranks)
        if op.startswith("all_reduce"):
            return calls * 2 * ring_seconds(whole / 2, reach, cluster, rates.nic_gather)
        if op in ("send", "shift"):
            near = _reach(cluster, ranks[:2])
            rows = DispatchRows(1.0, 2 * each, 1)
            return calls * exchange_seconds(rows, "alltoall", near, cluster, rates, 1.0)
        if op in ("all_to_all", "scatter_rows"):
            rows = DispatchRows(1.0, whole, 1)
            return calls * exchange_seconds(rows, "alltoall", reach, cluster, rates, 1.0)
        return calls * ring_seconds(whole, reach, cluster, rates.nic_gather)


def _reach(cluster: Cluster, ranks: Sequence[int]) -> GroupReach:
    stride = ranks[1] - ranks[0]
    evenly = all(b - a == stride for a, b in pairwise(ranks))
    return strided_reach(cluster, len(ranks), stride) if evenly else listed_reach(cluster, ranks)


def require_rank(run: Run, rank: int, world: int, factor: int | None = None) -> None:
    """Check that a run has such a rank, and that it can be run on its own.

    Args:
        run: the run.
        rank: number of the rank.
        world: number of ranks.
        factor: what sizes are to be divided by; None leaves it open.

    Raises:
        RunError: with every reason and the nearest legal values.
    """
    found = list[Violation]()
    try:
        require_fit(run, world)
    except RunError as error:
        found += error.violations
    found += rank_violations(rank, world, factor)
    found += _alone_violations(run, world)
    if found:
        raise RunError(found, to_dict(run), f"rank {rank} of {world}, layout {run.layout.sizes!r}")


def rank_violations(rank: int, world: int | None, factor: int | None) -> Iterator[Violation]:
    """Yield a rank that a world does not have, and a factor that divides nothing."""
    if rank < 0 or (world is not None and rank >= max(world, 1)):
        most = f" and below {world}, the number of ranks" if world else ""
        nearest = min(max(rank, 0), max((world or 1) - 1, 0))
        yield Violation(("rank",), rank, f"must be at least 0{most}", nearest)
    if factor is not None and not 1 <= factor <= MOST_FACTOR:
        rule = f"must be between 1 and {MOST_FACTOR:,}"
        yield Violation(("shrink",), factor, rule, min(max(factor, 1), MOST_FACTOR))


def _alone_violations(run: Run, world: int) -> Iterator[Violation]:
    """Yield what of a run one rank alone cannot run."""
    dispatch = run.layout.dispatch
    if isinstance(dispatch, ThirdParty) and run.layout.split.ep > 1:
        rule = f"{dispatch.kind} exchanges rows by itself, which cannot be emulated by copies"
        yield Violation(("layout", "dispatch"), dispatch.kind, rule, "alltoall_once")
    loss = run.train.loss
    if not isinstance(loss, CrossEntropy):
        rule = "needs data or another model, but one rank runs on random tokens"
        yield Violation(("train", "loss"), to_dict(loss), rule, "cross_entropy")
    if world > 0 and world % run.layout.split.smallest_world == 0:
        yield from _batch_violations(run, world)


def _batch_violations(run: Run, world: int) -> Iterator[Violation]:
    """Yield a batch that data ranks cannot share, or whose micro-batches no schedule runs."""
    sizes = run.layout.split
    train = run.train
    share = world // (sizes.pp * sizes.cp * sizes.tp) * train.micro_batch
    if train.batch % share:
        rule = f"must be a multiple of {share}: {share // train.micro_batch} data ranks"
        yield Violation(("train", "batch"), train.batch, rule, max(1, train.batch // share) * share)
        return
    for found in run.layout.schedule_violations(train.batch // share):
        yield Violation(("train", "batch"), train.batch, found.rule, found.nearest * share)


def make_lone_rank(
    run: Run, rank: int, cluster: Cluster, memory: int, factor: int | None = None
) -> LoneRank:
    """Return what a rank of a layout runs on this machine.

    Args:
        run: the run, of which ``require_rank`` has nothing to say.
        rank: number of the rank.
        cluster: as many of this machine's devices as there are ranks, with the links to be planned.
        memory: bytes of this machine.
        factor: what to divide sizes by; default is 1 on a GPU, and on a CPU the smallest power of
            two for which the step is small enough.

    Raises:
        ValueError: the step cannot be made as small as it must be.
    """
    task, layout = task_from_run(run, cluster, load=1.0)
    full = task.case(layout)
    whole = LoneRank(run, rank, full, full, 1)
    if factor is None and not cluster.device.cpu:
        factor = 1
    factors = (1 << power for power in range(MOST_FACTOR.bit_length()))
    for number in factors if factor is None else (factor,):
        case = full if number == 1 else smaller(full, number)
        if problem := _problem(case):
            raise ValueError(f"sizes divided by {number}: {problem}")
        small = replace(whole, case=case, factor=number)
        peak = small.memory.peak_allocated
        fits = peak <= MEMORY_SHARE * memory
        if fits and (factor is not None or model_flops(case) / case.world <= CPU_FLOPS):
            return small
        if factor is not None:
            raise ValueError(
                f"sizes divided by {factor}: rank {rank} needs {peak / 1e9:.1f} GB, and half of "
                f"this machine's memory is {MEMORY_SHARE * memory / 1e9:.1f} GB; divide by more"
            )
    raise ValueError(f"no step of rank {rank} is small enough for this machine")


def _problem(case: Case) -> str | None:
    """Return why training could not run a smaller case; None if it could."""
    rows = case.micro_batch * case.seq
    layout = case.layout
    found = list(layout.violations(model_needs(case.decoder, case.seq), rows))
    if isinstance(case.decoder.quantise, Quantise):
        found += cut_violations(case.decoder, layout, rows)
    return found[0].rule if found else None


def smaller(case: Case, factor: int) -> Case:
    """Return a case whose widths, vocabulary and sequences are divided by a factor, with as many
    micro-batches as fill the pipeline; the layout and all that it divides stay."""
    sizes = case.sizes
    seq = _divided(case.seq, factor, lcm(MULTIPLE, 2 * sizes.cp * sizes.tp))
    micro_batches = case.num_micro_batches
    legal = (
        number
        for number in range(ROUNDS * sizes.pp, micro_batches)
        if not case.layout.schedule_violations(number)
    )
    number = next(legal, micro_batches)
    return replace(
        case,
        decoder=_narrowed(case.decoder, factor, lcm(MULTIPLE, sizes.tp, sizes.etp)),
        seq=seq,
        batch=case.folding.dp * case.micro_batch * number,
        layout=_with_less_room(_with_stages(case), seq / case.seq),
    )


def _divided(size: int, factor: int, multiple: int) -> int:
    return min(size, round_up(-(-size // factor), multiple))


def _narrowed(decoder: Decoder, factor: int, multiple: int) -> Decoder:
    """Return a decoder of narrower layers; as many of each, in their order."""

    def narrow(block: Block) -> Block:
        parts = {"attention": block.attention, "ffn": block.ffn}
        changes = {
            name: part.narrowed(factor, multiple)
            for name, part in parts.items()
            if isinstance(part, LayerSpec)
        }
        return block.model_copy(update=changes)

    changes = {
        "hidden": _divided(decoder.hidden, factor, multiple),
        "vocab": _divided(decoder.vocab, factor, multiple),
        "stacks": to_stacks(map(narrow, decoder.blocks)),
    }
    return decoder.model_copy(update=changes)


def _with_stages(case: Case) -> Layout:
    """Return a case's layout with its stages stated, which by default follow from sizes."""
    if case.sizes.pp == 1:
        return case.layout
    return case.layout.model_copy(update={"stages": case.stages.text})


def _with_less_room(layout: Layout, share: float) -> Layout:
    """Return a layout whose stated rooms for rows are this share of what they were."""
    dispatch = layout.dispatch
    if not isinstance(dispatch, FixedShape):
        return layout
    rows = round_up(ceil(dispatch.max_rows * share), MULTIPLE)
    return layout.model_copy(update={"dispatch": dispatch.model_copy(update={"max_rows": rows})})


def linked(device: Device, links: Device, ranks: int) -> Cluster:
    """Return a cluster of devices that are connected like others."""
    connected = replace(
        device,
        link_bandwidth=links.link_bandwidth,
        nic_bandwidth=links.nic_bandwidth,
        domain=links.domain,
        links=links.links,
    )
    return Cluster(connected, ranks, min(8, links.domain), links.domain)


def planned_parts(parts: Mapping[str, float]) -> dict[str, float]:
    """Return planned seconds by what is measured: passes, update and each kind of exchange."""
    exchanges = ("tp", "cp", "dispatch", "dp")
    apart = (*exchanges, "optimizer", "step", "bubble", "offload")
    passes = sum(seconds for name, seconds in parts.items() if name not in apart)
    return {"passes": passes, **{name: parts[name] for name in apart if name in parts}}
