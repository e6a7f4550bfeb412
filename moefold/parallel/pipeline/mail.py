"""Point-to-point sends and receives between pipeline stages, without blocking the host.

Receives are posted a step ahead, sends are waited for late.

T rows here, D hidden.
"""

from collections.abc import Callable

from torch import Tensor

from moefold.comm.collectives import Pending, receive, send
from moefold.comm.group import Group
from moefold.parallel.pipeline.plan import Plan
from moefold.schedule.table import Result

AHEAD = 1
"""Steps between posting a receive and the step that needs it."""


class Mail:
    """The results that one rank gives and takes in a step of training.

    Args:
        plan: what crosses when.
        ranks: the pipeline.
        buffer: makes the tensor [T, D] that a micro-batch's rows arrive in.
    """

    def __init__(self, plan: Plan, ranks: Group, buffer: Callable[[int], Tensor]) -> None:
        self._plan, self._ranks, self._buffer = plan, ranks, buffer
        self._here: dict[Result, Tensor] = {}
        self._coming: dict[Result, tuple[Tensor, Pending]] = {}
        self._sent: dict[int, list[tuple[int, Pending]]] = {}
        self._posted = 0

    def post(self, at: int) -> None:
        """Post the receives of steps up to ``at`` and a little further."""
        until = min(at + AHEAD + 1, len(self._plan.posts))
        for results in self._plan.posts[self._posted : until]:
            for result in results:
                buffer = self._buffer(result.micro)
                source = self._ranks.ranks[self._plan.table.home(result.stage)]
                self._coming[result] = buffer, receive(buffer, source, self._ranks)
        self._posted = max(self._posted, until)

    def take(self, result: Result) -> Tensor:
        """Return what another stage has given, waiting for it if it is still on its way."""
        if result in self._here:
            return self._here.pop(result)
        buffer, pending = self._coming.pop(result)
        pending.wait()
        self._let_go(result)
        return buffer

    def give(self, result: Result, tensor: Tensor) -> None:
        """Hand a result to the stage that reads it, here or elsewhere."""
        reader = self._plan.table.reader(result)
        assert reader is not None, "nobody reads the result"
        if reader == self._plan.rank:
            self._here[result] = tensor
            return
        pending = send(tensor, self._ranks.ranks[reader], self._ranks)
        self._sent.setdefault(reader, []).append((self._plan.read_at[result], pending))

    def close(self) -> None:
        """Wait for what is still on its way out; nothing else may be left."""
        for pending in [p for sent in self._sent.values() for _, p in sent]:
            pending.wait()
        assert not (self._here or self._coming), "results that nobody has read"

    def _let_go(self, result: Result) -> None:
        """Free what a rank must have read before it gave ``result``: these sends are over."""
        peer, given_at = self._plan.table.home(result.stage), self._plan.given_at[result]
        kept = []
        for read_at, pending in self._sent.get(peer, []):
            if read_at <= given_at:
                pending.wait()
            else:
                kept.append((read_at, pending))
        self._sent[peer] = kept
