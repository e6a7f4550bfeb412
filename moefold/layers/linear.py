"""The linear layer, the token embedding, and weights with low-rank adapters."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn

from moefold.kernels.function import Function
from moefold.kernels.fused import uses_triton
from moefold.kernels.gradients import GradientSink
from moefold.kernels.linear.dropout import Dropout
from moefold.kernels.linear.product import add_bias, linear
from moefold.kernels.lookup import fused as kernels
from moefold.kernels.operand import AdapterOperand, Operand
from moefold.kernels.scaled.products import scaled_product
from moefold.layers.flow import Flow
from moefold.layers.placement import Shard
from moefold.layers.precision import PrecisionPolicy, WeightProducts
from moefold.model.config import LowRank
from moefold.spec.decoder import LORA_A, LORA_B


class DropoutPosition(NamedTuple):
    """The part of an adapted weight on this rank, which determines the adapter's dropout mask."""

    number: int
    """Hash of the weight's name; key of its random numbers."""
    columns: range
    """Input features on this rank."""
    first_expert: int


class Adaptable(WeightProducts):
    """Base of layers that read weights through :meth:`operand`, so that these may have adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters: dict[str, LowRank] = {}
        """Adapters by weight name in this module; A and B are parameters of this module too."""
        self.dropout_positions: dict[str, DropoutPosition] = {}
        """Position of each weight whose adapter has dropout, by weight name."""

    def add_adapter(self, name: str, record: LowRank, a: Tensor, b: Tensor) -> None:
        """Register the matrices ``a`` and ``b`` of the adapter of weight ``name``."""
        self.adapters[name] = record
        self.register_parameter(name + LORA_A, nn.Parameter(a))
        self.register_parameter(name + LORA_B, nn.Parameter(b))

    def operand(
        self,
        name: str,
        flow: Flow,
        dtype: torch.dtype | None = None,
        row_id_N: Tensor | None = None,
    ) -> Operand:
        """Return weight ``name`` with its adapter as the operand of a product.

        ``row_id_N``: ids of the product's rows, for dropout; by default those of the flow.
        """
        operand = adapted_operand(self, name, flow.precision_policy, dtype, flow, row_id_N)
        flow.saved_tensors.keep_on_device(*operand.tensors)
        return operand


def adapted_operand(
    owner: Adaptable,
    name: str,
    policy: PrecisionPolicy,
    dtype: torch.dtype | None = None,
    flow: Flow | None = None,
    row_id_N: Tensor | None = None,
) -> Operand:
    """Return weight ``name`` of a layer with its adapter, as the operand of a product.

    The adapter has dropout only if a ``flow`` is given and in training.
    """
    weight = policy.operand(owner.get_parameter(name), dtype)
    record = owner.adapters.get(name)
    if record is None or not policy.adapts:
        return weight
    a = policy.operand(owner.get_parameter(name + LORA_A), dtype)
    b = policy.operand(owner.get_parameter(name + LORA_B), dtype)
    drop = None
    position = owner.dropout_positions.get(name)
    if position is not None and flow is not None and flow.training:
        row_id_N = flow.row_id_T if row_id_N is None else row_id_N
        key = policy.seed, position.number
        drop = Dropout(record.dropout, key, policy.step, position.columns, row_id_N)
    return replace(weight, low_rank=AdapterOperand(a, b, record.scale, drop))


def assign_shards(model: nn.Module, shards: Mapping[str, Shard]) -> None:
    """Tell layers which part of the whole weight theirs is, where their arithmetic depends on it.

    Those are a linear layer's or an embedding's rows, quantised products, and adapter dropout.
    """
    for path, module in model.named_modules():
        if isinstance(module, Linear | Embedding):
            module.first_row = shards[f"{path}.weight"].box[0][0]
        if isinstance(module, WeightProducts):
            by_leaf = {leaf: shards[f"{path}.{leaf}"] for leaf in module.narrow}
            module.narrow = {
                leaf: narrow.for_shard(by_leaf[leaf]) for leaf, narrow in module.narrow.items()
            }
        if isinstance(module, Adaptable):
            for leaf, record in module.adapters.items():
                if not record.dropout:
                    continue
                name = f"{path}.{leaf}"
                box = shards[name + LORA_A].box
                number = crc32(name.encode())
                columns = range(*box[-1])
                module.dropout_positions[leaf] = DropoutPosition(number, columns, box[0][0])


class Linear(Adaptable):
    """``y_TO = x_TI w_OI^T``, optionally plus a bias; the weight is the master parameter.

    If tp cuts the outputs, each rank computes some of them. If it cuts the inputs, each computes a
    partial sum of all outputs, and :meth:`add_bias` adds the bias once, after the sum over ranks.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.first_row = 0  # of the whole weight, if this one is a rank's shard
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x_TI: Tensor, flow: Flow) -> Tensor:
        """Return [T, outputs] in the compute dtype."""
        return self.add_bias(self.product(x_TI, flow), flow)

    def product(self, x_TI: Tensor, flow: Flow) -> Tensor:
        """Return the rows times the weight, with its adapter but without the bias."""
        if (narrow := self.narrow.get("weight")) is not None:
            codes = flow.narrow_operand(self.weight, narrow)
            return scaled_product(x_TI, codes, flow.row_runs, flow.sink)
        weight = self.operand("weight", flow)
        return linear(x_TI, weight, n_valid=flow.n_valid, sink=flow.sink)

    def add_bias(self, y_TO: Tensor, flow: Flow) -> Tensor:
        """Return the rows plus the bias, if there is one."""
        if self.bias is None:
            return y_TO
        bias = flow.operand(self.bias, self.bias.dtype)
        return add_bias(y_TO, bias, n_valid=flow.n_valid, sink=flow.sink)


class Embedding(nn.Module):
    """Token embedding; tp cuts the vocabulary."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden))
        self.first_row = 0  # of the whole weight, if this one is a rank's shard

    def forward(self, flow: Flow) -> Tensor:
        """Return this rank's rows [T, hidden] in the compute dtype."""
        table = flow.operand(self.weight, self.weight.dtype)
        whole = flow.whole
        ranks = flow.world.group("tp")
        ids_T = whole.rows.ids_T
        is_local_T = None
        if ranks.size > 1:
            is_local_T, ids_T = local_vocab_ids(ids_T, self.first_row, len(table.value))
        rows = _Lookup.apply(table.master, table, ids_T, whole.n_valid, flow.sink)
        if is_local_T is not None:  # one rank holds the row of an id; the others add zeros
            rows = flow.scatter(torch.where(is_local_T[:, None], rows, 0))
        return rows.to(flow.precision_policy.dtype)


def local_vocab_ids(ids: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return which ids are among ``count`` entries from ``first`` on, and their indices, else 0."""
    local_ids = ids.long() - first
    is_local = (local_ids >= 0) & (local_ids < count)
    return is_local, torch.where(is_local, local_ids, 0)


class _Lookup(Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        table: Operand,
        ids_T: Tensor,
        n_valid: int | None,
        sink: GradientSink,
    ) -> Tensor:
        ctx.save_for_backward(ids_T)
        ctx.master = table.master
        ctx.n_valid = n_valid
        ctx.sink = sink
        return table.value.index_select(0, ids_T)

    @staticmethod
    def backward(ctx: Any, dx_TD: Tensor) -> tuple[Tensor | None, ...]:
        (ids_T,) = ctx.saved_tensors
        n_valid = ctx.n_valid
        table: Tensor = ctx.master
        if not table.requires_grad:
            return (None,) * 5

        def product(into_VD: Tensor | None) -> Tensor:
            ids = ids_T[:n_valid]
            rows = dx_TD[:n_valid].to(table.dtype)
            if into_VD is None:
                into_VD = torch.zeros_like(table)
            if uses_triton(rows) and into_VD.is_contiguous():
                kernels.gradient(rows, *ids.sort(stable=True), into_VD)
                return into_VD
            if rows.is_cuda:  # index_add_ is not deterministic there; this operation sorts
                vocab = table.shape[0]
                return into_VD.add_(
                    torch.ops.aten.embedding_dense_backward(rows, ids, vocab, -1, False)
                )
            return into_VD.index_add_(0, ids, rows)

        return ctx.sink.deliver(table, product), None, None, None, None
