"""Layouts that the planner makes: as run files state them, and of other software."""

from dataclasses import replace
from typing import Any, cast

import pytest

from moefold.config.base import to_dict
from moefold.layers.config import Full, Offload, OffloadToHost, Selective
from moefold.mesh.config import Sizes
from moefold.mesh.pipeline import Stages
from moefold.parallel.config import Layout
from moefold.planner.hardware import parse_cluster
from moefold.planner.layouts import (
    OptimizerOnHost,
    OtherDispatch,
    OtherRecompute,
    make_dispatch,
    make_layout,
    make_recompute,
    unsupported,
)
from moefold.planner.plan import PlannedLayout, run_file_fragment
from moefold.schedule.config import Interleaved, Merged, OneFOneB
from tests.pure.test_planner_search import small


def fields_of(layout: Layout) -> dict[str, Any]:
    """Return what a run file states of a layout."""
    task = replace(small(), cluster=parse_cluster("h100x8"))
    return run_file_fragment(PlannedLayout(task.case(layout)))["layout"]


def test_a_made_layout_is_the_one_that_its_run_file_states() -> None:
    made = make_layout(
        Sizes(tp=2, pp=2, vpp=2, ep=4),
        schedule=Interleaved(),
        stages=Stages.parse("Et|t|t|tL"),
        dispatch=make_dispatch("two_level", 2),
        zero=1,
        recompute=frozenset(("norms", "gather")),
        offload=frozenset(("experts",)),
    )
    fields = {
        "sizes": "tp2 pp2 vpp2 ep4",
        "stages": "Et|(t|)*2tL",
        "schedule": {"kind": "interleaved"},
        "zero": 1,
        "dispatch": {"kind": "two_level", "node": 2},
        "recompute": {"kind": "selective", "modules": ["gather", "norms"]},
        "offload": {"host": {"modules": ["experts"]}},
    }
    assert fields_of(made) == fields and Layout.model_validate(fields) == made
    assert fields_of(Layout.model_validate(to_dict(made))) == fields, "with all that is default too"
    assert not [*unsupported(made)]


def test_what_has_no_effect_is_not_stated() -> None:
    """A schedule without a pipeline, unless it overlaps passes, and a dispatcher of one rank."""
    dispatch = make_dispatch("alltoall")
    alone = make_layout(Sizes(tp=2), schedule=OneFOneB(), dispatch=dispatch)
    assert fields_of(alone) == {"sizes": "tp2", "zero": 1}
    merged = make_layout(Sizes(ep=2), schedule=Merged(), dispatch=dispatch)
    assert fields_of(merged)["schedule"] == {"kind": "merged"}
    assert fields_of(merged)["dispatch"] == {"kind": "alltoall"}
    useless = make_layout(Sizes(), recompute=frozenset(("norms", "gather", "shared")))
    assert fields_of(useless)["recompute"] == {"kind": "selective", "modules": ["norms"]}


def test_records_of_other_software_are_checked_and_named() -> None:
    modules: Any = frozenset(("norms", "moe_act"))
    record = make_recompute(modules)
    assert isinstance(record, OtherRecompute) and record.recomputed == modules
    assert make_recompute(frozenset(("norms", "gather"))) == Selective(modules=("gather", "norms"))
    assert make_recompute(frozenset(("block",))) == Full() and make_recompute(frozenset()) is None
    with pytest.raises(ValueError, match="mlp"):
        make_recompute(cast(Any, frozenset(("mlp",))))
    with pytest.raises(ValueError, match="share"):
        OptimizerOnHost(share=-1.0)
    assert isinstance(make_dispatch("padded"), OtherDispatch), "its room is not published"
    away: Any = frozenset(("moe_act",))
    theirs = make_layout(
        Sizes(ep=2),
        dispatch=make_dispatch("deep_ep"),
        recompute=modules,
        offload=away,
        state=OptimizerOnHost(share=0.5),
    )
    assert [*unsupported(theirs)] == [
        "dispatch deep_ep", "recompute moe_act", "offload moe_act", "optimizer on the host"
    ]  # fmt: skip


def test_offloaded_kinds_by_place_with_their_share_of_layers() -> None:
    record = Offload(host=OffloadToHost(modules=("experts", "norms"), share=0.5))
    assert record.tiers == ((frozenset(("experts", "norms")), 0.5), (frozenset(), 1.0))
    assert record.moves_layers
    paged = Layout.model_validate({"offload": {"pages": {"page": 8}}}).offload
    assert paged is not None and not paged.moves_layers
