"""Muon: momentum, made orthogonal by a Newton-Schulz iteration, as the update of a matrix.

Sources: K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024), for
the iteration and its quintic coefficients; arXiv 2502.16982 for weight decay and the scale that
matches AdamW's. Matrices of one shape, wherever they come from, go through the iteration together.

Shape suffixes: N matrices of a batch, m rows, n columns.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.optim.adamw import AdamWOptimizer
from moefold.optim.base import Optimizer, Wholes, zeros_for
from moefold.optim.config import Muon

LINEAR, CUBIC, QUINTIC = 3.4445, -4.7750, 2.0315
"""Coefficients that grow small singular values fastest; most end between 0.68 and 1.14."""

EPS = 1e-7
"""Smallest norm that is divided by: a zero gradient with zero momentum stays a zero update."""

BFLOAT16_SIDE = 32
"""Smaller side from which bfloat16 pays. Below it float32 is as fast, and on CPUs the bits of a
small bfloat16 product depend on how many matrices share the batch."""

BATCH_BYTES = {"cpu": 2 * 2**20}
BATCH_BYTES_ELSEWHERE = 128 * 2**20
"""Bytes of matrices in one batch: on a CPU they stay in its cache."""


def orthogonalise_reference(matrix_mn: Tensor, steps: int) -> Tensor:
    """Return Newton-Schulz of one matrix after ``steps``, plainly, in the matrix's own type."""
    if matrix_mn.shape[0] > matrix_mn.shape[1]:
        return orthogonalise_reference(matrix_mn.mT, steps).mT
    x = matrix_mn / torch.linalg.vector_norm(matrix_mn).clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = LINEAR * x + (CUBIC * gram + QUINTIC * gram @ gram) @ x
    return x


def orthogonalise(x_Nmn: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Return Newton-Schulz of each matrix of the batch after ``steps``, computed in ``dtype``.

    The square products are of the smaller side. Norms are taken in the batch's own type.
    """
    norms = torch.linalg.vector_norm(x_Nmn, dim=(-2, -1), keepdim=True).clamp_(min=EPS)
    x = torch.div(x_Nmn, norms, out=torch.empty_like(x_Nmn, dtype=dtype))
    batch, m, n = x.shape
    side = min(m, n)
    y, gram = torch.empty_like(x), x.new_empty(batch, side, side)
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
    """Return the factor on an orthogonal ``[rows, cols]`` update; see ``Muon.scale``."""
    return {
        "match_rms": 0.2 * math.sqrt(max(rows, cols)),
        "shape": math.sqrt(max(1.0, rows / cols)),
        "none": 1.0,
    }[rule]


def advance_momentum_(
    momentum: Tensor, grad: Tensor, rule: Muon, *, scale: float, out: Tensor
) -> None:
    """Move ``momentum`` towards ``grad * scale`` in place and write the direction to ``out``.

    Elementwise, so for shards too. ``grad`` is overwritten when ``scale`` is not 1.
    """
    if scale != 1:
        grad.mul_(scale)
    momentum.lerp_(grad, 1 - rule.momentum)
    if rule.nesterov:
        torch.lerp(grad, momentum, rule.momentum, out=out)
    else:
        out.copy_(momentum)


def apply_update_(weight: Tensor, update: Tensor, rule: Muon, *, lr: float, size: float) -> None:
    """Decay ``weight`` and take the step ``lr * size * update``, in place. Elementwise."""
    weight.mul_(1 - lr * rule.weight_decay).add_(update, alpha=-lr * size)


def choose_arithmetic(setting: str, weight: Tensor) -> torch.dtype:
    """Return the type Newton-Schulz computes in for matrices ``[..., m, n]`` like ``weight``.

    Nothing is timed, so that a run repeats itself.
    """
    if weight.dtype == torch.float64:
        return torch.float64
    if setting == "auto":
        large = min(weight.shape[-2:]) >= BFLOAT16_SIDE
        setting = "bfloat16" if large and multiplies_bfloat16(weight.device) else "float32"
    return torch.bfloat16 if setting == "bfloat16" else torch.float32


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return whether the device has bfloat16 products in hardware, and torch may use them."""
    if device.type == "cpu":
        # ATEN_CPU_CAPABILITY keeps torch below what the processor lists.
        allowed = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        units = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return allowed and units
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


@dataclass(frozen=True)
class Piece:
    """Equal matrices inside one parameter: some of its stack, and a block of their rows."""

    name: str
    first: int
    """First matrix of the stack."""
    count: int
    row: int
    rows: int

    def view(self, tensor: Tensor) -> Tensor:
        """Return the piece ``[count, rows, n]`` of the parameter, or of a tensor of its shape."""
        stack = stacked(tensor)
        return stack[self.first : self.first + self.count, self.row : self.row + self.rows]


def stacked(tensor: Tensor) -> Tensor:
    """Return ``[..., m, n]`` as one stack ``[N, m, n]``, over the same memory."""
    if tensor.ndim < 4:
        return tensor if tensor.ndim == 3 else tensor.unsqueeze(0)
    return tensor.view(-1, *tensor.shape[-2:])


def cut(params: Mapping[str, Tensor], blocks: Mapping[str, tuple[int, ...]]) -> list[list[Piece]]:
    """Return batches of pieces; those of a batch agree in matrix shape, device and type.

    ``blocks`` gives the rows of each matrix that a fused parameter holds, in order; a parameter
    that it does not name is one matrix, or a stack of single ones.
    """
    alike: dict[tuple, list[Piece]] = defaultdict(list)
    for name, p in params.items():
        row = 0
        for rows in blocks.get(name, (p.shape[-2],)):
            key = rows, p.shape[-1], p.device, p.dtype
            room = _matrices_per_batch(rows * p.shape[-1], p.device)
            stack = stacked(p).shape[0]
            for first in range(0, stack, room):
                alike[key].append(Piece(name, first, min(room, stack - first), row, rows))
            row += rows
    return [
        batch
        for (rows, cols, device, _), pieces in alike.items()
        for batch in _batches(pieces, _matrices_per_batch(rows * cols, device))
    ]


def _matrices_per_batch(elements: int, device: torch.device) -> int:
    return max(1, BATCH_BYTES.get(device.type, BATCH_BYTES_ELSEWHERE) // (2 * elements))


def _batches(pieces: list[Piece], room: int) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    for piece in pieces:
        if batch and sum(p.count for p in batch) + piece.count > room:
            yield batch
            batch = []
        batch.append(piece)
    yield batch


class MuonOptimizer(Optimizer):
    """Muon for matrices, AdamW for the rest. State: ``momentum`` for each matrix parameter.

    ``blocks`` declares the parameters that hold several matrices over one another: their rows, in
    order (a fused query-key-value or gate-up projection). Each is made orthogonal on its own.
    Raises ``ValueError`` listing the blocks that fit no parameter.
    """

    def __init__(
        self,
        rule: Muon,
        params: Mapping[str, Tensor],
        blocks: Mapping[str, tuple[int, ...]] | None = None,
        wholes: Wholes | None = None,
    ) -> None:
        super().__init__(params)
        self.rule, self._wholes = rule, wholes
        blocks = blocks or {}
        _check_blocks(blocks, params)
        shapes = {n: tuple(p.shape) for n, p in params.items()} if wholes is None else wholes.shapes
        self._matrices = {n: p for n, p in self.params.items() if rule.orthogonalises(n, shapes[n])}
        rest = {n: p for n, p in self.params.items() if n not in self._matrices}
        self._rest = AdamWOptimizer(rule.rest, rest)
        self._momenta = {
            name: self._add_state(name, what, zeros_for(p))
            for name, p in self._matrices.items()
            for what in rule.state_names(name, shapes[name])
        }
        self._batches = cut(self._matrices, blocks) if wholes is None else []
        samples = [batch[0].view(self.params[batch[0].name]) for batch in self._batches]
        self._dtypes = [choose_arithmetic(rule.arithmetic, weight) for weight in samples]

    @torch.no_grad()
    def step(self, scale: float = 1.0, lr_factor: float = 1.0) -> None:
        """Update matrices by Muon, and the rest by the optimizer for it."""
        grads = self._gradients(scale)
        grads = {name: grads[name].contiguous() for name in self._matrices}
        lr = self.rule.lr * lr_factor
        if self._wholes is not None:
            self._step_pieces(self._wholes, grads, scale, lr)
        for batch, dtype in zip(self._batches, self._dtypes, strict=True):
            update_Nmn = self._take_momentum(batch, grads, scale)
            update_Nmn.copy_(orthogonalise(update_Nmn, self.rule.ns_steps, dtype))
            self._apply(batch, update_Nmn, lr)
        self._rest.step(scale, lr_factor)

    def _step_pieces(
        self, wholes: Wholes, grads: dict[str, Tensor], scale: float, lr: float
    ) -> None:
        """Update elements of matrices: all but Newton-Schulz is elementwise."""
        for name, grad in grads.items():
            # In place: an element's momentum is read before its direction is written.
            momentum = self._momenta[name]
            advance_momentum_(momentum, grad, self.rule, scale=scale, out=grad)
        matrices = wholes.gather(grads)
        alike: dict[torch.Size, list[int]] = defaultdict(list)
        for number, matrix in enumerate(matrices):
            alike[matrix.shape].append(number)
        for (rows, cols), numbers in alike.items():
            room = _matrices_per_batch(rows * cols, matrices[numbers[0]].device)
            for first in range(0, len(numbers), room):
                some = numbers[first : first + room]
                stacked_Nmn = torch.stack([matrices[number] for number in some])
                dtype = choose_arithmetic(self.rule.arithmetic, stacked_Nmn)
                made = orthogonalise(stacked_Nmn, self.rule.ns_steps, dtype)
                for number, update in zip(some, made.to(stacked_Nmn.dtype), strict=True):
                    matrices[number] = update
        for name, update in wholes.scatter(matrices, grads).items():
            size = update_scale(self.rule.scale, *wholes.shapes[name][-2:])
            apply_update_(self.params[name], update, self.rule, lr=lr, size=size)

    def _take_momentum(self, batch: list[Piece], grads: dict[str, Tensor], scale: float) -> Tensor:
        """Advance the momenta of a batch and return the directions, stacked."""
        first = batch[0].view(grads[batch[0].name])
        stacked_Nmn = first.new_empty(sum(piece.count for piece in batch), *first.shape[1:])
        for piece, out in zip(batch, stacked_Nmn.split([p.count for p in batch]), strict=True):
            grad = piece.view(grads[piece.name])
            momentum = piece.view(self._momenta[piece.name])
            advance_momentum_(momentum, grad, self.rule, scale=scale, out=out)
        return stacked_Nmn

    def _apply(self, batch: list[Piece], update_Nmn: Tensor, lr: float) -> None:
        """Decay the weights of a batch and take the step."""
        for piece, update in zip(batch, update_Nmn.split([p.count for p in batch]), strict=True):
            rows, cols = update.shape[1:]
            size = update_scale(self.rule.scale, rows, cols)
            apply_update_(piece.view(self.params[piece.name]), update, self.rule, lr=lr, size=size)

    def state(self) -> dict[str, Tensor]:
        """Return the state of both optimizers by its names in a checkpoint."""
        return {**self._state, **self._rest.state()}

    def lr(self, lr_factor: float = 1.0) -> dict[str, float]:
        """Return both learning rates of this step."""
        return {self.rule.kind: self.rule.lr * lr_factor, **self._rest.lr(lr_factor)}

    def describe(self) -> dict[str, str]:
        """Return in words how either update is computed."""
        if self._wholes is not None:
            line = f"{len(self._wholes.matrices)} whole matrices of other ranks' and own pieces"
            return {self.rule.kind: line, **self._rest.describe()}
        types = {str(dtype).removeprefix("torch.") for dtype in self._dtypes}
        words = " and ".join(sorted(types)) or "no type"
        count = sum(piece.count for batch in self._batches for piece in batch)
        line = f"{count} matrices in {len(self._batches)} batches, Newton-Schulz in {words}"
        return {self.rule.kind: line, **self._rest.describe()}


def _check_blocks(blocks: Mapping[str, tuple[int, ...]], params: Mapping[str, Tensor]) -> None:
    """Refuse blocks whose parameter does not exist, or whose rows do not add up to its own."""
    problems = []
    for name, rows in blocks.items():
        if name not in params:
            problems.append(f"{name}: no such parameter")
        elif params[name].ndim < 2 or sum(rows) != params[name].shape[-2] or min(rows) < 1:
            problems.append(f"{name}: rows {rows} do not make up {list(params[name].shape)}")
    if problems:
        raise ValueError("blocks of fused parameters:\n  " + "\n  ".join(problems))
