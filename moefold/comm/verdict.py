"""Diagnosis of a hang from all ranks' heartbeats: which are absent, and where they diverge."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class Waiting(NamedTuple):
    """An operation that a rank waits for."""

    channel: str
    number: int
    words: str
    ranks: Sequence[int]
    seconds: float


class Beat(NamedTuple):
    """A rank's periodic heartbeat."""

    turn: int
    """Counter that increases while the rank runs; otherwise it is stopped or gone."""
    begun: dict[str, int]
    """Number of operations begun, by channel."""
    waiting: tuple[Waiting, ...]
    last: str
    """Its last operation."""


Ring = Mapping[tuple[str, int], tuple[str, str]]
"""A rank's last operations: (channel, number) to (operation's name, its description)."""


def judge(beats: Mapping[int, Beat], silent: Collection[int], rings: Mapping[int, Ring]) -> str:
    """Return a report, for users, of why ranks wait.

    A rank is absent if it is silent, or if others wait in an operation that it has not begun while
    it is not waiting itself. A rank that waits for a waiting rank is not to blame, however long the
    chain.

    Args:
        beats: each rank's last heartbeat.
        silent: ranks whose heartbeat has stopped.
        rings: last operations of the ranks that could still write them.
    """
    waits = [(rank, wait) for rank, beat in sorted(beats.items()) for wait in beat.waiting]
    waiters = {rank for rank, _ in waits}
    blamed = {late for _, wait in waits for late in _late(wait, beats)} - waiters
    absent = tuple(sorted(blamed | set(silent)))
    lines = []
    for rank in absent:
        why = "is alive and in no operation, while others wait for it; see its stacks"
        if rank in silent:
            why = "sends no heartbeat: stopped, dead, or on an unreachable machine"
        last = beats[rank].last if rank in beats else ""
        lines.append(f"rank {rank} is absent: it {why}. Its last operation: {last or 'none'}")
    lines += _divergence(waits, absent, beats, rings)
    for rank, wait in waits:
        if rank not in absent:
            late = _names(_late(wait, beats)) or "no rank: all have begun it"
            lines.append(
                f"rank {rank} has waited {wait.seconds:.1f} s in {wait.words}; it waits for {late}"
            )
    return "\n".join(lines)


def _late(wait: Waiting, beats: Mapping[int, Beat]) -> list[int]:
    """Return the ranks of an operation that have not begun it."""
    return [
        rank
        for rank in wait.ranks
        if rank not in beats or beats[rank].begun.get(wait.channel, 0) < wait.number
    ]


def _divergence(
    waits: list[tuple[int, Waiting]],
    absent: tuple[int, ...],
    beats: Mapping[int, Beat],
    rings: Mapping[int, Ring],
) -> list[str]:
    """Describe the first operation in which ranks of one channel differ."""
    done: dict[tuple[str, int], list[tuple[int, str, str]]] = {}
    for rank, ring in sorted(rings.items()):
        for place, (op, words) in ring.items():
            done.setdefault(place, []).append((rank, op, words))
    mixed = {
        place: [(rank, words) for rank, _, words in found]
        for place, found in done.items()
        if len({op for _, op, _ in found} - {"send", "receive"}) > 1
    }
    if mixed:
        channel, number = min(mixed, key=lambda place: (place[1], place[0]))
        said = [f"rank {rank} calls {words}" for rank, words in mixed[channel, number]]
        return [f"first divergence: operation {number} of {channel}: " + "; ".join(said)]
    apart = [
        (rank, wait, late)
        for rank, wait in waits
        if rank not in absent and (late := _late(wait, beats))
    ]
    if not apart:
        return []
    to_absent = [found for found in apart if set(found[2]) <= set(absent)]
    rank, wait, late = max(to_absent or apart, key=lambda found: found[1].seconds)
    has = beats[late[0]].begun.get(wait.channel, 0) if late[0] in beats else 0
    line = f"first divergence: rank {rank} is in {wait.words}; {_names(late)} began {has} "
    lines = [f"{line}operations of {wait.channel}, not {wait.number}"]
    if not absent:
        lines.append("deadlock: the ranks wait for each other, as their operations differ in order")
    return lines


def _names(ranks: Collection[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") * bool(ranks) + ", ".join(map(str, ranks))
