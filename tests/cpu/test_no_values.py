"""Passes of a whole step where tensors have no values: nothing in them depends on one.

What needs a value, because it is read or because a size follows from it, no graph can hold.
"""

import json
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from moefold.cli.main import main
from moefold.layers.config import Full, Offload, OffloadToPages, Selective
from moefold.layers.flow import Flow
from moefold.moe.dispatch.config import Clones, Padded, Spread
from moefold.moe.layer import MoeFfn
from moefold.moe.rows import DispatchedRows
from moefold.parallel.config import Layout
from moefold.proof.capture import CaptureBlockers, find_capture_blockers
from moefold.proof.case import ProofCase, micro_batch_count
from moefold.proof.subjects import SUBJECTS

PADDED, SPREAD, CLONES = Padded(max_rows=64), Spread(max_rows=150), Clones(slots=2)
AGAIN = Selective(modules=("norms", "experts", "attention", "permute", "gather"))


def found(model: str, ranks: int, given: dict[str, Any]) -> CaptureBlockers:
    """Return what no graph can hold of a step in bf16."""
    layout = Layout(**given)
    subject = replace(
        SUBJECTS[model], precision="bf16", micro_batches=micro_batch_count(layout, ranks)
    )
    return find_capture_blockers(ProofCase("", subject, layout, ranks))


PAGES = Offload(pages=OffloadToPages(page=8, load=4, spill=1))


FEW: tuple[tuple[str, int, dict[str, Any]], ...] = (
    (
        "top-1",
        4,
        {
            "sizes": "tp2 ep4",
            "dispatch": SPREAD,
            "clones": CLONES,
            "recompute": AGAIN,
            "offload": PAGES,
        },
    ),
)
MORE: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("gqa", 1, {}),
    ("mla", 1, {"recompute": Full()}),
    ("gqa", 1, {"recompute": AGAIN}),
    *(
        (model, ranks, {"sizes": sizes, "zero": zero, **way})
        for zero, (model, sizes, ranks) in enumerate(
            (
                ("gqa", "ep4", 4),
                ("mla", "tp2 ep2", 4),
                ("mla", "ep2 etp2", 8),
                ("gqa", "cp2 ep4", 8),
            )
        )
        for way in (
            {"dispatch": PADDED, "recompute": AGAIN},
            {"dispatch": SPREAD, "recompute": Full()},
            {"dispatch": SPREAD, "clones": CLONES},
            {"dispatch": PADDED, "clones": CLONES, "recompute": Full()},
            {"dispatch": PADDED, "offload": PAGES},
        )
    ),
    *(
        ("deep", 4, {"sizes": sizes, "schedule": schedule, "zero": zero, **way})
        for sizes, schedule, zero in (
            ("pp2 ep2", "1f1b", 1),
            ("pp2 ep2", "zb_h1", 2),
            ("pp2 ep2", "merged", 3),
            ("pp2 vpp2 ep2", "interleaved", 0),
            ("pp2 vpp2 ep2", "zb_v", 1),
            ("pp2 vpp2 ep2", "dualpipe_v", 2),
        )
        for way in (
            {"dispatch": PADDED, "offload": PAGES},
            {"dispatch": SPREAD, "clones": CLONES, "recompute": AGAIN},
        )
    ),
)


@pytest.mark.parametrize(("model", "ranks", "given"), FEW)
def test_passes_run_without_values(model: str, ranks: int, given: dict[str, Any]) -> None:
    """Fixed room, clones, and what is made again: whatever is routed, shapes are the same."""
    assert found(model, ranks, given) == ({}, "")


@pytest.mark.matrix
@pytest.mark.parametrize(("model", "ranks", "given"), MORE)
def test_passes_of_any_layout_run_without_values(
    model: str, ranks: int, given: dict[str, Any]
) -> None:
    assert found(model, ranks, given) == ({}, "")


def _reading(x: Tensor) -> None:
    chosen = x[:, 0] > 0
    x.sum().item()
    x[0].tolist()
    x.nonzero()
    x.add(x[chosen].sum())
    x.repeat_interleave(chosen.long(), 0)
    bool(x.sum() > 3)
    x[:, 0].unique()


OPERATORS = ("_local_scalar_dense", "_local_scalar_dense", "nonzero", "nonzero")
OPERATORS += ("repeat_interleave.Tensor", "_local_scalar_dense", "_unique2")


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_each_read_is_named_with_its_line(backward: bool) -> None:
    """And all of them, not the first alone: in a forward, and where autograd runs a backward."""
    run = MoeFfn.run_experts

    class Reading(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            _reading(grad)
            return grad

    def reading(layer: MoeFfn, rows: DispatchedRows, flow: Flow) -> Any:
        if not backward:
            _reading(rows.x_TD)
        return run(layer, rows._replace(residual_TD=Reading.apply(rows.residual_TD)), flow)

    with mock.patch.object(MoeFfn, "run_experts", reading):
        reads, ended = found("top-1", 1, {})
    first = _reading.__code__.co_firstlineno + 2
    where = [int(read.at.removeprefix(f"{__file__}:")) - first for read in reads]
    assert [read.operator for read in reads] == list(OPERATORS) and not ended
    assert where == list(range(len(OPERATORS)))


def test_explain_lists_what_no_graph_can_hold(capsys: pytest.CaptureFixture[str]) -> None:
    """The counts of an exact dispatch, after which its pass ends, and for which a step is no graph;
    and what graphs of parts hold."""
    words = ["explain", "tiny", "--graphs", "--json", "--layout", "ep2"]
    assert main(words) == 1
    said = json.loads(capsys.readouterr().out)["graphs"]
    (read,) = said["reads"]
    assert read["operator"] == "_local_scalar_dense" and read["times"] > 0
    assert read["at"].startswith("moefold/moe/dispatch/alltoall.py:")
    assert said["ended"].startswith("moefold/comm/") and len(said["refused"]) == 1
    assert list(said["static_bytes"]) == ["partial"] and min(said["static_bytes"]["partial"]) > 0
    assert main(["explain", "tiny", "--graphs", "train.precision=fp32"]) == 0
    assert "none: no operator reads a value on the host" in capsys.readouterr().out
