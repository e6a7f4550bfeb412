"""Saved tensors of common parts of layers, and the traffic of a gated activation."""

from collections.abc import Iterator
from dataclasses import replace

from moefold.spec.layer import (
    CORE,
    GATHER,
    NORMS,
    NOTHING,
    STATISTIC,
    Attention,
    Module,
    Modules,
    Rows,
    Saved,
    SavedKind,
    Shape,
    Traffic,
    Units,
)


def saved_norm(
    name: str,
    width: int,
    shape: Shape,
    operand_of: tuple[str, ...],
    needed_by: Modules = NOTHING,
    also_needed_by: Modules = NOTHING,
    inner: bool = False,
) -> Iterator[Saved]:
    """Yield a norm's statistic, and its output, which weights or a recompute read.

    ``inner``: a norm within the sublayer, rather than the one before it.
    """
    of_statistic = SavedKind.OTHER if inner else SavedKind.NORM_STATISTIC
    of_output = SavedKind.OTHER if inner else SavedKind.NORM_OUTPUT
    statistic = shape.rows * STATISTIC
    yield Saved(f"{name}.statistic", statistic, module="norms", kind=of_statistic)
    size = shape.rows * width * shape.width
    output = Saved(f"{name}.output", size, NORMS, needed_by, module="norms", kind=of_output)
    also_saved = replace(output, needed_by=also_needed_by) if also_needed_by else None
    yield output if needed_by else replace(output, operand_of=operand_of, also_saved=also_saved)


def saved_attention_rows(operand_of: tuple[str, ...], shape: Shape) -> Iterator[Saved]:
    """Yield what the norm before attention saves, and the rows that projections read.

    Under tp the gathered rows are saved in place of the norm's output.
    """
    gather = GATHER if shape.tp > 1 else NOTHING
    yield from saved_norm("attention_norm", shape.hidden, shape, operand_of, gather)
    if shape.tp > 1:
        size = shape.piece * shape.hidden * shape.width
        gathered = Saved("attention.gathered", size, GATHER, kind=SavedKind.GATHERED)
        yield replace(gathered, module="attention", operand_of=operand_of)


def saved_attention(core: Attention, shape: Shape, freed_by: Modules = NOTHING) -> Iterator[Saved]:
    """Yield queries, keys, values, the output of attention and its statistics.

    If context ranks gather or exchange these, attention saves the moved copies, and the originals
    are saved only to recompute it. With Ulysses the output projection saves another output copy.
    """
    heads = core.heads // shape.tp
    groups = core.kv_heads // shape.tp
    width = shape.width
    rows = shape.piece
    for name, features in (
        ("q", heads * core.qk_dim), ("k", groups * core.qk_dim), ("v", groups * core.v_dim)
    ):  # fmt: skip
        ranks = 1 if name == "q" else shape.num_gathered
        moved = ranks > 1 or shape.exchanges_heads
        core_input = CORE if moved else NOTHING
        size = rows * features * width
        yield Saved(name, size, freed_by, needed_by=core_input, module="attention")
        if moved:
            yield Saved(f"{name}.moved", size * ranks, CORE, module="attention")
    attended = rows * heads * core.v_dim * width
    output = Saved("attended", attended, module="attention", operand_of=("o.weight",))
    by_core = None if shape.exchanges_heads else replace(output, freed_by=CORE, operand_of=())
    yield replace(output, also_saved=by_core)
    yield Saved("attended.statistic", rows * heads * STATISTIC, CORE, module="attention")
    if shape.exchanges_heads:
        yield Saved("attended.moved", attended, CORE, module="attention")


def saved_feed_forward(
    module: Module, features: int, shape: Shape, rows: int | None = None
) -> Iterator[Saved]:
    """Yield what a gated feed-forward saves: rows gathered over tp, and pre-activations.

    The activation is always recomputed. ``rows``: number of dispatched rows of routed experts.
    """
    freed_by: Modules = frozenset((module,))
    prefix = "" if module == "ffn" else f"{module}."
    w_in = f"{prefix}w_in"
    if rows is None and shape.tp > 1:
        size = shape.piece * shape.hidden * shape.width
        gathered = Saved(f"{module}.gathered", size, freed_by | GATHER, kind=SavedKind.GATHERED)
        yield replace(gathered, module=module, operand_of=(w_in,))
    size = (shape.piece if rows is None else rows) * features * shape.width
    room = 0 if rows is None or shape.room is None else rows
    hidden = Saved(f"{module}.hidden", 2 * size, freed_by, module=module, rows=room)
    yield replace(hidden, result_of=w_in)
    activation = Saved(f"{module}.activation", size, freed_by, module=module)
    yield replace(activation, operand_of=(f"{prefix}w_out",), from_forward=False)


def gated_traffic(
    width: float, rows: Rows = "group", units: Units | None = None, gates: int = 2
) -> Traffic:
    """Return the traffic of an activation with ``gates`` inputs per feature."""
    return Traffic(width, gates + 1, 2 * gates + 1, rows, units)
