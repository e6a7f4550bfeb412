"""The families compute what transformers computes: stored numbers, and drawn configurations."""

import json
import math
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from moefold.layers.config import Bands, Rope
from moefold.layers.rope import inverse_frequencies
from moefold.model.config import Decoder
from moefold.model.decoder import DecoderModel
from moefold.model.families.dense import MOE_FAMILY, read_dense
from moefold.model.families.registry import families, family_of, from_hf
from tests.cpu.families import (
    RELEASED,
    STORED,
    by_class,
    fill,
    gate_of,
    gradients,
    ours,
    places,
    present,
    reference,
    stored_value,
    total_of,
    width_of,
    written,
)
from tests.family_draws import (
    COMPLEX_ANGLES,
    DEFAULTS,
    FAMILIES,
    PUBLISHED,
    REFUSED,
    SEEN,
    draw,
)

DRAWS = [0, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in range(1, 8))]
LOSS_SPREAD = 9.5e-7
"""Absolute, as stored beside the reference numbers."""
SPREAD = 2.3e-7
"""Relative, as stored beside the reference numbers; transformers narrows parts to float32."""


def close(found: float, expected: float, relative: float = SPREAD) -> bool:
    return math.isclose(found, expected, rel_tol=relative)


@pytest.mark.parametrize("name", STORED["models"])
def test_stored_numbers_are_reproduced(name: str) -> None:
    """Loss, logits and gradients of transformers 5.23, which this test does without."""
    case = STORED["models"][name]
    expected = case["expected"]
    reading = from_hf(present(case["config"]))
    model = DecoderModel(reading.decoder, "fp64")
    found = {piece.name: piece.shape for _, piece in places(model, reading.model)}
    fill(model, reading.model, {n: stored_value(n, shape) for n, shape in found.items()})
    assert sum(p.numel() for p in model.parameters()) == expected["n_params"]

    ids = torch.from_numpy(np.random.RandomState(7).randint(1, reading.decoder.vocab, (2, 16)))
    logits = model.logits(ids)
    assert close(logits.sum().item(), expected["logits_sum"])
    assert close(logits.square().sum().item(), expected["logits_sumsq"])
    first = torch.tensor(expected["logits_0_15_first4"], dtype=torch.float64)
    torch.testing.assert_close(logits[0, 15, :4], first, rtol=SPREAD, atol=5e-7)

    loss = model.loss(ids).lm_loss
    assert abs(loss.item() - expected["loss"]) < LOSS_SPREAD
    loss.backward()
    grads = gradients(model, reading.model)
    padding = reading.special_tokens.get("pad_token_id")
    if padding is not None:  # transformers gives the row of the padding token no gradient
        grads["model.embed_tokens.weight"][padding] = 0
    norm = math.sqrt(sum(g.square().sum().item() for g in grads.values()))
    assert close(norm, expected["grad_norm"])
    for router, value in expected["router_grad_norms"].items():
        assert close(grads[router].norm().item(), value)


def ids_of(vocab: int, seed: int) -> Tensor:
    return torch.randint(0, vocab, (2, 24), generator=torch.Generator().manual_seed(seed))


def watch(routers: dict[str, nn.Module], seen: dict[str, Any]) -> list[Any]:
    """Keep what each router returns."""

    def keep(name: str) -> Any:
        return lambda module, args, output: seen.__setitem__(name, output)

    return [r.register_forward_hook(keep(n)) for n, r in routers.items()]


def chosen(said: Any, top_k: int) -> tuple[Tensor, Tensor]:
    """Return weights and ids of what a router returns; Llama 4's has a weight of each expert."""
    weights_TE, *_, experts = said
    return weights_TE.topk(top_k, 1) if len(said) == 2 else (said[1], experts)


@pytest.mark.parametrize("seed", DRAWS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_logits_choices_weights_and_gradients_equal_transformers(
    model_type: str, seed: int
) -> None:
    """Sizes, K, groups, renormalisation, ties, YaRN and the family's own options are drawn."""
    double = seed != 7
    config = draw(model_type, Random(f"{model_type} {seed}"))
    config |= SEEN.get(model_type, {}) if seed % 2 == 0 else {}
    theirs = reference(model_type, config, seed)
    if double:
        theirs = theirs.double()
    mine, reading = ours(theirs, "fp64" if double else "fp32")
    mixtures = dict(mine.moe_layers())
    assert mixtures
    expected: dict[str, Any] = {}
    found: dict[str, Any] = {}
    watch({str(i): gate_of(theirs.model.layers[i]) for i in mixtures}, expected)
    watch({str(i): mixture.router for i, mixture in mixtures.items()}, found)
    ids = ids_of(config["vocab_size"], seed)
    with width_of(theirs, double):
        output = theirs(input_ids=ids, labels=ids, use_cache=False)
        output.loss.backward()
    loss = mine.loss(ids).lm_loss
    loss.backward()

    bound = 1e-5 if model_type in COMPLEX_ANGLES else 1e-9
    # In fp32 gradients through states are off by as much, in either library.
    narrow = 1e-3 if "linear_attention" in config.get("layer_types", ()) else 1e-4
    bound = bound if double else narrow
    exact = {"rtol": bound, "atol": bound}
    torch.testing.assert_close(mine.logits(ids), output.logits, **exact)
    torch.testing.assert_close(loss, output.loss, **exact)
    for i in expected:
        weights_TK, experts_TK = chosen(expected[i], found[i].weights_TK.shape[1])
        routing, ours_TK = found[i], found[i].decision.experts_TK
        order_TK, mine_TK = experts_TK.argsort(1), ours_TK.argsort(1)
        assert torch.equal(ours_TK.gather(1, mine_TK), experts_TK.gather(1, order_TK))
        torch.testing.assert_close(
            routing.weights_TK.gather(1, mine_TK), weights_TK.gather(1, order_TK), **exact
        )
    grads = gradients(mine, reading.model)
    trained = ((n, p) for n, p in theirs.named_parameters() if p.requires_grad)
    for name, parameter in trained:
        torch.testing.assert_close(
            grads[name], parameter.grad, **exact, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_default_configuration_has_as_many_parameters(model_type: str) -> None:
    """On the meta device, where no value is; counts of some are published too."""
    with torch.device("meta"):
        theirs = reference(model_type, DEFAULTS.get(model_type, {}))
    expected = sum(p.numel() for p in theirs.parameters() if p.requires_grad)
    assert total_of(from_hf(written(theirs)).decoder) == expected
    assert expected == PUBLISHED.get(model_type, expected)


@pytest.mark.parametrize("fast", [1.0, 4.0])
def test_bands_of_frequencies_are_those_of_transformers(fast: float) -> None:
    """Llama 4 Scout has one boundary: what is slower is divided, and nothing blends."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope: dict[str, Any] = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 16.0}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": fast}
    rope |= {"original_max_position_embeddings": 8192}
    config = LlamaConfig(head_dim=128, rope_parameters=rope, max_position_embeddings=131072)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, None)
    bands = Bands(factor=16.0, original_length=8192, slow=1.0, fast=fast)
    found = inverse_frequencies(Rope(theta=5e5, bands=bands), 128)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "olmoe"])
def test_aux_loss_is_that_of_transformers_in_one_layer_over_k(model_type: str) -> None:
    """Transformers pools layers and lets the load sum to K; so one layer is compared, over K."""
    config = draw(model_type, Random(model_type)) | {"num_hidden_layers": 1}
    config |= {"mlp_only_layers": [], "decoder_sparse_step": 1} if "qwen" in model_type else {}
    theirs = reference(model_type, config, 1).double()
    mine, _ = ours(theirs, "fp64")
    ids = ids_of(config["vocab_size"], 1)
    with width_of(theirs, True):
        output = theirs(input_ids=ids, output_router_logits=True, use_cache=False)
    (found,) = mine.loss(ids).router_terms.values()
    expected = output.aux_loss / config["num_experts_per_tok"]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert found > 1


def meant(config: dict[str, Any]) -> Decoder | str:
    """What a configuration describes, but for the longest sequence, which changes no maths."""
    try:
        return from_hf(present(config)).decoder.model_copy(update={"context": None})
    except ValueError as error:
        return str(error)


def test_every_family_has_a_class_of_transformers_and_a_draw() -> None:
    assert set(FAMILIES) == set(families())
    assert all(by_class(model_type, DEFAULTS.get(model_type, {})) for model_type in FAMILIES)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_an_absent_field_means_what_the_class_of_transformers_takes(model_type: str) -> None:
    """Each field in turn is left out, or null, of the default and of a drawn configuration."""
    usual = DEFAULTS.get(model_type, {})
    compared = 0
    for given in (usual, draw(model_type, Random(f"{model_type} 0"))):
        whole = by_class(model_type, given)
        assert whole is not None
        assert isinstance(meant(whole), Decoder), meant(whole)
        for name in whole.keys() - {"model_type"}:
            rest = {key: value for key, value in whole.items() if key != name}
            for less in (rest, rest | {name: None}):
                theirs = by_class(model_type, less)
                if theirs is None:
                    continue
                mine = meant(less)
                if isinstance(mine, Decoder):
                    expected = meant(theirs)
                    follows = isinstance(expected, str) and f"{name} is " in expected
                    assert follows or mine == expected, (name, name in less)
                    compared += 1
                elif given is usual and name not in REFUSED.get(model_type, ()):
                    assert f"{name} is " in mine, (name, mine)
    assert compared > 30


@pytest.mark.parametrize("model_type", MOE_FAMILY)
def test_an_absent_field_of_a_dense_model_means_what_its_class_takes(model_type: str) -> None:
    """Beside sizes, without which it is refused: mistral's window and qwen3's head among them."""

    def read(config: dict[str, Any]) -> Decoder | str:
        try:
            return read_dense(config, 8, 2, 1)[0].decoder.model_copy(update={"context": None})
        except ValueError as error:
            return str(error)

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 5e5}
    whole = by_class(model_type, sizes | {"sliding_window": None, "rope_parameters": rope})
    assert whole is not None
    assert isinstance(read(whole), Decoder)
    for name in whole.keys() - sizes - {"model_type", "rms_norm_eps"}:
        less = {key: value for key, value in whole.items() if key != name}
        theirs = by_class(model_type, less)
        assert theirs is not None
        assert read(less) == read(theirs), name


@pytest.mark.parametrize("name", RELEASED)
def test_released_configurations_are_read_as_transformers_reads_them(name: str) -> None:
    """Every field that stands there is known, and those of their own say what they say there."""
    config = RELEASED[name]
    mine = meant(config)
    assert isinstance(mine, Decoder), mine
    theirs = by_class(config["model_type"], config)
    assert theirs is not None
    assert mine == meant(theirs | ({"vision_config": {}} if "text_config" in theirs else {}))
    written = family_of(mine).to_hf(mine)
    assert meant(json.loads(json.dumps(written))) == mine
