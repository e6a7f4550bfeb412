"""A gated short convolution per channel as a layer (LFM2). T rows, D hidden, C channels."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moefold.comm.collectives import all_gather
from moefold.kernels.convolution.short import short_convolution
from moefold.kernels.linear.product import linear
from moefold.layers.cache import KeyValueCache
from moefold.layers.flow import Flow, undo_zigzag
from moefold.layers.kinds.convolution import ShortConvolution
from moefold.layers.linear import Adaptable, Linear


class ConvolutionMixer(Adaptable):
    """Causal convolution within documents, between two multiplicative gates per channel."""

    def __init__(self, record: ShortConvolution, hidden: int, epsilon: float) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.empty(3, hidden, hidden))
        self.taps = nn.Parameter(torch.empty(hidden, 1, record.taps))
        self.out = Linear(hidden, hidden)

    def forward(self, x_TD: Tensor, flow: Flow) -> Tensor:
        """Return the layer's output [T, D]."""
        x_TD = flow.gather(x_TD)
        whole = flow.whole
        w_in = self.operand("w_in", flow)
        h_T3C = linear(x_TD, w_in, n_valid=whole.n_valid, sink=whole.sink)
        taps = flow.operand(self.taps, self.taps.dtype)
        valid_T = whole.valid_T
        positions_T = whole.rows.positions_T
        if valid_T is not None:  # padding rows must not read rows before them
            positions_T = positions_T.where(valid_T, 0)
        flow.saved_tensors.set_owner("attention", h_T3C)
        options = {"n_valid": whole.n_valid, "sink": whole.sink}
        reach = self.taps.shape[-1] - 1
        before = preceding_rows(self, h_T3C, reach, flow, _gated)
        y_TC = short_convolution(h_T3C, before, taps, positions_T, gated=True, **options)
        flow.saved_tensors.set_owner("attention", y_TC)
        return flow.scatter(self.out(y_TC, whole))


def _gated(h_PJ3C: Tensor) -> Tensor:
    b, _, x = h_PJ3C.chunk(3, 2)
    return b * x


def preceding_rows(
    layer: nn.Module,
    x_TC: Tensor,
    reach: int,
    flow: Flow,
    transform: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensor | None:
    """Return the ``reach`` rows [P, J, C] before each run of rows; None if one run has all rows.

    Runs are the two pieces of a context rank or, in generation, the new row of each text.

    Args:
        layer: the layer, as key of the cache.
        x_TC: this rank's rows.
        reach: J.
        flow: the pass.
        transform: function from rows [P, J, C] to the rows that are convolved.

    Raises:
        ValueError: if a piece is shorter than ``reach``.
    """
    ranks = flow.world.group("cp")
    if ranks.size == 1:
        if flow.cache is None:
            return None
        return _cached_rows(layer, x_TC, reach, flow.cache, transform)
    pieces = x_TC.unflatten(0, (2, -1))
    if pieces.shape[1] < reach:
        raise ValueError(
            f"cp{ranks.size} cuts sequences into pieces of {pieces.shape[1]} rows, but a "
            f"convolution reads {reach} rows back: lower cp or raise data.seq"
        )
    own_last = transform(pieces[:, -reach:]).flatten(0, 1)
    last = undo_zigzag(all_gather(own_last, ranks), ranks.size)
    first = ranks.index
    second = 2 * ranks.size - 1 - ranks.index
    start = last[first - 1] if first else torch.zeros_like(last[0])
    return torch.stack([start, last[second - 1]])


def _cached_rows(
    layer: nn.Module,
    x_TC: Tensor,
    reach: int,
    cache: KeyValueCache,
    transform: Callable[[Tensor], Tensor],
) -> Tensor | None:
    """Cache the last rows of each text; return those before its new row, None for whole texts."""
    texts = cache.text_slices()
    key = (layer, "rows")
    before = cache.states.get(key)
    if before is None:
        ends = [x_TC[span][-reach:] for span in texts]
        last = [F.pad(rows, (0, 0, reach - len(rows), 0)) for rows in ends]
        cache.states[key] = transform(torch.stack(last))
        return None
    new = transform(x_TC[: len(texts), None])
    cache.states[key] = torch.cat([before[:, 1:], new], 1)
    padding = len(x_TC) - len(texts)
    return F.pad(before, (0, 0, 0, 0, 0, padding))
