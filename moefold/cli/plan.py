"""``moefold plan``: estimate a run's memory and time on any cluster; find layouts.

Estimates memory and step time of a run's layout on a cluster, part by part, and names its
bottleneck, the fastest layouts that fit, and changes that help. The cluster need not exist: no GPU
is needed and nothing is allocated. docs/plan.md explains the output and how accurate it is.
"""

import argparse
import os
import sys
import webbrowser
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moefold.cli._common import add_json, add_layout, add_run, overrides_of, plain_table, print_json
from moefold.files import try_output, write_text
from moefold.layers.config import MAX_SIZE
from moefold.planner.goodput import DAY, Price
from moefold.planner.hardware import StatedLinks, parse_cluster
from moefold.planner.page import plan_json, render_page
from moefold.planner.plan import GB, Plan, PlannedLayout, require_positive
from moefold.planner.plan import plan as planned
from moefold.planner.task import DEFAULT_LOAD
from moefold.training import formatting

BAR_WIDTH = 24
MIN_FRACTION = 0.005
"""Parts below this fraction of the total are not listed."""
NOTHING_FITS = 1
"""Exit status where no layout fits."""
MAX_PORT = 65_535
UNSUPPORTED = "not supported by training yet, or only with another package"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    kinds = "run file, recipe, Hugging Face folder, or published model"
    add_run(parser, "train.micro_batch=2", kinds, optional=True)
    text = "device and number, such as h100x256; or cpu or a .json file (default: none)"
    parser.add_argument("--cluster", metavar="NAME", help=text)
    text = "links inside a node: switch, mesh or pcie, GB/s, or pcie:20 (default: as sold)"
    parser.add_argument("--links", metavar="KIND", help=text)
    text = "devices that these links connect (default: as sold; 8 with PCIe)"
    parser.add_argument("--node", metavar="N", type=int, help=text)
    text = "network of each device beyond its node, GB/s in one direction (default: as sold)"
    parser.add_argument("--network-gb", metavar="X", type=float, help=text)
    text = "sequences per step over all devices (default: the run's; a published model has none)"
    parser.add_argument("--batch", metavar="N", type=int, help=text)
    add_layout(parser)
    text = "tokens per sequence of a published model (default: 4096)"
    parser.add_argument("--seq", metavar="N", type=int, help=text)
    text = "number format of a published model: bf16, fp8, mxfp8, nvfp4 … (default: the fastest)"
    parser.add_argument("--precision", metavar="NAME", help=text)
    text = f"rows of the fullest expert rank over the mean (default: {DEFAULT_LOAD})"
    parser.add_argument("--load", metavar="X", type=float, default=DEFAULT_LOAD, help=text)
    text = "memory of each device (default: its nominal memory)"
    parser.add_argument("--memory", metavar="GB", type=float, help=text)
    text = "price of a device-hour, to show the cost (default: none)"
    parser.add_argument("--price", metavar="X", type=float, help=text)
    text = "tokens of the whole run, such as 15e12 (default: the run file's, or no length is shown)"
    parser.add_argument("--tokens", metavar="N", type=float, help=text)
    text = "also write the plan as an HTML page (default: none)"
    parser.add_argument("--html", metavar="FILE", help=text)
    text = "open a local page that plans anew with each input; RUN and options are its first ones"
    parser.add_argument("--serve", action="store_true", help=text)
    text = "port of --serve (default: a free one)"
    parser.add_argument("--port", metavar="N", type=int, help=text)
    text = "print the address of --serve without opening it"
    parser.add_argument("--no-browser", action="store_true", help=text)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    given = vars(args)
    if args.serve:
        return _serve(args)
    _require(args)
    require_positive(**{f"--{name}": given[name] for name in ("load", "memory", "tokens")})
    require_positive(MAX_SIZE, **{f"--{name}": given[name] for name in ("batch", "seq")})
    if args.html:
        try_output(Path(args.html))  # before a search
    links = StatedLinks.parse(args.links, args.node, args.network_gb)
    plan = planned(
        args.source,
        parse_cluster(args.cluster, links),
        batch=args.batch,
        seq=args.seq,
        precision=args.precision,
        load=args.load,
        memory_gb=args.memory,
        price=Price(args.price),
        overrides=overrides_of(args),
    )
    tokens = args.tokens or plan.task.tokens
    status = NOTHING_FITS if plan.shortfall else 0
    if args.html:
        write_text(Path(args.html), render_page(plan, tokens))
    if args.json:
        print_json(plan_json(plan, tokens))
        return status
    console = Console(highlight=False)
    for part in _plan_parts(plan, tokens):
        console.print(part, soft_wrap=isinstance(part, Text))
    if args.html:
        console.print(Text(args.html), soft_wrap=True)
    return status


def _require(args: argparse.Namespace) -> None:
    """Check that what a plan needs is given, and nothing that only a page uses."""
    needed = {"RUN": args.source, "--cluster": args.cluster}
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        names = ", ".join(missing)
        raise ValueError(f"the following arguments are required: {names}; or --serve, a page")
    if args.port is not None or args.no_browser:
        raise ValueError("--port and --no-browser are for --serve")


def _serve(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C; return the exit status."""
    from moefold.planner.serve.form import first_values
    from moefold.planner.serve.server import PlanServer

    if args.html or args.json:
        raise ValueError("--serve prints no plan: leave out --html and --json")
    port = args.port or 0
    if not 0 <= port <= MAX_PORT:
        nearest = min(max(port, 1), MAX_PORT)
        raise ValueError(f"--port {port}: must be 1 to {MAX_PORT:,}; nearest: {nearest}")
    options = {name: value for name, value in vars(args).items() if value is not None}
    values = first_values(options, overrides_of(args))
    try:
        server = PlanServer(values, port)
    except OSError as error:
        raise ValueError(f"--port {port}: {error.strerror}; leave it out for a free one") from None
    print(f"{server.url}\nCtrl-C ends it", flush=True)
    try:
        if not args.no_browser and _has_display():
            webbrowser.open(server.url)
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.close()
    return 0


def _has_display() -> bool:
    """Return whether a browser would have a window, and not take over the terminal."""
    named = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return sys.platform == "darwin" or bool(named)


def _plan_parts(plan: Plan, tokens: float | None) -> Iterator[Text | Table]:
    yield from _task_part(plan)
    yield from _given_layout_part(plan)
    if plan.best is None:
        yield from _shortfall_part(plan)
    else:
        yield Text("\nfastest layouts that fit, 5 % of memory left free", style="bold")
        rows = list(_table_rows(plan))
        yield _layout_table(rows)
        names = dict.fromkeys(policy for _, layout in rows for policy in layout.unsupported)
        if names:
            yield Text(f"* {UNSUPPORTED}: {', '.join(names)}", style="yellow")
        for layout in plan.published:
            if layout.published_tflops:
                text = f"{layout.published_tflops:.0f} TFLOP/s measured with other software"
                yield Text(f"published {layout.layout}: {text}; {layout.source}", style="dim")
        yield Text("")
        yield from _recommended_part(plan)
        yield from _long_run_part(plan, tokens)
    if plan.shortfall is None:
        yield from _changes_part(plan)


def _recommended_part(plan: Plan) -> Iterator[Text | Table]:
    """Yield the fastest layout that training supports, in full and as a run file."""
    best = plan.best
    today = plan.trainable
    if today is None:
        if best is not None:
            yield from _layout_detail(best, "fastest")
        yield Text(f"\nno run file: {plan.trainable_problem}", style="yellow")
        return
    yield from _layout_detail(today, "today")
    yield Text.assemble(("\nrun file", "bold"), "  of this layout, which training supports:")
    yield Text(yaml.safe_dump(plan.run_file, sort_keys=False).rstrip())
    if best is not None and best.unsupported:
        yield Text(
            f"\nfaster, {_three_digits(best.step_time_s)} s per step, with features {UNSUPPORTED}: "
            f"{best.layout}  {best.policies}",
            style="yellow",
        )


def _given_layout_part(plan: Plan) -> Iterator[Text | Table]:
    """Yield the given layout, in full if it fits or no other layout does."""
    given = plan.given
    if given is None:
        yield Text(f"\nno given layout: {plan.given_problem}", style="yellow")
    elif given.fits or plan.best is None:
        yield Text("")
        yield from _layout_detail(given, "given")
    else:
        yield Text.assemble(
            (f"\ngiven: {given.layout}", "bold"),
            ("  does not fit: ", "bold red"),
            f"its fullest device needs {given.memory_gb:,.1f} of {given.device_memory_gb:.1f} GB",
        )


def _task_part(plan: Plan) -> Iterator[Text]:
    task = plan.task
    device = plan.task.cluster.device
    yield Text.assemble(
        (task.name, "bold"),
        f" on {task.cluster.devices:,} {device.name}, "
        f"{task.batch:,} sequences of {task.seq:,} tokens per step",
    )
    stack = f"{task.software.stack} {task.software.release}".strip()
    inputs = (
        f"{device.size} each ({device.memory_bytes / GB:.1f} GB of 10^9 bytes usable)",
        task.cluster.connections,
        f"expert load {task.load:g} (fullest rank over the mean)",
        f"software {stack}, CUDA graphs {plan.graphs}",
    )
    yield Text("  " + " · ".join(inputs), style="dim")
    for note in task.assumptions:
        yield Text(f"  {note}", style="yellow")


def _layout_detail(layout: PlannedLayout, name: str) -> Iterator[Text | Table]:
    """Yield one layout in full: policies, memory and time by part."""
    yield Text.assemble((f"{name}: {layout.layout}", "bold"), f"  {layout.policies}")
    verdict = "fits" if layout.fits else "does not fit"
    style = "green" if layout.fits else "bold red"
    caveat = "" if layout.sure else ", within the error of planned memory: try it"
    margin = f"{abs(layout.margin_gb):,.1f} GB {'free' if layout.fits else 'too much'}"
    yield Text.assemble(
        f"  {_three_digits(layout.step_time_s)} s per step ±{layout.time.uncertainty:.0%}, "
        f"{_three_digits(layout.tflops_per_gpu)} TFLOP/s per device, "
        f"{formatting.count(layout.tokens_per_s)} tokens/s; {layout.memory_gb:,.1f} of "
        f"{layout.device_memory_gb:.1f} GB on pipeline rank {layout.memory.rank}: ",
        (f"{verdict}, {margin}{caveat}", style),
        f"; bound by {layout.binds}",
    )
    memory = {name: value / GB for name, value in layout.memory.parts.items()}
    for name, value in layout.memory.offloaded_state.items():
        yield Text(f"  {name}: {value / GB:,.1f} GB per rank", style="dim")
    grid = Table.grid(padding=(0, 4))
    grid.add_row(
        _bar_chart("memory, GB", memory, "{:,.1f}".format),
        _bar_chart("time, s", dict(layout.time.parts), _three_digits),
    )
    yield grid
    offloaded = [
        f"{size / GB:,.1f} GB on {at}" for at, size in layout.memory.offloaded_activations.items()
    ]
    if offloaded:
        yield Text(f"offloaded activations per device: {', '.join(offloaded)}")


def _bar_chart(title: str, parts: dict[str, float], form: Callable[[float], str]) -> Table:
    whole = sum(parts.values()) or 1.0
    table = Table.grid(padding=(0, 1))
    table.add_row(Text(title, style="cyan"))
    for name, value in sorted(parts.items(), key=lambda item: -item[1]):
        if value > MIN_FRACTION * whole:
            bar = "█" * max(1, round(BAR_WIDTH * value / whole))
            table.add_row(name, Text(form(value), justify="right"), Text(bar, style="blue"))
    return table


def _three_digits(value: float) -> str:
    """Format a number with three digits."""
    return f"{value:#,.3g}".rstrip(".") if value < 1e3 else f"{value:,.0f}"


def _table_rows(plan: Plan) -> Iterator[tuple[str, PlannedLayout]]:
    """Yield every layout of the table once, with its name."""
    seen = set()
    groups: list[tuple[str, Iterable[PlannedLayout]]] = [
        ("today", filter(None, [plan.trainable])),
        ("", plan.layouts),
        ("same format", plan.same_format),
        ("given", filter(None, [plan.given])),
        ("published", plan.published),
    ]
    for name, layouts in groups:
        for n, layout in enumerate(layouts):
            if layout.identity not in seen:
                seen.add(layout.identity)
                yield name or f"{n + 1}", layout


def _layout_table(rows: Iterable[tuple[str, PlannedLayout]]) -> Table:
    titles = ("", "step s", "TFLOP/s", "GB", "bound by", "layout and policies")
    table = plain_table(*titles, right=titles[1:4])
    table.columns[0].no_wrap = table.columns[4].no_wrap = True
    for name, layout in rows:
        marked = f"{name} *" if layout.unsupported else name
        table.add_row(
            marked,
            _three_digits(layout.step_time_s),
            _three_digits(layout.tflops_per_gpu),
            Text(f"{layout.memory_gb:,.0f}", style="" if layout.fits else "red"),
            layout.binds,
            Text.assemble((layout.layout, "bold"), (f"  {layout.policies}", "dim")),
        )
    return table


def _shortfall_part(plan: Plan) -> Iterator[Text | Table]:
    """Yield the least memory of any layout, what binds it, and the changes with which one fits."""
    yield Text("\nnothing fits: no layout leaves 5 % of memory free", style="bold red")
    shortfall = plan.shortfall
    if shortfall is None:
        return
    limit = f"{shortfall.limit_bytes / GB:,.1f}"
    if shortfall.least is None:
        cluster = plan.task.cluster
        yield Text(
            f"  no layout is legal: {plan.task.batch:,} sequences cannot be divided among "
            f"{cluster.devices:,} {cluster.device.name}"
        )
    else:
        least = PlannedLayout(shortfall.least.case)
        largest = ", ".join(f"{name} {size / GB:,.1f} GB" for name, size in shortfall.parts)
        yield Text(
            f"  least memory found: {least.memory_gb:,.1f} GB per device, {limit} may be used; "
            f"{least.layout}  {least.policies}"
        )
        yield Text(f"  bound by {shortfall.parts[0][0]} ({largest})")
    if not shortfall.remedies:
        yield Text(f"  still too large with each of: {'; '.join(shortfall.tried)}", style="yellow")
        return
    yield Text("\nwhat makes it fit, each tried", style="bold")
    table = plain_table("change", "GB", "step s", "a layout that fits", right=("GB", "step s"))
    unsupported = dict[str, None]()
    for remedy in shortfall.remedies:
        layout = PlannedLayout(remedy.found.case)
        unsupported.update(dict.fromkeys(layout.unsupported))
        table.add_row(
            f"{remedy.change} *" if layout.unsupported else remedy.change,
            f"{layout.memory_gb:,.1f}",
            _three_digits(layout.step_time_s),
            Text.assemble((layout.layout, "bold"), (f"  {layout.policies}", "dim")),
        )
    yield table
    if unsupported:
        yield Text(f"* {UNSUPPORTED}: {', '.join(unsupported)}", style="yellow")


def _long_run_part(plan: Plan, tokens: float | None) -> Iterator[Text]:
    """Yield time and cost of a long run in the recommended layout, if its length is stated."""
    if tokens is None:
        if plan.price.per_device_hour:
            yield Text("\nno cost: state the length of the run with --tokens", style="yellow")
        return
    layout = plan.recommended
    assert layout is not None
    expected = plan.expected_goodput
    if not expected.ettr:
        yield Text("\nno progress: failures and restarts take all the time", "bold red")
        return
    cost = plan.cost(layout, tokens)
    days = f"{cost.days:,.1f} days" if cost.days >= 1 else formatting.clock(cost.days * DAY)
    energy = "" if cost.energy_mwh is None else f", at most {cost.energy_mwh:,.0f} MWh"
    money = "" if cost.cost is None else f", cost {cost.cost:,.0f}"
    yield Text.assemble(
        f"\n{formatting.count(tokens)} tokens in this layout: {days}, "
        f"{cost.device_hours:,.0f} device-hours{energy}{money}; "
        f"save every {formatting.clock(min(expected.save_interval_s, 1e7))}, "
        f"{expected.ettr:.1%} of the time is spent training "
        f"({plan.faults.per_device_day:.1e} failures per device and day, "
        f"{plan.faults.restart_s:.0f} s per restart, {plan.faults.stall_s:g} s per save)"
    )


def _changes_part(plan: Plan) -> Iterator[Text | Table]:
    given = plan.given
    if given and not given.fits and not any(change.fits for change in plan.changes):
        yield Text("\nno single change makes the given layout fit", style="bold")
        return
    if not plan.changes:
        return
    which = "given" if given else "recommended"
    yield Text(f"\nwhat to change next in the {which} layout", style="bold")
    table = plain_table("", "time", "memory", " ", right=("time", "memory"))
    for change in plan.changes:
        table.add_row(
            change.description,
            f"{-change.saved_share:+.0%}",
            f"{-change.saved_bytes / GB:+,.1f} GB",
            "fits" if change.fits else "still does not fit",
        )
    yield table
