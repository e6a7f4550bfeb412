"""What a run keeps per parameter, by its stack and release, each with its source.

Paths are of Megatron-Bridge at v0.6.0 unless said; its tags from v0.1.0rc4 on say the same of what
is taken from them here.
"""

from dataclasses import replace
from typing import Any

from planning.defaults import Origin, narrowed, recipe

from moefold.planner.case import NumberFormats

NARROW = ("fp8_tensor", "mxfp8")
"""Recipes whose weights are gathered in codes, without a copy in bfloat16: ``fp8_param_gather`` in
``training/mixed_precision.py``, where it is off for blocks of 128."""
WIDE_COPY = ("GPT-OSS-120B", "GPT-OSS-20B", "Kimi-K2")
"""Models whose recipes turn that off: ``perf_recipes/gpt_oss/common.py``,
``perf_recipes/kimi/*/kimi_k2.py``."""
HALF_MOMENTS = ("DeepSeek-V3", "Moonlight-16B-A3B")
"""Models whose recipes keep moments in bfloat16: ``recipes/deepseek/h100/deepseek_v3.py``, on which
the performance recipes build, and ``recipes/moonlight/h100/moonlight_16b.py``."""
WIDE_GRADIENTS = ("GPT-OSS-120B", "GPT-OSS-20B")
"""Models whose recipe in ``recipes/``, which verification cards run, sums gradients in fp32."""
SUPER = "Nemotron-3-Super-120B-A12B"


def numbers(row: dict[str, Any], where: Origin) -> NumberFormats:
    """Return the formats of a row."""
    made = NumberFormats(recipe=recipe(row), recipe_options=narrowed(row, where))
    kept = _kept(row, where, made)
    return replace(made, **kept)


def _kept(row: dict[str, Any], where: Origin, made: NumberFormats) -> dict[str, float]:
    """Return bytes that are not the usual 2, 4, 4 and 4."""
    if where.stack == "automodel":
        # torch.optim.Adam over the parameters themselves, in bfloat16 as the model's own
        # configuration says: examples/llm_benchmark of NeMo AutoModel v0.5.0.
        return {"gradient_bytes": 2, "master_bytes": 0, "moment_bytes": 2}
    if where.stack == "deepseek":
        # Moments in bfloat16, master weights and gradients in fp32: arXiv 2412.19437, 3.3.3.
        return {"moment_bytes": 2}
    if where.stack != "megatron":
        return {}
    narrow = made.recipe in NARROW
    if where.release in ("guide", "zoo"):
        # Megatron-MoE-ModelZoo, sbatch_benchmarking.sh, where a format is narrow.
        return {"weight_bytes": 0, "moment_bytes": 2} if narrow else {}
    if where.release == "card":
        return _card(row["model"])
    if not where.release[:2].isdigit():
        return {}
    # grad_reduce_in_fp32 is off in every performance recipe: perf_recipes/_common.py.
    found: dict[str, float] = {"gradient_bytes": 2}
    if narrow and row["model"] not in WIDE_COPY:
        found["weight_bytes"] = 0
    if row["model"] in HALF_MOMENTS:
        found["moment_bytes"] = 2
    return found


def _card(model: str) -> dict[str, float]:
    """Return what verification cards keep, which run the recipes of ``recipes/``."""
    if model in HALF_MOMENTS:
        return {"gradient_bytes": 2, "moment_bytes": 2}
    if model == SUPER:
        # recipes/nemotronh/h100/nemotron_3_super.py: masters in float16 too.
        return {"gradient_bytes": 2, "master_bytes": 2, "moment_bytes": 2}
    return {} if model in WIDE_GRADIENTS else {"gradient_bytes": 2}
