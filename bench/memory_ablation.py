"""What each policy takes off the activations of DeepSeek-V3, beside what Megatron-Core reports.

Planned, in GB of 10^9 bytes, on the fullest rank of the report's layout (arXiv 2603.07685, sections
4.1 and 4.2): BF16, PP4 VPP4 EP64 on 256 GPUs, micro-batches of one sequence of 4,096 tokens.

    python bench/memory_ablation.py
"""

from dataclasses import replace

from moefold.mesh.config import Sizes
from moefold.mesh.pipeline import Stages
from moefold.planner.case import Case, Keeping, Stack
from moefold.planner.from_run import Choice, of_model
from moefold.planner.hardware import cluster
from moefold.planner.memory import memory
from moefold.planner.published import model
from moefold.schedule.config import Interleaved
from moefold.spec.layer import Module

Policy = tuple[tuple[Module, ...], tuple[Module, ...]]
NOTHING: Policy = ((), ())
OURS: dict[str, Policy] = {
    "nothing": NOTHING,
    "mla_up": (("mla_up",), ()),
    "norms": (("norms",), ()),
    "experts": (("experts",), ()),
    "mla_up + norms": (("mla_up", "norms"), ()),
    "mla_up + norms, experts on the host": (("mla_up", "norms"), ("experts",)),
    "mla_up + norms + experts": (("mla_up", "norms", "experts", "shared", "ffn"), ()),
    "blocks": (("block",), ()),
}
"""Modules made again, and on the host."""
THEIRS: dict[str, tuple[Policy, float]] = {
    "nothing": (NOTHING, 131.0),
    "mla_up": ((("mla_up",), ()), 131.0 - 30.4),
    "norms": ((("norms",), ()), 131.0 - 8.2),
    "moe_act": ((("moe_act",), ()), 131.0 - 3.8),
}
"""The same in Megatron-Core, with the report's own figures."""


def case(stack: Stack, policy: Policy) -> Case:
    """Return the report's run in a software under a policy."""
    task = of_model(model("DeepSeek-V3"), cluster("gb200x256"), 8192, 4096, load=1.0)
    task = replace(task, software=replace(task.software, stack=stack))
    again, away = map(frozenset, policy)
    sizes, stages = Sizes(pp=4, vpp=4, ep=64), Stages.parse("Et*4|(tttt|)*14tmL")
    keeping = Keeping(recompute=again, offload=away)
    choice = Choice(sizes, Interleaved(), 1, "hybrid_ep", "bf16", keeping, stages)
    return choice.case(task)


def activations(stack: Stack, policy: Policy) -> float:
    """Return the most activations on any rank, in GB."""
    return max(one.fullest.activations for one in memory(case(stack, policy))) / 1e9


def main() -> None:
    """Print both tables."""
    print("| moefold keeps all but | GB |\n|---|---|")
    for name, policy in OURS.items():
        print(f"| {name} | {activations('moefold', policy):.1f} |")
    print("\n| Megatron-Core keeps all but | planned, GB | reported, GB |\n|---|---|---|")
    for name, (policy, reported) in THEIRS.items():
        print(f"| {name} | {activations('megatron', policy):.1f} | {reported:.1f} |")


if __name__ == "__main__":
    main()
