"""What a run file says is what is planned, and what a plan prints as one was planned as printed."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import yaml

from moefold.config.base import Record
from moefold.config.check import check
from moefold.mesh.legality import size_violations
from moefold.model.config import Decoder
from moefold.moe.dispatch.config import DISPATCH
from moefold.parallel.config import Layout as RunLayout
from moefold.planner.case import Case
from moefold.planner.hardware import parse_cluster
from moefold.planner.memory import fullest_rank
from moefold.planner.network import ring_seconds, strided_reach
from moefold.planner.plan import Plan, PlannedLayout, plan, run_file_fragment
from moefold.planner.task import (
    NCCL_EP_NOTE,
    UNMEASURED_NOTE,
    task_from_run,
)
from moefold.planner.time import estimate_time
from moefold.planner.time_work import build_setting
from moefold.run import Run, load_run, require_fit
from moefold.spec.decoder import model_needs, model_weights
from moefold.spec.reference import reference_of
from moefold.spec.tuning import without_tuning
from moefold.training.losses.config import Distill, Dpo
from tests.planning import relaid
from tests.traffic.step import traffic

MATRIX = pytest.mark.matrix
PUBLISHED = (
    pytest.param("DeepSeek-V3", "h800x512", 4096, None, marks=MATRIX),
    pytest.param("Moonlight-16B-A3B", "h100x16", 64, None, marks=MATRIX),
    ("olmoe_1b_7b", "h100x4", 64, 48.0),
    ("Qwen3-30B-A3B", "gb200x8", 128, None),
)
"""Models, clusters, sequences per step, and memory of a device if not as sold."""


@cache
def planned(name: str, where: str, batch: int, memory_gb: float | None = None) -> Plan:
    """Return a plan of one layout, searched once."""
    return plan(name, where, batch=batch, memory_gb=memory_gb, top=1)


def as_printed(found: Plan) -> PlannedLayout:
    """Return the layout of the fragment that a plan prints, read as a run file and planned again.

    It is refused where training would refuse it.
    """
    assert found.trainable is not None
    said = yaml.safe_load(yaml.safe_dump(run_file_fragment(found.trainable)))
    task, train = found.task, said["train"]
    layout = check(RunLayout, said["layout"]).record
    assert layout is not None and train["batch"] == task.batch
    model, world = model_needs(task.decoder, task.seq), task.cluster.devices
    assert not size_violations(layout.split, model, world, layout.order, layout.stages)
    assert not [*layout.violations(model), *layout.world_violations(world)]
    assert not list(layout.step_violations(task.batch // train["micro_batch"]))
    return PlannedLayout(task.case(layout, train["micro_batch"], train["precision"]))


def same(one: PlannedLayout, other: PlannedLayout) -> None:
    assert one.memory_gb == pytest.approx(other.memory_gb, rel=1e-9)
    assert one.step_time_s == pytest.approx(other.step_time_s, rel=1e-9)
    assert one.fits and other.fits


@pytest.mark.parametrize(("name", "where", "batch", "memory_gb"), PUBLISHED)
def test_what_is_printed_is_what_was_planned(
    name: str, where: str, batch: int, memory_gb: float | None
) -> None:
    found = planned(name, where, batch, memory_gb)
    assert found.trainable is not None and not found.trainable.unsupported
    same(as_printed(found), found.trainable)


@pytest.mark.parametrize(("name", "where"), [("olmoe_1b_7b", "h100x4"), ("tiny", "a100x4")])
def test_the_run_file_is_planned_alike(name: str, where: str, tmp_path) -> None:
    """Through the whole reading of a run file, on as many ranks as the plan has devices."""
    found = plan(name, where, batch=64, top=1)
    assert found.trainable is not None
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"base": name, **run_file_fragment(found.trainable)}))
    run = load_run(path)
    require_fit(run, found.task.cluster.devices)
    task, layout = task_from_run(run, found.task.cluster)
    same(PlannedLayout(task.case(layout)), found.trainable)


def test_a_run_file_takes_back_what_its_base_has(tmp_path) -> None:
    """A file that names a base is merged with it: what the plan leaves out would stay."""
    own = {
        "sizes": "pp2 vpp2", "schedule": {"kind": "merged", "group": 3}, "zero_ranks": 1,
        "recompute": {"kind": "full"}, "context": {"kind": "all_gather"}, "experts": "loop",
    }  # fmt: skip
    base, path = tmp_path / "base.yaml", tmp_path / "run.yaml"
    shape = {"model": {"shape": {"layers": 4}}, "train": {"batch": 12}}
    base.write_text(yaml.safe_dump({"base": "tiny", **shape, "layout": own}))
    found = plan(base, "h100x2", top=1)
    assert found.trainable is not None and found.run_file is not None
    path.write_text(yaml.safe_dump({"base": str(base), **found.run_file}))
    run = load_run(path)
    require_fit(run, 2)
    assert run.layout.recompute is None and run.layout.experts == "loop"
    task, layout = task_from_run(run, found.task.cluster)
    same(PlannedLayout(task.case(layout)), found.trainable)


def groups_of_moments(*overrides: str) -> Run:
    """A run whose moments share scales: no axis cuts their groups."""
    shape = "{hidden: 1024, layers: 2, heads: 8, kv_heads: 8, head_dim: 128, experts: 8, top_k: 2,"
    shape += " expert_width: 3072}"
    return load_run(
        "tiny",
        [f"model.shape={shape}", "data.seq=4096", "train.batch=8", "train.micro_batch=1",
         "optim.moments=fp8", "optim.moment_group=3072", *overrides],
    )  # fmt: skip


def test_what_a_run_s_own_rules_refuse_is_not_for_today() -> None:
    run = groups_of_moments()
    found = plan(run, "h100x8", top=1)
    assert found.trainable is not None and not list(run.rules()) and not found.trainable_problem
    said = run_file_fragment(found.trainable)
    layout = RunLayout.model_validate(said["layout"])
    update = {"layout": layout, "train": run.train.model_copy(update=said["train"])}
    assert not list(run.model_copy(update=update).rules())


def test_rules_that_refuse_every_layout_are_said() -> None:
    """One odd sequence for four ranks: tp cuts its groups of moments."""
    found = plan(groups_of_moments("data.seq=1023"), "h100x4", batch=1, top=1)
    assert found.trainable is None and found.best is not None
    said = "rules refuse every layout that fits; the fastest, tp2 pp2 ep2, breaks layout.sizes: tp"
    assert said in found.trainable_problem, found.trainable_problem


def test_a_given_layout_that_its_schedule_cannot_run_is_said() -> None:
    """Three micro-batches on two ranks of two chunks; all else is planned."""
    own = ["model.shape.layers=4", "layout.sizes=pp2 vpp2", "train.micro_batch=2"]
    found = plan(load_run("tiny", own), "h100x2", batch=6, top=1)
    assert found.given is None and "groups of 2" in found.given_problem
    assert found.trainable is not None


def test_what_training_cannot_execute_is_never_printed() -> None:
    found = planned("Qwen3-30B-A3B", "gb200x8", 128)
    assert found.best is not None and found.best.unsupported
    with pytest.raises(ValueError, match="training does not support"):
        run_file_fragment(found.best)


@pytest.mark.parametrize(
    ("sizes", "rows"), [("tp2 ep2", "micro_batch"), ("tp2", "rank"), ("tp4 ep4", None)]
)
def test_a_recipe_of_few_bits_is_starred_only_where_a_layout_cuts_its_blocks(
    sizes: str, rows: str | None
) -> None:
    """And is written with the rows that go together there. Plant: all of them are starred."""
    wide = ("model.shape={hidden: 256, layers: 2, heads: 4, kv_heads: 2, head_dim: 128, experts: 8,"
            " top_k: 2, expert_width: 256}", "data.seq=512", "train.batch=32")  # fmt: skip
    run = load_run("tiny", [*wide, "layout.sizes=tp2 ep2"])
    task, own = task_from_run(run, parse_cluster("h100x4"))
    own = own.model_copy(update={"sizes": sizes})
    layout = PlannedLayout(task.case(own, recipe="fp8_block"))
    assert layout.unsupported == (() if rows else ("precision fp8_block",))
    if rows:
        said = run_file_fragment(layout)["train"]
        assert said["precision"] == "bf16"
        given = yaml.safe_dump(said["quantise"], default_flow_style=True).strip()
        again = load_run("tiny", [*wide, f"layout.sizes={sizes}", f"train.quantise={given}"])
        record = again.train.quantise
        assert (record.kind, record.rows) == ("fp8_block", rows)  # type: ignore[union-attr]
        planned = task_from_run(again, parse_cluster("h100x4"))[0]
        assert planned.number_formats.recipe == layout.recipe


def test_layers_of_other_stacks_have_no_run_file() -> None:
    found = plan("GPT-OSS-20B", "h100x8", batch=64, top=1)
    assert found.trainable is None and found.best is not None
    assert "experts with biases" in found.best.unsupported
    assert "does not support the model's experts with biases" in found.trainable_problem


# ----------------------------------------------------------------------------- of a run file


def case(*overrides: str, devices: int = 4) -> Case:
    """Return the step of a recipe with changes."""
    run = load_run("olmoe_1b_7b", ["train.batch=32", *overrides])
    task, layout = task_from_run(run, parse_cluster(f"h100x{devices}"))
    return task.case(layout)


FIELDS = {
    "two_level": {"node": 2},
    "padded": {"max_rows": 20000},
    "spread": {"max_rows": 80000},
    "nccl_ep": {"max_rows": 9000},
}


@pytest.mark.parametrize("kind", sorted(set(DISPATCH.kinds) - {"local"}))
def test_every_dispatcher_is_planned(kind: str) -> None:
    """Also those of other packages, which send no more than a copy for each choice."""
    said: dict[str, Any] = {"kind": kind, **FIELDS.get(kind, {})}
    one = case('layout.sizes="ep4"', f"layout.dispatch={said}".replace("'", '"'))
    assert one.dispatch == kind
    assert estimate_time(one).parts["dispatch"] > 0 and fullest_rank(one).total > 0
    sent = sum(call.total for call in traffic(one, 0) if call.part in ("dispatch", "combine"))
    plain = case('layout.sizes="ep4"')
    most = sum(call.total for call in traffic(plain, 0) if call.part in ("dispatch", "combine"))
    assert sent > 0 and (sent <= most * 1.3 or kind in ("allgather", "padded", "spread"))


def test_room_for_all_rows_is_planned() -> None:
    """NCCL EP receives into room for the rows of all ranks, whatever comes."""
    hybrid, nccl = (
        fullest_rank(case('layout.sizes="ep4"', f"layout.dispatch={kind}"))
        for kind in ('{"kind": "hybrid_ep"}', '{"kind": "nccl_ep", "max_rows": 9000}')
    )
    assert nccl.peak_action.activations > 2 * hybrid.peak_action.activations
    run = load_run("olmoe_1b_7b", ['layout.dispatch={"kind": "nccl_ep", "max_rows": 9000}'])
    assert NCCL_EP_NOTE in task_from_run(run, parse_cluster("h100x4"))[0].assumptions


def test_each_kind_of_context_parallelism_has_its_price() -> None:
    kinds = ("ring", "all_gather", "all_to_all", '{"kind": "mixed", "heads": 2}')
    ring, gathered, heads, mixed = (
        case('layout.sizes="cp4"', f"layout.context={kind}") for kind in kinds
    )
    shown = [estimate_time(one).parts["cp"] for one in (ring, gathered, heads, mixed)]
    assert len({round(seconds, 9) for seconds in shown}) == 4
    # By hand: all keys and values come before attention, and their gradients go back after it.
    setting = build_setting(ring.cluster, ring.software, "bf16", frozenset())
    attention = ring.decoder.blocks[0].attention
    keys = ring.micro_batch * ring.seq / 4 * 2 * attention.kv_heads * attention.head_dim * 2
    nic = setting.rates.nic_context
    once = ring_seconds(4 * keys, strided_reach(ring.cluster, 4, 1), ring.cluster, nic)
    assert shown[1] == pytest.approx(2 * once * len(ring.decoder.blocks) * ring.num_micro_batches)
    # Gathered keys of four ranks stay; exchanged heads stay beside the rows they come from.
    kept = [fullest_rank(one).total for one in (ring, gathered, heads, mixed)]
    assert kept[1] > kept[2] == pytest.approx(kept[3]) and kept[2] > kept[0]


def test_a_context_that_does_not_fit_is_refused() -> None:
    one = case('layout.sizes="cp4"', "layout.context=all_to_all")
    with pytest.raises(ValueError, match="context: "):
        relaid(one, sizes="tp16 cp2", cluster=parse_cluster("h100x32"))


def test_the_chunk_of_the_loss_is_planned() -> None:
    few, usual, all_ = (case(f"train.loss_chunk={rows}") for rows in (64, 1024, 4096))
    vocab = {"vocab": 4 * usual.decoder.vocab}
    large = [replace(one, decoder=one.decoder.model_copy(update=vocab)) for one in (usual, all_)]
    forward = [fullest_rank(one).actions[0].temporaries for one in large]
    columns = large[0].decoder.vocab
    assert forward[1] == 4096 * columns * 2 > 1.5 * forward[0], "their gradient takes their place"
    took = [estimate_time(one).parts["head"] for one in (few, usual, all_)]
    assert took[0] > took[1] > took[2], "small products are slower"


def test_what_a_loss_needs_besides_the_model_is_planned() -> None:
    """A reference takes a forward, a teacher also its weights and rows, stored results room."""
    run = load_run("tiny", ["adapter={kind: lora, rank: 4}"])
    task, layout = task_from_run(run, parse_cluster("h100x1"))

    def planned(loss: Record, teacher: Decoder | None = None) -> tuple[float, float]:
        one = replace(task, reference=reference_of(loss, teacher)).case(layout)
        parts = estimate_time(one).parts
        return parts.get("reference", 0.0), fullest_rank(one).state.reference

    passes = estimate_time(task.case(layout))
    assert planned(run.train.loss) == (0.0, 0.0)
    took, size = planned(Dpo())
    again, _ = planned(Dpo(reference="stored"))
    micro_batches = task.case(layout).num_micro_batches
    # Two products of an adapter's own are left out, and logits are computed once more.
    assert took - again == pytest.approx(micro_batches * passes.ranks[0][0], rel=0.2)
    assert 0 < again < took and size == 0
    plain = without_tuning(task.decoder)
    taught, size = planned(Distill(teacher="folder"), plain)
    rows = task.case(layout).rows * micro_batches
    kept = sum(w.elements * (2 if w.reads_compute_dtype else 4) for w in model_weights(plain))
    assert taught == pytest.approx(took - again, rel=0.01)
    assert size == pytest.approx(kept + rows * plain.hidden * 2, rel=0.001)
    stored = Distill(teacher="folder", stored="said", top_k=8)
    assert planned(stored) == (0.0, rows * 17 * 4)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.loss=dpo"], "needs adapter="),
        (["train.loss={kind: dpoo}"], "dpo"),
        (["train.loss={kind: distill, teacher: DeepSeek-V3}"], "vocabulary of 50,304"),
        (["train.los=dpo"], "nearest: train.loss="),
    ],
)
def test_losses_of_published_models_are_refused_with_the_nearest(
    overrides: list[str], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        plan("OLMoE-1B-7B", "h100x8", batch=64, overrides=overrides)


def test_a_plan_says_that_no_gpu_has_measured_it() -> None:
    task, _ = task_from_run(load_run("tiny"), parse_cluster("h100x4"))
    assert UNMEASURED_NOTE in task.assumptions and UNMEASURED_NOTE not in task.notes


def test_a_search_counts_a_reference_in_its_bounds() -> None:
    """With virtual stages a reference waits for all stages, so that other layouts are fastest."""
    given: Any = {"batch": 16, "top": 1}
    adapter = "adapter={kind: lora, rank: 16}"
    plain = plan("OLMoE-1B-7B", "a6000x8", overrides=[adapter], **given)
    found = plan("OLMoE-1B-7B", "a6000x8", overrides=[adapter, "train.loss=dpo"], **given)
    assert plain.best is not None and found.best is not None
    case = replace(plain.best.case, reference=found.task.reference)
    assert found.best.step_time_s <= estimate_time(case).seconds
