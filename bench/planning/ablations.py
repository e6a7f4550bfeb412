"""Published relative effects, each as two cases that differ in what was changed.

From ``published_runs.md`` section 4: every pair there that a case can state was taken, before any
was scored. What only a library's version changed (fused kernels) cannot be stated and is left out.
"""

from dataclasses import dataclass
from typing import Any

from planning.rows import case_of, filled

from moefold.planner.curves import Constants
from moefold.planner.time import estimate_time

LADDER = {
    "id": "mlm-dsv3-gb200-05-x", "model": "DeepSeek-V3", "gpu": "GB200", "num_gpus": 256,
    "precision": "MXFP8", "seq_len": 4096, "gbs": 2048, "mbs": 1, "tp": 1, "pp": 8, "vpp": 4,
    "ep": 32, "mtp_layers": 0, "recompute": "mlp, moe_act", "dispatcher": "DeepEP",
    "overlap": "none", "cuda_graph": "none", "host_speed": 0.8,
}  # fmt: skip
QWEN30 = {
    "id": "skill-qwen3-30b-x", "model": "Qwen3-30B-A3B", "gpu": "H100", "num_gpus": 16,
    "precision": "BF16", "seq_len": 4096, "gbs": 1024, "mbs": 1, "ep": 16, "pp": 1,
    "dispatcher": "HybridEP", "overlap": "none", "cuda_graph": "TE scoped: moe_router",
}  # fmt: skip
SMALL = QWEN30 | {
    "id": "card-x", "tp": 2, "pp": 2, "ep": 4, "gbs": 8, "dispatcher": "alltoall",
    "cuda_graph": "none",
}  # fmt: skip
OSS20 = SMALL | {"model": "GPT-OSS-20B", "pp": 4, "gbs": 4}
LONG = {
    "id": "zoo-x", "model": "Qwen3-235B-A22B", "gpu": "H100", "num_gpus": 256,
    "precision": "BF16", "seq_len": 16384, "gbs": 256, "tp": 4, "pp": 8, "vpp": 4, "ep": 8,
    "dispatcher": "DeepEP", "recompute": "layernorm, moe", "overlap": "none",
}  # fmt: skip
CROSS = LONG | {
    "seq_len": 4096, "gbs": 2048, "tp": 2, "ep": 32, "recompute": "layernorm, moe_act",
}  # fmt: skip
MOONLIGHT = {
    "id": "skill-moonlight-x", "model": "Moonlight-16B-A3B", "gpu": "H100", "num_gpus": 8,
    "precision": "BF16", "seq_len": 4096, "gbs": 4, "mbs": 1, "tp": 2, "pp": 1, "ep": 8,
    "recompute": "none",
}  # fmt: skip
MIXTRAL = {
    "id": "mpf-x", "model": "Mixtral-8x22B", "gpu": "H100", "num_gpus": 128, "precision": "BF16",
    "seq_len": 4096, "gbs": 256, "tp": 2, "pp": 8, "ep": 8, "etp": 1,
}  # fmt: skip
NATURAL = {"routing": "natural"}


@dataclass(frozen=True)
class Ablation:
    """A change and what it did: speed after over speed before, less one."""

    name: str
    base: dict[str, Any]
    before: dict[str, Any]
    after: dict[str, Any]
    published: float


def _times(before: float, after: float) -> float:
    return before / after - 1


def _rates(before: float, after: float) -> float:
    return after / before - 1


ABLATIONS = (
    Ablation("DSV3 GB200: all-to-all to DeepEP", LADDER | {"recompute": "mlp, mla_up_proj"},
             {"dispatcher": "alltoall"}, {}, _rates(540.00, 566.07)),
    Ablation("DSV3 GB200: less recompute", LADDER, {"recompute": "mlp, mla_up_proj"},
             {}, _rates(566.07, 610.71)),
    Ablation("DSV3 GB200: CUDA graphs", LADDER, {}, {"cuda_graph": "TE scoped"},
             _rates(610.71, 663.27)),
    Ablation("DSV3 GB200: CPU binding", LADDER | {"cuda_graph": "TE scoped"}, {},
             {"host_speed": 1.0}, _rates(691.49, 762.12)),
    Ablation("DSV3 GB200: DeepEP to HybridEP",
             LADDER | {"cuda_graph": "TE scoped", "host_speed": 1.0}, {},
             {"dispatcher": "HybridEP"}, _rates(829.93, 943.56)),
    Ablation("DSV3 GB200: activation offload",
             LADDER | {"cuda_graph": "TE scoped", "host_speed": 1.0, "dispatcher": "HybridEP"},
             {}, {"offload": ["moe_act"]}, _rates(945, 930)),
    Ablation("Qwen3-235B GB200: TP2 EP16 to TP1 EP64",
             LADDER | {"model": "Qwen3-235B-A22B", "id": "mb-26.02-x", "pp": 4, "vpp": 1,
                       "recompute": "none", "cuda_graph": "TE scoped", "host_speed": 1.0,
                       "dispatcher": "HybridEP", "mtp_layers": 0},
             {"tp": 2, "ep": 16}, {"tp": 1, "ep": 64}, _rates(800, 920)),
    Ablation("Qwen3-30B H100: EP overlap", QWEN30, {}, {"overlap": "EP A2A overlap"},
             _times(24.714, 20.992)),
    Ablation("Qwen3-30B H100: natural routing", QWEN30 | {"overlap": "EP A2A overlap"}, {},
             NATURAL, _times(20.147, 30.290)),
    Ablation("Qwen3-235B H100 16K: natural routing", LONG, {}, NATURAL, _rates(295, 237)),
    Ablation("Qwen3-235B H100 32K: natural routing", LONG | {"seq_len": 32768, "cp": 2}, {},
             NATURAL, _rates(335, 277)),
    Ablation("Qwen3-235B H100 64K: natural routing", LONG | {"seq_len": 65536, "cp": 4}, {},
             NATURAL, _rates(368, 320)),
    Ablation("Qwen3-235B H100 128K: natural routing", LONG | {"seq_len": 131072, "cp": 8}, {},
             NATURAL, _rates(389, 357)),
    Ablation("Qwen3-235B H100 EP32: 1F1B overlap", CROSS, {},
             {"overlap": "1F1B EP A2A overlap"}, _times(19.7, 17.6)),
    Ablation("Qwen3-235B H800 EP32: all-to-all to DeepEP", CROSS | {"gpu": "H800"},
             {"dispatcher": "alltoall"}, {}, _times(35.39, 25.73)),
    Ablation("Qwen3-235B H800: capacity factor 1 to 5", CROSS | {"gpu": "H800"}, {},
             {"routing": "natural", "capacity_factor": 5.0}, _times(50.8, 66.3)),
    Ablation("Qwen3-30B TP2 PP2 EP4 H100: CUDA graphs", SMALL, {}, {"cuda_graph": "TE scoped"},
             _times(0.623, 0.484)),
    Ablation("GPT-OSS-20B TP2 PP4 EP4 H100: CUDA graphs", OSS20, {},
             {"cuda_graph": "TE scoped"}, _times(0.4935, 0.395)),
    Ablation("Qwen3-30B H100: optimizer on the host, a quarter", SMALL, {},
             {"optimizer_offload": 0.25}, _times(0.996, 1.871)),
    Ablation("Qwen3-30B H100: optimizer on the host, all", SMALL, {},
             {"optimizer_offload": 1.0}, _times(0.996, 4.189)),
    Ablation("Moonlight H100: recompute moe_act", MOONLIGHT, {}, {"recompute": "moe_act"},
             _times(457, 466)),
    Ablation("Moonlight H100: recompute core attention", MOONLIGHT, {},
             {"recompute": "core_attn"}, _times(457.18, 474.8)),
    Ablation("Moonlight H100: recompute MLA up-projection", MOONLIGHT, {},
             {"recompute": "mla_up_proj"}, _times(457.18, 480.89)),
    Ablation("DSV3 GB300: BF16 to MXFP8",
             LADDER | {"id": "mb-25.11-x", "gpu": "GB300", "gbs": 4096, "pp": 2, "vpp": 4,
                       "recompute": "none", "dispatcher": "HybridEP", "cuda_graph": "TE scoped",
                       "host_speed": 1.0},
             {"precision": "BF16"}, {}, _rates(961, 1088)),
    Ablation("Mixtral H100, folded: BF16 to FP8", MIXTRAL, {},
             {"precision": "FP8 delayed scaling"}, _rates(487.7, 631.7)),
    Ablation("Qwen3-30B B200, torchtitan: all-to-all to DeepEP",
             QWEN30 | {"id": "titan-x", "gpu": "B200", "num_gpus": 8, "ep": 8, "mbs": 8,
                       "gbs": 64, "dispatcher": "alltoall", "cuda_graph": "none"},
             {}, {"dispatcher": "DeepEP"}, _rates(9930, 14796)),
    Ablation("DSV3 H100 64K: recompute of attention's core",
             {"id": "mcore26-x", "model": "DeepSeek-V3", "gpu": "H100", "num_gpus": 256,
              "precision": "FP8-Block", "seq_len": 65536, "gbs": 128, "tp": 8, "cp": 4, "pp": 8,
              "vpp": 4, "ep": 32, "dispatcher": "DeepEP", "recompute": "mla_up_proj, mlp",
              "overlap": "none", "cuda_graph": "none"},
             {}, {"recompute": "mla_up_proj, mlp, core_attn"}, -0.16),
)  # fmt: skip
"""Every ablation; batch and length, where a source prints neither, are those of its sister runs."""


NEAR = 0.08
"""How far a planned effect may be off whatever its size: what rows themselves are off by."""


def right(published: float, planned: float) -> bool:
    """Return whether an effect has the right sign, and its size within :data:`NEAR` or a half."""
    off = abs(planned - published)
    return planned * published > 0 and off <= max(NEAR, abs(published) / 2)


def effect(one: Ablation, given: Constants) -> float:
    """Return the predicted effect."""
    before = estimate_time(case_of(filled(one.base | one.before)), given).seconds
    after = estimate_time(case_of(filled(one.base | one.after)), given).seconds
    return before / after - 1
