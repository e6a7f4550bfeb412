"""Reads settings and headers of adapters in PEFT's folders; no values are read here.

An adapter of a weight may be stored whole, or in parts: gate and up of a dense feed-forward, each
with an A of its own, or linear layers of single experts, as in releases of ``transformers`` before
5. Gate and up of an expert share A in the model, so that A of parts is stacked along the rank, and
B is zero where a part has no columns: the product is the same, with the sum of both ranks.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from moefold.files import path_in_errors, read_json, require_regular
from moefold.model.config import Decoder, LowRank
from moefold.model.families.peft import (
    BASE_LAYER,
    CONFIG,
    HEADER_LIMIT,
    IDENTITY,
    PICKLED,
    PLAIN,
    PREFIX,
    TENSORS,
    AdapterSite,
    a_is_first,
    readable_sites,
    sites_by_prefix,
)
from moefold.model.families.registry import family_of

_WITHOUT = ("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication")
_WITHOUT += ("monteclora_config", "trainable_token_indices", "use_bdlora", "use_qalora")
"""Further settings with which an adapter is more than ``scale * B A``, unless they are empty."""
_BASE_PRESERVING_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "lora_ga")
"""Values of ``init_lora_weights`` that keep the base model's weights; others modify them."""
_READ = """
alpha_pattern base_model_name_or_path init_lora_weights lora_alpha peft_type peft_version r
rank_pattern target_modules target_parameters use_rslora
"""
_NO_EFFECT = """
auto_mapping corda_config ensure_weight_tying eva_config exclude_modules inference_mode
layers_pattern layers_to_transform loftq_config lora_dropout lora_ga_config megatron_config
megatron_core modules_to_save qalora_group_size revision runtime_config task_type velora_config
"""
"""Fields that decide how an adapter is trained or where it lies, which its tensors say."""
MERGE = (
    'python -c "from peft import AutoPeftModelForCausalLM as P; '
    "P.from_pretrained('ADAPTER').merge_and_unload().save_pretrained('MERGED')\""
)
"""Command that merges an adapter of any kind into a folder that is read."""


@dataclass(frozen=True)
class StoredAdapter:
    """An adapted matrix in a folder: the names of its tensors, and its place in the weight's."""

    site: AdapterSite
    a: str
    b: str
    rank: int
    scale: float
    exchanged: bool = False
    """Whether A and B belong to the transposed matrix, and are thus exchanged."""
    start: int = 0
    """The first of its rows among those of the weight's A."""


@dataclass(frozen=True)
class PeftFolder:
    """Settings and headers of an adapter folder that PEFT or ``moefold export`` wrote."""

    path: Path
    adapters: Mapping[str, LowRank]
    """Adapters by weight name."""
    stored: Mapping[str, tuple[StoredAdapter, ...]]
    """The parts of each weight's adapter."""
    identity: str | None
    """Identity of the base model, if stored."""
    notes: tuple[str, ...] = ()
    """Notes on what of the folder is not read."""


def read_adapter(folder: Path, decoder: Decoder) -> PeftFolder:
    """Read and check settings and headers of an adapter's folder, but no values.

    Raises:
        ValueError: listing each tensor that matches no weight of ``decoder`` or has another size,
            and each setting with which an adapter is more than a product of two matrices.
    """
    config = read_json(folder / CONFIG, limit=HEADER_LIMIT)
    shapes, metadata = _read_header(folder)
    problems = list(_setting_problems(config))
    pairs, strange = _pairs(shapes)
    sites = _sites_of(pairs, decoder, config)
    problems += _strange_problems(strange, config)
    problems += [
        f"{prefix}.lora_A.weight: matches no weight of the base model whose adapter is read"
        for prefix in pairs
        if prefix not in sites
    ]
    found: list[StoredAdapter] = []
    first = _orientation(sites, shapes, config, family_of(decoder).model_type)
    for prefix, same in sites.items():
        a, b = (f"{prefix}.lora_{which}.weight" for which in "AB")
        try:
            rank, scale = _rank_and_scale(config, same[0], shapes[a])
        except ValueError as error:
            problems.append(str(error))
            continue
        exchanged = same[0].experts > 1 and first == (not same[0].perm)
        parts = [StoredAdapter(site, a, b, rank, scale, exchanged) for site in same]
        found += parts
        problems += _shape_problems(parts[0], shapes)
    adapters, stored = _combine(found)
    if problems or not adapters:
        problems = list(dict.fromkeys(problems))
        raise ValueError("\n  ".join([f"{folder}:", *(problems or ["has no adapter tensors"])]))
    return PeftFolder(
        folder, adapters, stored, metadata.get(IDENTITY), tuple(_notes(folder, config))
    )


def _setting_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings with which an adapter is more than a product of two matrices."""
    for key, plain in (PLAIN | dict.fromkeys(_WITHOUT, False)).items():
        value = config.get(key, plain)
        if value not in (plain, None) and (value or plain):
            yield f"{CONFIG}: {key} is {value!r}, which is not supported; merge it with: {MERGE}"
    if (init := config.get("init_lora_weights")) not in _BASE_PRESERVING_INITS:
        yield (
            f"{CONFIG}: init_lora_weights is {init!r}, which changes the base model; save the "
            "adapter again with path_initial_model_for_weight_conversion"
        )
    if config.get("peft_type", "LORA") != "LORA":
        yield (
            f"{CONFIG}: peft_type is {config['peft_type']!r}; supported: 'LORA'; merge others "
            f"with: {MERGE}"
        )
    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(key) or {}, dict):
            yield f"{CONFIG}: {key} is {config[key]!r}; must be an object of numbers by name"


def _notes(folder: Path, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on fields and files of an adapter's folder that are not read."""
    known = {*_READ.split(), *_NO_EFFECT.split(), *PLAIN, *_WITHOUT}
    if unknown := sorted(config.keys() - known):
        yield f"{folder}: fields of {CONFIG} that are not read: {', '.join(unknown)}"
    if (folder / PICKLED).exists():
        yield f"{folder}: {PICKLED} is not read beside {TENSORS}"


def _pairs(shapes: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the prefixes of pairs of A and B, and the names that belong to none."""
    names = set(shapes)
    prefixes = [name.removesuffix(".lora_A.weight") for name in sorted(names)]
    pairs = [prefix for prefix in prefixes if {f"{prefix}.lora_{x}.weight" for x in "AB"} <= names]
    used = {f"{prefix}.lora_{which}.weight" for prefix in pairs for which in "AB"}
    # PEFT may write the frozen head too.
    used |= {f"{prefix}{BASE_LAYER}.weight" for prefix in pairs}
    return pairs, sorted(names - used)


def _strange_problems(names: Sequence[str], config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the tensors are that are no A or B of a pair."""
    for name in names:
        if ".lora_embedding_" in name:
            yield f"{name}: adapters of an embedding are not read; merge with: {MERGE}"
        elif ".lora_magnitude_vector" in name:
            yield f"{name}: magnitudes of DoRA are not read; merge with: {MERGE}"
        elif re.search(r"\.lora_[AB]\.weight$", name):
            yield f"{name} is without its {'B' if '.lora_A.' in name else 'A'}; copy the file again"
        elif re.search(r"\.lora_[AB]\.[^.]+\.weight$", name):
            yield (
                f"{name} has the adapter's name in it, as in a state dict; write the folder with "
                "save_pretrained of PEFT"
            )
        elif name.startswith(PREFIX) and name.endswith((".weight", ".bias")):
            saved = config.get("modules_to_save")
            yield (
                f"{name}: matches no weight of the base model as an adapter, but is a whole weight "
                f"(modules_to_save is {saved!r}), which is not read; merge with: {MERGE}"
            )
        else:
            yield f"{name}: matches no weight of the base model"


# ------------------------------------------------------------------------------------- sites


def _sites_of(
    prefixes: Sequence[str], decoder: Decoder, config: Mapping[str, Any]
) -> dict[str, list[AdapterSite]]:
    """Return the sites of the pairs that match a matrix of the decoder."""
    named = set(prefixes)
    packed = _candidate_sites(readable_sites(decoder), config, named)
    known = sites_by_prefix(packed)
    if named - known.keys():  # linear layers of experts, and names of earlier releases
        known = sites_by_prefix(readable_sites(decoder, "per_expert")) | known
    return {prefix: known[prefix] for prefix in prefixes if prefix in known}


def _candidate_sites(
    sites: Sequence[AdapterSite], config: Mapping[str, Any], prefixes: set[str]
) -> Iterator[AdapterSite]:
    """Yield sites that may have tensors; of a module's two parameters those in the settings."""
    for site in sites:
        twice = f"{PREFIX}{site.module}{BASE_LAYER}" in prefixes
        targets = _target_parameters(config)
        if site.experts == 1 or twice or not targets or _is_listed(site.target, targets):
            yield site


def _target_parameters(config: Mapping[str, Any]) -> list[str]:
    return [t for t in config.get("target_parameters") or () if isinstance(t, str)]


def _is_listed(target: str, targets: Iterable[str]) -> bool:
    return any(f".{target}".endswith(f".{one}") for one in targets)


def _orientation(
    sites: Mapping[str, Sequence[AdapterSite]],
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any],
    family: str,
) -> bool:
    """Return whether A multiplies the first dim of experts' matrices as stored.

    The sizes of a matrix that is not square say it for all, otherwise the release.
    """
    for prefix, (site, *_) in sites.items():
        shape = shapes[f"{prefix}.lora_A.weight"]
        if site.experts > 1 and site.inputs != site.outputs and len(shape) == 2:
            first = (site.inputs if site.perm else site.outputs) == shape[1]
            last = (site.outputs if site.perm else site.inputs) == shape[1]
            if first or last:
                return first
    return a_is_first(config.get("peft_version"), family)


def _shape_problems(part: StoredAdapter, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield a problem unless A and B have the sizes of their matrix and rank."""
    site = part.site
    sizes = (site.outputs, site.inputs) if part.exchanged else (site.inputs, site.outputs)
    ranks = site.experts * part.rank
    expected = (ranks, sizes[0]), (sizes[1], ranks)
    found = shapes[part.a], shapes[part.b]
    if found != expected:
        yield (
            f"{part.a} and B have shapes {found}, expected {expected} with rank {part.rank} in "
            f"{CONFIG}; use the base model that it was trained on"
        )


def _rank_and_scale(
    config: Mapping[str, Any], site: AdapterSite, shape: tuple[int, ...]
) -> tuple[int, float]:
    """Return rank and scale of a site's adapter, from the first matching patterns or the defaults.

    A feed-forward's matrix may have been adapted as a parameter or as a linear layer, by whose
    names patterns differ: the settings, or else the rank of A, say which.

    Raises:
        ValueError: if they are missing or malformed.
    """
    listed = _is_listed(site.target, _target_parameters(config))
    targets = [site.target] if listed else [site.module, site.target]
    choices = [(_value(config, "r", "rank_pattern", target), target) for target in targets]
    rank, target = next((c for c in choices if (site.experts * c[0],) == shape[:1]), choices[0])
    alpha = _value(config, "lora_alpha", "alpha_pattern", target)
    return rank, alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _value(config: Mapping[str, Any], key: str, patterns: str, target: str) -> Any:
    """Return a setting of a target: a positive number, for ranks a whole one."""
    by_pattern = config.get(patterns)
    items = by_pattern.items() if isinstance(by_pattern, dict) else ()
    try:
        matches = (value for name, value in items if re.match(rf"(.*\.)?({name})$", target))
        value = next(matches, config.get(key))
    except re.error as error:
        raise ValueError(f"{CONFIG}: {error.pattern!r} is not a valid regular expression") from None
    kinds = (int,) if key == "r" else (int, float)
    if value is None or type(value) not in kinds or not 0 < value < math.inf:
        raise ValueError(f"{CONFIG}: {key} {value!r} must be positive, for {target}")
    return value


# ------------------------------------------------------------------------------------- parts


def _combine(
    found: Sequence[StoredAdapter],
) -> tuple[dict[str, LowRank], dict[str, tuple[StoredAdapter, ...]]]:
    """Return the adapter of each weight, and its parts with their places."""
    by_weight: dict[str, list[StoredAdapter]] = {}
    for part in found:
        by_weight.setdefault(part.site.weight.name, []).append(part)
    adapters: dict[str, LowRank] = {}
    stored: dict[str, tuple[StoredAdapter, ...]] = {}
    for name, parts in by_weight.items():
        placed, rank = _stack(parts)
        scales = [part.scale for part in parts]
        scale = max(dict.fromkeys(scales), key=scales.count)
        adapters[name] = LowRank(weight=name, rank=rank, scale=scale)
        stored[name] = tuple(placed)
    return adapters, stored


def _stack(parts: Sequence[StoredAdapter]) -> tuple[list[StoredAdapter], int]:
    """Return a weight's parts with the rows of A that each has, and their number.

    Parts of different experts, and gate and up of a dense feed-forward, have their own A; gate and
    up of an expert share one.
    """
    by_place: dict[int, list[StoredAdapter]] = {}
    for part in parts:
        shares = part.site.weight.is_expert and len(part.site.index) == 2
        by_place.setdefault(part.site.index[1] if shares else 0, []).append(part)
    placed: list[list[StoredAdapter]] = []
    start = 0
    for _, same in sorted(by_place.items()):
        placed.append([replace(part, start=start) for part in same])
        start += max(part.rank for part in same)
    return list(chain.from_iterable(placed)), start


def _read_header(folder: Path) -> tuple[dict[str, tuple[int, ...]], Mapping[str, str]]:
    """Return the shapes of an adapter's tensors, and the file's metadata.

    Raises:
        ValueError: if the file is missing, pickled, cut off, or its header is malformed.
    """
    file = folder / TENSORS
    if not file.exists():
        if (folder / PICKLED).exists():
            raise ValueError(
                f"{folder / PICKLED} is a pickle, which is not read; save it as {TENSORS}"
            )
        raise ValueError(f"{folder} has {CONFIG} but no {TENSORS}; copy that file too")
    require_regular(file)
    with path_in_errors(file), file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        raw = stream.read(size) if size <= HEADER_LIMIT else b""
    try:
        header = json.loads(raw)
        metadata = header.pop("__metadata__", {})
        ends = [entry["data_offsets"][1] for entry in header.values()]
        complete = file.stat().st_size == 8 + size + max(ends, default=0)
        shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
        complete = False
        shapes = {}
        metadata = {}
    if not complete or not isinstance(metadata, dict):
        raise ValueError(f"{file} is not a complete safetensors file; copy it again")
    return shapes, metadata
