"""Rows packed as codes and scales, one row of bytes each, for exchanges between ranks.

N rows, D features, W bytes. Blocks lie along features, so that codes of a row are independent of
other rows. Scales are powers of two, with which quantisation is idempotent: rows can be sent
repeatedly without further loss.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.kernels.function import Function
from moefold.kernels.quantise.blocks import Format, Quantised, encode


class RowCodes(NamedTuple):
    """Format of packed rows."""

    form: Format

    def pack(self, x_ND: Tensor) -> Tensor:
        """Return rows as uint8 [N, W]: codes, then scales."""
        made = encode(x_ND, self.form)
        scales = _in_order(made.scales)
        return torch.cat([made.codes.view(torch.uint8), scales.view(torch.uint8)], 1)

    def unpack(self, sent_NW: Tensor, like: Tensor) -> Tensor:
        """Return the rows with the width and dtype of ``like``."""
        width, element = like.shape[1], self.form.element
        assert element is not None
        scale = torch.float8_e8m0fnu if self.form.kind == "mxfp8" else torch.float32
        codes, scales = sent_NW.tensor_split([width], 1)
        shape = torch.Size((len(sent_NW), width))
        read = codes.contiguous().view(element), _in_order(scales).view(scale)
        made = Quantised(*read, None, self.form, -1, shape)
        return made.dequantise(like.dtype)

    def rounded(self, x_ND: Tensor) -> Tensor:
        """Return quantised and dequantised rows; gradients pass unchanged."""
        return _Rounded.apply(x_ND, self, None)  # type: ignore[return-value]

    def rounded_gradient(self, x_ND: Tensor) -> Tensor:
        """Return the rows unchanged; their gradient is quantised and dequantised."""
        return _Rounded.apply(x_ND, None, self)  # type: ignore[return-value]


def _in_order(x: Tensor) -> Tensor:
    """Return a contiguous copy, also of tensors with one row or none, which count as contiguous."""
    return x.clone(memory_format=torch.contiguous_format)


class _Rounded(Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, there: RowCodes | None, back: RowCodes | None) -> Tensor:
        ctx.back = back
        return x_ND.view_as(x_ND) if there is None else there.unpack(there.pack(x_ND), x_ND)

    @staticmethod
    def backward(ctx: Any, dx_ND: Tensor) -> tuple[Tensor, None, None]:
        back = ctx.back
        return (dx_ND if back is None else back.unpack(back.pack(dx_ND), dx_ND)), None, None
