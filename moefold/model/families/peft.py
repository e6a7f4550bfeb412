"""Names and settings of low-rank adapters in PEFT's folders; no values are read here.

PEFT names an adapter by the module of ``transformers`` that it wraps. The matrices of all experts
are one parameter, and a module with two adapted parameters is wrapped twice: the first one's
adapter has ``base_layer`` in its name. For E experts and rank r, one of A and B is ``[E * r, n]``
with experts as the slow index, the other ``[m, r * E]`` with experts as the fast one.

Which dim of ``[E, d1, d2]`` A multiplies depends on the release: d1 before 0.19.1, d2 since, and
the other way round (from 0.19.0) where the module of ``transformers`` states ``is_transposed``.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moefold.files import read_json
from moefold.model.config import Decoder, LowRank
from moefold.model.families.names import (
    JoinedRows,
    Layout,
    TensorPiece,
    find_mappings,
    pieces,
    resolve_rows,
)
from moefold.model.families.registry import family_of
from moefold.spec.decoder import LORA_A, LORA_B, model_weights
from moefold.spec.layer import Weight

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
BASE = "base_model_name_or_path"
IDENTITY = "base_identity"
"""Key, in the tensor file's metadata, of the identity of the base model."""
ORIENTED_RELEASE = "0.19.1"
"""Release in whose form adapters are written: the first whose A multiplies the last dim."""
MARKED_TRANSPOSED = ("gpt_oss",)
"""Families whose experts' module states ``is_transposed``; in llama4_text it does not."""
HEADER_LIMIT = 64 * 2**20
_MODEL_WEIGHTS = re.compile(
    r"(model|pytorch_model|consolidated)[^/]*\.(safetensors|bin|pt|pth)(\.index\.json)?"
)
"""Names of files with a model's weights; a trainer leaves others, such as ``optimizer.pt``."""
PREFIX = "base_model.model."
BASE_LAYER = ".base_layer"
_EXPERT_MODULES = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names of linear layers that PEFT treats as experts', wherever they occur."""
PLAIN = {"use_dora": False, "fan_in_fan_out": False, "lora_bias": False, "bias": "none"}
"""Settings with which an adapter adds ``scale * B A`` and nothing else."""


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
    """Index, in the model's weight, of an expert and of gate or up; empty for a whole weight."""
    module: str
    parameter: str | None
    """Parameter of the module, as in ``target_parameters``; None for a linear layer."""
    outputs: int
    inputs: int
    perm: tuple[int, ...] = ()
    """Permutation of the weight's dims on disk, if experts are stored as ``[E, in, out]``."""
    rows: JoinedRows | None = None
    """Rows of the weight in a linear layer that several weights share."""

    @property
    def experts(self) -> int:
        """Number of experts; 1 for other weights, and for one expert's linear layer."""
        return self.weight.shape[0] if self.weight.is_expert and not self.index else 1

    @property
    def target(self) -> str:
        """Full name of the target in PEFT's settings."""
        return self.module if self.parameter is None else f"{self.module}.{self.parameter}"

    @property
    def is_shared(self) -> bool:
        """Whether one A serves several weights, or gate and up: then it cannot be written."""
        dense = not self.weight.is_expert and len(self.weight.shape) - len(self.index) > 2
        return self.rows is not None or dense

    def piece(self, inner: int) -> TensorPiece:
        """Return how a matrix of these outputs and ``inner`` inputs lies on disk."""
        shape = (self.experts, inner, self.outputs) if self.perm else (self.outputs, inner)
        return TensorPiece(self.target, shape, self.index, self.perm, self.rows)


def _adapted_weights(decoder: Decoder) -> dict[str, Weight]:
    """Return the matrices of a decoder's products that exist in ``transformers``, by name."""
    weights = {w.name: w for w in model_weights(decoder) if not w.name.endswith((LORA_A, LORA_B))}
    weights = {n: w for n, w in weights.items() if len(w.shape) > 1 and not w.looked_up}
    # Multi-token prediction blocks, which come last, do not exist in transformers.
    multi_token = tuple(f"layers.{n}." for n in range(decoder.layers, len(decoder.blocks)))
    return {n: w for n, w in weights.items() if not n.startswith(multi_token)}


def adapter_sites(decoder: Decoder) -> list[AdapterSite]:
    """Return the matrices of a decoder that PEFT can adapt, a module's parameters in order.

    Feed-forwards and routers are ``target_parameters``, as are linear layers with a name that PEFT
    treats as experts', such as the attention gate of ``afmoe``.
    """
    return [site for site in readable_sites(decoder) if not site.is_shared]


def readable_sites(decoder: Decoder, layout: Layout = "packed") -> list[AdapterSite]:
    """Return the matrices whose adapters can be read: those that can be written, and shared ones.

    In the layout ``per_expert`` each expert has linear layers of its own, as in releases of
    ``transformers`` before 5, and as Unsloth loads gpt_oss.
    """
    weights = _adapted_weights(decoder)
    table = resolve_rows(family_of(decoder).tensors, decoder)
    found: list[AdapterSite] = []
    for name, (mapping, layer) in find_mappings(table, weights).items():
        weight = weights[name]
        for piece in pieces(mapping, layer, weight.shape, layout):
            if layout == "per_expert" and weight.is_expert and not piece.index:
                found += _expert_modules(weight, piece)
            else:
                found += _sites_of(weight, piece)
    return found


def _sites_of(weight: Weight, piece: TensorPiece) -> Iterator[AdapterSite]:
    """Yield the site of a tensor on disk, unless it is no matrix."""
    module, _, leaf = piece.name.rpartition(".")
    *lead, outputs, inputs = piece.shape
    if piece.perm:
        outputs, inputs = inputs, outputs
    whole = weight.is_expert and not piece.index
    if tuple(lead) != (weight.shape[:1] if whole else ()):
        return
    is_linear = weight.name == "head.weight" or weight.category == "attention" or bool(piece.rows)
    is_linear = is_linear and module.rpartition(".")[2] not in _EXPERT_MODULES
    parameter = None if is_linear or (weight.is_expert and not whole) else leaf
    yield AdapterSite(
        weight, piece.index, module, parameter, outputs, inputs, piece.perm, piece.rows
    )


def _expert_modules(weight: Weight, piece: TensorPiece) -> Iterator[AdapterSite]:
    """Yield the linear layers into which Unsloth splits experts that are one tensor on disk.

    Their outputs are in the order of the tensor's: gate and up of gpt_oss are interleaved.
    """
    if not piece.perm or len(piece.shape) != 3:  # not split, or biases
        return
    experts, inputs, outputs = piece.shape
    for expert in range(experts):
        module = f"{piece.name}s.{expert}"
        yield AdapterSite(weight, (expert,), module, None, outputs, inputs, piece.perm)


def sites_by_prefix(sites: Iterable[AdapterSite]) -> dict[str, list[AdapterSite]]:
    """Return sites by the prefix of the names of an adapter's tensors, which shared sites have."""
    by_module: dict[str, dict[str, list[AdapterSite]]] = {}
    for site in sites:
        by_module.setdefault(site.module, {}).setdefault(site.target, []).append(site)
    found: dict[str, list[AdapterSite]] = {}
    for module, wrapped in by_module.items():
        for depth, same in enumerate(reversed(wrapped.values())):
            found[PREFIX + module + BASE_LAYER * depth] = same
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
            "a joined matrix (gate and up of some shared experts) or absent (multi-token blocks); "
            "leave it out of adapter.targets, or write the merged weights (--merged)"
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
            ranks[target] = size[0]
            alphas[target] = _alpha(*size)
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
        **PLAIN,
    }, adapted


def a_is_first(release: object, family: str) -> bool:
    """Return whether A multiplies the first dim of experts' matrices as stored, by PEFT's release.

    A folder without a release is one of before 0.18, which wrote none.
    """
    numbers = [int(n) for n in re.findall(r"\d+", str(release or "0.17.0"))[:3]]
    marked = family in MARKED_TRANSPOSED
    if numbers < [0, 19]:
        return True
    return marked == (numbers >= [0, 19, 1])


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
