"""Rows packed as codes and scales, one row of bytes each, for exchange between ranks.

N rows, D features, W bytes. Blocks lie along features, so that codes of a row are independent of
other rows. Scales are powers of two, with which quantisation is idempotent: rows can be sent
several times without further loss.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.kernels.function import Function
from moefold.kernels.quantise.blocks import Format, Quantised, encode


class BlockCodec(NamedTuple):
    """Packs and unpacks rows of a format."""

    form: Format

    def pack(self, x_ND: Tensor) -> Tensor:
        """Return rows as uint8 [N, W]: codes, then scales."""
        quantised = encode(x_ND, self.form)
        scales = _contiguous_copy(quantised.scales)
        return torch.cat([quantised.codes.view(torch.uint8), scales.view(torch.uint8)], 1)

    def unpack(self, sent_NW: Tensor, like: Tensor) -> Tensor:
        """Return the rows with the width and dtype of ``like``."""
        width = like.shape[1]
        element = self.form.element
        assert element is not None
        scale = torch.float8_e8m0fnu if self.form.kind == "mxfp8" else torch.float32
        codes, scales = sent_NW.tensor_split([width], 1)
        shape = torch.Size((len(sent_NW), width))
        codes_and_scales = codes.contiguous().view(element), _contiguous_copy(scales).view(scale)
        return Quantised(*codes_and_scales, None, self.form, -1, shape).dequantise(like.dtype)

    def fake_quantise(self, x_ND: Tensor) -> Tensor:
        """Return quantised and dequantised rows; gradients pass unchanged."""
        return _FakeQuantise.apply(x_ND, self, None)

    def fake_quantise_gradient(self, x_ND: Tensor) -> Tensor:
        """Return the rows unchanged; their gradient is quantised and dequantised."""
        return _FakeQuantise.apply(x_ND, None, self)


def _contiguous_copy(x: Tensor) -> Tensor:
    """Return a contiguous copy, even of tensors with at most one row, which count as contiguous."""
    return x.clone(memory_format=torch.contiguous_format)


class _FakeQuantise(Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, codec: BlockCodec | None, gradient_codec: BlockCodec | None
    ) -> Tensor:
        ctx.codec = gradient_codec
        return x_ND.view_as(x_ND) if codec is None else codec.unpack(codec.pack(x_ND), x_ND)

    @staticmethod
    def backward(ctx: Any, dx_ND: Tensor) -> tuple[Tensor, None, None]:
        codec = ctx.codec
        return (dx_ND if codec is None else codec.unpack(codec.pack(dx_ND), dx_ND)), None, None
