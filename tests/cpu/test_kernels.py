"""Every kernel against its plain reference, forward and gradients."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from moefold.kernels.attention import sdpa
from moefold.kernels.cross_entropy.chunked import cross_entropy_sum, loss_and_gradients
from moefold.kernels.fused import force_triton
from moefold.kernels.gradients import AUTOGRAD_SINK, AccumulatingSink, DeferredSink
from moefold.kernels.grouped import fused, grouped, loop
from moefold.kernels.grouped.choose import choose_kernel
from moefold.kernels.linear.product import linear, weight_gradient
from moefold.kernels.norm.rms import rms_norm
from moefold.kernels.operand import Operand
from moefold.kernels.permute.gather import permute_rows, permute_values, unpermute_rows
from moefold.kernels.rope.rotate import rotate
from moefold.kernels.swiglu import activation
from moefold.kernels.swiglu.ffn import dense_products, gated_ffn, grouped_products
from tests import references
from tests.cpu.small import relative


def drawn(
    *shape: int, dtype: torch.dtype = torch.float64, grad: bool = True, seed: int = 0
) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return values.to(dtype).requires_grad_(grad)


def operand(weight: Tensor) -> Operand:
    return Operand(weight, weight.detach())


def test_linear_has_the_right_gradients() -> None:
    x, w = drawn(5, 4), drawn(3, 4)
    assert gradcheck(lambda x, w: linear(x, Operand(w, w.detach())), (x, w))


def test_linear_widens_narrow_rows_and_keeps_them_narrow() -> None:
    x, w = drawn(5, 4, dtype=torch.bfloat16), drawn(3, 4, dtype=torch.float32)
    y = linear(x, operand(w))
    y.sum().backward()
    assert y.dtype == torch.float32 and x.grad is not None and x.grad.dtype == torch.bfloat16
    assert w.grad is not None and w.grad.dtype == torch.float32


@pytest.mark.parametrize("sink", [AccumulatingSink(), DeferredSink()])
def test_sinks_add_the_same_gradients_in_place(sink: AccumulatingSink | DeferredSink) -> None:
    x, w = drawn(6, 4), drawn(3, 4)
    linear(x, operand(w)).square().sum().backward()
    assert w.grad is not None
    once, w.grad = w.grad.clone(), None
    for times in (1, 2):
        linear(x, operand(w), sink=sink).square().sum().backward()
        if isinstance(sink, DeferredSink):
            assert sink.drain() == 1
        assert torch.allclose(w.grad, once * times, rtol=1e-14)
        if times == 1:
            place = w.grad.data_ptr()
    assert w.grad.data_ptr() == place


def test_deferred_products_run_once_and_only_when_drained() -> None:
    sink, x, w = DeferredSink(), drawn(6, 4), drawn(3, 4)
    linear(x, operand(w), sink=sink).sum().backward()
    assert w.grad is None
    assert (sink.drain(), sink.drain()) == (1, 0)


class Calls(TorchDispatchMode):
    """Notes the operations that run while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_gradients_of_16_bit_products_are_summed_in_fp32_on_a_device() -> None:
    """One operation into the sum, and nothing rounded before; on ``meta``, which is as a GPU."""
    dy = torch.empty(6, 4, dtype=torch.bfloat16, device="meta")
    x, into = torch.empty_like(dy[:, :3]), torch.empty(4, 3, device="meta")
    with Calls() as calls:
        assert weight_gradient(dy, x, into) is into
        assert weight_gradient(dy, x, None).dtype == torch.float32
        assert weight_gradient(dy.float(), x.float(), None).dtype == torch.float32
    made = [name for name in calls.names if not name.startswith(("aten.t.", "aten._to_copy."))]
    assert made == ["aten.addmm.dtype_out", "aten.mm.dtype", "aten.mm.default"]


@pytest.mark.parametrize("rows", (17, 100))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_gradients_of_rows_in_no_whole_step_are_added_in_place(
    rows: int, dtype: torch.dtype
) -> None:
    dy, x = (drawn(rows, n, dtype=torch.bfloat16, grad=False) for n in (4, 3))
    into = torch.ones(4, 3, dtype=dtype)
    assert weight_gradient(dy, x, into) is into
    assert torch.allclose(into.double(), 1 + dy.double().t() @ x.double(), rtol=0.02, atol=0.1)


def test_counters_of_flops_see_through_own_grouped_products() -> None:
    x_RI, dy_RO = torch.empty(14, 16, device="meta"), torch.empty(14, 24, device="meta")
    w_EOI, offs_E = torch.empty(4, 24, 16, device="meta"), torch.empty(4, device="meta").int()
    for calls in (
        lambda: fused.product(x_RI, w_EOI, offs_E),
        lambda: fused.input_gradient(dy_RO, w_EOI, offs_E),
        lambda: fused.weight_gradient(dy_RO, x_RI, offs_E, None),
        lambda: fused.weight_gradient(dy_RO, x_RI, offs_E, w_EOI),
    ):
        with FlopCounterMode(display=False) as counter:
            calls()
        assert counter.get_total_flops() == 2 * 14 * 16 * 24


GROUPS = [(0, 7, 0, 5), (3, 3, 3, 3), (12, 0, 0, 0), (0, 0, 0, 0)]


@pytest.mark.parametrize("counts", GROUPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_products_equal_the_loop(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    offs = torch.tensor(counts).cumsum(0).to(torch.int32)
    live = sum(counts)
    x, w = drawn(14, 16, dtype=dtype, grad=False), drawn(4, 24, 16, dtype=dtype, grad=False)
    dy = drawn(14, 24, dtype=dtype, grad=False)
    bound = 1e-2 if dtype == torch.bfloat16 else 1e-5
    for ours, theirs in (
        (grouped.product(x, w, offs), loop.product(x, w, offs)),
        (grouped.input_gradient(dy, w, offs), loop.input_gradient(dy, w, offs)),
    ):
        assert torch.allclose(ours[:live], theirs[:live], atol=bound, rtol=bound)
    into = drawn(4, 24, 16, dtype=torch.float32, grad=False)
    fresh = loop.weight_gradient(dy, x, offs, None)
    for kernel in (grouped, loop):
        dw = kernel.weight_gradient(dy, x, offs, None)
        assert torch.allclose(dw.float(), fresh, atol=bound, rtol=bound)
        added = kernel.weight_gradient(dy, x, offs, into.clone())
        assert torch.allclose(added - into, fresh, atol=2 * bound, rtol=2 * bound)


def test_the_loop_is_right() -> None:
    offs, group = torch.tensor([2, 2, 5], dtype=torch.int32), torch.tensor([0, 0, 2, 2, 2])
    x, w = drawn(5, 3, grad=False), drawn(3, 4, 3, grad=False)
    want = torch.einsum("ri,roi->ro", x, w[group])
    assert torch.allclose(loop.product(x, w, offs), want)


def test_a_grouped_kernel_that_cannot_run_says_what_to_change() -> None:
    with pytest.raises(ValueError, match=r"layout\.experts.*multiples of 4"):
        choose_kernel("grouped", torch.float32, 30)
    assert choose_kernel("auto", torch.float64, 32).name == "loop"
    assert choose_kernel("auto", torch.float32, 32).name == "grouped_mm"
    assert "compiles" in choose_kernel("auto", torch.bfloat16, 32).reason
    assert choose_kernel("loop", torch.bfloat16, 32).name == "loop"


DEVICES = {
    (8, 0): ("triton", "triton", "triton"),
    (8, 9): ("triton", "triton", "triton"),
    (9, 0): ("grouped_mm", "triton", "triton"),
    (10, 3): ("grouped_mm", "triton", "triton"),
    (12, 0): ("triton", "triton", "triton"),
}


@pytest.mark.parametrize("capability", DEVICES, ids=str)
def test_auto_takes_what_does_not_wait_for_each_group(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """bf16, fp32, and bf16 of a width that the library refuses."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    cuda, asked = torch.device("cuda"), ((torch.bfloat16, 32), (torch.float32, 32))
    with force_triton(True):
        found = [choose_kernel("auto", *one, device=cuda) for one in (*asked, (torch.bfloat16, 30))]
        assert tuple(kernel.name for kernel in found) == DEVICES[capability]
        assert choose_kernel("auto", torch.float64, 32, device=cuda).name == "loop"
        for dtype, summed in ((torch.bfloat16, fused), (torch.float32, grouped)):
            library = choose_kernel("grouped", dtype, 32, device=cuda)
            assert library.name == "grouped_mm" and library.product is grouped.product
            assert library.weight_gradient is summed.weight_gradient
        monkeypatch.setattr(torch.version, "hip", "6.4")
        assert "ROCm" in choose_kernel("auto", torch.bfloat16, 32, device=cuda).reason
        with pytest.raises(ValueError, match=r"do not support torch\.float64.*experts: auto"):
            choose_kernel("triton", torch.float64, 32, device=cuda)
    with force_triton(False):
        assert choose_kernel("auto", torch.bfloat16, 30, device=cuda).name == "loop"
    with pytest.raises(ValueError, match=r"experts: triton cannot be used: .*GPUs, not on cpu"):
        choose_kernel("triton", torch.bfloat16, 32)


@pytest.mark.parametrize("weighted", [False, True])
def test_swiglu_in_pieces_equals_the_reference(
    weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moefold.kernels.rows.CPU_CHUNK", 20)
    h, da = drawn(11, 12), drawn(11, 6, grad=False)
    p = drawn(11).detach().abs().requires_grad_() if weighted else None
    a = references.swiglu(h, p)
    a.backward(da)
    dh, dp, again = activation.backward(h.detach(), None if p is None else p.detach(), da)
    assert relative(activation.forward(h.detach(), None if p is None else p.detach()), a) < 1e-15
    assert relative(again, a) < 1e-15 and h.grad is not None and relative(dh, h.grad) < 1e-14
    if p is not None and dp is not None:
        assert p.grad is not None and relative(dp, p.grad) < 1e-14


def test_the_gated_ffn_has_the_right_gradients() -> None:
    x, w_in, w_out = drawn(5, 4), drawn(2, 3, 4), drawn(4, 3)

    def dense(x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
        products = dense_products(None)
        return gated_ffn(
            x, Operand(w_in, w_in.detach()), Operand(w_out, w_out.detach()), products, AUTOGRAD_SINK
        )

    assert gradcheck(dense, (x, w_in, w_out))
    p, many_in, many_out = drawn(5), drawn(3, 2, 3, 4), drawn(3, 4, 3)
    offs = torch.tensor([2, 2, 5], dtype=torch.int32)

    def experts(x: Tensor, w_in: Tensor, w_out: Tensor, p: Tensor) -> Tensor:
        products = grouped_products(choose_kernel("loop", x.dtype), offs)
        return gated_ffn(
            x,
            Operand(w_in, w_in.detach()),
            Operand(w_out, w_out.detach()),
            products,
            AUTOGRAD_SINK,
            p,
        )

    assert gradcheck(experts, (x, many_in, many_out, p))


def test_the_gated_ffn_keeps_only_input_and_preactivation() -> None:
    x, w_in, w_out, p = drawn(64, 8), drawn(2, 2, 16, 8), drawn(2, 8, 16), drawn(64)
    kept: list[tuple[int, ...]] = []
    offs = torch.tensor([40, 64], dtype=torch.int32)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(tuple(t.shape)) or t, lambda t: t
    ):
        gated_ffn(
            x,
            operand(w_in),
            operand(w_out),
            grouped_products(choose_kernel("loop", x.dtype), offs),
            AUTOGRAD_SINK,
            p,
        )
    rows = sorted(shape for shape in kept if shape[0] == 64)
    assert rows == [(64,), (64, 8), (64, 32)]


@pytest.mark.parametrize("piece", [8, 40, 1 << 18])
def test_rms_norm_equals_the_reference(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moefold.kernels.rows.CPU_CHUNK", piece)
    x, w = drawn(7, 3, 8), drawn(8)
    assert relative(rms_norm(x, operand(w), 1e-6), references.norm(x, w, 1e-6)) < 1e-14
    assert gradcheck(lambda x, w: rms_norm(x, operand(w), 1e-3), (x, w))


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotation_is_that_of_complex_numbers(layout: str) -> None:
    x, angle = drawn(5, 2, 6), drawn(5, 3, grad=False)
    turned = rotate(x, angle.cos(), angle.sin(), layout)
    pairs = (
        (lambda t: t.unflatten(-1, (2, 3)).transpose(-1, -2))
        if layout == "half"
        else (lambda t: t.unflatten(-1, (3, 2)))
    )
    number = torch.view_as_complex(pairs(x.detach()).contiguous())
    want = number * torch.polar(torch.ones_like(angle), angle)[:, None]
    assert torch.allclose(torch.view_as_complex(pairs(turned.detach()).contiguous()), want)
    assert gradcheck(lambda x: rotate(x, angle.cos(), angle.sin(), layout), (x,))


LENGTHS = [(12,), (4, 4, 4), (5, 5, 1, 1), (3, 2, 6)]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("heads", "groups", "qk", "v"), [(4, 2, 8, 8), (4, 4, 8, 6), (4, 2, 6, 8)])
def test_attention_equals_the_reference(
    lengths: tuple[int, ...], heads: int, groups: int, qk: int, v: int
) -> None:
    inputs = drawn(14, heads, qk), drawn(14, groups, qk, seed=1), drawn(14, groups, v, seed=2)
    ours, theirs = (f(*inputs, lengths, 0.4) for f in (sdpa.attention, references.attention))
    assert relative(ours, theirs) < 1e-14
    upstream = drawn(14, heads, v, grad=False, seed=3)
    for a, b in zip(
        torch.autograd.grad(ours, inputs, upstream),
        torch.autograd.grad(theirs, inputs, upstream),
        strict=True,
    ):
        assert relative(a, b) < 1e-13


@pytest.mark.parametrize("lengths", [(14,), *LENGTHS, ()])
def test_narrow_values_are_kept_as_they_are_and_change_no_bit(lengths: tuple[int, ...]) -> None:
    """Padded ones of the library's own attention were a fifth of what a DeepSeek layer keeps."""
    inputs = drawn(14, 4, 8), drawn(14, 4, 8, seed=1), drawn(14, 4, 6, seed=2)
    saved: list[int] = []
    with saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        ours = sdpa.attention(*inputs, lengths, 0.4)
    assert sum(saved) == 14 * 4 * (8 + 8 + 6 + 6) + sum(lengths) * 4, "and a statistic of each row"
    padded = sdpa.attention(*inputs[:2], F.pad(inputs[2], (0, 2)), lengths, 0.4)[..., :6]
    assert torch.equal(ours, padded)
    upstream = drawn(14, 4, 6, grad=False, seed=3)
    found, wanted = (torch.autograd.grad(out, inputs, upstream) for out in (ours, padded))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("lengths", [(14,), *LENGTHS, ()])
def test_values_wider_than_keys_come_beside_padding_in_16_bits(lengths: tuple[int, ...]) -> None:
    narrow = {"dtype": torch.bfloat16, "grad": False}
    q, k, v = drawn(14, 4, 6, **narrow), drawn(14, 2, 6, **narrow), drawn(14, 2, 8, **narrow)
    ours = sdpa.attention(q, k, v, lengths, 0.4)
    theirs = references.attention(q.float(), k.float(), v.float(), lengths, 0.4)
    assert ours.shape == theirs.shape and torch.allclose(ours.float(), theirs, atol=2e-2)


def test_attention_of_a_segment_does_not_see_the_others() -> None:
    q, k, v = (drawn(12, 2, 4, seed=s, grad=False) for s in range(3))
    out = sdpa.attention(q, k, v, (5, 7), 0.5)
    k[:5], v[:5] = 1e6, -1e6
    assert torch.equal(sdpa.attention(q, k, v, (5, 7), 0.5)[5:], out[5:])


def permutation(experts_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    copy_R = experts_TK.flatten().argsort(stable=True)
    row_TK = torch.empty_like(copy_R)
    row_TK[copy_R] = torch.arange(len(copy_R))
    return copy_R, copy_R // experts_TK.shape[1], row_TK.view_as(experts_TK)


def test_spread_and_collect_are_each_others_gradients() -> None:
    experts_TK = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1]])
    copy_R, token_R, row_TK = permutation(experts_TK)
    for done in (True, False):
        assert gradcheck(
            lambda x, done=done: permute_rows(x, token_R, row_TK, done), (drawn(4, 3),)
        )
        assert gradcheck(
            lambda y, done=done: unpermute_rows(y, token_R, row_TK, done), (drawn(8, 3),)
        )
    assert gradcheck(lambda w: permute_values(w, copy_R, row_TK), (drawn(4, 2),))
    x = drawn(4, 3, grad=False)
    assert torch.equal(unpermute_rows(permute_rows(x, token_R, row_TK), token_R, row_TK), 2 * x)


def test_missing_copies_count_as_zero_whatever_stands_in_their_rows() -> None:
    token_R, row_TK = torch.tensor([0, 1, 3, 3]), torch.tensor([[0, 4], [1, 4], [4, 4]])
    y = torch.full((4, 2), float("nan"), dtype=torch.float64)
    y[:2] = 1.0
    y.requires_grad_()
    out = unpermute_rows(y, token_R, row_TK)
    assert torch.equal(out, torch.tensor([[1.0, 1], [1, 1], [0, 0]], dtype=torch.float64))
    assert torch.equal(permute_rows(out, token_R, row_TK)[:2], out[:2])


def test_a_missing_copy_gets_no_weight_gradient_from_memory() -> None:
    """Its row past the last offset holds anything. Plant: read it."""
    copy_R, row_TK = torch.tensor([0, 2, 1, 3]), torch.tensor([[0, 4], [1, 4]])
    weights = drawn(2, 2)
    dp_R = torch.tensor([3.0, 5.0, float("nan"), float("nan")], dtype=torch.float64)
    (dweights,) = torch.autograd.grad(permute_values(weights, copy_R, row_TK), weights, dp_R)
    assert torch.equal(dweights, torch.tensor([[3.0, 0], [5, 0]], dtype=torch.float64))


@pytest.mark.parametrize("chunk", [16, 7, 64])
def test_the_chunked_loss_equals_the_whole_one(chunk: int) -> None:
    x, w = drawn(40, 6), drawn(50, 6)
    labels = torch.arange(40) % 50
    labels[3:9] = -100
    want = references.cross_entropy_sum(x, w, labels)
    dx, dw = torch.autograd.grad(want / 34, (x, w))
    ours = cross_entropy_sum(x, operand(w), labels, chunk=chunk)
    assert relative(ours.detach(), want.detach()) < 1e-14
    for a, b in zip(torch.autograd.grad(ours / 34, (x, w)), (dx, dw), strict=True):
        assert relative(a, b) < 1e-13
    for times in (1, 2):
        total, found = loss_and_gradients(x.detach(), operand(w), labels, scale=1 / 34, chunk=chunk)
        assert relative(total, want.detach()) < 1e-14 and relative(found, dx) < 1e-13
        assert w.grad is not None and relative(w.grad, times * dw) < 1e-13


def test_a_label_whose_share_is_no_number_has_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moefold.kernels.rows.CPU_CHUNK", 100)
    x, w, labels = (torch.randn(12, 6) * 100, torch.randn(50, 6), torch.arange(12))
    want = torch.nn.functional.cross_entropy(x @ w.t(), labels, reduction="sum")
    assert (x @ w.t()).softmax(1).gather(1, labels[:, None]).min() == 0
    assert relative(cross_entropy_sum(x, operand(w), labels, chunk=9), want) < 1e-6


def test_the_loss_makes_nothing_of_the_size_of_all_logits_or_of_a_second_head() -> None:
    """Counts the largest tensor that training's loss makes besides the head's one gradient."""
    rows, hidden, vocab, chunk = 512, 8, 4096, 32
    x, w = (
        drawn(rows, hidden, dtype=torch.float32, grad=False),
        drawn(vocab, hidden, dtype=torch.float32),
    )
    labels = torch.arange(rows)
    loss_and_gradients(x, operand(w), labels, scale=1.0, chunk=chunk)
    made: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            known = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
            if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in known:
                made.append(out.untyped_storage().nbytes() // 4)
            return out

    with Watch():
        loss_and_gradients(x, operand(w), labels, scale=1.0, chunk=chunk)
    assert max(made) <= chunk * vocab, "one chunk's logits are the largest"
    assert made.count(vocab * hidden) == 0, "no second gradient of the head"
