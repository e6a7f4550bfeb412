"""What the planner says that a step sends is what real ranks record, to the byte."""

from collections.abc import Sequence

import pytest

from moefold.optim.config import Muon
from moefold.planner.memory_state import StateSharding
from moefold.planner.time_data import collective_counter, collective_reach
from tests.gloo.harness import run_ranks
from tests.gloo.sending import Sending, differences, send_all
from tests.traffic.calls import stage_of
from tests.traffic.data import data

FULL = {"recompute": {"kind": "full"}}
ALLGATHER, ONCE = {"dispatch": {"kind": "allgather"}}, {"dispatch": {"kind": "alltoall_once"}}
TWO_LEVEL = {"dispatch": {"kind": "two_level", "node": 2}}
PADDED = {"dispatch": {"kind": "padded", "max_rows": 64}}
SPREAD = {"dispatch": {"kind": "spread", "max_rows": 150}}
CLONES = SPREAD | {"clones": {"slots": 2}}
FP4 = {"kind": "nvfp4", "block": 4}
FP8, DELAYED = {"kind": "fp8_tensor"}, {"kind": "fp8_tensor", "scaling": "delayed", "history": 4}
CODES = {"kind": "fp8_block", "wire": "codes"}
GATHERED = {"context": {"kind": "all_gather"}}
HEADS = {"context": {"kind": "all_to_all"}}
MIXED = {"context": {"kind": "mixed", "heads": 2}}


def by(schedule: str) -> dict[str, dict[str, str]]:
    """Return the words for a schedule."""
    return {"schedule": {"kind": schedule}}


def again(*modules: str) -> dict[str, dict[str, object]]:
    """Return the words for what is computed again."""
    return {"recompute": {"kind": "selective", "modules": list(modules)}}


PAIRS = (
    Sending("", 2),
    Sending("tp2", 2, "across", precision="bf16"),
    Sending("tp2 ep2", 2, layout=FULL),
    Sending("tp2", 2, "capacity"),
    Sending("cp2", 2, "mla"),
    Sending("ep2", 2, layout={"zero": 3, **again("experts", "norms")}),
    Sending("tp2", 2, layout=again("gather", "norms")),
    Sending("pp2 vpp2", 2, "tied", 4, layout=by("zb_v")),
    Sending("tp2", 2, "across", precision="bf16", optimizer=Muon()),
    Sending("ep2", 2, "mla", layout={"zero": 3}, optimizer=Muon()),
    Sending("ep2", 2, precision="bf16", layout={"zero": 3}, quantise=CODES),
    Sending("cp2 ep2", 2, quantise=FP4),
    Sending("ep2", 2, micro_batches=3, layout={"zero": 3, **FULL}),
)
FOURS = (
    Sending("ep2 etp2", 4, layout=TWO_LEVEL | {"zero": 0}),
    Sending("ep4", 4, layout=ONCE | {"zero": 2, "zero_ranks": 2}),
    Sending("pp2 vpp2 ep2", 4, micro_batches=4, layout=by("merged")),
    Sending("pp2 vpp2", 4, "tied", 4, layout={"zero": 2, **by("interleaved")}),
    Sending("pp2", 4, "mla", 4, precision="bf16", layout={"zero": 3, **FULL}),
)
REST = (
    Sending("tp2", 2, "mla", precision="bf16"),
    Sending("tp2", 2, "mla", precision="bf16", layout=again("gather", "mla_up")),
    Sending("cp2", 2, layout=GATHERED),
    Sending("cp2", 2, layout=HEADS | FULL),
    Sending("ep2", 2, layout=ALLGATHER | FULL),
    Sending("pp2", 2, micro_batches=4, layout=by("gpipe")),
    Sending("pp2", 2, micro_batches=4, layout=by("zb_h1")),
    Sending("pp2 vpp2", 2, micro_batches=4, layout=by("interleaved")),
    Sending("cp4", 4, "mla", layout=MIXED | again("attention")),
    Sending("tp2 cp2", 4, "across", layout=again("norms", "attention", "ffn", "shared")),
    Sending("tp2 cp2", 4, "mla", precision="bf16", layout=GATHERED | again("attention", "mla_up")),
    Sending("cp4", 4),
    Sending("ep4", 4, layout=TWO_LEVEL),
    Sending("ep4", 4, layout=ALLGATHER),
    Sending("ep2 etp2", 4),
    Sending("ep2 etp2", 4, layout=ALLGATHER),
    Sending("ep2 etp2", 4, layout=PADDED | FULL),
    Sending("ep2 etp2", 4, layout=SPREAD),
    Sending("ep4", 4, layout=CLONES | {"zero": 3}),
    Sending("ep2 etp2", 4, layout=CLONES | FULL),
    Sending("tp2", 4, "tied", precision="bf16", layout={"zero": 3}),
    Sending("ep2", 4, "capacity", layout={"zero": 2, **again("experts", "norms", "attention")}),
    Sending("pp2 ep2", 4, "tied"),
    Sending("pp2 tp2 ep2", 4, "tied", 4, layout={"zero": 2, **FULL}),
    Sending("pp2 tp2 ep2", 4, micro_batches=4, layout=by("zb_h1") | FULL),
    Sending("pp2 vpp2", 4, micro_batches=4, layout=by("zb_v")),
    Sending("pp2 vpp2 ep2", 4, micro_batches=6, layout=by("dualpipe_v")),
    Sending("pp2 vpp2 ep2", 4, micro_batches=6, layout=by("dualpipe_v") | FULL),
    Sending("ep4 etp2 tp2", 8, layout=TWO_LEVEL | FULL),
    Sending("pp4 tp2", 8, "tied", 4),
    Sending("tp2 ep2", 4, "tied", precision="bf16", layout={"zero": 2}, optimizer=Muon()),
    Sending("ep2 etp2", 4, layout={"zero": 0}, optimizer=Muon()),
    Sending("pp2", 4, "mla", 4, optimizer=Muon()),
    Sending("", 4, "tied", layout={"zero_ranks": 2}, optimizer=Muon()),
    Sending("", 2, precision="bf16", quantise={"kind": "nvfp4", "keep_last": 1}),
    Sending("", 4, precision="bf16", layout={"zero": 3}, quantise={"kind": "fp8_tensor"}),
    Sending("tp2 ep2", 4, precision="bf16", quantise={"kind": "fp8_block", "block": 4}),
    Sending("ep2", 4, precision="bf16", layout={"zero": 2}, quantise={"kind": "mxfp8"}),
    Sending("ep2 etp2", 4, layout=ONCE | FULL, quantise=CODES),
    Sending("ep2 etp2", 4, layout=ALLGATHER, quantise=CODES),
    Sending("ep2 etp2", 4, layout=SPREAD, quantise=CODES),
    Sending("ep2 etp2", 4, layout=PADDED, quantise=CODES | {"rows": "rank"}),
    Sending("ep4", 4, precision="bf16", layout=TWO_LEVEL, quantise=CODES | {"kind": "mxfp8"}),
    Sending("cp2 ep2", 2, quantise=FP8),
    Sending("tp2 ep2", 2, layout=FULL, quantise=FP4),
    Sending("tp2 ep2", 2, "mla", quantise=FP4),
    Sending("ep2 etp2", 4, quantise=FP8),
    Sending("ep2 etp2", 4, layout={"zero": 0}, quantise=FP4),
    Sending("cp2 ep2 etp2", 4, layout={"zero": 3}, quantise=FP4 | {"rows": "rank"}),
    Sending("tp2 cp2 ep4", 4, layout=FULL, quantise=FP8),
    Sending("ep2 etp2", 4, precision="bf16", layout={"zero": 2}, quantise=FP4 | {"wgrad": "wide"}),
    Sending("", 2, layout={"zero": 1}, quantise=DELAYED),
    Sending("tp2 ep2 etp2", 4, layout={"zero": 3}, quantise=DELAYED),
    Sending("pp2 cp2", 4, micro_batches=4, quantise=DELAYED),
    *(Sending("pp2 ep2", 4, micro_batches=4, layout={"zero": zero}) for zero in range(4)),
    *(Sending("pp2 ep2", 4, "tied", 3, layout={"zero": zero, **FULL}) for zero in range(4)),
    Sending("pp2 vpp2", 4, micro_batches=4, layout={"zero": 3, **by("zb_v")}),
    Sending("ep4", 8, micro_batches=2, precision="bf16", layout={"zero": 3, "zero_ranks": 2}),
    Sending("ep2", 4, layout={"zero": 2, "zero_ranks": 2}),
)


def wrong(sendings: Sequence[Sending]) -> dict[str, object]:
    """Return by layout where planned and recorded operations differ, and actions that do."""
    ranks = sendings[0].ranks
    by_rank = run_ranks(send_all, ranks, sendings, time_out_s=60)
    found: dict[str, object] = {}
    for sending, seen in zip(sendings, zip(*by_rank, strict=True), strict=True):
        assert sum(sent for one in seen for _, sent in one.totals.values()), "something is sent"
        broken = differences(sending, seen)
        if broken:
            found[str(sending)] = broken
        if not all(one.follows_table for one in seen):
            found[f"{sending}, actions"] = [one.follows_table for one in seen]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sendings", [PAIRS, FOURS], ids=["2 ranks", "4 ranks"])
def test_a_step_sends_what_is_planned(sendings: Sequence[Sending]) -> None:
    assert not wrong(sendings)


@pytest.mark.matrix
@pytest.mark.parametrize("sending", REST, ids=str)
def test_a_step_of_any_layout_sends_what_is_planned(sending: Sending) -> None:
    assert not wrong([sending])


def priced(sending: Sending, rank: int) -> dict[tuple[str, str], tuple[int, int]]:
    """Return the operations and bytes over copies of weights that the time model prices."""
    case, found = sending.case, dict[tuple[str, str], tuple[int, int]]()
    stage = stage_of(case, rank)
    copies = collective_counter(case.decoder, StateSharding.of(case))
    for one, number in copies.collectives(case.contents.ranks[stage]).items():
        ranks = collective_reach(case, one).size
        if one.group not in ("dp_cp", "edp") or ranks == 1:
            continue
        times = number * (case.num_micro_batches if one.per_micro_batch(case.layout.zero) else 1)
        sent = round(one.bytes * (ranks - 1) / ranks * (2 if one.op == "all_reduce" else 1))
        calls, total = found.get((one.group, one.op), (0, 0))
        found[one.group, one.op] = calls + times, total + times * sent
    return found


@pytest.mark.parametrize("sending", [*PAIRS, *FOURS, *REST], ids=str)
def test_time_is_of_the_bytes_that_copies_of_weights_exchange(sending: Sending) -> None:
    """Of all ZeRO stages, in pipelines, with blocks that are made again, in codes."""
    for rank in range(sending.ranks):
        sent = dict[tuple[str, str], tuple[int, int]]()
        for call in data(sending.case, rank):
            key = call.group.split()[0], call.op
            if key[0] in ("dp_cp", "edp") and call.op != "all_reduce_max" and call.total:
                calls, total = sent.get(key, (0, 0))
                sent[key] = calls + call.count, total + round(call.total)
        assert priced(sending, rank) == sent


def test_what_is_not_sent_is_noticed() -> None:
    """One operation more, and one byte less, differ."""
    sending = Sending("tp2", 2)
    (first, second) = run_ranks(send_all, 2, [sending])
    assert not differences(sending, [first[0], second[0]])
    site = next(iter(first[0].totals))
    calls, sent = first[0].totals[site]
    for other in ((calls + 1, sent), (calls, sent - 1)):
        first[0].totals[site] = other
        assert list(differences(sending, [first[0], second[0]])) == [0]
