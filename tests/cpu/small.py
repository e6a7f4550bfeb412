"""Small decoders, rows and comparisons that model tests share."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moefold.config.base import Record
from moefold.data.batch import MicroBatch, assemble
from moefold.kernels.gradients import AUTOGRAD_SINK, GradientSink
from moefold.layers.config import Rope, Yarn
from moefold.layers.flow import Flow
from moefold.layers.kinds.dense import Dense
from moefold.layers.kinds.gqa import Gqa
from moefold.layers.kinds.mla import Mla
from moefold.layers.saved_tensors import SavedTensors
from moefold.model.config import Block, Decoder, Stack
from moefold.model.decoder import DecoderModel
from moefold.model.init import initialise
from moefold.moe.config import Aux, Groups, Moe, Router, Shared, Z
from moefold.parallel.apply import single_rank_parts
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.training import step
from moefold.training.step import StepFigures

VOCAB, HIDDEN = 64, 16
GQA = Gqa(heads=4, kv_heads=2, head_dim=8, qk_norm="head")
MLA = Mla(heads=2, q_rank=8, kv_rank=8, nope_dim=8, rope_dim=4, v_dim=6)
YARN = Rope(yarn=Yarn(factor=4.0, original_length=16, mscale_all_dim=1.0), layout="interleaved")
ROUTER = Router(experts=8, top_k=2)
DEEP = Router(
    experts=8,
    top_k=3,
    score="sigmoid",
    epsilon=1e-20,
    scale=1.5,
    groups=Groups(count=4, keep=2),
    selection_bias=True,
)
TERMS = (Aux(), Aux(over="sequence"), Aux(over="global_batch"), Z())


def moe(**more: Any) -> Moe:
    """Return a mixture of eight experts of width 32."""
    return Moe(**({"width": 32, "router": ROUTER, "balance": TERMS} | more))


def decoder(attention: Record = GQA, *ffns: Record, **more: Any) -> Decoder:
    """Return a decoder with the given feed-forwards (default: one dense, one mixture)."""
    ffns = ffns or (Dense(width=24), moe(shared=Shared(width=16, gate=True)))
    blocks = tuple(Block(attention=attention, ffn=ffn) for ffn in ffns)
    return Decoder(vocab=VOCAB, hidden=HIDDEN, stacks=(Stack(blocks=blocks),), **more)


def model_of(
    record: Decoder, precision: str = "fp64", seed: int = 1, experts: str = "auto"
) -> DecoderModel:
    """Return a model with values large enough that every part matters."""
    record = record.model_copy(update={"init_std": 0.3, "init_out_scale": 1.0})
    model = DecoderModel(record, precision, expert_kernel=experts)  # type: ignore[arg-type]
    initialise(model, record, seed)
    for _, mixture in model.moe_layers():
        if mixture.router.selection_bias is not None:
            mixture.router.selection_bias.copy_(torch.linspace(-0.1, 0.1, 8))
    return model


def ids_of(*shape: int, seed: int = 0) -> Tensor:
    """Return drawn token ids."""
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def padded_rows(lengths: tuple[int, ...], pads: int, seed: int = 0) -> MicroBatch:
    """Return segments of drawn tokens and then padding rows."""
    ids = ids_of(sum(lengths), seed=seed).numpy()
    pieces = np.split(ids, np.cumsum(lengths)[:-1])
    labels = np.concatenate([np.append(piece[1:], -100) for piece in pieces]) if lengths else ids
    return assemble(ids, labels, lengths, rows=sum(lengths) + pads)


def gradients_of(
    model: DecoderModel,
    rows: MicroBatch,
    recompute: Record | None = None,
    sink: GradientSink = AUTOGRAD_SINK,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and every gradient of one micro-batch, by autograd from end to end."""
    model.zero_grad()
    for _, mixture in model.moe_layers():
        mixture.balance.start_step()
    flow = Flow(rows, model.precision_policy, sink, SavedTensors(recompute))
    x_TD, terms = model(flow)
    logits_TV = x_TD @ model.head_weight.to(x_TD.dtype).t()
    lm_loss = torch.nn.functional.cross_entropy(logits_TV.double(), rows.labels_T, reduction="sum")
    _, weighted = model.sum_router_terms(terms)
    loss = lm_loss / max(rows.n_labels, 1) + (0.0 if weighted is None else weighted)
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), {name: grad.clone() for name, grad in found.items()}


def relative(a: Tensor, b: Tensor) -> float:
    """Return the relative error of ``a`` against ``b``."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp(min=1e-300))


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor], bound: float) -> None:
    """Assert that two sets of named tensors agree to a relative error."""
    assert ours.keys() == theirs.keys()
    errors = {name: relative(ours[name], theirs[name]) for name in theirs}
    # Not `error > bound`: that would let a NaN pass.
    broken = {name: error for name, error in errors.items() if not error <= bound}
    assert not broken, broken


def gradients(
    model: DecoderModel, batches: Sequence[MicroBatch], recompute: Record | None, loss_chunk: int
) -> StepFigures:
    """One training step's gradients on one rank."""
    return step.gradients(
        ShardedState(single_rank_parts(model, Layout(recompute=recompute))), batches, loss_chunk
    )
