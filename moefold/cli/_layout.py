"""A layout as ``moefold explain`` draws it: both grids, stages, experts, groups. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moefold.config.problems import Violation, describe
from moefold.config.records import plain
from moefold.mesh.config import Sizes
from moefold.mesh.folding import ATTENTION, EXPERTS, KINDS, Folding, Ranks
from moefold.mesh.grid import Grid
from moefold.mesh.legality import folding_violations, violations
from moefold.mesh.pipeline import Stages
from moefold.run import Run
from moefold.spec.decoder import Model, needs

ROWS, COLUMNS, GROUPS, RUNS = 16, 8, 4, 4
"""How much of a grid, of a kind's groups and of a group's ranks is shown."""
CELLS = {
    ATTENTION: (("pp", "dp"), ("cp", "tp")),
    EXPERTS: (("pp", "edp"), ("ep", "etp")),
}
"""Axes of the rows and the columns of each grid, the slowest first."""


@dataclass(frozen=True)
class Picture:
    """A layout over a number of ranks, as far as it can be drawn, and what is wrong with it."""

    sizes: Sizes
    world: int
    folding: Folding | None
    """None where the sizes do not fit the ranks."""
    stages: Stages | None
    """None where they are no legal pipeline of the model."""
    experts: tuple[tuple[int, ...], ...] | None
    """Ids of one layer's experts for each ep coordinate; None without experts or a fitting ep."""
    violations: tuple[Violation, ...]


def picture(run: Run, world: int | None = None) -> Picture:
    """Lay a run's layout, which may be illegal, over ``world`` ranks (default: the fewest)."""
    layout, sizes = run.layout, run.layout.split
    model = needs(run.decoder(), run.data.seq)
    found = violations(sizes, model, world, layout.order, layout.stages)
    world = sizes.smallest_world if world is None else world
    found = [item if item.path == ("world",) else item.under("layout") for item in found]
    fits = not folding_violations(sizes, world, layout.order)
    return Picture(
        sizes,
        world,
        Folding(sizes, world, layout.order) if fits else None,
        _stages(model, sizes, layout.stages),
        _experts(model, sizes),
        tuple(found),
    )


def _stages(model: Model, sizes: Sizes, text: str | None) -> Stages | None:
    count = sizes.pp * sizes.vpp
    if text is None:
        fits = count <= model.layers
        return Stages.balanced(sizes.pp, sizes.vpp, model.layers) if fits else None
    try:
        stages = Stages.parse(text)
    except ValueError:
        return None
    return None if stages.faults(count, model.mixtures) else stages


def _experts(model: Model, sizes: Sizes) -> tuple[tuple[int, ...], ...] | None:
    """Return which experts live at each coordinate of ep: neighbours together, equally many."""
    counts = {experts for experts in model.experts if experts % sizes.ep == 0}
    if not counts:
        return None
    each = min(counts) // sizes.ep
    return tuple(tuple(range(at * each, at * each + each)) for at in range(sizes.ep))


# ------------------------------------------------------------------------------- for programs


def facts(shown: Picture) -> dict[str, Any]:
    """Return everything about a layout: every kind of group with all its ranks too."""
    folding, stages, experts = shown.folding, shown.stages, shown.experts
    answer: dict[str, Any] = {"sizes": shown.sizes.text, "world": shown.world}
    answer["violations"] = [
        {
            "path": list(item.path),
            "value": plain(item.value),
            "rule": item.rule,
            "nearest": plain(item.nearest),
        }
        for item in shown.violations
    ]
    if folding is not None:
        answer |= {"order": folding.order, "dp": folding.dp, "edp": folding.edp}
        answer["grids"] = {name: dict(grid.axes) for name, grid in _grids(folding)}
        answer["groups"] = {kind: folding.groups(kind) for kind in KINDS}
        answer["same_groups"] = folding.same()
    if stages is not None:
        answer["stages"] = {"text": stages.text, "table": stages.table(shown.sizes.pp)}
    if experts is not None:
        answer["experts"] = experts
    return answer


# --------------------------------------------------------------------------------- for people


def show(shown: Picture, console: Console) -> None:
    """Print a layout: grids, stages, experts, kinds of groups, and what is wrong."""
    for title, table in _tables(shown):
        console.print()
        console.print(Text(title, style="bold"), soft_wrap=True)
        console.print(table)
    if shown.violations:
        console.print()
        console.print(Text(f"not legal: {shown.sizes} on {shown.world:,} ranks", style="bold red"))
    for line in (line for item in shown.violations for line in describe(item)):
        console.print(Text(line), soft_wrap=True)


def _tables(shown: Picture) -> Iterator[tuple[str, Table]]:
    """Yield what can be drawn, each with its title."""
    folding, stages, experts = shown.folding, shown.stages, shown.experts
    if folding is not None:
        for name, grid in _grids(folding):
            sizes = " ".join(f"{axis}{grid.sizes[axis]}" for axes in CELLS[name] for axis in axes)
            yield f"{name}: {sizes}", grid_table(name, grid)
    if stages is not None and shown.sizes.pp > 1:
        yield f"stages: {stages.text}", stage_table(stages, shown.sizes.pp)
    if experts is not None and shown.sizes.ep > 1:
        yield "experts of a layer, by slot", expert_table(experts)
    if folding is not None:
        title = f"groups of {folding.world:,} ranks, in the order {folding.order}"
        yield title, kind_table(folding)


def _grids(folding: Folding) -> list[tuple[str, Grid]]:
    return [(ATTENTION, folding.attention), (EXPERTS, folding.experts)]


def grid_table(name: str, grid: Grid) -> Table:
    """Return a grid with a rank in each cell; axes of size 1 are left out, and much in between."""
    table = _table()
    rows, columns = (_spots(grid, axes) for axes in CELLS[name])
    table.add_column()
    shown_columns = list(_some(columns, COLUMNS))
    for column in shown_columns:
        label = "…" if column is None else _label(column)
        table.add_column(label, justify="right", no_wrap=True)
    for row in _some(rows, ROWS):
        if row is None:
            table.add_row(*["…"] * (len(shown_columns) + 1), style="dim")
            continue
        cells = ["…" if c is None else str(grid.rank({**row, **c})) for c in shown_columns]
        table.add_row(Text(_label(row), style="bold"), *cells)
    return table


def _spots(grid: Grid, axes: Sequence[str]) -> list[dict[str, int]]:
    """Return every coordinate on some axes, the first axis the slowest."""
    spots: list[dict[str, int]] = [{}]
    for axis in axes:
        if grid.sizes[axis] > 1:
            spots = [{**spot, axis: i} for spot in spots for i in range(grid.sizes[axis])]
    return spots


def _label(spot: dict[str, int]) -> str:
    return " ".join(f"{axis}{at}" for axis, at in spot.items())


def _some(items: Sequence[Any], most: int) -> Iterator[Any]:
    """Yield items; where there are more than ``most``, the first, a gap (None), and the last."""
    if len(items) <= most:
        yield from items
        return
    yield from items[: most - 2]
    yield None
    yield items[-1]


def stage_table(stages: Stages, pp: int) -> Table:
    """Return what each rank of a pipeline computes, virtual stages side by side."""
    table = _table()
    table.add_column()
    dealt = stages.table(pp)
    for v in range(len(dealt[0])):
        table.add_column(f"virtual {v}" if len(dealt[0]) > 1 else "holds")
    for row in _some(list(enumerate(dealt)), ROWS):
        if row is None:
            table.add_row("…", style="dim")
            continue
        rank, parts = row
        table.add_row(Text(f"pp{rank}", style="bold"), *(_places(part) for part in parts))
    return table


def _places(stage: Sequence[Any]) -> str:
    said = []
    for kind, same in groupby(stage, key=lambda place: place.kind):
        numbers = [place.index for place in same]
        name = {"layer": "layers", "multi_token": "multi-token"}.get(kind, kind)
        numbered = kind in ("layer", "multi_token")
        said.append(f"{name} {ranks_text(tuple(numbers))}" if numbered else name)
    return ", ".join(said) or "nothing"


def expert_table(experts: Sequence[tuple[int, ...]]) -> Table:
    """Return which experts live at each coordinate of the expert-parallel axis."""
    table = _table(header=False)
    table.add_column()
    table.add_column()
    for row in _some(list(enumerate(experts)), ROWS):
        if row is None:
            table.add_row("…", style="dim")
            continue
        table.add_row(Text(f"ep{row[0]}", style="bold"), ranks_text(row[1]))
    return table


def kind_table(folding: Folding) -> Table:
    """Return every kind of group: what it is for, how large, how many, and the first ones."""
    table = _table()
    for name, side in (("kind", "left"), ("size", "right"), ("number", "right")):
        table.add_column(name, justify=side, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("ranks")
    table.add_column("for", style="dim")
    for kind, first in folding.same().items():
        groups = folding.groups(kind)
        ranks = f"as {first}" if first != kind else groups_text(groups)
        about = KINDS[kind].purpose
        table.add_row(Text(kind, "bold"), str(len(groups[0])), f"{len(groups):,}", ranks, about)
    return table


def groups_text(groups: Sequence[Ranks]) -> str:
    """Write groups shortly: ``0–3 | 4–7 | … | 28–31``; alone, each rank by itself."""
    if len(groups[0]) == 1:
        return "each rank alone"
    return " | ".join("…" if g is None else ranks_text(g) for g in _some(groups, GROUPS))


def ranks_text(ranks: Ranks) -> str:
    """Write ascending numbers shortly: ``0–3 8–11``, ``0 4 … 28`` where evenly spaced."""
    first, second, last = ranks[0], ranks[min(1, len(ranks) - 1)], ranks[-1]
    step = second - first
    if step > 1 and len(ranks) > RUNS and list(ranks) == list(range(first, last + 1, step)):
        return f"{first} {second} … {last}"
    spans = [
        [rank for _, rank in same]
        for _, same in groupby(enumerate(ranks), key=lambda item: item[1] - item[0])
    ]
    texts = [str(s[0]) if len(s) == 1 else f"{s[0]}–{s[-1]}" for s in spans]
    return " ".join("…" if text is None else text for text in _some(texts, RUNS))


def _table(header: bool = True) -> Table:
    return Table(box=None, pad_edge=False, show_header=header, header_style="cyan")
