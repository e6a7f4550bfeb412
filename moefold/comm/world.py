"""The groups of a folding, bound to this process."""

from collections.abc import Callable, Collection, Hashable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from moefold.comm.collectives import receive, send, shift, sum_
from moefold.comm.group import Group
from moefold.comm.recorder import Recorder
from moefold.comm.rendezvous import own_connection
from moefold.comm.watch import HOST, HangWatch
from moefold.mesh.config import Sizes
from moefold.mesh.folding import EMBEDDING, AttentionSpot, ExpertSpot, Folding, Ranks

T = TypeVar("T")
IN_OPERATION = "an operation with other ranks was under way"
"""Noted on an error that ends a world, where the rank waited for others when it was raised."""
EXCHANGED = ("ep", "etp", "tp_ep")
"""Kinds of group that rows go to experts over."""
SPOKEN = ("tp", "cp", "dp", "pp", "tp_cp", "dp_cp", "edp", "stage", "world", *EXCHANGED)
"""Kinds of group that anything is said over. On NCCL each costs memory on every rank's device."""
BULK = ("dp_cp", "edp")
"""Kinds of group that weights and gradients travel over, beside what a pass waits for. On NCCL,
where operations of one communicator run one after the other, these have communicators apart."""
BULK_CTAS = 16
"""Blocks at most that NCCL runs for a bulk operation, beside which a device computes. A guess."""
PATIENCE_S = 4 * 3600.0
"""So long ranks wait for the first one's word: it may prepare data, or publish a checkpoint."""


class World:
    """Every group that this rank is in, made once for distinct ranks, and its coordinates."""

    def __init__(
        self, folding: Folding, rank: int, device: torch.device, time_out_s: float
    ) -> None:
        """Bind a folding to a rank; use ``open`` or ``single``."""
        self.folding, self.rank, self.device = folding, rank, device
        self.time_out_s = time_out_s
        self.recorder = Recorder(mark=_queued if device.type == "cuda" else None)
        self.attention: AttentionSpot = folding.attention_spot(rank)
        self.experts: ExpertSpot = folding.expert_spot(rank)
        self._by_kind: dict[str, Group] = {}
        self._by_ranks: dict[tuple[bool, Ranks], Group] = {}
        """Whether a group is for bulk, where that is apart, and its ranks."""
        self._by_stages: dict[tuple[int, ...], Group] = {}
        self._host: Group | None = None
        self._beside: World | None = None
        self._watch: HangWatch | None = None
        self._prefix = ""
        self._kept: dict[Hashable, tuple[Any, Callable[[], object] | None]] = {}
        """What others hold for these ranks, and what ends it."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.folding.world

    @staticmethod
    def single(device: torch.device | str | None = None) -> "World":
        """Return a world of one rank; no process group is needed."""
        world = World(Folding(Sizes(), 1), 0, torch.device(device or "cpu"), 0.0)
        world._make_all()
        return world

    @classmethod
    def open(
        cls,
        folding: Folding,
        device: torch.device | str,
        time_out_s: float,
        reports: Path | None = None,
    ) -> "World":
        """Make all groups on all ranks and let each group talk once, before memory is tight.

        Ranks wait ``time_out_s`` for each other in any operation of any group, and write into
        ``reports`` when they wait in vain.

        Raises:
            ValueError: where the folding is laid over another number of ranks, or where no process
                group is there: ``comm.rendezvous.join`` makes it.
        """
        if folding.world == 1:
            return cls.single(device)
        if not dist.is_initialized():
            raise ValueError(f"the layout is for {folding.world} ranks and this process is alone")
        if dist.get_world_size() != folding.world:
            text = f"the layout is for {folding.world} ranks and {dist.get_world_size()} run"
            raise ValueError(f"{text}; start as many as the layout has")
        world = cls(folding, dist.get_rank(), torch.device(device), time_out_s)
        store = own_connection(time_out_s)
        world._watch = HangWatch(world.recorder, store, world.rank, world.size, time_out_s, reports)
        limit = timedelta(seconds=PATIENCE_S)
        handle = dist.new_group(timeout=limit, backend="gloo", group_desc=HOST)
        assert isinstance(handle, dist.ProcessGroup), "every rank is in it"
        everyone = tuple(range(world.size))
        world._host = Group(HOST, everyone, world.rank, handle, world.recorder)
        world._make_all()
        world.recorder.clear()
        return world

    def group(self, kind: str) -> Group:
        """Return this rank's group of a kind; kinds of the same ranks share one, or two on NCCL.

        Raises:
            ValueError: for a kind that is none of ``SPOKEN`` and has none of their ranks.
        """
        found = self._by_kind.get(kind)
        if found is not None:
            return found
        raise ValueError(f"ranks speak over no kind of group {kind!r}, but {', '.join(SPOKEN)}")

    def stage_group(self, stages: Iterable[int]) -> Group:
        """Return the ranks of this pipeline on some stages, where weights held there are summed.

        Every rank calls it, in the same order: those on other stages too, which get a group that
        they have no use for.
        """
        wanted = tuple(sorted(set(stages)))
        if len(wanted) == 1:
            return Group(f"stage {wanted[0]}", (self.rank,), 0, None, self.recorder)
        if wanted not in self._by_stages:
            ends = wanted == (0, self.folding.sizes.pp - 1)
            name = EMBEDDING if ends else "stages " + ",".join(map(str, wanted))
            others = tuple(stage for stage in range(self.folding.sizes.pp) if stage not in wanted)
            inside = self.attention.pp in wanted
            mine = wanted if inside else others
            ranks = tuple(sorted(self.folding.on_stage(self.rank, stage) for stage in mine))
            # torch names a group that only its own ranks make by these ranks and by how many groups
            # the process has made, so all ranks have to make as many: two of each pipeline.
            self._by_stages[wanted] = (
                self._made(name, ranks) if inside else self._new(f"beside {name}", ranks)
            )
        return self._by_stages[wanted]

    def split(self, kind: str, inner: int) -> tuple[Group, Group]:
        """Cut this rank's group of a kind in two levels: (inner, outer).

        ``inner`` neighbours are an inner group; the ranks at one place of every inner group are an
        outer one. All ranks call it, in the same order; a second call finds the same groups.

        Raises:
            ValueError: where ``inner`` does not divide the group.
        """
        whole = self.group(kind)
        if whole.size % inner:
            raise ValueError(f"inner groups of {inner} ranks do not divide {kind}{whole.size}")
        first, place = whole.index // inner * inner, whole.index % inner
        return (
            self._made(f"{kind} inner {inner}", whole.ranks[first : first + inner], kind in BULK),
            self._made(f"{kind} outer {inner}", whole.ranks[place::inner], kind in BULK),
        )

    @property
    def beside(self) -> "World":
        """This world with groups of their own to experts, for a second thread of every rank.

        Operations of one group must be issued in one order on all its ranks, and those of two
        threads are in none. Every rank asks for it at the same place; the groups are made once.
        """
        if self.size == 1 or self._beside is not None:
            return self._beside or self
        world = self._beside = World(self.folding, self.rank, self.device, self.time_out_s)
        world.recorder, world._host, world._prefix = self.recorder, self._host, "second "
        world._kept = self._kept
        world._make_all(EXCHANGED)
        return world

    @property
    def on_host(self) -> Group:
        """All ranks, for tensors in host memory and for words of the first rank.

        They wait for each other longer than in other groups, ``PATIENCE_S``: the first rank does
        for all what one rank can do. Nothing of that occupies a device.
        """
        return self._host or self.group("world")

    def kept(
        self, key: Hashable, make: Callable[[], T], end: Callable[[], object] | None = None
    ) -> T:
        """Return what another package holds for these ranks: made once, also for ``beside``.

        ``end`` is called before the groups end, over which it was made.
        """
        if key not in self._kept:
            self._kept[key] = make(), end
        return self._kept[key][0]

    def __enter__(self) -> "World":
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        """Close; after a failed operation, note it on the error and find out who is absent."""
        if error is None:
            self.close()
        elif isinstance(error, RuntimeError) and self._watch is not None:
            if self.recorder.in_operation:
                error.add_note(IN_OPERATION)
            self._watch.explain()

    def close(self) -> None:
        """End all groups; nothing can be sent afterwards."""
        self.forget_groups()
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def forget_groups(self) -> None:
        """End what others keep for groups, and forget the groups; the ranks stay joined."""
        for _, end in self._kept.values():
            if end is not None:
                end()
        self._kept.clear()
        self._by_kind, self._by_ranks, self._by_stages = {}, {}, {}
        if self._watch is not None:
            self._watch.stop()

    def _make_all(self, spoken: Collection[str] = SPOKEN) -> None:
        """Make the groups of some kinds; the names of all kinds say what ranks they have."""
        named: dict[tuple[str, bool], list[str]] = {}
        for kind, first in self.folding.same().items():
            named.setdefault((first, kind in BULK and _ordered()), []).append(kind)
        for (first, bulk), kinds in named.items():
            if not set(spoken).isdisjoint(kinds):
                ranks = self.folding.group(first, self.rank)
                group = self._made("+".join(kinds), ranks, bulk)
                self._by_kind.update(dict.fromkeys(kinds, group))

    def _made(self, name: str, ranks: Ranks, bulk: bool = False) -> Group:
        """Make a group, or find the one of the same ranks."""
        key = bulk and _ordered(), ranks
        if key not in self._by_ranks:
            alone = Group(name, ranks, 0, None, self.recorder)
            self._by_ranks[key] = self._new(name, ranks, bulk) if len(ranks) > 1 else alone
        return self._by_ranks[key]

    def _new(self, name: str, ranks: Ranks, bulk: bool = False) -> Group:
        name = self._prefix + name
        handle = self._process_group(ranks, name, bulk)
        # NCCL runs what two ranks say to each other one after the other.
        back = self._process_group(ranks, name, bulk) if _ordered() else None
        group = Group(name, ranks, ranks.index(self.rank), handle, self.recorder, back)
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
        assert isinstance(handle, dist.ProcessGroup), "a rank makes only groups that it is in"
        return handle

    def _warm_up(self, group: Group) -> None:
        """Let a group talk once; neighbours in a pipeline and all pairs of a sequence too.

        The first message between two ranks blocks both on NCCL until they have made a communicator
        of their own. So pairs come in one order, and only their two ranks take part in each.
        """
        if group.size == 1:
            return
        with self.recorder.module("warm-up"):
            sum_(torch.zeros(1, device=self.device), group)
            kinds = {kind.split()[0] for kind in group.name.split("+")}
            if "pp" in kinds:
                for source, to in neighbours(group.size):
                    given = torch.zeros(1, device=self.device)
                    if group.index == source:
                        send(given, group.ranks[to], group).wait()
                    elif group.index == to:
                        receive(given, group.ranks[source], group).wait()
            for by in range(1, group.size if "cp" in kinds else 1):
                given, into = torch.zeros(2, 1, device=self.device).unbind()
                shift(given, into, by, group).wait()


def neighbours(ranks: int) -> tuple[tuple[int, int], ...]:
    """Return who sends to whom between neighbours in a ring, both ways, in an order for all.

    Pairs that share no rank stand together, so that they need not wait for each other.
    """
    places = sorted(range(ranks), key=lambda place: place % 2)
    both = [(place, (place + 1) % ranks) for place in places]
    return tuple(dict.fromkeys(way for one, other in both for way in ((one, other), (other, one))))


def _ordered() -> bool:
    """Return whether operations of one group run one after the other, whoever waits for them."""
    return dist.is_initialized() and dist.get_backend() == "nccl"


def _options(bulk: bool, limit: timedelta) -> Any:
    """Return what NCCL is told of a group: what a pass waits for goes first, bulk takes less."""
    backend = getattr(dist, "ProcessGroupNCCL", None)
    if backend is None or not _ordered():
        return None
    options = backend.Options(is_high_priority_stream=not bulk)
    options._timeout = limit  # torch warns of any other than the one that it is given beside
    if bulk:
        options.config.max_ctas = BULK_CTAS
    return options


def _queued() -> Callable[[], bool]:
    """Return what says whether the device has done all that this thread has queued so far."""
    if torch.cuda.is_current_stream_capturing():
        return lambda: True  # nothing is queued, and asking later would be an error of CUDA's
    event = torch.cuda.Event()
    event.record()
    return event.query
