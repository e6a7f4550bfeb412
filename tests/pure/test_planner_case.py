"""Cases: what they refuse, and what follows from them by the tables that training executes."""

import subprocess
import sys
from typing import Any

import pytest

from moefold.layers.config import Full, Selective
from moefold.model.config import MultiToken
from moefold.parallel.config import Layout
from moefold.planner.case import Case
from moefold.planner.hardware import parse_cluster
from moefold.run import load_run
from moefold.schedule.config import (
    Interleaved,
    OneFOneB,
)
from moefold.spec.decoder import with_multi_token
from moefold.spec.layer import recomputed_modules
from tests.planning import laid
from tests.schedule_checker import peak_in_flight

DECODER = with_multi_token(load_run("deepseek_v3").decoder, [MultiToken()])
SCHEDULE = Interleaved()
PUBLISHED = laid(
    sizes="pp4 vpp4 ep64", stages="Et*4|(tttt|)*14tmL", schedule=SCHEDULE, dispatch="hybrid_ep"
)


def restaged(stages: str) -> Layout:
    return PUBLISHED.model_copy(update={"stages": stages})


def case(**changes: Any) -> Case:
    known: dict[str, Any] = {
        "decoder": DECODER,
        "seq": 4096,
        "batch": 8192,
        "micro_batch": 1,
        "cluster": parse_cluster("gb300x256"),
        "layout": PUBLISHED,
        "load": 1.0,
    }
    return Case(**known | changes)


def test_what_follows_from_a_published_layout() -> None:
    one = case()
    assert (one.world, one.folding.dp, one.folding.edp) == (256, 64, 1)
    assert (one.num_micro_batches, one.rows, one.multi_token) == (128, 4096, 1)
    assert peak_in_flight(one.table) == (19, 17, 15, 13)
    assert [len(stage) for stage in one.contents.parts[0]] == [5, 4, 4, 4]
    assert [place.kind for place in one.contents.parts[3][3]] == ["layer", "multi_token", "loss"]
    assert one.table is case().table, "a schedule's table is made once"


def test_rows_are_split_over_tp_and_cp() -> None:
    layout = PUBLISHED.model_copy(update={"sizes": "tp2 cp4 pp4 vpp4 ep32"})
    assert case(layout=layout, micro_batch=2).rows == 2 * 4096 // 8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layout": restaged("Et*61L")}, "pp . vpp is 16"),
        ({"layout": restaged("E|(tttt|)*14tmL")}, "hold 57 layers, but the model has 61"),
        ({"batch": 8191}, "a multiple of dp . micro_batch = 64"),
        ({"load": 0.5}, "must be at least 1"),
        ({"cluster": parse_cluster("h100x100")}, "a multiple of"),
    ],
)
def test_what_no_run_could_have_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        case(**changes)


def test_recompute_records_of_a_run_file_have_their_modules() -> None:
    assert recomputed_modules(None) == frozenset()
    assert recomputed_modules(Full()) == {"block"}
    assert recomputed_modules(Selective(modules=("norms", "mla_up"))) == {"norms", "mla_up"}
    with pytest.raises(ValueError, match="OneFOneB cannot be planned"):
        recomputed_modules(OneFOneB())


def test_the_planner_imports_no_torch() -> None:
    names = "case hardware count memory memory_saved memory_state time"
    lines = [f"import moefold.planner.{name}" for name in names.split()]
    lines.append("import sys; assert 'torch' not in sys.modules")
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, timeout=60)
