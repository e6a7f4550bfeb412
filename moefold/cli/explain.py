"""``moefold explain``: show every value of a run, its origin, and derived figures.

Shows every value of a run with its origin (file and line, base, override or default), then figures
derived from them, such as parameters and FLOPs, and the ranks and groups of the layout. Needs no
data and no GPU.

exit status:
  0  success
  1  with --graphs, a step has operators that no CUDA graph can capture
  2  wrong input, or a layout that is not legal
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from moefold.cli._common import (
    WRONG_INPUT,
    add_json,
    add_layout,
    add_run,
    add_world,
    overrides_of,
    plain_table,
    print_json,
)
from moefold.config.base import to_dict
from moefold.config.dump import identity
from moefold.config.errors import FieldPath, RunError, Violation, dotted, format_violation
from moefold.config.load import LoadedRecord
from moefold.config.merge import ValueOrigin
from moefold.config.plugins import import_plugins
from moefold.config.schema import json_schema
from moefold.mesh.config import MAX_RANKS, ORDERS, Sizes
from moefold.mesh.folding import ATTENTION, EXPERTS, GROUP_KINDS, Folding, Ranks
from moefold.mesh.grid import Grid
from moefold.mesh.legality import folding_violations, size_violations
from moefold.mesh.pipeline import StageMapping, StagePart, Stages
from moefold.planner.count import count
from moefold.planner.notes import folder_notes, run_notes
from moefold.run import IDENTITY, RECIPES, Run, load_run_with_origins
from moefold.training import formatting

FITTING_LAYOUT: dict[FieldPath, str] = {
    ("layout", "sizes"): '""',
    ("layout", "order"): ORDERS[0],
    ("layout", "stages"): "null",
}
"""The layout fields that may not fit a model, each with a value that fits every model."""
MAX_ROWS = 16
MAX_COLUMNS = 8
MAX_GROUPS = 4
MAX_RUNS = 4
"""Maximum rows of a table, columns of a grid, groups of a kind, and runs of ranks shown."""
MAX_LISTED_RANKS = 100_000
"""Ranks up to which ``--json`` lists every group."""
GRID_AXES = {ATTENTION: (("pp", "dp"), ("cp", "tp")), EXPERTS: (("pp", "edp"), ("ep", "etp"))}
"""Axes of the rows and columns of each grid, the slowest first."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_run(parser, "train.steps=100", optional=True)
    add_layout(parser)
    add_world(parser)
    parser.add_argument("--given", action="store_true", help="leave out defaults")
    parser.add_argument(
        "--schema",
        action="store_true",
        help="only print the JSON schema of run files, with which editors complete and check them; "
        "with RUN, including the kinds that its plug-ins register",
    )
    parser.add_argument(
        "--graphs",
        action="store_true",
        help="also trace a step of the run's model, shrunk, and list the operators that no CUDA "
        "graph can capture, with file and line, and the memory that graphs need",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    if args.source is None and not args.schema:
        raise ValueError("name a RUN, or give --schema for the JSON schema of run files")
    loaded = None if args.source is None else _load(args)
    if loaded is None or args.schema:
        print_json(json_schema(Run))
        return 0
    run = loaded.record
    derived = derived_values(loaded)
    layout = LayoutReport.of(run, args.world)
    notes = [*run_notes(run), *folder_notes(run)]
    report = _graph_report(run, layout.world) if args.graphs and not layout.violations else None
    if args.json:
        origins = {dotted(path): str(origin) for path, origin in loaded.origins.items()}
        answer = {"run": to_dict(run), "origins": origins, "derived": derived}
        graphs = {} if report is None else {"graphs": report}
        print_json(answer | graphs | {"layout": layout.to_json(), "notes": notes})
    else:
        console = Console()
        tree = Tree(Text(run.name, style="bold"))
        _add_values(tree, to_dict(run), (), loaded.origins, args.given)
        console.print(tree, soft_wrap=True)
        console.print(Text("derived values", style="bold"))
        rows = list(_derived_rows(run, derived))
        console.print(_table(["", ""], rows, most=len(rows)))
        if args.layout is not None or args.world is not None or layout.sizes != Sizes():
            layout.print(console)
        for note in notes:
            console.print(Text(note, style="yellow"), soft_wrap=True)
        _print_graph_report(console, report)
    return WRONG_INPUT if layout.violations else int(bool(report and report["reads"]))


def _load(args: argparse.Namespace) -> LoadedRecord[Run]:
    """Load the run; keep the layout of ``--layout`` even if it is illegal for the model."""
    overrides = overrides_of(args)
    try:
        return load_run_with_origins(args.source, overrides)
    except RunError as error:
        if args.layout is None or any(
            item.path not in FITTING_LAYOUT or item.id != "relation" for item in error.violations
        ):
            raise
        layout = error.data["layout"]
    Sizes.parse(layout["sizes"])
    fitting = (f"{dotted(path)}={value}" for path, value in FITTING_LAYOUT.items())
    loaded = load_run_with_origins(args.source, [*args.overrides, *fitting])
    kept = {str(path[-1]): layout[path[-1]] for path in FITTING_LAYOUT if path[-1] in layout}
    record = loaded.record.layout.model_copy(update=kept)
    origins = {**loaded.origins, ("layout", "sizes"): ValueOrigin("override", overrides[-1])}
    run = loaded.record.model_copy(update={"layout": record})
    return replace(loaded, record=run, origins=origins)


def _graph_report(run: Run, world: int) -> dict[str, Any]:
    """Return the operators that no graph can capture, and why graphs are illegal in the layout."""
    from moefold.planner.plan import graph_bytes
    from moefold.proof.capture import find_capture_blockers
    from moefold.proof.verify import cases_of

    (case,) = cases_of(run, world=world, as_run=True)
    operators = find_capture_blockers(case)
    refused = dict[str, list[str]]()
    static = dict[str, list[float]]()
    for kind in ("partial", "step"):
        layout = run.layout.model_copy(update={"graphs": kind})
        broken = layout.violations(run.needs)
        refused[kind] = [v.rule for v in broken if v.path in (("graphs",), ("zero",))]
        with suppress(ValueError):  # the planner does not know the run
            if not refused[kind]:
                static[kind] = graph_bytes(run.model_copy(update={"layout": layout}), world)
    return {
        "reads": [{**read._asdict(), "times": times} for read, times in operators.reads.items()],
        "ended": operators.failed_at,
        "refused": refused["step"],
        "static_bytes": static,
    }


def _print_graph_report(console: Console, report: Mapping[str, Any] | None) -> None:
    if report is None:
        return
    console.print(Text("\noperators of a step that no CUDA graph can capture", style="bold"))
    rows = [(str(read["times"]), read["operator"], read["at"]) for read in report["reads"]]
    if rows:
        console.print(_table(["times", "operator", "at"], rows, right=["times"], most=len(rows)))
    else:
        console.print("none: no operator reads a value on the host")
    if report["ended"]:
        text = f"the trace ended at {report['ended']}, which needs values of tensors"
        console.print(Text(text), soft_wrap=True)
    for kind, stages in report["static_bytes"].items():
        sizes = ", ".join(formatting.size(n_bytes) for n_bytes in stages)
        text = f"layout.graphs: {kind} needs {sizes} for inputs and outputs"
        console.print(Text(text + (" of each stage" if len(stages) > 1 else "")), soft_wrap=True)
    for rule in report["refused"]:
        console.print(Text(f"layout.graphs: step is not legal: {rule}"), soft_wrap=True)


# --------------------------------------------------------------------------- values and origins


def _add_values(
    node: Tree, data: Any, path: FieldPath, origins: Mapping[FieldPath, ValueOrigin], given: bool
) -> None:
    """Add raw data to a tree, each value with its origin; ``given`` leaves defaults out."""
    items = data.items() if isinstance(data, Mapping) else enumerate(data)
    for key, value in items:
        key_path = (*path, key)
        inside = [origin for leaf, origin in origins.items() if leaf[: len(key_path)] == key_path]
        if given and all(origin.kind == "default" for origin in inside):
            continue
        name = f"[{key}]" if isinstance(key, int) else str(key)
        nested = isinstance(value, list) and any(isinstance(v, list | Mapping) for v in value)
        if nested or (isinstance(value, Mapping) and value):
            _add_values(node.add(Text(name, style="cyan")), value, key_path, origins, given)
        else:
            text = value if isinstance(value, str) else ""
            text = text or json.dumps(value, ensure_ascii=False)
            origin = inside[0] if inside else ValueOrigin("default")
            where = origin.where.removeprefix(f"{RECIPES}/")  # recipes are shown by name
            recipe = f"recipe {where.replace('.yaml:', ', line ')}"
            origin_text = str(origin) if where == origin.where else recipe
            style = "dim" if origin.kind == "default" else "bold"
            line = Text.assemble((name, "cyan"), ": ", (text, style), (f"   {origin_text}", "dim"))
            node.add(line)


# ----------------------------------------------------------------------------- what follows


def derived_values(loaded: LoadedRecord[Run]) -> dict[str, Any]:
    """Return figures derived from a run's values: sizes, FLOPs, tokens, learning rates."""
    run = loaded.record
    decoder = run.decoder
    train = run.train
    counts = count(decoder)
    seq = run.data.seq
    tokens = train.batch * seq
    flops = counts.flops_per_token(seq, causal=True)
    in_all = train.sizes(seq).before(train.steps) * seq
    places = {"first step": 0, "half way": train.steps // 2, "last step": train.steps - 1}
    schedule = run.optim.schedule_lr
    factors = {name: schedule.factor(step, train.steps) for name, step in places.items()}
    lr = {name: run.optim.lr * factor for name, factor in factors.items()}
    layers = []
    first = 0
    for block, same in groupby(decoder.blocks):
        last = first + len(list(same)) - 1
        layers.append({"first": first, "last": last, **to_dict(block)})
        first = last + 1
    return {
        "identity": identity(run, import_plugins(run.uses), only=IDENTITY),
        "layers": layers,
        "vocabulary": decoder.vocab,
        "parameters": counts.parameters,
        "active_parameters": counts.active_parameters,
        "parts": {name: p.parameters for name, p in counts.parts.items() if p.parameters},
        "flops_per_token": flops,
        "flops_per_token_full_attention": counts.flops_per_token(seq, causal=False),
        "tokens_per_step": tokens,
        "tokens_in_all": in_all,
        "flops_in_all": in_all * flops,
        "micro_batches_per_step": train.batch // train.micro_batch,
        "lr": lr,
        "evaluation_sets": list(run.data.evaluation_sets),
        "layout": str(run.layout.split),
        "smallest_world": run.layout.split.smallest_world,
    }


def _derived_rows(run: Run, facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for span in facts["layers"]:
        numbers = range(span["first"], span["last"] + 1)
        yield _format_layers(numbers), f"attention {_format_record(span['attention'])}"
        yield "", f"ffn {_format_record(span['ffn'])}"
    total = facts["parameters"]
    active = facts["active_parameters"]
    percent = 100 * active / total
    yield "parameters", f"{total:,}; {active:,} active per token ({percent:.1f} %)"
    parts = [f"{name} {formatting.count(number)}" for name, number in facts["parts"].items()]
    yield "", ", ".join(parts)
    causal = facts["flops_per_token"]
    full = facts["flops_per_token_full_attention"]
    flops = f"{formatting.si(causal)}FLOP forward and backward"
    yield "one token", f"{flops} ({formatting.si(full)}FLOP with full attention)"
    batches = formatting.plural(facts["micro_batches_per_step"], "micro-batch", "es")
    yield "one step", f"{facts['tokens_per_step']:,} tokens in {batches}"
    tokens = formatting.count(facts["tokens_in_all"])
    whole = f"{tokens} tokens, {formatting.si(facts['flops_in_all'])}FLOP"
    yield "the run", f"{formatting.plural(run.train.steps, 'step')}: {whole}"
    rates = [f"{name} {rate:.3g}" for name, rate in facts["lr"].items()]
    yield "lr", ", ".join(rates)
    yield "held out", ", ".join(facts["evaluation_sets"]) or "nothing"
    least = formatting.plural(facts["smallest_world"], "rank")
    yield "layout", f"{facts['layout']}; at least {least}"
    yield "identity", facts["identity"][:16]


def _format_record(data: Mapping[str, Any]) -> str:
    """Format a record in one line, its kind first, without fields that are None or false."""
    parts = [str(data["kind"])] if "kind" in data else []
    for key, value in data.items():
        if isinstance(value, Mapping):
            parts.append(f"{key} ({_format_record(value)})")
        elif isinstance(value, list):
            items = [_format_record(v) if isinstance(v, Mapping) else str(v) for v in value]
            parts.append(f"{key} [{'; '.join(items)}]")
        elif key != "kind" and value not in (None, False):
            parts.append(key if value is True else f"{key} {value}")
    return " ".join(parts)


# ------------------------------------------------------------------------------- the layout


@dataclass(frozen=True)
class LayoutReport:
    """A layout over a number of ranks, as far as it is legal, and its violations."""

    sizes: Sizes
    world: int
    folding: Folding | None
    """None if the sizes do not fit the number of ranks."""
    stages: Stages | None
    """None if the model cannot be split into them."""
    way: StageMapping
    """The assignment of stages to ranks."""
    experts: tuple[Ranks, ...] | None
    """Ids of one layer's experts for each ep coordinate; None without experts or a legal ep."""
    violations: tuple[Violation, ...]

    @classmethod
    def of(cls, run: Run, world: int | None = None) -> "LayoutReport":
        """Describe a run's layout, legal or not (default ``world``: the minimum)."""
        layout = run.layout
        sizes = run.layout.split
        if max(sizes.smallest_world, sizes.vpp) > MAX_RANKS:
            raise ValueError(f"layout {sizes.text!r}: must fit at most {MAX_RANKS:,} ranks")
        model = run.needs
        count = sizes.pp * sizes.vpp
        violations = size_violations(sizes, model, world, layout.order, layout.stages)
        world = sizes.smallest_world if world is None else world
        fits = not folding_violations(sizes, world, layout.order)
        stages = None
        with suppress(ValueError):
            if layout.stated_stages is not None or count <= model.layers:
                stages = layout.stages_of(run.decoder)
        if stages is not None and stages.broken_rules(count, model.moe_layers, model.multi_token):
            stages = None
        local = [number // sizes.ep for number in model.experts if number % sizes.ep == 0]
        experts = None
        if local:
            fewest = min(local)
            starts = range(0, sizes.ep * fewest, fewest)
            experts = tuple(tuple(range(start, start + fewest)) for start in starts)
        placed = tuple(v if v.path == ("world",) else v.under("layout") for v in violations)
        folding = Folding(sizes, world, layout.order) if fits else None
        way = layout.resolved_schedule.stage_mapping
        return cls(sizes, world, folding, stages, way, experts, placed)

    def to_json(self) -> dict[str, Any]:
        """Return everything for ``--json``, including the ranks of every group."""
        folding = self.folding
        stages = self.stages
        answer: dict[str, Any] = {"sizes": self.sizes.text, "world": self.world}
        answer["violations"] = []
        for violation in self.violations:
            facts = {"path": list(violation.path), "value": to_dict(violation.value)}
            facts |= {"rule": violation.rule, "nearest": to_dict(violation.nearest)}
            answer["violations"].append(facts)
        if folding is not None:
            grids = {ATTENTION: folding.attention, EXPERTS: folding.experts}
            answer |= {"order": folding.order, "dp": folding.dp, "edp": folding.edp}
            answer["grids"] = {name: dict(grid.axes) for name, grid in grids.items()}
            listed = self.world <= MAX_LISTED_RANKS
            groups = {kind: folding.groups(kind) for kind in GROUP_KINDS} if listed else None
            answer["groups"] = groups
            answer["same_groups"] = folding.first_equal_kinds()
        if stages is not None:
            answer["stages"] = {"text": stages.text, "table": stages.table(self.sizes.pp, self.way)}
        if self.experts is not None:
            answer["experts"] = self.experts
        return answer

    def print(self, console: Console) -> None:
        """Print the layout: grids, stages, experts, kinds of groups, and violations."""
        for title, table in self._tables():
            console.print(Text(f"\n{title}", style="bold"), soft_wrap=True)
            console.print(table)
        if self.violations:
            text = f"\nnot legal: {self.sizes} on {self.world:,} ranks"
            console.print(Text(text, style="bold red"))
        for line in (line for item in self.violations for line in format_violation(item)):
            console.print(Text(line), soft_wrap=True)

    def _tables(self) -> Iterator[tuple[str, Table]]:
        """Yield the available tables, each with its title."""
        folding = self.folding
        stages = self.stages
        sizes = self.sizes
        if folding is not None:
            yield _grid_table(ATTENTION, folding.attention)
            yield _grid_table(EXPERTS, folding.experts)
        if stages is not None and sizes.pp > 1:
            by_rank = stages.table(sizes.pp, self.way)
            titles = [f"virtual {v}" for v in range(sizes.vpp)] if sizes.vpp > 1 else ["holds"]
            rows = [(f"pp{rank}", *map(_format_stage, parts)) for rank, parts in enumerate(by_rank)]
            yield f"stages: {stages.text}", _table(["", *titles], rows)
        if self.experts is not None and sizes.ep > 1:
            rows = [(f"ep{at}", format_ranks(ids)) for at, ids in enumerate(self.experts)]
            yield "experts of a layer, by expert-parallel rank", _table(["", ""], rows)
        if folding is not None:
            title = f"groups of {folding.world:,} ranks, in the order {folding.order}"
            yield title, _group_table(folding)


def _table(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[str] = (),
    most: int = MAX_ROWS,
) -> Table:
    """Return a table whose first column names the rows; rows beyond ``most`` are abridged."""
    shown = [["…"] * len(titles) if row is None else row for row in _abridge(rows, most)]
    table = plain_table(*titles, right=right, header=any(titles), rows=shown)
    table.columns[0].style = "bold"
    table.columns[0].no_wrap = True
    return table


def _grid_table(name: str, grid: Grid) -> tuple[str, Table]:
    """Return a grid's title and table of ranks; axes of size 1 are omitted."""
    down, across = GRID_AXES[name]
    title = " ".join(f"{axis}{grid.sizes[axis]}" for axis in (*down, *across))

    def place(rank: int | None, axes: Sequence[str]) -> str:
        longer = [axis for axis in axes if grid.sizes[axis] > 1]
        if rank is None:
            return "…"
        return " ".join(f"{axis}{grid.coordinate(rank, axis)}" for axis in longer)

    columns = list(_abridge(grid.offsets(across), MAX_COLUMNS))
    titles = [place(column, across) for column in columns]
    rows = []
    for row in _abridge(grid.offsets(down), MAX_ROWS):
        gap = row is None
        ranks = ("…" if gap or column is None else str(row + column) for column in columns)
        rows.append((place(row, down), *ranks))
    return f"{name}: {title}", _table(["", *titles], rows, right=titles)


def _group_table(folding: Folding) -> Table:
    """Return a table of the kinds of groups: size, number, first groups, purpose."""
    rows = []
    for kind, first in folding.first_equal_kinds().items():
        groups = folding.some_groups(kind, MAX_GROUPS)
        ranks = f"same as {first}" if first != kind else format_groups(groups)
        size = 0 if groups[0] is None else len(groups[0])
        figures = str(size), f"{folding.group_count(kind):,}"
        rows.append((kind, *figures, ranks, GROUP_KINDS[kind].purpose))
    titles = ("kind", "size", "number", "ranks", "for")
    table = _table(titles, rows, right=("size", "number"), most=len(rows))
    table.columns[-1].style = "dim"
    return table


def _abridge(items: Sequence[Any], most: int) -> Iterator[Any]:
    """Yield items; if more than ``most``, the first ones, None for a gap, and the last."""
    if len(items) <= most:
        yield from items
        return
    yield from items[: most - 2]
    yield None
    yield items[-1]


def _format_stage(stage: Sequence[StagePart]) -> str:
    """Format the content of a stage: ``embedding, layers 0–1``."""
    parts = []
    for kind, same in groupby(stage, key=lambda place: place.kind):
        numbers = tuple(place.index for place in same)
        more = f"multi-token {format_ranks(numbers)}"
        parts.append({"layer": _format_layers(numbers), "multi_token": more}.get(kind, kind))
    return ", ".join(parts) or "nothing"


def _format_layers(numbers: Sequence[int]) -> str:
    """Format layer numbers: ``layer 0``, ``layers 0–1``."""
    return f"layer{'s' * (len(numbers) > 1)} {format_ranks(numbers)}"


def format_groups(groups: Sequence[Ranks | None]) -> str:
    """Format groups of ranks in short form, None as a gap: ``0–3 | 4–7 | … | 28–31``."""
    if groups[0] is not None and len(groups[0]) == 1:
        return "each rank alone"
    return " | ".join("…" if g is None else format_ranks(g) for g in _abridge(groups, MAX_GROUPS))


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ascending numbers in short form: ``0–3 8–11``, ``0 4 … 28`` if evenly spaced."""
    first = ranks[0]
    second = ranks[min(1, len(ranks) - 1)]
    last = ranks[-1]
    step = second - first
    evenly_spaced = step > 1 and list(ranks) == list(range(first, last + 1, step))
    if evenly_spaced and len(ranks) > MAX_RUNS:
        return f"{first} {second} … {last}"
    runs = groupby(enumerate(ranks), key=lambda item: item[1] - item[0])
    spans = [[rank for _, rank in run] for _, run in runs]
    texts = [str(s[0]) if len(s) == 1 else f"{s[0]}–{s[-1]}" for s in spans]
    return " ".join("…" if text is None else text for text in _abridge(texts, MAX_RUNS))
