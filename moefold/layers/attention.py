"""Causal self-attention within segments: grouped-query, windowed, chunked and latent attention.

T rows, D hidden, H query heads, G key-value heads, d query-key dims and v value dims per head.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from moefold.kernels.gradients import read_parameter
from moefold.kernels.rope.rotate import expand, rotate
from moefold.kernels.rows import upcast_dtype
from moefold.layers.cache import KeyValueCache
from moefold.layers.config import Rope
from moefold.layers.context.attend import attend, local_max_logits
from moefold.layers.flow import Flow
from moefold.layers.kinds.gqa import Chunked, Gqa, Windowed
from moefold.layers.kinds.mla import Mla
from moefold.layers.linear import Linear
from moefold.layers.norm import RmsNorm, ShardedRmsNorm, UnitNorm, ZeroCentredNorm


class SoftmaxAttention(nn.Module):
    """Base of softmax attention that records its largest logits for QK-clip."""

    max_logit_H: Tensor | None = None
    """Largest logit of each head on this rank over a step's passes; None if not recorded."""

    def start_step(self) -> None:
        """Reset the largest logits."""
        if self.max_logit_H is not None:
            self.max_logit_H.zero_()


class GroupedQueryAttention(SoftmaxAttention):
    """Grouped-query attention: each group of query heads shares a key and value head."""

    def __init__(self, record: Gqa, hidden: int, epsilon: float) -> None:
        super().__init__()
        self.record = record
        biased = record.bias != "none"
        self.q = Linear(hidden, record.heads * record.head_dim, biased)
        self.k = Linear(hidden, record.kv_heads * record.head_dim, biased)
        self.v = Linear(hidden, record.kv_heads * record.value_dim, biased)
        width = record.heads * record.value_dim
        self.o = Linear(width, hidden, record.bias == "all")
        self.out_gate = Linear(hidden, width) if record.gate else None
        self.q_norm: RmsNorm | UnitNorm | None = None
        self.k_norm: RmsNorm | UnitNorm | None = None
        if record.qk_norm == "unit":
            self.q_norm = self.k_norm = UnitNorm(epsilon)
        elif record.qk_norm != "none":
            across = record.qk_norm == "projection"
            norm = {"projection": ShardedRmsNorm, "head": RmsNorm}.get(
                record.qk_norm, ZeroCentredNorm
            )
            self.q_norm = norm(record.head_dim * (record.heads if across else 1), epsilon)
            self.k_norm = norm(record.head_dim * (record.kv_heads if across else 1), epsilon)

    def forward(self, x_TD: Tensor, flow: Flow) -> Tensor:
        """Return the attention output [T, D]."""
        x_TD = flow.gather(x_TD)
        whole = flow.whole
        out_TO = self.heads(x_TD, whole).flatten(1)
        if self.out_gate is not None:
            out_TO = out_TO * self.out_gate(x_TD, whole).sigmoid()
        return self.o.add_bias(flow.scatter(self.o.product(out_TO, whole)), flow)

    def heads(self, x_TD: Tensor, flow: Flow) -> Tensor:
        """Return the outputs [T, H, v] of this rank's heads for the rows of its tensor group."""
        q_THd = self._rotated_heads(self.q(x_TD, flow), self.q_norm, flow)
        k_TGd = self._rotated_heads(self.k(x_TD, flow), self.k_norm, flow)
        v_TGv = self.v(x_TD, flow).unflatten(1, (-1, self.record.value_dim))
        if self.record.value_scale != 1:
            v_TGv = v_TGv * self.record.value_scale
            flow.saved_tensors.set_owner("attention", v_TGv)
        return self.attend(q_THd, k_TGd, v_TGv, flow)

    def attend(self, q_THd: Tensor, k_TGd: Tensor, v_TGv: Tensor, flow: Flow) -> Tensor:
        """Return attention's output for rotated queries and keys; subclasses override this."""
        return causal_attention(self, q_THd, k_TGd, v_TGv, self.record.softmax_scale, flow)

    def _rotated_heads(self, rows: Tensor, norm: RmsNorm | UnitNorm | None, flow: Flow) -> Tensor:
        """Return rows split into heads, normed (before or after the split) and rotated."""
        if norm is not None and self.record.qk_norm == "projection":
            rows = norm(rows, flow)
            norm = None
        x_THd = rows.unflatten(1, (-1, self.record.head_dim))
        rope = self.record.rope
        if rope is None or self.record.norm_after_rope:
            x_THd = x_THd if rope is None else _norm_and_rotate(x_THd, rope, flow)
            x_THd = x_THd if norm is None else norm(x_THd, flow)
            flow.saved_tensors.set_owner(
                "attention", x_THd
            )  # attention's input, even if a norm computed it
            return x_THd
        assert not isinstance(norm, UnitNorm), "a norm without a weight comes after rotation"
        return _norm_and_rotate(x_THd, rope, flow, norm)


class WindowedAttention(GroupedQueryAttention):
    """Attention to the last ``window`` rows of a document, optionally with attention sinks."""

    def __init__(self, record: Windowed, hidden: int, epsilon: float) -> None:
        super().__init__(record, hidden, epsilon)
        self.sinks = nn.Parameter(torch.empty(record.heads)) if record.sinks else None
        self.window = record.window

    def attend(self, q_THd: Tensor, k_TGd: Tensor, v_TGv: Tensor, flow: Flow) -> Tensor:
        """Return the output of attention within the window."""
        scale = self.record.softmax_scale
        return causal_attention(self, q_THd, k_TGd, v_TGv, scale, flow, self.window, self.sinks)


class ChunkedAttention(GroupedQueryAttention):
    """Attention within chunks of a document; positions continue across chunks."""

    record: Chunked

    def attend(self, q_THd: Tensor, k_TGd: Tensor, v_TGv: Tensor, flow: Flow) -> Tensor:
        """Return the output of attention within chunks, with queries scaled by temperature."""
        chunk = self.record.chunk
        temperature = self.record.temperature
        if temperature is not None:
            steps_T = (flow.rows.positions_T + 1) // temperature.every
            wide = upcast_dtype(q_THd)
            factor_T = 1 + temperature.scale * torch.log1p(steps_T.to(wide))
            factor_T11 = factor_T.to(q_THd.dtype)[:, None, None]
            q_THd = q_THd * factor_T11
            flow.saved_tensors.set_owner("attention", q_THd)
        chunks = flow if chunk is None else flow.chunked(chunk)
        return causal_attention(
            self, q_THd, k_TGd, v_TGv, self.record.softmax_scale, chunks, chunk=chunk
        )


class LatentAttention(SoftmaxAttention):
    """Multi-head latent attention: queries, keys and values from latents, shared rotary keys.
    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """

    def __init__(self, record: Mla, hidden: int, epsilon: float) -> None:
        super().__init__()
        self.record = record
        qk_dim = record.nope_dim + record.rope_dim
        self.q_down = self.q_norm = self.q_up = self.q = None
        if record.q_rank is None:
            self.q = Linear(hidden, record.heads * qk_dim)
        else:
            self.q_down = Linear(hidden, record.q_rank)
            self.q_norm = RmsNorm(record.q_rank, record.latent_epsilon)
            self.q_up = Linear(record.q_rank, record.heads * qk_dim)
        self.kv_down = Linear(hidden, record.kv_rank + record.rope_dim)
        self.kv_norm = RmsNorm(record.kv_rank, record.latent_epsilon)
        kv_dim = record.nope_dim + record.v_dim
        self.kv_up = Linear(record.kv_rank, record.heads * kv_dim)
        self.o = Linear(record.heads * record.v_dim, hidden)
        self.out_gate = Linear(hidden, record.heads) if record.gate else None

    def forward(self, x_TD: Tensor, flow: Flow) -> Tensor:
        """Return the attention output [T, D]."""
        record = self.record
        whole = flow.whole
        kv, k_rope = self.kv_down(x_TD, flow).split((record.kv_rank, record.rope_dim), 1)
        kv = self.kv_norm(kv, flow)
        q = x_TD
        if self.q_down is not None and self.q_norm is not None:
            q = self.q_norm(self.q_down(x_TD, flow), flow)
        # Tensor ranks gather latents, which are narrower than rows and computed only once.
        rows = () if self.out_gate is None or q is x_TD else (x_TD,)
        q, kv, k_rope, *rows = flow.gather_all(q, kv, k_rope, *rows)
        qk_dim = record.nope_dim + record.rope_dim
        factor = 1.0 if record.rope is None else record.rope.softmax_factor
        scale = qk_dim**-0.5 * factor
        out_THv = None
        if flow.cache is not None and not self.kv_up.narrow:
            out_THv = self._absorbed_attention(q, kv, k_rope, scale, flow.cache, whole)
            whole = replace(whole, cache=None)
        if out_THv is None:
            up = partial(self._expand, flow=whole)
            q_THd, k_THd, v_THv = flow.saved_tensors.run("mla_up", up, q, kv, k_rope)
            out_THv = causal_attention(self, q_THd, k_THd, v_THv, scale, whole)
        if self.out_gate is not None:
            (gated,) = rows or (q,)
            gate_TH = self.out_gate(gated, whole).sigmoid()
            out_THv = out_THv * gate_TH[..., None]
        return flow.scatter(self.o(out_THv.flatten(1), whole))

    def _expand(
        self, q: Tensor, kv: Tensor, k_rope: Tensor, flow: Flow
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of all heads from the latents."""
        record = self.record
        q_THd = self._queries(q, flow)
        kv_dims = (record.nope_dim, record.v_dim)
        kv_THd = self.kv_up(kv, flow).unflatten(1, (-1, sum(kv_dims)))
        if record.rope is None:
            k_THn, v_THv = kv_THd.split(kv_dims, 2)
            heads = kv_THd.shape[1]
            shared_THr = k_rope[:, None].expand(-1, heads, -1)
            return q_THd, torch.cat([k_THn, shared_THr], 2), v_THv.contiguous()
        angles = flow.angles(record.rope, record.rope_dim)
        layout = record.rope.layout
        return q_THd, *expand(kv_THd, k_rope, *angles, record.nope_dim, layout)

    def _queries(self, q: Tensor, flow: Flow) -> Tensor:
        """Return the rotated queries of all heads."""
        record = self.record
        up = self.q if self.q_up is None else self.q_up
        assert up is not None
        qk_dim = record.nope_dim + record.rope_dim
        q_THd = up(q, flow).unflatten(1, (-1, qk_dim))
        return self._rotate(q_THd, flow)

    def _rotate(self, x_THd: Tensor, flow: Flow) -> Tensor:
        rope = self.record.rope
        if rope is None:
            flow.saved_tensors.set_owner("attention", x_THd)
            return x_THd
        return rotate(x_THd, *flow.angles(rope, self.record.rope_dim), rope.layout)

    def _absorbed_attention(
        self,
        q: Tensor,
        kv: Tensor,
        k_rope: Tensor,
        scale: float,
        cache: KeyValueCache,
        flow: Flow,
    ) -> Tensor | None:
        """Cache the latents and return the output over all of them; None in a pass of whole texts.

        The up-projections of keys and values are absorbed into queries and outputs, so no latent is
        expanded (section 2.1.2 of the source).
        """
        record = self.record
        rope_T1r = self._rotate(k_rope[:, None], flow)
        k_T1d = torch.cat([kv[:, None], rope_T1r], 2)
        if not cache.has_rows(self):
            return cache.attend(self, k_T1d, k_T1d, record.kv_rank, scale)
        weight = self.kv_up.operand("weight", flow)
        w_OC = weight.value
        low = weight.low_rank
        if low is not None:
            w_OC = w_OC + low.scale * (low.b.value @ low.a.value)
        kv_dims = (record.nope_dim, record.v_dim)
        w_HdC = w_OC.unflatten(0, (-1, sum(kv_dims)))
        keys_HnC, values_HvC = w_HdC.split(kv_dims, 1)
        nope, rope = self._queries(q, flow).split((record.nope_dim, record.rope_dim), 2)
        latent_THC = torch.einsum("thn,hnc->thc", nope, keys_HnC)
        q_THd = torch.cat([latent_THC, rope], 2)
        latent_out_THC = cache.attend(self, q_THd, k_T1d, record.kv_rank, scale)
        assert latent_out_THC is not None
        return torch.einsum("thc,hvc->thv", latent_out_THC, values_HvC)


def _norm_and_rotate(x_THd: Tensor, rope: Rope, flow: Flow, norm: RmsNorm | None = None) -> Tensor:
    rotary = rope.dims(x_THd.shape[-1])
    dims = x_THd.shape[-1]
    angles = flow.angles(rope, rotary)
    if rotary < dims:
        x_THd = x_THd if norm is None else norm(x_THd, flow)
        first, rest = x_THd.split((rotary, dims - rotary), 2)
        first = rotate(first.contiguous(), *angles, rope.layout)
        return torch.cat([first, rest], 2)
    if norm is not None:
        return norm.norm_and_rotate(x_THd, angles, rope.layout, flow)
    return rotate(x_THd, *angles, rope.layout)


def causal_attention(
    layer: nn.Module,
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGv: Tensor,
    scale: float,
    flow: Flow,
    window: int | None = None,
    sinks: nn.Parameter | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Return ``out_THv`` of causal attention, with the layer's cache in generation.

    Queries and keys are rotated, and cover the tensor group's rows. A row attends to ``window``
    rows, including itself, and only to its own ``chunk``; in a pass without cache the segments of
    ``flow`` express chunks. ``sinks`` is a learned logit per head whose value is zero.
    """
    inputs = [q_THd, k_TGd, v_TGv]
    if sinks is not None:
        sinks_H = flow.operand(sinks, sinks.dtype)
        inputs.append(read_parameter(sinks_H, flow.sink))
    if flow.cache is not None:
        cached_out_THv = flow.cache.attend(
            layer, q_THd, k_TGd, v_TGv, scale, window, *inputs[3:], chunk=chunk
        )
        if cached_out_THv is not None:
            return cached_out_THv

    if flow.training and isinstance(layer, SoftmaxAttention) and layer.max_logit_H is not None:
        pass_max_H = local_max_logits(q_THd.detach(), k_TGd.detach(), scale, flow, window)
        torch.maximum(layer.max_logit_H, pass_max_H, out=layer.max_logit_H)

    def core(q: Tensor, k: Tensor, v: Tensor, *sinks_H: Tensor) -> Tensor:
        return attend(q, k, v, scale, flow, window, *sinks_H)

    return flow.saved_tensors.run("attention", core, *inputs)
