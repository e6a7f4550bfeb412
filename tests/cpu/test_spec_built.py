"""What layers are built with is what their records describe."""

import pytest

from moefold.layers.placement import placements
from moefold.model.decoder import DecoderModel
from moefold.proof.subjects import SUBJECTS
from moefold.spec.decoder import model_weights


@pytest.mark.parametrize("name", SUBJECTS)
def test_names_shapes_and_order_of_parameters_are_as_described(name: str) -> None:
    decoder = SUBJECTS[name].decoder
    model = DecoderModel(decoder, device="meta")
    built = [(own, tuple(parameter.shape)) for own, parameter in model.named_parameters()]
    assert built == [(weight.name, weight.shape) for weight in model_weights(decoder)]
    stated = placements(model, decoder)
    assert stated["embed.weight"].wide and stated["embed.weight"].cuts == {"tp": 0}
    for weight in model_weights(decoder):
        assert stated[weight.name].of_experts == weight.expert


def test_a_parameter_of_another_shape_is_refused() -> None:
    model = DecoderModel(SUBJECTS["gqa"].decoder, device="meta")
    wider = SUBJECTS["gqa"].decoder.model_copy(update={"hidden": 32})
    with pytest.raises(ValueError, match="its layer states"):
        placements(model, wider)
