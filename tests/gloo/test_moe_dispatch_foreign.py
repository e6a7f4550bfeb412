"""Adapters call other packages' dispatchers as these are documented; a gloo stand-in acts them out.

It shows that ids, weights, counts and gradients go where they belong, not that GPUs run it.
"""

import sys
from types import ModuleType
from unittest import mock

import pytest
import torch

from moefold.config import slot
from moefold.moe.config import DeepEp, Foreign, HybridEp, Local, NcclEp
from moefold.moe.dispatch.foreign import check_rows
from tests.gloo import dispatch_fakes
from tests.gloo.dispatching import (
    E,
    Routed,
    expert_weights,
    gap,
    here,
    joined,
    open_world,
    routed,
    there_and_back,
)
from tests.gloo.harness import run_ranks

WAYS: dict[str, Foreign] = {
    "deep_ep": DeepEp(),
    "hybrid_ep": HybridEp(),
    "nccl_ep": NcclEp(max_rows=16),
}
CASES = {"deep_ep": ("even", "dropped", "idle"), "hybrid_ep": ("even",), "nccl_ep": ("even",)}


def narrow(rows: Routed) -> Routed:
    """Return rows as the back ends take them: bf16, with fp32 weights."""
    x_TD, cotangent_TD = rows.x_TD.bfloat16(), rows.cotangent_TD.bfloat16()
    return Routed(x_TD, rows.weights_TK.float(), rows.experts_TK, cotangent_TD)


def gaps(rank: int) -> dict[tuple[str, str], float]:
    """Return the error of each adapter against one rank, both in bf16."""
    modules = dict.fromkeys(("deep_ep", "transformer_engine.pytorch.ep"), dispatch_fakes)
    modules |= {n: ModuleType(n) for n in ("transformer_engine", "transformer_engine.pytorch")}  # type: ignore[dict-item]
    world, found = open_world("ep2", 2), {}
    weights = tuple(w.bfloat16() for w in expert_weights())
    with (
        mock.patch.dict(sys.modules, modules),
        mock.patch("moefold.moe.dispatch.foreign.DEVICE", "cpu"),
    ):
        for way, record in WAYS.items():
            for case in CASES[way]:
                parts = [narrow(routed(case, r)) for r in range(2)]
                whole = there_and_back(Local(), joined(parts), *weights)
                cuts = [part.x_TD.shape[0] for part in parts]
                rows = [t.split(cuts)[rank] for t in (whole.out_TD, whole.dx_TD)]
                dweights = whole.dweights_TK.split(cuts)[rank]
                dw_in, dw_out = here(world, whole.dw_in, whole.dw_out)
                want = type(whole)(rows[0], rows[1], dweights, dw_in, dw_out)
                ours = there_and_back(record, parts[rank], *here(world, *weights), world)
                found[way, case] = gap(ours, want)
    return found


def test_adapters_give_what_one_rank_gives() -> None:
    for found in run_ranks(gaps, 2):
        assert len(found) == 5
        # Two roundings to bf16 more or less, of values that add up to four copies.
        assert all(error <= 4 * 2**-8 for error in found.values()), found


def uneven(rank: int) -> str:
    """Return what is said of ranks with different numbers of rows."""
    world = open_world("ep2", 2)
    with (
        mock.patch.dict(sys.modules, {"deep_ep": dispatch_fakes}),
        mock.patch("moefold.moe.dispatch.foreign.DEVICE", "cpu"),
        pytest.raises(ValueError, match="as many rows") as error,
    ):
        weights = here(world, *(w.bfloat16() for w in expert_weights()))
        there_and_back(HybridEp(), narrow(routed("dropped", rank)), *weights, world)
    return str(error.value)


def test_b40_different_numbers_of_rows_are_refused_before_anything_is_sent() -> None:
    first, second = run_ranks(uneven, 2)
    assert first == second and "[3, 5]" in first


@pytest.mark.parametrize("way", WAYS)
def test_a_missing_package_is_named_with_how_to_get_it(way: str) -> None:
    with pytest.raises(ValueError, match=f"{way} needs") as error:
        slot.build(WAYS[way], E)
    assert WAYS[way].remedy in str(error.value)
    assert "alltoall_once" in str(error.value)


def test_a_package_of_another_version_is_named_too() -> None:
    with (
        mock.patch.dict(sys.modules, {"deep_ep": ModuleType("deep_ep")}),
        pytest.raises(ValueError, match="it has no HybridEPBuffer"),
    ):
        slot.build(HybridEp(), E)


def test_rows_of_a_cpu_are_refused() -> None:
    from_cpu = torch.zeros(1, 1, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="sends bf16 rows of GPUs"):
        check_rows(DeepEp(), from_cpu)
