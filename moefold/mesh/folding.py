"""Two grids over one order of ranks: attention ``(pp, dp, cp, tp)``, experts ``(pp, edp, ep,
etp)``. Only pp must agree, so expert parallelism may span attention's ranks of tp, cp and dp (MoE
Parallel Folding, arXiv 2504.14960). Pure arithmetic, without processes.
"""

from typing import NamedTuple

from moefold.config.errors import RunError
from moefold.mesh.config import ORDERS, Order, Sizes
from moefold.mesh.grid import Grid, Offsets, Runs, offsets_of, shifted
from moefold.mesh.legality import folding_violations

Ranks = tuple[int, ...]


class GroupKind(NamedTuple):
    """A kind of group: its grid, the axes that it spans, and its purpose."""

    grid: str
    axes: tuple[str, ...]
    purpose: str
    ends: bool = False
    """Whether groups have only the first and the last rank along the axes."""

    def runs(self, grid: Grid) -> Runs:
        """Return the strides and sizes that the groups span; equal for kinds with equal groups."""
        runs = grid.runs(self.axes)
        if not self.ends:
            return runs
        # The first and the last rank of each run.
        return tuple((stride * (size - 1), 2) for stride, size in runs)


ATTENTION = "attention"
EXPERTS = "experts"
EMBEDDING = "embedding"
GROUP_KINDS: dict[str, GroupKind] = {
    "tp": GroupKind(ATTENTION, ("tp",), "slices of dense weights"),
    "cp": GroupKind(ATTENTION, ("cp",), "pieces of one sequence"),
    "dp": GroupKind(ATTENTION, ("dp",), "different sequences"),
    "pp": GroupKind(ATTENTION, ("pp",), "stages of one pipeline"),
    "tp_cp": GroupKind(ATTENTION, ("tp", "cp"), "all pieces of one sequence"),
    "dp_cp": GroupKind(ATTENTION, ("cp", "dp"), "copies of dense weights"),
    "tp_dp": GroupKind(ATTENTION, ("tp", "dp"), "one piece of every sequence"),
    "tp_pp": GroupKind(ATTENTION, ("tp", "pp"), "one copy of dense weights"),
    "tp_cp_pp": GroupKind(ATTENTION, ("tp", "cp", "pp"), "all ranks that a sequence passes"),
    "ep": GroupKind(EXPERTS, ("ep",), "all experts of a layer"),
    "etp": GroupKind(EXPERTS, ("etp",), "slices of an expert"),
    "edp": GroupKind(EXPERTS, ("edp",), "copies of expert weights"),
    "tp_ep": GroupKind(EXPERTS, ("etp", "ep"), "all slices of all experts"),
    "ep_edp": GroupKind(EXPERTS, ("ep", "edp"), "every copy of every expert"),
    "tp_ep_pp": GroupKind(EXPERTS, ("etp", "ep", "pp"), "one copy of expert weights"),
    "stage": GroupKind(ATTENTION, ("tp", "cp", "dp"), "all ranks of one stage"),
    "world": GroupKind(ATTENTION, ("tp", "cp", "dp", "pp"), "all ranks"),
    EMBEDDING: GroupKind(ATTENTION, ("pp",), "first and last stage", ends=True),
}
"""All kinds of groups by name. In ``tp_ep``, tp is the experts' tensor axis, etp."""


class AttentionCoordinates(NamedTuple):
    """A rank's coordinates in the attention grid."""

    pp: int
    dp: int
    cp: int
    tp: int


class ExpertCoordinates(NamedTuple):
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
        violations = folding_violations(sizes, world, order)
        if violations:
            raise RunError(violations, source=f"layout {str(sizes)!r}")
        self.sizes = sizes
        self.world = world
        self.order = order
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
        attention_axes = tuple((name, axes[name]) for name in names if name in axes)
        self.attention = Grid(attention_axes)
        self.experts = Grid(tuple(expert_axes[name] for name in names if name in expert_axes))

    def attention_coordinates(self, rank: int) -> AttentionCoordinates:
        """Return a rank's coordinates in the attention grid."""
        return AttentionCoordinates(**self.attention.coordinates(self._check_rank(rank)))

    def expert_coordinates(self, rank: int) -> ExpertCoordinates:
        """Return a rank's coordinates in the expert grid."""
        return ExpertCoordinates(**self.experts.coordinates(self._check_rank(rank)))

    def rank_on_stage(self, rank: int, stage: int) -> int:
        """Return the rank of the same pipeline on another stage."""
        return self.attention.rank(self.attention_coordinates(rank)._replace(pp=stage)._asdict())

    def groups(self, kind: str) -> tuple[Ranks, ...]:
        """Return all groups of a kind, sorted by smallest rank; ranks in a group ascend.

        Raises:
            ValueError: if there is no such kind.
        """
        grid, axes, offsets = self._layout_of(kind)
        return tuple([shifted(offsets, start) for start in grid.starts(axes)])

    def group_count(self, kind: str) -> int:
        """Return the number of groups of a kind."""
        grid, axes, _ = self._layout_of(kind)
        return len(grid.starts(axes))

    def some_groups(self, kind: str, most: int) -> tuple[Ranks | None, ...]:
        """Return the first groups of a kind, None for a gap, and the last, ``most`` in all."""
        grid, axes, offsets = self._layout_of(kind)
        starts = list(grid.starts(axes))
        shown: list[int | None] = list(starts)
        if len(starts) > most:
            shown = [*starts[: most - 2], None, starts[-1]]
        return tuple(None if start is None else shifted(offsets, start) for start in shown)

    def group(self, kind: str, rank: int) -> Ranks:
        """Return a rank's group of a kind, without computing the others.

        For the embedding group it is empty on ranks of middle stages.
        """
        grid, axes, offsets = self._layout_of(kind)
        ranks = shifted(offsets, grid.start(self._check_rank(rank), axes))
        return ranks if rank in ranks else ()

    def first_equal_kinds(self) -> dict[str, str]:
        """Map each kind to the first kind with equal groups, possibly itself.

        Two kinds have all groups in common or none: the groups of any kind are shifted copies of
        the one with rank 0, which determines them.
        """
        first: dict[Offsets, str] = {}
        return {kind: first.setdefault(self._layout_of(kind)[2], kind) for kind in GROUP_KINDS}

    def _layout_of(self, kind: str) -> tuple[Grid, tuple[str, ...], Offsets]:
        """Return a kind's grid and axes, and the offsets of a group's ranks from its smallest."""
        group_kind = GROUP_KINDS.get(kind)
        if group_kind is None:
            raise ValueError(
                f"no kind of group is called {kind!r}; there are {', '.join(GROUP_KINDS)}"
            )
        grid = self.attention if group_kind.grid == ATTENTION else self.experts
        return grid, group_kind.axes, offsets_of(group_kind.runs(grid))

    def _check_rank(self, rank: int) -> int:
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank}: ranks run from 0 to {self.world - 1}")
        return rank

    def __repr__(self) -> str:
        """Return sizes, ranks and order."""
        return f"Folding({str(self.sizes)!r}, {self.world}, {self.order!r})"
