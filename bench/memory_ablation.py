"""What each policy takes off the activations of DeepSeek-V3, beside what Megatron-Core reports.

Planned, in GB of 10^9 bytes, on the fullest rank of the report's layout (arXiv 2603.07685, sections
4.1 and 4.2): BF16, PP4 VPP4 EP64 on 256 GPUs, micro-batches of one sequence of 4,096 tokens.

    python bench/memory_ablation.py
"""

from dataclasses import replace

from moefold.mesh.config import Sizes
from moefold.mesh.pipeline import Stages
from moefold.planner.case import Case, Keeping, Recipe, Stack
from moefold.planner.from_run import Choice, of_model
from moefold.planner.hardware import cluster
from moefold.planner.memory import memory
from moefold.planner.memory_after import after_each
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
    "mla_up": ((("mla_up",), ()), 30.4),
    "norms": ((("norms",), ()), 8.2),
    "moe_act": ((("moe_act",), ()), 3.8),
}
"""What Megatron-Core takes off by making modules again, as the report has it."""
REPORTED, COPIES, NARROW = 131.0, 26.3, 16.0
"""The report's activations; what it takes off them by weighing rows before the experts' second
product, whose output is not kept then; and by inputs of products in FP8."""
GIB, THIRD = 2**30, 2
"""What the report's figures are in, and the pipeline rank that all of them fit."""


def case(stack: Stack, policy: Policy, recipe: Recipe = "bf16") -> Case:
    """Return the report's run in a software under a policy."""
    task = of_model(model("DeepSeek-V3"), cluster("gb200x256"), 8192, 4096, load=1.0)
    task = replace(task, software=replace(task.software, stack=stack))
    again, away = map(frozenset, policy)
    sizes, stages = Sizes(pp=4, vpp=4, ep=64), Stages.parse("Et*4|(tttt|)*14tmL")
    keeping = Keeping(recompute=again, offload=away)
    choice = Choice(sizes, Interleaved(), 1, "hybrid_ep", recipe, keeping, stages)
    return choice.case(task)


def activations(stack: Stack, policy: Policy) -> float:
    """Return the most activations on any rank, in GB."""
    return max(one.fullest.activations for one in memory(case(stack, policy))) / 1e9


def theirs(policy: Policy, recipe: Recipe = "bf16") -> float:
    """Return Megatron-Core's activations on the third rank, in GiB."""
    return memory(case("megatron", policy, recipe))[THIRD].fullest.activations / GIB


def copies() -> float:
    """Return what one more tensor of the experts' rows takes there: as much as their input."""
    each = after_each(case("megatron", NOTHING), THIRD)
    return max(after.rows.get("experts.input", 0.0) for after in each) / GIB


def savings() -> dict[str, tuple[float, float]]:
    """Return what Megatron-Core keeps, and takes off by each means, planned and reported."""
    whole, more = theirs(NOTHING), copies()
    found = {"all of it": (whole + more, REPORTED), "less by weighing rows early": (more, COPIES)}
    for name, (policy, reported) in THEIRS.items():
        found[f"less by {name}"] = whole - theirs(policy), reported
    narrow = theirs(NOTHING, "fp8_tensor")
    return {**found, "less by inputs of products in FP8": (whole - narrow, NARROW)}


def main() -> None:
    """Print both tables."""
    print("| moefold keeps all but | GB |\n|---|---|")
    for name, policy in OURS.items():
        print(f"| {name} | {activations('moefold', policy):.1f} |")
    print("\n| Megatron-Core, third rank | planned, GiB | reported |\n|---|---|---|")
    for name, (planned, reported) in savings().items():
        print(f"| {name} | {planned:.1f} | {reported:.1f} |")


if __name__ == "__main__":
    main()
