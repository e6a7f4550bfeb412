"""Each operation of the hot path in each form there is, against its bound, forward and backward.

Forms are plain torch, own kernels, ``torch.compile`` of the formula, and those of other packages
where these are installed. The bound is the larger of two times at the measured ceilings: each
operand read once and each result written once, and the products' operations. What a form returns is
compared with plain torch's. Writes ``CHIP_operations.json``. T rows, D hidden, H heads, d dims of a
head, F expert width, E experts, K experts per row, R copies of rows, V vocabulary.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from gpu.device import Bench, drawn, host_seconds
from torch import Tensor
from torch.utils._pytree import tree_leaves

from moefold.kernels.attention import block_fused, block_plain
from moefold.kernels.attention.sdpa import attention
from moefold.kernels.cross_entropy.chunked import loss_and_gradients
from moefold.kernels.fused import force_triton, why_no_triton
from moefold.kernels.gradients import AUTOGRAD_SINK
from moefold.kernels.grouped.choose import choose_kernel
from moefold.kernels.linear.product import weight_gradient
from moefold.kernels.lookup import fused as lookup
from moefold.kernels.norm.rms import add_and_norm, norm_and_rotate, rms_norm
from moefold.kernels.operand import Operand
from moefold.kernels.permute.gather import permute_rows, unpermute_rows
from moefold.kernels.rope.rotate import rotate
from moefold.kernels.swiglu import activation
from moefold.kernels.swiglu.ffn import gated_ffn, grouped_products
from moefold.moe.dispatch.routing_plan import sort_copies
from moefold.moe.topk import count, select
from moefold.optim.adamw import AdamWUpdate, adamw_fused_, adamw_reference_
from moefold.optim.config import AdamWRule
from moefold.optim.muon import orthogonalise
from moefold.optim.norm import squared_norm

EPSILON = 1e-6
Form = Callable[..., Any]
"""Takes an operation's tensors and returns its results."""


@dataclass
class Operation:
    """An operation on drawn tensors.

    Attributes:
        name: what it is.
        given: its tensors by name; those that require gradients have a backward.
        forms: by name; the first is the one that others are compared with.
        flops: multiply-adds of its products, as 2, forward; backward has twice as many.
        again: names of tensors that backward reads again beside the results' gradients.
        compared: whether forms return the same values.
        more_bytes: of the forward beside its tensors: what changes in place.
        left_out: forms that cannot run here, and why.
    """

    name: str
    given: dict[str, Tensor]
    forms: dict[str, Form]
    flops: float = 0.0
    again: Sequence[str] = ()
    compared: bool = True
    more_bytes: float = 0.0
    left_out: dict[str, str] = field(default_factory=dict)


class Sizes:
    """Sizes of the operations: those of Qwen3-30B-A3B on one rank, or of a smoke run."""

    def __init__(self, bench: Bench) -> None:
        size = bench.size
        self.T, self.D, self.F = size(8192, 12), size(2048, 32), size(768, 16)
        self.E, self.K, self.V = size(128, 8), size(8, 2), size(151936, 96)
        self.H, self.G, self.d = size(32, 4), size(4, 2), size(128, 8)
        self.R = self.T * self.K


def run(bench: Bench) -> int:
    """Measure all operations; returns 1 where one failed."""
    bounds, on_cuda = Bounds(bench), bench.device.type == "cuda"
    # No graph can be captured of a backward whose forward ran on the default stream.
    with torch.cuda.stream(torch.cuda.Stream()) if on_cuda else nullcontext():
        for make in OPERATIONS:
            torch.manual_seed(0)
            try:
                for operation in make(bench, Sizes(bench)):
                    measure(bench, operation, bounds)
                    if on_cuda:
                        torch.cuda.empty_cache()
            except Exception as error:
                bench.add(make.__name__, error=f"{type(error).__name__}: {error}"[:500])
    return bench.end()


class Bounds:
    """Least seconds of an operation at the ceilings that ``ceilings`` measured on this chip."""

    def __init__(self, bench: Bench) -> None:
        file = bench.file.with_name(bench.file.name.replace("operations", "ceilings"))
        if not file.exists():
            raise ValueError(f"{file} is not there: python bench/on_gpu.py ceilings writes it")
        machine = json.loads(file.read_text("utf-8"))["machine"]
        self.bandwidth, self.bf16 = machine["bandwidth"], machine["bf16"]

    def seconds(self, moved: float, flops: float) -> float:
        """Return the larger of the times for bytes and for operations in bf16."""
        return max(moved / self.bandwidth, flops / self.bf16)


def measure(bench: Bench, operation: Operation, bounds: Bounds) -> None:
    """Time every form of an operation in turns, and write a row for each direction."""
    leaves = [x for x in operation.given.values() if x.requires_grad]
    calls, backs, kept, broken = dict[str, Form](), dict[str, Form](), dict[str, Any](), {}
    for name, form in operation.forms.items():
        try:
            given = operation.given.values()
            results = [x for x in tree_leaves(form(*given)) if isinstance(x, Tensor)]
            grads = [torch.ones_like(x) / x.numel() ** 0.5 for x in results]
            values = [x.detach().clone() for x in results]
            if leaves:
                back = partial(_backward, form, results, leaves, grads)
                values += [x.detach().clone() for x in back()]
                backs[name] = back
            calls[name], kept[name] = partial(form, *given), values
        except Exception as error:
            broken[name] = f"{type(error).__name__}: {error}"[:300]
    left_out = operation.left_out | broken
    if not calls:
        bench.add(operation.name, error=str(left_out))
        return
    first = next(iter(kept.values()))
    results = first[: len(first) - len(leaves)]
    errors = {
        name: max(map(_apart, values, first)) if operation.compared else None
        for name, values in kept.items()
    }
    of = operation.given
    size = {name: _bytes(x) for name, x in of.items()}
    out = sum(map(_bytes, results))
    moved = sum(size.values()) + out + operation.more_bytes
    back = out + sum(size[n] for n in operation.again) + sum(map(_bytes, leaves))
    ways = (("forward", calls, moved, 1), ("backward", backs, back, 2))
    for way, forms, bytes_, times in ways:
        if forms:
            bound = bounds.seconds(bytes_, times * operation.flops)
            about = {"bytes": bytes_, "flops": times * operation.flops, "bound_s": bound}
            timed = partial(_timed, bench, forms, bound)
            more = {"error_of": errors, "left_out_forms": left_out} if way == "forward" else {}
            bench.tried(f"{operation.name} {way}", timed, **about, **more)


def _timed(bench: Bench, forms: Mapping[str, Form], bound: float) -> dict[str, Any]:
    # A loop waits for the offsets.
    took = bench.timed(forms, graphed=[name for name in forms if "loop" not in name])
    return {
        "seconds": {name: found.median for name, found in took.items()},
        "spread": {name: [found.low, found.high] for name, found in took.items()},
        "share_of_bound": {name: bound / found.median for name, found in took.items()},
        "host_s": {name: host_seconds(form, bench.device) for name, form in forms.items()},
    }


def _backward(
    form: Form, results: list[Tensor], leaves: list[Tensor], grads: list[Tensor]
) -> Sequence[Tensor]:
    """Run a form's backward the way of its forward: on CUDA other threads would not know it."""
    way = force_triton(form.own) if isinstance(form, Way) else nullcontext()
    with way, torch.autograd.set_multithreading_enabled(False):
        return torch.autograd.grad(results, leaves, grads, retain_graph=True)


def _apart(found: Tensor, wanted: Tensor) -> float:
    """Return the relative error of one tensor against another, NaN where any is."""
    a, b = found.double(), wanted.double()
    return float((a - b).norm() / b.norm().clamp(min=1e-300))


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


# ----------------------------------------------------------------------------- forms


@dataclass(frozen=True)
class Way:
    """A function of the package through own kernels, or through plain torch."""

    form: Form
    own: bool

    def __call__(self, *given: Any) -> Any:
        """Run it."""
        with force_triton(self.own):
            return self.form(*given)


def ways(bench: Bench, form: Form) -> tuple[dict[str, Form], dict[str, str]]:
    """Return a function both ways, and why one is not there."""
    missing = why_no_triton(bench.device.type)
    if missing and "TRITON_INTERPRET" not in os.environ:
        return {"plain": Way(form, False)}, {"own": missing}
    return {"plain": Way(form, False), "own": Way(form, True)}, {}


def compiled(bench: Bench, form: Form) -> dict[str, Form]:
    """Return a formula under ``torch.compile`` where that is asked for: it takes minutes.

    A smoke run traces it and compiles nothing.
    """
    if not (bench.compiled or bench.smoke):
        return {}
    backend = "inductor" if bench.device.type == "cuda" else "eager"
    return {"compiled": torch.compile(form, dynamic=False, backend=backend)}


def other(module: str, form: Callable[[Any], Form]) -> dict[str, Form]:
    """Return a form of another package, where that is installed."""
    try:
        return {module.partition(".")[0]: form(import_module(module))}
    except (ImportError, AttributeError, RuntimeError):
        return {}


def leaf(*shape: int, bench: Bench, dtype: torch.dtype | None = None) -> Tensor:
    """Return drawn values that get a gradient: bf16, fp32 in a smoke run."""
    return drawn(*shape, device=bench.device, dtype=dtype or rows_of(bench)).requires_grad_()


def rows_of(bench: Bench) -> torch.dtype:
    """Return the dtype of rows: Triton's interpreter computes fp32 alone as a device does."""
    return torch.float32 if bench.smoke else torch.bfloat16


# ----------------------------------------------------------------------------- operations


def norms(bench: Bench, s: Sizes) -> Iterator[Operation]:
    """Norm of rows, alone and after a sum; norm and rotation of heads."""

    def formula(x: Tensor, w: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON) * w).to(x.dtype)

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return rms_norm(x, Operand(w, w.detach()), EPSILON)

    x, w = leaf(s.T, s.D, bench=bench), leaf(s.D, bench=bench, dtype=torch.float32)
    forms, left_out = ways(bench, norm)
    forms |= compiled(bench, formula)
    forms["torch"] = lambda x, w: F.rms_norm(x, x.shape[-1:], w.to(x.dtype), EPSILON)
    forms |= other(
        "liger_kernel.ops.rms_norm",
        lambda m: lambda x, w: m.LigerRMSNormFunction.apply(x, w, EPSILON, 0.0, "llama", False),
    )
    yield Operation("norm", {"x": x, "w": w}, forms, again=("x", "w"), left_out=left_out)

    def summed(x: Tensor, more: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return add_and_norm(x, more, Operand(w, w.detach()), EPSILON)

    def apart(x: Tensor, more: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        total = x + more
        return total, rms_norm(total, Operand(w, w.detach()), EPSILON)

    own, left_out = ways(bench, summed)
    forms = {"plain": ways(bench, apart)[0]["plain"]} | {k: own[k] for k in own if k == "own"}
    forms |= compiled(bench, lambda x, more, w: (x + more, formula(x + more, w)))
    given = {"x": x, "more": leaf(s.T, s.D, bench=bench), "w": w}
    yield Operation("sum and norm", given, forms, again=("x", "w"), left_out=left_out)

    x, w = leaf(s.T, s.H, s.d, bench=bench), leaf(s.d, bench=bench, dtype=torch.float32)
    cos, sin = (drawn(s.T, s.d // 2, device=bench.device, dtype=rows_of(bench)) for _ in range(2))

    def turned(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        weight = Operand(w, w.detach())
        return norm_and_rotate(x, weight, EPSILON, cos, sin, "half", None, AUTOGRAD_SINK)

    own, left_out = ways(bench, turned)
    forms = ways(bench, lambda x, w, cos, sin: rotate(norm(x, w), cos, sin, "half"))[0]
    forms = {"plain": forms["plain"]} | {k: own[k] for k in own if k == "own"}

    def both(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = formula(x, w).chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat([a * c - b * s, b * c + a * s], -1)

    forms |= compiled(bench, both)
    given = {"x": x, "w": w, "cos": cos, "sin": sin}
    again = ("x", "w", "cos", "sin")
    yield Operation("norm and rotation of heads", given, forms, again=again, left_out=left_out)


def activations(bench: Bench, s: Sizes) -> Iterator[Operation]:
    """SwiGLU with a weight of each row, and its gradient, which is an operation of its own."""
    h, da = (drawn(s.R, n, device=bench.device, dtype=rows_of(bench)) for n in (2 * s.F, s.F))
    p = torch.rand(s.R, device=bench.device)

    def formula(h: Tensor, p: Tensor) -> Tensor:
        gate, up = h.float().chunk(2, 1)
        return (F.silu(gate) * up * p[:, None]).to(h.dtype)

    forms, left_out = ways(bench, activation.forward)
    forms |= compiled(bench, formula)
    yield Operation("swiglu", {"h": h, "p": p}, forms, left_out=left_out)

    def gradient(h: Tensor, p: Tensor, da: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, up = h.float().chunk(2, 1)
        wide, sigmoid = da.float(), torch.sigmoid(gate)
        a, dq = gate * sigmoid * up, wide * p[:, None]
        dgate = dq * up * sigmoid * (1 + gate * (1 - sigmoid))
        dh = torch.cat([dgate, dq * gate * sigmoid], 1).to(h.dtype)
        return dh, (a * wide).sum(1), (a * p[:, None]).to(h.dtype)

    forms, left_out = ways(bench, activation.backward)
    forms |= compiled(bench, gradient)
    yield Operation("swiglu's gradient", {"h": h, "p": p, "da": da}, forms, left_out=left_out)
    halves = {"gate": leaf(s.R, s.F, bench=bench), "up": leaf(s.R, s.F, bench=bench)}
    forms = {"plain": lambda gate, up: F.silu(gate) * up} | other(
        "liger_kernel.ops.swiglu", lambda m: m.LigerSiLUMulFunction.apply
    )
    yield Operation("swiglu without weights", halves, forms, again=("gate", "up"))


def routing(bench: Bench, s: Sizes) -> Iterator[Operation]:
    """Choice of experts, order and counts of copies, rows to copies and back."""
    scores = torch.rand(s.T, s.E, device=bench.device)
    forms, left_out = ways(bench, lambda x: select(x, s.K))
    yield Operation("choice of experts", {"scores": scores}, forms, left_out=left_out)
    experts = select(scores, s.K)
    forms, left_out = ways(bench, lambda ids: tuple(sort_copies(ids, s.E, True)))
    yield Operation("order of copies", {"experts": experts}, forms, left_out=left_out)
    forms, left_out = ways(bench, lambda ids: count(ids, s.E))
    yield Operation("counts of copies", {"experts": experts}, forms, left_out=left_out)
    order = sort_copies(experts, s.E, True)
    index = {"token": order.token_R, "row": order.row_TK}

    def copies(x: Tensor, token: Tensor, row: Tensor) -> Tensor:
        return permute_rows(x, token, row, True)

    forms, left_out = ways(bench, copies)
    forms |= compiled(bench, lambda x, token, row: x[token])
    given = {"x": leaf(s.T, s.D, bench=bench), **index}
    yield Operation("rows to copies", given, forms, again=("row",), left_out=left_out)

    def sums(y: Tensor, token: Tensor, row: Tensor) -> Tensor:
        return unpermute_rows(y, token, row, True)

    forms, left_out = ways(bench, sums)
    forms |= compiled(bench, lambda y, token, row: y[row].float().sum(1).to(y.dtype))
    given = {"y": leaf(s.R, s.D, bench=bench), **index}
    yield Operation("copies to rows", given, forms, again=("token",), left_out=left_out)


def experts(bench: Bench, s: Sizes) -> Iterator[Operation]:
    """Grouped SwiGLU with its copies made and added up, as all experts of a layer."""
    ids = select(torch.rand(s.T, s.E, device=bench.device), s.K)
    order = sort_copies(ids, s.E, True)
    weights = torch.rand(s.T, s.K, device=bench.device).requires_grad_()
    tensors = {
        "x": leaf(s.T, s.D, bench=bench), "w_in": leaf(s.E, 2, s.F, s.D, bench=bench),
        "w_out": leaf(s.E, s.D, s.F, bench=bench), "weights": weights,
    }  # fmt: skip

    def layer(asked: str, x: Tensor, w_in: Tensor, w_out: Tensor, weights: Tensor) -> Tensor:
        kernel = choose_kernel(asked, x.dtype, s.D, s.F, device=x.device)
        products = grouped_products(kernel, order.offs_B)
        into, out = (Operand(w, w.detach()) for w in (w_in, w_out))
        x_RD, p_R = order.rows(x, True), order.entries(weights, True)
        y_RD = gated_ffn(x_RD, into, out, products, AUTOGRAD_SINK, p_R)
        return unpermute_rows(y_RD, order.token_R, order.row_TK, True)

    forms, left_out = dict[str, Form](), dict[str, str]()
    for asked in ("loop", "grouped", "triton"):
        for way, form in ways(bench, partial(layer, asked))[0].items():
            if (asked == "loop") == (way == "plain") or asked == "grouped":
                forms[f"{asked}, {way}"] = form

    def liger(module: Any) -> Form:
        def form(x: Tensor, w_in: Tensor, w_out: Tensor, weights: Tensor) -> Tensor:
            given = x, w_in.flatten(1, 2), w_out, ids.to(torch.int32), weights
            return module.LigerFusedMoEFunction.apply(*given)

        return form

    def sonic(module: Any) -> Form:
        swiglu = import_module("sonicmoe.enums").ActivationType.SWIGLU
        token = torch.arange(s.T, device=bench.device).repeat_interleave(s.K).to(torch.int32)

        def form(x: Tensor, w_in: Tensor, w_out: Tensor, weights: Tensor) -> Tensor:
            w1, w2 = w_in.flatten(1, 2).permute(1, 2, 0), w_out.permute(1, 2, 0)
            stream = torch.cuda.current_stream().cuda_stream
            return module.moe_general_routing_inputs(
                x, weights.flatten(), token, ids.flatten().to(torch.int32), w1, None, w2, None,
                s.E, stream, swiglu, False, concat_layout=True,
            )[0]  # fmt: skip

        return form

    forms |= other("liger_kernel.ops.fused_moe", liger) | other("sonicmoe.functional", sonic)
    flops = 6.0 * s.R * s.D * s.F
    again = ("x", "w_in", "w_out", "weights")
    yield Operation("experts", tensors, forms, flops, again, left_out=left_out)


def ends(bench: Bench, s: Sizes) -> Iterator[Operation]:
    """Head with its loss, whose forward makes the gradients too; the table's gradient."""
    rows = bench.size(4096, s.T)
    x = drawn(rows, s.D, device=bench.device, dtype=rows_of(bench))
    w = drawn(s.V, s.D, device=bench.device, dtype=rows_of(bench)) * s.D**-0.5
    labels = torch.randint(s.V, (rows,), device=bench.device)
    master = torch.nn.Parameter(w.float())

    def head(x: Tensor, w: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        master.grad = None
        return loss_and_gradients(x, Operand(master, w), labels, scale=1.0, chunk=1024)

    def by_autograd(loss: Form) -> Form:
        def form(x: Tensor, w: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
            total = loss(x, w, labels)
            dx, _ = torch.autograd.grad(total, (x, w))
            return total.detach(), dx

        return form

    forms, left_out = ways(bench, head)
    forms |= other(
        "liger_kernel.ops.fused_linear_cross_entropy",
        lambda m: by_autograd(
            lambda x, w, t: m.LigerFusedLinearCrossEntropyFunction.apply(
                x, w, t, None, None, -100, 0.0, 0.0, "sum"
            )[0]
        ),
    )
    linear = getattr(F, "linear_cross_entropy", None)
    if linear is not None:
        forms["torch"] = by_autograd(lambda x, w, t: linear(x, w, t, reduction="sum"))
    given = {"x": x, "w": w, "labels": labels}
    written = 4.0 * s.V * s.D
    yield Operation(
        "head and loss", given, forms, 6.0 * rows * s.D * s.V, more_bytes=written, left_out=left_out
    )
    table = torch.zeros(s.V, s.D, device=bench.device)
    dx, ids = drawn(s.T, s.D, device=bench.device, dtype=torch.float32), labels.repeat(2)[: s.T]

    def own(dx: Tensor, ids: Tensor) -> None:
        lookup.gradient(dx, *ids.sort(stable=True), table)

    forms = {
        "index_add": lambda dx, ids: table.index_add_(0, ids, dx),
        "embedding_dense_backward": lambda dx, ids: table.add_(
            torch.ops.aten.embedding_dense_backward(dx, ids, s.V, -1, False)
        ),
    }
    reach, left_out = ways(bench, own)
    forms |= {name: form for name, form in reach.items() if name == "own"}
    written = 2.0 * dx.numel() * 4
    yield Operation(
        "the table's gradient", {"dx": dx, "ids": ids}, forms, more_bytes=written - 4.0 * s.V * s.D,
        compared=False, left_out=left_out,
    )  # fmt: skip


def attentions(bench: Bench, s: Sizes) -> Iterator[Operation]:
    """Attention over one document and over eight of drawn lengths, and a ring's block."""
    shapes = (s.H, s.G, s.G)
    qkv = {n: leaf(s.T, h, s.d, bench=bench) for n, h in zip("qkv", shapes, strict=True)}
    cuts = sorted({*torch.randint(1, s.T, (7,)).tolist(), 0, s.T})
    several = tuple(b - a for a, b in pairwise(cuts))
    for name, lengths in (("1 document", (s.T,)), (f"{len(several)} documents", several)):
        forms: dict[str, Form] = {
            "sdpa": lambda q, k, v, lengths=lengths: attention(q, k, v, lengths, s.d**-0.5)
        }
        forms |= other("torch.nn.attention.varlen", partial(_varlen, bench, lengths, s.d))
        flops = sum(2.0 * s.H * s.d * n * n for n in lengths)
        yield Operation(f"attention, {name}", qkv, forms, flops, again=("q", "k", "v"))
    half = s.T // 2
    block = {
        n: drawn(1, h, half, s.d, device=bench.device, dtype=rows_of(bench))
        for n, h in zip("qkv", shapes, strict=True)
    }
    for causal in (True, False):
        forms = {
            name: lambda q, k, v, m=module, c=causal: m.forward(q, k, v, s.d**-0.5, c)
            for name, module in (("plain", block_plain), ("library", block_fused))
        }
        flops = (2.0 if causal else 4.0) * s.H * s.d * half * half
        yield Operation(f"a ring's block, causal {causal}", block, forms, flops)


def _varlen(bench: Bench, lengths: Sequence[int], dim: int, module: Any) -> Form:
    """Return torch's attention over documents of any lengths, CUDA's alone."""
    if bench.device.type != "cuda":
        raise RuntimeError("it runs on CUDA alone")
    ends = torch.tensor([0, *lengths], device=bench.device).cumsum(0).to(torch.int32)

    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        longest = max(lengths)
        return module.varlen_attn(q, k, v, ends, ends, longest, longest, window_size=(-1, 0))

    return form


def updates(bench: Bench, s: Sizes) -> Iterator[Operation]:
    """A dense weight's gradient added up in fp32; AdamW, Muon's products and the norm."""
    x, dy = (drawn(s.T, s.D, device=bench.device, dtype=rows_of(bench)) for _ in range(2))
    into = torch.zeros(s.D, s.D, device=bench.device)
    forms: dict[str, Form] = {
        "now": lambda dy, x: weight_gradient(dy, x, into),
        "rounded first": lambda dy, x: into.add_(dy.t() @ x),
    }
    given = {"dy": dy, "x": x}
    more = 4.0 * s.D * s.D
    yield Operation(
        "a weight's gradient", given, forms, 2.0 * s.T * s.D * s.D, (), False, more_bytes=more
    )
    count = bench.size(1 << 27, 1 << 10)
    names = ("param", "grad", "exp_avg", "exp_avg_sq")
    state = {n: torch.rand(count, device=bench.device) for n in names}

    def update(step: Callable[[AdamWUpdate], None], p: Tensor, g: Tensor, *moments: Tensor) -> None:
        first, second = moments
        step(AdamWUpdate([p], [g], [first], [second], AdamWRule(), 1, 1e-4, 0.1, 0.5))

    forms = {"plain": partial(update, adamw_reference_), "fused": partial(update, adamw_fused_)}
    yield Operation("AdamW", state, forms, compared=False, more_bytes=3.0 * 4 * count)
    forms = {"now": lambda grad: squared_norm([grad], bench.device)}
    yield Operation("norm of gradients", {"grad": state["grad"]}, forms)
    matrices = torch.randn(bench.size(16, 2), 2 * s.F, s.D, device=bench.device)
    short, long = sorted(matrices.shape[-2:])
    flops = 5.0 * len(matrices) * (4.0 * short * short * long + 2.0 * short**3)
    forms = {"now": lambda x: orthogonalise(x, 5, torch.bfloat16)}
    yield Operation("Muon's products", {"x": matrices}, forms, flops)


OPERATIONS = (norms, activations, routing, experts, ends, attentions, updates)
