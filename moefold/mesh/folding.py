"""One order of ranks and two grids over it: attention ``(pp, dp, cp, tp)``, experts ``(pp, edp,
ep, etp)``. Only pp must agree, so that expert parallelism may span the ranks of tp, cp and dp of
attention (MoE Parallel Folding, arXiv 2504.14960). Pure arithmetic, without processes.
"""

from typing import NamedTuple

from moefold.config.errors import RunError
from moefold.mesh.config import ORDERS, Order, Sizes
from moefold.mesh.grid import Grid, Offsets, Runs, offsets_of, shifted
from moefold.mesh.legality import folding_violations

Ranks = tuple[int, ...]


class Kind(NamedTuple):
    """A kind of group: its grid, the axes that it spans, and its purpose."""

    grid: str
    axes: tuple[str, ...]
    purpose: str
    ends: bool = False
    """Whether it has only the first and the last rank along the axes."""

    def runs(self, grid: Grid) -> Runs:
        """Return the strides and sizes that its groups span; equal for kinds with equal groups."""
        runs = grid.runs(self.axes)
        return tuple((stride * (size - 1), 2) for stride, size in runs) if self.ends else runs


ATTENTION, EXPERTS = "attention", "experts"
EMBEDDING = "embedding"
KINDS: dict[str, Kind] = {
    "tp": Kind(ATTENTION, ("tp",), "slices of dense weights"),
    "cp": Kind(ATTENTION, ("cp",), "pieces of one sequence"),
    "dp": Kind(ATTENTION, ("dp",), "different sequences"),
    "pp": Kind(ATTENTION, ("pp",), "stages of one pipeline"),
    "tp_cp": Kind(ATTENTION, ("tp", "cp"), "all pieces of one sequence"),
    "dp_cp": Kind(ATTENTION, ("cp", "dp"), "copies of dense weights"),
    "tp_dp": Kind(ATTENTION, ("tp", "dp"), "one piece of every sequence"),
    "tp_pp": Kind(ATTENTION, ("tp", "pp"), "one copy of dense weights"),
    "tp_cp_pp": Kind(ATTENTION, ("tp", "cp", "pp"), "all ranks that a sequence passes"),
    "ep": Kind(EXPERTS, ("ep",), "all experts of a layer"),
    "etp": Kind(EXPERTS, ("etp",), "slices of an expert"),
    "edp": Kind(EXPERTS, ("edp",), "copies of expert weights"),
    "tp_ep": Kind(EXPERTS, ("etp", "ep"), "all slices of all experts"),
    "ep_edp": Kind(EXPERTS, ("ep", "edp"), "every copy of every expert"),
    "tp_ep_pp": Kind(EXPERTS, ("etp", "ep", "pp"), "one copy of expert weights"),
    "stage": Kind(ATTENTION, ("tp", "cp", "dp"), "all ranks of one stage"),
    "world": Kind(ATTENTION, ("tp", "cp", "dp", "pp"), "all ranks"),
    EMBEDDING: Kind(ATTENTION, ("pp",), "first and last stage", ends=True),
}
"""Every kind of group by name. In ``tp_ep``, tp is the experts' tensor axis, etp."""


class AttentionSpot(NamedTuple):
    """A rank's coordinates in the attention grid."""

    pp: int
    dp: int
    cp: int
    tp: int


class ExpertSpot(NamedTuple):
    """A rank's coordinates in the expert grid."""

    pp: int
    edp: int
    ep: int
    etp: int


class Folding:
    """Parallel sizes applied to a number of ranks; groups are computed on demand."""

    def __init__(self, sizes: Sizes, world: int, order: Order = ORDERS[0]) -> None:
        """Apply ``sizes`` to ``world`` ranks.

        Args:
            sizes: size of each axis; the data-parallel sizes follow.
            world: number of ranks.
            order: axes, fastest first. With pp before dp both grids must agree on pp.

        Raises:
            RunError: a ``ValueError`` with every violation and the nearest legal values.
        """
        broken = folding_violations(sizes, world, order)
        if broken:
            raise RunError(broken, source=f"layout {str(sizes)!r}")
        self.sizes, self.world, self.order = sizes, world, order
        self.dp = world // (sizes.pp * sizes.cp * sizes.tp)
        self.edp = world // (sizes.pp * sizes.ep * sizes.etp)
        axes = {"tp": sizes.tp, "cp": sizes.cp, "dp": self.dp, "pp": sizes.pp}
        expert_axes = {
            "tp": ("etp", sizes.etp),
            "ep": ("ep", sizes.ep),
            "dp": ("edp", self.edp),
            "pp": ("pp", sizes.pp),
        }
        names = order.split("-")
        self.attention = Grid(tuple((name, axes[name]) for name in names if name in axes))
        self.experts = Grid(tuple(expert_axes[name] for name in names if name in expert_axes))

    def attention_spot(self, rank: int) -> AttentionSpot:
        """Return a rank's coordinates in the attention grid."""
        return AttentionSpot(**self.attention.coordinates(self._inside(rank)))

    def expert_spot(self, rank: int) -> ExpertSpot:
        """Return a rank's coordinates in the expert grid."""
        return ExpertSpot(**self.experts.coordinates(self._inside(rank)))

    def on_stage(self, rank: int, stage: int) -> int:
        """Return the rank of the same pipeline on another stage."""
        return self.attention.rank(self.attention_spot(rank)._replace(pp=stage)._asdict())

    def groups(self, kind: str) -> tuple[Ranks, ...]:
        """Return all groups of a kind, sorted by smallest rank; ranks in a group ascend.

        Raises:
            ValueError: if there is no such kind.
        """
        grid, axes, offsets = self._parts(kind)
        return tuple([shifted(offsets, start) for start in grid.starts(axes)])

    def group(self, kind: str, rank: int) -> Ranks:
        """Return a rank's group of a kind, without computing the others.

        For the embedding group it is empty on ranks of middle stages.
        """
        grid, axes, offsets = self._parts(kind)
        ranks = shifted(offsets, grid.start(self._inside(rank), axes))
        return ranks if rank in ranks else ()

    def same(self) -> dict[str, str]:
        """Return for each kind the first kind with equal groups, possibly itself.

        Two kinds have all groups in common or none: the groups of any kind are shifted copies of
        the one with rank 0, which determines them.
        """
        first: dict[Offsets, str] = {}
        return {kind: first.setdefault(self._parts(kind)[2], kind) for kind in KINDS}

    def _parts(self, kind: str) -> tuple[Grid, tuple[str, ...], Offsets]:
        """Return a kind's grid and axes, and the offsets of a group's ranks from its smallest."""
        found = KINDS.get(kind)
        if found is None:
            raise ValueError(f"no kind of group is called {kind!r}; there are {', '.join(KINDS)}")
        grid = self.attention if found.grid == ATTENTION else self.experts
        return grid, found.axes, offsets_of(found.runs(grid))

    def _inside(self, rank: int) -> int:
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank}: ranks run from 0 to {self.world - 1}")
        return rank

    def __repr__(self) -> str:
        """Return sizes, ranks and order."""
        return f"Folding({str(self.sizes)!r}, {self.world}, {self.order!r})"
