"""Point-to-point messages between pipeline stages, derived from the table and non-blocking.

Between two ranks each direction is an ordered channel: outputs and gradients have the same shape,
and NCCL has no tags, so a message is identified by its position alone. The receiver therefore posts
receives in the order in which the *sender* sends, which both derive from the table; a result that
arrives early is kept until its step. Receives are posted a step ahead, sends are waited for late,
and neither blocks the host, so no order of steps that the table allows can deadlock. On NCCL each
pair of ranks has a communicator per direction (``Group.reverse_handle``), so that neither waits for
the other, provided that communicators are created lazily (no ``device_id`` where ranks join).

T rows on this rank, D hidden.
"""

from collections.abc import Callable, Iterator, Sequence
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
    """Receives to post at each of the rank's steps, in the order of the sends."""
    produced_at: dict[ActionResult, int]
    """For each result received from another rank: the step of that rank that produces it."""
    read_at: dict[ActionResult, int]
    """For each result sent to another rank: the step of that rank that reads it."""

    @property
    def line(self) -> Line:
        """The rank's steps."""
        return self.table.lines[self.rank]

    @property
    def splits_backward(self) -> bool:
        """Whether this rank computes weight gradients in separate actions (``W``)."""
        return any(action.kind == "W" for action in self.table.actions(self.rank))


@lru_cache(maxsize=8)
def plan_rank(layout: Layout, rank: int, micro_batches: int) -> RankPlan:
    """Return the plan of a pipeline rank for a step of ``micro_batches`` on this data rank."""
    table = layout.table(micro_batches)
    stages = [table.stage_of(rank, chunk) for chunk in range(table.chunks)]
    adjacent = {stage + delta for stage in stages for delta in (-1, 1)} & set(range(table.stages))
    queues: dict[int, list[ActionResult]] = {table.rank_of(stage): [] for stage in adjacent}
    produced_at: dict[ActionResult, int] = {}
    read_at: dict[ActionResult, int] = {}
    for peer in queues.keys() - {rank}:
        for index, step in enumerate(table.lines[peer]):
            sent = [r for r in table.step_results(peer, step) if table.reader_rank(r) == rank]
            queues[peer] += sent
            produced_at.update(dict.fromkeys(sent, index))
            needs = table.step_inputs(peer, step)
            read_at.update({need: index for need in needs if table.rank_of(need.stage) == rank})
    posts = []
    posted: set[ActionResult] = set()
    for step in table.lines[rank]:
        to_post: list[ActionResult] = []
        for need in table.step_inputs(rank, step):
            source = table.rank_of(need.stage)
            while source != rank and need not in posted:
                to_post.append(queues[source].pop(0))
                posted.add(to_post[-1])
        posts.append(tuple(to_post))
    return RankPlan(table, rank, tuple(posts), produced_at, read_at)


def held_messages(plan: RankPlan, sent_rows: Sequence[int]) -> Iterator[int]:
    """Yield the tensors of rows [T, D] in messages that a rank holds after each step, with posted
    ones; ``sent_rows`` is their number in a message from each stage to the next.
    """
    table = plan.table
    rank = plan.rank
    sent = list[tuple[int, int, int]]()

    def rows_of(result: ActionResult) -> int:
        return sent_rows[result.stage - (result.kind == "gradient")]

    unread = set[ActionResult]()
    posts = iter(plan.posts)
    for results in islice(posts, AHEAD):
        unread.update(results)
    for step in plan.line:
        unread.update(next(posts, ()))
        for action in (action for action in actions_of(step) if action.kind != "W"):
            stage = table.stage_of(rank, action.chunk)
            for need in (need for need in table.action_inputs(rank, action) if need.stage != stage):
                unread.remove(need)
                peer = table.rank_of(need.stage)
                produced_at = plan.produced_at.get(need, -1)
                sent = [entry for entry in sent if entry[0] != peer or entry[1] > produced_at]
        for result in table.step_results(rank, step):
            reader = table.reader_rank(result)
            if reader == rank:
                unread.add(result)
            elif reader is not None:
                sent.append((reader, plan.read_at[result], rows_of(result)))
        yield sum(map(rows_of, unread)) + sum(rows for *_, rows in sent)


class P2PMessages:
    """Sends and receives one pipeline rank's results in a training step.

    ``ranks`` is the pipeline's group; ``buffer`` allocates the tensor [T, D] into which a
    result's rows are received.
    """

    def __init__(
        self, plan: RankPlan, ranks: Group, buffer: Callable[[ActionResult], Tensor]
    ) -> None:
        self._plan = plan
        self._ranks = ranks
        self._buffer = buffer
        self._local: dict[ActionResult, Tensor] = {}
        self._incoming: dict[ActionResult, tuple[Tensor, Pending]] = {}
        self._sent: dict[int, list[tuple[int, Pending, Tensor]]] = {}
        self._posted = 0

    def post(self, index: int) -> None:
        """Post the receives of all steps up to ``index + AHEAD``."""
        until = min(index + AHEAD + 1, len(self._plan.posts))
        for results in self._plan.posts[self._posted : until]:
            for result in results:
                buffer = self._buffer(result)
                source = self._ranks.ranks[self._plan.table.rank_of(result.stage)]
                self._incoming[result] = buffer, receive(buffer, source, self._ranks)
        self._posted = max(self._posted, until)

    def wait_for(self, result: ActionResult) -> Tensor:
        """Return another stage's result, waiting for it if necessary."""
        if result in self._local:
            return self._local.pop(result)
        buffer, pending = self._incoming.pop(result)
        pending.wait()
        # Free messages that the peer must have read before it produced this one.
        peer = self._plan.table.rank_of(result.stage)
        produced_at = self._plan.produced_at[result]
        sent = self._sent.pop(peer, [])
        for read_at, message, _ in sent:
            if read_at <= produced_at:
                message.wait()
        self._sent[peer] = [entry for entry in sent if entry[0] > produced_at]
        return buffer

    def send(self, result: ActionResult, tensor: Tensor) -> None:
        """Pass a result to the stage that reads it: send it, or store it for this rank."""
        reader = self._plan.table.reader_rank(result)
        assert reader is not None, "no rank reads the result"
        if reader == self._plan.rank:
            self._local[result] = tensor
            return
        pending = send(tensor, self._ranks.ranks[reader], self._ranks)
        self._sent.setdefault(reader, []).append((self._plan.read_at[result], pending, tensor))

    @property
    def tensors(self) -> list[Tensor]:
        """Results not yet read on this rank, and buffers of messages in flight."""
        sent = (tensor for *_, tensor in chain.from_iterable(self._sent.values()))
        return [*self._local.values(), *(buffer for buffer, _ in self._incoming.values()), *sent]

    def close(self) -> None:
        """Wait for pending sends; all received results must have been read."""
        for _, pending, _ in chain.from_iterable(self._sent.values()):
            pending.wait()
        assert not (self._local or self._incoming), "results that no pass has read"
