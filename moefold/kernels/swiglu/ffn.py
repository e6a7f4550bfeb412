"""A gated feed-forward as one function that keeps only its input and its pre-activation.

N rows, D hidden, F width. ``y = w_out (p * silu(w_gate x) * up x)`` for one dense FFN or for many
experts at once: the products are passed in. The weight ``p`` of a row stands between activation and
second product, so that its gradient comes from what is there anyway and no output is kept for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefold.kernels.gradients import GradientSink
from moefold.kernels.grouped.choose import GroupedKernel
from moefold.kernels.linear.product import weight_gradient
from moefold.kernels.operand import Operand
from moefold.kernels.swiglu import pieces


@dataclass(frozen=True)
class Products:
    """The three products of a weight with rows: forward, input gradient, weight gradient."""

    product: Callable[[Tensor, Tensor], Tensor]
    input_gradient: Callable[[Tensor, Tensor], Tensor]
    weight_gradient: Callable[[Tensor, Tensor, Tensor | None], Tensor]


def dense_products(n_valid: int | None) -> Products:
    """Return the products of one matrix [O, I]; only the valid rows enter its gradient."""
    return Products(
        product=lambda x, w: x @ w.t(),
        input_gradient=lambda dy, w: dy @ w,
        weight_gradient=lambda dy, x, into: weight_gradient(dy[:n_valid], x[:n_valid], into),
    )


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
    again: bool = False,
) -> Tensor:
    """Return ``y_ND``.

    Args:
        x_ND: rows in the operands' dtype.
        w_in: [..., 2, F, D], gate then up; leading dims are groups.
        w_out: [..., D, F].
        products: dense or grouped.
        sink: where the weights' gradients go.
        p_N: weight of each row (fp32 or wider), or None.
        again: backward makes the pre-activation again from the rows instead of keeping it.
    """
    return _GatedFfn.apply(
        x_ND, w_in.master, w_out.master, p_N, w_in.value, w_out.value, products, sink, again
    )


class _GatedFfn(torch.autograd.Function):
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
        again: bool,
    ) -> Tensor:
        h_N2F = products.product(x_ND, w_in.flatten(-3, -2))
        ctx.save_for_backward(x_ND, None if again else h_N2F, p_N, w_in, w_out)
        ctx.masters, ctx.products, ctx.sink = (master_in, master_out), products, sink
        return products.product(pieces.forward(h_N2F, p_N), w_out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_ND: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, h_N2F, p_N, w_in, w_out = ctx.saved_tensors
        (master_in, master_out), products, sink = ctx.masters, ctx.products, ctx.sink
        dy_ND = dy_ND.contiguous()
        if h_N2F is None:
            h_N2F = products.product(x_ND, w_in.flatten(-3, -2))
        da_NF = products.input_gradient(dy_ND, w_out)
        dh_N2F, dp_N, a_NF = pieces.backward(h_N2F, p_N, da_NF)

        def product_in(into: Tensor | None) -> Tensor:
            # A view or an error: a copy would take the gradient and keep it.
            flat = None if into is None else into.view(*into.shape[:-3], -1, into.shape[-1])
            return products.weight_gradient(dh_N2F, x_ND, flat).unflatten(-2, (2, -1))

        def product_out(into: Tensor | None) -> Tensor:
            return products.weight_gradient(dy_ND, a_NF, into)

        dx_ND = (
            products.input_gradient(dh_N2F, w_in.flatten(-3, -2))
            if ctx.needs_input_grad[0]
            else None
        )
        dw_in = sink.deliver(master_in, product_in) if ctx.needs_input_grad[1] else None
        dw_out = sink.deliver(master_out, product_out) if ctx.needs_input_grad[2] else None
        return dx_ND, dw_in, dw_out, dp_N, None, None, None, None, None
