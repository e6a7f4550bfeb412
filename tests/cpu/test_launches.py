"""A step's launches, bytes and waits on an accelerator: what counts, and budgets that only fall."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from budget import SHAPES, STORED, budgets
from launches import Launches, Place
from no_values import META, apart


def counted(run: Callable[..., object], *given: torch.Tensor) -> Launches:
    with Launches() as launches:
        result = run(*given)
    launches.keep([result])
    return launches


def test_a_chain_costs_each_call_and_at_least_its_ends() -> None:
    x = torch.empty(8, 4, device=META)
    launches = counted(lambda x: (x * 2).t().contiguous().sum(0, keepdim=True), x)
    assert [call.name for call in launches.calls] == ["mul", "clone", "sum"]
    sizes = [(sum(c.reads.values()), sum(c.writes.values())) for c in launches.calls]
    assert sizes == [(128, 128), (128, 128), (128, 32)]
    assert launches.least() == {Place(None, None, "step", False): 128 + 32}


def test_bytes_are_of_what_is_stored_and_touched() -> None:
    table, ids = torch.empty(1000, 4, device=META), torch.empty(8, dtype=torch.int64, device=META)
    (call,) = counted(lambda t, i: t.index_select(0, i), table, ids).calls
    assert (sum(call.reads.values()), sum(call.writes.values())) == (128 + 64, 128)
    (call,) = counted(lambda t, i: t.index_add_(0, i, t[:8]), table, ids).calls
    assert (sum(call.reads.values()), sum(call.writes.values())) == (128 + 64 + 128, 128)
    (call,) = counted(lambda x: x[:1].expand(8, 4) + 1, table).calls
    assert (sum(call.reads.values()), sum(call.writes.values())) == (16, 128)
    (call,) = counted(lambda x: x.zero_(), table).calls
    assert (sum(call.reads.values()), sum(call.writes.values())) == (0, 16000)
    (call,) = counted(lambda x: x.add_(1), table).calls
    assert (sum(call.reads.values()), sum(call.writes.values())) == (16000, 16000)


def test_reads_and_blocking_copies_are_waits() -> None:
    waits = Counter[str]()
    launches, host = Launches(), torch.ones(2)
    with apart(waits=waits), launches:
        host.to(META, non_blocking=True)
        assert not launches.waits
        host.to(META)
        torch.empty(2, device=META).copy_(host)
        torch.tensor(1.0, device=META)
        torch.full((), 1.0, device=META)
        assert (launches.waits.total(), waits.total()) == (2, 1)
        torch.empty(2, device=META).tolist()
    assert waits.total() == 2
    with pytest.raises(RuntimeError):
        bool(torch.empty((), device=META))


@pytest.fixture(scope="module")
def now() -> dict[str, Any]:
    return budgets()


@pytest.mark.parametrize("shape", SHAPES)
def test_no_budget_is_exceeded(shape: str, now: dict[str, Any]) -> None:
    """``python bench/budget.py --store`` writes budgets that fell; one that rises is a choice."""
    stored, found = json.loads(STORED.read_text())[shape], now[shape]
    for where, parts in found.items():
        allowed = stored[where]
        if where == "waits":
            for kind, sites in parts.items():
                assert sum(sites.values()) <= sum(allowed[kind].values()), (kind, sites)
            continue
        for column, what in enumerate(("launches", "bytes")):
            most = sum(spent[column] for spent in allowed.values())
            total = sum(spent[column] for spent in parts.values())
            worse = {p: s for p, s in parts.items() if s[column] > allowed.get(p, (0, 0))[column]}
            assert total <= most, f"{where}: {total} {what}, not {most}: {worse}"
