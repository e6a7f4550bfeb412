"""What ``moefold explain`` does. Imports no torch."""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from moefold.cli._layout import facts, picture, show
from moefold.config.draft import Origin
from moefold.config.dump import identity
from moefold.config.load import Loaded
from moefold.config.problems import RunError, Spot, dotted
from moefold.config.records import plain
from moefold.mesh.config import ORDERS, Sizes
from moefold.model.config import Block
from moefold.planner.count import Counts, count
from moefold.planner.notes import notes
from moefold.run import IDENTITY, RECIPES, Run, loaded_run
from moefold.training import words

WRONG_INPUT = 2
MISFITS: dict[Spot, str] = {
    ("layout", "sizes"): '""',
    ("layout", "order"): ORDERS[0],
    ("layout", "stages"): "null",
}
"""What of a layout can misfit a model, and what fits every model."""
DEFAULT = Origin("default")


def explain(args: argparse.Namespace) -> int:
    """Carry out the command; return its exit status."""
    loaded = _load(args)
    shown = picture(loaded.record, args.world)
    status = WRONG_INPUT if shown.violations else 0
    if args.json:
        origins = {dotted(path): str(origin) for path, origin in loaded.origins.items()}
        answer = {"run": plain(loaded.record), "origins": origins, "derived": derived(loaded)}
        answer |= {"layout": facts(shown), "notes": list(notes(loaded.record))}
        print(json.dumps(answer, indent=2))
        return status
    console = Console()
    console.print(tree(loaded, args.given), soft_wrap=True)
    console.print(_derived_table(loaded.record, derived(loaded)))
    if args.layout is not None or args.world is not None or shown.sizes != Sizes():
        show(shown, console)
    for note in notes(loaded.record):
        console.print(Text(note, style="yellow"), soft_wrap=True)
    return status


def _load(args: argparse.Namespace) -> Loaded[Run]:
    """Load the run, with a layout that is asked for even where the model does not allow it."""
    overrides = list(args.overrides)
    if args.layout is None:
        return loaded_run(args.source, overrides)
    asked = f"layout.sizes={json.dumps(args.layout)}"
    try:
        return loaded_run(args.source, [*overrides, asked])
    except RunError as error:
        if any(item.path not in MISFITS or item.id != "relation" for item in error.violations):
            raise
        layout = error.data["layout"]
    Sizes.parse(layout["sizes"])
    cleared = (f"{dotted(path)}={value}" for path, value in MISFITS.items())
    loaded = loaded_run(args.source, [*overrides, *cleared])
    kept = {path: layout[path[-1]] for path in MISFITS if path[-1] in layout}
    record = loaded.record.layout.model_copy(update={str(p[-1]): v for p, v in kept.items()})
    origins = {**loaded.origins, ("layout", "sizes"): Origin("override", asked)}
    run = loaded.record.model_copy(update={"layout": record})
    return replace(loaded, record=run, origins=origins)


def tree(loaded: Loaded[Run], given_only: bool = False) -> Tree:
    """Return the run as a tree, each value with its origin."""
    root = Tree(Text(loaded.record.name, style="bold"))
    _grow(root, plain(loaded.record), (), loaded.origins, given_only)
    return root


def _grow(
    node: Tree, data: Any, path: Spot, origins: Mapping[Spot, Origin], given_only: bool
) -> None:
    items = data.items() if isinstance(data, Mapping) else enumerate(data)
    for key, value in items:
        here = (*path, key)
        if given_only and all(o.sort == "default" for o in _inside(origins, here)):
            continue
        name = f"[{key}]" if isinstance(key, int) else str(key)
        if _is_leaf(value):
            node.add(_leaf(name, value, next(_inside(origins, here), DEFAULT)))
        else:
            _grow(node.add(Text(name, style="cyan")), value, here, origins, given_only)


def _inside(origins: Mapping[Spot, Origin], path: Spot) -> Iterator[Origin]:
    return (origin for spot, origin in origins.items() if spot[: len(path)] == path)


def _is_leaf(value: Any) -> bool:
    """Whether a value is written on one line: a scalar, or a list of scalars."""
    if isinstance(value, Mapping):
        return not value
    return not isinstance(value, list) or not any(isinstance(v, list | Mapping) for v in value)


def _leaf(name: str, value: Any, origin: Origin) -> Text:
    text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
    plain_default = origin.sort == "default"
    said = Text.assemble((name, "cyan"), ": ", (text, "dim" if plain_default else "bold"))
    return said.append(f"   {_place(origin)}", style="dim")


def _place(origin: Origin) -> str:
    """Say where a value came from; a recipe goes by its name."""
    where = origin.where.removeprefix(f"{RECIPES}/")
    if where == origin.where:
        return str(origin)
    return f"recipe {where.replace('.yaml:', ', line ')}"


def derived(loaded: Loaded[Run]) -> dict[str, Any]:
    """Return what follows from a run's values, for programs."""
    run = loaded.record
    decoder, train = run.decoder(), run.train
    counts, seq = count(decoder), run.data.seq
    tokens = train.batch * seq
    schedule = run.optim.schedule_lr
    places = dict(_places(train.steps))
    return {
        "identity": identity(run, loaded.parts, only=IDENTITY),
        "layers": _spans(decoder.blocks),
        "vocabulary": decoder.vocab,
        "parameters": counts.parameters,
        "active_parameters": counts.active_parameters,
        "parts": _parts(counts),
        "flops_per_token": counts.flops_per_token(seq, causal=True),
        "flops_per_token_full_attention": counts.flops_per_token(seq, causal=False),
        "tokens_per_step": tokens,
        "tokens_in_all": tokens * train.steps,
        "flops_in_all": tokens * train.steps * counts.flops_per_token(seq, causal=True),
        "micro_batches_per_step": train.batch // train.micro_batch,
        "lr": {n: run.optim.lr * schedule.factor(s, train.steps) for n, s in places.items()},
        "evaluation_sets": list(run.data.evaluation_sets),
        "layout": str(run.layout.split),
        "smallest_world": run.layout.split.smallest_world,
    }


def _places(steps: int) -> list[tuple[str, int]]:
    return [("first step", 0), ("half way", steps // 2), ("last step", steps - 1)]


def _parts(counts: Counts) -> dict[str, int]:
    return {name: part.parameters for name, part in counts.parts.items() if part.parameters}


def _spans(blocks: tuple[Block, ...]) -> list[dict[str, Any]]:
    """Group neighbouring layers that are the same."""
    spans, first = [], 0
    for block, same in groupby(blocks):
        number = len(list(same))
        spans.append({"first": first, "last": first + number - 1, **plain(block)})
        first += number
    return spans


def _derived_table(run: Run, facts: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, title="what follows")
    table.title_justify, table.title_style = "left", "bold"
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for what, said in _derived_rows(run, facts):
        table.add_row(what, Text(said))
    return table


def _derived_rows(run: Run, facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for span in facts["layers"]:
        where = f"layers {span['first']}–{span['last']}"
        yield where, f"attention {_record(span['attention'])}"
        yield "", f"ffn {_record(span['ffn'])}"
    total, active = facts["parameters"], facts["active_parameters"]
    yield "parameters", f"{total:,}; {active:,} active per token ({100 * active / total:.1f} %)"
    yield "", ", ".join(f"{name} {words.count(n)}" for name, n in facts["parts"].items())
    causal, full = facts["flops_per_token"], facts["flops_per_token_full_attention"]
    flops = f"{words.si(causal)}FLOP forward and backward"
    yield "one token", f"{flops} ({words.si(full)}FLOP with full attention)"
    batches = words.plural(facts["micro_batches_per_step"], "micro-batch", "es")
    yield "one step", f"{facts['tokens_per_step']:,} tokens in {batches}"
    whole = f"{words.count(facts['tokens_in_all'])} tokens, {words.si(facts['flops_in_all'])}FLOP"
    yield "the run", f"{words.plural(run.train.steps, 'step')}: {whole}"
    yield "lr", ", ".join(f"{name} {rate:.3g}" for name, rate in facts["lr"].items())
    yield "held out", ", ".join(facts["evaluation_sets"]) or "nothing"
    yield "layout", f"{facts['layout']}; at least {words.plural(facts['smallest_world'], 'rank')}"
    yield "identity", facts["identity"][:16]


def _record(data: Mapping[str, Any]) -> str:
    """Write a record in one line, without what is absent."""
    parts = []
    for key, value in data.items():
        if key == "kind":
            parts.insert(0, str(value))
        elif isinstance(value, Mapping):
            parts.append(f"{key} ({_record(value)})")
        elif isinstance(value, list):
            items = [_record(v) if isinstance(v, Mapping) else str(v) for v in value]
            parts.append(f"{key} [{'; '.join(items)}]")
        elif value not in (None, False):
            parts.append(key if value is True else f"{key} {value}")
    return " ".join(parts)
