"""The model as a whole: recompute, padding, empty experts, precision."""

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moefold.config.base import Record
from moefold.data.batch import from_ids
from moefold.kernels.gradients import AccumulatingSink, DeferredSink
from moefold.layers.config import Full, RecomputeKind, Rope, Selective, Yarn
from moefold.layers.flow import Flow
from moefold.layers.kinds.dense import Dense
from moefold.layers.kinds.gqa import Gqa
from moefold.layers.norm import LayerNorm
from moefold.layers.placement import REPLICATED, shard
from moefold.layers.precision import PrecisionPolicy
from moefold.layers.saved_tensors import SavedTensors
from moefold.model.config import Decoder
from moefold.model.decoder import DecoderModel
from moefold.model.init import BLOCK, draw_normal, initial_values
from moefold.moe.config import Capacity, Router
from moefold.moe.router import TopKRouter
from moefold.spec.layer import Weight, norm
from tests.cpu.small import (
    DEEP,
    GQA,
    MLA,
    YARN,
    decoder,
    gradients,
    gradients_of,
    ids_of,
    model_of,
    moe,
    padded_rows,
    relative,
    same,
)

EVERYTHING = Selective(modules=get_args(RecomputeKind))
POLICIES: list[Record] = [
    Full(),
    EVERYTHING,
    Selective(modules=("norms",)),
    Selective(modules=("mla_up", "attention")),
]
SHAPES = {
    "gqa": decoder(),
    "mla": decoder(MLA.model_copy(update={"rope": YARN}), Dense(width=24), moe(router=DEEP)),
    "capacity": decoder(GQA, moe(capacity=Capacity(factor=0.75)), moe()),
    "tied": decoder(tied=True),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_training_gives_the_gradients_of_autograd(shape: str) -> None:
    """Sinks, the fused loss and accumulation against one backward of the whole loss."""
    model = model_of(SHAPES[shape])
    rows = from_ids(ids_of(3, 12))
    loss, want = gradients_of(model, rows)
    found = gradients(model, [rows], None, 16)
    ours = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    same(ours, want, 1e-12)
    norm = torch.stack([g.norm() for g in want.values()]).norm()
    assert found.grad_norm == pytest.approx(float(norm), rel=1e-12)
    weighted = sum(found.router_terms.values())
    assert weighted > 0 and found.lm_loss < float(loss)


@pytest.mark.parametrize("shape", SHAPES)
def test_deferred_weight_gradients_are_the_same(shape: str) -> None:
    model, rows = model_of(SHAPES[shape]), from_ids(ids_of(2, 12))
    _, want = gradients_of(model, rows)
    sink = DeferredSink()
    _, early = gradients_of(model, rows, sink=sink)
    assert set(early) == {"embed.weight" if SHAPES[shape].tied else "head.weight"}
    assert sink.drain() > 0
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    same(found, want, 1e-12)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sink", [AccumulatingSink()])
def test_recompute_changes_no_value(policy: Record, shape: str, sink: AccumulatingSink) -> None:
    model, rows = model_of(SHAPES[shape]), padded_rows((9, 4), 3)
    want = gradients(model, [rows], None, 16)
    kept = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    found = gradients(model, [rows], policy, 16)
    assert found == want
    same({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, kept, 1e-14)


@contextmanager
def counting_forward(module: nn.Module) -> Iterator[list[int]]:
    calls: list[int] = []
    handle = module.register_forward_pre_hook(lambda *_: calls.append(1))
    yield calls
    handle.remove()


@pytest.mark.parametrize(("policy", "runs"), [(None, 1), (Full(), 2)])
def test_full_recompute_runs_a_block_twice(policy: Record | None, runs: int) -> None:
    model = model_of(SHAPES["gqa"])
    with counting_forward(model.layers["0"]) as calls:
        gradients(model, [from_ids(ids_of(2, 8))], policy, 16)
    assert len(calls) == runs


def test_discarded_norms_hold_no_output() -> None:
    """What a norm gives is not kept for its consumers, only what made it."""
    model, rows, alive = model_of(SHAPES["gqa"], "fp32"), from_ids(ids_of(2, 8)), []

    def note(module: nn.Module, args: Any, out: Tensor) -> None:
        alive.append(weakref.ref(out))

    handle = model.layers["0"].attention_norm.register_forward_hook(note)
    for policy, kept in ((None, True), (Selective(modules=("norms",)), False)):
        x_TD, _ = model(Flow(rows, model.precision_policy, saved_tensors=SavedTensors(policy)))
        assert (alive[-1]() is not None) == kept
        x_TD.sum().backward()
    handle.remove()


def perturbed(router: TopKRouter, noise: float) -> Callable[..., Tensor]:
    """Return the router's logits with noise on every run after the first.

    The noise favours the last experts, a tie the first.
    """
    plain, runs = router._logits, []

    def logits(x_TD: Tensor, flow: Flow) -> Tensor:
        runs.append(1)
        found = plain(x_TD, flow)
        return found + (noise * torch.linspace(-1, 1, found.shape[1]) if len(runs) > 1 else 0)

    return logits


@pytest.mark.parametrize("policy", [Full(), EVERYTHING])
def test_recompute_never_routes_again(policy: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """All logits tie; noise inside recompute would choose others. Plant: decide anew each run."""
    model, rows = model_of(SHAPES["gqa"]), from_ids(ids_of(2, 16))
    for _, mixture in model.moe_layers():
        mixture.router.weight.data.zero_()
    _, want = gradients_of(model, rows)
    chosen: list[Tensor] = []
    for _, mixture in model.moe_layers():
        monkeypatch.setattr(mixture.router, "_logits", perturbed(mixture.router, 1e-9))
        mixture.experts.register_forward_pre_hook(lambda m, args: chosen.append(args[1].clone()))
    _, found = gradients_of(model, rows, policy)
    same(found, want, 1e-6)
    assert all(torch.equal(offs, chosen[0]) for offs in chosen)


@pytest.mark.parametrize("policy", [None, Full(), EVERYTHING])
def test_recompute_counts_tokens_once(policy: Record | None) -> None:
    """Plant: count in every run of a layer."""
    model, batches = model_of(SHAPES["gqa"]), [padded_rows((9, 4), 3), padded_rows((8,), 0)]
    gradients(model, batches, policy, 16)
    for _, mixture in model.moe_layers():
        counters = mixture.balance.counters
        assert int(counters.tokens) == 21
        assert int(counters.load_E.sum()) == 21 * mixture.record.router.top_k


@pytest.mark.parametrize("pads", [1, 3, 7])
@pytest.mark.parametrize("shape", SHAPES)
def test_padding_rows_change_nothing(shape: str, pads: int) -> None:
    """Outputs, gradients, counters and drops equal those without padding. Plant: route padding."""
    model, lengths = model_of(SHAPES[shape]), (9, 4, 5)
    whole, padded = padded_rows(lengths, 0), padded_rows(lengths, pads)
    want = gradients(model, [whole], None, 16)
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    counts = [m.balance.counters.load_E.clone() for _, m in model.moe_layers()]
    found = gradients(model, [padded], None, 16)
    assert found.router_terms == pytest.approx(want.router_terms, rel=1e-14)
    assert found.lm_loss == pytest.approx(want.lm_loss, rel=1e-14)
    same({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, grads, 1e-13)
    assert all(
        torch.equal(m.balance.counters.load_E, c)
        for (_, m), c in zip(model.moe_layers(), counts, strict=True)
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_masking_equals_shortening_bit_for_bit(shape: str, precision: str) -> None:
    """One thread, 16 rows or more."""
    torch.set_num_threads(1)
    model, lengths = model_of(SHAPES[shape], precision), (20, 12)
    results = []
    for pads in (0, 16):
        found = gradients(model, [padded_rows(lengths, pads)], None, 64)
        results.append(
            (found, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        )
    (want, grads), (found, ours) = results
    assert found == want
    assert [n for n in grads if not torch.equal(ours[n], grads[n])] == []


@pytest.mark.parametrize("fill", [float("nan"), float("inf")])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_stands_in_padding_rows_leaks_nowhere(shape: str, fill: float) -> None:
    """NaN in the padding rows of every module's output, and of the gradient that comes back to it.

    Plant: mask by multiplication.
    """
    model, rows = model_of(SHAPES[shape]), padded_rows((9, 5), 4)
    want = gradients(model, [rows], None, 16)
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    poisoned: list[str] = []

    def poison(name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, out: Any) -> Any:
            if not isinstance(out, Tensor) or out.shape[0] != rows.rows:
                return None
            poisoned.append(name)
            pad = ~rows.valid_T.view(-1, *[1] * (out.dim() - 1))
            if out.requires_grad:
                out.register_hook(lambda grad: torch.where(pad, fill, grad))
            return torch.where(pad, fill, out)

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(poison(name))
    found = gradients(model, [rows], None, 16)
    assert len(set(poisoned)) > 8
    assert found.lm_loss == pytest.approx(want.lm_loss, rel=1e-14)
    assert found.router_terms == pytest.approx(want.router_terms, rel=1e-14)
    same({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, grads, 1e-13)


def lopsided(model: DecoderModel) -> None:
    """Let every router send all tokens to experts 0 and 1."""
    for _, mixture in model.moe_layers():
        logits_E = torch.linspace(8.0, 0.0, mixture.record.router.experts, dtype=torch.float64)
        mixture.router._logits = lambda x_TD, flow, e=logits_E: (  # type: ignore[method-assign]
            e.to(torch.promote_types(x_TD.dtype, torch.float32)) + 0 * x_TD.sum(1, keepdim=True)
        )


@pytest.mark.parametrize("kernel", ["auto", "loop"])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_an_expert_without_tokens_gets_zeros(precision: str, kernel: str) -> None:
    """Zero gradients, not none, so that decay goes on. Plant: skip empty experts' gradients."""
    model = model_of(decoder(GQA, moe()), precision, experts=kernel)
    lopsided(model)
    gradients(model, [from_ids(ids_of(2, 8))], None, 16)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
    w_in = model.get_parameter("layers.0.moe.experts.w_in").grad
    assert w_in is not None and w_in[:2].abs().amin(dim=(1, 2, 3)).max() >= 0
    assert w_in[:2].abs().sum() > 0 and torch.equal(w_in[2:], torch.zeros_like(w_in[2:]))


def test_a_micro_batch_without_valid_rows_gives_zeros() -> None:
    model = model_of(decoder(GQA, moe(), Dense(width=24)))
    found = gradients(model, [padded_rows((), 8)], None, 16)
    assert found.lm_loss == 0 and found.grad_norm == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("kernel", ["auto", "loop"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_uninitialised_memory_reaches_nothing(
    precision: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fresh memory holds NaN. Plant: read rows past the last offset."""
    model = model_of(
        decoder(GQA, moe(capacity=Capacity(factor=0.5)), moe()), precision, experts=kernel
    )
    rows = padded_rows((9, 5), 2)
    want = gradients(model, [rows], None, 16)
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    def poisoned(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(*args: Any, **kwargs: Any) -> Tensor:
            fresh = plain(*args, **kwargs)
            return fresh.fill_(float("nan")) if fresh.is_floating_point() else fresh

        return make

    for home, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(home, name, poisoned(getattr(home, name)))
    found = gradients(model, [rows], None, 16)
    monkeypatch.undo()
    assert found == want
    same({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, grads, 0.0)


def test_casting_the_model_spares_biases_and_counts() -> None:
    """Plant: register them as plain buffers."""
    model = model_of(decoder(GQA, moe(router=DEEP)), "fp32")
    before = [
        m.router.selection_bias.clone()
        for _, m in model.moe_layers()
        if m.router.selection_bias is not None
    ]
    for _, mixture in model.moe_layers():
        mixture.balance.counters.load_E.fill_(40_841)
    model.to(torch.bfloat16).half()
    for (_, mixture), bias in zip(model.moe_layers(), before, strict=True):
        assert mixture.router.selection_bias is not None
        assert mixture.router.selection_bias.dtype == torch.float32 and torch.equal(
            mixture.router.selection_bias, bias
        )
        assert (
            mixture.balance.counters.load_E.dtype == torch.int64
            and int(mixture.balance.counters.load_E[0]) == 40_841
        )


def test_a_router_that_could_not_learn_is_refused() -> None:
    """One expert a token and a weight that is always one. Plant: drop the rule."""
    rules = [
        list(Router(experts=4, top_k=1, renormalise=r, order=o).rules())
        for r, o in ((True, "score_first"), (False, "topk_first"), (False, "score_first"))
    ]
    assert [len(found) for found in rules] == [1, 1, 0]
    model = model_of(
        decoder(GQA, moe(router=Router(experts=4, top_k=1, renormalise=False), balance=()))
    )
    _, found = gradients_of(model, from_ids(ids_of(2, 8)))
    assert found["layers.0.moe.router.weight"].norm() > 1e-6


def test_the_reported_loss_holds_no_router_term() -> None:
    """Plant: add the terms to lm_loss; or leave a term of coefficient zero in the graph."""
    model, ids = model_of(decoder(GQA, moe())), ids_of(2, 12)
    out = model.loss(ids)
    logits_TV = model.logits(ids)[:, :-1].flatten(0, 1)
    want = torch.nn.functional.cross_entropy(logits_TV, ids[:, 1:].flatten())
    assert float(out.lm_loss.detach()) == pytest.approx(float(want.detach()), rel=1e-12)
    assert set(out.router_terms) == {"aux_micro_batch", "aux_sequence", "aux_global_batch", "z"}
    assert float((out.loss - out.lm_loss).detach()) > 0
    bare = model_of(decoder(GQA, moe(balance=()))).loss(ids)
    assert bare.router_terms == {} and bare.loss is bare.lm_loss


def test_loss_takes_labels_of_its_own() -> None:
    model, ids = model_of(decoder(GQA, moe())), ids_of(2, 12)
    labels = ids.clone()
    labels[:, :6] = -100
    want = torch.nn.functional.cross_entropy(
        model.logits(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    )
    assert float(model.loss(ids, labels).lm_loss.detach()) == pytest.approx(
        float(want.detach()), rel=1e-12
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_grouped_experts_equal_the_loop(precision: str) -> None:
    rows, found = from_ids(ids_of(4, 16)), []
    for kernel in ("loop", "grouped"):
        model = model_of(decoder(GQA, moe()), precision, experts=kernel)
        experts = next(model.moe_layers())[1].experts
        runs = experts.kernel(model.precision_policy.dtype, experts.w_in.device)
        assert runs.name.startswith(kernel)
        gradients(model, [rows], None, 16)
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    same(found[1], found[0], 1e-5 if precision == "fp32" else 2e-2)


def test_bf16_follows_fp64_within_its_rounding() -> None:
    rows, found = from_ids(ids_of(4, 16)), []
    for precision in ("fp64", "bf16"):
        model = model_of(decoder(GQA, Dense(width=24), Dense(width=24)), precision)
        gradients(model, [rows], None, 16)
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        assert all(
            p.dtype == (torch.float64 if precision == "fp64" else torch.float32)
            for p in model.parameters()
        )
    same(found[1], found[0], 8 * torch.finfo(torch.bfloat16).eps)


def test_in_bf16_a_layer_norm_takes_the_whole_mean_away() -> None:
    """Rounded to the rows' format it was off by up to an eighth of their spread."""
    norm, flow = LayerNorm(64, 1e-6), Flow(from_ids(ids_of(1, 8)), PrecisionPolicy("bf16"))
    torch.nn.init.ones_(norm.weight)
    torch.manual_seed(1)
    x_TD = (torch.randn(8, 64) + 61.8).bfloat16().requires_grad_()
    wanted = torch.nn.functional.layer_norm(x_TD.double(), (64,), eps=1e-6)
    found = norm(x_TD, flow)
    upstream = torch.randn(8, 64)
    (mine,), (theirs,) = (
        torch.autograd.grad(y, x_TD, upstream.to(y.dtype)) for y in (found, wanted)
    )
    bound = torch.finfo(torch.bfloat16).eps
    assert relative(found, wanted) < bound and relative(mine, theirs) < bound


def test_a_stretched_context_scales_the_softmax_in_place_of_the_angles() -> None:
    """Of heads that turn whole it is the same; grouped-query attention left it out."""
    yarn, found = Yarn(factor=4.0, original_length=16), list[Tensor]()
    for mscale_all_dim in (0.0, 1.0):
        rope = Rope(yarn=yarn.model_copy(update={"mscale_all_dim": mscale_all_dim}))
        model = model_of(decoder(GQA.model_copy(update={"rope": rope}), Dense(width=24)))
        found.append(model.logits(ids_of(2, 24)))
    assert relative(found[1], found[0]) < 1e-6


def test_compute_copies_follow_their_weights() -> None:
    model = model_of(decoder(GQA, moe()), "bf16")
    weight = model.layers["0"].attention.q.weight
    first = model.precision_policy.operand(weight).value
    assert model.precision_policy.operand(weight).value is first
    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(model.precision_policy.operand(weight).value, first * 2)


def test_start_values_are_functions_of_seed_name_and_index() -> None:
    whole = draw_normal(3, "layers.0.moe.experts.w_in", (3, BLOCK), 0.5)
    for first in (0, BLOCK // 2 - 3, BLOCK // 2, BLOCK - 3, BLOCK, BLOCK + 17):
        for count in (1, 3, 4, 17, BLOCK // 2, BLOCK):
            part = draw_normal(3, "layers.0.moe.experts.w_in", (count,), 0.5, first)
            assert torch.equal(whole.flatten()[first : first + count], part)
    assert abs(float(whole.std()) - 0.5) < 5e-3 and abs(float(whole.mean())) < 5e-3
    assert not torch.equal(draw_normal(4, "a", (8,), 1.0), draw_normal(3, "a", (8,), 1.0))
    assert not torch.equal(draw_normal(3, "b", (8,), 1.0), draw_normal(3, "a", (8,), 1.0))


class Sloped(Gqa):
    """A kind from outside, with weights that begin in ways of their own."""

    def weights(self, hidden: int) -> Iterator[Weight]:
        yield Weight("slopes", (self.heads, 2), product=False, start=lambda place: -place)
        yield Weight("wide.weight", (hidden, hidden), start=0.5)
        yield Weight("last.weight", (hidden, hidden), added=True)
        yield norm("own_norm.weight", hidden)


def test_start_values_are_those_that_a_layer_describes() -> None:
    of = decoder(Sloped(**dict(GQA)), moe(), norm="zero_centred")
    begin = initial_values(of, 1)

    def started(name: str, *shape: int) -> Tensor:
        return begin(shard(f"layers.0.{name}", shape, REPLICATED, {}))

    assert started("attention.slopes", 4, 2).tolist() == [
        [-p] * 2 for p in (1 / 8, 3 / 8, 5 / 8, 7 / 8)
    ]
    assert abs(float(started("attention.wide.weight", 64, 64).std()) - 0.5) < 0.05
    spread = of.init_std / math.sqrt(2 * of.layers)
    assert abs(float(started("attention.last.weight", 64, 64).std()) / spread - 1) < 0.1
    assert started("attention.own_norm.weight", 4).tolist() == [1] * 4
    assert not started("attention_norm.weight", 4).any()


def test_every_expert_starts_different() -> None:
    model = model_of(decoder(GQA, moe()))
    experts = model.get_parameter("layers.0.moe.experts.w_in").flatten(1)
    assert torch.unique(experts, dim=0).shape[0] == 8


@pytest.mark.parametrize("shape", SHAPES)
def test_a_block_is_its_segments(shape: str) -> None:
    """Functions from a record of tensors to the next, four of them where there are experts."""
    model: DecoderModel = model_of(SHAPES[shape])
    record: Decoder = SHAPES[shape]
    flow = Flow(from_ids(ids_of(2, 8)), model.precision_policy)
    x_TD = model.embed(flow)
    for layer, block in zip(model.layers.values(), record.blocks, strict=True):
        segments = layer.segments()  # type: ignore[operator]
        assert len(segments) == (1 if isinstance(block.ffn, Dense) else 4)
        state: Any = x_TD
        for segment in segments:
            state = segment(state, flow)
            assert all(isinstance(t, Tensor | None) for t in tree_leaves(state))
        fresh = layer(x_TD, Flow(flow.rows, model.precision_policy))
        assert torch.equal(state.x_TD, fresh.x_TD) and torch.equal(state.terms_N, fresh.terms_N)
