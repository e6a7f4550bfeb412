"""The table of bytes in ``docs/communication.md`` is what the formulas give."""

from math import ceil, comb
from pathlib import Path
from typing import NamedTuple

import pytest

from moefold.layers.config import Offload, OffloadToPages
from moefold.mesh.config import Sizes
from moefold.moe.dispatch.config import Padded, Spread
from moefold.planner.case import load_with_clones
from moefold.planner.memory_saved import saved_bytes, saved_tensors
from moefold.planner.published import published_model
from moefold.schedule.table import Action
from moefold.spec.layer import NOTHING
from moefold.spec.layer import Shape as LayerShape
from moefold.spec.pages import ChunkBlocks, count_pages, page_bytes, unpaged

DOC = Path(__file__).parents[2] / "docs" / "communication.md"
ELEMENT, WEIGHT, ID = 2, 4, 8
"""Bytes: rows in bf16, weights in fp32, ids in int64."""
SLACK = 1.25
"""Room of the forms of fixed shapes over balanced rows."""
TOKENS = 4096
"""Of a micro-batch on a rank, for what ``spread`` rounds up."""


class Shape(NamedTuple):
    """Sizes of a mixture over ``ep`` ranks, ``node`` of them on a node; routing is uniform."""

    hidden: int
    top_k: int
    experts: int
    ep: int
    node: int

    def reaches(self, ranks: int) -> float:
        """Chance that a token has an expert among those of so many ranks."""
        inside = self.experts // self.ep * ranks
        return 1 - comb(self.experts - inside, self.top_k) / comb(self.experts, self.top_k)

    @property
    def away(self) -> int:
        """Ranks on other nodes."""
        return self.ep - self.node


SHAPES = {
    "hidden 2048, 8 of 128 experts, ep8 on one node": Shape(2048, 8, 128, 8, 8),
    "hidden 7168, 8 of 256 experts, ep64 on 8 nodes": Shape(7168, 8, 256, 64, 8),
}


class Rows(NamedTuple):
    """Rows that one token costs one way, and how many of them cross nodes."""

    sent: float
    crossing: float


def rows_of(way: str, s: Shape) -> Rows:
    """Return the rows of a dispatcher, by formula."""
    nodes = s.ep // s.node
    match way:
        case "alltoall":
            return Rows(s.top_k * (s.ep - 1) / s.ep, s.top_k * s.away / s.ep)
        case "padded":
            copies = rows_of("alltoall", s)
            return Rows(copies.sent * SLACK, copies.crossing * SLACK)
        case "spread":
            dealt = -(-int(TOKENS * s.top_k * SLACK) // s.ep)
            rows = (2 * dealt + s.ep) / TOKENS
            return Rows(rows * (s.ep - 1), rows * s.away)
        case "allgather":
            return Rows(s.ep - 1, s.away)
        case "two_level":
            across = (nodes - 1) * s.reaches(s.node)
            return Rows(across + nodes * (s.node - 1) * s.reaches(1), across)
        case "least":
            return Rows((s.ep - 1) * s.reaches(1), (nodes - 1) * s.reaches(s.node))
        case _:
            return Rows((s.ep - 1) * s.reaches(1), s.away * s.reaches(1))


def bytes_of(way: str, s: Shape, rows: float) -> float:
    """Return bytes per token of a layer's four exchanges: there and back, forward and backward."""
    row = s.hidden * ELEMENT
    if way == "least":
        return rows * 4 * row
    by_copy = way in ("alltoall", "padded", "spread")
    weights = WEIGHT if by_copy else s.top_k * WEIGHT
    ids = 0 if by_copy else s.top_k * ID
    return rows * (4 * row + 2 * weights + ids)


def line(way: str, s: Shape) -> str:
    """Return a dispatcher's line of the table."""
    rows = rows_of(way, s)
    least = bytes_of("least", s, rows_of("least", s).sent)
    sent = bytes_of(way, s, rows.sent)
    name = "least possible" if way == "least" else f"`{way}`"
    return (
        f"| {name} | {rows.sent:.2f} | {rows.crossing:.2f} | {sent / 1e3:.0f} "
        f"| {sent / least:.2f} |"
    )


WAYS = ("least", "alltoall_once", "two_level", "alltoall", "padded", "spread", "allgather")


@pytest.mark.parametrize("name", SHAPES)
def test_the_table_is_what_the_formulas_give(name: str) -> None:
    text = DOC.read_text("utf-8")
    assert f"**{name}**" in text
    table = text.partition(f"**{name}**")[2].partition("\n\n**")[0]
    missing = [line(way, SHAPES[name]) for way in WAYS if line(way, SHAPES[name]) not in table]
    assert not missing, "\n".join(missing)


MODELS = {"DeepSeek-V3": 64, "Qwen3-235B-A22B": 32}
"""Published models, and over how many ranks their experts are."""
LOADS = (1, 1.6, 4, None)
"""Rows of the fullest rank over the mean; None is all rows of all ranks on one."""
SLOTS = 4


def room(way: str, copies: int, load: float, ep: int) -> int:
    """Return the rows that a rank has place for so that no row of such a load lacks it."""
    match way:
        case "alltoall":
            return round(copies * load)
        case "padded" | "pages":
            return Padded(max_rows=ceil(copies * load / ep)).buffer_rows(Sizes(ep=ep))
        case "spread":
            return Spread(max_rows=ceil(copies * load)).buffer_rows(Sizes(ep=ep))
        case _:
            return room("spread", copies, load_with_clones(load, SLOTS), ep)


def kept_of(name: str, way: str, load: float | None) -> float:
    """Return the bytes that a layer with experts keeps of one micro-batch."""
    decoder, ep = published_model(name).decoder, MODELS[name]
    block = decoder.blocks[-1]
    copies = TOKENS * block.ffn.router.top_k  # type: ignore[attr-defined]
    slots = SLOTS if way == "clones" else 0
    rows = room(way, copies, ep if load is None else load, ep)
    shape = LayerShape(decoder.hidden, TOKENS, ep=ep, room=rows, clones=slots)
    tensors = saved_tensors(block, shape)
    if way != "pages":
        return saved_bytes(tensors)
    pages = OffloadToPages()
    line = (Action("F", 0, 0), Action("B", 0, 0))
    counted = count_pages([ChunkBlocks([block])], shape, NOTHING, Offload(pages=pages), line)
    stored, _ = page_bytes(*counted, pages.page)
    return stored + saved_bytes(unpaged(tensor, pages) for tensor in tensors)


@pytest.mark.parametrize("name", MODELS)
def test_the_table_of_memory_is_what_is_planned(name: str) -> None:
    text = DOC.read_text("utf-8")
    title = f"**{name}, ep{MODELS[name]}**"
    table = text.partition(title)[2].partition("\n\n**")[0]
    titles = {"alltoall": "`alltoall`", "padded": "`padded`, all pairs alike", "spread": "`spread`"}
    titles["pages"] = "`padded`, and rows in pages"
    titles["clones"] = f"`spread`, {SLOTS} slots for clones"
    for way, said in titles.items():
        values = (f"{kept_of(name, way, load) / 1e9:.2f}" for load in LOADS)
        assert f"| {said} | " + " | ".join(values) + " |" in table, (said, way)
