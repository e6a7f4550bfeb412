"""What each policy takes off the activations of DeepSeek-V3, beside what Megatron-Core reports.

Planned, in GB of 10^9 bytes, on the fullest rank of the report's layout (arXiv 2603.07685, sections
4.1 and 4.2): BF16, PP4 VPP4 EP64 on 256 GPUs, micro-batches of one sequence of 4,096 tokens.

    python bench/memory_ablation.py [--execute]

With ``--execute`` every policy runs on a shrunk model of the same layers, in a pipeline of two
processes, and what ranks hold after each action is compared with what is planned, to the byte.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from moefold.mesh.config import Sizes
from moefold.mesh.pipeline import Stages
from moefold.planner.case import Case, Recipe, Stack
from moefold.planner.hardware import parse_cluster
from moefold.planner.layouts import make_dispatch, make_layout
from moefold.planner.memory import estimate_memory, memory_after_each
from moefold.planner.published import published_model
from moefold.planner.task import task_from_model
from moefold.run import Run, load_run
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
READERS = 3
"""Products that hold a layer's normed rows in codes, each its own: both down-projections of latent
attention, and the shared expert's. The router holds them in BF16."""
SHRUNK = (
    "model.shape={hidden: 64, layers: 8, dense_layers: 1, dense_width: 144, heads: 4, q_rank: 24, "
    "kv_rank: 16, nope_dim: 8, rope_dim: 4, v_dim: 8, experts: 8, top_k: 2, expert_width: 16, "
    "shared_width: 16, vocab: 512}",
    "model.groups={count: 4, keep: 2}", "model.context=64", "data.tokenizer.vocab=512",
    "data.seq=64", "train.batch=4",
    "train.micro_batch=1", "train.precision=fp32", "layout.sizes=pp2 vpp2",
)  # fmt: skip
WORLD = 2


def case(stack: Stack, policy: Policy, recipe: Recipe = "bf16") -> Case:
    """Return the report's run in a software under a policy."""
    task = task_from_model(
        published_model("DeepSeek-V3"), parse_cluster("gb200x256"), 8192, 4096, load=1.0
    )
    task = replace(task, software=replace(task.software, stack=stack))
    again, away = map(frozenset, policy)
    sizes, stages = Sizes(pp=4, vpp=4, ep=64), Stages.parse("Et*4|(tttt|)*14tmL")
    layout = make_layout(
        sizes,
        schedule=Interleaved(),
        stages=stages,
        dispatch=make_dispatch("hybrid_ep"),
        recompute=again,
        offload=away,
    )
    return task.case(layout, 1, recipe)


def activations(stack: Stack, policy: Policy) -> float:
    """Return the most activations on any rank, in GB."""
    return max(one.peak_action.activations for one in estimate_memory(case(stack, policy))) / 1e9


def theirs(policy: Policy, recipe: Recipe = "bf16") -> float:
    """Return Megatron-Core's activations on the third rank, in GiB."""
    return estimate_memory(case("megatron", policy, recipe))[THIRD].peak_action.activations / GIB


def copies() -> float:
    """Return what one more tensor of the experts' rows takes there: as much as their input."""
    each = memory_after_each(case("megatron", NOTHING), THIRD)
    return max(after.activations_by_name.get("experts.input", 0.0) for after in each) / GIB


def normed() -> float:
    """Return what normed rows take there in FP8, whoever holds them."""
    rows = activations_of(case("megatron", NOTHING, "fp8_tensor"))["norm.output"]
    # Planned are codes before attention, and BF16 before the mixture.
    return rows / 3 * (READERS + 2) / GIB


def activations_of(one: Case) -> dict[str, float]:
    """Return the third rank's bytes by row where it holds most."""
    return max(
        (after.activations_by_name for after in memory_after_each(one, THIRD)),
        key=lambda rows: sum(rows.values()),
    )


def savings() -> dict[str, tuple[float, float]]:
    """Return what Megatron-Core keeps, and takes off by each means, planned and reported."""
    whole, more = theirs(NOTHING), copies()
    found = {"all of it": (whole + more, REPORTED), "less by weighing rows early": (more, COPIES)}
    narrow = theirs(NOTHING, "fp8_tensor")
    for name, (policy, reported) in THEIRS.items():
        found[f"less by {name}"] = whole - theirs(policy), reported
        less = normed() if name == "norms" else narrow - theirs(policy, "fp8_tensor")
        found[f"less by {name}, in FP8"] = less, reported
    return {**found, "less by inputs of products in FP8": (whole - narrow, NARROW)}


@dataclass(frozen=True)
class Executed:
    """A policy on the shrunk model: the most activations of a rank in bytes, and what differs."""

    planned: float
    executed: float
    wrong: tuple[str, ...]
    """Rank, action and part where what was held is not what is planned."""


def shrunk(policy: Policy) -> Run:
    """Return the run of the shrunk model under a policy."""
    again, away = policy
    modules = "full" if again == ("block",) else f"{{kind: selective, modules: {list(again)}}}"
    given = [f"layout.recompute={modules if again else 'null'}"]
    given += [f"layout.offload={{host: {{modules: {list(away)}}}}}"] if away else []
    return load_run("deepseek_v3", [*SHRUNK, *given])


def execute(policy: Policy) -> Executed:
    """Run two steps of the shrunk model under a policy."""
    from moefold.training.memory_bench import compare_bytes  # torch, which plans do without

    found = compare_bytes(shrunk(policy), WORLD)
    parts = ("activations", "operands", "messages", "host")
    wrong = (
        f"rank {one.rank} {one.action} {part}: {one.executed[part]}, planned {one.planned[part]}"
        for one in found
        for part in parts
        if one.executed.get(part, 0) != round(one.planned[part])
    )
    planned = max(one.planned["activations"] for one in found)
    return Executed(planned, max(one.executed["activations"] for one in found), tuple(wrong))


def table() -> Iterator[str]:
    """Yield the lines of both tables of plans."""
    yield "| moefold keeps all but | GB |\n|---|---|"
    for name, policy in OURS.items():
        yield f"| {name} | {activations('moefold', policy):.1f} |"
    yield "\n| Megatron-Core, third rank | planned, GiB | reported |\n|---|---|---|"
    for name, (planned, reported) in savings().items():
        yield f"| {name} | {planned:.1f} | {reported:.1f} |"


def main() -> int:
    """Print the tables; returns 1 where what was executed is not what is planned."""
    parser = argparse.ArgumentParser(description="activations of DeepSeek-V3, policy by policy")
    parser.add_argument("--execute", action="store_true", help="run a shrunk model instead")
    if not parser.parse_args().execute:
        print(*table(), sep="\n")
        return 0
    failed = False
    print("| the shrunk model keeps all but | planned, bytes | executed |\n|---|---|---|")
    for name, policy in OURS.items():
        one = execute(policy)
        print(f"| {name} | {one.planned:,.0f} | {one.executed:,.0f} |", *one.wrong, sep="\n")
        failed |= bool(one.wrong)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
