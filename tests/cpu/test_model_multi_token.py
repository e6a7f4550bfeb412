"""Losses of further tokens against a plain reference, and what they leave alone."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.data.batch import IGNORE_INDEX, MicroBatch, pack
from moefold.layers.config import Full
from moefold.layers.flow import Flow
from moefold.layers.kinds.dense import Dense
from moefold.mesh.config import Sizes
from moefold.mesh.legality import size_violations
from moefold.model.config import Block, Decoder, MultiToken, Stack
from moefold.model.decoder import DecoderModel
from moefold.model.incremental import IncrementalDecoder
from moefold.moe.config import Z
from moefold.spec.decoder import model_needs, with_multi_token
from tests.cpu import small

DOCUMENTS = (9, 1, 2, 7)
DEPTHS = {
    "one, normed": (MultiToken(weight=0.3),),
    "one, residual": (MultiToken(weight=0.3, reads="residual"),),
    "two": (MultiToken(weight=0.3), MultiToken(weight=0.7)),
    "two, residual": (MultiToken(weight=0.3, reads="residual"),) * 2,
}


def documents(seed: int = 0) -> list[list[int]]:
    return [small.ids_of(n, seed=seed + n).tolist() for n in DOCUMENTS]


def norm(x_TD: Tensor, weight_D: Tensor) -> Tensor:
    return x_TD * (x_TD.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight_D


def reference(model: DecoderModel, texts: Sequence[Sequence[int]]) -> tuple[Tensor, list[Tensor]]:
    """Return the loss, and that of each further token, a document and a token at a time.

    Blocks are run on one document alone; what joins them, losses and means are written out.
    """
    table, norms = model.embed.weight, model.norm.weight  # type: ignore[union-attr]
    depths = model.record.multi_token
    sums = [table.new_zeros(()) for _ in range(len(depths) + 1)]
    counts = [0] * len(sums)
    total = table.new_zeros(())
    everything = sum(map(len, texts))
    for text in texts:
        flow = Flow(pack([text]), model.precision_policy)
        residual, terms = model.run(flow, table[list(text)], model.main_blocks)
        _, weighted = model.sum_router_terms(terms)
        total = total + (0.0 if weighted is None else weighted) * len(text) / everything
        normed = norm(residual, norms)
        for depth in range(len(sums)):
            if depth:
                layer: Any = model.layers[str(model.record.layers + depth - 1)]
                near = [text[min(row + depth, len(text) - 1)] for row in range(len(text))]
                first = norm(table[near], layer.embed_norm.weight)
                before = residual if depths[depth - 1].reads == "residual" else normed
                second = norm(before, layer.row_norm.weight)
                joined = torch.cat([first, second], 1) @ layer.join.weight.t()
                residual, terms_N = layer(joined, flow)
                values = layer.moe.terms.values() if layer.moe is not None else ()
                for value, coefficient in zip(terms_N, values, strict=True):
                    total = total + value * coefficient * len(text) / everything
                normed = norm(residual, layer.norm.weight)
            logits = normed @ model.head_weight.t()
            for row in range(len(text) - depth - 1):
                sums[depth] = sums[depth] - F.log_softmax(logits[row], 0)[text[row + depth + 1]]
                counts[depth] += 1
    means = [one / count for one, count in zip(sums, counts, strict=True)]
    further = zip(depths, means[1:], strict=True)
    return total + means[0] + sum(one.weight * mean for one, mean in further), means


def model_of(depths: Sequence[MultiToken], **more: object) -> DecoderModel:
    z = small.moe(balance=(Z(coefficient=0.05),))
    return small.model_of(with_multi_token(small.decoder(small.GQA, z, z, **more), depths))


def step(model: DecoderModel, batches: Sequence[MicroBatch], recompute: Full | None = None) -> Any:
    """Return the figures and every gradient of a step."""
    figures = small.gradients(model, batches, recompute, 16)
    return figures, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("depths", DEPTHS.values(), ids=DEPTHS)
def test_a_step_is_that_of_a_plain_reference(depths: tuple[MultiToken, ...], tied: bool) -> None:
    """Loss, the loss of each further token, every gradient; in the notebook's way too."""
    model, texts = model_of(depths, tied=tied, embed_scale=1.0), documents()
    loss, means = reference(model, texts)
    loss.backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    rows = pack(texts, pad_to=8)
    assert rows.rows > rows.n_valid
    figures, ours = step(model, [rows])
    small.same(ours, want, 1e-12)
    told = [figures.lm_loss, *figures.extra_figures.values()]
    assert list(figures.extra_figures) == [f"multi_token/{k}" for k in range(1, len(depths) + 1)]
    assert told == pytest.approx([mean.item() for mean in means], rel=1e-12)
    _, again = step(model, [rows], Full())
    small.same(again, want, 1e-12)
    model.zero_grad()
    whole = model.micro_batch_loss(rows)
    assert whole.loss.item() == pytest.approx(loss.item(), rel=1e-12)
    assert whole.lm_loss.item() == pytest.approx(figures.lm_loss, rel=1e-12)
    whole.loss.backward()
    small.same({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, want, 1e-12)


def test_micro_batches_weigh_by_their_labels_of_each_token() -> None:
    """Documents apart are those together, whatever labels of each token they have."""
    model, texts = model_of(DEPTHS["two"]), documents()
    _, want = step(model, [pack(texts)])
    figures, found = step(model, [pack([text]) for text in texts])
    small.same(found, want, 1e-11)
    assert figures.extra_figures["multi_token/2"] > 0


def test_a_weight_of_zero_leaves_all_other_gradients_as_they_are() -> None:
    """To the bit, with every balance term, whatever the precision."""
    rows = [small.padded_rows((9, 7), 0), small.padded_rows((5, 2, 4), 5, seed=1)]
    record = small.decoder()
    for precision in ("fp64", "fp32", "bf16"):
        _, want = step(small.model_of(record, precision), rows)
        none = with_multi_token(record, [MultiToken(weight=0.0)] * 2)
        _, found = step(small.model_of(none, precision), rows)
        assert set(want) < set(found)
        for name, gradient in found.items():
            assert torch.equal(gradient, want.get(name, torch.zeros_like(gradient))), name


def test_rows_of_later_tokens() -> None:
    """Labels that are left out stay so; the last token stands in for those beyond its end."""
    rows = pack([[1, 2, 3, 4], [5], [6, 7, 8]], pad_to=10)
    rows.labels_T[1] = IGNORE_INDEX
    rows.labels_T[3] = 9  # of a document that goes on in another micro-batch
    one, two = rows.shift(1), rows.shift(2)
    assert one.ids_T.tolist() == [2, 3, 4, 4, 5, 7, 8, 8, 0, 0]
    x = IGNORE_INDEX
    assert one.labels_T.tolist() == [x, 4, 9, x, x, 8, x, x, x, x]
    assert two.ids_T.tolist() == [3, 4, 4, 4, 5, 8, 8, 8, 0, 0]
    assert two.labels_T.tolist() == [4, 9, *[x] * 8]
    assert (one.n_labels, two.n_labels, one.lengths) == (3, 2, rows.lengths)
    assert pack([], rows=4).shift(1).n_labels == 0


def test_further_tokens_do_nothing_outside_training() -> None:
    model, ids = model_of(DEPTHS["two"]), small.ids_of(2, 6)
    plain = small.model_of(with_multi_token(model.record, ()))
    assert torch.equal(model.logits(ids), plain.logits(ids))
    texts = ids.tolist()
    assert torch.equal(IncrementalDecoder(model)(texts), IncrementalDecoder(plain)(texts))
    more = [[*text, 3] for text in texts]
    going = IncrementalDecoder(model)
    going(texts)
    assert torch.allclose(going(more), plain.next_logits(more), rtol=1e-9)


def test_blocks_of_further_tokens_come_last() -> None:
    last = Block(attention=small.GQA, ffn=Dense(width=8), multi_token=MultiToken())
    for blocks in ((last,), (last, last.model_copy(update={"multi_token": None}))):
        (said,) = Decoder(vocab=8, hidden=8, stacks=(Stack(blocks=blocks),)).rules()
        assert "must come last" in said.rule


@pytest.mark.parametrize("stages", ["Et|tL", "Et|tmL", "Etm|tmL", "E|ttm|mL", "Et|tmmmL"])
def test_stages_that_leave_further_tokens_elsewhere_are_refused(stages: str) -> None:
    """With the nearest that has all of them beside the loss."""
    model = model_needs(with_multi_token(small.decoder(), [MultiToken()] * 2))
    found = list(size_violations(Sizes(pp=2), model, stages=stages))
    assert found and {one.nearest for one in found} == {"Et|tmmL"}
    assert not size_violations(Sizes(pp=2), model, stages="Et|tmmL")
