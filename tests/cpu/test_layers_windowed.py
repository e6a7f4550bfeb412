"""Windowed attention with sinks: trained, cached, planned, and described as it is built."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from moefold.data.batch import from_ids
from moefold.layers.attention import WindowedAttention
from moefold.layers.cache import KeyValueCache
from moefold.layers.config import Full, Selective
from moefold.layers.flow import Flow
from moefold.layers.kinds.dense import Dense
from moefold.layers.kinds.gqa import Windowed
from moefold.layers.placement import placements
from moefold.layers.saved_tensors import SavedTensors
from moefold.mesh.config import Sizes
from moefold.model.config import Block, Decoder, Stack
from moefold.model.decoder import DecoderModel
from moefold.model.init import initialise
from moefold.spec.decoder import model_needs, model_weights
from moefold.spec.layer import Shape
from tests import references

RECORD = Windowed(heads=4, kv_heads=2, head_dim=8, window=3)
FULL = RECORD.model_copy(update={"window": None})
DECODER = Decoder(
    vocab=50,
    hidden=16,
    init_std=0.3,
    stacks=(Stack(blocks=tuple(Block(attention=a, ffn=Dense(width=24)) for a in (RECORD, FULL))),),
)


def built(decoder: Decoder = DECODER) -> DecoderModel:
    """Return a model in fp64 whose sinks differ."""
    model = DecoderModel(decoder, "fp64")
    initialise(model, decoder, seed=1)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data.copy_(torch.linspace(-1, 2, len(parameter)))
    return model


def test_a_layer_equals_the_mask_written_out() -> None:
    model, rows = built(), from_ids(torch.arange(14).view(2, 7))
    layer = model.get_submodule("layers.0.attention")
    assert isinstance(layer, WindowedAttention) and layer.sinks is not None
    x_TD = torch.randn(14, 16, dtype=torch.float64, requires_grad=True)
    flow, seen = Flow(rows, model.precision_policy), list[Tensor]()

    def written_out(q: Tensor, k: Tensor, v: Tensor, flow: Flow) -> Tensor:
        seen.append(q)
        return references.attention(q, k, v, rows.lengths, 8**-0.5, 3, layer.sinks)

    leaves = [x_TD, layer.sinks, layer.q.weight, layer.k.weight, layer.v.weight]
    found = layer(x_TD, flow)
    layer.attend = written_out  # type: ignore[method-assign]
    expected = layer(x_TD, flow)
    assert len(seen) == 1
    grad = torch.randn_like(found)
    mine, theirs = (torch.autograd.grad(out, leaves, grad) for out in (found, expected))
    for one, other in zip((found, *mine), (expected, *theirs), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-13)


def test_recomputed_attention_gives_the_same_gradients() -> None:
    ids, found = torch.randint(0, 50, (2, 9)), []
    for policy in (None, Selective(modules=("attention",)), Full()):
        model = built()
        flow = Flow(from_ids(ids), model.precision_policy, saved_tensors=SavedTensors(policy))
        x_TD, _ = model(flow)
        x_TD.square().sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters() if "layers" in name})
    for one, other in pairwise(found):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(found[0][f"layers.{i}.attention.sinks"].abs().min() > 0 for i in (0, 1))


def test_texts_that_are_cached_are_those_that_are_not() -> None:
    model, cache = built(), KeyValueCache.of(DECODER)
    assert cache is not None
    texts = [[3, 1, 4, 1, 5], [9, 2]]
    with torch.no_grad():
        for _ in range(6):
            with_cache, without = model.next_logits(texts, cache), model.next_logits(texts)
            assert torch.allclose(with_cache, without, rtol=1e-11, atol=1e-12)
            texts = [[*t, int(n)] for t, n in zip(texts, without.argmax(-1), strict=True)]


def test_it_is_built_as_it_is_described() -> None:
    model = DecoderModel(DECODER, device="meta")
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes == {weight.name: weight.shape for weight in model_weights(DECODER)}
    assert placements(model, DECODER)["layers.0.attention.sinks"].cuts == {"tp": 0}
    assert {n.number for n in model_needs(DECODER).units if n.heads} == {4, 2}


def test_a_window_is_planned_by_what_it_sees_and_shrinks_with_the_layer() -> None:
    assert RECORD.core.pairs(9) == 3 - 9 / 18 and FULL.core.pairs(8) == 4
    large = RECORD.model_copy(update={"window": 128, "heads": 64, "kv_heads": 8})
    small = large.shrink(Sizes(tp=4))
    assert (small.kind, small.window, small.sinks) == ("windowed", 4, True)
    assert small.heads % 4 == small.kv_heads % 4 == 0 and small.head_dim == 4
    names = [saved.name for saved in RECORD.saved(Shape(16, 8))]
    assert names[-1] == "sinks" and "sinks" not in [
        saved.name for saved in RECORD.model_copy(update={"sinks": False}).saved(Shape(16, 8))
    ]


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_that_sees_nothing_is_refused(window: int) -> None:
    with pytest.raises(ValueError, match="window"):
        Windowed(heads=4, kv_heads=2, head_dim=8, window=window)
