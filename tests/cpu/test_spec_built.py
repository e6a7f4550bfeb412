"""What layers are built with is what their records describe."""

from collections.abc import Iterator

import pytest
from torch import Tensor

from moefold.layers.flow import Flow
from moefold.layers.linear import Linear
from moefold.layers.placement import placements
from moefold.model.decoder import DecoderModel
from moefold.moe.config import Capacity, Router
from moefold.moe.router import Decision, Routed, TopKRouter
from moefold.planner.count import count
from moefold.proof.subjects import SUBJECTS
from moefold.spec.decoder import model_weights
from moefold.spec.layer import Weight
from tests.cpu.small import GQA, HIDDEN, decoder, moe


@pytest.mark.parametrize("name", SUBJECTS)
def test_names_shapes_and_order_of_parameters_are_as_described(name: str) -> None:
    decoder = SUBJECTS[name].decoder
    model = DecoderModel(decoder, device="meta")
    built = [(own, tuple(parameter.shape)) for own, parameter in model.named_parameters()]
    assert built == [(weight.name, weight.shape) for weight in model_weights(decoder)]
    stated = placements(model, decoder)
    assert stated["embed.weight"].wide and stated["embed.weight"].cuts == {"tp": 0}
    for weight in model_weights(decoder):
        assert stated[weight.name].is_expert == weight.is_expert


class MixedRouter(TopKRouter):
    """A router from outside, of rows that a matrix of its own mixes."""

    def __init__(self, record: Router, hidden: int, capacity: Capacity | None = None) -> None:
        super().__init__(record, hidden, capacity)
        self.mix = Linear(hidden, hidden)

    def forward(self, x_TD: Tensor, flow: Flow, decision: Decision | None = None) -> Routed:
        return super().forward(self.mix(x_TD, flow), flow, decision)


class Mixed(Router):
    """Its record, which states that matrix."""

    owner = MixedRouter

    def weights(self, hidden: int) -> Iterator[Weight]:
        yield Weight("mix.weight", (hidden, hidden))


def test_weights_of_a_router_from_outside_are_counted_and_planned() -> None:
    ffn = moe(router=Mixed(experts=8, top_k=2))
    described, plain = decoder(GQA, ffn), decoder(GQA, moe())
    model = DecoderModel(described, device="meta")
    built = [(own, tuple(parameter.shape)) for own, parameter in model.named_parameters()]
    assert built == [(weight.name, weight.shape) for weight in model_weights(described)]
    found, before = count(described).parts, count(plain).parts
    assert found["router"].parameters == before["router"].parameters + HIDDEN**2
    assert found["attention"] == before["attention"]
    assert "router.mix.weight" in {w.name for _, _, ws in ffn.products(HIDDEN) for w in ws}


def test_a_parameter_of_another_shape_is_refused() -> None:
    model = DecoderModel(SUBJECTS["gqa"].decoder, device="meta")
    wider = SUBJECTS["gqa"].decoder.model_copy(update={"hidden": 32})
    with pytest.raises(ValueError, match="its layer states"):
        placements(model, wider)
