"""Gated feed-forward as one autograd function that saves only its input and pre-activation.

N rows, D hidden, F width. ``y = w_out (p * silu(w_gate x) * w_up x)`` for a dense FFN or for many
experts at once: the products are arguments. The routing weight ``p`` of a row is applied between
activation and second product, so that its gradient needs no saved output.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moefold.kernels.function import Function
from moefold.kernels.gradients import GradientSink
from moefold.kernels.grouped.choose import GroupedKernel
from moefold.kernels.linear.product import weight_gradient
from moefold.kernels.operand import AdapterOperand, Operand
from moefold.kernels.swiglu import activation
from moefold.kernels.swiglu.variant import ExpertVariant


@dataclass(frozen=True)
class Products:
    """The three matrix products of a weight: forward, input gradient, weight gradient."""

    product: Callable[[Tensor, Tensor], Tensor]
    input_gradient: Callable[[Tensor, Tensor], Tensor]
    weight_gradient: Callable[[Tensor, Tensor, Tensor | None], Tensor]


def dense_products(n_valid: int | None) -> Products:
    """Return the products of a matrix [O, I]; its gradient uses only the first ``n_valid`` rows."""
    return Products(
        product=lambda x, w: x @ w.t(),
        input_gradient=lambda dy, w: dy @ w,
        weight_gradient=lambda dy, x, into: weight_gradient(dy[:n_valid], x[:n_valid], into),
    )


def block_products(n_valid: int | None, blocks: int) -> Products:
    """Return the products of a block-diagonal matrix [B, O, I].

    Rows [N, B * I] give [B * N, O], block after block; rows in that form give [N, B * O].
    """

    def to_blocks(rows: Tensor, concatenated: bool) -> Tensor:
        """Return rows in either form as [B, N, I]."""
        if concatenated:
            return rows.unflatten(1, (blocks, -1)).transpose(0, 1)
        return rows.unflatten(0, (blocks, -1))

    def product(x: Tensor, w: Tensor) -> Tensor:
        concatenated = x.shape[1] == blocks * w.shape[2]
        y = torch.bmm(to_blocks(x, concatenated), w.mT)
        return y.flatten(0, 1) if concatenated else y.transpose(0, 1).flatten(1)

    def gradient(dy: Tensor, x: Tensor, into: Tensor | None) -> Tensor:
        pair = (to_blocks(a, a.shape[0] < b.shape[0]) for a, b in ((dy, x), (x, dy)))
        each_into = (None,) * blocks if into is None else into.unbind(0)
        args = zip(*(rows[:, :n_valid] for rows in pair), each_into, strict=True)
        gradients = [weight_gradient(*block) for block in args]
        return torch.stack(gradients) if into is None else into

    return Products(product, lambda dy, w: product(dy, w.mT), gradient)


def grouped_products(kernel: GroupedKernel, offs_E: Tensor) -> Products:
    """Return the products of one matrix per group [E, O, I]; groups end at ``offs_E``."""
    return Products(
        product=lambda x, w: kernel.product(x, w, offs_E),
        input_gradient=lambda dy, w: kernel.input_gradient(dy, w, offs_E),
        weight_gradient=lambda dy, x, into: kernel.weight_gradient(dy, x, offs_E, into),
    )


def gated_ffn(
    x_ND: Tensor,
    w_in: Operand,
    w_out: Operand,
    products: Products,
    sink: GradientSink,
    p_N: Tensor | None = None,
    recompute: bool = False,
    adapter_products: Products | None = None,
    form: ExpertVariant | None = None,
) -> Tensor:
    """Apply a gated feed-forward and return ``y_ND``.

    Args:
        x_ND: rows in the operands' dtype.
        w_in: [..., 2, F, D], gate then up; leading dims are groups.
        w_out: [..., D, F].
        products: dense, block-diagonal or grouped products.
        sink: takes the weights' gradients.
        p_N: routing weight of each row (fp32 or wider), or None.
        recompute: recompute the pre-activation in backward instead of saving it.
        adapter_products: products of adapters where they differ from ``products``.
        form: biases and activation of experts other than SwiGLU; requires ``p_N``.
    """
    adapter = adapter_products or products
    adapters = Adapter.of(w_in, adapter, gated=True), Adapter.of(w_out, adapter)
    return _GatedFfn.apply(
        x_ND, w_in.master, w_out.master, p_N, w_in.value, w_out.value, products, sink, recompute,
        adapters, form, *(matrix for low in adapters for matrix in low.masters),
        *(() if form is None else form.masters),
    )  # fmt: skip


@dataclass(frozen=True)
class Adapter:
    """The low-rank adapter of one of the two weights, if any.

    N rows, I in, O out, r rank; J is 2 where gate and up have separate matrices A, else 1.
    """

    low: AdapterOperand | None
    products: Products
    num_a: int = 1
    """J: the number of matrices A."""
    gated: bool = False
    """Whether B is [..., 2, F, r]."""

    @classmethod
    def of(cls, weight: Operand, products: Products, gated: bool = False) -> "Adapter":
        """Return the adapter of a weight."""
        low = weight.low_rank
        apart = low is not None and gated and low.a.value.dim() == weight.value.dim()
        return cls(low, products, 2 if apart else 1, gated)

    @property
    def masters(self) -> tuple[Tensor | None, Tensor | None]:
        """Parameters A and B, or None."""
        return (None, None) if self.low is None else (self.low.a.master, self.low.b.master)

    def _a_matrices(self, a: Tensor) -> Tensor:
        """Return A as one matrix per group."""
        return a.flatten(0, 1) if self.num_a > 1 else a

    def _b_matrices(self, b: Tensor) -> tuple[Tensor, ...]:
        """Return views of B, one per part, each with one matrix per group."""
        if self.num_a > 1:
            return b.unbind(0)
        if self.gated:
            b = b.view(*b.shape[:-3], -1, b.shape[-1])
        return (b,)

    def _inner(self, x_NI: Tensor) -> Tensor:
        """Return ``scale * A x``, [N, J * r]."""
        assert self.low is not None
        rows_NI = self.low.apply_dropout(x_NI)
        return self.products.product(rows_NI, self._a_matrices(self.low.a.value)).mul_(
            self.low.scale
        )

    def inner_gradient(self, dy_NO: Tensor) -> Tensor | None:
        """Return the gradient of ``A x``, [N, J * r]."""
        if self.low is None:
            return None
        pairs = zip(dy_NO.chunk(self.num_a, 1), self._b_matrices(self.low.b.value), strict=True)
        grads = [self.products.input_gradient(dy.contiguous(), b) for dy, b in pairs]
        return (grads[0] if len(grads) == 1 else torch.cat(grads, 1)).mul_(self.low.scale)

    def add_(self, y_NO: Tensor, x_NI: Tensor) -> Tensor:
        """Add ``scale * B (A x)`` to the weight's product, in place."""
        if self.low is None:
            return y_NO
        inners = self._inner(x_NI).chunk(self.num_a, 1)
        outs = zip(
            y_NO.chunk(self.num_a, 1), inners, self._b_matrices(self.low.b.value), strict=True
        )
        for y, inner, b in outs:
            y.add_(self.products.product(inner.contiguous(), b))
        return y_NO

    def add_gradient_(self, dx_NI: Tensor, back: Tensor | None) -> Tensor:
        """Add the gradient of the rows, in place."""
        if self.low is None or back is None:
            return dx_NI
        more_NI = self.products.input_gradient(back, self._a_matrices(self.low.a.value))
        return dx_NI.add_(self.low.apply_dropout(more_NI))

    def deliver(
        self, dy_NO: Tensor, x_NI: Tensor, back: Tensor | None, sink: GradientSink
    ) -> tuple[Tensor | None, Tensor | None]:
        """Pass the gradients of A and B to the sink."""
        if self.low is None or back is None:
            return None, None
        # Computed before the products run: by then the matrices may be sharded over ranks again.
        inners = self._inner(x_NI).chunk(self.num_a, 1)
        dropped = self.low.apply_dropout

        def product_a(into: Tensor | None) -> Tensor:
            flat = None if into is None else self._a_matrices(into)
            da = self.products.weight_gradient(back, dropped(x_NI), flat)
            return da.unflatten(0, (self.num_a, -1)) if self.num_a > 1 else da

        def product_b(into: Tensor | None) -> Tensor:
            flats = (None,) * self.num_a if into is None else self._b_matrices(into)
            factors = zip(dy_NO.chunk(self.num_a, 1), inners, flats, strict=True)
            db = [
                self.products.weight_gradient(dy.contiguous(), inner.contiguous(), flat)
                for dy, inner, flat in factors
            ]
            if self.num_a > 1:
                return torch.stack(db)
            return db[0].unflatten(-2, (2, -1)) if self.gated else db[0]

        a = self.low.a.master
        b = self.low.b.master
        return sink.deliver(a, product_a), sink.deliver(b, product_b)


def _scaled_input(x_ND: Tensor, p_N: Tensor | None, form: ExpertVariant | None) -> Tensor:
    """Return the input rows of the first product."""
    return x_ND if form is None or p_N is None else form.scale_input(x_ND, p_N)


class _GatedFfn(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        master_in: Tensor,
        master_out: Tensor,
        p_N: Tensor | None,
        w_in: Tensor,
        w_out: Tensor,
        products: Products,
        sink: GradientSink,
        recompute: bool,
        adapters: tuple[Adapter, Adapter],
        form: ExpertVariant | None,
        *masters: Tensor | None,
    ) -> Tensor:
        unscaled_ND = x_ND
        x_ND = _scaled_input(x_ND, p_N, form)
        h_N2F = adapters[0].add_(products.product(x_ND, w_in.flatten(-3, -2)), x_ND)
        h_N2F = h_N2F if form is None else form.add_in_bias(h_N2F)
        ctx.save_for_backward(unscaled_ND, None if recompute else h_N2F, p_N, w_in, w_out)
        ctx.masters = (master_in, master_out)
        ctx.products = products
        ctx.sink = sink
        ctx.adapters = adapters
        ctx.form = form
        if form is None:
            a_NF = activation.forward(h_N2F, p_N)
            return adapters[1].add_(products.product(a_NF, w_out), a_NF)
        assert p_N is not None
        a_NF = form.forward(h_N2F, p_N)
        return form.add_out_bias(adapters[1].add_(products.product(a_NF, w_out), a_NF), p_N)

    @staticmethod
    def backward(ctx: Any, dy_ND: Tensor) -> tuple[Tensor | None, ...]:
        unscaled_ND, h_N2F, p_N, w_in, w_out = ctx.saved_tensors
        (master_in, master_out) = ctx.masters
        products = ctx.products
        sink = ctx.sink
        dy_ND = dy_ND.contiguous()
        (inner, outer) = ctx.adapters
        form = ctx.form
        unscaled_ND = unscaled_ND.detach()  # queued products must not hold the autograd graph
        x_ND = _scaled_input(unscaled_ND, p_N, form)
        if h_N2F is None:
            h_N2F = inner.add_(products.product(x_ND, w_in.flatten(-3, -2)), x_ND)
            h_N2F = h_N2F if form is None else form.add_in_bias(h_N2F)
        outer_back = outer.inner_gradient(dy_ND)
        da_NF = outer.add_gradient_(products.input_gradient(dy_ND, w_out), outer_back)
        if form is None:
            dh_N2F, dp_N, a_NF = activation.backward(h_N2F, p_N, da_NF)
        else:
            dh_N2F, dp_N, a_NF = form.backward(h_N2F, p_N, da_NF, dy_ND)

        def product_in(into: Tensor | None) -> Tensor:
            # ``view``, which fails rather than copies: a copy would swallow the gradient.
            flat = None
            if into is not None:
                flat = into.view(*into.shape[:-3], -1, into.shape[-1])
            return products.weight_gradient(dh_N2F, x_ND, flat).unflatten(-2, (2, -1))

        product_out = partial(products.weight_gradient, dy_ND, a_NF)
        dx_ND = None
        inner_back = inner.inner_gradient(dh_N2F)
        if ctx.needs_input_grad[0]:
            dx_ND = products.input_gradient(dh_N2F, w_in.flatten(-3, -2))
            dx_ND = inner.add_gradient_(dx_ND, inner_back)
        dw_in = sink.deliver(master_in, product_in) if ctx.needs_input_grad[1] else None
        dw_out = sink.deliver(master_out, product_out) if ctx.needs_input_grad[2] else None
        low = (
            *inner.deliver(dh_N2F, x_ND, inner_back, sink),
            *outer.deliver(dy_ND, a_NF, outer_back, sink),
        )
        if form is not None:
            low += form.deliver(dh_N2F, dy_ND, p_N, sink)
            dx_ND, dp_N = form.scale_input_backward(unscaled_ND, p_N, dx_ND, dp_N)
        return dx_ND, dw_in, dw_out, dp_N, *(None,) * 7, *low
