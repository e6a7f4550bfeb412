"""QK-clip: scales down the query and key weights of heads whose largest logit exceeds a bound.

Source: Kimi K2, arXiv 2507.20534, section 2.1 and algorithm 1. There each head has its own key;
where heads share a key, it is scaled for the largest of their logits, and each query such that the
head's logits are scaled by the head's own factor.

H query heads and G key heads of a tensor rank, R rows of one of their weights.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.comm.collectives import max_
from moefold.layers.attention import SoftmaxAttention
from moefold.optim.base import Optimizer
from moefold.optim.config import QkClip
from moefold.parallel.apply import ModelParts
from moefold.spec.layer import LayerSpec, LogitRows, Side


class _ClippedLayer(NamedTuple):
    name: str
    rows: Sequence[LogitRows]
    max_logit_H: Tensor
    """Largest logit of each head on this rank, over the step's micro-batches so far."""


class ClippedOptimizer(Optimizer):
    """Wraps an optimizer, and clips heads after each update.

    ``weights`` yields this rank's boxes of the weights, which are changed in place.
    """

    def __init__(
        self,
        inner: Optimizer,
        parts: ModelParts,
        weights: Callable[[], Iterable[Any]],
        record: QkClip,
    ) -> None:
        super().__init__(inner.params)
        self._inner = inner
        self._world = parts.world
        self._weights = weights
        self._record = record
        self.group = inner.group
        self._layers = tuple(_clipped_layers(parts))

    @torch.no_grad()
    def step(self, scale: float = 1.0, lr_factor: float = 1.0) -> None:
        """Update, then scale the weights of heads whose logits exceeded the bound."""
        self._inner.step(scale, lr_factor)
        factors = self._factors()
        for local in self._weights():
            factor_R = factors.get(local.name)
            if factor_R is not None:
                first = self._world.group("tp").index * len(factor_R)
                start, end = (index - first for index in local.box[0])
                rows = factor_R[start:end].to(local.tensor.dtype)
                local.tensor.mul_(rows.view(-1, *[1] * (local.tensor.dim() - 1)))

    def _factors(self) -> dict[str, Tensor]:
        """Return a factor for each of this tensor rank's rows of each weight.

        Factors are equal on all ranks that hold the rows.
        """
        world = self._world
        factors = dict[str, Tensor]()
        if not self._layers:
            return factors
        tp = world.group("tp").size
        local = [layer.max_logit_H for layer in self._layers]
        parts_H = max_(torch.cat(local), world.group("dp_cp")).split([len(part) for part in local])
        bound = self._record.bound
        alpha = self._record.alpha
        for layer, max_logit_H in zip(self._layers, parts_H, strict=True):
            # A logit that is not finite gives no factor: such heads are not scaled.
            shrink_H = torch.where(max_logit_H.isfinite(), bound / max_logit_H.clamp(min=bound), 1)
            groups = min(rows.heads for rows in layer.rows) // tp
            key_G = shrink_H.view(groups, -1).amin(1) ** (1 - alpha)
            query_H = (shrink_H.view(groups, -1) / key_G[:, None]).flatten()
            sides: dict[Side | None, Tensor]
            sides = {"query": query_H, "key": key_G, "alone": shrink_H}
            for rows in layer.rows:
                sides[None] = torch.ones_like(shrink_H[: rows.heads // tp])
                parts = [sides[side][:, None].expand(-1, dims) for dims, side in rows.parts]
                factors[f"{layer.name}.{rows.weight}"] = torch.cat(parts, 1).flatten()
        return factors

    def state(self) -> dict[str, Tensor]:
        """Return the inner optimizer's state."""
        return self._inner.state()

    def tensors(self) -> Iterable[Tensor]:
        """Return the tensors of the inner optimizer's state."""
        return self._inner.tensors()

    def lr(self, lr_factor: float = 1.0) -> dict[str, float]:
        """Return the inner optimizer's learning rates."""
        return self._inner.lr(lr_factor)

    def describe(self) -> dict[str, str]:
        """Return the inner optimizer's description, and the bound."""
        return {**self._inner.describe(), "qk_clip": f"logits up to {self._record.bound:g}"}


def _clipped_layers(parts: ModelParts) -> list[_ClippedLayer]:
    """Return this rank's attention layers, set up to record their largest logits."""
    model = parts.model
    layers = list[_ClippedLayer]()
    tp = parts.world.group("tp").size
    for number, block in enumerate(model.record.blocks):
        name = f"layers.{number}.attention"
        rows = block.attention.logits if isinstance(block.attention, LayerSpec) else ()
        if not rows or str(number) not in model.layers:
            continue
        heads = max(logit_rows.heads for logit_rows in rows)
        wide = torch.promote_types(model.precision_policy.dtype, torch.float32)
        attention = model.get_submodule(name)
        if not isinstance(attention, SoftmaxAttention):
            kind = type(attention).__name__
            raise ValueError(
                f"optim.qk_clip: {kind} of layer {number} does not record logits; derive it from "
                "moefold.layers.attention.SoftmaxAttention and call its attended(), or omit qk_clip"
            )
        for weight in (f"{name}.{logit_rows.weight}" for logit_rows in rows):
            if tp > 1 and parts.shards[weight].placement.cuts.get("tp") != 0:
                raise ValueError(
                    f"optim.qk_clip: tp does not split {weight} by heads, and a rank has the "
                    "factors of its own heads only; use tp1, or omit qk_clip"
                )
        max_logit_H = torch.zeros(heads // tp, dtype=wide, device=parts.world.device)
        attention.max_logit_H = max_logit_H
        layers.append(_ClippedLayer(name, rows, max_logit_H))
    return layers
