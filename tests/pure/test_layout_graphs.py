"""What CUDA graphs lack is refused, with the nearest layout that has it."""

from typing import Any

import pytest

from moefold.config.errors import Violation
from moefold.layers.kinds.dense import Dense
from moefold.layers.kinds.gqa import Gqa
from moefold.model.config import Block, Decoder, Stack
from moefold.moe.config import Capacity, Moe, Router
from moefold.parallel.config import Layout
from moefold.spec.decoder import model_needs

ROOM = {"kind": "spread", "max_rows": 512}
HOST = {"host": {"modules": ["block"]}}
SPILL = {"sizes": "ep2", "dispatch": ROOM, "offload": {"pages": {"spill": 0.5}}}
PAIRS = {"schedule": {"kind": "merged"}, "sizes": "pp2"}


def found(given: dict[str, Any], world: int, **moe: Any) -> list[Violation]:
    """Return what a layout of a small mixture violates."""
    ffn = Moe(width=32, router=Router(experts=8, top_k=2, **moe.pop("router", {})), **moe)
    attention = Gqa(heads=4, kv_heads=2, head_dim=8)
    blocks = tuple(Block(attention=attention, ffn=one) for one in (Dense(width=32), ffn) * 2)
    model = model_needs(Decoder(vocab=64, hidden=32, stacks=(Stack(blocks=blocks),)), 64)
    layout = Layout.model_validate(given)
    return [*layout.violations(model), *layout.world_violations(world)]


@pytest.mark.parametrize(
    ("given", "field", "nearest"),
    [
        ({"graphs": "step", "sizes": "ep2", "zero": 0}, "graphs", "partial"),
        ({"graphs": "step", **PAIRS}, "graphs", "partial"),
        ({"graphs": "step", "sizes": "tp2", "zero": 3}, "zero", 2),
        ({"graphs": "partial", "sizes": "tp2", "zero": 2}, "zero", 1),
        ({"graphs": "partial", "sizes": "tp2", "graph_experts": False}, "graph_experts", True),
        ({"graphs": "partial", "offload": HOST}, "graphs", "none"),
        ({"graphs": "step", **SPILL, "zero": 0}, "graphs", "none"),
        ({"graphs": "partial", "state": {"at": "host"}}, "graphs", "none"),
    ],
    ids=str,
)
def test_what_graphs_lack_is_refused(given: dict[str, Any], field: str, nearest: Any) -> None:
    (one,) = found(given, 2)
    assert one.path == (field,) and one.nearest == nearest


def test_what_a_router_draws_is_drawn_anew() -> None:
    """A graph holds the step's number."""
    for moe in ({"router": {"jitter": 0.1}}, {"capacity": Capacity(factor=1.0, drop="random")}):
        (one,) = found({"graphs": "partial"}, 1, **moe)
        assert one.path == ("graphs",) and "draws" in one.rule


@pytest.mark.parametrize(
    "given",
    [
        {"graphs": "step"},
        {"graphs": "step", "sizes": "tp2 ep2", "zero": 0, "dispatch": ROOM},
        {"graphs": "partial", "sizes": "ep2"},
        {"graphs": "step", "sizes": "cp2 ep2", "zero": 2, "dispatch": ROOM},
        {"graphs": "step", "sizes": "pp2 vpp2", "schedule": {"kind": "zb_v"}},
        {"graphs": "partial", "sizes": "cp2"},
        {"graphs": "partial", **PAIRS},
        {"graphs": "step", **SPILL, "zero": 0, "offload": {"pages": {}}},
    ],
    ids=str,
)
def test_what_has_graphs_is_left_alone(given: dict[str, Any]) -> None:
    assert not found(given, Layout.model_validate(given).split.smallest_world)
