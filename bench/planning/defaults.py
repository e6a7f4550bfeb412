"""What a published row does not say, filled in by its stack and release: the one table of it.

A value that the row states always wins. Where its stack's recipe is public the value is the
recipe's (``recipes.py`` for settings, ``numbers.py`` for what is kept per parameter); the others
are what the stack did unless told otherwise at that time, with the source beside each.
"""

import re
from dataclasses import dataclass
from math import log, sqrt
from typing import Any, Literal

from planning.recipes import said

from moefold.planner.case import Graphs, Recipe, Stack
from moefold.planner.published import published_entries
from moefold.spec.layer import Module

GRACE, HOPPER = ("GB200", "GB300"), ("H100", "H800", "H200")
CONVERGED_LOAD = 1.1
"""Rows of the fullest expert rank over the mean, of a long run with a bias per expert."""


@dataclass(frozen=True)
class Origin:
    """Which software made a row."""

    stack: Stack
    release: str


PREFIXES: tuple[tuple[str, Stack, str | None], ...] = (
    (r"mb-(\d\d\.\d\d(?:\.\d\d)?)-", "megatron", None),
    (r"mcore26-", "megatron", "26.02"),
    (r"mlm-dsv3-gb200-", "megatron", "guide"),
    (r"mlm-", "megatron", "mpf"),
    (r"(?:zoo|skill-dsv3-long)", "megatron", "zoo"),
    (r"mpf-", "megatron", "mpf"),
    (r"dgxc-", "megatron", "dgxc"),
    (r"card-.*-(?:weak|perf)", "megatron", "26.08"),
    (r"card-", "megatron", "card"),
    (r"skill-moonlight", "megatron", "card"),
    (r"skill-", "megatron", "26.04"),
    (r"doc-", "megatron", "26.04"),
    (r"automodel-", "automodel", ""),
    (r"titan", "torchtitan", ""),
    (r"torchao", "torchtitan", ""),
    (r"dsv3-prod", "deepseek", ""),
)
"""Where a row's id begins, its stack, and its release where the id does not hold it. Cards and
skills of Megatron-Bridge carry no release; the one current when they were written stands here."""


def origin(row: dict[str, Any]) -> Origin:
    """Return a row's stack and release; a row of another form may state both."""
    if row.get("stack"):
        return Origin(row["stack"], row.get("release") or "")
    if row.get("kind") == "verification_card_perf":
        return Origin("megatron", "26.08")
    for pattern, stack, release in PREFIXES:
        found = re.match(pattern, row["id"])
        if found:
            return Origin(stack, release if release is not None else found[1])
    return Origin("megatron", "")


def _at_least(release: str, least: str) -> bool:
    """Return whether a release is numbered and not before another."""
    return release[:2].isdigit() and release >= least


def recipe(row: dict[str, Any]) -> Recipe:
    """Return the number format that a row's precision means."""
    text = (row.get("precision") or "BF16").lower()
    if "nvfp4" in text:
        return "nvfp4"
    if "fp8" not in text:
        return "bf16"
    if "mx" in text:
        return "mxfp8"
    if "block" in text or "128" in text:
        return "fp8_block"
    if row.get("gpu") in HOPPER:
        # DeepSeek's own blocks: arXiv 2412.19437, section 3.3; else "FP8" is current scaling.
        return "fp8_block" if origin(row).stack == "deepseek" else "fp8_tensor"
    return "mxfp8"


def dispatcher(row: dict[str, Any], where: Origin) -> str:
    """Return how rows reach their experts."""
    text = (row.get("dispatcher") or "").lower()
    if "drop" in (row.get("routing") or "") and where.release == "25.09":
        return "padded"
    if "hybridep" in text:
        return "hybrid_ep"
    if "deepep" in text:
        return "deep_ep"
    if "cross-node" in text:
        return "two_level"
    if text:
        return "alltoall"
    stated = _said(row, where, "dispatcher")
    if stated in ("deepep", "hybridep"):
        return "deep_ep" if stated == "deepep" else "hybrid_ep"
    if where.stack == "automodel":
        return "deep_ep"
    if where.stack == "deepseek":
        return "two_level"
    if row["gpu"] in GRACE and _at_least(where.release, "25.11"):
        return "hybrid_ep"
    return "deep_ep" if where.release in ("guide", "zoo") else "alltoall"


def _said(row: dict[str, Any], where: Origin, setting: str) -> Any:
    """Return what the row's recipe sets, if it has one."""
    if where.stack != "megatron":
        return None
    return said(row, where.release, recipe(row), setting)


def graphs(row: dict[str, Any], where: Origin) -> Graphs:
    """Return what CUDA graphs hold."""
    text = (row.get("cuda_graph") or _said(row, where, "cuda_graph") or "none").lower()
    if text.startswith("full"):
        return "full"
    return "none" if text == "none" else "partial"


def expert_overlap(row: dict[str, Any], where: Origin) -> bool:
    """Return whether exchanges run beside another micro-batch's computing."""
    text = (row.get("overlap") or "").lower()
    if text:
        has = "a2a" in text or "dualpipe" in text
        return has and not any(word in text for word in ("off", "no 1f1b", "none"))
    return bool(_said(row, where, "ep_overlap"))


WORDS: dict[str, Module | None] = {
    "layernorm": "norms",
    "mla_up_proj": "mla_up",
    "moe_act": "moe_act",
    "mlp": "ffn",
    "moe": "moe",
    "core_attn": "attention",
    "shared_experts": "shared",
    "full": "block",
    "none": None,
}
"""The sources' names of what is recomputed, in ours."""
KEPT_BLOCKS = ("GPT-OSS-20B", "GPT-OSS-120B")
"""Models whose benchmark recipe of AutoModel (``examples/llm_benchmark``) has no
``activation_checkpointing``, or says ``false``; all others that were published with it do."""
DEEPSEEK: frozenset[Module] = frozenset(("norms", "mla_up", "moe_act"))
"""RMSNorm, MLA's up-projections and SwiGLU: arXiv 2412.19437, sections 3.2.3 and 3.3.3."""


def recomputed(text: str) -> frozenset[Module]:
    """Return the modules that a source's words name: ``selective: mla_up_proj, mlp``.

    ``selective`` alone is Megatron-Core's own default, the core of attention. AutoModel's recipes
    say ``activation_checkpointing: true``.
    """
    checkpoints = re.search(r"activation[_ ]checkpointing\W+(true|false)", text, re.IGNORECASE)
    if checkpoints:
        text = "full" if checkpoints[1].lower() == "true" else "none"
    words = re.findall(r"\w+", text.lower())
    found: set[Module] = {"attention"} if words == ["selective"] else set()
    for word in words:
        module = WORDS.get(word)
        if module is not None:
            found.add(module)
    return frozenset(found)


def recompute(row: dict[str, Any], where: Origin) -> frozenset[Module]:
    """Return what is computed again in backward."""
    text = row.get("recompute")
    if text is None:
        noted = re.search(r"recompute (\w+) per the later README", row.get("notes") or "")
        text = noted[1] if noted else _said(row, where, "recompute")
    if text is not None:
        return recomputed(text)
    if where.stack == "automodel" and row["model"] not in KEPT_BLOCKS:
        return frozenset(("block",))
    if where.stack == "deepseek":
        return DEEPSEEK
    return frozenset()


def load(row: dict[str, Any]) -> float:
    """Return rows of the fullest expert rank over the mean."""
    if row.get("load"):
        return row["load"]
    text = row.get("routing") or ""
    room = capacity(row)
    if "balanced" in text or ("natural" not in text and room is None):
        return 1.0
    if "bias" in text or row["id"].startswith("dsv3-prod"):
        return CONVERGED_LOAD
    experts = published_entries().get(row["model"], {}).get("experts") or row["ep"]
    return capped_load(natural_load(row["ep"], experts), room)


CAPACITY = (
    r"capacity(?: factor)?\s*[=:]?\s*(\d+(?:\.\d+)?)",
    r"\bCF\s*[=:]?\s*(\d+(?:\.\d+)?)",
    r"(\d+(?:\.\d+)?)x (?:fixed )?(?:expert )?capacity",
)
"""How sources write a capacity factor."""


def capacity(row: dict[str, Any]) -> float | None:
    """Return the capacity factor of a row: rows that an expert has room for, over the mean."""
    if row.get("capacity_factor"):
        return float(row["capacity_factor"])
    for key in ("routing", "dispatcher"):
        for pattern in CAPACITY:
            if found := re.search(pattern, row.get(key) or "", re.IGNORECASE):
                return float(found[1])
    return None


LOAD_SPREAD = 0.8
"""Deviation of an expert's rows over the mean: of the recorded routings of a model that is trained
with a balancing loss (``tests/data/recorded_counts.json``), over nine steps of its first sixty."""
CAP_POWER = 3
"""How sharply a capacity cuts: fitted to the same routings with experts' rows cut off."""


def natural_load(ranks: int, experts: int) -> float:
    """Return the rows of the fullest of ``ranks`` over the mean, of routing that is not forced.

    Ranks' rows are sums over their experts; the fullest of R is about sqrt(2 ln R) deviations above
    the mean, and ranks that hold a large part of the experts deviate less.
    """
    each = max(1, experts // ranks)
    others = (experts - each) / max(1, experts - 1)
    return 1.0 + LOAD_SPREAD * sqrt(2 * log(ranks) / each * others)


def capped_load(load: float, room: float | None) -> float:
    """Return a load where each expert has room for so many times the mean, and drops the rest."""
    if room is None:
        return load
    return max(1.0, (load**-CAP_POWER + room**-CAP_POWER) ** (-1 / CAP_POWER))


CHUNKED = r"chunk\w*[ _-](?:head|loss|logits?|ce\b|cross)|(?:linear|cut)[ _-]cross[ _-]entropy"
"""How sources write that head and loss are computed by chunks of rows."""


def chunks_head(row: dict[str, Any]) -> bool:
    """Return whether head and loss are computed by chunks, as the row says."""
    texts = (row.get(key) or "" for key in ("loss", "recompute", "optimizer_notes", "notes"))
    return any(re.search(CHUNKED, text, re.IGNORECASE) for text in texts)


def fuses_loss(where: Origin) -> bool:
    """Return whether a stack's loss overwrites logits with their gradient.

    Transformer Engine's cross-entropy does, which every performance recipe of Megatron-Bridge
    (``perf_recipes/_common.py``, before ``scripts/performance/utils/overrides.py``) and the
    ModelZoo's guides (``--cross-entropy-fusion-impl te``) take.
    """
    bridge = where.release[:2].isdigit() or where.release in ("guide", "zoo")
    return where.stack == "megatron" and bridge


def host_speed(row: dict[str, Any]) -> float:
    """Return how fast the host launches, beside the stack's usual: slower before it was bound."""
    if row.get("host_speed"):
        return row["host_speed"]
    step = re.match(r"mlm-dsv3-gb200-(\d\d)-", row["id"])
    return 0.8 if step and int(step[1]) < 8 else 1.0


STAGES = {
    (4, 1): "Et*16|t*16|t*16|t*13mL",
    (4, 0): "Et*16|t*16|t*16|t*13L",
    (8, 1): "Et*8|(t*8|)*6t*5mL",
    (8, 0): "Et*8|(t*8|)*6t*5L",
    (16, 1): "Et*4|(t*4|)*14tmL",
    (32, 1): "Et*3|(tt|)*29m|L",
    (16, 0): "Et*4|(t*4|)*14tL",
    (32, 0): "Et|(tt|)*30L",
}
"""Pipeline layouts of DeepSeek-V3 by stages and multi-token layers, as the recipes and papers that
print one have it; of 4, 8 and 16 stages in ``recipes/deepseek/deepseek_v3.py`` of Megatron-Bridge.
"""


MULTI_TOKEN = {"Nemotron-3-Super-120B-A12B": 2, "Nemotron-3-Ultra-550B-A55B": 2}
"""Multi-token prediction layers of models whose rows do not state them: ``mtp_num_layers`` in
Megatron-Bridge's ``perf_recipes/nemotronh``. The rows' own FLOPs per token are those of two, 84 and
361 GFLOP, where one makes 80 and 349."""


def stages(row: dict[str, Any], count: int) -> str | None:
    """Return the layout of a row's pipeline as text, where its stack does not balance it."""
    if row["model"] == "DeepSeek-V3" and origin(row).stack == "megatron":
        return STAGES.get((count, multi_token(row)))
    return None


def narrowed(row: dict[str, Any], where: Origin) -> frozenset[Literal["attention", "head"]]:
    """Return what is computed in 8 bits besides linear layers: attention, and the head."""
    text = row.get("optimizer_notes") or ""
    if text.startswith("FP8 DPA"):
        return frozenset(("attention",))
    if "FP8 attention" in text:
        return frozenset(("attention", "head"))
    if where.stack != "megatron" or not _at_least(where.release, "26.06"):
        return frozenset()
    # Recipes state it from 26.08 on; the release before had the same switches.
    return frozenset(said(row, "26.08", recipe(row), "narrowed") or ())


def multi_token(row: dict[str, Any]) -> int:
    """Return the number of multi-token prediction layers."""
    if row.get("mtp_layers") is not None:
        return row["mtp_layers"]
    return MULTI_TOKEN.get(row["model"], 0) if origin(row).stack == "megatron" else 0


def sharded(row: dict[str, Any], where: Origin) -> int:
    """Return the ZeRO stage."""
    notes = f"{row.get('notes') or ''} {row.get('overlap') or ''}"
    if "FSDP" in notes or where.stack in ("automodel", "torchtitan"):
        return 3
    return 1


def expert_tensor(row: dict[str, Any], where: Origin) -> int:
    """Return over how many ranks an expert is split."""
    if row.get("etp"):
        return row["etp"]
    return (row.get("tp") or 1) if where.release == "mpf" else 1
