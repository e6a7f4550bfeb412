"""The fastest layouts that searches find on twenty tasks, beside those on record.

python bench/plan_search.py            # a line per task; its exit status says whether one got worse
python bench/plan_search.py --write    # puts what it finds on record, in tests/data
python bench/plan_search.py h20 Grok   # those tasks whose names have these words
"""

import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from moefold.planner.hardware import Cluster, cpu_device, parse_cluster, with_memory
from moefold.planner.published import find_model, published_model
from moefold.planner.search import FoundLayout, Search
from moefold.planner.search_space import full_space
from moefold.planner.task import TrainingTask, task_from_model, task_from_run
from moefold.run import load_run

FILE = Path(__file__).parents[1] / "tests" / "data" / "plan_searches.json"
LIMIT_S = 15.0
"""Processor seconds that a search may take."""
SAME = 1.0005
"""Step times on record have four digits."""


@dataclass(frozen=True)
class Searched:
    """A task, and the fastest layout on record for it."""

    source: str
    """A recipe, or a published model."""
    cluster: str
    """As ``moefold plan`` takes it; ``laptop`` is one thread of a CPU."""
    batch: int
    memory_gb: float | None = None
    """Of a device if not as sold."""
    layout: str = ""
    policies: str = ""
    step_s: float = 0.0

    @property
    def name(self) -> str:
        """What tells it from the others."""
        return f"{self.source} on {self.cluster}"

    @property
    def task(self) -> TrainingTask:
        """What is searched."""
        where = laptop() if self.cluster == "laptop" else parse_cluster(self.cluster)
        if self.memory_gb is not None:
            memory = round(self.memory_gb * 1e9)
            where = replace(where, device=with_memory(where.device, memory))
        known = find_model(self.source)
        if known is not None:
            return task_from_model(published_model(known), where, self.batch)
        return task_from_run(load_run(self.source), where, self.batch)[0]

    def found(self, one: FoundLayout) -> "Searched":
        """Return it with a layout that was found."""
        case = one.case
        ((to_host, _), _) = case.offload.tiers
        said = [
            case.number_formats.recipe,
            f"micro-batch {case.micro_batch}",
            f"zero {case.layout.zero}",
            case.schedule.name,
            case.dispatch,
            *sorted(f"recompute {name}" for name in case.recompute),
            *sorted(f"offload {name}" for name in to_host),
            *(["optimizer on the host"] if case.state.is_offloaded else []),
            case.stages.text,
        ]
        policies = ", ".join(said)
        seconds = float(f"{one.seconds:.4g}")
        return replace(self, layout=str(case.sizes), policies=policies, step_s=seconds)


def laptop() -> Cluster:
    """Return a thread of a CPU with the rates of an ordinary one."""
    return Cluster(cpu_device(1e11, 2e10, 2**34), 1, 1, 1)


TASKS = (
    Searched("demo", "laptop", 8),
    Searched("tiny", "a100x4", 64),
    Searched("one_gpu_24gb", "a100x1", 64, 24.0),
    Searched("olmoe_1b_7b", "h100x16", 512),
    Searched("Moonlight-16B-A3B", "h100x16", 64),
    Searched("mixtral_8x7b", "a100x64", 512),
    Searched("qwen3_30b_a3b", "h100x64", 1024),
    Searched("Qwen3-30B-A3B", "h100x16", 128, 48.0),
    Searched("Qwen3-30B-A3B", "gb200x8", 128),
    Searched("Qwen3-235B-A22B", "h100x256", 2048),
    Searched("Qwen3-Next-80B-A3B", "b200x64", 1024),
    Searched("GPT-OSS-120B", "h100x32", 512),
    Searched("Nemotron-3-Super-120B-A12B", "b300x64", 1024),
    Searched("Mixtral-8x22B", "h200x128", 1024),
    Searched("Kimi-K2", "h800x512", 4096),
    Searched("Qwen2-57B-A14B", "h100x64", 1024),
    Searched("DeepSeek-V3", "h800x1024", 15360),
    Searched("deepseek_v3_2048", "h800x2048", 15360),
    Searched("DeepSeek-V3", "gb200x256", 4096),
    Searched("DeepSeek-V3", "gb200x100000", 100000),
)


def recorded() -> tuple[Searched, ...]:
    """Return the tasks with the layouts on record."""
    return tuple(Searched(**row) for row in json.loads(FILE.read_text("utf-8")))


def search(task: Searched) -> tuple[Searched, float]:
    """Return the task with the fastest layout that a search finds, and its processor seconds."""
    start = time.process_time()
    asked = task.task
    (found,) = Search(asked).best(full_space(asked), 1)
    return task.found(found), time.process_time() - start


def main(words: list[str]) -> int:
    """Search, print, and return the exit status."""
    write = "--write" in words
    chosen = [word for word in words if not word.startswith("--")]
    rows, worse = [], 0
    for known in TASKS if write else recorded():
        if not all(word.lower() in known.name.lower() for word in chosen):
            continue
        found, spent = search(known)
        rows.append(asdict(found))
        change = found.step_s / known.step_s if known.step_s else 1.0
        worse += change > SAME or spent > LIMIT_S
        print(f"{known.name:42} {spent:5.1f} s  step {found.step_s:9.4g} s {change - 1:+.1%}  "
              f"{found.layout}: {found.policies}", flush=True)  # fmt: skip
    if not rows:
        sys.exit(f"no task's name has all of: {', '.join(chosen)}")
    if write:
        FILE.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return int(worse > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
