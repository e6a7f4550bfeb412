"""Point-to-point messages between pipeline stages: derived from the table, sent without blocking.

Between two ranks each direction is an ordered channel: outputs and gradients have the same shape,
and NCCL has no tags, so a message is identified by its position alone. The receiver therefore posts
receives in the order in which the *sender* sends, which both derive from the table; a result that
arrives early is held until its step. Receives are posted a step ahead, sends are waited for late,
and neither blocks the host, so no order of steps that the table allows can deadlock. On NCCL each
pair of ranks has a communicator per direction (``Group.back``), so that neither waits for the
other, as long as communicators are created lazily (no ``device_id`` where ranks join).

T rows on this rank, D hidden.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice

from torch import Tensor

from moefold.comm.collectives import Pending, receive, send
from moefold.comm.group import Group
from moefold.parallel.config import Layout
from moefold.schedule.table import ActionResult, Line, Table, actions_of

AHEAD = 1
"""Number of steps between posting a receive and the step that needs it."""


@dataclass(frozen=True)
class RankPlan:
    """One pipeline rank's line of a training step, with its receives and sends."""

    table: Table
    rank: int
    posts: tuple[tuple[ActionResult, ...], ...]
    """Receives to post for each of the rank's steps, in the order in which they are sent."""
    given_at: dict[ActionResult, int]
    """For each result received from another rank: the step of that rank that produces it."""
    read_at: dict[ActionResult, int]
    """For each result sent to another rank: the step of that rank that reads it."""

    @property
    def line(self) -> Line:
        """The rank's steps."""
        return self.table.lines[self.rank]

    @property
    def splits(self) -> bool:
        """Whether this rank computes weight gradients in separate actions (``W``)."""
        return any(action.kind == "W" for action in self.table.actions(self.rank))


@lru_cache(maxsize=8)
def plan(layout: Layout, rank: int, micro_batches: int) -> RankPlan:
    """Return the plan of a pipeline rank for a step of ``micro_batches`` on this data rank."""
    table = layout.table(micro_batches)
    stages = [table.stage(rank, chunk) for chunk in range(table.chunks)]
    near = {stage + way for stage in stages for way in (-1, 1)} & set(range(table.stages))
    queues: dict[int, list[ActionResult]] = {table.home(stage): [] for stage in near}
    given_at: dict[ActionResult, int] = {}
    read_at: dict[ActionResult, int] = {}
    for peer in queues.keys() - {rank}:
        for at, step in enumerate(table.lines[peer]):
            sent = [r for r in table.step_gives(peer, step) if table.reader(r) == rank]
            queues[peer] += sent
            given_at.update(dict.fromkeys(sent, at))
            needs = table.step_needs(peer, step)
            read_at.update({need: at for need in needs if table.home(need.stage) == rank})
    posts = []
    posted: set[ActionResult] = set()
    for step in table.lines[rank]:
        now: list[ActionResult] = []
        for need in table.step_needs(rank, step):
            source = table.home(need.stage)
            while source != rank and need not in posted:
                now.append(queues[source].pop(0))
                posted.add(now[-1])
        posts.append(tuple(now))
    return RankPlan(table, rank, tuple(posts), given_at, read_at)


def messages_after(plan: RankPlan) -> Iterator[int]:
    """Yield the number of message tensors that a rank holds after each step, posted ones too."""
    table, rank, sent = plan.table, plan.rank, list[tuple[int, int]]()
    here, posts = set[ActionResult](), iter(plan.posts)
    for results in islice(posts, AHEAD):
        here.update(results)
    for step in plan.line:
        here.update(next(posts, ()))
        for action in (one for one in actions_of(step) if one.kind != "W"):
            own = table.stage(rank, action.chunk)
            for need in (one for one in table.needs(rank, action) if one.stage != own):
                here.remove(need)
                peer, at = table.home(need.stage), plan.given_at.get(need, -1)
                sent = [one for one in sent if one[0] != peer or one[1] > at]
        for result in table.step_gives(rank, step):
            reader = table.reader(result)
            if reader == rank:
                here.add(result)
            elif reader is not None:
                sent.append((reader, plan.read_at[result]))
        yield len(here) + len(sent)


class P2PMessages:
    """Sends and receives one pipeline rank's results in a training step.

    ``ranks`` is the pipeline's group; ``buffer`` allocates the tensor [T, D] into which a
    micro-batch's rows are received.
    """

    def __init__(self, plan: RankPlan, ranks: Group, buffer: Callable[[int], Tensor]) -> None:
        self._plan, self._ranks, self._buffer = plan, ranks, buffer
        self._here: dict[ActionResult, Tensor] = {}
        self._coming: dict[ActionResult, tuple[Tensor, Pending]] = {}
        self._sent: dict[int, list[tuple[int, Pending, Tensor]]] = {}
        self._posted = 0

    def post(self, at: int) -> None:
        """Post the receives of all steps up to ``at + AHEAD``."""
        until = min(at + AHEAD + 1, len(self._plan.posts))
        for results in self._plan.posts[self._posted : until]:
            for result in results:
                buffer = self._buffer(result.micro)
                source = self._ranks.ranks[self._plan.table.home(result.stage)]
                self._coming[result] = buffer, receive(buffer, source, self._ranks)
        self._posted = max(self._posted, until)

    def take(self, result: ActionResult) -> Tensor:
        """Return another stage's result, waiting for it if necessary."""
        if result in self._here:
            return self._here.pop(result)
        buffer, pending = self._coming.pop(result)
        pending.wait()
        # Messages that the peer must have read before it produced this one are complete: free them.
        peer, given_at = self._plan.table.home(result.stage), self._plan.given_at[result]
        sent = self._sent.pop(peer, [])
        for read_at, each, _ in sent:
            if read_at <= given_at:
                each.wait()
        self._sent[peer] = [one for one in sent if one[0] > given_at]
        return buffer

    def give(self, result: ActionResult, tensor: Tensor) -> None:
        """Pass a result to the stage that reads it: store it for this rank, or send it."""
        reader = self._plan.table.reader(result)
        assert reader is not None, "no rank reads the result"
        if reader == self._plan.rank:
            self._here[result] = tensor
            return
        pending = send(tensor, self._ranks.ranks[reader], self._ranks)
        self._sent.setdefault(reader, []).append((self._plan.read_at[result], pending, tensor))

    @property
    def tensors(self) -> list[Tensor]:
        """Results not yet read on this rank, and buffers of messages in flight."""
        sent = (tensor for *_, tensor in chain.from_iterable(self._sent.values()))
        return [*self._here.values(), *(buffer for buffer, _ in self._coming.values()), *sent]

    def close(self) -> None:
        """Wait for sends in flight; all received results must have been read."""
        for _, pending, _ in chain.from_iterable(self._sent.values()):
            pending.wait()
        assert not (self._here or self._coming), "results that no pass has read"
