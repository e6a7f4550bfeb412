"""Diagnosis of a hang from all ranks' heartbeats: who is absent, and where calls diverge."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class WaitingCall(NamedTuple):
    """An operation that a rank waits for."""

    channel: str
    number: int
    description: str
    ranks: Sequence[int]
    seconds: float


class Heartbeat(NamedTuple):
    """A rank's periodic heartbeat."""

    number: int
    """Increases while the rank runs; unchanged if it is stopped or dead."""
    begun: dict[str, int]
    """Number of operations begun, by channel."""
    waiting: tuple[WaitingCall, ...]
    last: str
    """Description of its last operation."""


RecentCalls = Mapping[tuple[str, int], tuple[str, str]]
"""A rank's last operations: (channel, number) to (operation's name, description)."""


def diagnose(
    heartbeats: Mapping[int, Heartbeat],
    silent: Collection[int],
    recent_calls: Mapping[int, RecentCalls],
) -> str:
    """Return a report, for users, of why ranks wait.

    A rank is absent if it is silent, or if others wait in an operation that it has not begun while
    it is not waiting itself. A rank that waits for a waiting rank is not to blame, however long the
    chain.

    Args:
        heartbeats: each rank's last heartbeat.
        silent: ranks whose heartbeat has stopped.
        recent_calls: last operations of the ranks that could still write them.
    """
    waits = [(rank, wait) for rank, beat in sorted(heartbeats.items()) for wait in beat.waiting]
    waiters = {rank for rank, _ in waits}
    blamed = {late for _, wait in waits for late in _late_ranks(wait, heartbeats)} - waiters
    absent = tuple(sorted(blamed | set(silent)))
    lines = []
    for rank in absent:
        why = "is alive and in no operation, while others wait for it; see its stacks"
        if rank in silent:
            why = "sends no heartbeat: stopped, dead, or on an unreachable machine"
        last = heartbeats[rank].last if rank in heartbeats else ""
        lines.append(f"rank {rank} is absent: it {why}. Its last operation: {last or 'none'}")
    lines += _divergence(waits, absent, heartbeats, recent_calls)
    for rank, wait in waits:
        if rank not in absent:
            late = _rank_list(_late_ranks(wait, heartbeats)) or "no rank: all have begun it"
            line = f"rank {rank} has waited {wait.seconds:.1f} s in {wait.description}; it waits"
            lines.append(f"{line} for {late}")
    return "\n".join(lines)


def _late_ranks(wait: WaitingCall, heartbeats: Mapping[int, Heartbeat]) -> list[int]:
    """Return the ranks of an operation that have not begun it."""
    return [
        rank
        for rank in wait.ranks
        if rank not in heartbeats or heartbeats[rank].begun.get(wait.channel, 0) < wait.number
    ]


def _divergence(
    waits: list[tuple[int, WaitingCall]],
    absent: tuple[int, ...],
    heartbeats: Mapping[int, Heartbeat],
    recent_calls: Mapping[int, RecentCalls],
) -> list[str]:
    """Describe the first operation in which ranks of one channel differ."""
    done: dict[tuple[str, int], list[tuple[int, str, str]]] = {}
    for rank, calls in sorted(recent_calls.items()):
        for key, (op, description) in calls.items():
            done.setdefault(key, []).append((rank, op, description))
    mixed = {
        key: [f"rank {rank} calls {description}" for rank, _, description in found]
        for key, found in done.items()
        if len({op for _, op, _ in found} - {"send", "receive"}) > 1
    }
    if mixed:
        channel, number = min(mixed, key=lambda key: (key[1], key[0]))
        return [
            f"first divergence: operation {number} of {channel}: "
            + "; ".join(mixed[channel, number])
        ]
    behind = [
        (rank, wait, late)
        for rank, wait in waits
        if rank not in absent and (late := _late_ranks(wait, heartbeats))
    ]
    if not behind:
        return []
    on_absent = [entry for entry in behind if set(entry[2]) <= set(absent)]
    rank, wait, late = max(on_absent or behind, key=lambda entry: entry[1].seconds)
    has = heartbeats[late[0]].begun.get(wait.channel, 0) if late[0] in heartbeats else 0
    line = (
        f"first divergence: rank {rank} is in {wait.description}; {_rank_list(late)} began {has} "
    )
    lines = [f"{line}operations of {wait.channel}, not {wait.number}"]
    if not absent:
        lines.append("deadlock: the ranks wait for each other, as their operations differ in order")
    return lines


def _rank_list(ranks: Collection[int]) -> str:
    if not ranks:
        return ""
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {', '.join(map(str, ranks))}"
