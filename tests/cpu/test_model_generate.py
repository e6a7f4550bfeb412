"""Text that is written with keys and values kept is the text that is written without."""

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moefold.layers.cache import KeyValueCache
from moefold.layers.config import ATTENTION
from moefold.layers.kinds.gqa import Gqa
from moefold.model import incremental
from moefold.model.block import DecoderBlock
from moefold.model.config import Decoder, LowRank
from moefold.model.decoder import DecoderModel
from moefold.model.generate import NextLogits, generate
from moefold.model.incremental import IncrementalDecoder
from moefold.model.init import initialise
from moefold.moe.config import Capacity, Router, Shared
from moefold.proof.subjects import DENSE, GQA, MHA, MLA, SHARED, SUBJECTS, decoder, moe

aten = torch.ops.aten
PROMPTS = ([3, 1, 4, 1, 5, 9], [2], [7, 7], [7, 7])
TOKENS = 12
BIASED = Router(experts=4, top_k=2, score="sigmoid", selection_bias=True, scale=2.5)
MODELS = {
    "normed heads": decoder(GQA.model_copy(update={"qk_norm": "head", "bias": "all"}), moe()),
    "a bias that chooses": decoder(MHA, moe(router=BIASED), SHARED),
    "gqa": decoder(GQA, DENSE, SHARED),
    "mha": decoder(MHA, moe()),
    "latent, yarn": decoder(MLA, DENSE, moe()),
    "latent, direct": decoder(MLA.model_copy(update={"q_rank": None}), moe()),
    "capacity": decoder(GQA, moe(capacity=Capacity(factor=0.5)), moe()),
    "tied": decoder(GQA, DENSE, tied=True),
}
MIXERS = {
    name: SUBJECTS[name].decoder
    for name in ("convolved", "delta", "channels", "bounded", "chunked", "gated latents")
}
"""Of other mixers: what is kept of some is a state."""


HEAD = LowRank(weight="head.weight", rank=2, scale=2.0)
UNCOMMON = {
    "a bias of the router": decoder(GQA, moe(router=Router(experts=4, top_k=2, bias=True))),
    "experts that share out": decoder(GQA, moe(shared=Shared(width=8, gate=True, two_way=True))),
    "an adapted head": decoder(GQA, DENSE, adapters=(HEAD,)),
}
"""Of parts that few calls have to know or to leave to the modules."""


def model_of(record: Decoder, precision: Any = "fp32") -> DecoderModel:
    model = DecoderModel(record, precision)
    initialise(model, record, 1)
    return model


class Noting:
    """Logits as a model gives them, noted."""

    def __init__(self, model: DecoderModel, follows: NextLogits) -> None:
        self.of, self.seen, self.rows = follows, list[Tensor](), []
        assert model.embed is not None
        self.hook = model.embed.register_forward_hook(
            lambda module, given, out: self.rows.append(len(out))
        )

    def __call__(self, texts: Sequence[Sequence[int]]) -> Tensor:
        self.seen.append(self.of(texts))
        return self.seen[-1]


def written(
    model: DecoderModel,
    cache: KeyValueCache | IncrementalDecoder | None,
    tokens: int = TOKENS,
    **how: Any,
) -> tuple[Noting, Any]:
    lean = isinstance(cache, IncrementalDecoder)
    noting = Noting(model, cache if lean else partial(model.next_logits, cache=cache))
    texts = generate(noting, PROMPTS, tokens, **how)
    noting.hook.remove()
    return noting, texts


@pytest.mark.parametrize(
    ("name", "precision"),
    [*product(MODELS, ["fp32", "fp64"]), *((name, "fp64") for name in MIXERS)],
)
def test_logits_are_those_of_whole_texts(name: str, precision: str) -> None:
    """Of prompts of several lengths, two of them the same, until one has ended and after."""
    record = (MODELS | MIXERS)[name]
    model = model_of(record, precision)
    plain, texts = written(model, None, temperature=0)
    end = texts[0][TOKENS // 2]
    plain, texts = written(model, None, temperature=0, stop_ids=[end])
    kept, same = written(model, KeyValueCache.of(record), temperature=0, stop_ids=[end])
    assert same == texts
    bound = {"fp32": 1e-5, "fp64": 1e-13 if name in MODELS else 1e-12}[precision]
    lean, again = written(model, IncrementalDecoder(model), temperature=0, stop_ids=[end])
    assert again == texts
    for found in (kept, lean):
        for one, other in zip(found.seen, plain.seen, strict=True):
            atol = bound * float(other.abs().max())
            torch.testing.assert_close(one, other, rtol=bound, atol=atol)
        assert found.rows == [sum(map(len, PROMPTS)), *(len(part) for part in found.seen[1:])]


@pytest.mark.parametrize("name", UNCOMMON)
def test_few_calls_leave_no_part_out(name: str) -> None:
    """With values for what is zero at first: a router's bias had no part, nor an adapter's head."""
    model = model_of(UNCOMMON[name], "fp64")
    for parameter in model.parameters():
        change = torch.linspace(-0.3, 0.3, parameter.numel()).view_as(parameter)
        parameter.detach().add_(change)
    plain, texts = written(model, None, temperature=0)
    found, same = written(model, IncrementalDecoder(model), temperature=0)
    assert same == texts
    for one, other in zip(found.seen, plain.seen, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [None, 1])
def test_texts_of_one_token_are_whole_ones(window: int | None) -> None:
    """They have as many rows as there are texts, like those that go on."""
    model = model_of(MODELS["gqa"], "fp64")
    how: dict[str, Any] = {"temperature": 0, "window": window}
    plain = generate(model.next_logits, [[3], [2]], 6, **how)
    assert generate(IncrementalDecoder(model), [[3], [2]], 6, **how) == plain


def in_order(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b``, each sum taken in the order of its terms, so that zeros change nothing."""
    return (a.unsqueeze(-1) * b.unsqueeze(-3)).cumsum(-2)[..., -1, :]


class SumsInOrder(TorchDispatchMode):
    """Runs products so that no bit of a row depends on the number of rows."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.mm.default, aten.bmm.default):
            return in_order(*args)
        if func is aten.mm.out:
            return kwargs["out"].copy_(in_order(*args))
        if func is aten.addmm.default:
            return args[0] + in_order(*args[1:])
        if func is aten._scaled_dot_product_flash_attention_for_cpu.default:
            q, k, v, _, causal = args
            scale = (kwargs or {}).get("scale") or q.shape[-1] ** -0.5
            return attention_in_order(q, k, v, is_causal=causal, scale=scale), None
        return func(*args, **(kwargs or {}))


def attention_in_order(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None, **how: Any
) -> Tensor:
    """Attend so that no bit of a row depends on what it does not see."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = in_order(q, k.mT) * how["scale"]
    if how.get("is_causal"):
        seen = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
    if seen is not None:
        logits = logits.masked_fill(~seen, -torch.inf)
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    return in_order(weights, v) / weights.cumsum(-1)[..., -1:]


@pytest.mark.parametrize("name", [name for name in MODELS if "latent" not in name])
def test_where_sums_have_an_order_logits_are_those_of_whole_texts_to_the_bit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp64; libraries add a row up in an order that depends on how many rows there are.

    Latents that are kept meet queries before keys are made of them, which is another order.
    """
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention_in_order)
    model = model_of(MODELS[name], "fp64")
    with SumsInOrder(), torch.no_grad():
        plain, _ = written(model, None, 5, temperature=0)
        for cache in (KeyValueCache.of(MODELS[name]), IncrementalDecoder(model)):
            found, _ = written(model, cache, 5, temperature=0)
            assert all(map(torch.equal, found.seen, plain.seen)) and len(plain.seen) == 5


def test_of_latent_attention_latents_are_kept_whatever_makes_keys_of_them() -> None:
    """And the turned key that all heads share, once for both; an adapter makes keys too."""
    record = MODELS["latent, direct"]
    model = model_of(record, "fp64")
    for block in model.layers.values():
        up = block.attention.kv_up
        draw = torch.Generator().manual_seed(5)
        a = torch.randn(3, MLA.kv_rank, generator=draw).double()
        b = torch.randn(len(up.weight), 3, generator=draw).double()
        up.add_adapter("weight", LowRank(weight="kv_up.weight", rank=3, scale=0.5), a, 0.1 * b)
    cache = KeyValueCache.of(record)
    plain, texts = written(model, None, temperature=0)
    kept, same = written(model, cache, temperature=0)
    assert same == texts and cache is not None
    for one, other in zip(kept.seen, plain.seen, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    held = [part.shape[1::2] for layer in cache._layers.values() for part in layer._parts]
    assert held == [(1, MLA.kv_rank + MLA.rope_dim)] * len(model.layers)


def test_a_window_that_is_full_goes_on_from_its_newest_half() -> None:
    """All rows are computed anew then, as those left out are in what the others have become."""
    model = model_of(MODELS["gqa"])
    _, texts = written(model, None, temperature=0, window=8)
    kept, same = written(model, KeyValueCache.of(MODELS["gqa"]), temperature=0, window=8)
    assert same == texts
    assert [step for step, rows in enumerate(kept.rows) if rows > 4] == [0, 3, 7, 8]
    assert kept.rows[3] == 4 + 4 + 5 + 5


def test_a_cache_knows_another_prompt() -> None:
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


def test_what_is_drawn_is_the_same_with_few_calls() -> None:
    """To the bit in fp64: of one prompt, and of more rows than go to experts one by one."""
    model = model_of(MODELS["normed heads"], "fp64")
    how: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "window": 24}
    for prompts in ([[3, 1, 4]], [[i, 2 * i] for i in range(1, 13)]):
        plain = generate(model.next_logits, prompts, 40, **how)
        assert generate(IncrementalDecoder(model), prompts, 40, **how) == plain
        assert len({tuple(text) for text in plain}) == len(prompts)


def test_blocks_of_a_kind_that_is_not_known_run_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of common kinds never reach their modules once a text is there."""
    for name, known in (("gqa", True), ("mha", False), ("latent, direct", False)):
        model, calls = model_of(MODELS[name]), list[int]()
        follows = IncrementalDecoder(model)
        follows([[1, 2]])
        for block in model.layers.values():
            assert isinstance(block, DecoderBlock)
            block.attention.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        follows([[1, 2, 3]])
        assert bool(calls) is not known
    model = model_of(MODELS["gqa"])
    monkeypatch.setattr(incremental, "MAX_PARAMETERS", 1)
    assert incremental.build_steps(model) is None


def test_tokens_without_probability_are_never_drawn() -> None:
    """The nucleus is the smallest set that holds ``top_p``, and shares are kept."""
    logits = torch.tensor([[0.5, 0.3, 0.2, 0.0]]).double().log()

    def share(top_p: float) -> list[float]:
        (many,) = generate(lambda texts: logits, [[0]], 4000, top_p=top_p)
        return [many.count(token) / len(many) for token in range(4)]

    for top_p, wanted in (
        (1.0, [0.5, 0.3, 0.2, 0]),
        (0.6, [0.625, 0.375, 0, 0]),
        (0.49, [1, 0, 0, 0]),
    ):
        for one, other in zip(share(top_p), wanted, strict=True):
            assert abs(one - other) < 0.03 and (other > 0 or one == 0)
