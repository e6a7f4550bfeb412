"""Published models on every device, and published layouts beside what the search finds."""

import json
import zlib
from dataclasses import replace

import pytest

from moefold.kernels.quantise.config import Fp8Block
from moefold.layers.config import Selective
from moefold.model.config import MultiToken
from moefold.planner.hardware import catalogue, parse_cluster
from moefold.planner.layouts import DEVICE, OptimizerOnHost, make_layout
from moefold.planner.memory import peak_within
from moefold.planner.page import plan_json
from moefold.planner.plan import PlannedLayout, _published_layouts, plan
from moefold.planner.published import published_entries, published_model
from moefold.planner.search import MEMORY_RESERVE, Search
from moefold.planner.search_space import SearchSpace, candidate_recipes, full_space
from moefold.planner.task import PublishedLayout, TrainingTask, published_layouts, task_from_model
from moefold.planner.time import estimate_time
from moefold.schedule.config import OneFOneB
from moefold.spec.decoder import with_multi_token
from tests.pure.test_planner_search import keepings

BLOCKS = frozenset(("block",))
LARGE = [name for name, one in catalogue().items() if one.links == "switch" and one.nominal_gb > 60]
"""Devices that every published model fits on."""
MATRIX = pytest.mark.matrix


EACH = [
    pytest.param(name, marks=MATRIX if turn % 3 else [])
    for turn, name in enumerate(published_entries())
]


@pytest.mark.parametrize("name", EACH)
def test_a_model_can_be_laid_out_on_every_device(name: str) -> None:
    """By a search among few policies, on one of the devices, in turns."""
    device = LARGE[[*published_entries()].index(name) % len(LARGE)]
    task = task_from_model(published_model(name), parse_cluster(f"{device.lower()}x512"), 4096)
    recipe = candidate_recipes(task.cluster.device, "bf16")[0]
    space = SearchSpace((recipe,), (OneFOneB(),), ("two_level",), (frozenset(), BLOCKS))
    found = Search(task).best(replace(space, states=(DEVICE, OptimizerOnHost())), 1)
    assert found, device
    assert found[0].seconds > 0 and found[0].peak_bytes < task.cluster.device.memory_bytes


def whole(share: int) -> list[tuple[str, str]]:
    """Return one pair of ``share``, by a hash of their names."""
    pairs = [(name, device) for name in published_entries() for device in LARGE]
    return [pair for pair in pairs if zlib.crc32(" on ".join(pair).encode()) % share == 0]


SAMPLE = [pytest.param(*pair, marks=[] if pair in whole(400) else MATRIX) for pair in whole(100)]


@pytest.mark.parametrize(("name", "device"), SAMPLE)
def test_a_model_and_a_cluster_and_a_batch_are_enough(name: str, device: str) -> None:
    found = plan(name, f"{device.lower()}x64", batch=256)
    assert found.best is not None and found.best.fits
    said = json.dumps(plan_json(found, 1e12), allow_nan=False)
    assert json.loads(said)["best"]["step_time_s"] == pytest.approx(found.best.step_time_s)


def test_the_sample_is_neither_empty_nor_all() -> None:
    assert 1 <= len(whole(400)) < len(whole(100)) <= 6


def fitting(task: TrainingTask, row: PublishedLayout) -> list[float]:
    """Return the times of a published layout, with all that could make it fit, where it does."""
    room, found = task.cluster.device.memory_bytes * (1 - MEMORY_RESERVE), []
    sizes = row.layout.split
    for keeping in keepings(full_space(task), sizes.pp):
        changed = make_layout(sizes, **keeping)
        fields = {name: getattr(changed, name) for name in changed.model_fields_set}
        case = task.case(row.layout.model_copy(update=fields), row.micro_batch, row.recipe)
        if peak_within(case, room) is not None:
            found.append(estimate_time(case).seconds)
    return found


ROWS = (
    pytest.param("DeepSeek-V3", "dsv3-prod-isca", "h800x1024", 15360, 0, marks=MATRIX),
    pytest.param("DeepSeek-V3", "mcore26-dsv3-h100-fp8blk", "h100x1024", 8192, 1, marks=MATRIX),
    ("Qwen3-30B-A3B", "", "", 0, 0),
)
"""Model, row (the first of the model unless named), cluster and batch (the row's own unless named),
multi-token layers that it was trained with."""


@pytest.mark.parametrize(("name", "row", "where", "batch", "extra"), ROWS)
def test_the_best_is_as_fast_as_the_published_layout(
    name: str, row: str, where: str, batch: int, extra: int
) -> None:
    """By the model's own estimate, in the same format, and with that layout shown beside it."""
    rows = published_layouts(name)
    one = next(found for found in rows if row in ("", found.id))
    where = where or f"{one.device.lower()}x{one.devices}"
    task = task_from_model(published_model(name), parse_cluster(where), batch or one.batch, one.seq)
    task = replace(task, decoder=with_multi_token(task.decoder, [MultiToken()] * extra))
    (best,) = Search(task).best(replace(full_space(task), recipes=(one.recipe,)), 1)
    times = fitting(task, one)
    own = task.case(one.layout, one.micro_batch, one.recipe)
    assert times or peak_within(own, task.cluster.device.memory_bytes) is None
    assert all(best.seconds <= seconds * (1 + 1e-9) for seconds in times)


def test_published_layouts_are_shown() -> None:
    task = task_from_model(published_model("DeepSeek-V3"), parse_cluster("h800x2048"), 15360)
    shown = [one for one in _published_layouts(task) if "arXiv 2505.09343" in one.source]
    assert shown and shown[0].layout == "pp16 vpp2 ep64" and shown[0].published_tflops == 385


def test_deepseek_v3_fits_as_published_with_its_activations_in_codes() -> None:
    """On 2,048 H800 of 80 GB, where it ran: norms, up-projections and what follows made again; or
    no feed-forward, whose pre-activations are kept in codes.

    Plant: products of weights that wait hold rows in 16 bits.
    """
    task = task_from_model(published_model("DeepSeek-V3"), parse_cluster("h800x2048"), 15360)
    task = replace(task, decoder=with_multi_token(task.decoder, ()))
    (one,) = (row for row in published_layouts("DeepSeek-V3") if row.id == "dsv3-prod-isca")
    assert one.layout.sizes == "pp16 vpp2 ep64" and one.recipe == "fp8_block"
    made = "norms", "mla_up", "attention", "experts", "shared", "ffn"
    asked = one.layout.model_copy(update={"recompute": Selective(modules=made)})
    narrow = task.case(asked, 1, "fp8_block")
    room = task.cluster.device.memory_bytes * (1 - MEMORY_RESERVE)
    assert PlannedLayout(narrow).unsupported == ()
    assert peak_within(narrow, room) is not None
    assert peak_within(task.case(asked, 1, "bf16"), 1.2 * room) is None
    fewer = one.layout.model_copy(update={"recompute": Selective(modules=made[:3])})
    coded = (
        task.decoder.model_copy(update={"quantise": Fp8Block(hidden=hidden)})
        for hidden in ("wide", "codes")
    )
    tasks = (replace(task, decoder=made) for made in coded)
    peaks = [peak_within(one.case(fewer, 1, "fp8_block"), room) for one in tasks]
    assert peaks[0] is None and peaks[1] is not None


@MATRIX
def test_published_layouts_are_shown_beside_the_best() -> None:
    found = plan("DeepSeek-V3", "h800x2048", batch=15360, top=1)
    assert any("arXiv 2505.09343" in one.source for one in found.published)
    assert found.best is not None
    (one,) = (row for row in published_layouts("DeepSeek-V3") if row.id == "dsv3-prod-isca")
    times = [layout.step_time_s for layout in found.published if layout.fits]
    times += fitting(found.task, one)
    assert all(found.best.step_time_s <= seconds * (1 + 1e-9) for seconds in times)
