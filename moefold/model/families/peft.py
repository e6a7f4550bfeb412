"""Names, shapes and settings of low-rank adapters in PEFT's folders; no values are read here.

PEFT names an adapter by the module of ``transformers`` that it wraps. The matrices of all experts
are one parameter, and a module with two adapted parameters is wrapped twice: the first one's
adapter has ``base_layer`` in its name. For E experts and rank r, A is ``[E * r, in]`` with experts
as the slow index, and B ``[out, r * E]`` with experts as the fast one. Releases before 0.19
interpret ``[E, out, in]`` as ``[E, in, out]``, so A and B belong to the transposed matrix.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moefold.files import path_in_errors, read_json
from moefold.model.config import Decoder, LowRank
from moefold.model.families.names import find_mappings, pieces
from moefold.model.families.registry import family_of
from moefold.spec.decoder import LORA_A, LORA_B, model_weights
from moefold.spec.layer import Weight

CONFIG, TENSORS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
BASE = "base_model_name_or_path"
IDENTITY = "base_identity"
"""Key, in the tensor file's metadata, of the identity of the base model."""
ORIENTED_RELEASE = "0.19.0"
"""First release of PEFT that interprets experts' matrices as ``[E, out, in]``."""
HEADER_LIMIT = 64 * 2**20
_MODEL_WEIGHTS = re.compile(
    r"(model|pytorch_model|consolidated)[^/]*\.(safetensors|bin|pt|pth)(\.index\.json)?"
)
"""Names of files with a model's weights; a trainer leaves others, such as ``optimizer.pt``."""
_PREFIX = "base_model.model."
_BASE_LAYER = ".base_layer"
_EXPERT_MODULES = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names of linear layers that PEFT treats as experts', wherever they occur."""
_PLAIN = {"use_dora": False, "fan_in_fan_out": False, "lora_bias": False, "bias": "none"}
"""Settings with which an adapter adds ``scale * B A`` and nothing else."""
_UNWRITTEN = dict.fromkeys(
    ("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication"), False
)
"""Further such settings; not written, as some releases of PEFT do not know them."""
_BASE_PRESERVING_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that keep the base model's weights; others modify them."""


def is_adapter(folder: Path) -> bool:
    """Return whether a folder contains an adapter and no weights of a model.

    Converters and trainers copy the base model's ``config.json`` into adapters' folders, so that
    this file alone makes no folder a model's.
    """
    if not (folder / CONFIG).exists():
        return False
    return not (folder / "config.json").exists() or not _has_model_weights(folder)


def _has_model_weights(folder: Path) -> bool:
    """Return whether a folder has a file named as a model's weights are."""
    return any(_MODEL_WEIGHTS.fullmatch(path.name) for path in folder.iterdir())


def is_hub_folder(folder: Path) -> bool:
    """Return whether a folder contains a Hugging Face model, or an adapter."""
    return (folder / "config.json").exists() or is_adapter(folder)


def leftover_notes(folder: Path) -> list[str]:
    """Return a note if a model's folder also contains an adapter, which is not read.

    ``transformers`` applies such an adapter whenever it loads the folder.
    """
    found = [name for name in (CONFIG, TENSORS, PICKLED) if (folder / name).exists()]
    if CONFIG not in found or is_adapter(folder):
        return []
    return [
        f"{' and '.join(found)} beside the model's weights are not read, though transformers "
        "applies this adapter when it loads the folder; move them to a folder of their own, and "
        "name that folder to read the model with the adapter"
    ]


def base_folder(folder: Path) -> Path:
    """Return the folder of an adapter's base model; for a model's folder, the folder itself.

    Raises:
        ValueError: if the base is not a local folder.
    """
    if not is_adapter(folder):
        return folder
    base = read_json(folder / CONFIG, limit=HEADER_LIMIT).get(BASE)
    if isinstance(base, str) and (Path(base) / "config.json").is_file():
        return Path(base)
    raise ValueError(
        f"{folder / CONFIG}: {BASE} is {base!r}, which is not a local Hugging Face folder; set "
        "it to the base model's folder"
    )


@dataclass(frozen=True)
class AdapterSite:
    """A matrix of ``transformers``, or that of all experts, and its index in the model's weight."""

    weight: Weight
    index: tuple[int, ...]
    """Index of gate or up in a dense feed-forward's weight; otherwise empty."""
    module: str
    parameter: str | None
    """Parameter of the module, as in ``target_parameters``; None for a linear layer."""
    outputs: int
    inputs: int

    @property
    def experts(self) -> int:
        """Number of experts; 1 for other weights."""
        return self.weight.shape[0] if self.weight.is_expert else 1

    @property
    def target(self) -> str:
        """Full name of the target in PEFT's settings."""
        return self.module if self.parameter is None else f"{self.module}.{self.parameter}"


def adapter_sites(decoder: Decoder) -> list[AdapterSite]:
    """Return the matrices of a decoder that PEFT can adapt, a module's parameters in order.

    Feed-forwards and routers are ``target_parameters``, as are linear layers with a name that PEFT
    treats as experts', such as the attention gate of ``afmoe``.
    """
    weights = {w.name: w for w in model_weights(decoder) if not w.name.endswith((LORA_A, LORA_B))}
    weights = {n: w for n, w in weights.items() if len(w.shape) > 1 and not w.looked_up}
    # Multi-token prediction blocks, which come last, do not exist in transformers.
    multi_token = tuple(f"layers.{n}." for n in range(decoder.layers, len(decoder.blocks)))
    weights = {n: w for n, w in weights.items() if not n.startswith(multi_token)}
    found: list[AdapterSite] = []
    for name, (mapping, layer) in find_mappings(family_of(decoder).tensors, weights).items():
        weight = weights[name]
        is_linear = name == "head.weight" or weight.category == "attention"
        if mapping.joined:  # one matrix of several weights, for which PEFT has a single A
            continue
        for piece in pieces(mapping, layer, weight.shape, "packed"):
            module, _, leaf = piece.name.rpartition(".")
            if piece.perm:  # stored as [in, out], which names of adapters do not express
                continue
            *lead, outputs, inputs = piece.shape
            experts = weight.shape[: 1 if weight.is_expert else 0]
            if tuple(lead) == experts and (
                weight.is_expert or len(weight.shape) - len(piece.index) < 3
            ):
                linear = is_linear and module.rpartition(".")[2] not in _EXPERT_MODULES
                parameter = None if linear else leaf
                found.append(AdapterSite(weight, piece.index, module, parameter, outputs, inputs))
    return found


def sites_by_prefix(sites: Iterable[AdapterSite]) -> dict[str, tuple[AdapterSite, str]]:
    """Return (site, target) by the prefix of the names of an adapter's tensors."""
    by_module: dict[str, list[AdapterSite]] = {}
    for site in sites:
        by_module.setdefault(site.module, []).append(site)
    found = {}
    for module, wrapped in by_module.items():
        for depth, site in enumerate(reversed(wrapped)):
            found[_PREFIX + module + _BASE_LAYER * depth] = (site, site.target)
    return found


# ------------------------------------------------------------------------------------- writing


def peft_config(
    decoder: Decoder, adapters: Mapping[str, LowRank], base: str
) -> tuple[dict[str, Any], list[AdapterSite]]:
    """Return ``adapter_config.json`` for adapters by weight name, and the adapted sites.

    Raises:
        ValueError: naming each adapted weight that PEFT cannot adapt.
    """
    sites = adapter_sites(decoder)
    known = {site.weight.name for site in sites}
    if unknown := [name for name in adapters if name not in known]:
        raise ValueError(
            f"{', '.join(unknown)}: PEFT cannot adapt such a weight: in transformers it is part of "
            "a joined matrix (gate and up of some shared experts), transposed (experts of gpt_oss "
            "and llama4_text), or absent (multi-token blocks); leave it out of adapter.targets, "
            "or write the merged weights (--merged)"
        )
    adapted = [site for site in sites if site.weight.name in adapters]
    sizes = {name: (adapter.rank, adapter.scale) for name, adapter in adapters.items()}
    used = [sizes[site.weight.name] for site in adapted]
    rank, scale = max(sizes.values(), key=used.count)
    targets: dict[str, Any] = {"target_modules": [], "target_parameters": []}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for target, site in _targets(sites, adapters).items():
        targets["target_modules" if site.parameter is None else "target_parameters"].append(target)
        size = sizes[site.weight.name]
        if size != (rank, scale):
            ranks[target], alphas[target] = size[0], _alpha(*size)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "peft_version": ORIENTED_RELEASE,
        BASE: base,
        "r": rank,
        "lora_alpha": _alpha(rank, scale),
        "lora_dropout": 0.0,
        **targets,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "use_rslora": False,
        "inference_mode": True,
        **_PLAIN,
    }, adapted


def _targets(
    sites: Sequence[AdapterSite], adapters: Mapping[str, LowRank]
) -> dict[str, AdapterSite]:
    """Return targets that match exactly the adapted sites; suffixes if all matches are adapted."""
    targets: dict[str, AdapterSite] = {}
    for site in sites:
        adapter = adapters.get(site.weight.name)
        if adapter is None:
            continue
        parts = site.target.split(".")
        start = -1 if site.parameter is None else min(3, len(parts) - 1)
        suffix = ".".join(parts[start:])
        matches = [s for s in sites if s.target.endswith("." + suffix) or s.target == suffix]
        same = {_sizes(adapters.get(s.weight.name)) for s in matches} == {_sizes(adapter)}
        targets.setdefault(suffix if same else site.target, site)
    return targets


def _sizes(adapter: LowRank | None) -> tuple[int, float] | None:
    return adapter and (adapter.rank, adapter.scale)


def _alpha(rank: int, scale: float) -> float:
    """Return ``scale * rank``, as an integer if it is one."""
    alpha = scale * rank
    return round(alpha) if abs(alpha - round(alpha)) < 1e-9 else alpha


# ------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class StoredAdapter:
    """An adapted site in a folder: names and orientation of its tensors."""

    site: AdapterSite
    a: str
    b: str
    transposed: bool
    """Whether A and B belong to the transposed matrix, and are thus exchanged."""


@dataclass(frozen=True)
class PeftFolder:
    """Settings and headers of an adapter folder that PEFT or ``moefold export`` wrote."""

    path: Path
    adapters: Mapping[str, LowRank]
    """Adapters by weight name."""
    stored: Mapping[str, tuple[StoredAdapter, ...]]
    identity: str | None
    """Identity of the base model, if stored."""


def read_adapter(folder: Path, decoder: Decoder) -> PeftFolder:
    """Read and check settings and headers of an adapter's folder, but no values.

    Raises:
        ValueError: listing each tensor that matches no weight of ``decoder`` or has another size,
            and each setting with which an adapter is more than a product of two matrices.
    """
    config = read_json(folder / CONFIG, limit=HEADER_LIMIT)
    shapes, metadata = _read_header(folder)
    problems = [
        f"{CONFIG}: {key} is {config[key]!r}, which is not supported; train without it"
        for key, plain in (_PLAIN | _UNWRITTEN).items()
        if config.get(key, plain) not in (plain, None)
    ]
    if (init := config.get("init_lora_weights")) not in _BASE_PRESERVING_INITS:
        problems.append(
            f"{CONFIG}: init_lora_weights is {init!r}, which changes the base model; save the "
            "adapter again with path_initial_model_for_weight_conversion"
        )
    if config.get("peft_type", "LORA") != "LORA":
        problems.append(f"{CONFIG}: peft_type is {config['peft_type']!r}; supported: 'LORA'")
    known = sites_by_prefix(_candidate_sites(adapter_sites(decoder), config, shapes))
    unmatched = set(shapes)
    adapters: dict[str, LowRank] = {}
    stored: dict[str, list[StoredAdapter]] = {}
    for prefix, (site, target) in known.items():
        a, b = (f"{prefix}.lora_{which}.weight" for which in "AB")
        if a not in shapes or b not in shapes:
            continue
        unmatched -= {a, b, prefix + _BASE_LAYER + ".weight"}  # PEFT may write the frozen head too
        name, (rank, alpha) = site.weight.name, _rank_and_alpha(config, target)
        scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        plain, ranks = (site.inputs, site.outputs), site.experts * rank
        sizes = (*shapes[a][1:], *shapes[b][:1])
        transposed = site.experts > 1 and _is_transposed(sizes, plain, config)
        into, out = plain[::-1] if transposed else plain
        if (shapes[a], shapes[b]) != ((ranks, into), (out, ranks)):
            expected = (ranks, plain[0]), (plain[1], ranks)
            problems.append(f"{a} and B have shapes {(shapes[a], shapes[b])}, expected {expected}")
        adapter = LowRank(weight=name, rank=rank, scale=scale)
        if adapters.setdefault(name, adapter) != adapter:
            problems.append(f"{prefix}: rank and scale must equal those of the gate")
        stored.setdefault(name, []).append(StoredAdapter(site, a, b, transposed))
    problems += [f"{name}: matches no weight of the base model" for name in sorted(unmatched)]
    problems += [
        f"{parts[0].a}: gate and up must both have an adapter, but one of them has none"
        for parts in stored.values()
        if parts[0].site.index and len(parts) < 2
    ]
    if problems or not adapters:
        raise ValueError("\n  ".join([f"{folder}:", *(problems or ["has no adapter tensors"])]))
    stored_by_name = {name: tuple(parts) for name, parts in stored.items()}
    return PeftFolder(folder, adapters, stored_by_name, metadata.get(IDENTITY))


def _candidate_sites(
    sites: Sequence[AdapterSite], config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]
) -> Iterator[AdapterSite]:
    """Yield sites that may have tensors; of a module's two parameters those in the settings."""
    targets = [t for t in config.get("target_parameters") or () if isinstance(t, str)]
    for site in sites:
        twice = f"{_PREFIX}{site.module}{_BASE_LAYER}.lora_A.weight" in shapes
        listed = any(f".{site.target}".endswith(f".{target}") for target in targets)
        if site.experts == 1 or twice or listed or not targets:
            yield site


def _is_transposed(
    sizes: tuple[int, ...], plain: tuple[int, int], config: Mapping[str, Any]
) -> bool:
    """Return whether experts' A and B are transposed, by their sizes or else by the release."""
    if plain[0] != plain[1]:
        return sizes == plain[::-1]
    release = str(config.get("peft_version") or "0.18").split(".")[:2]
    return all(n.isdigit() for n in release) and [*map(int, release)] < [0, 19]


def _rank_and_alpha(config: Mapping[str, Any], target: str) -> tuple[int, float]:
    """Return rank and alpha of a target, from the first matching pattern or the defaults.

    Raises:
        ValueError: if they are missing or malformed.
    """

    def value(key: str, patterns: str) -> Any:
        by_pattern = (config.get(patterns) or {}).items()
        matches = (
            value for pattern, value in by_pattern if re.match(rf"(.*\.)?({pattern})$", target)
        )
        return next(matches, config.get(key))

    try:
        rank, alpha = value("r", "rank_pattern"), value("lora_alpha", "alpha_pattern")
    except re.error as error:
        raise ValueError(f"{CONFIG}: {error.pattern!r} is not a valid regular expression") from None
    numbers = type(rank) is int and type(alpha) in (int, float)
    if not numbers or rank < 1 or not 0 < alpha < math.inf:
        raise ValueError(f"{CONFIG}: r {rank!r} and lora_alpha {alpha!r} must be positive numbers")
    return rank, alpha


def _read_header(folder: Path) -> tuple[dict[str, tuple[int, ...]], Mapping[str, str]]:
    """Return the shapes of an adapter's tensors, and the file's metadata.

    Raises:
        ValueError: if the file is pickled, or its header is malformed.
    """
    file = folder / TENSORS
    if not file.is_file() and (folder / PICKLED).is_file():
        raise ValueError(f"{folder / PICKLED} is a pickle, which is not read; save it as {TENSORS}")
    with path_in_errors(file), file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        raw = stream.read(size) if size <= HEADER_LIMIT else b""
    try:
        header = json.loads(raw)
        metadata = header.pop("__metadata__", {})
        return {name: tuple(entry["shape"]) for name, entry in header.items()}, metadata
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(f"{file} is not a complete safetensors file; copy it again") from None
