"""Inputs of a plan: the task of a run or of a published model on a cluster, and its layouts.

task, choice = task_from_run(load_run("run.yaml"), parse_cluster("h100x256"))
case = choice.build_case(task)
"""

import json
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.resources import files
from itertools import chain
from typing import Any, Literal, cast, get_args

from moefold.config.base import Record
from moefold.kernels.quantise.config import Quantise
from moefold.layers.config import (
    Auto,
    Context,
    Full,
    Offload,
    OffloadKind,
    RecomputeKind,
    Selective,
    faster_precision,
)
from moefold.mesh.config import ORDERS, Order, Sizes
from moefold.mesh.pipeline import Stages
from moefold.model.config import Decoder, MultiToken
from moefold.moe.dispatch.config import DISPATCH, FixedShape, ThirdParty
from moefold.parallel.config import Layout
from moefold.planner.case import (
    Case,
    Dispatcher,
    Graphs,
    MemoryPolicy,
    NumberFormats,
    Overlaps,
    Recipe,
    Software,
    distinct_blocks,
    layer_counts,
    load_with_clones,
    offload_fields,
)
from moefold.planner.hardware import Cluster
from moefold.planner.memoize import memoize
from moefold.planner.notes import step_notes
from moefold.planner.published import PublishedModel
from moefold.planner.recompute import OffloadTarget, choose_recompute, resolve_memory_limit
from moefold.run import Run
from moefold.schedule.config import SCHEDULE, OneFOneB, Schedule
from moefold.spec.codes import with_recipe
from moefold.spec.decoder import with_multi_token
from moefold.spec.layer import RING, LayerSpec

DEFAULT_LOAD = 1.2
"""Default of the rows of the fullest expert rank over the mean: between forced balance, 1, and
routers early in training, near 1.6 by published pairs of runs."""
DEFAULT_SEQ = 4096
THIRD_PARTY_DISPATCHERS = frozenset(
    n for n, record in DISPATCH.kinds.items() if issubclass(record, ThirdParty)
)
"""Dispatchers that need another package and have never been run with it."""
UNMEASURED_NOTE = (
    "the time model is not fitted to moefold on a GPU: times and their ± use rates measured with "
    "other software, and a traced step has more kernels than the plan counts (docs/plan.md)"
)
NCCL_EP_NOTE = "NCCL EP has no published rates: its exchanges are planned at HybridEP's"


@dataclass(frozen=True)
class TrainingTask:
    """Inputs of a plan except the layout: model, batch, cluster, number formats, software."""

    name: str
    decoder: Decoder
    seq: int
    batch: int
    cluster: Cluster
    number_formats: NumberFormats = field(default_factory=NumberFormats)
    load: float = DEFAULT_LOAD
    software: Software = field(default_factory=Software)
    notes: tuple[str, ...] = ()
    """Assumptions, and settings of the run without effect."""
    tokens: float | None = None
    """Tokens of the whole run; None for a published model."""

    @property
    def multi_token(self) -> int:
        """Number of multi-token prediction layers."""
        return layer_counts(self.decoder)[1]

    @property
    def untrained_kinds(self) -> tuple[str, ...]:
        """Names of the model's kinds of layers that only other stacks execute."""
        return untrained_kinds(self.decoder)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Assumptions behind the figures, and what was not measured."""
        device = self.cluster.device
        unmeasured = self.software.stack == "moefold" and not device.cpu
        return (*self.notes, UNMEASURED_NOTE) if unmeasured else self.notes


@dataclass(frozen=True)
class LayoutChoice:
    """One layout of a task."""

    sizes: Sizes = field(default_factory=Sizes)
    schedule: Schedule = field(default_factory=OneFOneB)
    micro_batch: int = 1
    dispatch: Dispatcher = "alltoall"
    recipe: Recipe = "bf16"
    memory_policy: MemoryPolicy = field(default_factory=MemoryPolicy)
    stages: Stages | None = None
    """None is balanced stages."""
    context: Context = RING
    order: Order = ORDERS[0]
    max_rows: int | None = None
    """Room of a dispatcher with fixed shapes, as in a run file."""
    clones: int = 0
    """Slots per rank for clones of experts."""
    graphs: Literal["none", "partial", "step"] = "none"
    """CUDA graphs, as in a run file."""

    @property
    def folding_sizes(self) -> tuple[int, ...]:
        """Sizes without virtual stages; lists contain one layout per folding."""
        sizes = self.sizes
        return sizes.tp, sizes.cp, sizes.pp, sizes.ep, sizes.etp

    def build_case(self, task: TrainingTask) -> Case:
        """Return the step of a task in this layout.

        Raises:
            ValueError: the layout is not legal for the task.
        """
        formats = replace(task.number_formats, recipe=self.recipe)
        software = task.software
        if self.recipe == "fp32":
            formats = replace(formats, weight_bytes=0)
        overlaps = replace(software.overlaps, ep=self.schedule.overlaps_passes)
        stages = self.stages
        if stages is None:
            layers = layer_counts(task.decoder)
            mapping = self.schedule.stage_mapping
            stages = balanced_stages(self.sizes.pp, self.sizes.vpp, *layers, mapping)
        decoder = task.decoder
        if software.stack == "moefold":
            decoder = quantised_decoder(decoder, self.recipe)
        return Case(
            decoder=decoder,
            seq=task.seq,
            batch=task.batch,
            micro_batch=self.micro_batch,
            cluster=task.cluster,
            sizes=self.sizes,
            stages=stages,
            schedule=self.schedule,
            dispatch="local" if self.sizes.ep * self.sizes.etp == 1 else self.dispatch,
            load=load_with_clones(task.load, self.clones),
            number_formats=formats,
            memory_policy=self.memory_policy,
            software=replace(software, overlaps=overlaps, cuda_graphs=self._cuda_graphs(task)),
            context=self.context,
            order=self.order,
            max_rows=self.max_rows,
            clones=self.clones,
        )

    def _cuda_graphs(self, task: TrainingTask) -> Graphs:
        """Return the CUDA graphs; they include experts if all passes have equally many rows."""
        if self.graphs == "none" or task.cluster.device.cpu:
            return task.software.cuda_graphs
        fixed_shape = issubclass(DISPATCH.kinds[self.dispatch], FixedShape)
        equal_rows = fixed_shape or self.sizes.ep * self.sizes.etp == 1
        return "full" if self.graphs == "step" else "experts" if equal_rows else "partial"

    @property
    def unsupported(self) -> tuple[str, ...]:
        """Policies of this layout that training cannot execute yet, or only with other packages."""
        policy = self.memory_policy
        policies = []
        if self.sizes.ep * self.sizes.etp > 1 and self.dispatch in THIRD_PARTY_DISPATCHERS:
            policies.append(f"dispatch {self.dispatch}")
        recompute = policy.recompute - {*get_args(RecomputeKind), "block"}
        policies += [f"recompute {name}" for name in sorted(recompute)]
        offload = (policy.offload | policy.disk) - {*get_args(OffloadKind)}
        policies += [f"offload {name}" for name in sorted(offload)]
        if policy.optimizer_offload and policy.state_step is None:
            policies.append("optimizer on the host")
        return tuple(policies)


def untrained_kinds(decoder: Decoder) -> tuple[str, ...]:
    """Return the names of a model's kinds of layers that only other stacks execute."""
    blocks = distinct_blocks(decoder)[0]
    specs = chain.from_iterable((block.attention, block.ffn) for block in blocks)
    names = (spec.untrained for spec in specs if isinstance(spec, LayerSpec))
    return tuple(dict.fromkeys(filter(None, names)))


quantised_decoder = memoize(256)(with_recipe)
balanced_stages = lru_cache(maxsize=4096)(Stages.balanced)


def task_from_run(
    run: Run, cluster: Cluster, batch: int | None = None, load: float = DEFAULT_LOAD
) -> tuple[TrainingTask, LayoutChoice]:
    """Return a run's task on a cluster, and the run's own layout with ``auto`` recompute decided.

    Raises:
        ValueError: the planner does not know a record of the run, or nothing fits its memory limit.
    """
    task, choice, recompute_inputs = _parse_run(run, cluster, batch, load)
    if recompute_inputs is not None:
        choice = replace(choice, memory_policy=choose_recompute(*recompute_inputs))
    return task, choice


def _parse_run(
    run: Run, cluster: Cluster, batch: int | None, load: float
) -> tuple[TrainingTask, LayoutChoice, tuple[Case, float | None, OffloadTarget] | None]:
    """Return a run's task and layout and, where ``auto`` recompute is to be decided, its inputs:
    the case without recompute, the memory limit, and the target of offload.
    """
    precision = run.train.precision
    quantise = run.train.quantise
    if precision == "fp64":
        raise ValueError("train.precision fp64 is for proofs, not for plans: use bf16 or fp32")
    if precision == "auto":
        precision = faster_precision(dict(cluster.device.peaks))
    recipe = cast("Recipe", precision)
    options = set[Any]()
    if isinstance(quantise, Quantise):
        recipe = cast("Recipe", quantise.kind)
        options |= {"rows"} if quantise.wire == "codes" else set()
        options |= {"delayed"} if quantise.scaling == "delayed" else set()
    choice = layout_choice(run.layout, run.train.micro_batch, recipe)
    notes = (NCCL_EP_NOTE,) if choice.dispatch == "nccl_ep" else ()
    if run.train.loss.unplanned:
        notes = (*notes, f"train.loss: {run.train.loss.unplanned}")
    task = TrainingTask(
        name=run.name,
        decoder=run.decoder(),
        seq=run.data.seq,
        batch=batch or run.train.batch,
        cluster=cluster,
        number_formats=NumberFormats(recipe, run.optim, recipe_options=frozenset(options)),
        load=load,
        software=Software(loss_chunk=run.train.loss_chunk),
        notes=(*notes, *step_notes(run)),
        tokens=float(run.train.sizes(run.data.seq).before(run.train.steps) * run.data.seq),
    )
    auto = run.layout.recompute
    if not isinstance(auto, Auto):
        return task, choice, None
    policy = replace(choice.memory_policy, recompute=frozenset())
    target: OffloadTarget = "offload" if auto.host else "disk" if auto.disk else None
    without_recompute = replace(choice, memory_policy=policy).build_case(task)
    return task, choice, (without_recompute, auto.bytes, target)


def resolve_memory_policy(run: Run, cluster: Cluster) -> MemoryPolicy:
    """Return what a run shards, recomputes and offloads, with ``auto`` recompute decided.

    Raises:
        ValueError: nothing fits the memory limit; the message states the least that is needed.
    """
    return task_from_run(run, cluster, load=_planned_load(run))[1].memory_policy


def require_recompute_limit(run: Run, cluster: Cluster) -> None:
    """Check that some choice of ``auto`` recompute fits its memory limit.

    Raises:
        ValueError: none fits; the message states the least that is needed.
    """
    recompute_inputs = _parse_run(run, cluster, None, _planned_load(run))[2]
    if recompute_inputs is not None:
        resolve_memory_limit(*recompute_inputs)


def _planned_load(run: Run) -> float:
    return DEFAULT_LOAD if run.layout.split.ep > 1 else 1.0


def with_memory_policy(run: Run, policy: MemoryPolicy) -> Run:
    """Return a run in which a plan's recompute and offload records replace ``auto``."""
    auto = run.layout.recompute
    modules = policy.recompute
    targets = dict[str, Any]()
    if not isinstance(auto, Auto):
        return run
    update: dict[str, Any] = {"recompute": None}
    if modules:
        selective = {"modules": sorted(modules)}
        full = "block" in modules
        update["recompute"] = Full() if full else Selective.model_validate(selective)
    if auto.host and policy.offload:
        targets["host"] = {"modules": sorted(policy.offload)}
    if auto.disk and policy.disk:
        targets["disk"] = {"modules": sorted(policy.disk), "folder": auto.disk}
    if targets:
        update["offload"] = Offload.model_validate({"in_flight": policy.in_flight, **targets})
    return run.model_copy(update={"layout": run.layout.model_copy(update=update)})


def layout_choice(layout: Layout, micro_batch: int, recipe: Recipe) -> LayoutChoice:
    """Convert a run file's layout to the planner's form.

    Raises:
        ValueError: the planner does not know one of its records.
    """
    context = layout.context
    dispatch = layout.dispatch
    state = layout.state
    if not isinstance(context, Context):
        raise ValueError(f"layout.context: {type(context).__name__} cannot be planned")
    return LayoutChoice(
        sizes=layout.split,
        schedule=layout.resolved_schedule,
        micro_batch=micro_batch,
        dispatch=_dispatcher(dispatch),
        recipe=recipe,
        memory_policy=MemoryPolicy(
            zero=layout.zero,
            zero_ranks=layout.zero_ranks,
            recompute=layout.recomputed,
            optimizer_offload=state.share if state.is_offloaded else 0.0,
            state_step=state.step if state.is_offloaded else None,
            state_on_disk=state.at == "disk",
            **offload_fields(layout.offload),
        ),
        stages=None if layout.stages is None else Stages.parse(layout.stages),
        context=context,
        order=layout.order,
        max_rows=dispatch.max_rows if isinstance(dispatch, FixedShape) else None,
        clones=0 if layout.clones is None else layout.clones.slots,
        graphs=layout.graphs,
    )


def _dispatcher(dispatch: Record) -> Dispatcher:
    kind = type(dispatch).model_fields["kind"].default
    if kind not in get_args(Dispatcher):
        raise ValueError(
            f"layout.dispatch {kind} cannot be planned, as its traffic is unknown; plan the run "
            f"with one of {', '.join(get_args(Dispatcher))}"
        )
    return kind


def task_from_model(
    model: PublishedModel,
    cluster: Cluster,
    batch: int,
    seq: int = DEFAULT_SEQ,
    load: float = DEFAULT_LOAD,
) -> TrainingTask:
    """Return the pre-training task of a published model, in Megatron-Core where moefold does not
    train all of its layers.
    """
    notes = (f"assumed: {model.assumed}",) if model.assumed else ()
    decoder = with_multi_token(model.decoder, (MultiToken(),) * model.num_multi_token)
    task = TrainingTask(model.name, decoder, seq, batch, cluster, load=load, notes=notes)
    if not task.untrained_kinds:
        return task
    note = "moefold does not train all layers of this model yet: planned as in Megatron-Core"
    overlaps = Overlaps(gradients=True, parameters=True)
    return replace(task, software=Software("megatron", overlaps=overlaps), notes=(*notes, note))


@dataclass(frozen=True)
class PublishedLayout:
    """A published layout with its measured throughput."""

    id: str
    source: str
    choice: LayoutChoice
    device: str
    devices: int
    batch: int
    seq: int
    tflops_per_gpu: float | None


def published_layouts(name: str) -> tuple[PublishedLayout, ...]:
    """Return the published layouts of a model by its full name."""
    text = files("moefold.planner").joinpath("published_layouts.json").read_text("utf-8")
    layouts = list[PublishedLayout]()
    columns = "id", "source", "device", "devices", "batch", "seq", "tflops_per_gpu"
    for row in json.loads(text):
        if row["model"] != name:
            continue
        choice = LayoutChoice(
            sizes=Sizes.parse(row["sizes"]),
            schedule=cast("Schedule", SCHEDULE.kinds[row["schedule"]]()),
            micro_batch=row["micro_batch"],
            dispatch=row["dispatch"],
            recipe=row["recipe"],
            memory_policy=MemoryPolicy(zero=row["zero"], recompute=frozenset(row["recompute"])),
            stages=Stages.parse(row["stages"]),
        )
        values = {column: row.get(column) for column in columns}
        layouts.append(PublishedLayout(choice=choice, **values))
    return tuple(layouts)
