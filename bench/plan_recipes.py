"""The recipes that the planner says fit, with what stays free: the table of docs/plan.md.

python bench/plan_recipes.py
"""

from collections.abc import Iterator
from dataclasses import replace

from moefold.planner.hardware import parse_cluster, with_memory
from moefold.planner.plan import GB, PlannedLayout
from moefold.planner.task import task_from_run
from moefold.run import load_run

FITTING = (
    ("one_gpu_24gb", "a100x1", 24.0),
    ("one_gpu_80gb", "h100x1", None),
    ("eight_gpus_80gb", "h100x8", None),
    ("deepseek_v3_2048", "h800x2048", None),
)
"""Recipe, cluster, and memory of a device if not as sold."""


def lines() -> Iterator[str]:
    """Yield the table, line by line."""
    yield "| recipe | devices | layout | needs | stays free | step |"
    yield "|---|---|---|---|---|---|"
    for name, devices, memory in FITTING:
        where = parse_cluster(devices)
        if memory is not None:
            where = replace(where, device=with_memory(where.device, int(memory * GB)))
        task, record = task_from_run(load_run(name), where)
        layout = PlannedLayout(task.case(record))
        again = " + ".join(sorted(layout.case.recompute)) or "nothing"
        said = f"{layout.layout}, zero {record.zero}, recompute {again}"
        yield (
            f"| `{name}` | {where.devices:,} {where.device.name} of {where.device.size} | {said} "
            f"| {layout.memory_gb:.1f} GB | {layout.margin_gb:.1f} GB "
            f"| {layout.step_time_s:.0f} s ±{layout.time.uncertainty:.0%} |"
        )


if __name__ == "__main__":
    for line in lines():
        print(line, flush=True)
