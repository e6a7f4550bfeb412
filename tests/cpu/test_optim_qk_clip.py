"""QK-clip: largest logits as attention sees them, and the weights of heads that passed a bound."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moefold.comm.world import World
from moefold.config.slot import build
from moefold.data.batch import MicroBatch
from moefold.layers.attention import SoftmaxAttention
from moefold.layers.context.attend import local_max_logits
from moefold.layers.flow import Flow
from moefold.layers.kinds.gqa import Gqa
from moefold.layers.kinds.mla import Mla
from moefold.model.config import Block, Stack
from moefold.model.init import initialise
from moefold.optim.config import AdamW, QkClip
from moefold.parallel.apply import build_parts as build_parts
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.proof.subjects import DENSE, GQA, decoder
from moefold.spec.decoder import qk_clip_violations
from moefold.spec.layer import LogitRows, Weight
from moefold.training.step import gradients
from tests.cpu.routing import flow_of, rows_of

LENGTHS = (7, 4, 4, 9)
PLAIN = Gqa(heads=4, kv_heads=2, head_dim=4, bias="qkv")
LATENT = Mla(heads=2, q_rank=6, kv_rank=6, nope_dim=4, rope_dim=2, v_dim=4)


@pytest.mark.parametrize("window", (None, 3))
def test_the_largest_logit_is_over_what_rows_see(window: int | None, monkeypatch: Any) -> None:
    monkeypatch.setattr("moefold.kernels.attention.block.MAX_SCORES", 40)  # a few queries at a time
    rows = rows_of(LENGTHS, pads=3)
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(rows.rows, heads, 4, generator=generator) for heads in (4, 2))
    wanted, first = torch.zeros(4), 0
    for length in LENGTHS:
        for t in range(first, first + length):
            low = first if window is None else max(first, t - window + 1)
            for s in range(low, t + 1):
                logits = 0.5 * (q[t] * k[s].repeat_interleave(2, 0)).sum(1)
                wanted = torch.maximum(wanted, logits)
        first += length
    assert torch.allclose(local_max_logits(q, k, 0.5, flow_of(rows), window), wanted)


def logits_of(data: ShardedState, rows: MicroBatch) -> Tensor:
    """Return the largest logit of each head of the first layer in a pass of training."""
    attention = data.parts.model.get_submodule("layers.0.attention")
    assert isinstance(attention, SoftmaxAttention) and attention.max_logit_H is not None
    attention.max_logit_H.zero_()
    data.parts.model(Flow(rows, data.parts.model.precision_policy))
    return attention.max_logit_H.clone()


@pytest.mark.parametrize("alpha", (0.5, 0.2))
@pytest.mark.parametrize("attention", (PLAIN, LATENT), ids=("gqa", "mla"))
def test_heads_beyond_the_bound_are_scaled_to_it(attention: Any, alpha: float) -> None:
    """Each to the bound itself, and heads below it not at all, whatever key they share."""
    described = decoder(attention, DENSE)
    data = ShardedState(build_parts(described, "fp64", Layout(), World.single()))
    initialise(data.parts.model, described, 3)
    with torch.no_grad():
        for name, parameter in data.parts.model.named_parameters():
            if name.endswith(".bias"):
                parameter.copy_(torch.linspace(-1, 1, len(parameter)))
    rows = rows_of(LENGTHS)
    rows.ids_T.copy_(torch.arange(rows.rows) % 64)
    data.optimizer(AdamW(lr=0.0, qk_clip=QkClip()))
    before = logits_of(data, rows)
    bound = float(before.sort().values[: len(before) // 2 + 1].mean())
    assert before.min() < bound < before.max()
    clipping = data.optimizer(AdamW(lr=0.0, qk_clip=QkClip(bound=bound, alpha=alpha)))
    data.parts.model(Flow(rows, data.parts.model.precision_policy))
    weights = {name: p.detach().clone() for name, p in data.parts.model.named_parameters()}
    for parameter in data.parts.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    clipping.step()
    assert torch.allclose(logits_of(data, rows), before.clamp(max=bound))
    changed = {
        name.removeprefix("layers.0.attention.")
        for name, p in data.parts.model.named_parameters()
        if not torch.equal(p, weights[name])
    }
    each = {"q.weight", "k.weight", "q.bias", "k.bias"}
    assert changed == (each if attention is PLAIN else {"q_up.weight", "kv_up.weight"})
    if attention is LATENT:  # whose values lie beside its keys
        name = "layers.0.attention.kv_up.weight"
        was, now = weights[name], data.parts.model.get_parameter(name)
        before_HNR, after_HNR = (one.unflatten(0, (LATENT.heads, -1)) for one in (was, now))
        assert torch.equal(before_HNR[:, LATENT.nope_dim :], after_HNR[:, LATENT.nope_dim :])
    # A key takes the part 1 - alpha of the exponent of the head that is furthest beyond the bound.
    keys = "k" if attention is PLAIN else "kv_up"
    name = f"layers.0.attention.{keys}.weight"
    heads = getattr(attention, "kv_heads", attention.heads)
    was_G, now_G = (
        one.unflatten(0, (heads, -1))[:, 0].norm(dim=1)
        for one in (weights[name], data.parts.model.get_parameter(name))
    )
    shrink_G = (bound / before.clamp(min=bound)).view(heads, -1).amin(1)
    torch.testing.assert_close(now_G, was_G * shrink_G ** (1 - alpha))
    clipping.step()  # No head is beyond it now.
    assert torch.allclose(logits_of(data, rows), before.clamp(max=bound))


def test_logits_of_a_step_that_was_given_up_are_forgotten() -> None:
    """One that is not finite would keep the next update from any clip."""
    described = decoder(PLAIN, DENSE)
    data = ShardedState(build_parts(described, "fp64", Layout(), World.single()))
    initialise(data.parts.model, described, 3)
    data.optimizer(AdamW(qk_clip=QkClip()))
    noted_H = data.parts.model.get_submodule("layers.0.attention").max_logit_H
    assert isinstance(noted_H, Tensor)
    noted_H.fill_(torch.inf)
    gradients(data, [rows_of(LENGTHS)], 16)
    assert noted_H.isfinite().all() and noted_H.any()


class Silent(Gqa):
    """Attention from outside that does not state which weights its logits follow."""

    @property
    def logits(self) -> tuple[LogitRows, ...]:
        return ()


def test_logits_that_follow_no_trained_weight_are_refused() -> None:
    """Because of norms, of frozen weights, or as the layer does not state which weights it is."""
    clip = QkClip()
    (found,) = qk_clip_violations(decoder(GQA, DENSE), clip)
    assert "layer 0 normalises" in found.rule and found.nearest is None
    frozen = Block(attention=PLAIN, ffn=DENSE, frozen=("attention.q.weight",))
    stack = decoder(PLAIN, DENSE).stacks[0].model_copy(update={"blocks": (frozen,)})
    held = decoder(PLAIN, DENSE).model_copy(update={"stacks": (stack,)})
    assert "not trained" in next(qk_clip_violations(held, clip)).rule
    silent = Block.model_construct(attention=Silent(**dict(PLAIN)), ffn=DENSE)
    stack = Stack.model_construct(blocks=(silent,))
    (found,) = qk_clip_violations(held.model_copy(update={"stacks": (stack,)}), clip)
    assert "Silent of layer 0 states no logits" in found.rule
    assert not list(qk_clip_violations(decoder(PLAIN, DENSE), clip))


class Unwatched(torch.nn.Module):
    """An attention that notes no logits."""

    def __init__(self, record: Gqa, hidden: int, epsilon: float) -> None:
        super().__init__()
        self.inner = build(PLAIN, hidden, epsilon)


class Hidden(Gqa):
    """The record of one that is told to have them."""

    owner = Unwatched

    def weights(self, hidden: int) -> Iterator[Weight]:
        """Yield those of the attention within."""
        for weight in super().weights(hidden):
            yield replace(weight, name=f"inner.{weight.name}")


def test_attention_that_notes_no_logits_is_refused() -> None:
    """Nothing would ever be clipped."""
    block = Block.model_construct(attention=Hidden(**dict(PLAIN)), ffn=DENSE)
    stacks = (Stack.model_construct(blocks=(block,)),)
    data = ShardedState(
        build_parts(
            decoder(PLAIN, DENSE).model_copy(update={"stacks": stacks}),
            "fp64",
            Layout(),
            World.single(),
        )
    )
    with pytest.raises(ValueError, match=r"Unwatched of layer 0 does not record logits; derive"):
        data.optimizer(AdamW(qk_clip=QkClip()))
