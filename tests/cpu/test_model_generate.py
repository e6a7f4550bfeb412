"""Text that is written with keys and values kept is the text that is written without."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from moefold.layers.cache import KeyValueCache
from moefold.layers.config import ATTENTION
from moefold.layers.kinds.gqa import Gqa
from moefold.model.config import Decoder
from moefold.model.decoder import DecoderModel
from moefold.model.generate import generate
from moefold.model.init import initialise
from moefold.moe.config import Capacity
from moefold.proof.attentions import GQA, MHA, MLA
from moefold.proof.subjects import DENSE, SHARED, decoder, moe

PROMPTS = ([3, 1, 4, 1, 5, 9], [2], [7, 7], [7, 7])
TOKENS = 12
MODELS = {
    "gqa": decoder(GQA, DENSE, SHARED),
    "mha": decoder(MHA, moe()),
    "latent, yarn": decoder(MLA, DENSE, moe()),
    "latent, direct": decoder(MLA.model_copy(update={"q_rank": None}), moe()),
    "capacity": decoder(GQA, moe(capacity=Capacity(factor=0.5)), moe()),
    "tied": decoder(GQA, DENSE, tied=True),
}


def model_of(record: Decoder, precision: Any = "fp32") -> DecoderModel:
    model = DecoderModel(record, precision)
    initialise(model, record, 1)
    return model


class Noting:
    """Logits as a model gives them, noted."""

    def __init__(self, model: DecoderModel, cache: KeyValueCache | None) -> None:
        self.of, self.seen, self.rows = partial(model.next_logits, cache=cache), list[Tensor](), []
        assert model.embed is not None
        self.hook = model.embed.register_forward_hook(
            lambda module, given, out: self.rows.append(len(out))
        )

    def __call__(self, texts: Sequence[Sequence[int]]) -> Tensor:
        self.seen.append(self.of(texts))
        return self.seen[-1]


def written(model: DecoderModel, cache: KeyValueCache | None, **how: Any) -> tuple[Noting, Any]:
    noting = Noting(model, cache)
    texts = generate(noting, PROMPTS, TOKENS, **how)
    noting.hook.remove()
    return noting, texts


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_b73_logits_are_those_of_whole_texts(name: str, precision: str) -> None:
    """Of prompts of several lengths, two of them the same, until one has ended and after."""
    model = model_of(MODELS[name], precision)
    plain, texts = written(model, None, temperature=0)
    end = texts[0][TOKENS // 2]
    plain, texts = written(model, None, temperature=0, ends=[end])
    kept, same = written(model, KeyValueCache.of(MODELS[name]), temperature=0, ends=[end])
    assert same == texts
    bound = {"fp32": 1e-5, "fp64": 1e-13}[precision]
    for one, other in zip(kept.seen, plain.seen, strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound * float(other.abs().max()))
    assert kept.rows == [sum(map(len, PROMPTS)), *(len(part) for part in kept.seen[1:])]


def test_b73_a_window_that_is_full_goes_on_from_its_newest_half() -> None:
    """All rows are computed anew then, as those left out are in what the others have become."""
    model = model_of(MODELS["gqa"])
    _, texts = written(model, None, temperature=0, window=8)
    kept, same = written(model, KeyValueCache.of(MODELS["gqa"]), temperature=0, window=8)
    assert same == texts
    assert [step for step, rows in enumerate(kept.rows) if rows > 4] == [0, 3, 7, 8]
    assert kept.rows[3] == 4 + 4 + 5 + 5


def test_b73_a_cache_knows_another_prompt() -> None:
    """Which is as long as the text that was written, and one token more."""
    model, cache = model_of(MODELS["gqa"]), KeyValueCache.of(MODELS["gqa"])
    for text in ([1, 2, 3], [3, 2, 1, 4], [3, 2, 1, 4, 5]):
        torch.testing.assert_close(model.next_logits([text], cache), model.next_logits([text]))


def test_experts_drop_nothing_of_what_is_written() -> None:
    """So that a text does not depend on those beside it."""
    model = model_of(MODELS["capacity"])
    together = model.next_logits(PROMPTS)
    alone = torch.cat([model.next_logits([prompt]) for prompt in PROMPTS])
    torch.testing.assert_close(together, alone)


def test_a_layer_from_outside_is_computed_anew() -> None:
    """Nothing says that its rows reach others by keys and values alone."""

    class Outside(Gqa):
        """Attention of one's own."""

    record = decoder(GQA, DENSE)
    other = record.blocks[0].model_copy(update={"attention": Outside(**dict(GQA))})
    assert Outside not in ATTENTION.kinds.values() and KeyValueCache.of(record) is not None
    stack = record.stacks[0].model_copy(update={"blocks": (other,)})
    assert KeyValueCache.of(record.model_copy(update={"stacks": (stack,)})) is None
