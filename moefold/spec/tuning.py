"""Frozen parameters and low-rank adapters of a decoder, without torch.

Parameters are chosen by shell patterns of global names, such as ``layers.*.moe.router.*``.
"""

from collections.abc import Iterator, Sequence
from math import isclose
from pathlib import Path
from typing import Any

from moefold.config.errors import Violation
from moefold.config.suggest import closest
from moefold.model.config import Decoder, LowRank, to_stacks
from moefold.model.families.peft import read_adapter
from moefold.optim.config import matches
from moefold.spec.decoder import LORA_B, model_weights
from moefold.spec.layer import LayerSpec, Weight, round_up_to
from moefold.training.config import LAYER_TARGETS, OTHER_TARGETS, Lora


def apply_tuning(decoder: Decoder, frozen: Sequence[str], adapter: Lora | None) -> Decoder:
    """Return a decoder with a run's frozen parameters, or with its adapters and the rest frozen."""
    return freeze(decoder, frozen) if adapter is None else adapt(decoder, adapter)


def tuning_violations(
    decoder: Decoder, frozen: Sequence[str], adapter: Lora | None
) -> Iterator[Violation]:
    """Yield values of a run's ``train.freeze`` and ``adapter`` that do not fit its model."""
    if frozen:
        at, names = ("train", "freeze"), [weight.name for weight in model_weights(decoder)]
        for place, pattern in enumerate(frozen):
            if not any(matches(name, (pattern,)) for name in names):
                rule = "must match a parameter of the model"
                yield Violation((*at, place), pattern, rule, nearest_name(pattern, names))
        if all(matches(name, frozen) for name in names):
            yield Violation(at, list(frozen), "must leave a parameter to train", list(frozen[:-1]))
    if adapter is not None:
        found = list(adapter_violations(decoder, adapter))
        found += [] if found or adapter.start is None else _start_violations(decoder, adapter)
        for violation in found:
            yield violation.under("adapter")


def freeze(decoder: Decoder, frozen: Sequence[str]) -> Decoder:
    """Return a decoder in which the parameters that match ``frozen`` are not trained.

    Raises:
        ValueError: if a plug-in layer has no description, and so no names of parameters.
    """
    if not frozen:
        return decoder
    names = [w.name for w in model_weights(decoder) if matches(w.name, frozen)]
    blocks = []
    for number, block in enumerate(decoder.blocks):
        at = f"layers.{number}."
        held = tuple(name.removeprefix(at) for name in names if name.startswith(at))
        blocks.append(block.model_copy(update={"frozen": held}))
    outside = tuple(name for name in names if not name.startswith("layers."))
    return decoder.model_copy(update={"stacks": to_stacks(blocks), "frozen": outside})


def without_tuning(decoder: Decoder) -> Decoder:
    """Return a decoder without adapters, frozen parameters and quantised products."""
    decoder = decoder.model_copy(update={"quantise": None}) if decoder.quantise else decoder
    tuned = (decoder, *decoder.blocks)
    if not any(one.frozen or one.adapters for one in tuned):
        return decoder
    plain: dict[str, Any] = {"frozen": (), "adapters": ()}
    blocks = (block.model_copy(update=plain) for block in decoder.blocks)
    return decoder.model_copy(update={"stacks": to_stacks(blocks)} | plain)


def adapt(decoder: Decoder, lora: Lora) -> Decoder:
    """Return a decoder whose target weights have adapters, and which trains only these.

    Raises:
        ValueError: if a plug-in layer has no description, and so no names of parameters.
    """
    decoder = freeze(decoder, ("*",))
    chosen = [w for w in model_weights(decoder) if is_target(w, lora.targets)]

    def adapters(at: str, top_k: int | None) -> tuple[LowRank, ...]:
        found = []
        for weight in chosen:
            if weight.name.startswith(at) and (at or not weight.name.startswith("layers.")):
                rank = lora.rank_of(top_k if weight.is_expert else None)
                name = weight.name.removeprefix(at)
                how = {"scale": lora.alpha / rank, "dropout": lora.dropout}
                found.append(LowRank(weight=name, rank=rank, **how))
        return tuple(found)

    blocks = []
    for number, block in enumerate(decoder.blocks):
        routing = block.ffn.routing if isinstance(block.ffn, LayerSpec) else None
        held = adapters(f"layers.{number}.", routing and routing.top_k)
        blocks.append(block.model_copy(update={"adapters": held}))
    changed = {"stacks": to_stacks(blocks), "adapters": adapters("", None)}
    return decoder.model_copy(update=changed)


def adapter_scales(decoder: Decoder) -> dict[str, float]:
    """Return the scale of ``B A`` by the global name of each weight with an adapter."""
    found = {one.weight: one.scale for one in decoder.adapters}
    for number, block in enumerate(decoder.blocks):
        found |= {f"layers.{number}.{one.weight}": one.scale for one in block.adapters}
    return found


def is_target(weight: Weight, targets: Sequence[str]) -> bool:
    """Return whether a weight gets an adapter: a matrix of products that a target names.

    Targets are words, such as ``attention``, or patterns; gates (one output) need a pattern.
    """
    if len(weight.shape) < 2 or weight.looked_up or weight.stacked or weight.summed:
        return False
    kind = "head" if weight.name == "head.weight" else weight.category
    gate = weight.shape[-2] == 1
    words = {kind, "all"} if kind in LAYER_TARGETS else {kind}
    return (not gate and bool(words & set(targets))) or matches(weight.name, targets)


def adapter_violations(decoder: Decoder, lora: Lora) -> Iterator[Violation]:
    """Yield targets that match no weight of a decoder, and a rank that top-k does not divide."""
    weights = [w for w in model_weights(decoder) if is_target(w, ("*",))]
    for place, target in enumerate(lora.targets):
        if not any(is_target(weight, (target,)) for weight in weights):
            words = [*LAYER_TARGETS, *OTHER_TARGETS, "all"]
            there = [w for w in words if any(is_target(weight, (w,)) for weight in weights)]
            names = [weight.name for weight in weights]
            nearest = closest(target, there) or nearest_name(target, names)
            yield Violation(("targets", place), target, "must match an adaptable weight", nearest)
    if not lora.divided:
        return
    specs = (block.ffn for block in decoder.blocks if isinstance(block.ffn, LayerSpec))
    for top_k in dict.fromkeys(spec.routing.top_k for spec in specs if spec.routing):
        if lora.rank % top_k:
            nearest = round_up_to(lora.rank, top_k)
            yield Violation(("rank",), lora.rank, f"must be a multiple of top_k ({top_k})", nearest)


def _start_violations(decoder: Decoder, lora: Lora) -> Iterator[Violation]:
    """Yield differences in weights, rank or scale from the adapter that a run starts from."""
    assert lora.start is not None
    try:
        first = read_adapter(Path(lora.start), decoder).adapters
    except (ValueError, OSError) as error:
        rule = f"must be an adapter of this model: {error}"
        yield Violation(("from",), lora.start, rule)
        return
    adapted = adapt(decoder, lora)
    scales = adapter_scales(adapted)
    if first.keys() != scales.keys():
        matched = [w for w in model_weights(decoder) if w.name in first]
        words = (*LAYER_TARGETS, *OTHER_TARGETS)
        named = [w for w in words if any(is_target(weight, (w,)) for weight in matched)]
        same = {w.name for w in model_weights(decoder) if is_target(w, named)} == first.keys()
        nearest = named if same else list(first)
        rule = f"must name the weights that {lora.start} adapts"
        yield Violation(("targets",), list(lora.targets), rule, nearest)
        return
    ranks = {w.name: w.shape[-1] for w in model_weights(adapted) if w.name.endswith(LORA_B)}
    for name, own in first.items():
        rank = ranks[name + LORA_B]
        if own.rank != rank:
            rule = f"gives {name} rank {rank}, but in {lora.start} it has rank {own.rank}"
            yield Violation(("rank",), lora.rank, rule, max(1, lora.rank * own.rank // rank))
            return
        if not isclose(own.scale, scales[name], rel_tol=1e-6):
            rule = f"alpha / rank ({rank}) must be {own.scale:g}, as in {lora.start}"
            yield Violation(("alpha",), lora.alpha, rule, own.scale * rank)
            return


def nearest_name(pattern: str, names: Sequence[str]) -> str:
    """Return the name, or pattern ``*.name``, that is closest to a pattern without matches."""
    found: dict[str, None] = {}
    for words in dict.fromkeys(tuple(name.split(".")) for name in names):
        if words[0] == "layers":
            words = "layers", "*", *words[2:]
        ends = (words[start:] for start in range(2, len(words) - 1)) if len(words) > 2 else ()
        found |= dict.fromkeys([".".join(words), *(".".join(("*", *end)) for end in ends)])
    return closest(pattern, found, 0.0) or names[0]
