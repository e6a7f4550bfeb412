"""A plan for any cluster: a run's own layout, the best layouts, bottlenecks and changes to make.

plan = moefold.plan("run.yaml", cluster="h100x256")
plan.given.fits, plan.best.layout, plan.best.step_time_s, plan.best.memory_gb, plan.best.binds
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any, cast

from moefold.config.base import to_dict, without_defaults
from moefold.config.errors import RunError, Violation, dotted
from moefold.layers.config import MAX_SIZE, Full
from moefold.mesh.pipeline import Stages
from moefold.model.config import Decoder
from moefold.parallel.config import Layout
from moefold.planner.case import Case, Recipe, require_load
from moefold.planner.goodput import Faults, Goodput, Price, RunCost, goodput, run_cost
from moefold.planner.hardware import (
    Cluster,
    nearest_recipe,
    parse_cluster,
    require_recipe,
    with_memory,
)
from moefold.planner.layouts import OptimizerOnHost, make_recompute, unsupported
from moefold.planner.memory import StageMemory, fullest_rank, stage_bytes
from moefold.planner.published import find_model, published_entries, published_model
from moefold.planner.search import Search
from moefold.planner.search_change import LayoutChange, suggest_changes
from moefold.planner.search_space import (
    SearchSpace,
    full_space,
    offloading_space,
    stated_recipe,
    trainable_space,
)
from moefold.planner.shortfall import Shortfall, find_shortfall, may_fit
from moefold.planner.task import (
    DEFAULT_LOAD,
    DEFAULT_SEQ,
    PublishedLayout,
    TrainingTask,
    published_layouts,
    task_from_model,
    task_from_run,
    untrained_kinds,
    with_loss,
)
from moefold.planner.time import StepTime, estimate_time
from moefold.run import Run, load_run, recipes
from moefold.spec.decoder import model_needs, with_multi_token
from moefold.spec.quantised import legal_rows_setting
from moefold.spec.reference import adapter_violation, stated_loss
from moefold.spec.tuning import has_adapters, tune

GB = 1e9
MAX_NUMBER = 1e18
"""Bound of every number that a plan is given."""
SEARCHING = "the search has not ended"
"""Why there is no layout in a plan that is not complete."""
OWN = "run"
"""Origin of a run's own layout."""
MEMORY_ERROR = 0.1
"""Largest relative error of planned memory in measured runs; see docs/plan.md."""


@dataclass(frozen=True)
class PlannedLayout:
    """One layout with its planned memory, step time and throughput."""

    case: Case = field(repr=False)
    source: str = ""
    """Origin: the run, the search, or a publication."""
    published_tflops: float | None = None
    """TFLOP/s per GPU that the publication measured on its own device and software."""

    @cached_property
    def time(self) -> StepTime:
        """Planned step time by parts."""
        return estimate_time(self.case)

    @cached_property
    def memory(self) -> StageMemory:
        """Peak memory of the fullest rank during a step."""
        return fullest_rank(self.case)

    @property
    def layout(self) -> str:
        """Sizes in the notation of run files."""
        return str(self.case.sizes)

    @property
    def recipe(self) -> Recipe:
        """Number format of matrix products."""
        return self.case.number_formats.recipe

    @property
    def state_step(self) -> str | None:
        """What updates offloaded state; None if nothing is offloaded, or in other software."""
        state = self.case.layout.state
        ours = state.is_offloaded and not isinstance(state, OptimizerOnHost)
        return state.step if ours else None

    @property
    def identity(self) -> tuple[Any, ...]:
        """What tells it from other layouts of its task, however it is stated."""
        case = self.case
        layout = case.layout
        is_local = case.dispatch == "local"
        update = {
            "sizes": case.sizes.text,
            "schedule": case.schedule,
            "recompute": None,
            "dispatch": None if is_local else layout.dispatch,
            "experts": "auto",
        }
        # A run's own layout without exchanges is listed though a search has found it too.
        own = is_local and self.source == OWN
        formats = (case.micro_batch, self.recipe, case.recompute, own)
        return layout.model_copy(update=update), *formats

    @property
    def policies(self) -> str:
        """What the layout does besides its sizes, in words."""
        case = self.case
        layout = case.layout
        state = layout.state
        (to_host, _), (to_disk, _) = case.offload.tiers
        modules = (case.recompute, to_host, to_disk)
        recomputed, offloaded, on_disk = ("+".join(sorted(names)) for names in modules)
        dispatch = case.fixed_dispatch
        applies = {
            f"micro-batch {case.micro_batch}, {self.recipe}, zero {layout.zero}": True,
            case.schedule.name: case.sizes.pp > 1 or case.schedule.overlaps_passes,
            case.dispatch: case.dispatch != "local",
            f"max_rows {dispatch.max_rows if dispatch else None}": dispatch is not None,
            f"clones {case.clones}": case.clones,
            f"graphs {layout.graphs}": layout.graphs != "none",
            f"recompute {recomputed}": recomputed,
            f"offload {offloaded}": offloaded,
            f"{on_disk} on disk": on_disk,
            f"optimizer on the {state.at}": state.is_offloaded,
            f"updated by the {self.state_step}": self.state_step,
        }
        return ", ".join(text for text, applicable in applies.items() if applicable)

    @property
    def step_time_s(self) -> float:
        """Seconds of a step."""
        return self.time.seconds

    @property
    def tflops_per_gpu(self) -> float:
        """Model TFLOP/s per device; causal attention counts half, recompute not at all."""
        return self.time.tflops_per_gpu

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all devices together."""
        return self.case.batch * self.case.seq / self.time.seconds

    @property
    def memory_gb(self) -> float:
        """Peak memory of the fullest device, in GB of 10^9 bytes."""
        return self.memory.total / GB

    @property
    def device_memory_gb(self) -> float:
        """Memory that a device can allocate, in GB of 10^9 bytes."""
        return self.case.cluster.device.memory_bytes / GB

    @property
    def margin_gb(self) -> float:
        """Free memory of the fullest device in GB; negative where the layout does not fit."""
        return self.device_memory_gb - self.memory_gb

    @property
    def fits(self) -> bool:
        """Whether every device has enough memory."""
        return self.margin_gb >= 0

    @property
    def sure(self) -> bool:
        """Whether ``fits`` would be the same with planned memory wrong by ``MEMORY_ERROR``."""
        return abs(self.margin_gb) >= MEMORY_ERROR * self.memory_gb

    @property
    def binds(self) -> str:
        """Bottleneck: memory where the layout does not fit, else the largest part of step time."""
        return self.time.bottleneck if self.fits else "memory"

    @property
    def unsupported(self) -> tuple[str, ...]:
        """Features of the layout that training cannot execute yet, or only with another package."""
        more = ()
        if self.case.decoder.quantise is not None and self.quantised_rows is None:
            more = (f"precision {self.recipe}",)
        return (*unsupported(self.case.layout), *untrained_kinds(self.case.decoder), *more)

    @property
    def quantised_rows(self) -> str | None:
        """Which rows share blocks of codes; None where training cannot run the recipe here."""
        return legal_rows_setting(self.case.decoder, self.case.sizes, self.case.seq)


@dataclass(frozen=True)
class Plan:
    """Result of planning a task on a cluster."""

    task: TrainingTask
    given: PlannedLayout | None
    """The run's own layout; None where there is none that is legal on the cluster."""
    given_problem: str
    """Why ``given`` is None; otherwise empty."""
    layouts: tuple[PlannedLayout, ...]
    """The fastest layouts that fit, one per folding; empty where nothing fits."""
    trainable: PlannedLayout | None
    """The fastest layout that training executes today and that the run's own rules allow."""
    trainable_problem: str
    """Why ``trainable`` is None; otherwise empty."""
    same_format: tuple[PlannedLayout, ...]
    """The fastest layout in the run's own number format, where ``layouts`` have another one."""
    published: tuple[PlannedLayout, ...]
    """Published layouts of this model, planned on this cluster."""
    faults: Faults
    price: Price
    run: Run | None = None
    """The planned run; None for a published model."""
    complete: bool = True
    """Whether all searches have ended; until then ``layouts`` and ``trainable`` may be missing."""

    @property
    def best(self) -> PlannedLayout | None:
        """The fastest layout that fits."""
        return self.layouts[0] if self.layouts else None

    @property
    def recommended(self) -> PlannedLayout | None:
        """The fastest layout that training executes; without one the fastest that fits."""
        return self.trainable or self.best

    @property
    def graphs(self) -> str:
        """CUDA graphs of the run's own layout, or of the task's software without one."""
        return self.given.case.layout.graphs if self.given else self.task.software.cuda_graphs

    @property
    def run_file(self) -> dict[str, Any] | None:
        """Run file data for the layout ``trainable``, to merge over the run's own file if any."""
        return None if self.trainable is None else self.fragment(self.trainable)

    def fragment(self, layout: PlannedLayout) -> dict[str, Any]:
        """Return run file data for a layout of the plan, to merge over the run's own file if any.

        Raises:
            ValueError: training cannot execute the layout, or the run's rules refuse it.
        """
        if self.run is None:
            return run_file_fragment(layout)
        fragment = _run_overrides(self.run, layout)
        searched = layout.source != OWN and layout is not self.trainable
        violation = next(_run_violations(self.run, layout), None) if searched else None
        if violation is not None:
            raise ValueError(f"breaks {dotted(violation.path)}: {violation.rule}")
        return fragment

    @property
    def expected_goodput(self) -> Goodput:
        """Expected failures and goodput of the cluster."""
        return goodput(self.task.cluster.devices, self.faults)

    def cost(self, layout: PlannedLayout, tokens: float) -> RunCost:
        """Return the cost of training on ``tokens`` tokens in a layout, failures included."""
        return run_cost(
            self.task, layout.tokens_per_s * self.expected_goodput.ettr, tokens, self.price
        )

    @cached_property
    def shortfall(self) -> Shortfall | None:
        """What is missing, and what would make it fit; None if a layout fits, or may yet."""
        if not self.complete:
            return None
        fits = self.recommended is not None or (self.given is not None and self.given.fits)
        return None if fits else find_shortfall(self.task)

    @cached_property
    def changes(self) -> tuple[LayoutChange, ...]:
        """Suggested changes to the given layout, else to the recommended one, best first."""
        shown = self.given or self.recommended
        return suggest_changes(self.task, shown.case) if shown else ()


def plan(
    run: Run | str | Path,
    cluster: str | Cluster,
    *,
    batch: int | None = None,
    seq: int | None = None,
    precision: str | None = None,
    load: float = DEFAULT_LOAD,
    memory_gb: float | None = None,
    faults: Faults | None = None,
    price: Price | None = None,
    top: int = 3,
    overrides: Sequence[str] = (),
) -> Plan:
    """Plan memory, time and layout of a run, or of a published model, on a cluster.

    Args:
        run: a run, a run file, a recipe's name, a Hugging Face folder, or a published model.
        cluster: device and number, such as ``h100x256``.
        batch: sequences per step over all devices; default is the run's.
        seq: tokens per sequence of a published model; default 4,096.
        precision: number format of a published model's products, such as ``mxfp8`` or ``fp8``;
            default is the fastest.
        load: rows of the fullest expert rank over the mean.
        memory_gb: memory of each device in GB; default is its nominal memory.
        faults: rate and cost of device failures.
        price: price of a device-hour.
        top: number of layouts to return.
        overrides: ``path=value`` overrides of a run file; of a published model ``adapter=``,
            ``train.freeze=`` and ``train.loss=``, whose teacher may be a published model too.

    Raises:
        ValueError: the run, model or device does not exist, a published model has no batch, or a
            number is not legal.
    """
    require_positive(top=top)
    prepared = prepare(
        run,
        cluster,
        batch=batch,
        seq=seq,
        precision=precision,
        load=load,
        memory_gb=memory_gb,
        faults=faults,
        price=price,
        overrides=overrides,
    )
    *_, complete = search_steps(prepared, top)
    return complete


def prepare(
    run: Run | str | Path,
    cluster: str | Cluster,
    *,
    batch: int | None = None,
    seq: int | None = None,
    precision: str | None = None,
    load: float = DEFAULT_LOAD,
    memory_gb: float | None = None,
    faults: Faults | None = None,
    price: Price | None = None,
    overrides: Sequence[str] = (),
) -> Plan:
    """Return a plan before any search: its task, the run's own layout and published ones.

    Arguments and errors are those of :func:`plan`.
    """
    require_positive(load=load, memory_gb=memory_gb)
    require_load(load)
    require_positive(MAX_SIZE, batch=batch, seq=seq)
    if isinstance(cluster, str):
        cluster = parse_cluster(cluster)
    if memory_gb is not None:
        cluster = replace(cluster, device=with_memory(cluster.device, round(memory_gb * GB)))
    task, layout, loaded = _resolve_task(run, cluster, batch, seq, load, overrides, precision)
    require_recipe(cluster.device, task.number_formats.recipe)
    given, given_problem = _given_layout(task, layout)
    return Plan(
        task=task,
        given=given,
        given_problem=given_problem,
        layouts=(),
        trainable=None,
        trainable_problem=SEARCHING,
        same_format=(),
        published=tuple(_published_layouts(task)),
        faults=faults or Faults(),
        price=price or Price(),
        run=loaded,
        complete=False,
    )


def search_steps(prepared: Plan, top: int = 3) -> Iterator[Plan]:
    """Yield a prepared plan after each search: with the fastest layout that training executes, and
    complete.

    Args:
        prepared: what :func:`prepare` returned.
        top: number of layouts to return.
    """
    task = prepared.task
    search = Search(task)
    trainable, trainable_problem = _trainable_layout(search, prepared.run)
    found = replace(prepared, trainable=trainable, trainable_problem=trainable_problem)
    yield found
    recipe = task.number_formats.recipe
    layouts: tuple[PlannedLayout, ...] = ()
    same_format: tuple[PlannedLayout, ...] = ()
    space = full_space(task)
    if may_fit(search, space):
        layouts = _search_layouts(search, space, top)
        if {found.recipe for found in layouts} != {recipe}:
            same_format = _search_layouts(search, replace(space, recipes=(recipe,)))
    # Only the layouts of training try state and activations on the host in every form.
    if trainable is not None:
        fastest = layouts[0].step_time_s if layouts else inf
        layouts = (trainable, *layouts)[:top] if trainable.step_time_s < fastest else layouts
    yield replace(found, layouts=layouts, same_format=same_format, complete=True)


def require_positive(most: float = MAX_NUMBER, **numbers: float | None) -> None:
    """Check that all numbers other than None are finite, positive and at most ``most``.

    Raises:
        ValueError: a number is not; the message has its name.
    """
    for name, value in numbers.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} {value:g}: must be a finite number above 0")
        if value is not None and value > most:
            raise ValueError(f"{name} {value:g}: must be at most {most:g}")


def is_run(source: str) -> bool:
    """Return whether a name is that of a run file, a recipe or a folder, not of a model alone."""
    return Path(source).exists() or source in recipes()


def _resolve_task(
    run: Run | str | Path,
    cluster: Cluster,
    batch: int | None,
    seq: int | None,
    load: float,
    overrides: Sequence[str],
    precision: str | None = None,
) -> tuple[TrainingTask, Layout | None, Run | None]:
    """Return task, own layout and run of a run, or the task of a published model and None, None."""
    if isinstance(run, Run) and overrides:
        raise ValueError(f"override {overrides[0]} needs a run file or a recipe, not a loaded run")
    if isinstance(run, Run) or is_run(str(run)):
        if seq is not None:
            raise ValueError(f"seq {seq} is for published models; in a run override data.seq={seq}")
        if precision is not None:
            raise ValueError(
                f"precision {precision} is for published models; in a run override "
                "train.precision= or train.quantise="
            )
        loaded = run if isinstance(run, Run) else load_run(run, overrides)
        task, layout = task_from_run(loaded, cluster, batch, load)
        # A recipe's steps are an example, not a length that somebody has asked about.
        stated = any(text.startswith("train.steps=") for text in overrides)
        if str(run) in recipes() and not stated:
            task = replace(task, tokens=None)
        return task, layout, loaded
    name = find_model(str(run))
    if name is None:
        similar = get_close_matches(str(run), [*published_entries(), *recipes()], 3, 0.4)
        raise ValueError(
            f"{run} is not a run file, recipe ({', '.join(recipes())}), Hugging Face folder or "
            "published model" + (f"; similar names: {', '.join(similar)}" if similar else "")
        )
    if batch is None:
        raise ValueError(f"{name} is a published model: it needs --batch (sequences per step)")
    recipe = None if precision is None else stated_recipe(precision, cluster.device)
    task = task_from_model(published_model(name), cluster, batch, seq or DEFAULT_SEQ, load, recipe)
    loss, others = stated_loss(overrides, task.decoder.vocab, _published_decoder)
    if loss is not None:
        task = with_loss(task, loss)
    tuned = tune(task.decoder, others)
    if loss is not None and loss.needs_adapter and not has_adapters(tuned):
        raise RunError([adapter_violation()], source="override")
    return replace(task, decoder=tuned), None, None


def _published_decoder(name: str) -> Decoder | None:
    """Return a published model's description; None if no model has that name."""
    known = find_model(name)
    return published_model(known).decoder if known else None


def _given_layout(task: TrainingTask, layout: Layout | None) -> tuple[PlannedLayout | None, str]:
    """Return the run's own layout, or None and why it cannot be planned."""
    if layout is None:
        return None, "a published model has no layout of its own"
    try:
        case = task.case(layout)
        if violations := list(layout.world_violations(task.cluster.devices)):
            raise RunError(violations, source="layout")
        return PlannedLayout(case, OWN), ""
    except ValueError as error:
        return None, str(error)


def _trainable_layout(search: Search, run: Run | None) -> tuple[PlannedLayout | None, str]:
    """Return the fastest layout that training executes and that the run's rules allow, or None and
    why there is none.
    """
    task = search.task
    refused = ""
    if problem := _untrained_problem(task):
        return None, problem
    # What is moved to the host takes time in each step: only where nothing else fits.
    for space in (trainable_space(task), offloading_space(task)):
        for found in search.iter_fitting(space) if may_fit(search, space) else ():
            layout = PlannedLayout(found.case, "search")
            if layout.unsupported:
                continue
            violation = None if run is None else next(_run_violations(run, layout), None)
            if violation is None:
                return layout, ""
            broken = f"{dotted(violation.path)}: {violation.rule}"
            refused = refused or f"{layout.layout}, breaks {broken}"
        if refused:
            said = "the run's own rules refuse every layout that fits; the fastest, "
            return None, said + refused
    return None, _nothing_fits(task)


def _untrained_problem(task: TrainingTask) -> str:
    """Return why training does not support a task's model; empty if it does."""
    kinds = ", ".join(task.untrained_kinds)
    return kinds and f"training does not support the model's {kinds}"


def _nothing_fits(task: TrainingTask) -> str:
    return f"no layout that training supports fits in {task.number_formats.recipe}"


def _run_violations(run: Run, layout: PlannedLayout) -> Iterator[Violation]:
    """Yield the rules of a run that it breaks in a layout."""
    fragment = _run_overrides(run, layout)
    rows = {"rows": layout.quantised_rows}
    train: dict[str, Any] = {name: fragment["train"][name] for name in ("batch", "micro_batch")}
    if run.train.quantise is not None:
        train["quantise"] = run.train.quantise.model_copy(update=rows)
    update = {
        "layout": Layout.model_validate(to_dict(run.layout) | fragment["layout"]),
        "train": run.train.model_copy(update=train),
    }
    return run.model_copy(update=update).rules()


def _run_overrides(run: Run, layout: PlannedLayout) -> dict[str, Any]:
    """Return a layout's fragment for merging over a run: what only the run sets is reset."""
    fragment = run_file_fragment(layout)
    defaults = to_dict(Layout())
    fields = fragment["layout"]
    for name, own in to_dict(run.layout).items():
        planned = fields.get(name)
        if planned is None and name != "experts" and own != defaults[name]:
            fields[name] = defaults[name]
        elif isinstance(planned, dict) and isinstance(own, dict) and "kind" in planned:
            same_kind = own if own.get("kind") == planned["kind"] else {}
            fields[name] = dict.fromkeys(same_kind) | planned
    return fragment


def _search_layouts(search: Search, space: SearchSpace, top: int = 1) -> tuple[PlannedLayout, ...]:
    """Return the fastest layouts of a space that fit."""
    found = search.best(space, top)
    return tuple(PlannedLayout(layout.case, "search") for layout in found)


def _published_layouts(task: TrainingTask) -> list[PlannedLayout]:
    """Return published layouts of the model that are legal on the cluster, its device's first."""
    name = find_model(task.name)
    cluster = task.cluster
    rows = [row for row in published_layouts(name) if row.seq == task.seq] if name else []

    def distance(row: PublishedLayout) -> tuple[bool, float]:
        ratio = row.devices / cluster.devices
        return row.device != cluster.device.name, max(ratio, 1 / ratio)

    layouts = []
    main_task = replace(task, decoder=with_multi_token(task.decoder, ()))
    for row in sorted(rows, key=distance):
        layout = row.layout
        further = layout.stages is not None and "m" in layout.stages
        if layout.stages is not None and further and not task.multi_token:
            stages = Stages.parse(layout.stages)
            letters = tuple(stage.replace("m", "") for stage in stages.letters)
            layout = layout.model_copy(update={"stages": Stages(letters).text})
            further = False
        recipe = cast("Recipe", nearest_recipe(cluster.device, row.recipe))
        try:
            case = (task if further else main_task).case(layout, row.micro_batch, recipe)
        except ValueError:
            continue
        source = f"{row.source} ({row.device} x {row.devices})"
        layouts.append(PlannedLayout(case, source, row.tflops_per_gpu))
    return layouts[:3]


def graph_bytes(run: Run, world: int) -> list[float]:
    """Return bytes of static inputs and outputs of CUDA graphs per pipeline rank on ``world`` GPUs.

    Raises:
        ValueError: the planner does not know a record of the run.
    """
    task, layout = task_from_run(run, parse_cluster(f"h100x{world}"))
    case = task.case(layout)
    return [stage_bytes(case, rank).state.graphs for rank in range(case.sizes.pp)]


def run_file_fragment(layout: PlannedLayout) -> dict[str, Any]:
    """Return run file data for a layout: ``layout`` and some fields of ``train``.

    Raises:
        ValueError: training cannot execute the layout, so that no run file can state it.
    """
    if layout.unsupported:
        raise ValueError(f"training does not support {', '.join(layout.unsupported)}")
    case = layout.case
    record = case.decoder.quantise
    train: dict[str, Any] = {"batch": case.batch, "micro_batch": case.micro_batch}
    train["precision"] = layout.recipe if record is None else "bf16"
    if record is not None:
        train["quantise"] = to_dict(record) | {"rows": layout.quantised_rows}
    return {"train": train, "layout": _layout_fields(case)}


def _layout_fields(case: Case) -> dict[str, Any]:
    """Return the fields of a case's layout that a run file states: those that are no default, and
    what a search always decides; without recompute of what the model does not save.
    """
    layout = case.layout
    always = ["sizes", "zero"]
    update = dict[str, Any]()
    if case.sizes.pp > 1 or case.schedule.overlaps_passes:
        always.append("schedule")
        update["schedule"] = case.schedule
    if case.dispatch != "local":
        always.append("dispatch")
    if not isinstance(layout.recompute, Full):
        saved = model_needs(case.decoder).recomputable(case.sizes.tp)
        if not case.recompute <= saved:
            update["recompute"] = make_recompute(case.recompute & saved)
    return without_defaults(layout.model_copy(update=update), always)
