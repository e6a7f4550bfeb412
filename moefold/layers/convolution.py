"""A mixer of rows by a short convolution of each channel (LFM2). T rows, D hidden, C channels."""

import torch
from torch import Tensor, nn

from moefold.comm.collectives import all_gather
from moefold.kernels.convolution.short import gated_convolution
from moefold.kernels.linear.product import linear
from moefold.layers.flow import Flow
from moefold.layers.kinds.convolution import ShortConvolution
from moefold.layers.linear import Adaptable, Linear


class ConvolutionMixer(Adaptable):
    """Two gates of each channel, and the rows before each row within its document."""

    def __init__(self, record: ShortConvolution, hidden: int, epsilon: float) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.empty(3, hidden, hidden))
        self.taps = nn.Parameter(torch.empty(hidden, 1, record.taps))
        self.out = Linear(hidden, hidden)

    def forward(self, x_TD: Tensor, flow: Flow) -> Tensor:
        """Return the mixed rows [T, D]."""
        x_TD, whole = flow.gather(x_TD), flow.whole
        w_in = self.operand("w_in", flow)
        h_T3C = linear(x_TD, w_in, n_valid=whole.n_valid, sink=whole.sink)
        taps = flow.operand(self.taps, self.taps.dtype)
        valid_T, positions_T = whole.valid_T, whole.rows.positions_T
        if valid_T is not None:  # a row of padding has none before it
            positions_T = positions_T.where(valid_T, 0)
        flow.keeper.owns("attention", h_T3C)
        how = {"n_valid": whole.n_valid, "sink": whole.sink}
        y_TC = gated_convolution(h_T3C, self._before(h_T3C, flow), taps, positions_T, **how)
        flow.keeper.owns("attention", y_TC)
        return flow.scatter(self.out(y_TC, whole))

    def _before(self, h_T3C: Tensor, flow: Flow) -> Tensor | None:
        """Return gated rows [2, J, C] before each piece of a context rank; None on one rank.

        Raises:
            ValueError: where a piece is shorter than the convolution reaches back.
        """
        ranks, reach = flow.world.group("cp"), self.taps.shape[-1] - 1
        if ranks.size == 1:
            return None
        pieces = h_T3C.unflatten(0, (2, -1))
        if pieces.shape[1] < reach:
            raise ValueError(
                f"context ranks have pieces of {pieces.shape[1]} rows, and a convolution reaches "
                f"{reach} rows back: lower cp, or train on longer sequences"
            )
        b, _, x = pieces[:, -reach:].chunk(3, 2)
        every = all_gather((b * x).flatten(0, 1), ranks).unflatten(0, (ranks.size, 2, reach))
        # A rank has piece r, and piece 2 n - 1 - r.
        ordered = torch.cat([every[:, 0], every[:, 1].flip(0)])
        first, second = ranks.index, 2 * ranks.size - 1 - ranks.index
        start = ordered[first - 1] if first else torch.zeros_like(ordered[0])
        return torch.stack([start, ordered[second - 1]])
