"""NCCL's rules, as torch's process groups have them, on threads that stand for ranks.

What torch's ``ProcessGroupNCCL`` does with groups that are made without ``device_id``:

* The first collective or batch of messages in a group makes a communicator of all its ranks; a
  message on its own makes one of its two ranks, inside of the group. Making one blocks the host
  until all its ranks have come.
* A communicator has one stream. A rank's operations on it run in the order in which the rank issued
  them, and the first ones of its ranks have to fit each other.
* Tensors in host memory are refused.

``wait`` holds up the stream that it is called on. A thread stands for that stream here: whatever it
issued later would have waited too. A group of backend gloo blocks nobody in making connections, and
its sends do not wait for who receives.

Instead of a time-out there is a look at all threads: where none can go on, who waits for whom is
reported, and each of them raises ``Hang``.
"""

import gc
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.comm import collectives, world
from moefold.training import saving

QUIET_S, IDLE_S = 1.0, 30.0
"""So long nothing is said where ranks hang: with all threads parked, or with none that computes."""
LOOK_S = 0.05
PARKED = ("threading.py", "thread.py", "_base.py")
"""Files of Python's own in which a thread is that waits for another one."""
Ranks = tuple[int, ...]


def frames_of_threads() -> dict[int, FrameType]:
    """Return the frame that each thread is in, while no garbage is collected.

    Before Python 3.12 ``sys._current_frames`` holds a lock of the runtime while it makes objects. A
    collection that this begins may come upon a ``threading.local``, such as a machine's, and waits
    for that lock for good: https://github.com/python/cpython/issues/106883.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


class Hang(RuntimeError):
    """Ranks wait for each other, and none of them can go on."""


@dataclass(eq=False)
class Operation:
    """What one rank has issued on a communicator: a collective, or messages that go together."""

    rank: int
    name: str
    tensors: tuple[Tensor, ...] = ()
    run: Callable[[Sequence["Operation"]], None] | None = None
    """For a collective: computes what all ranks get, from the operations of all, once."""
    sends: dict[int, Tensor] = field(default_factory=dict)
    receives: dict[int, Tensor] = field(default_factory=dict)
    done: bool = False


class Communicator:
    """The operations of some ranks that have not run yet, of each in its order."""

    def __init__(self, name: str, ranks: Ranks) -> None:
        self.name, self.ranks = name, ranks
        self.queues: dict[int, deque[Operation]] = {rank: deque() for rank in ranks}
        self.come: set[int] = set()

    @property
    def is_made(self) -> bool:
        """Whether it is one of NCCL's, for which its ranks have met."""
        return bool(self.come)

    def run(self) -> bool:
        """Run what the heads of the queues allow; return whether there was anything."""
        heads = {rank: queue[0] for rank, queue in self.queues.items() if queue}
        before = len(heads), sum(len(head.sends) + len(head.receives) for head in heads.values())
        if len(heads) == len(self.ranks) and all(head.run for head in heads.values()):
            given = [heads[rank] for rank in self.ranks]
            self._demand_alike(given)
            run = given[0].run
            assert run is not None
            if not given[0].tensors[0].is_meta:
                run(given)
            for head in given:
                self._over(head)
            return True
        for head in heads.values():
            for peer in list(head.sends):
                into = heads[peer].receives.pop(head.rank, None) if peer in heads else None
                if into is not None:
                    into.copy_(head.sends.pop(peer))
        for head in list(heads.values()):
            if head.run is None and not head.sends and not head.receives:
                self._over(head)
                del heads[head.rank]
        left = len(heads), sum(len(head.sends) + len(head.receives) for head in heads.values())
        return left != before

    def _demand_alike(self, given: Sequence[Operation]) -> None:
        names = {head.name for head in given}
        if len(names) > 1:
            said = ", ".join(f"rank {head.rank} {head.name}" for head in given)
            raise Hang(f"{self.name}: ranks do different things at one place: {said}")

    def _over(self, head: Operation) -> None:
        head.done = True
        self.queues[head.rank].popleft()


class Handle(NamedTuple):
    """A process group, seen from one rank."""

    key: tuple[Any, ...]
    ranks: Ranks
    rank: int
    backend: str
    name: str


class Machine:
    """All ranks with everything between them.

    Attributes:
        made: the communicators that each rank has made.
        on_device: operations on communicators, by rank.
    """

    def __init__(self, ranks: int, device: str) -> None:
        self.ranks, self.device = ranks, torch.device(device)
        self.made: dict[int, dict[Any, str]] = {rank: {} for rank in range(ranks)}
        self.on_device: dict[int, int] = {}
        self.report = ""
        self.changed = threading.Condition()
        self._communicators: dict[Any, Communicator] = {}
        self._groups: dict[int, int] = defaultdict(int)
        self._here = threading.local()
        self._waiting: dict[int, tuple[int, Callable[[], str], Callable[[], bool]]] = {}
        self._events = 0
        self._bystanders: set[int] = set()

    # What ranks call

    @property
    def rank(self) -> int:
        """The rank that this thread is."""
        return self._here.rank

    def group(self, ranks: Ranks, backend: str, name: str, local: bool) -> Handle:
        """Make a process group; its ranks meet at the store, all ranks where it is not local."""
        # torch names a local group by its ranks and by how many groups the process has.
        key = (ranks if local else "all", self._groups[self.rank])
        self._groups[self.rank] += 1
        self._meet(("group", key), ranks, f"group {name}", self.rank)
        return Handle(key, ranks, self.rank, backend, name)

    def communicator(self, handle: Handle, pair: Ranks | None = None) -> Communicator:
        """Return a communicator of a group, which is made at first, or one of two of its ranks."""
        ranks = pair or handle.ranks
        name = f"{handle.name} {list(ranks)}"
        if handle.backend == "gloo":
            return self._communicator((handle.key, pair), name, ranks)
        known = (handle.key, pair)
        made = self._meet(known, ranks, f"communicator {name}", handle.rank)
        self.made[handle.rank][known] = name
        return made

    def issue(self, on: Communicator, operation: Operation) -> "Work":
        """Put an operation behind those that the rank issued before it."""
        with self.changed:
            self._demand_well()
            if on.is_made:
                self.on_device[operation.rank] = self.on_device.get(operation.rank, 0) + 1
            on.queues[operation.rank].append(operation)
            try:
                while on.run():
                    self._events += 1
            except Hang as error:
                self._end(str(error))
                raise
            self._events += 1
            self.changed.notify_all()
        return Work(self, on, operation)

    def mail(self, handle: Handle, source: int, to: int, operation: Operation) -> "Work":
        """Hand a gloo message over: a send is done at once, whoever receives it."""
        on = self._communicator((handle.key, source, to), f"{handle.name} {source}>{to}", ())
        with self.changed:
            self._demand_well()
            side = on.queues.setdefault(operation.rank, deque())
            if operation.sends:
                operation.sends = {to: operation.sends[to].clone()}
                operation.done = True
            side.append(operation)
            sent, asked = (on.queues.get(rank, deque()) for rank in (source, to))
            while sent and asked:
                receive = asked.popleft()
                receive.receives[source].copy_(sent.popleft().sends[to])
                receive.done = True
            self._events += 1
            self.changed.notify_all()
        return Work(self, on, operation)

    def wait(self, on: Communicator, operation: Operation) -> None:
        """Hold this thread up until an operation is done."""

        def words() -> str:
            heads = [
                f"rank {rank} is at {queue[0].name}" if queue else f"rank {rank} has issued nothing"
                for rank, queue in on.queues.items()
                if rank != operation.rank
            ]
            return f"{operation.name} on {on.name}: {', '.join(heads)}"

        self._hold_up(words, lambda: operation.done, operation.rank)

    def _meet(self, key: Any, ranks: Ranks, what: str, rank: int) -> Communicator:
        made = self._communicator(key, what, ranks)

        def words() -> str:
            late = [other for other in ranks if other not in made.come]
            return f"making {what}: {late} have not come"

        with self.changed:
            made.come.add(rank)
            self._events += 1
            self.changed.notify_all()
        self._hold_up(words, lambda: made.come.issuperset(ranks), rank)
        return made

    def _communicator(self, key: Any, name: str, ranks: Ranks) -> Communicator:
        with self.changed:
            return self._communicators.setdefault(key, Communicator(name, ranks))

    def _hold_up(self, words: Callable[[], str], over: Callable[[], bool], rank: int) -> None:
        me = threading.get_ident()
        with self.changed:
            self._waiting[me] = rank, words, over
            self.changed.wait_for(lambda: over() or self.report)
            del self._waiting[me]
            self._events += 1
            if not over():
                self._demand_well()

    def _demand_well(self) -> None:
        if self.report:
            raise Hang(self.report)

    # What the one who looks on calls

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(rank, *args)`` on a thread for each rank; return what each returned.

        Raises:
            Hang: where ranks wait for each other, or leave operations behind that cannot run.
            Exception: what the first rank raised that failed by itself.
        """
        answers: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}

        def be(rank: int) -> None:
            self._here.rank = rank
            try:
                answers[rank] = function(rank, *args)
            except BaseException as error:
                errors[rank] = error
                if not isinstance(error, Hang):
                    self._end(f"rank {rank} failed: {type(error).__name__}: {error}")

        self._bystanders = set(frames_of_threads())
        threads = [threading.Thread(target=be, args=(rank,)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        self._look_on(threads)
        own = [error for error in errors.values() if not isinstance(error, Hang)]
        for error in [*own, *errors.values()]:
            raise error
        left = [
            f"rank {rank} left {queue[0].name} on {on.name} behind"
            for on in self._communicators.values()
            for rank, queue in on.queues.items()
            if queue
        ]
        if left:
            raise Hang("; ".join(left))
        return [answers[rank] for rank in range(self.ranks)]

    def _look_on(self, threads: Sequence[threading.Thread]) -> None:
        """Wait for the threads; end them where for a while none of them has done anything."""
        seen, since, busy = -1, time.monotonic(), 0.0
        while any(thread.is_alive() for thread in threads):
            next(thread for thread in threads if thread.is_alive()).join(LOOK_S)
            with self.changed:
                moving = self._events != seen or any(o() for *_, o in self._waiting.values())
                quiet_s = QUIET_S if self._all_parked() else IDLE_S
                if moving or time.process_time() - busy > quiet_s / 10:
                    seen, since, busy = self._events, time.monotonic(), time.process_time()
                elif self._waiting and time.monotonic() - since > quiet_s:
                    lines = [f"rank {rank} waits in {said()}" for rank, said, _ in self._held()]
                    self._end("ranks wait for each other\n  " + "\n  ".join(lines))

    def _held(self) -> list[tuple[int, Callable[[], str], Callable[[], bool]]]:
        return sorted(self._waiting.values(), key=lambda held: held[0])

    def _all_parked(self) -> bool:
        """Whether each thread of the ranks is inside of Python's own waiting."""
        frames = frames_of_threads()
        ours = (frames[ident] for ident in frames.keys() - self._bystanders)
        return all(frame.f_code.co_filename.endswith(PARKED) for frame in ours)

    def _end(self, report: str) -> None:
        with self.changed:
            self.report = self.report or report
            self.changed.notify_all()


class Work(NamedTuple):
    """An operation under way."""

    machine: Machine
    on: Communicator
    operation: Operation

    def wait(self) -> None:
        """Hold this thread up until it is done."""
        self.machine.wait(self.on, self.operation)

    def is_completed(self) -> bool:
        """Say whether it is."""
        return self.operation.done


class Message(NamedTuple):
    """One of several messages that go together."""

    op: Callable[..., Any]
    tensor: Tensor
    peer: int
    group: Handle


class Distributed:
    """What ``torch.distributed`` offers, by these rules."""

    ProcessGroup, Work, P2POp, ReduceOp = Handle, Work, Message, dist.ReduceOp

    def __init__(self, machine: Machine, backend: str = "nccl") -> None:
        self._machine, self._backend = machine, backend

    def is_initialized(self) -> bool:
        return True

    def get_world_size(self) -> int:
        return self._machine.ranks

    def get_rank(self) -> int:
        return self._machine.rank

    def get_backend(self, group: Handle | None = None) -> str:
        return self._backend if group is None else group.backend

    def destroy_process_group(self) -> None:
        """Groups go with the machine."""

    def new_group(
        self,
        ranks: Sequence[int] | None = None,
        timeout: object = None,
        backend: str | None = None,
        use_local_synchronization: bool = False,
        group_desc: str = "",
        pg_options: object = None,
    ) -> Handle:
        members = tuple(range(self._machine.ranks)) if ranks is None else tuple(ranks)
        backend = backend or self._backend
        return self._machine.group(members, backend, group_desc, use_local_synchronization)

    def isend(self, tensor: Tensor, dst: int, group: Handle) -> Work:
        return self._message(group, group.rank, dst, tensor)

    def irecv(self, tensor: Tensor, src: int, group: Handle) -> Work:
        return self._message(group, src, group.rank, tensor)

    def batch_isend_irecv(self, ops: Sequence[Message]) -> list[Work]:
        group = ops[0].group
        if group.backend == "gloo":
            return [message.op(message.tensor, message.peer, group) for message in ops]
        sides: dict[bool, dict[int, Tensor]] = {True: {}, False: {}}
        for message in ops:
            self._demand_place(group, message.tensor)
            sides[message.op == self.isend][message.peer] = message.tensor
        on = self._machine.communicator(group)
        batch = Operation(group.rank, "a batch", sends=sides[True], receives=sides[False])
        return [self._machine.issue(on, batch)]

    def all_reduce(self, x: Tensor, op: Any, group: Handle, async_op: bool = False) -> Any:
        def run(all_: Sequence[Operation]) -> None:
            given = torch.stack([each.tensors[0] for each in all_])
            most = op == dist.ReduceOp.MAX
            summed = given.any(0) if given.dtype == torch.bool else given.sum(0, dtype=given.dtype)
            for each in all_:
                each.tensors[0].copy_(given.amax(0) if most else summed)

        return self._collective(group, f"all_reduce {list(x.shape)}", (x,), run, async_op)

    def broadcast(self, x: Tensor, src: int, group: Handle, async_op: bool = False) -> Any:
        def run(all_: Sequence[Operation]) -> None:
            value = all_[group.ranks.index(src)].tensors[0].clone()
            for each in all_:
                each.tensors[0].copy_(value)

        what = f"broadcast {list(x.shape)} of rank {src}"
        return self._collective(group, what, (x,), run, async_op)

    def gather(self, out: Tensor, x: Tensor, group: Handle, async_op: bool = False) -> Any:
        def run(all_: Sequence[Operation]) -> None:
            whole = torch.cat([each.tensors[1].reshape(-1) for each in all_])
            for each in all_:
                each.tensors[0].copy_(whole.view(each.tensors[0].shape))

        return self._collective(group, f"all_gather {list(x.shape)}", (out, x), run, async_op)

    def scatter(self, out: Tensor, x: Tensor, group: Handle, async_op: bool = False) -> Any:
        def run(all_: Sequence[Operation]) -> None:
            total = torch.stack([each.tensors[1].reshape(-1) for each in all_]).sum(0)
            for each, part in zip(all_, total.chunk(len(all_)), strict=True):
                each.tensors[0].copy_(part.view(each.tensors[0].shape))

        return self._collective(group, f"reduce_scatter {list(x.shape)}", (out, x), run, async_op)

    def all_to_all_single(
        self,
        out: Tensor,
        x: Tensor,
        receive: Sequence[int],
        send: Sequence[int],
        group: Handle,
        async_op: bool = False,
    ) -> Any:
        def run(all_: Sequence[Operation]) -> None:
            given = [each.tensors[1].split(each.tensors[2].tolist()) for each in all_]
            for place, each in enumerate(all_):
                parts = [parts[place] for parts in given]
                assert [part.shape[0] for part in parts] == each.tensors[3].tolist()
                each.tensors[0].copy_(torch.cat(parts))

        counts = torch.tensor(send), torch.tensor(receive)
        self._demand_place(group, x)
        return self._collective(group, "all_to_all", (out, x, *counts), run, async_op)

    def _message(self, group: Handle, source: int, to: int, tensor: Tensor) -> Work:
        self._demand_place(group, tensor)
        sends = {to: tensor} if source == group.rank else {}
        receives = {} if sends else {source: tensor}
        name = f"send to {to}" if sends else f"receive from {source}"
        operation = Operation(group.rank, name, sends=sends, receives=receives)
        if group.backend == "gloo":
            return self._machine.mail(group, source, to, operation)
        first, second = sorted((source, to))
        on = self._machine.communicator(group, (first, second))
        return self._machine.issue(on, operation)

    def _collective(
        self,
        group: Handle,
        name: str,
        tensors: tuple[Tensor, ...],
        run: Callable[[Sequence[Operation]], None],
        async_op: bool,
    ) -> Any:
        self._demand_place(group, tensors[0])
        on = self._machine.communicator(group)
        work = self._machine.issue(on, Operation(group.rank, name, tensors, run))
        if async_op:
            return work
        work.wait()
        return None

    def _demand_place(self, group: Handle, tensor: Tensor) -> None:
        place = torch.device("cpu") if group.backend == "gloo" else self._machine.device
        if tensor.device.type != place.type:
            raise RuntimeError(
                f"No backend type associated with device type {tensor.device.type}: {group.name}"
            )


class NoWatch:
    """Stands for the watch over a rank, which needs a store."""

    def __init__(self, *_: Any) -> None: ...

    def stop(self) -> None: ...


@contextmanager
def nccl(ranks: int, device: str = "cpu", backend: str = "nccl") -> Iterator[Machine]:
    """Let the package's communication run by these rules, between threads of this process.

    Args:
        ranks: how many there are.
        device: where tensors lie that NCCL takes. On ``cpu`` they have values; with ``meta`` they
            have none, and what lies in host memory is told from them.
        backend: of groups that name none.
    """
    machine = Machine(ranks, device)
    model = Distributed(machine, backend)
    changes = (
        (collectives, "dist", model),
        (collectives, "_gather_single", model.gather),
        (collectives, "_scatter_single", model.scatter),
        (world, "dist", model),
        (world, "HangWatch", NoWatch),
        (world, "open_connection", lambda _: None),
        (saving, "NICE", 0),  # A thread that is starved would look like one that hangs.
    )
    patches = [patch.object(*change) for change in changes]
    for each in patches:
        each.start()
    try:
        yield machine
    finally:
        for each in patches:
            each.stop()
