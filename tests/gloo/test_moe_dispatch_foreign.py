"""Adapters call other packages' dispatchers as their sources have them; stand-ins act these out.

Signatures are those of the packages at named revisions. It shows that ids, weights, counts and
gradients go where they belong, not that GPUs run it.
"""

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from moefold.config import slot
from moefold.data.batch import assemble
from moefold.moe.dispatch.config import DeepEp, HybridEp, LocalExperts, NcclEp, ThirdParty
from moefold.moe.dispatch.third_party import check_rows
from moefold.parallel import limits
from moefold.parallel.config import Layout
from tests.gloo.dispatch_stubs import KNOWN, Call, stub
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

WAYS: dict[str, ThirdParty] = {
    "deep_ep": DeepEp(),
    "hybrid_ep": HybridEp(),
    "nccl_ep": NcclEp(max_rows=16),
}
CASES = {
    "deep_ep": ("even", "dropped", "idle"),
    "hybrid_ep": ("even", "few"),
    "nccl_ep": ("even", "few"),
}
Seen = dict[tuple[str, str], tuple[list[float], list[Call]]]


@contextmanager
def installed(record: ThirdParty, module: ModuleType) -> Iterator[None]:
    """While open, a module stands for an adapter's package, on CPUs."""
    names = record.module.split(".")
    outer = {".".join(names[:n]): ModuleType(names[n - 1]) for n in range(1, len(names))}
    with (
        mock.patch.dict(sys.modules, outer | {record.module: module}),
        mock.patch("moefold.moe.dispatch.third_party.DEVICE", "cpu"),
    ):
        yield


def narrow(rows: Routed) -> Routed:
    """Return rows as the back ends take them: bf16, with fp32 weights."""
    x_TD, cotangent_TD = rows.x_TD.bfloat16(), rows.cotangent_TD.bfloat16()
    return Routed(x_TD, rows.weights_TK.float(), rows.experts_TK, cotangent_TD)


def drawn(case: str, rank: int) -> Routed:
    """Return the rows of a rank; "few" are the first of an even case."""
    rows = narrow(routed("even" if case == "few" else case, rank))
    return Routed(**{n: t[:4] for n, t in vars(rows).items()}) if case == "few" else rows


def gaps(rank: int) -> Seen:
    """Return each adapter's errors against one rank, both in bf16, and its calls."""
    found: Seen = {}
    weights = tuple(w.bfloat16() for w in expert_weights())
    for (way, revision), facts in KNOWN.items():
        world, log, errors = open_world("ep2", 2), list[Call](), list[float]()
        with installed(WAYS[way], stub(facts, log)):
            for case in CASES[way]:
                parts = [drawn(case, r) for r in range(2)]
                whole = there_and_back(LocalExperts(), joined(parts), *weights)
                cuts = [part.x_TD.shape[0] for part in parts]
                rows = [t.split(cuts)[rank] for t in (whole.out_TD, whole.dx_TD)]
                dweights = whole.dweights_TK.split(cuts)[rank]
                dw_in, dw_out = here(world, whole.dw_in, whole.dw_out)
                want = type(whole)(rows[0], rows[1], dweights, dw_in, dw_out)
                for groups in (world, world.secondary):
                    ours = there_and_back(WAYS[way], parts[rank], *here(world, *weights), groups)
                    errors.append(gap(ours, want))
            world.forget_groups()
        found[way, revision] = errors, log
    return found


def test_adapters_give_what_one_rank_gives_by_calls_that_packages_take() -> None:
    """At each revision: by keyword alone, for order is what changes, and in the stated words."""
    for seen in run_ranks(gaps, 2):
        assert set(seen) == set(KNOWN)
        for (way, revision), (errors, log) in seen.items():
            # Two roundings to bf16 more or less, of values that add up to four copies.
            assert len(errors) == 2 * len(CASES[way]) and max(errors) <= 4 * 2**-8
            assert all(by_place == 0 for _, by_place, _ in log), log
            assert all(stated(WAYS[way], name, set(words)) for name, _, words in log), log
            assert {name for name, _, _ in log} == {name for name, _ in WAYS[way].required_calls}
            made = [name for name, _, _ in log if name in ("Buffer", "HybridEPBuffer")]
            begun = [name for name, _, _ in log if name in ("ep_bootstrap", "ep_finalize")]
            assert len(made) == (way != "nccl_ep"), "one buffer for whatever number of rows"
            assert begun == (["ep_bootstrap", "ep_finalize"] if way == "nccl_ep" else [])
            if way == "nccl_ep":
                takes = {a for a, _, _ in KNOWN[way, revision]["ep_bootstrap"]["takes"]}
                given = next(set(words) for name, _, words in log if name == "ep_bootstrap")
                assert ("num_topk" in given) == ("num_topk" in takes)


def stated(record: ThirdParty, name: str, words: set[str]) -> bool:
    """Say whether the record names the arguments of a call."""
    known = (
        set(given.replace("?", "").split())
        for called, given in record.required_calls
        if called == name
    )
    return any(words <= given for given in known)


def other(facts: Any, name: str, how: str) -> Any:
    """Return a revision of which one function has changed."""
    facts = copy.deepcopy(facts)
    takes = facts[name]["takes"]
    if how == "renamed":
        used = next(i for i, (argument, _, _) in enumerate(takes) if argument != "self")
        takes[used][0] += "_too"
    else:
        takes.append(["stream", "KEYWORD_ONLY", None])
    return facts


@pytest.mark.parametrize("how", ["renamed", "asking for more"])
@pytest.mark.parametrize(("way", "revision"), KNOWN)
def test_a_package_whose_functions_take_something_else_is_refused(
    way: str, revision: str, how: str
) -> None:
    """Function by function, with the versions that fit, before anything is sent."""
    facts = KNOWN[way, revision]
    with installed(WAYS[way], stub(facts, [])):
        slot.build(WAYS[way], E)
    for name in sorted(facts.keys() - {"ep_finalize"} if how == "renamed" else facts):
        changed = stub(other(facts, name, how), [])
        with (
            installed(WAYS[way], changed),
            pytest.raises(ValueError, match=f"its {name} takes other arguments") as error,
        ):
            slot.build(WAYS[way], E)
        assert WAYS[way].install in str(error.value)


@pytest.mark.parametrize("fault", [AssertionError("No libnccl.so found"), AssertionError()])
def test_a_package_that_breaks_while_it_is_imported_is_named(fault: Exception) -> None:
    with (
        mock.patch("moefold.moe.dispatch.third_party.import_module", side_effect=fault),
        pytest.raises(ValueError, match=r"No libnccl\.so|import fails with"),
    ):
        slot.build(DeepEp(), E)


def uneven(rank: int) -> list[str]:
    """Return what is said of ranks, and of micro-batches, with different numbers of rows."""
    world, said = open_world("ep2", 2), list[str]()
    parts: Any = SimpleNamespace(world=world, layout=Layout(sizes="ep2", dispatch=HybridEp()))

    def rows(*numbers: int) -> list[Any]:
        return [assemble(np.zeros(n), np.zeros(n), [n]) for n in numbers]

    limits.check_even_rows(parts, rows(8, 8))
    for batches in (rows(3 + 2 * rank), rows(3, 5)):
        with pytest.raises(ValueError, match="same number of rows") as error:
            limits.check_even_rows(parts, batches)
        said.append(str(error.value))
    return said


def test_different_numbers_of_rows_are_refused_before_anything_is_sent() -> None:
    first, second = run_ranks(uneven, 2)
    assert first == second and len(first) == 2


@pytest.mark.parametrize("way", WAYS)
def test_a_missing_package_is_named_with_how_to_get_it(way: str) -> None:
    with pytest.raises(ValueError, match=f"{way} needs") as error:
        slot.build(WAYS[way], E)
    assert WAYS[way].install in str(error.value)
    assert "alltoall_once" in str(error.value)


def test_a_package_of_another_version_is_named_too() -> None:
    with (
        mock.patch.dict(sys.modules, {"deep_ep": ModuleType("deep_ep")}),
        pytest.raises(ValueError, match="it has no HybridEPBuffer"),
    ):
        slot.build(HybridEp(), E)


def test_rows_of_a_cpu_are_refused() -> None:
    from_cpu = torch.zeros(1, 1, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="sends only bf16 rows on GPUs"):
        check_rows(DeepEp(), from_cpu)
