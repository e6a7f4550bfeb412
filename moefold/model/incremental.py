"""Incremental decoding, one row per text, with few Python calls, for small models on a CPU.

In small models Python's overhead exceeds the cost of the products: a row takes a thousand calls
through the modules. Here blocks of the common kind (grouped-query attention, routed experts) make
only the calls that a row without gradients needs, on weights looked up once; others run as modules.

P texts with one row each; D hidden, H query heads, G key-value heads, d dims of a head, K experts
per row, E experts, F expert width.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moefold.config.base import Record
from moefold.kernels.linear.product import linear
from moefold.kernels.rope.rotate import rotate
from moefold.layers.attention import GroupedQueryAttention
from moefold.layers.cache import KeyValueCache
from moefold.layers.flow import Flow, scaled
from moefold.layers.norm import RmsNorm
from moefold.model.block import DecoderBlock
from moefold.model.decoder import DecoderModel
from moefold.moe.layer import MoeFfn
from moefold.moe.router import DTYPES, TopKRouter
from moefold.moe.rows import MoeInput
from moefold.moe.scoring import scores, weights
from moefold.moe.topk import select

MAX_PARAMETERS = 1 << 27
"""Most parameters of a small model: in larger ones, reading weights takes longer than the calls."""
MAX_EXPERT_ROWS = 16
"""Most pairs of row and expert that are multiplied one by one; more go through the module."""

ATTENTION_FIELDS = {"heads", "kv_heads", "head_dim", "qk_norm", "rope", "scale", "bias"}
MOE_FIELDS = {"width", "router", "shared", "capacity", "balance", "scale"}
SHARED_FIELDS = {"width", "gate"}
"""Fields of attention, MoE and shared-expert records that the steps below implement."""

Step = Callable[[Tensor, Flow], Tensor]
"""A function from the rows before a block, or a sublayer, to the rows after it."""


class IncrementalDecoder:
    """Next-token logits of growing texts: a ``NextLogits`` with a key-value cache."""

    def __init__(self, model: DecoderModel) -> None:
        self._model = model
        self._cache = KeyValueCache.of(model.record)
        self._steps = None if self._cache is None else build_steps(model)

    @torch.no_grad()
    def __call__(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits [P, V], as :meth:`DecoderModel.next_logits` does."""
        model = self._model
        cache = self._cache
        if cache is None or self._steps is None:
            return model.next_logits(texts, cache)
        rows = cache.next_rows(texts).to(model.head_weight.device)
        flow = Flow(rows, model.precision_policy, training=False, cache=cache, dropless=True)
        if not cache.incremental:
            return linear(rows.gather_last(model(flow)[0]), model.head_operand())
        x_PD = model.start(flow)
        for step in self._steps:
            x_PD = step(x_PD, flow)
        return F.linear(x_PD, model.head_weight)


def build_steps(model: DecoderModel) -> list[Step] | None:
    """Return blocks and last norm as steps; None unless small, plain and in one dtype on a CPU."""
    params = list(model.parameters())
    record = model.record
    small = sum(p.numel() for p in params) <= MAX_PARAMETERS
    plain = record.quantise is None and not any(p.adapters for p in (record, *record.blocks))
    native = all(p.device.type == "cpu" and p.dtype == model.precision_policy.dtype for p in params)
    if not (small and plain and native):
        return None
    blocks = zip(map(model.layers.__getitem__, model.main_blocks), record.blocks, strict=False)
    steps = [_block_step(block, spec.residual_scale) for block, spec in blocks]  # type: ignore[arg-type]
    if type(model.norm) is not RmsNorm:
        return [*steps, lambda x_PD, flow: model.finish(flow, x_PD)]
    norm = _norm_step(model.norm)
    divisor = model.record.logits_divisor
    return [*steps, lambda x_PD, flow: scaled(norm(x_PD, flow), 1 / divisor)]


def _block_step(block: DecoderBlock, scale: float) -> Step:
    norms = block.attention_norm, block.ffn_norm
    after = block.attention_out_norm, block.ffn_out_norm
    if any(type(norm) is not RmsNorm for norm in norms) or after != (None, None):
        return lambda x_PD, flow: block(x_PD, flow).x_TD
    attention_norm, ffn_norm = map(_norm_step, norms)
    attention = _attention_step(block.attention)
    moe = block.moe
    experts = None if moe is None else _moe_step(moe)

    def step(x_PD: Tensor, flow: Flow) -> Tensor:
        x_PD = x_PD + scaled(attention(attention_norm(x_PD, flow), flow), scale)
        normed_PD = ffn_norm(x_PD, flow)
        if moe is None:
            return x_PD + scaled(block.ffn(normed_PD, flow), scale)
        if experts is None or len(x_PD) * moe.record.router.top_k > MAX_EXPERT_ROWS:
            return moe(MoeInput(x_PD, normed_PD), flow).x_TD
        if moe.shared is not None:
            x_PD = x_PD + scaled(moe.shared(normed_PD, flow), moe.residual_scale)
        return x_PD + scaled(experts(normed_PD, flow), moe.residual_scale)

    return step


def _norm_step(norm: RmsNorm | None) -> Step:
    assert norm is not None
    weight_D = norm.weight.detach()
    epsilon = norm.epsilon
    return lambda x_PD, flow: F.rms_norm(x_PD, weight_D.shape, weight_D, epsilon)


def _attention_step(layer: nn.Module) -> Step:
    """Return attention with one product for queries, keys and values, or the layer itself."""
    if not isinstance(layer, GroupedQueryAttention) or layer.record.kind != "gqa":
        return layer
    record = layer.record
    if record.qk_norm in ("projection", "zero_centred") or not _only_sets(record, ATTENTION_FIELDS):
        return layer
    heads = record.heads
    groups = record.kv_heads
    dim = record.head_dim
    rope = record.rope
    if rope is not None and rope.fraction < 1:
        return layer
    qkv = (layer.q, layer.k, layer.v)
    out = layer.o
    scale = record.softmax_scale
    w_in = torch.cat([proj.weight.detach() for proj in qkv])
    biases = [proj.bias.detach() for proj in qkv if proj.bias is not None]
    b_in = torch.cat(biases) if biases else None
    w_out = out.weight.detach()
    b_out = None if out.bias is None else out.bias.detach()
    norms: list[tuple[Any, int]] = [(layer.q_norm, heads), (layer.k_norm, groups)]
    scales = [norm.weight.detach().expand(count, -1) for norm, count in norms if norm is not None]
    w_norm = torch.cat(scales) if scales else None
    epsilon = None if layer.q_norm is None else layer.q_norm.epsilon

    def step(x_PD: Tensor, flow: Flow) -> Tensor:
        assert flow.cache is not None
        qkv_PNd = F.linear(x_PD, w_in, b_in).view(len(x_PD), -1, dim)
        x_PNd, v_PGd = qkv_PNd.split((heads + groups, groups), 1)
        if w_norm is not None:
            x_PNd = F.rms_norm(x_PNd, (dim,), None, epsilon).mul_(w_norm)
        if rope is not None:
            x_PNd = rotate(x_PNd, *flow.angles(rope, dim), rope.layout)
        q_PHd, k_PGd = x_PNd.split((heads, groups), 1)
        out_PHd = flow.cache.attend(layer, q_PHd, k_PGd, v_PGd, scale)
        assert out_PHd is not None
        return F.linear(out_PHd.flatten(1), w_out, b_out)

    return step


def _moe_step(moe: MoeFfn) -> Step | None:
    """Return a step that runs routed experts one by one; None for kinds that it cannot run."""
    record = moe.record.router
    router = moe.router
    shared = moe.record.shared
    plain = type(moe) is MoeFfn and type(router) is TopKRouter and record.idle_experts is None
    supported = shared is None or _only_sets(shared, SHARED_FIELDS)
    supported = supported and _only_sets(moe.record, MOE_FIELDS)
    if not plain or moe.separate_output or not supported:
        return None
    w_router = router.weight.detach()
    b_router = router.bias
    bias_E = router.selection_bias
    dtype = torch.promote_types(DTYPES[record.dtype], w_router.dtype)
    w_router = w_router.to(dtype)
    b_router = None if b_router is None else b_router.to(dtype)
    w_in = moe.experts.w_in.detach().flatten(1, 2).unbind()
    w_out = moe.experts.w_out.detach().unbind()

    def step(x_PD: Tensor, flow: Flow) -> Tensor:
        scores_PE = scores(F.linear(x_PD.to(dtype), w_router, b_router), record)
        experts_PK = select(scores_PE, record.top_k, bias_E=bias_E, groups=record.groups)
        choices = experts_PK.tolist(), weights(scores_PE, experts_PK, record).tolist()
        rows = list[Tensor]()
        for x_1D, experts, weights_K in zip(x_PD.split(1), *choices, strict=True):
            outputs = list[Tensor]()
            for expert, weight in zip(experts, weights_K, strict=True):
                gate_1F, up_1F = F.linear(x_1D, w_in[expert]).chunk(2, 1)
                a_1F = F.silu(gate_1F).mul_(up_1F).mul_(weight)
                outputs.append(F.linear(a_1F, w_out[expert]))
            rows.append(sum(outputs[1:], outputs[0]))
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    return step


def _only_sets(record: Record, fields: Collection[str]) -> bool:
    """Whether all other fields of a record have their defaults, so that none is ignored here."""
    others = {n: field for n, field in type(record).model_fields.items() if n not in fields}
    return all(getattr(record, name) == field.default for name, field in others.items())
