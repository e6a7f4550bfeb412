"""Larger and smaller mixtures from trained models: upcycling, copies, pruning, depth and width.

Every rule is a function from the name of a tensor of the new model to its values, computed from
those of the old one; rules compose, and hold one tensor at a time.

- *Upcycling* (arXiv 2212.05055): experts are copies of a dense feed-forward. With granularity G
  (arXiv 2410.07524) it is cut into G shards, expert ``g * C + c`` is shard g of copy c of C, and
  the router's rows for a copy's shards are equal, so that a token's ``top_k = G * k`` experts are
  all shards of k copies. Their weights sum to 1, a shard's share is 1 / G of its copy's, and a
  factor G on ``w_out`` reproduces the dense output whatever is chosen. The published factor, the
  cube root of G on each of three matrices, does not.
- *Copies* of a mixture's experts, m consecutive ones of each: m times ``top_k`` are chosen.
- *Depth*: a new layer repeats the one before it with zero output weights, and so changes no row.
- *Width* (Net2Net, arXiv 1511.05641): outputs of a product are repeated m times, and weights on
  its repeated inputs divided by m.

Shapes: E experts, F width, D hidden.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.convert.plan import targets
from moefold.kernels.swiglu import activation
from moefold.model.config import Decoder
from moefold.model.families.base import Family, ParsedConfig, raise_violations
from moefold.model.families.sizes import first_moe
from moefold.spec.decoder import has_routing

Read = Callable[[str], Tensor]
ROUTER, W_IN, W_OUT = ".moe.router.weight", ".moe.experts.w_in", ".moe.experts.w_out"
EXPERT_OUTPUTS = (W_OUT, ".moe.experts.out_bias")
OUTPUTS = (
    ".attention.o.weight", ".attention.o.bias", ".attention.out.weight", ".ffn.w_out",
    ".moe.shared.w_out", *EXPERT_OUTPUTS,
)  # fmt: skip
"""Name suffixes of the output weights of attention and feed-forward."""


@dataclass(frozen=True)
class Growth:
    """Changes of size for a new model; 1 and None leave a size unchanged."""

    experts: int | None = None
    top_k: int | None = None
    """Experts per token; None: two copies of a dense model, or the source's times the copies."""
    granularity: int = 1
    scale: Literal["exact", "cube_root"] = "exact"
    """Factors of virtual groups: G on ``w_out``, or its cube root on each matrix."""
    layers: int | None = None
    hidden_times: int = 1
    """Factor on hidden dims and heads."""
    width_times: int = 1
    """Factor on the widths of feed-forwards."""
    seed: int = 0
    """Seed of a new router's weights."""


class Grown(Mapping[str, Tensor]):
    """The new model's tensors by name, each computed on access."""

    def __init__(self, model: Family, decoder: Decoder, read: Read, notes: Sequence[str]) -> None:
        self.model, self.decoder, self.notes = model, decoder, tuple(notes)
        self._read, self._targets = read, targets(decoder)

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, name: str) -> Tensor:
        """Compute one tensor."""
        return tiled(name, self._read(name), self._targets[name].shape)


def upcycle(
    mixture: ParsedConfig, sources: Sequence[Mapping[str, Tensor]], wanted: Growth
) -> Grown:
    """Return a mixture whose experts are copies of dense models' feed-forwards, in turn.

    All other tensors are the mean over the models.

    Raises:
        ValueError: if the experts cannot be divided evenly among the models.
    """
    router = mixture.model.effective_router
    shards, copies = wanted.granularity, router.experts // wanted.granularity
    if copies % len(sources):
        unit = len(sources) * shards
        nearest = max(1, round(copies / len(sources))) * unit
        raise ValueError(f"--experts: must be a multiple of {unit}; nearest: {nearest}")
    root = shards ** (1 / 3)
    into, out = (root, root) if wanted.scale == "cube_root" else (1.0, float(shards))

    def read(name: str) -> Tensor:
        if name.endswith(ROUTER):
            shape, std = (copies, mixture.decoder.hidden), mixture.decoder.init_std
            draw = torch.Generator().manual_seed(wanted.seed * 1_000_003 + int(name.split(".")[1]))
            return (std * torch.randn(shape, generator=draw)).repeat(shards, 1)
        if not name.endswith((W_IN, W_OUT)):
            return torch.stack([one[name] for one in sources]).mean(0)
        at, factor = (-2, into) if name.endswith(W_IN) else (-1, out)
        whole = [one[name.replace(".moe.experts.", ".ffn.")] for one in sources]
        cut = [one.mul(factor).chunk(shards, at) for one in whole]
        return torch.stack([cut[c % len(cut)][g] for g in range(shards) for c in range(copies)])

    notes: list[str] = []
    if len(sources) > 1:
        notes.append("outputs differ from every source's: weights outside MoE layers are averaged")
    elif wanted.scale == "cube_root" and shards > 1:
        off = step0_error(read, sources[0], shards, copies)
        notes.append(f"the first feed-forward's output has a relative error of {off:.3g} at step 0")
    return deepened(mixture.model, mixture.decoder, read, wanted, notes)


def step0_error(read: Read, dense: Mapping[str, Tensor], shards: int, copies: int) -> float:
    """Return the relative error of the first layer's experts against the dense output.

    On 64 random rows, in fp64; all shards of one copy are chosen, as in any routing.
    """
    draw = torch.Generator().manual_seed(0)
    x_TD = torch.randn(64, dense["layers.0.ffn.w_in"].shape[-1], generator=draw).double()

    def ffn(w_in: Tensor, w_out: Tensor) -> Tensor:
        h_T2F = F.linear(x_TD, w_in.flatten(0, 1).double())
        return F.linear(activation.forward(h_T2F, None), w_out.double())

    want_TD = ffn(dense["layers.0.ffn.w_in"], dense["layers.0.ffn.w_out"])
    w_in, w_out = (read(f"layers.0{name}")[::copies] for name in (W_IN, W_OUT))
    have_TD = sum(map(ffn, w_in, w_out), torch.zeros(())) / shards
    return float((have_TD - want_TD).norm() / want_TD.norm())


def grow(
    source: ParsedConfig,
    tensors: Mapping[str, Tensor],
    wanted: Growth,
    loads: Mapping[int, Sequence[float]] | None = None,
) -> Grown:
    """Return a mixture with more or fewer experts, and more layers or width.

    Args:
        source: the mixture, as read from its ``config.json``.
        tensors: its tensors.
        wanted: sizes of the new one.
        loads: tokens of each expert by layer number, to keep the busiest experts.

    Raises:
        ValueError: if there is no such model.
    """
    router, notes = source.model.effective_router, list[str]()
    have, want = router.experts, wanted.experts or router.experts
    times = want // have
    if want != have and router.groups is not None:
        raise ValueError("--experts: cannot be changed in a model with group-limited routing")
    if want > have and want % have:
        nearest = round(want / have) * have
        raise ValueError(f"--experts: not a multiple of the source's {have}; nearest: {nearest}")
    if want < have and loads is None:
        raise ValueError(f"--experts: fewer than {have} need --text, to decide which are kept")
    top_k = wanted.top_k or min(want, router.top_k * max(1, times))
    if want < have or top_k != router.top_k * times or not (times == 1 or _shared_out(source)):
        notes.append("outputs differ from those of the source: other experts or routing weights")
    # Routing weights without normalisation would sum to ``times`` as much over the copies.
    free = router.score != "softmax" and not router.renormalise
    share = 1 / times if times > 1 and free else 1.0
    shape = source.model.shape.model_copy(update={"experts": want, "top_k": top_k})
    dense = not all(has_routing(block.ffn) for block in source.decoder.blocks)
    shared = first_moe(source.decoder).shared is not None
    for name, there in (("dense_width", dense), ("shared_width", shared)):
        if there and getattr(shape, name, 0) is None:  # its default may depend on top_k
            value = getattr(source.model.shape, f"resolved_{name}")
            shape = shape.model_copy(update={name: value})

    def read(name: str) -> Tensor:
        found = tensors[name]
        if want == have or not (".moe.experts." in name or ".moe.router." in name):
            return found
        if want > have:
            kept = torch.arange(want) // times
        else:
            load = torch.tensor((loads or {})[int(name.split(".")[1])], dtype=torch.float64)
            kept = load.argsort(descending=True, stable=True)[:want].sort().values
        return found[kept] * share if name.endswith(EXPERT_OUTPUTS) else found[kept]

    model = source.model.model_copy(update={"shape": shape})
    return deepened(model, model.describe(source.decoder.vocab), read, wanted, notes)


def deepened(
    source: Family, decoder: Decoder, read: Read, wanted: Growth, notes: Sequence[str]
) -> Grown:
    """Return a model with more layers, spread evenly after leading dense ones, and more width."""
    blocks, shape, times = decoder.blocks, source.shape, wanted.hidden_times
    layers = wanted.layers or len(blocks)
    if layers < len(blocks):
        raise ValueError(f"--layers: {layers} must be at least the source's {len(blocks)}")
    first = next(n for n, block in enumerate(blocks) if has_routing(block.ffn))
    spread = (len(blocks) - first) / (layers - first)
    origin = [n if n < first else first + int((n - first) * spread) for n in range(layers)]
    update: dict[str, Any] = {"layers": layers}
    for name, value in shape:
        if isinstance(value, tuple):  # numbers of layers
            update[name] = tuple(n for n in range(layers) if origin[n] in value)
    deep = source.model_copy(update={"shape": shape.model_copy(update=update)})
    if [blocks[n] for n in origin] != list(deep.describe(decoder.vocab).blocks):
        raise ValueError("--layers: repeated layers do not fit the family's pattern of layer kinds")
    widths = ("expert_width", "dense_width", "shared_width")
    for name in ("hidden", "heads", "kv_heads", *widths):
        if value := getattr(shape, name, None):
            update[name] = value * (wanted.width_times if name in widths else times)
    model = source.model_copy(update={"shape": shape.model_copy(update=update)})
    raise_violations((broken.under("shape") for broken in model.shape.rules()), "the new model: ")
    raise_violations(model.rules(), "the new model: ")
    if times > 1 and decoder.tied:
        raise ValueError("--hidden-times: cannot be used with a tied head: logits would be larger")

    def deep_read(name: str) -> Tensor:
        if not name.startswith("layers."):
            return read(name)
        _, number, rest = name.split(".", 2)
        layer = origin[int(number)]
        found = read(f"layers.{layer}.{rest}")
        new = int(number) > 0 and origin[int(number) - 1] == layer
        return torch.zeros_like(found) if new and name.endswith(OUTPUTS) else found

    return Grown(model, model.describe(decoder.vocab), deep_read, notes)


def tiled(name: str, found: Tensor, shape: Sequence[int]) -> Tensor:
    """Repeat a weight to ``shape``, divided by the repeats of the dim over which its product sums.

    That is the last dim of a matrix, except for the embedding, which is looked up.

    Raises:
        ValueError: if a dim is no multiple.
    """
    if tuple(found.shape) == tuple(shape):
        return found
    times = [new // old for new, old in zip(shape, found.shape, strict=True)]
    if [old * n for old, n in zip(found.shape, times, strict=True)] != list(shape):
        raise ValueError(f"{name} of shape {list(found.shape)} cannot be repeated to {list(shape)}")
    summed = found.dim() > 1 and name != "embed.weight" and not name.endswith("bias")
    return found.repeat(times) / (times[-1] if summed else 1)


def _shared_out(source: ParsedConfig) -> bool:
    """Return whether copies of an expert are chosen together and together give its output."""
    router, moe = source.model.effective_router, first_moe(source.decoder)
    soft = router.score == "softmax"
    if soft and router.order == "score_first" and router.selection_bias:
        return False  # probabilities are divided by the copies, the bias is not
    if moe.weigh == "input" and (soft or router.renormalise):
        return False
    return soft or not router.renormalise or max(router.epsilon, router.floor) < 1e-12
