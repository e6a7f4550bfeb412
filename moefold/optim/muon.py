"""Muon: the update of a matrix is its momentum, orthogonalised by a Newton-Schulz iteration.

Sources: K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024), for
the iteration and its quintic coefficients; arXiv 2502.16982 for weight decay and the scale that
matches AdamW's. Matrices of one shape, of whatever parameters, are iterated in one batch.

Shape suffixes: N matrices of a batch, m rows, n columns.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from moefold.optim.adamw import AdamWOptimizer
from moefold.optim.base import FullMatrices, LocalMatrices, Optimizer, zeros_for
from moefold.optim.config import Muon, update_settings

LINEAR = 3.4445
CUBIC = -4.7750
QUINTIC = 2.0315
"""Coefficients that enlarge small singular values fastest; most end between 0.68 and 1.14."""

EPS = 1e-7
"""Lower bound of the divisor: a zero gradient with zero momentum gives a zero update."""

BFLOAT16_SIDE = 32
"""Least smaller side for which bfloat16 is used. Below it float32 is as fast, and on CPUs the bits
of a small bfloat16 product depend on the number of matrices in the batch."""

BATCH_BYTES = {"cpu": 2 * 2**20}
DEFAULT_BATCH_BYTES = 128 * 2**20
"""Most bytes of matrices in one batch: on a CPU they fit its cache."""


def orthogonalise(x_Nmn: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Return each matrix after ``steps`` Newton-Schulz iterations, computed in ``dtype``.

    Gram matrices are of the smaller side. Norms are computed in the batch's dtype.
    """
    norms = torch.linalg.vector_norm(x_Nmn, dim=(-2, -1), keepdim=True).clamp_(min=EPS)
    x = torch.div(x_Nmn, norms, out=torch.empty_like(x_Nmn, dtype=dtype))
    batch, m, n = x.shape
    side = min(m, n)
    y = torch.empty_like(x)
    gram = x.new_empty(batch, side, side)
    factor = torch.empty_like(gram)
    for _ in range(steps):
        left, right = (x, x.mT) if m <= n else (x.mT, x)
        torch.bmm(left, right, out=gram)
        torch.baddbmm(gram, gram, gram, beta=CUBIC, alpha=QUINTIC, out=factor)
        left, right = (factor, x) if m <= n else (x, factor)
        torch.baddbmm(x, left, right, beta=LINEAR, out=y)
        x, y = y, x
    return x


def update_scale(rule: str, rows: int, cols: int) -> float:
    """Return the factor on an orthogonal ``[rows, cols]`` update by the rule ``Muon.scale``."""
    if rule == "match_rms":
        return 0.2 * math.sqrt(max(rows, cols))
    if rule == "shape":
        return math.sqrt(max(1.0, rows / cols))
    return 1.0


def choose_arithmetic(
    setting: str, weight: Tensor, shape: Sequence[int] | None = None
) -> torch.dtype:
    """Return the dtype of Newton-Schulz for matrices ``[..., m, n]`` like ``weight``.

    ``shape`` is the full shape if ``weight`` has only some elements. Nothing is timed, so runs are
    reproducible.
    """
    if weight.dtype == torch.float64:
        return torch.float64
    if setting == "auto":
        large = min((shape or weight.shape)[-2:]) >= BFLOAT16_SIDE
        setting = "bfloat16" if large and supports_bfloat16(weight.device) else "float32"
    return torch.bfloat16 if setting == "bfloat16" else torch.float32


def supports_bfloat16(device: torch.device) -> bool:
    """Return whether the device has bfloat16 products in hardware, and torch may use them."""
    if device.type == "cpu":
        # ATEN_CPU_CAPABILITY may restrict torch to less than the processor supports.
        allowed = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        units = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return allowed and units
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def batches(matrices: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of views ``[N, m, n]``, of one shape and at most ``BATCH_BYTES`` in total."""
    by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
    for matrix in matrices:
        shape = matrix.shape[-2:]
        by_shape[shape].append(matrix.view(-1, *shape))
    for shape, stacks in by_shape.items():
        limit = BATCH_BYTES.get(stacks[0].device.type, DEFAULT_BATCH_BYTES)
        most = max(1, limit // (2 * shape.numel()))
        batch: list[Tensor] = []
        for part in chain.from_iterable(stack.split(most) for stack in stacks):
            if sum(map(len, batch)) + len(part) > most:
                yield batch
                batch = []
            batch.append(part)
        yield batch


class MuonOptimizer(Optimizer):
    """Muon for matrices, AdamW for the rest. State: ``momentum`` for each matrix parameter.

    ``wholes`` gathers the matrices if this rank updates only elements of them.
    """

    def __init__(
        self, rule: Muon, params: Mapping[str, Tensor], wholes: FullMatrices | None = None
    ) -> None:
        super().__init__(params)
        self.rule = rule
        local_shapes = {name: tuple(param.shape) for name, param in params.items()}
        self._wholes = wholes or LocalMatrices(local_shapes)
        shapes = self._wholes.shapes
        self._matrices = {n: p for n, p in self.params.items() if rule.orthogonalises(n, shapes[n])}
        rest = {n: p for n, p in self.params.items() if n not in self._matrices}
        self._rest = AdamWOptimizer(rule.rest, rest, parameter_groups=rule.groups)
        self._settings = {
            name: update_settings(rule.groups, name, rule.lr, rule.weight_decay)
            for name in self._matrices
        }
        self._momenta: dict[str, Tensor] = {}
        for name, param in self._matrices.items():
            for what in rule.state_names(name, shapes[name]):
                self._momenta[name] = self._add_state(name, what, zeros_for(param))

    @torch.no_grad()
    def step(self, scale: float = 1.0, lr_factor: float = 1.0) -> None:
        """Update matrices by Muon, and the rest by AdamW.

        Only Newton-Schulz needs full matrices; the rest is elementwise, hence valid for shards.
        """
        rule = self.rule
        grads = self._gradients(scale)
        grads = {name: grads[name].contiguous() for name in self._matrices}
        for name, grad in grads.items():
            if scale != 1:
                grad.mul_(scale)
            # The direction overwrites the gradient, of which each element is read first.
            momentum = self._momenta[name].lerp_(grad, 1 - rule.momentum)
            if rule.nesterov:
                torch.lerp(grad, momentum, rule.momentum, out=grad)
            else:
                grad.copy_(momentum)
        matrices = self._wholes.gather(grads)
        for batch in batches(matrices):
            stack_Nmn = torch.cat(batch)
            dtype = choose_arithmetic(rule.arithmetic, stack_Nmn)
            updates = orthogonalise(stack_Nmn, rule.ns_steps, dtype)
            for part, update in zip(batch, updates.split([len(x) for x in batch]), strict=True):
                part.copy_(update)
        for name, update in self._wholes.scatter(matrices, grads).items():
            size = update_scale(rule.scale, *self._wholes.shapes[name][-2:])
            lr = self._settings[name].lr * lr_factor
            weight = self.params[name].mul_(1 - lr * self._settings[name].weight_decay)
            weight.add_(update, alpha=-lr * size)
        self._rest.step(scale, lr_factor)

    def state(self) -> dict[str, Tensor]:
        """Return the state of both optimizers under its names in a checkpoint."""
        return {**self._state, **self._rest.state()}

    def lr(self, lr_factor: float = 1.0) -> dict[str, float]:
        """Return all learning rates of this step."""
        own = {self.rule.kind: self.rule.lr * lr_factor}
        return {**own, **self._rest.lr(lr_factor), **self.rule.group_rates(lr_factor)}

    def describe(self) -> dict[str, str]:
        """Return a description of how both updates are computed."""
        shapes = self._wholes.shapes
        setting = self.rule.arithmetic
        types = {
            choose_arithmetic(setting, momentum, shapes[name])
            for name, momentum in self._momenta.items()
        }
        dtypes = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in types))
        owner = "local" if isinstance(self._wholes, LocalMatrices) else "gathered"
        text = f"{len(self._matrices)} parameters"
        text += f", Newton-Schulz of {owner} matrices in {dtypes}" if dtypes else ""
        return {self.rule.kind: text, **self._rest.describe()}
