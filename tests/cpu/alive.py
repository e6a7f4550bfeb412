"""Which memory a pass leaves alive, and those storages that were known before."""

from typing import Any

import torch
from torch import nn

from moefold.config.base import Record
from moefold.data.batch import from_ids
from moefold.kernels.gradients import DeferredSink
from moefold.layers.flow import Flow
from moefold.layers.saved_tensors import SavedTensors
from moefold.layers.unshard import UnshardHooks
from moefold.model.config import Block, Decoder, Stack
from moefold.model.decoder import DecoderModel
from moefold.planner.memory_saved import saved_bytes, saved_tensors
from moefold.spec.codes import coded_blocks
from moefold.spec.layer import Shape, recomputed_modules
from moefold.training.memory_probe import StorageRecorder

HIDDEN, SEQUENCES, LENGTH = 64, 2, 32


def there(layer: nn.Module, flow: Flow) -> set[int]:
    """Return the storages of weights, what products read, counters, rows, and what all layers
    read."""
    copies = [*flow.precision_policy.copies, *flow.precision_policy.codes]
    rows = [value for value in vars(flow.rows).values() if isinstance(value, torch.Tensor)]
    known = [*layer.parameters(), *layer.buffers(), *copies, *flow.shared_tensors, *rows]
    return {one.untyped_storage()._cdata for one in known}


def decoder_of(block: Block, quantise: Record | None = None) -> Decoder:
    """A decoder of one layer."""
    stacks = (Stack(blocks=(block,)),)
    return Decoder(vocab=50, hidden=HIDDEN, stacks=stacks, quantise=quantise)


def set_up(
    block: Block, policy: Record | None, precision: Any, quantise: Record | None = None
) -> tuple[nn.Module, Flow, Any]:
    """Return a layer, a pass whose copies of weights and angles are made, and its rows."""
    torch.manual_seed(0)
    model = DecoderModel(decoder_of(block, quantise), precision)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    rows = from_ids(torch.randint(0, 50, (SEQUENCES, LENGTH)))
    flow = Flow(rows, model.precision_policy, saved_tensors=SavedTensors(policy))
    layer = model.get_submodule("layers.0")
    x_TD = torch.randn(rows.rows, HIDDEN, dtype=model.precision_policy.dtype, requires_grad=True)
    layer(x_TD, flow)
    flow.decisions.clear()
    return layer, flow, x_TD


def bytes_planned(
    block: Block, policy: Record | None, precision: str, quantise: Record | None = None
) -> int:
    """Return the bytes that the planner says a block keeps for backward."""
    shape = Shape(HIDDEN, SEQUENCES * LENGTH, width=4 if precision == "fp32" else 2)
    (block,) = coded_blocks(decoder_of(block, quantise))
    return saved_bytes(saved_tensors(block, shape), recomputed_modules(policy))


def bytes_alive(
    block: Block, policy: Record | None, precision: str, quantise: Record | None = None
) -> int:
    """Return the bytes that a block's forward leaves alive, its input among them."""
    layer, flow, x_TD = set_up(block, policy, precision, quantise)
    old = there(layer, flow) | {x_TD.untyped_storage()._cdata}
    made = StorageRecorder()
    with made, flow.saved_tensors.layer_hooks():
        out = flow.saved_tensors.run("block", lambda x: layer(x, flow), x_TD)
    old |= {one.untyped_storage()._cdata for one in out}
    return x_TD.untyped_storage().nbytes() + made.live_bytes(old)


def bytes_held(
    block: Block, policy: Record | None, precision: str, quantise: Record | None = None
) -> int:
    """Return the bytes that a block holds after its backward for the products of its weights."""
    layer, flow, x_TD = set_up(block, policy, precision, quantise)
    sink = DeferredSink()
    flow = flow.for_chunk(sink, UnshardHooks(), computes_loss=False)
    made = StorageRecorder()
    with made, flow.saved_tensors.layer_hooks():
        out = flow.saved_tensors.run("block", lambda x: layer(x, flow), x_TD)
        graded = [one for one in out if one.requires_grad]
        torch.autograd.backward(graded, [torch.randn_like(one) for one in graded])
    del out, graded
    flow.decisions.clear()
    x_TD.grad = None
    return made.live_bytes(there(layer, flow) | {x_TD.untyped_storage()._cdata})
