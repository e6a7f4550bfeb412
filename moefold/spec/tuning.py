"""Frozen parameters and low-rank adapters of a decoder, without torch.

Parameters are chosen by shell patterns of global names, such as ``layers.*.moe.router.*``.
"""

from collections.abc import Iterator, Sequence
from math import isclose
from pathlib import Path
from typing import Any

import yaml

from moefold.config.check import check
from moefold.config.errors import RunError, Violation
from moefold.config.suggest import closest
from moefold.model.config import Decoder, LowRank, to_stacks
from moefold.model.families.peft_reading import read_adapter
from moefold.optim.config import GROUP_NAMES, Optim, matches
from moefold.spec.decoder import LORA_B, model_weights, qk_clip_violations
from moefold.spec.layer import LayerSpec, Weight, round_up
from moefold.training.config import LAYER_TARGETS, OTHER_TARGETS, Lora


def apply_tuning(decoder: Decoder, frozen: Sequence[str], adapter: Lora | None) -> Decoder:
    """Return a decoder with a run's frozen parameters, or with its adapters and the rest frozen."""
    return freeze(decoder, frozen) if adapter is None else adapt(decoder, adapter)


def tuning_violations(
    decoder: Decoder, frozen: Sequence[str], adapter: Lora | None
) -> Iterator[Violation]:
    """Yield values of a run's ``train.freeze`` and ``adapter`` that do not fit its model."""
    if frozen:
        path = ("train", "freeze")
        names = [weight.name for weight in model_weights(decoder)]
        for index, pattern in enumerate(frozen):
            if not any(matches(name, (pattern,)) for name in names):
                rule = "must match a parameter of the model"
                yield Violation((*path, index), pattern, rule, nearest_name(pattern, names))
        if all(matches(name, frozen) for name in names):
            yield Violation(
                path, list(frozen), "must leave a parameter to train", list(frozen[:-1])
            )
    if adapter is not None:
        violations = list(_adapter_violations(decoder, adapter))
        for violation in violations or _start_violations(decoder, adapter):
            yield violation.under("adapter")


def optimizer_violations(decoder: Decoder, optim: Optim) -> Iterator[Violation]:
    """Yield an optimizer's settings that do not fit a model: ``qk_clip``, and names of ``groups``
    that no trained parameter has.
    """
    if optim.qk_clip is not None:
        yield from qk_clip_violations(decoder, optim.qk_clip)
    if not optim.groups:
        return
    trained = [weight.name for weight in model_weights(decoder) if not weight.frozen]
    for number, group in enumerate(optim.groups):
        for index, pattern in enumerate(group.names):
            if any(matches(name, GROUP_NAMES.get(pattern, (pattern,))) for name in trained):
                continue
            path = ("groups", number, "names", index)
            rule = "must match a parameter of the model that is trained"
            yield Violation(path, pattern, rule, nearest_name(pattern, trained))


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
        prefix = f"layers.{number}."
        in_block = tuple(name.removeprefix(prefix) for name in names if name.startswith(prefix))
        blocks.append(block.model_copy(update={"frozen": in_block}))
    outside = tuple(name for name in names if not name.startswith("layers."))
    return decoder.model_copy(update={"stacks": to_stacks(blocks), "frozen": outside})


def without_tuning(decoder: Decoder) -> Decoder:
    """Return a decoder without adapters, frozen parameters and quantised products."""
    decoder = decoder.model_copy(update={"quantise": None}) if decoder.quantise else decoder
    if not any(part.frozen or part.adapters for part in (decoder, *decoder.blocks)):
        return decoder
    plain: dict[str, Any] = {"frozen": (), "adapters": ()}
    blocks = (block.model_copy(update=plain) for block in decoder.blocks)
    return decoder.model_copy(update={"stacks": to_stacks(blocks)} | plain)


def adapt(decoder: Decoder, lora: Lora) -> Decoder:
    """Return a decoder whose target weights have adapters, and which trains only these.

    Raises:
        ValueError: if a plug-in layer has no description, and so no names of parameters.
    """
    if lora.rank == "stored":
        return _adapt_as_stored(decoder, lora)
    decoder = freeze(decoder, ("*",))
    targets = [w for w in model_weights(decoder) if is_target(w, lora.targets)]

    def adapters(prefix: str, top_k: int | None) -> tuple[LowRank, ...]:
        built = []
        for weight in targets:
            if weight.name.startswith(prefix) and (prefix or not weight.name.startswith("layers.")):
                rank = lora.rank_of(top_k if weight.is_expert else None)
                scaling = {"scale": lora.alpha / rank, "dropout": lora.dropout}
                name = weight.name.removeprefix(prefix)
                built.append(LowRank(weight=name, rank=rank, **scaling))
        return tuple(built)

    blocks = []
    for number, block in enumerate(decoder.blocks):
        routing = block.ffn.routing if isinstance(block.ffn, LayerSpec) else None
        in_block = adapters(f"layers.{number}.", routing and routing.top_k)
        blocks.append(block.model_copy(update={"adapters": in_block}))
    changes = {"stacks": to_stacks(blocks), "adapters": adapters("", None)}
    return decoder.model_copy(update=changes)


def has_adapters(decoder: Decoder) -> bool:
    """Return whether any weight of a decoder has an adapter."""
    return any(part.adapters for part in (decoder, *decoder.blocks))


TUNING_KEYS = ("adapter", "train.freeze")
"""Keys of a run file that :func:`tune` takes."""


def tune(decoder: Decoder, overrides: Sequence[str]) -> Decoder:
    """Return a decoder with the adapter or the frozen weights of overrides of a run file.

    Raises:
        ValueError: an override has another key or a value that does not fit the model.
    """
    adapter: Lora | None = None
    frozen: tuple[str, ...] = ()
    for override in overrides:
        key, _, text = override.partition("=")
        if key not in TUNING_KEYS:
            keys = ", ".join(f"{name}=" for name in (*TUNING_KEYS, "train.loss"))
            nearest = closest(key, (*TUNING_KEYS, "train.loss"))
            hint = f"; nearest: {nearest}=" if nearest else ""
            raise ValueError(
                f"override {override} needs a run file; a model by name takes {keys}{hint}"
            )
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"override {override} is not YAML: {error}") from None
        if key == "adapter":
            checked = check(Lora, value)
            if checked.record is None:
                raise RunError(checked.violations, source=override)
            adapter = checked.record
        else:
            frozen = tuple(map(str, value if isinstance(value, list) else [value]))
    if adapter is not None and frozen:
        raise ValueError("train.freeze= is not used with adapter=, which freezes all other weights")
    if violations := list(tuning_violations(decoder, frozen, adapter)):
        raise RunError(violations, source="override")
    return apply_tuning(decoder, frozen, adapter)


def with_usual_adapter(decoder: Decoder) -> tuple[str, Decoder] | None:
    """Return the override of a run that trains an adapter of the usual rank and targets, and the
    decoder with it; None if some weights are frozen already, or the adapter does not suit it.
    """
    lora = Lora()
    tuned = any(part.frozen or part.adapters for part in (decoder, *decoder.blocks))
    if tuned or any(tuning_violations(decoder, (), lora)):
        return None
    return f"adapter={{kind: lora, rank: {lora.rank}}}", adapt(decoder, lora)


def _adapt_as_stored(decoder: Decoder, lora: Lora) -> Decoder:
    """Return a decoder with the adapters of the folder from which a run starts."""
    stored = read_adapter(Path(lora.start or ""), decoder).adapters
    decoder = freeze(decoder, ("*",))
    names = [weight.name for weight in model_weights(decoder) if weight.name in stored]

    def adapters(prefix: str) -> tuple[LowRank, ...]:
        inside = (name for name in names if name.startswith(prefix or "layers.") == bool(prefix))
        found = []
        for name in inside:
            changed = {"weight": name.removeprefix(prefix), "dropout": lora.dropout}
            found.append(stored[name].model_copy(update=changed))
        return tuple(found)

    blocks = []
    for number, block in enumerate(decoder.blocks):
        own = adapters(f"layers.{number}.")
        blocks.append(block.model_copy(update={"adapters": own}))
    changes = {"stacks": to_stacks(blocks), "adapters": adapters("")}
    return decoder.model_copy(update=changes)


def adapter_scales(decoder: Decoder) -> dict[str, float]:
    """Return the scale of ``B A`` by the global name of each weight with an adapter."""
    scales = {adapter.weight: adapter.scale for adapter in decoder.adapters}
    for number, block in enumerate(decoder.blocks):
        scales |= {f"layers.{number}.{a.weight}": a.scale for a in block.adapters}
    return scales


def is_target(weight: Weight, targets: Sequence[str]) -> bool:
    """Return whether a weight gets an adapter: a matrix of products that a target names.

    Targets are words, such as ``attention``, or patterns; gates (one output) need a pattern.
    """
    if len(weight.shape) < 2 or weight.looked_up or weight.stacked or weight.summed:
        return False
    kind = "head" if weight.name == "head.weight" else weight.category
    is_gate = weight.shape[-2] == 1
    words = {kind, "all"} if kind in LAYER_TARGETS else {kind}
    return (not is_gate and bool(words & set(targets))) or matches(weight.name, targets)


def _adapter_violations(decoder: Decoder, lora: Lora) -> Iterator[Violation]:
    """Yield targets that match no weight of a decoder, and a rank that top-k does not divide."""
    if lora.rank == "stored":
        return
    weights = [w for w in model_weights(decoder) if is_target(w, ("*",))]
    for index, target in enumerate(lora.targets):
        if not any(is_target(weight, (target,)) for weight in weights):
            words = (*LAYER_TARGETS, *OTHER_TARGETS, "all")
            matching = [w for w in words if any(is_target(weight, (w,)) for weight in weights)]
            nearest = closest(target, matching) or nearest_name(target, [w.name for w in weights])
            yield Violation(("targets", index), target, "must match an adaptable weight", nearest)
    if not lora.divided:
        return
    specs = (block.ffn for block in decoder.blocks if isinstance(block.ffn, LayerSpec))
    for top_k in dict.fromkeys(spec.routing.top_k for spec in specs if spec.routing):
        if lora.rank % top_k:
            nearest = round_up(lora.rank, top_k)
            yield Violation(("rank",), lora.rank, f"must be a multiple of top_k ({top_k})", nearest)


def _start_violations(decoder: Decoder, lora: Lora) -> Iterator[Violation]:
    """Yield differences in weights, rank or scale from an adapter that a run starts from."""
    if lora.start is None:
        return
    try:
        start = read_adapter(Path(lora.start), decoder).adapters
    except (ValueError, OSError) as error:
        yield Violation(("from",), lora.start, f"must be an adapter of this model: {error}")
        return
    if lora.rank == "stored":
        return
    adapted = adapt(decoder, lora)
    scales = adapter_scales(adapted)
    if start.keys() != scales.keys():
        weights = model_weights(decoder)
        words = (*LAYER_TARGETS, *OTHER_TARGETS)
        start_weights = [weight for weight in weights if weight.name in start]
        matching = [w for w in words if any(is_target(weight, (w,)) for weight in start_weights)]
        are_exact = {w.name for w in weights if is_target(w, matching)} == start.keys()
        nearest = matching if are_exact else list(start)
        rule = f"must name the weights that {lora.start} adapts"
        yield Violation(("targets",), list(lora.targets), rule, nearest)
        return
    ranks = {w.name: w.shape[-1] for w in model_weights(adapted) if w.name.endswith(LORA_B)}
    for name, stored in start.items():
        rank = ranks[name + LORA_B]
        if stored.rank != rank:
            rule = (
                f"gives {name} rank {rank}, but in {lora.start} it has rank {stored.rank}; "
                "stored takes ranks, scales and targets from there"
            )
            same = {adapter.rank for adapter in start.values()} == {stored.rank}
            nearest = max(1, lora.rank * stored.rank // rank) if same or lora.divided else "stored"
            yield Violation(("rank",), lora.rank, rule, nearest)
            return
        if not isclose(stored.scale, scales[name], rel_tol=1e-6):
            rule = f"alpha / rank ({rank}) must be {stored.scale:g}, as in {lora.start}"
            yield Violation(("alpha",), lora.alpha, rule, stored.scale * rank)
            return


def nearest_name(pattern: str, names: Sequence[str]) -> str:
    """Return the name, or pattern ``*.name``, that is closest to a pattern without matches."""
    candidates: dict[str, None] = {}
    for words in dict.fromkeys(tuple(name.split(".")) for name in names):
        if words[0] == "layers":
            words = "layers", "*", *words[2:]
        ends = (words[start:] for start in range(2, len(words) - 1)) if len(words) > 2 else ()
        candidates |= dict.fromkeys([".".join(words), *(".".join(("*", *end)) for end in ends)])
    return closest(pattern, candidates, 0.0) or names[0]
