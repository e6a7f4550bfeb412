"""Names, shapes and settings of low-rank adapters in PEFT's folders; no values are read here.

PEFT names an adapter by the module of ``transformers`` that it wraps. The matrices of all experts
are one parameter, and a module with two adapted parameters is wrapped twice: the first one's
adapter has ``base_layer`` in its name. For E experts and rank r, A is ``[E * r, in]`` with experts
as the slow index, and B ``[out, r * E]`` with experts as the fast one. Releases before 0.19
interpret ``[E, out, in]`` as ``[E, in, out]``: there A and B are those of the transposed matrix.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moefold.files import named, read_json
from moefold.model.config import Decoder, LowRank
from moefold.model.families.names import find, pieces
from moefold.model.families.registry import family_of
from moefold.spec.decoder import LORA_A, LORA_B, model_weights
from moefold.spec.layer import Weight

CONFIG, TENSORS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
BASE = "base_model_name_or_path"
IDENTITY = "base_identity"
"""Key, in the tensor file's metadata, of the identity of the base model."""
ORIENTED = "0.19.0"
"""First release of PEFT that interprets experts' matrices as ``[E, out, in]``."""
HEADER_LIMIT = 64 * 2**20
_AT = "base_model.model."
_INNER = ".base_layer"
_ONCE_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names of linear layers that PEFT treats as experts' wherever they occur."""
_PLAIN = {"use_dora": False, "fan_in_fan_out": False, "lora_bias": False, "bias": "none"}
"""Settings with which an adapter adds ``scale * B A`` and nothing else."""
_UNSTATED = dict.fromkeys(
    ("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication"), False
)
"""Further such settings, which are not written, as not all releases of PEFT know them."""
_BESIDE_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that leave the base as it is; others modify it."""


def is_adapter(folder: Path) -> bool:
    """Return whether a folder contains only an adapter."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def is_hub_folder(folder: Path) -> bool:
    """Return whether a folder contains a Hugging Face model, or an adapter."""
    return (folder / "config.json").is_file() or is_adapter(folder)


def base_of(folder: Path) -> Path:
    """Return the folder of an adapter's base model; for a model's folder, the folder itself.

    Raises:
        ValueError: if the base is no local folder.
    """
    if not is_adapter(folder):
        return folder
    said = read_json(folder / CONFIG, limit=HEADER_LIMIT).get(BASE)
    if isinstance(said, str) and (Path(said) / "config.json").is_file():
        return Path(said)
    raise ValueError(
        f"{folder / CONFIG}: {BASE} is {said!r}, which is not a local Hugging Face folder; set "
        "it to the base model's folder"
    )


@dataclass(frozen=True)
class AdapterSite:
    """A matrix of ``transformers``, or that of all experts, and its place in our weight."""

    weight: Weight
    index: tuple[int, ...]
    """Index of the part: gate or up of a dense feed-forward; else empty."""
    module: str
    parameter: str | None
    """Parameter of the module, as in ``target_parameters``; None for a linear layer."""
    outputs: int
    inputs: int

    @property
    def experts(self) -> int:
        """Number of experts; 1 for other weights."""
        return self.weight.shape[0] if self.weight.expert else 1

    @property
    def target(self) -> str:
        """Full name of the target in PEFT's settings."""
        return self.module if self.parameter is None else f"{self.module}.{self.parameter}"


def sites(decoder: Decoder) -> list[AdapterSite]:
    """Return the matrices of a decoder that PEFT can adapt, a module's parameters in order.

    Feed-forwards and routers are ``target_parameters``, as are linear layers with a name that
    PEFT treats as experts' (such as the attention gate of ``afmoe``).
    """
    weights = {w.name: w for w in model_weights(decoder) if not w.name.endswith((LORA_A, LORA_B))}
    weights = {n: w for n, w in weights.items() if len(w.shape) > 1 and not w.looked_up}
    # Multi-token prediction blocks, which come last, do not exist in transformers.
    further = tuple(f"layers.{n}." for n in range(decoder.layers, len(decoder.blocks)))
    weights = {n: w for n, w in weights.items() if not n.startswith(further)}
    found: list[AdapterSite] = []
    for name, (row, layer) in find(family_of(decoder).tensors, weights).items():
        weight = weights[name]
        outside = name == "head.weight" or weight.counted == "attention"
        if row.joined:  # one matrix of several weights, for which PEFT has a single A
            continue
        for piece in pieces(row, layer, weight.shape, "packed"):
            module, _, leaf = piece.name.rpartition(".")
            if piece.order:  # stored as [in, out], which names of adapters do not express
                continue
            *lead, outputs, inputs = piece.shape
            whole = weight.shape[: 1 if weight.expert else 0]
            if tuple(lead) == whole and (weight.expert or len(weight.shape) - len(piece.index) < 3):
                linear = outside and module.rpartition(".")[2] not in _ONCE_EXPERTS
                parameter = None if linear else leaf
                found.append(AdapterSite(weight, piece.index, module, parameter, outputs, inputs))
    return found


def prefixes(chosen: Iterable[AdapterSite]) -> dict[str, tuple[AdapterSite, str]]:
    """Return (site, target) by the prefix of the names of an adapter's tensors."""
    by_module: dict[str, list[AdapterSite]] = {}
    for site in chosen:
        by_module.setdefault(site.module, []).append(site)
    found = {}
    for module, held in by_module.items():
        for place, site in enumerate(reversed(held)):
            found[_AT + module + _INNER * place] = (site, site.target)
    return found


# ------------------------------------------------------------------------------------- writing


def settings(
    decoder: Decoder, adapters: Mapping[str, LowRank], base: str
) -> tuple[dict[str, Any], list[AdapterSite]]:
    """Return ``adapter_config.json`` for adapters by weight name, and the adapted sites.

    Raises:
        ValueError: naming each adapted weight that PEFT cannot adapt.
    """
    every = sites(decoder)
    known = {site.weight.name for site in every}
    if foreign := [name for name in adapters if name not in known]:
        raise ValueError(
            f"{', '.join(foreign)}: PEFT cannot adapt such a weight: in transformers it is part of "
            "a joined matrix (gate and up of some shared experts), transposed (experts of gpt_oss "
            "and llama4_text), or absent (multi-token blocks); leave it out of adapter.targets, "
            "or write the merged weights (--merged)"
        )
    chosen = [site for site in every if site.weight.name in adapters]
    sizes = {name: (one.rank, one.scale) for name, one in adapters.items()}
    counted = [sizes[site.weight.name] for site in chosen]
    rank, scale = max(sizes.values(), key=counted.count)
    said: dict[str, Any] = {"target_modules": [], "target_parameters": []}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for target, site in _targets(every, adapters).items():
        said["target_modules" if site.parameter is None else "target_parameters"].append(target)
        own = sizes[site.weight.name]
        if own != (rank, scale):
            ranks[target], alphas[target] = own[0], _alpha(*own)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "peft_version": ORIENTED,
        BASE: base,
        "r": rank,
        "lora_alpha": _alpha(rank, scale),
        "lora_dropout": 0.0,
        **said,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "use_rslora": False,
        "inference_mode": True,
        **_PLAIN,
    }, chosen


def _targets(
    every: Sequence[AdapterSite], adapters: Mapping[str, LowRank]
) -> dict[str, AdapterSite]:
    """Return targets that match exactly the adapted sites, short if all matches are adapted."""
    found: dict[str, AdapterSite] = {}
    for site in every:
        own = adapters.get(site.weight.name)
        if own is None:
            continue
        words = site.target.split(".")
        start = -1 if site.parameter is None else min(3, len(words) - 1)
        short = ".".join(words[start:])
        alike = [s for s in every if s.target.endswith("." + short) or s.target == short]
        same = {_sizes(adapters.get(s.weight.name)) for s in alike} == {_sizes(own)}
        found.setdefault(short if same else site.target, site)
    return found


def _sizes(adapter: LowRank | None) -> tuple[int, float] | None:
    return adapter and (adapter.rank, adapter.scale)


def _alpha(rank: int, scale: float) -> float:
    """Return ``scale * rank``, as an integer if it is one."""
    alpha = scale * rank
    return round(alpha) if abs(alpha - round(alpha)) < 1e-9 else alpha


# ------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Stored:
    """One adapted site in a folder: names and orientation of its tensors."""

    site: AdapterSite
    a: str
    b: str
    turned: bool
    """Whether A and B are those of the transposed matrix, and thus exchanged."""


@dataclass(frozen=True)
class PeftFolder:
    """Settings and headers of an adapter folder that PEFT or ``moefold export`` wrote."""

    path: Path
    adapters: Mapping[str, LowRank]
    """Adapters by weight name."""
    stored: Mapping[str, tuple[Stored, ...]]
    identity: str | None
    """Identity of the base model, if stored."""


def read_adapter(folder: Path, decoder: Decoder) -> PeftFolder:
    """Read settings and headers of an adapter's folder, and check all of them; no values.

    Raises:
        ValueError: listing each tensor without a place in ``decoder`` or of another size, and each
            setting under which an adapter is more than a product of two matrices.
    """
    said = read_json(folder / CONFIG, limit=HEADER_LIMIT)
    shapes, metadata = _header(folder)
    problems = [
        f"{CONFIG}: {key} is {said[key]!r}, which is not supported; train without it"
        for key, plain in (_PLAIN | _UNSTATED).items()
        if said.get(key, plain) not in (plain, None)
    ]
    if (begun := said.get("init_lora_weights")) not in _BESIDE_BASE:
        problems.append(
            f"{CONFIG}: init_lora_weights is {begun!r}, which changes the base model; save the "
            "adapter again with path_initial_model_for_weight_conversion"
        )
    if said.get("peft_type", "LORA") != "LORA":
        problems.append(f"{CONFIG}: peft_type is {said['peft_type']!r}; supported: 'LORA'")
    known = prefixes(_adapted(sites(decoder), said, shapes))
    left = set(shapes)
    found: dict[str, LowRank] = {}
    stored: dict[str, list[Stored]] = {}
    for prefix, (site, target) in known.items():
        a, b = (f"{prefix}.lora_{which}.weight" for which in "AB")
        if a not in shapes or b not in shapes:
            continue
        left -= {a, b, prefix + _INNER + ".weight"}  # PEFT may also write the frozen head
        name, (rank, alpha) = site.weight.name, _said_sizes(said, target)
        scale = alpha / (rank**0.5 if said.get("use_rslora") else rank)
        plain, ranks = (site.inputs, site.outputs), site.experts * rank
        turned = site.experts > 1 and _turned((*shapes[a][1:], *shapes[b][:1]), plain, said)
        into, out = plain[::-1] if turned else plain
        if (shapes[a], shapes[b]) != ((ranks, into), (out, ranks)):
            wanted = (ranks, plain[0]), (plain[1], ranks)
            problems.append(f"{a} and B have shapes {(shapes[a], shapes[b])}, expected {wanted}")
        own = LowRank(weight=name, rank=rank, scale=scale)
        if found.setdefault(name, own) != own:
            problems.append(f"{prefix}: rank and scale must equal those of the gate")
        stored.setdefault(name, []).append(Stored(site, a, b, turned))
    problems += [f"{name}: matches no weight of the base model" for name in sorted(left)]
    problems += [
        f"{held[0].a}: gate and up must both have an adapter, but one of them has none"
        for held in stored.values()
        if held[0].site.index and len(held) < 2
    ]
    if problems or not found:
        raise ValueError("\n  ".join([f"{folder}:", *(problems or ["has no adapter tensors"])]))
    return PeftFolder(
        folder, found, {n: tuple(held) for n, held in stored.items()}, metadata.get(IDENTITY)
    )


def _adapted(
    every: Sequence[AdapterSite], said: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]
) -> Iterator[AdapterSite]:
    """Yield sites that may have tensors; of a module's two parameters those in the settings."""
    targets = [t for t in said.get("target_parameters") or () if isinstance(t, str)]
    for site in every:
        twice = f"{_AT}{site.module}{_INNER}.lora_A.weight" in shapes
        told = any(f".{site.target}".endswith(f".{target}") for target in targets)
        if site.experts == 1 or twice or told or not targets:
            yield site


def _turned(sizes: tuple[int, ...], plain: tuple[int, int], said: Mapping[str, Any]) -> bool:
    """Return whether experts' A and B are of the transposed matrix, by sizes or else by release."""
    if plain[0] != plain[1]:
        return sizes == plain[::-1]
    release = str(said.get("peft_version") or "0.18").split(".")[:2]
    return all(n.isdigit() for n in release) and [*map(int, release)] < [0, 19]


def _said_sizes(said: Mapping[str, Any], target: str) -> tuple[int, float]:
    """Return rank and alpha of a target: those of the first matching pattern, or the defaults.

    Raises:
        ValueError: if they are missing or malformed.
    """

    def of(usual: str, patterns: str) -> Any:
        own = said.get(patterns) or {}
        found = (value for key, value in own.items() if re.match(rf"(.*\.)?({key})$", target))
        return next(found, said.get(usual))

    try:
        rank, alpha = of("r", "rank_pattern"), of("lora_alpha", "alpha_pattern")
    except re.error as error:
        raise ValueError(f"{CONFIG}: {error.pattern!r} is not a valid regular expression") from None
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise ValueError(f"{CONFIG}: r {rank!r} and lora_alpha {alpha!r} must be positive numbers")
    return rank, alpha


def _header(folder: Path) -> tuple[dict[str, tuple[int, ...]], Mapping[str, str]]:
    """Return the shapes of an adapter's tensors, and the file's metadata.

    Raises:
        ValueError: if the file is pickled, or its header is malformed.
    """
    file = folder / TENSORS
    if not file.is_file() and (folder / PICKLED).is_file():
        raise ValueError(f"{folder / PICKLED} is a pickle, which is not read; save it as {TENSORS}")
    with named(file), file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        raw = opened.read(size) if size <= HEADER_LIMIT else b""
    try:
        found = json.loads(raw)
        metadata = found.pop("__metadata__", {})
        return {name: tuple(each["shape"]) for name, each in found.items()}, metadata
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(f"{file} is not a complete safetensors file; copy it again") from None
