"""Each kind of layer says once what it is: nobody but its own package names it."""

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import pytest

from moefold.layers.config import (
    ATTENTION,
    FFN,
    Offload,
    OffloadKind,
    OffloadToDisk,
    OffloadToHost,
    Rope,
    Yarn,
)
from moefold.layers.kinds.dense import Dense
from moefold.layers.kinds.gqa import Gqa
from moefold.mesh.config import Sizes
from moefold.model.config import Block, Decoder, Stack
from moefold.moe.config import Moe, Router, Shared
from moefold.planner import untrained
from moefold.planner.count import count
from moefold.planner.memory_saved import saved_tensors
from moefold.planner.time_work import sublayer_work
from moefold.proof.matrix import kinds
from moefold.proof.shrink import SizeRequirements, small_part
from moefold.spec.decoder import model_needs, model_weights
from moefold.spec.layer import LayerSpec, Operation, Saved, Shape, Units, Weight, as_layer_spec
from tests.house.tree import Module, modules

ROOT = Path(__file__).parents[2]
PLANNED = [v for v in vars(untrained).values() if isinstance(v, type) and issubclass(v, LayerSpec)]
REGISTERED = (*ATTENTION.kinds.values(), *FFN.kinds.values())
KINDS = {kind for kind in (*REGISTERED, *PLANNED) if kind.__module__.startswith("moefold.")}
KINDS -= {LayerSpec}
MAKES_DECODERS = {
    "moefold/model/families/": "turn a few sizes into a description",
    "moefold/planner/published.py": "describes published models",
    "moefold/planner/untrained.py": "kinds that are planned build on kinds that are trained",
    "moefold/training/calibrate.py": "describes what is timed",
    "moefold/proof/": "the small models of the matrix",
}
"""Who names kinds to describe models, and why."""


def named(module: Module) -> Iterator[tuple[str, int]]:
    """Yield each name that a module uses or imports, and its line."""
    for node in ast.walk(module.syntax):
        if isinstance(node, ast.Name):
            yield node.id, node.lineno
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)


def test_no_package_names_the_kinds_of_another() -> None:
    found = []
    homes = {kind.__name__: f"moefold/{kind.__module__.split('.')[1]}/" for kind in KINDS}
    assert {"Gqa", "Mla", "Dense", "Moe", "Mamba2"} <= set(homes)
    for module in modules(ROOT).values():
        if module.path.startswith(tuple(MAKES_DECODERS)):
            continue
        for name, line in named(module):
            if name in homes and not module.path.startswith(homes[name]):
                found.append(module.at(line, f"names {name}"))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("slot", [ATTENTION, FFN], ids=lambda slot: slot.name)
def test_every_kind_answers_the_three_questions(slot: object) -> None:
    sizes = {"head_dim": 4, "experts": 8}
    for record in kinds(slot, **sizes) if slot is ATTENTION else [Dense(width=8)]:  # type: ignore[arg-type]
        spec = as_layer_spec(record)
        weights = {weight.name: weight for weight in spec.weights(16)}
        operations = list(spec.operations(16))
        read = [n for one in operations for m in one.matmuls for n in m.weights]
        assert set(read) <= set(weights) and len(read) == len(set(read))
        assert set(read) == {n for n, w in weights.items() if w.product}
        assert sum(saved.bytes for saved in spec.saved(Shape(16, 8))) > 0
        assert spec.shrink(Sizes(tp=2)).units(16)


class Diagonal(LayerSpec):
    """A mixer from outside: a number for each feature, in one file."""

    kind: Literal["diagonal"] = "diagonal"
    features: int = 100

    def weights(self, hidden: int) -> Iterator[Weight]:
        """Yield one matrix, cut by its rows."""
        units = Units("tp", self.features, "the mixer's features")
        yield Weight("in.weight", (self.features, hidden), ((0, units),))

    def operations(self, hidden: int) -> Iterator[Operation]:
        """Yield nothing that takes time."""
        yield Operation("attention")

    def saved(self, shape: Shape) -> Iterator[Saved]:
        """Yield its rows."""
        yield Saved("rows", shape.hidden_bytes)


def test_a_kind_from_outside_is_planned_and_shrunk_by_its_description() -> None:
    block = Block.model_construct(attention=Diagonal(), ffn=Dense(width=8))
    stacks = (Stack.model_construct(repeat=3, blocks=(block,)),)
    decoder = Decoder.model_construct(vocab=8, hidden=4, tied=False, stacks=stacks)
    assert "tp must divide the mixer's features (100)" in [
        one.rule for one in model_needs(decoder).units
    ]
    assert count(decoder).parts["attention"].parameters == 3 * 100 * 4
    assert "layers.2.attention.in.weight" in {weight.name for weight in model_weights(decoder)}
    assert [saved.name for saved in saved_tensors(block, Shape(4, 8))][:2] == ["input", "rows"]
    shape = Shape(4, 8, seq=8)
    assert sublayer_work(Diagonal(), shape)["attention"].products == ()
    small = small_part(Diagonal(), SizeRequirements(Sizes(tp=3, cp=2)))
    assert isinstance(small, Diagonal) and small.features == 18
    assert small_part(Diagonal(features=6), SizeRequirements(Sizes(tp=3))) == Diagonal(features=6)


def test_the_width_of_an_activation_follows_from_products_whatever_their_operation() -> None:
    """What the last product reads: of dispatched rows, else of the tensor group's."""

    class Renamed(Dense):
        """A feed-forward from outside."""

        def operations(self, hidden: int) -> Iterator[Operation]:
            """Yield those of the package under names of its own."""
            for one in super().operations(hidden):
                yield replace(one, name=f"own_{one.name}")

    shape = Shape(64, 8, tp=2)
    for latent in (None, 16):
        for kind in (Dense, Renamed):
            assert kind(width=128, latent=latent).activation_width(shape) == 64
    shared = Moe(width=32, router=Router(experts=4, top_k=2), shared=Shared(width=8, gate=True))
    assert shared.activation_width(shape._replace(etp=2)) == 16
    assert untrained.AbsentLayer().activation_width(shape) == 0


def test_a_subclass_is_described_as_what_it_inherits_from() -> None:
    class Other(Gqa):
        """Attention of another package."""

    one, other = (kind(heads=4, kv_heads=2, head_dim=8) for kind in (Gqa, Other))
    assert list(one.weights(16)) == list(other.weights(16))
    assert list(one.saved(Shape(16, 8))) == list(other.saved(Shape(16, 8)))


def test_kinds_that_all_go_to_two_places_leave_one_out() -> None:
    """A place without a kind is no legal value."""
    every: dict[str, Any] = {"modules": get_args(OffloadKind)}
    both = Offload(host=OffloadToHost(**every), disk=OffloadToDisk(**every, folder="./scratch"))
    (violation,) = both.rules()
    assert (violation.path, violation.nearest) == (("disk",), None)


def test_yarn_asks_for_frequencies_that_differ() -> None:
    """It divides by the logarithm of theta."""
    stretched = Rope(theta=1.0, yarn=Yarn(factor=2.0, original_length=64))
    assert [violation.path for violation in stretched.rules()] == [("theta",)]
