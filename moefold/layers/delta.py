"""Gated linear attention as a layer: convolutions, decays, the scan, a norm and a gate.

T rows, D hidden, G query and key heads, H value heads, k key and v value dims, C channels.
"""

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moefold.comm.collectives import all_gather
from moefold.kernels.convolution.short import short_convolution
from moefold.kernels.delta.chunked import chunked_scan, recurrent_step
from moefold.kernels.gradients import read_parameter
from moefold.kernels.rows import upcast
from moefold.layers.cache import KeyValueCache
from moefold.layers.convolution import preceding_rows
from moefold.layers.flow import Flow, undo_zigzag
from moefold.layers.kinds.delta import DeltaNet
from moefold.layers.linear import Linear
from moefold.layers.norm import RmsNorm

EPSILON = 1e-6
"""Added to the squared norm of a query or key before the square root."""
ScanInputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""Queries, keys, values, log decays and rates of the delta rule."""
GATES = {"silu": F.silu, "sigmoid": torch.sigmoid}


class DeltaMixer(nn.Module):
    """Gated linear attention: each head has a state, which keys write and queries read."""

    out: Linear

    def __init__(self, record: DeltaNet, hidden: int, epsilon: float) -> None:
        super().__init__()
        self.record = record
        for weight in record.weights(hidden):
            name, _, leaf = weight.name.rpartition(".")
            if name == "norm":
                self.norm = RmsNorm(record.value_dim, epsilon)
            elif name:
                outputs, inputs = weight.shape
                setattr(self, name, Linear(inputs, outputs))
            else:
                self.register_parameter(leaf, nn.Parameter(torch.empty(weight.shape)))

    def forward(self, x_TD: Tensor, flow: Flow) -> Tensor:
        """Return the layer's output [T, D]."""
        x_TD = flow.gather(x_TD)
        whole = flow.whole
        valid_T = whole.valid_T
        positions_T = whole.rows.positions_T
        if valid_T is not None:  # padding rows must not read rows before them
            positions_T = positions_T.where(valid_T, 0)
        inputs = self._convolve(x_TD, positions_T, flow)
        inputs.append(self._project("decay", x_TD, whole))
        for parameter in (self.a_log, self.dt_bias):
            operand = flow.operand(parameter, parameter.dtype)  # type: ignore[arg-type]
            inputs.append(read_parameter(operand, flow.sink))
        if self.record.delta:
            inputs.append(self._project("beta", x_TD, whole))

        def scan(*inputs: Tensor) -> Tensor:
            by_head = self._split_heads(inputs, valid_T)
            out_THv = self._scan(by_head, positions_T, whole)
            return out_THv if valid_T is None else out_THv.where(valid_T[:, None, None], 0)

        if torch.is_grad_enabled():
            # Only the inputs are saved: chunks take much memory, and less time than projections.
            scan = partial(checkpoint, scan, use_reentrant=False, preserve_rng_state=False)
        out_THv = self.norm(scan(*inputs).to(x_TD.dtype), whole)
        gate_TO = GATES[self.record.gate](self._project("gate", x_TD, whole))
        return flow.scatter(self.out(out_THv.flatten(1) * gate_TO, whole))

    def _project(self, name: str, x_TD: Tensor, flow: Flow) -> Tensor:
        down = getattr(self, f"{name}_down", None)
        if down is not None:
            x_TD = down(x_TD, flow)
        return getattr(self, f"{name}_in")(x_TD, flow)

    def _convolve(self, x_TD: Tensor, positions_T: Tensor, flow: Flow) -> list[Tensor]:
        """Return queries, keys and values [T, C] after their convolutions."""
        whole = flow.whole
        rows = {name: self._project(name, x_TD, whole) for name in "qkv"}
        reach = self.record.taps - 1
        before = preceding_rows(self, torch.cat([*rows.values()], 1), reach, flow)
        preceding: Any = [None] * 3
        if before is not None:
            widths = [x_TC.shape[1] for x_TC in rows.values()]
            preceding = before.split(widths, 2)
        convolved = list[Tensor]()
        for (name, x_TC), before_PJC in zip(rows.items(), preceding, strict=True):
            taps = getattr(self, f"{name}_taps")
            weight = flow.operand(taps, taps.dtype)
            options = {"n_valid": whole.n_valid, "sink": whole.sink}
            convolved.append(
                short_convolution(x_TC, before_PJC, weight, positions_T, gated=False, **options)
            )
        return convolved

    def _scan(self, inputs: ScanInputs, positions_T: Tensor, flow: Flow) -> Tensor:
        """Return the scan's output [T, H, v], with states from the cache or other context ranks."""
        ranks = flow.world.group("cp")
        dims = (self.record.value_dim, self.record.key_dim)
        if ranks.size == 1 and flow.cache is not None:
            return self._scan_cached(inputs, positions_T, flow.cache)
        if ranks.size == 1:
            return chunked_scan(*inputs, positions_T)[0]
        out_THx, state_PHkx = chunked_scan(*inputs, positions_T, runs=2)
        all_states = undo_zigzag(all_gather(state_PHkx, ranks), ranks.size).flatten(0, 1)
        states = [torch.zeros_like(all_states[0, ..., : dims[0]])]
        for state_Hkx in all_states[:-1]:
            written, transition = state_Hkx.split(dims, -1)
            states.append(written + transition @ states[-1])
        first = ranks.index
        second = 2 * ranks.size - 1 - ranks.index
        own_PHkv = torch.stack([states[first], states[second]])
        local, read = out_THx.unflatten(0, (2, -1)).split(dims, -1)
        earlier = torch.einsum("pthk,phkv->pthv", read, own_PHkv)
        return (local + earlier).flatten(0, 1)

    def _scan_cached(self, inputs: ScanInputs, positions_T: Tensor, cache: KeyValueCache) -> Tensor:
        """Return the scan's output for texts in generation, and update their cached states."""
        texts = cache.text_slices()
        key = (self, "states")
        state_PHkv = cache.states.get(key)
        padding = len(positions_T) - texts[-1].stop
        if state_PHkv is not None:
            new = _slice_rows(inputs, slice(len(texts)))
            out_THv, cache.states[key] = recurrent_step(state_PHkv, *new)
        else:
            scans = [chunked_scan(*_slice_rows(inputs, rows), positions_T[rows]) for rows in texts]
            out_THv = torch.cat([out for out, _ in scans])
            cache.states[key] = torch.cat([state for _, state in scans])
        return F.pad(out_THv, (0, 0, 0, 0, 0, padding))

    def _split_heads(self, projected: tuple[Tensor, ...], valid_T: Tensor | None) -> ScanInputs:
        """Return queries, keys, values, log decays and rates by head, wide and finite."""
        record = self.record
        (*rows, a_log_H, dt_bias) = projected[:6]
        beta_TH = None
        if record.delta:
            rows.append(projected[6])
        if valid_T is not None:
            rows = [x.where(valid_T[:, None], 0) for x in rows]
        q, k, v, step = (upcast(x) for x in rows[:4])
        q_TGk = _unit_vectors(q.unflatten(1, (-1, record.key_dim)))
        k_TGk = _unit_vectors(k.unflatten(1, (-1, record.key_dim)))
        v_THv = v.unflatten(1, (-1, record.value_dim))
        heads = v_THv.shape[1]
        step_THk = (step + upcast(dt_bias)).unflatten(1, (heads, -1))
        rate_H1 = upcast(a_log_H).exp()[:, None]
        if record.decay_floor is None:
            decay_THk = -rate_H1 * F.softplus(step_THk)
        else:
            decay_THk = record.decay_floor * (rate_H1 * step_THk).sigmoid()
        if record.delta:
            beta_TH = upcast(rows[4]).sigmoid()
        scale = record.key_dim**-0.5
        return q_TGk * scale, k_TGk, v_THv, decay_THk, beta_TH


def _unit_vectors(x: Tensor) -> Tensor:
    """Return the last dim's vectors with norm one."""
    square = x.square().sum(-1, keepdim=True)
    return x * (square + EPSILON).rsqrt()


def _slice_rows(inputs: ScanInputs, rows: slice) -> ScanInputs:
    """Return these rows of all inputs."""
    return cast("ScanInputs", tuple(None if x is None else x[rows] for x in inputs))
