"""Larger and smaller MoE models from trained models: upcycling, copies, pruning, depth and width.

Each rule is a function from the name of a tensor in the new model to its values, computed from the
source's. Rules compose, and keep one tensor in memory at a time.

- *Upcycling* (arXiv 2212.05055): experts are copies of a dense feed-forward. With granularity G
  (arXiv 2410.07524) it is split into G shards: expert ``g * C + c`` is shard g of copy c of C. The
  router's rows of a copy's shards are equal, so that a token's ``top_k = G * k`` experts are all
  shards of k copies. Their weights sum to 1, a shard's weight is 1 / G of its copy's, and a factor
  G on ``w_out`` reproduces the dense output for any choice. The published factor, the cube root of
  G on each of three matrices, does not. Where weights are probabilities over all E experts, they
  sum to about top_k / E, and the factor is G * E / top_k.
- *Copies* of an MoE model's experts, m consecutive ones of each: ``top_k`` is multiplied by m.
- *Depth*: a new layer repeats the previous one with zero output weights, and so changes no row.
- *Width* (Net2Net, arXiv 1511.05641): outputs of a product are repeated m times, and weights of
  repeated inputs are divided by m.

Shapes: E experts, F width, D hidden.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.convert.plan import meta_state_dict
from moefold.kernels.swiglu import activation
from moefold.model.config import Decoder
from moefold.model.families.base import Family, ParsedConfig, raise_violations
from moefold.model.families.sizes import first_moe
from moefold.moe.config import Router
from moefold.spec.decoder import has_routing

Reader = Callable[[str], Tensor]
ROUTER = ".moe.router.weight"
W_IN = ".moe.experts.w_in"
W_OUT = ".moe.experts.w_out"
EXPERT_OUTPUTS = (W_OUT, ".moe.experts.out_bias")
OUTPUTS = (
    ".attention.o.weight", ".attention.o.bias", ".attention.out.weight", ".ffn.w_out",
    ".moe.shared.w_out", *EXPERT_OUTPUTS,
)  # fmt: skip
"""Name suffixes of the output weights of attention and feed-forward."""


@dataclass(frozen=True)
class Growth:
    """Changes of size for a new model; 1 and None keep a size."""

    experts: int | None = None
    top_k: int | None = None
    """Experts per token; None: two copies of a dense model, or copies times the source's."""
    granularity: int = 1
    scale: Literal["exact", "cube_root"] = "exact"
    """Where the factor of upcycling is: on ``w_out``, or its cube root on each matrix."""
    routing: Literal["normalised", "pre_softmax"] = "normalised"
    """Whether the weights of a token's experts sum to 1, or are probabilities over all experts."""
    layers: int | None = None
    hidden_times: int = 1
    """Factor on hidden dims and heads."""
    width_times: int = 1
    """Factor on the widths of feed-forwards."""
    seed: int = 0
    """Seed of a new router's weights."""


class GrownModel(Mapping[str, Tensor]):
    """The new model's tensors by name, each computed on access."""

    def __init__(self, model: Family, decoder: Decoder, read: Reader, notes: Sequence[str]) -> None:
        self.model = model
        self.decoder = decoder
        self.notes = tuple(notes)
        self._read = read
        self._targets = meta_state_dict(decoder)

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, name: str) -> Tensor:
        """Compute one tensor."""
        return tile(name, self._read(name), self._targets[name].shape)


def upcycle(
    config: ParsedConfig, sources: Sequence[Mapping[str, Tensor]], growth: Growth
) -> GrownModel:
    """Return an MoE model whose experts are copies of dense models' feed-forwards, alternating.

    All other tensors are means over the models.

    Raises:
        ValueError: if the experts cannot be divided evenly among the models.
    """
    router = config.model.effective_router
    shards = growth.granularity
    copies = router.experts // growth.granularity
    if copies % len(sources):
        unit = len(sources) * shards
        nearest = max(1, round(copies / len(sources))) * unit
        raise ValueError(f"--experts: must be a multiple of {unit}; nearest: {nearest}")
    factor = upcycling_factor(router, shards)
    root = factor ** (1 / 3)
    in_scale, out_scale = (root, root) if growth.scale == "cube_root" else (1.0, factor)

    def read(name: str) -> Tensor:
        if name.endswith(ROUTER):
            shape = (copies, config.decoder.hidden)
            std = config.decoder.init_std
            layer = int(name.split(".")[1])
            rng = torch.Generator().manual_seed(growth.seed * 1_000_003 + layer)
            return (std * torch.randn(shape, generator=rng)).repeat(shards, 1)
        if not name.endswith((W_IN, W_OUT)):
            return torch.stack([source[name] for source in sources]).mean(0)
        dim, scale = (-2, in_scale) if name.endswith(W_IN) else (-1, out_scale)
        dense = [source[name.replace(".moe.experts.", ".ffn.")] for source in sources]
        cut = [tensor.mul(scale).chunk(shards, dim) for tensor in dense]
        experts = [cut[copy % len(cut)][shard] for shard in range(shards) for copy in range(copies)]
        return torch.stack(experts)

    notes: list[str] = []
    if len(sources) > 1:
        notes.append("outputs differ from every source's: weights outside MoE layers are averaged")
    elif not router.renormalise or (growth.scale == "cube_root" and shards > 1):
        err = step0_error(read, sources[0], router, shards)
        notes.append(f"the first feed-forward's output has a relative error of {err:.3g} at step 0")
    return resize(config.model, config.decoder, read, growth, notes)


def upcycling_factor(router: Router, shards: int) -> float:
    """Return the factor on a shard's output with which a token's experts sum to the dense output.

    Where routing weights are probabilities over all experts, it is exact if these are equal, which
    those of a new router nearly are.
    """
    return shards if router.renormalise else shards * router.experts / router.top_k


def step0_error(read: Reader, dense: Mapping[str, Tensor], router: Router, shards: int) -> float:
    """Return the relative error of the first layer's experts against the dense output.

    It is computed on 64 random rows in fp64. All shards of a copy have one weight, so that the
    weights of a token's experts multiply the output of one copy.
    """
    rng = torch.Generator().manual_seed(0)
    x_TD = torch.randn(64, dense["layers.0.ffn.w_in"].shape[-1], generator=rng).double()

    def ffn(w_in: Tensor, w_out: Tensor) -> Tensor:
        h_T2F = F.linear(x_TD, w_in.flatten(0, 1).double())
        return F.linear(activation.forward(h_T2F, None), w_out.double())

    expected_TD = ffn(dense["layers.0.ffn.w_in"], dense["layers.0.ffn.w_out"])
    copies = router.experts // shards
    w_in, w_out = (read(f"layers.0{name}")[::copies] for name in (W_IN, W_OUT))
    weight_TE = F.linear(x_TD, read(f"layers.0{ROUTER}").double()).softmax(-1)
    weight_T1 = weight_TE.topk(router.top_k).values.sum(-1, keepdim=True)
    if router.renormalise:
        weight_T1 = torch.ones_like(weight_T1)
    actual_TD = sum(map(ffn, w_in, w_out), torch.zeros(())) * weight_T1 / shards
    return float((actual_TD - expected_TD).norm() / expected_TD.norm())


def grow(
    source: ParsedConfig,
    tensors: Mapping[str, Tensor],
    growth: Growth,
    loads: Mapping[int, Sequence[float]] | None = None,
) -> GrownModel:
    """Return an MoE model with more or fewer experts, and more layers or width.

    Args:
        source: the model, as described by its ``config.json``.
        tensors: its tensors.
        growth: sizes of the new model.
        loads: tokens per expert by layer number, to keep the experts with the most tokens.

    Raises:
        ValueError: if there is no such model.
    """
    router = source.model.effective_router
    notes = list[str]()
    old = router.experts
    new = growth.experts or router.experts
    times = new // old
    if new != old and router.groups is not None:
        raise ValueError("--experts: cannot be changed in a model with group-limited routing")
    if new > old and new % old:
        nearest = round(new / old) * old
        raise ValueError(f"--experts: not a multiple of the source's {old}; nearest: {nearest}")
    if new < old and loads is None:
        raise ValueError(f"--experts: fewer than {old} need --text, to decide which are kept")
    top_k = growth.top_k or min(new, router.top_k * max(1, times))
    same = times == 1 or _copies_preserve_output(source)
    if new < old or top_k != router.top_k * times or not same:
        notes.append("outputs differ from those of the source: other experts or routing weights")
    # Without normalisation, routing weights would sum to ``times`` as much over the copies.
    unnormalised = router.score != "softmax" and not router.renormalise
    scale = 1 / times if times > 1 and unnormalised else 1.0
    shape = source.model.shape.model_copy(update={"experts": new, "top_k": top_k})
    dense = not all(has_routing(block.ffn) for block in source.decoder.blocks)
    shared = first_moe(source.decoder).shared is not None
    for name, used in (("dense_width", dense), ("shared_width", shared)):
        if used and getattr(shape, name, 0) is None:  # its default may depend on top_k
            value = getattr(source.model.shape, f"resolved_{name}")
            shape = shape.model_copy(update={name: value})

    def read(name: str) -> Tensor:
        tensor = tensors[name]
        if new == old or not (".moe.experts." in name or ".moe.router." in name):
            return tensor
        if new > old:
            kept = torch.arange(new) // times
        else:
            layer = int(name.split(".")[1])
            load = torch.tensor((loads or {})[layer], dtype=torch.float64)
            kept = load.argsort(descending=True, stable=True)[:new].sort().values
        return tensor[kept] * scale if name.endswith(EXPERT_OUTPUTS) else tensor[kept]

    model = source.model.model_copy(update={"shape": shape})
    return resize(model, model.describe(source.decoder.vocab), read, growth, notes)


def resize(
    source: Family, decoder: Decoder, read: Reader, growth: Growth, notes: Sequence[str]
) -> GrownModel:
    """Return a wider model with more layers, inserted evenly after the leading dense ones."""
    blocks = decoder.blocks
    shape = source.shape
    times = growth.hidden_times
    layers = growth.layers or len(blocks)
    if layers < len(blocks):
        raise ValueError(f"--layers: {layers} must be at least the source's {len(blocks)}")
    first = next(n for n, block in enumerate(blocks) if has_routing(block.ffn))
    step = (len(blocks) - first) / (layers - first)
    origin = [n if n < first else first + int((n - first) * step) for n in range(layers)]
    update: dict[str, Any] = {"layers": layers}
    for name, value in shape:
        if isinstance(value, tuple):  # numbers of layers
            update[name] = tuple(n for n in range(layers) if origin[n] in value)
    deeper = source.model_copy(update={"shape": shape.model_copy(update=update)})
    if [blocks[n] for n in origin] != list(deeper.describe(decoder.vocab).blocks):
        raise ValueError("--layers: repeated layers do not fit the family's pattern of layer kinds")
    widths = ("expert_width", "dense_width", "shared_width")
    for name in ("hidden", "heads", "kv_heads", *widths):
        if value := getattr(shape, name, None):
            update[name] = value * (growth.width_times if name in widths else times)
    model = source.model_copy(update={"shape": shape.model_copy(update=update)})
    raise_violations((v.under("shape") for v in model.shape.rules()), "the new model: ")
    raise_violations(model.rules(), "the new model: ")
    if times > 1 and decoder.tied:
        raise ValueError("--hidden-times: cannot be used with a tied head: logits would be larger")

    def read_layer(name: str) -> Tensor:
        if not name.startswith("layers."):
            return read(name)
        _, digits, rest = name.split(".", 2)
        number = int(digits)
        layer = origin[number]
        tensor = read(f"layers.{layer}.{rest}")
        inserted = number > 0 and origin[number - 1] == layer
        return torch.zeros_like(tensor) if inserted and name.endswith(OUTPUTS) else tensor

    return GrownModel(model, model.describe(decoder.vocab), read_layer, notes)


def tile(name: str, tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Repeat a weight to ``shape``, divided by the repeats of the dim over which its product sums.

    That is the last dim of a matrix, except for the embedding, which is looked up.

    Raises:
        ValueError: if a dim is not a multiple of the old one.
    """
    old = tensor.shape
    if tuple(old) == tuple(shape):
        return tensor
    times = [new // size for new, size in zip(shape, old, strict=True)]
    repeated = [size * n for size, n in zip(old, times, strict=True)]
    if repeated != list(shape):
        raise ValueError(f"{name} of shape {list(old)} cannot be repeated to {list(shape)}")
    summed = tensor.dim() > 1 and name != "embed.weight" and not name.endswith("bias")
    return tensor.repeat(times) / (times[-1] if summed else 1)


def _copies_preserve_output(source: ParsedConfig) -> bool:
    """Return whether copies of an expert are chosen together, and their sum is its output."""
    router = source.model.effective_router
    moe = first_moe(source.decoder)
    softmax = router.score == "softmax"
    if softmax and router.order == "score_first" and router.selection_bias:
        return False  # probabilities are divided by the copies, the bias is not
    if moe.weigh == "input" and (softmax or router.renormalise):
        return False
    return softmax or not router.renormalise or max(router.epsilon, router.floor) < 1e-12
