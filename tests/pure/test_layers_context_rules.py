"""What kinds of context parallelism ask of the sizes of a layout and of a model's heads."""

import pytest

from moefold.config.errors import Violation
from moefold.layers.config import Context, Gathered, Mixed, Ring, Ulysses
from moefold.layers.kinds.dense import Dense
from moefold.layers.kinds.gqa import Gqa
from moefold.model.config import Block, Decoder, Stack
from moefold.parallel.config import Layout
from moefold.spec.decoder import ModelNeeds, model_needs


def model(heads: int = 16, kv_heads: int = 4) -> ModelNeeds:
    attention = Gqa(heads=heads, kv_heads=kv_heads, head_dim=8)
    block = Block(attention=attention, ffn=Dense(width=64))
    return model_needs(Decoder(vocab=64, hidden=8, stacks=(Stack(blocks=(block,)),)), 64)


def violations(sizes: str, context: Context) -> list[Violation]:
    return list(Layout(sizes=sizes, context=context).violations(model()))


@pytest.mark.parametrize(
    ("sizes", "context"),
    [
        ("cp8", Ring()),
        ("cp8", Gathered()),
        ("cp4", Ulysses()),
        ("tp2 cp2", Ulysses()),
        ("cp8", Mixed(heads=4)),
        ("cp8", Mixed(heads=1)),
        ("tp4 cp8", Mixed(heads=1)),
        ("tp2", Ulysses()),
        ("tp2", Mixed(heads=2)),
    ],
)
def test_what_fits(sizes: str, context: Context) -> None:
    assert not violations(sizes, context)


@pytest.mark.parametrize(
    ("sizes", "context", "path", "nearest"),
    [
        ("cp8", Ulysses(), ("context",), {"kind": "mixed", "heads": 4}),
        ("tp2 cp8", Ulysses(), ("context",), {"kind": "mixed", "heads": 2}),
        ("tp4 cp2", Ulysses(), ("context",), {"kind": "ring"}),
        ("cp8", Mixed(heads=8), ("context", "heads"), 4),
        ("cp8", Mixed(heads=3), ("context", "heads"), 2),
        ("cp2", Mixed(heads=2**20), ("context", "heads"), 2),
        ("tp4 cp8", Mixed(heads=2), ("context", "heads"), 1),
    ],
)
def test_what_does_not_fit_and_what_nearly_would(
    sizes: str, context: Context, path: tuple[str, ...], nearest: object
) -> None:
    (found,) = violations(sizes, context)
    assert (found.path, found.nearest) == (path, nearest)
    assert "the numbers of attention and key-value heads (4, 16)" in found.rule
    mended = {"context": nearest} if path == ("context",) else {"context": Mixed(heads=nearest)}  # type: ignore[arg-type]
    assert not list(Layout(sizes=sizes, **mended).violations(model()))  # type: ignore[arg-type]


def test_only_two_levels_cut_groups() -> None:
    assert Layout(sizes="cp4", context=Mixed(heads=2)).split_groups == (("cp", 2),)
    assert Layout(sizes="tp4", context=Mixed(heads=2)).split_groups == ()
    assert Layout(sizes="cp4").split_groups == ()
