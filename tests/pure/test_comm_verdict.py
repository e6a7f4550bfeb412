"""The verdict on ranks that wait: whoever waits is not to blame, and the first parting is named."""

import re

from moefold.comm.verdict import Heartbeat, WaitingCall, diagnose


def absent(text: str) -> list[int]:
    return [int(rank) for rank in re.findall(r"^rank (\d+) is absent", text, re.MULTILINE)]


def beat(begun: dict[str, int], *waiting: WaitingCall, last: str = "#1 all_reduce") -> Heartbeat:
    return Heartbeat(1, begun, waiting, last)


def wait(channel: str, number: int, ranks: tuple[int, ...], seconds: float = 5.0) -> WaitingCall:
    return WaitingCall(
        channel, number, f"#{number} of {channel} in layers.{number}", ranks, seconds
    )


def test_blame_passes_along_the_stages_to_the_silent_one() -> None:
    beats = {
        0: beat({"world@0": 3}, wait("world@0", 3, (0, 1, 2), 9.0)),
        1: beat({"world@0": 2, "pp:1>2": 4}, wait("pp:1>2", 4, (1, 2))),
        2: beat({"world@0": 2, "pp:1>2": 3}, last="#3 receive"),
    }
    found = diagnose(beats, [2], {})
    assert absent(found) == [2]
    lines = found.splitlines()
    assert lines[0].startswith("rank 2 is absent: it sends no heartbeat")
    assert lines[0].endswith("Its last operation: #3 receive")
    said = "rank 1 is in #4 of pp:1>2 in layers.4; rank 2 began 3 operations of pp:1>2, not 4"
    assert lines[1] == f"first divergence: {said}"
    assert "rank 0 has waited 9.0 s" in lines[2] and lines[2].endswith("waits for ranks 1, 2")


def test_a_rank_that_lives_and_waits_for_nothing_is_absent() -> None:
    beats = {0: beat({"tp@0": 2}, wait("tp@0", 2, (0, 1))), 1: beat({"tp@0": 1})}
    found = diagnose(beats, [], {})
    assert absent(found) == [1] and "alive and in no operation" in found


def test_a_rank_that_never_spoke_is_absent() -> None:
    found = diagnose({0: beat({"tp@0": 1}, wait("tp@0", 1, (0, 1)))}, [1], {})
    assert absent(found) == [1]
    assert "Its last operation: none" in found and "rank 1 began 0 operations of tp@0" in found


def test_a_circle_is_said_to_be_one() -> None:
    beats = {
        0: beat({"tp@0": 2, "dp@0": 1}, wait("tp@0", 2, (0, 1))),
        1: beat({"tp@0": 1, "dp@0": 2}, wait("dp@0", 2, (0, 1), 7.0)),
    }
    found = diagnose(beats, [], {})
    assert absent(found) == []
    assert "first divergence: rank 1 is in #2 of dp@0" in found
    assert "deadlock" in found


def test_the_first_operation_that_differs_is_named_with_both_modules() -> None:
    ring = {("tp@0", 1): ("all_gather", "#1"), ("pp:0>1", 1): ("send", "#1 send")}
    rings = {
        0: {**ring, ("tp@0", 2): ("all_gather", "all_gather in layers.1"), ("tp@0", 3): ("x", "")},
        1: {
            **ring,
            ("pp:0>1", 1): ("receive", "#1 receive"),
            ("tp@0", 2): ("all_reduce", "all_reduce in layers.2"),
            ("tp@0", 3): ("y", ""),
        },
    }
    waits = wait("tp@0", 2, (0, 1))
    found = diagnose({rank: beat({"tp@0": 2}, waits) for rank in rings}, [], rings)
    assert found.splitlines()[0] == (
        "first divergence: operation 2 of tp@0: rank 0 calls all_gather in layers.1; "
        "rank 1 calls all_reduce in layers.2"
    )
    assert "it waits for no rank: all have begun it" in found


def test_nobody_waits() -> None:
    assert diagnose({0: beat({}), 1: beat({})}, [], {}) == ""
