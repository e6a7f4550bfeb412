"""Inputs of a plan: the task of a run or of a published model on a cluster, and its layouts.

task, layout = task_from_run(load_run("run.yaml"), parse_cluster("h100x256"))
case = task.case(layout)
"""

import json
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.resources import files
from itertools import chain
from typing import Any, cast

from moefold.kernels.quantise.config import Quantise
from moefold.layers.config import Auto, faster_precision
from moefold.mesh.config import Sizes
from moefold.mesh.pipeline import Stages
from moefold.model.config import Decoder, MultiToken
from moefold.parallel.config import Layout
from moefold.planner.case import (
    Case,
    Graphs,
    NumberFormats,
    Overlaps,
    Recipe,
    Software,
    distinct_blocks,
    layer_counts,
    load_with_clones,
)
from moefold.planner.curves import device_note
from moefold.planner.hardware import Cluster
from moefold.planner.layouts import (
    dispatch_kind,
    has_fixed_rows,
    make_dispatch,
    make_layout,
    require_plannable,
)
from moefold.planner.memoize import memoize
from moefold.planner.notes import step_notes
from moefold.planner.published import PublishedModel
from moefold.planner.recompute import choose_recompute, resolve_memory_limit
from moefold.run import Run
from moefold.schedule.config import SCHEDULE, Schedule
from moefold.spec.codes import with_recipe
from moefold.spec.decoder import with_multi_token
from moefold.spec.layer import LayerSpec
from moefold.spec.reference import Reference, StatedLoss, reference_of

DEFAULT_LOAD = 1.2
"""Default of the rows of the fullest expert rank over the mean: between forced balance, 1, and
routers early in training, near 1.6 by published pairs of runs."""
DEFAULT_SEQ = 4096
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
    """Tokens of the whole run; None if nobody has stated them."""
    micro_batch: int = 1
    """Sequences per micro-batch of the run."""
    reference: Reference | None = None
    """What the loss needs besides the model."""
    precision_stated: bool = False
    """Whether layouts in other number formats are no answer."""

    def case(
        self, layout: Layout, micro_batch: int | None = None, recipe: Recipe | None = None
    ) -> Case:
        """Return the step of the task in a layout.

        Args:
            layout: the layout.
            micro_batch: sequences per micro-batch; default is the run's.
            recipe: number format; default is the run's.

        Raises:
            ValueError: the layout is not legal for the task.
        """
        recipe = recipe or self.number_formats.recipe
        decoder = self.decoder
        if self.software.stack == "moefold":
            decoder = quantised_decoder(decoder, recipe)
        slots = 0 if layout.clones is None else layout.clones.slots
        return Case(
            decoder=decoder,
            seq=self.seq,
            batch=self.batch,
            micro_batch=micro_batch or self.micro_batch,
            cluster=self.cluster,
            layout=layout,
            load=load_with_clones(self.load, slots),
            number_formats=_formats_in(self.number_formats, recipe),
            software=self._software_in(layout),
            reference=self.reference,
        )

    def _software_in(self, layout: Layout) -> Software:
        """Return the software as it runs in a layout: what overlaps, and what is in CUDA graphs."""
        graphs = self.software.cuda_graphs
        if layout.graphs != "none" and not self.cluster.device.cpu:
            has_experts = has_fixed_rows(layout) and layout.graph_experts
            partial: Graphs = "experts" if has_experts else "partial"
            graphs = "full" if layout.graphs == "step" else partial
        return _running(self.software, layout.resolved_schedule.overlaps_passes, graphs)

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
        notes = (*self.notes, *filter(None, [device_note(device)]))
        unmeasured = self.software.stack == "moefold" and not device.cpu
        return (*notes, UNMEASURED_NOTE) if unmeasured else notes


# Cases with equal parts share one object, by which caches find their entries sooner.
@lru_cache(maxsize=256)
def _formats_in(formats: NumberFormats, recipe: Recipe) -> NumberFormats:
    """Return number formats with another recipe."""
    return replace(formats, recipe=recipe, **({"weight_bytes": 0} if recipe == "fp32" else {}))


@lru_cache(maxsize=256)
def _running(software: Software, overlaps_exchanges: bool, graphs: Graphs) -> Software:
    """Return software with what overlaps and what is captured in a layout."""
    overlaps = replace(software.overlaps, ep=overlaps_exchanges)
    return replace(software, overlaps=overlaps, cuda_graphs=graphs)


def untrained_kinds(decoder: Decoder) -> tuple[str, ...]:
    """Return the names of a model's kinds of layers that only other stacks execute."""
    blocks = distinct_blocks(decoder)[0]
    specs = chain.from_iterable((block.attention, block.ffn) for block in blocks)
    names = (spec.untrained for spec in specs if isinstance(spec, LayerSpec))
    return tuple(dict.fromkeys(filter(None, names)))


quantised_decoder = memoize(256)(with_recipe)


def task_from_run(
    run: Run, cluster: Cluster, batch: int | None = None, load: float = DEFAULT_LOAD
) -> tuple[TrainingTask, Layout]:
    """Return a run's task on a cluster, and the run's own layout with ``auto`` recompute decided.

    Raises:
        ValueError: the planner does not know a record of the run, or nothing fits its memory limit.
    """
    task, recompute_inputs = _parse_run(run, cluster, batch, load)
    if recompute_inputs is None:
        return task, run.layout
    return task, choose_recompute(*recompute_inputs)


def _parse_run(
    run: Run, cluster: Cluster, batch: int | None, load: float
) -> tuple[TrainingTask, tuple[Case, Auto] | None]:
    """Return a run's task and, where ``auto`` recompute is to be decided, its inputs: the case
    without recompute, and the policy.
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
    require_plannable(run.layout)
    notes = (NCCL_EP_NOTE,) if dispatch_kind(run.layout) == "nccl_ep" else ()
    task = TrainingTask(
        name=run.name,
        decoder=run.decoder,
        seq=run.data.seq,
        batch=batch or run.train.batch,
        cluster=cluster,
        number_formats=NumberFormats(recipe, run.optim, recipe_options=frozenset(options)),
        load=load,
        software=Software(loss_chunk=run.train.loss_chunk),
        notes=(*notes, *step_notes(run)),
        tokens=_stated_tokens(run),
        micro_batch=run.train.micro_batch,
        reference=reference_of(run.train.loss),
    )
    auto = run.layout.recompute
    if not isinstance(auto, Auto):
        return task, None
    return task, (task.case(run.layout.model_copy(update={"recompute": None})), auto)


def _stated_tokens(run: Run) -> float | None:
    """Return the tokens of a run that states its steps."""
    if "steps" not in run.train.model_fields_set:
        return None
    return float(run.train.sizes(run.data.seq).before(run.train.steps) * run.data.seq)


def resolve_layout(run: Run, cluster: Cluster) -> Layout:
    """Return a run's layout with ``auto`` recompute decided.

    Raises:
        ValueError: nothing fits the memory limit; the message states the least that is needed.
    """
    return task_from_run(run, cluster, load=_planned_load(run))[1]


def require_recompute_limit(run: Run, cluster: Cluster) -> None:
    """Check that some choice of ``auto`` recompute fits its memory limit.

    Raises:
        ValueError: none fits; the message states the least that is needed.
    """
    recompute_inputs = _parse_run(run, cluster, None, _planned_load(run))[1]
    if recompute_inputs is not None:
        resolve_memory_limit(*recompute_inputs)


def _planned_load(run: Run) -> float:
    return DEFAULT_LOAD if run.layout.split.ep > 1 else 1.0


def task_from_model(
    model: PublishedModel,
    cluster: Cluster,
    batch: int,
    seq: int = DEFAULT_SEQ,
    load: float = DEFAULT_LOAD,
    recipe: Recipe | None = None,
) -> TrainingTask:
    """Return the training task of a published model, in Megatron-Core where moefold does not train
    all of its layers.

    Args:
        model: the model.
        cluster: its devices are the ranks.
        batch: sequences per step.
        seq: tokens per sequence.
        load: rows of the fullest expert rank over the mean.
        recipe: the only number format of products; by default each that the device has.
    """
    notes = (f"assumed: {model.assumed}",) if model.assumed else ()
    decoder = with_multi_token(model.decoder, (MultiToken(),) * model.num_multi_token)
    task = TrainingTask(
        name=model.name,
        decoder=decoder,
        seq=seq,
        batch=batch,
        cluster=cluster,
        number_formats=NumberFormats(recipe or "bf16"),
        load=load,
        notes=notes,
        precision_stated=recipe is not None,
    )
    if not task.untrained_kinds:
        return task
    note = "moefold does not train all layers of this model yet: planned as in Megatron-Core"
    overlaps = Overlaps(gradients=True, parameters=True)
    return replace(task, software=Software("megatron", overlaps=overlaps), notes=(*notes, note))


def with_loss(task: TrainingTask, loss: StatedLoss) -> TrainingTask:
    """Return a published model's task with a loss."""
    notes = task.notes
    decoder = task.decoder
    if loss.kind != "cross_entropy" and decoder.multi_token:
        decoder = with_multi_token(decoder, ())
        notes = (*notes, f"train.loss {loss.kind}: planned without multi-token prediction")
    return replace(task, decoder=decoder, reference=loss.reference, notes=notes)


@dataclass(frozen=True)
class PublishedLayout:
    """A published layout with its measured throughput."""

    id: str
    source: str
    layout: Layout
    micro_batch: int
    recipe: Recipe
    device: str
    devices: int
    batch: int
    seq: int
    tflops_per_gpu: float | None


def published_layouts(name: str) -> tuple[PublishedLayout, ...]:
    """Return the published layouts of a model by its full name."""
    text = files("moefold.planner").joinpath("published_layouts.json").read_text("utf-8")
    layouts = list[PublishedLayout]()
    columns = ("id", "source", "micro_batch", "recipe", "device", "devices", "batch", "seq")
    for row in json.loads(text):
        if row["model"] != name:
            continue
        layout = make_layout(
            Sizes.parse(row["sizes"]),
            schedule=cast("Schedule", SCHEDULE.kinds[row["schedule"]]()),
            stages=Stages.parse(row["stages"]),
            dispatch=make_dispatch(row["dispatch"]),
            zero=row["zero"],
            recompute=frozenset(row["recompute"]),
        )
        values = {column: row[column] for column in columns}
        measured = row.get("tflops_per_gpu")
        layouts.append(PublishedLayout(layout=layout, tflops_per_gpu=measured, **values))
    return tuple(layouts)
