"""This rank's process groups in a folding."""

from collections.abc import Callable, Collection, Hashable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from moefold.comm.collectives import receive, send, shift, sum_
from moefold.comm.group import Group
from moefold.comm.recorder import Recorder
from moefold.comm.rendezvous import open_connection
from moefold.comm.watch import HOST, HangWatch
from moefold.mesh.config import Sizes
from moefold.mesh.folding import EMBEDDING, AttentionCoordinates, ExpertCoordinates, Folding, Ranks

T = TypeVar("T")
IN_OPERATION = "an operation with other ranks was under way"
"""Note on an error that ends a world while the rank is waiting for others."""
EXCHANGE_KINDS = ("ep", "etp", "tp_ep")
"""Kinds of groups over which rows are sent to experts."""
GROUP_KINDS = ("tp", "cp", "dp", "pp", "tp_cp", "dp_cp", "edp", "stage", "world", *EXCHANGE_KINDS)
"""Kinds of groups that are created. On NCCL each takes memory on every rank's device."""
BULK_KINDS = ("dp_cp", "edp")
"""Kinds of groups for weights and gradients, which overlap with what a pass waits for. On NCCL,
where operations of one communicator run one after another, they have separate communicators."""
BULK_CTAS = 16
"""Most thread blocks that NCCL uses for a bulk operation, which overlaps with compute. A guess."""
HOST_TIME_OUT_S = 4 * 3600.0
"""Time-out of the host group: the first rank may prepare data or publish a checkpoint."""


class World:
    """This rank's coordinates and all its groups, one for each distinct set of ranks."""

    def __init__(
        self, folding: Folding, rank: int, device: torch.device, time_out_s: float
    ) -> None:
        """Bind a folding to a rank; use ``open`` or ``single``."""
        self.folding = folding
        self.rank = rank
        self.device = device
        self.time_out_s = time_out_s
        self.recorder = Recorder(mark=_mark_queued_work if device.type == "cuda" else None)
        self.attention: AttentionCoordinates = folding.attention_coordinates(rank)
        self.experts: ExpertCoordinates = folding.expert_coordinates(rank)
        self._by_kind: dict[str, Group] = {}
        self._by_ranks: dict[tuple[bool, Ranks], Group] = {}
        """By whether the group has a separate bulk communicator, and its ranks."""
        self._by_stages: dict[tuple[int, ...], Group] = {}
        self._host: Group | None = None
        self._secondary: World | None = None
        self._watch: HangWatch | None = None
        self._prefix = ""
        self._cached: dict[Hashable, tuple[Any, Callable[[], object] | None]] = {}
        """Objects of other packages for these ranks, each with a function that closes it."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.folding.world

    @staticmethod
    def single(device: torch.device | str | None = None) -> "World":
        """Return a world of one rank, which needs no process group."""
        world = World(Folding(Sizes(), 1), 0, torch.device(device or "cpu"), 0.0)
        world._create_groups()
        return world

    @classmethod
    def open(
        cls,
        folding: Folding,
        device: torch.device | str,
        time_out_s: float,
        report_folder: Path | None = None,
    ) -> "World":
        """Create all groups on all ranks and warm each one up, before memory is tight.

        ``time_out_s`` is the time-out of every operation; ranks that hang write reports into
        ``report_folder``.

        Raises:
            ValueError: if the folding has another number of ranks, or there is no default process
                group (``comm.rendezvous.join`` creates it).
        """
        if folding.world == 1:
            return cls.single(device)
        if not dist.is_initialized():
            raise ValueError(f"the layout needs {folding.world} ranks, but 1 runs; start them all")
        if dist.get_world_size() != folding.world:
            text = f"the layout needs {folding.world} ranks, but {dist.get_world_size()} run"
            raise ValueError(f"{text}; start {folding.world}")
        world = cls(folding, dist.get_rank(), torch.device(device), time_out_s)
        store = open_connection(time_out_s)
        args = world.recorder, store, world.rank, world.size, time_out_s, report_folder
        world._watch = HangWatch(*args)
        limit = timedelta(seconds=HOST_TIME_OUT_S)
        handle = dist.new_group(timeout=limit, backend="gloo", group_desc=HOST)
        assert isinstance(handle, dist.ProcessGroup), "every rank is a member"
        everyone = tuple(range(world.size))
        world._host = Group(HOST, everyone, world.rank, handle, world.recorder)
        world._create_groups()
        world.recorder.clear()
        return world

    def group(self, kind: str) -> Group:
        """Return this rank's group of a kind; kinds with the same ranks share one, or two on NCCL.

        Raises:
            ValueError: for a kind whose ranks are those of none in ``GROUP_KINDS``.
        """
        group = self._by_kind.get(kind)
        if group is not None:
            return group
        raise ValueError(f"there is no group of kind {kind!r}; kinds are {', '.join(GROUP_KINDS)}")

    def stage_group(self, stages: Iterable[int]) -> Group:
        """Return the group of this pipeline's ranks on some stages, to sum weights that all hold.

        A collective call of all ranks; those on other stages get an unused group.
        """
        wanted = tuple(sorted(set(stages)))
        if len(wanted) == 1:
            return Group(f"stage {wanted[0]}", (self.rank,), 0, None, self.recorder)
        if wanted not in self._by_stages:
            is_first_and_last = wanted == (0, self.folding.sizes.pp - 1)
            name = EMBEDDING if is_first_and_last else "stages " + ",".join(map(str, wanted))
            others = tuple(stage for stage in range(self.folding.sizes.pp) if stage not in wanted)
            is_member = self.attention.pp in wanted
            mine = wanted if is_member else others
            ranks = tuple(sorted(self.folding.rank_on_stage(self.rank, stage) for stage in mine))
            # torch names a group that only its members create by its ranks and by the number of
            # groups the process has created, so all ranks must create one: two in each pipeline.
            self._by_stages[wanted] = (
                self._group_of(name, ranks) if is_member else self._create(f"beside {name}", ranks)
            )
        return self._by_stages[wanted]

    def split(self, kind: str, inner: int) -> tuple[Group, Group]:
        """Split this rank's group of a kind into two levels: (inner, outer).

        ``inner`` neighbours form an inner group, the ranks at one index of every inner group an
        outer one. A collective call of all ranks; repeated calls return the same groups.

        Raises:
            ValueError: if ``inner`` does not divide the group's size.
        """
        group = self.group(kind)
        if group.size % inner:
            raise ValueError(f"groups of {inner} ranks do not divide {kind} of {group.size} ranks")
        first = group.index // inner * inner
        offset = group.index % inner
        near = slice(first, first + inner)
        far = slice(offset, None, inner)
        bulk = kind in BULK_KINDS
        return (
            self._group_of(f"{kind} inner {inner}", group.ranks[near], bulk),
            self._group_of(f"{kind} outer {inner}", group.ranks[far], bulk),
        )

    @property
    def secondary(self) -> "World":
        """A world with separate ``EXCHANGE_KINDS`` groups, for a second thread on every rank.

        All ranks must issue a group's operations in one order, which two threads do not have. The
        first access is a collective call; the groups are created once.
        """
        if self.size == 1 or self._secondary is not None:
            return self._secondary or self
        world = type(self)(self.folding, self.rank, self.device, self.time_out_s)
        self._secondary = world
        world.recorder = self.recorder
        world._host = self._host
        world._prefix = "second "
        world._cached = self._cached
        world._create_groups(EXCHANGE_KINDS)
        return world

    @property
    def on_host(self) -> Group:
        """All ranks, for tensors in host memory and messages from the first rank.

        Its time-out, ``HOST_TIME_OUT_S``, is longer than that of other groups, since the first rank
        does some work for all. It uses no device.
        """
        return self._host or self.group("world")

    def cached(
        self, key: Hashable, create: Callable[[], T], close: Callable[[], object] | None = None
    ) -> T:
        """Return another package's object, created once and shared with ``secondary``.

        ``close`` closes it, and is called before the groups are destroyed.
        """
        if key not in self._cached:
            self._cached[key] = create(), close
        return self._cached[key][0]

    def __enter__(self) -> "World":
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        """Close; after a failed operation, annotate the error and report the absent ranks."""
        if error is None:
            self.close()
        elif isinstance(error, RuntimeError) and self._watch is not None:
            if self.recorder.in_operation:
                error.add_note(IN_OPERATION)
            self._watch.await_verdict()

    def close(self) -> None:
        """Destroy all groups; nothing can be sent afterwards."""
        self.forget_groups()
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def forget_groups(self) -> None:
        """Close objects of :meth:`cached` and drop all groups; the ranks stay joined."""
        for _, close in self._cached.values():
            if close is not None:
                close()
        self._cached.clear()
        self._by_kind = {}
        self._by_ranks = {}
        self._by_stages = {}
        if self._watch is not None:
            self._watch.stop()

    def _create_groups(self, kinds: Collection[str] = GROUP_KINDS) -> None:
        """Create groups, each named after all kinds with the same ranks."""
        named: dict[tuple[str, bool], list[str]] = {}
        for kind, first in self.folding.first_equal_kinds().items():
            named.setdefault((first, kind in BULK_KINDS and _is_ordered()), []).append(kind)
        for (first, bulk), names in named.items():
            if not set(kinds).isdisjoint(names):
                ranks = self.folding.group(first, self.rank)
                group = self._group_of("+".join(names), ranks, bulk)
                self._by_kind.update(dict.fromkeys(names, group))

    def _group_of(self, name: str, ranks: Ranks, bulk: bool = False) -> Group:
        """Return the group of these ranks, created on first use."""
        key = bulk and _is_ordered(), ranks
        if key not in self._by_ranks:
            single = Group(name, ranks, 0, None, self.recorder)
            self._by_ranks[key] = self._create(name, ranks, bulk) if len(ranks) > 1 else single
        return self._by_ranks[key]

    def _create(self, name: str, ranks: Ranks, bulk: bool = False) -> Group:
        name = self._prefix + name
        handle = self._process_group(ranks, name, bulk)
        # NCCL serialises the messages between two ranks of a communicator, in both directions.
        reverse = self._process_group(ranks, name, bulk) if _is_ordered() else None
        group = Group(name, ranks, ranks.index(self.rank), handle, self.recorder, reverse)
        self._warm_up(group)
        return group

    def _process_group(self, ranks: Ranks, name: str, bulk: bool) -> dist.ProcessGroup:
        limit = timedelta(seconds=self.time_out_s)
        handle = dist.new_group(
            list(ranks),
            timeout=limit,
            use_local_synchronization=True,
            group_desc=name,
            pg_options=_options(bulk, limit),
        )
        assert isinstance(handle, dist.ProcessGroup), "a rank creates only groups that it is in"
        return handle

    def _warm_up(self, group: Group) -> None:
        """Run one all-reduce, and messages between pipeline neighbours and all pairs of cp ranks.

        On NCCL the first message between two ranks blocks both until they have created their
        communicator. So pairs come in one order, and only their two ranks take part in each.
        """
        if group.size == 1:
            return
        with self.recorder.module("warm-up"):
            sum_(torch.zeros(1, device=self.device), group)
            kinds = {kind.split()[0] for kind in group.name.split("+")}
            if "pp" in kinds:
                for source, to in neighbour_pairs(group.size):
                    x = torch.zeros(1, device=self.device)
                    if group.index == source:
                        send(x, group.ranks[to], group).wait()
                    elif group.index == to:
                        receive(x, group.ranks[source], group).wait()
            for by in range(1, group.size if "cp" in kinds else 1):
                x, out = torch.zeros(2, 1, device=self.device).unbind()
                shift(x, out, by, group).wait()


def neighbour_pairs(ranks: int) -> tuple[tuple[int, int], ...]:
    """Return (source, destination) of all neighbours in a ring, both ways, in one order for all.

    Pairs that share no rank are consecutive, so that they need not wait for each other.
    """
    even_first = sorted(range(ranks), key=lambda rank: rank % 2)
    pairs = [(rank, (rank + 1) % ranks) for rank in even_first]
    return tuple(dict.fromkeys(pair for a, b in pairs for pair in ((a, b), (b, a))))


def _is_ordered() -> bool:
    """Return whether the backend runs a group's operations strictly in order: only NCCL does."""
    return dist.is_initialized() and dist.get_backend() == "nccl"


def _options(bulk: bool, limit: timedelta) -> Any:
    """Return NCCL's options of a group: high priority, or few thread blocks for bulk."""
    backend = getattr(dist, "ProcessGroupNCCL", None)
    if backend is None or not _is_ordered():
        return None
    options = backend.Options(is_high_priority_stream=not bulk)
    options._timeout = limit  # torch warns if it differs from the ``timeout`` argument
    if bulk:
        options.config.max_ctas = BULK_CTAS
    return options


def _mark_queued_work() -> Callable[[], bool]:
    """Return a function that returns whether work that this thread queued so far is done."""
    if torch.cuda.is_current_stream_capturing():
        return lambda: True  # nothing is queued, and a later query would raise a CUDA error
    event = torch.cuda.Event()
    event.record()
    return event.query
