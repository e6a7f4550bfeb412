"""The model at the edges: no rows, no labels, chunks and tiles of any size, weights swapped."""

import weakref
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from moefold.config.base import Record
from moefold.data.batch import from_ids, pack
from moefold.kernels.cross_entropy import chunked
from moefold.kernels.permute.gather import permute_rows, permute_values, unpermute_rows
from moefold.kernels.rows import row_chunks
from moefold.kernels.swiglu.ffn import Products
from moefold.layers.config import Full, RecomputeKind, Selective
from moefold.layers.kinds.dense import Dense
from moefold.layers.saved_tensors import SavedTensors
from moefold.model.generate import generate
from moefold.model.init import initialise
from moefold.moe import experts as experts_room
from moefold.moe.config import Capacity, Shared
from moefold.moe.dispatch.base import Dispatcher
from moefold.moe.dispatch.config import LocalExperts
from moefold.parallel.apply import single_rank_parts
from moefold.training.evaluate import evaluate
from tests.cpu.small import (
    DEEP,
    GQA,
    MLA,
    decoder,
    gradients,
    ids_of,
    model_of,
    moe,
    padded_rows,
    same,
)

SHAPES = {
    "gqa": decoder(),
    "mla": decoder(MLA, Dense(width=24), moe(router=DEEP)),
    "capacity": decoder(GQA, moe(capacity=Capacity(factor=0.75))),
    "tied": decoder(tied=True),
}
SOME = Selective(modules=get_args(RecomputeKind))


@pytest.mark.parametrize("policy", [None, Full(), Selective(modules=("norms", "mla_up")), SOME])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_micro_batch_without_any_row_gives_zeros(shape: str, policy: Record | None) -> None:
    model, rows = model_of(SHAPES[shape]), padded_rows((9, 5), 2)
    found = gradients(model, [pack([])], policy, 16)
    assert (found.lm_loss, found.grad_norm, found.tokens) == (0, 0, 0)
    by_itself = gradients(model, [rows], policy, 16)
    kept = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    beside = gradients(model, [pack([]), rows], policy, 16)
    assert beside == by_itself
    same({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, kept, 0.0)
    assert evaluate(single_rank_parts(model), [pack([])], 16) == ([0.0], 0, 0.0)
    assert model.logits(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0, 64)


@pytest.mark.parametrize("pads", [0, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_without_valid_rows_every_weight_gets_a_gradient_of_zero(shape: str, pads: int) -> None:
    """From autograd itself: a rank that gave none would leave the others waiting for it."""
    model = model_of(SHAPES[shape])
    model.micro_batch_loss(padded_rows((), pads)).loss.backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    assert missing == []
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


def test_an_expert_rank_without_rows_gives_zeros() -> None:
    """Two tokens whose copies all went elsewhere, and rows that hold none of no tokens."""
    x_TD = torch.randn(2, 4, requires_grad=True)
    none_R, none_TK = torch.zeros(0, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64)
    y_RD = permute_rows(x_TD, none_R, none_TK)
    out_TD = unpermute_rows(y_RD, none_R, none_TK)
    assert y_RD.shape == (0, 4) and torch.equal(out_TD, torch.zeros(2, 4))
    out_TD.sum().backward()
    assert x_TD.grad is not None and not x_TD.grad.any()
    weights_TK = torch.randn(2, 2, requires_grad=True)
    permute_values(weights_TK, none_R, none_TK).sum().backward()
    assert weights_TK.grad is not None and not weights_TK.grad.any()
    static_R = torch.zeros(3, dtype=torch.int64)
    assert permute_rows(x_TD[:0], static_R, none_TK[:0]).shape == (3, 4)


def test_rows_without_a_single_label_give_zeros() -> None:
    model, ids = model_of(decoder(GQA, moe(balance=()))), ids_of(2, 8)
    found = gradients(model, [from_ids(ids, torch.full_like(ids, -100))], None, 16)
    assert found.lm_loss == 0 and found.grad_norm == 0 and found.tokens == 16


def test_neither_chunks_nor_tiles_change_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that divide the rows or do not, and tiles of one word and of the whole vocabulary."""
    model, rows = model_of(decoder(tied=True)), padded_rows((20, 13), 6)
    want = gradients(model, [rows], None, 4096)
    kept = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for chunk, tile in ((1, 16), (13, 16 * 5), (39, 16 * 64), (40, 1)):
        monkeypatch.setitem(chunked.TILE, "cpu", tile)
        found = gradients(model, [rows], None, chunk)
        assert found.lm_loss == pytest.approx(want.lm_loss, rel=1e-14)
        same({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, kept, 1e-13)


def test_the_loss_rounds_its_scale_no_more_than_a_step_does() -> None:
    """bf16 holds one over the number of labels to two digits only."""
    model, rows = model_of(decoder(GQA, Dense(width=24)), "bf16"), from_ids(ids_of(3, 12))
    model.micro_batch_loss(rows).loss.backward()
    assert model.head is not None and model.head.weight.grad is not None
    found = model.head.weight.grad.clone()
    gradients(model, [rows], None, 1024)
    assert torch.equal(found, model.head.weight.grad)


def test_compute_copies_follow_weights_that_are_swapped() -> None:
    model, ids = model_of(decoder(GQA, moe()), "bf16"), ids_of(2, 8)
    model.logits(ids)
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.25
    fresh = model_of(decoder(GQA, moe()), "bf16", seed=2)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(model.logits(ids), fresh.logits(ids))


def test_what_is_changed_in_place_is_kept_not_made_again() -> None:
    recompute = SavedTensors(Selective(modules=("norms",)))
    x = torch.randn(4, requires_grad=True)
    with recompute.layer_hooks():
        y = recompute.run("norms", lambda x: x * 2, x)
        y.add_(1)
        total = (y * y).sum()
    total.backward()
    assert x.grad is not None and torch.allclose(x.grad, 4 * (2 * x.detach() + 1))


@pytest.mark.parametrize("policy", [Full(), SOME])
def test_what_runs_again_reads_the_weights_that_its_forward_read(policy: Record) -> None:
    """Step after step, though weights move between them and products read copies of them."""
    rows, found = padded_rows((9, 4), 3), []
    for recompute in (None, policy):
        model, steps = model_of(decoder(MLA, moe()), "bf16"), list[Tensor]()
        for _ in range(3):
            gradients(model, [rows], recompute, 16)
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            steps += [grad.clone() for grad in grads]
            with torch.no_grad():
                for parameter, grad in zip(model.parameters(), grads, strict=True):
                    parameter -= 0.1 * grad
        found.append(steps)
    assert not torch.equal(found[0][0], found[0][len(found[0]) // 3]), "no weight moved"
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_what_is_made_again_is_made_once_for_all_its_takers() -> None:
    """Each takes it in its turn, and the last lets it go."""
    runs, recompute = list[weakref.ref[Tensor]](), SavedTensors(SOME)

    def made(x: Tensor) -> Tensor:
        y = torch.tanh(x)
        runs.append(weakref.ref(y))
        return y

    x = torch.randn(16, 8, dtype=torch.float64, requires_grad=True)
    with recompute.layer_hooks():
        y = recompute.run("norms", made, x)
        total = (y**2 + torch.sin(y) + y**3).sum()
    del y
    total.backward()
    assert len(runs) == 2 and runs[-1]() is None
    y = torch.tanh(x.detach())
    want = (2 * y + torch.cos(y) + 3 * y**2) * (1 - y**2)
    assert x.grad is not None and torch.allclose(x.grad, want)


def test_discarded_outputs_are_made_again_for_each_backward() -> None:
    found, recompute = [], SavedTensors(SOME)
    x = torch.randn(16, 8, dtype=torch.float64, requires_grad=True)
    with recompute.layer_hooks():
        total = (recompute.run("norms", torch.tanh, x) ** 3).sum()
    for _ in range(2):
        x.grad = None
        total.backward(retain_graph=True)
        assert x.grad is not None
        found.append(x.grad.clone())
    assert torch.equal(*found)


def test_start_values_reset_what_training_moved() -> None:
    """A rewind to the start finds the biases and counts of the start."""
    record = decoder(GQA, moe(router=DEEP))
    model = model_of(record)
    fresh = {name: t.clone() for name, t in model.state_dict().items()}
    for _, mixture in model.moe_layers():
        assert mixture.router.selection_bias is not None
        mixture.router.selection_bias.add_(0.5)
        mixture.balance.counters.load_E.add_(3)
    initialise(model, model.record, 1)
    for _, mixture in model.moe_layers():
        assert mixture.router.selection_bias is not None
        assert not mixture.router.selection_bias.any() and not mixture.balance.counters.load_E.any()
    assert torch.equal(model.state_dict()["head.weight"], fresh["head.weight"])


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 0.0), (1.0, 1.5), (-1.0, 1.0)])
def test_sampling_knobs_out_of_range_are_refused(temperature: float, top_p: float) -> None:
    with pytest.raises(ValueError, match=rf"temperature {temperature} .* top_p {top_p} above"):
        generate(model_of(decoder()).next_logits, [[1, 2]], 2, temperature=temperature, top_p=top_p)


@pytest.mark.parametrize("experts", [8, 32_767, 32_768, 70_000])
def test_dispatch_sorts_any_number_of_experts(experts: int) -> None:
    experts_TK = torch.tensor([[experts - 1, 0], [experts, 3], [1, experts - 1]])
    x_TD, weights_TK = torch.arange(3.0)[:, None], torch.ones(3, 2)
    sent = Dispatcher(LocalExperts(), experts).dispatch(x_TD, weights_TK, experts_TK, False)
    assert sent.x_RD[:5, 0].tolist() == [0, 2, 1, 0, 2]
    assert sent.offs_E[[0, 1, 2, 3, -2, -1]].tolist() == [1, 2, 2, 3, 3, 5]


def test_an_output_is_discarded_though_its_tensor_ends_before_its_reader() -> None:
    """A segment of a block hands on its rows as another tensor of the same memory."""
    recompute = SavedTensors(Selective(modules=("norms",)))
    x_TD, weight_D = torch.randn(4, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    with recompute.layer_hooks():
        made = recompute.run("norms", torch.neg, x_TD)
    handed_on, memory = made.detach(), StorageWeakRef(made.untyped_storage())
    del made
    with recompute.layer_hooks():
        total = (handed_on * weight_D).sum()
    del handed_on
    assert memory.expired()
    total.backward()
    assert torch.equal(weight_D.grad, -x_TD.sum(0))  # type: ignore[arg-type]


@pytest.mark.parametrize(("modules", "products"), [((), 2), (("experts",), 3)])
def test_recomputed_experts_repeat_their_first_product_alone(
    modules: tuple[RecomputeKind, ...], products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[int]()
    plain = experts_room.grouped_products

    def counted(*args: Any) -> Products:
        whole = plain(*args)

        def product(x: Tensor, w: Tensor) -> Tensor:
            seen.append(1)
            return whole.product(x, w)

        return replace(whole, product=product)

    monkeypatch.setattr(experts_room, "grouped_products", counted)
    policy = Selective(modules=modules) if modules else None
    gradients(model_of(decoder(GQA, moe())), [padded_rows((8,), 0)], policy, 16)
    assert len(seen) == products


def test_every_kind_of_recompute_names_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind that no module answers to would save nothing and say nothing."""
    seen: set[str] = set()
    plain = SavedTensors.recomputes

    def wants(self: SavedTensors, kind: str) -> bool:
        seen.add(kind)
        return plain(self, kind)

    monkeypatch.setattr(SavedTensors, "recomputes", wants)
    mixture = moe(shared=Shared(width=16))
    gradients(model_of(decoder(MLA, Dense(width=24), mixture)), [padded_rows((8,), 0)], None, 16)
    # Tensor ranks alone gather: `tests/gloo/test_planner_notes.py` looks at those.
    assert seen - {"block"} == {*get_args(RecomputeKind)} - {"gather"}


@pytest.mark.parametrize(("device", "pieces"), [("cpu", 256), ("meta", 1)])
def test_pieces_cover_the_rows_and_are_few_on_a_device(
    device: str, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x_ND = torch.empty(1 << 14, 1 << 12, device=device)
    found = row_chunks(x_ND)
    pieces //= torch.get_num_threads() if device == "cpu" else 1
    assert len(found) == pieces and sum(len(range(*s.indices(1 << 14))) for s in found) == 1 << 14
    assert row_chunks(x_ND[:0]) == []
    monkeypatch.setattr("moefold.kernels.rows.CPU_CHUNK", 1)
    assert len(row_chunks(x_ND[:3])) == (3 if device == "cpu" else 1)


@pytest.mark.parametrize("copies", [1, 2, 3, 8])
def test_copies_are_summed_wide_and_rounded_once(copies: int) -> None:
    y_RD = torch.randn(5 * copies, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    row_TK = torch.arange(5 * copies).flip(0).view(5, copies)
    want_TD = y_RD[row_TK].double().sum(1).bfloat16()
    assert torch.equal(unpermute_rows(y_RD, row_TK.flatten() // copies, row_TK), want_TD)
    assert torch.equal(
        unpermute_rows(y_RD, row_TK.flatten() // copies, row_TK, complete=True), want_TD
    )


def test_an_operand_of_another_type_is_a_copy_of_the_weight_as_it_is() -> None:
    """What routers, norms and look-ups read comes from the helper that products read from."""
    model = model_of(decoder(), "bf16")
    weight = model.get_parameter("layers.0.attention.q.weight")
    assert (
        model.precision_policy.operand(weight, torch.float32).value.data_ptr() == weight.data_ptr()
    )
    for dtype in (torch.float64, None, torch.float64):
        value = model.precision_policy.operand(weight, dtype).value
        assert torch.equal(value, weight.detach().to(dtype or torch.bfloat16))
        with torch.no_grad():
            weight.mul_(1.5)
