"""Inputs of a plan: the task of a run or of a published model on a cluster, and a layout for it.

task, given = task_from_run(load_run("run.yaml"), cluster("h100x256"))
case = given.build_case(task)
"""

import json
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.resources import files
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
    recompute_modules,
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
from moefold.training.losses.config import Distill, Dpo

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
TEACHER_NOTE = "train.loss: the teacher's time and memory are not counted"
REFERENCE_NOTE = "train.loss: the reference's forward pass in each step is not counted"
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
        wide = self.recipe == "fp32"
        numbers = replace(
            task.number_formats,
            recipe=self.recipe,
            weight_bytes=0 if wide else task.number_formats.weight_bytes,
        )
        overlaps, stages = (
            replace(task.software.overlaps, ep=self.schedule.overlaps_passes),
            self.stages,
        )
        ours = task.software.stack == "moefold"
        if stages is None:
            layers, way = layer_counts(task.decoder), self.schedule.stage_mapping
            stages = balanced_stages(self.sizes.pp, self.sizes.vpp, *layers, way)
        return Case(
            decoder=quantised_decoder(task.decoder, self.recipe) if ours else task.decoder,
            seq=task.seq,
            batch=task.batch,
            micro_batch=self.micro_batch,
            cluster=task.cluster,
            sizes=self.sizes,
            stages=stages,
            schedule=self.schedule,
            dispatch="local" if self.sizes.ep * self.sizes.etp == 1 else self.dispatch,
            load=load_with_clones(task.load, self.clones),
            number_formats=numbers,
            memory_policy=self.memory_policy,
            software=replace(task.software, overlaps=overlaps, cuda_graphs=self._cuda_graphs(task)),
            context=self.context,
            order=self.order,
            max_rows=self.max_rows,
            clones=self.clones,
        )

    def _cuda_graphs(self, task: TrainingTask) -> Graphs:
        """Return the CUDA graphs; they include experts if all passes have equally many rows."""
        if self.graphs == "none" or task.cluster.device.cpu:
            return task.software.cuda_graphs
        fixed = issubclass(DISPATCH.kinds[self.dispatch], FixedShape)
        known = fixed or self.sizes.ep * self.sizes.etp == 1
        return "full" if self.graphs == "step" else "experts" if known else "partial"

    @property
    def unsupported(self) -> tuple[str, ...]:
        """Policies of this layout that training cannot execute yet, or only with other packages."""
        found = []
        if self.sizes.ep * self.sizes.etp > 1 and self.dispatch in THIRD_PARTY_DISPATCHERS:
            found.append(f"dispatch {self.dispatch}")
        known = {*get_args(RecomputeKind), "block"}
        found += [f"recompute {name}" for name in sorted(self.memory_policy.recompute - known)]
        away = self.memory_policy.offload | self.memory_policy.disk
        found += [f"offload {name}" for name in sorted(away - {*get_args(OffloadKind)})]
        if self.memory_policy.optimizer_offload and self.memory_policy.state_step is None:
            found.append("optimizer on the host")
        return tuple(found)


def untrained_kinds(decoder: Decoder) -> tuple[str, ...]:
    """Return the names of a model's kinds of layers that only other stacks execute."""
    records = (r for block in distinct_blocks(decoder)[0] for r in (block.attention, block.ffn))
    named = (record.untrained for record in records if isinstance(record, LayerSpec))
    return tuple(dict.fromkeys(name for name in named if name))


quantised_decoder = memoize(256)(with_recipe)
balanced_stages = lru_cache(maxsize=4096)(Stages.balanced)


def task_from_run(
    run: Run, cluster: Cluster, batch: int | None = None, load: float = DEFAULT_LOAD
) -> tuple[TrainingTask, LayoutChoice]:
    """Return a run's task on a cluster, and the run's own layout with ``auto`` recompute decided.

    Raises:
        ValueError: the planner does not know a record of the run, or nothing fits its memory limit.
    """
    task, choice = _task_and_choice(run, cluster, batch, load)
    asked = _auto_recompute_inputs(run, task, choice)
    return task, choice if asked is None else replace(
        choice, memory_policy=choose_recompute(*asked)
    )


def _task_and_choice(
    run: Run, cluster: Cluster, batch: int | None = None, load: float = DEFAULT_LOAD
) -> tuple[TrainingTask, LayoutChoice]:
    """Return a run's task and layout, leaving ``auto`` recompute undecided."""
    asked = run.train.precision
    if asked == "fp64":
        raise ValueError("train.precision fp64 is for proofs, not for plans: use bf16 or fp32")
    found = faster_precision(dict(cluster.device.peaks)) if asked == "auto" else asked
    narrow = run.train.quantise
    precision = cast("Recipe", narrow.kind if isinstance(narrow, Quantise) else found)
    narrowed: set[Any] = set()
    if isinstance(narrow, Quantise):
        narrowed |= {"rows"} if narrow.wire == "codes" else set()
        narrowed |= {"delayed"} if narrow.scaling == "delayed" else set()
    size = batch or run.train.batch
    notes = (NCCL_EP_NOTE,) if _dispatcher(run.layout.dispatch) == "nccl_ep" else ()
    loss = run.train.loss
    if isinstance(loss, Distill) and loss.stored is None:
        notes = (*notes, TEACHER_NOTE)
    if isinstance(loss, Dpo) and loss.reference != "stored":
        notes = (*notes, REFERENCE_NOTE)
    task = TrainingTask(
        name=run.name,
        decoder=run.decoder(),
        seq=run.data.seq,
        batch=size,
        cluster=cluster,
        number_formats=NumberFormats(precision, run.optim, recipe_options=frozenset(narrowed)),
        load=load,
        software=Software(loss_chunk=run.train.loss_chunk),
        notes=(*notes, *step_notes(run)),
        tokens=float(run.train.steps) * run.train.batch * run.data.seq,
    )
    return task, layout_choice(run.layout, run.train.micro_batch, precision)


def _auto_recompute_inputs(
    run: Run, task: TrainingTask, choice: LayoutChoice
) -> tuple[Case, float | None, OffloadTarget] | None:
    """Return the inputs of ``auto`` recompute: case without recompute, limit, and offload place."""
    record = run.layout.recompute
    if not isinstance(record, Auto):
        return None
    bare = replace(choice, memory_policy=replace(choice.memory_policy, recompute=frozenset()))
    place: OffloadTarget = "offload" if record.host else "disk" if record.disk else None
    return bare.build_case(task), record.bytes, place


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
    asked = _auto_recompute_inputs(run, *_task_and_choice(run, cluster, load=_planned_load(run)))
    if asked is not None:
        resolve_memory_limit(*asked)


def _planned_load(run: Run) -> float:
    return DEFAULT_LOAD if run.layout.split.ep > 1 else 1.0


def with_memory_policy(run: Run, keeping: MemoryPolicy) -> Run:
    """Return a run in which a plan's recompute and offload records replace ``auto``."""
    auto, again, layout = run.layout.recompute, keeping.recompute, run.layout
    if not isinstance(auto, Auto):
        return run
    record: Record | None = Full() if "block" in again else None
    if again and record is None:
        record = Selective.model_validate({"modules": sorted(again)})
    update: dict[str, Any] = {"recompute": record}
    to: dict[str, Any] = {}
    if auto.host and keeping.offload:
        to["host"] = {"modules": sorted(keeping.offload)}
    if auto.disk and keeping.disk:
        to["disk"] = {"modules": sorted(keeping.disk), "folder": auto.disk}
    if to:
        update["offload"] = Offload.model_validate({"in_flight": keeping.in_flight, **to})
    return run.model_copy(update={"layout": layout.model_copy(update=update)})


def layout_choice(layout: Layout, micro_batch: int, precision: Recipe) -> LayoutChoice:
    """Convert a run file's layout to the planner's form.

    Raises:
        ValueError: the planner does not know one of its records.
    """
    sizes = layout.split
    context = layout.context
    if not isinstance(context, Context):
        raise ValueError(f"layout.context: {type(context).__name__} cannot be planned")
    return LayoutChoice(
        sizes=sizes,
        schedule=layout.resolved_schedule,
        micro_batch=micro_batch,
        dispatch=_dispatcher(layout.dispatch),
        recipe=precision,
        memory_policy=MemoryPolicy(
            zero=layout.zero,
            zero_ranks=layout.zero_ranks,
            recompute=recompute_modules(layout.recompute),
            optimizer_offload=layout.state.share if layout.state.is_offloaded else 0.0,
            state_step=layout.state.step if layout.state.is_offloaded else None,
            state_on_disk=layout.state.at == "disk",
            **offload_fields(layout.offload),
        ),
        stages=None if layout.stages is None else Stages.parse(layout.stages),
        context=context,
        order=layout.order,
        max_rows=layout.dispatch.max_rows if isinstance(layout.dispatch, FixedShape) else None,
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
    """Return the pre-training task of a published model; with foreign layers it is Megatron's."""
    notes = (f"assumed: {model.assumed}",) if model.assumed else ()
    further = (MultiToken(),) * model.num_multi_token
    task = TrainingTask(
        model.name, with_multi_token(model.decoder, further), seq, batch, cluster,
        load=load, notes=notes,
    )  # fmt: skip
    if not task.untrained_kinds:
        return task
    said = "moefold does not train all layers of this model yet: planned as in Megatron-Core"
    overlaps = Overlaps(gradients=True, parameters=True)
    return replace(task, software=Software("megatron", overlaps=overlaps), notes=(*notes, said))


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
    found = list[PublishedLayout]()
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
        found.append(
            PublishedLayout(
                row["id"], row["source"], choice, row["device"], row["devices"], row["batch"],
                row["seq"], row.get("tflops_per_gpu"),
            )
        )  # fmt: skip
    return tuple(found)
