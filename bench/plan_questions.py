"""Twenty questions to the planner: each class of device, whole models, adapters and preferences.

python bench/plan_questions.py            # a line for each; status 1 if an answer is wrong or late
python bench/plan_questions.py --save     # and puts these answers into bench/results
python bench/plan_questions.py kimi dpo   # those whose line has all of these words

Ten have no answer that fits. Of each of these the first change that the plan offers is asked for:
it must have a layout that fits.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from moefold.planner.hardware import StatedLinks, parse_cluster
from moefold.planner.plan import Plan, plan

FILE = Path(__file__).parent / "results" / "plan_questions.json"
LIMITS = ((64, 3.0), (1 << 20, 8.0))
"""Processor seconds of an answer, for at most so many devices."""
LORA = "adapter={kind: lora, rank: 16}"
DPO = "train.loss=dpo"
STORED = "train.loss={kind: dpo, reference: stored}"


@dataclass(frozen=True)
class Question:
    """A model on a cluster, and whether some layout fits."""

    model: str
    cluster: str
    batch: int
    fits: bool
    overrides: tuple[str, ...] = ()
    links: str | None = None
    memory_gb: float | None = None
    precision: str | None = None

    @property
    def text(self) -> str:
        """The question as a command states it."""
        words = [self.model, self.cluster, f"batch {self.batch}", *self.overrides]
        words += [f"links {self.links}"] if self.links else []
        words += [f"memory {self.memory_gb:g}"] if self.memory_gb else []
        return " ".join([*words, self.precision or ""]).strip()

    @property
    def limit_s(self) -> float:
        """Processor seconds that its answer may take."""
        devices = int(self.cluster.rpartition("x")[2])
        return next(seconds for most, seconds in LIMITS if devices <= most)

    def ask(self) -> Plan:
        """Return the plan."""
        return plan(
            self.model,
            parse_cluster(self.cluster, StatedLinks.parse(self.links)),
            batch=self.batch,
            memory_gb=self.memory_gb,
            precision=self.precision,
            overrides=self.overrides,
        )


QUESTIONS = (
    Question("OLMoE-1B-7B", "rtx4090x1", 64, True, (LORA,)),
    Question("OLMoE-1B-7B", "rtx5090x8", 128, True, links="pcie"),
    Question("Qwen3-30B-A3B", "a6000x8", 64, True, (LORA, DPO)),
    Question("Mixtral-8x7B", "a100x32", 128, True, links="pcie"),
    Question("Moonlight-16B-A3B", "l40sx16", 64, True, (LORA,)),
    Question("GPT-OSS-120B", "mi300xx32", 256, True),
    Question("Qwen3-235B-A22B", "h200x128", 512, True, (STORED,)),
    Question("Kimi-K2", "h100x64", 256, True),
    Question("DeepSeek-V3", "gb200x256", 2048, True, precision="mxfp8"),
    Question("DeepSeek-V3", "h800x4096", 12288, True),
    Question("OLMoE-1B-7B", "rtx3090x1", 64, False),
    Question("OLMoE-1B-7B", "rtx4090x1", 64, False, (STORED,)),
    Question("Mixtral-8x7B", "a100-40gbx4", 64, False),
    Question("Qwen3-30B-A3B", "rtx4090x4", 64, False),
    Question("Mixtral-8x22B", "h100x8", 64, False),
    Question("GPT-OSS-120B", "gh200x4", 64, False),
    Question("Qwen3-235B-A22B", "mi325xx4", 64, False),
    Question("Kimi-K2", "h100x16", 64, False, (LORA,)),
    Question("DeepSeek-V3", "mi300xx16", 128, False),
    Question("Kimi-K2", "b200x64", 128, False, memory_gb=40),
)


@dataclass(frozen=True)
class Answer:
    """What a plan says to a question."""

    question: str
    seconds: float
    layout: str
    policies: str
    step_s: float | None
    gb: float
    of_gb: float
    executes: bool
    """Whether training executes the layout."""
    change: str = ""
    """Where nothing fits: the first change with which something does."""
    change_fits: bool | None = None
    """Whether the planner, asked again with that change, finds a layout that fits."""


def answer(question: Question) -> Answer:
    """Return the answer to a question, and ask again with the change that it offers."""
    began = time.process_time()
    found = question.ask()
    shortfall = found.shortfall
    seconds = round(time.process_time() - began, 2)
    best = found.recommended
    if best is not None:
        return Answer(
            question=question.text,
            seconds=seconds,
            layout=best.layout,
            policies=best.policies,
            step_s=round(best.step_time_s, 3),
            gb=round(best.memory_gb, 1),
            of_gb=round(best.device_memory_gb, 1),
            executes=not best.unsupported,
        )
    assert shortfall is not None
    least = shortfall.least
    change = shortfall.remedies[0].change if shortfall.remedies else ""
    return Answer(
        question=question.text,
        seconds=seconds,
        layout="" if least is None else str(least.case.sizes),
        policies="",
        step_s=None,
        gb=0.0 if least is None else round(least.peak_bytes / 1e9, 1),
        of_gb=round(shortfall.limit_bytes / 1e9, 1),
        executes=False,
        change=change,
        change_fits=asked_again(question, change) if change else None,
    )


def asked_again(question: Question, change: str) -> bool:
    """Return whether a layout fits with a change, in the words of the plan: adapter, devices."""
    overrides = question.overrides
    cluster = question.cluster
    for part in change.replace("}, ", "}\n").split("\n"):
        if part.startswith("adapter="):
            overrides = (*overrides, part)
        else:
            devices = part.split()[0].replace(",", "")
            cluster = f"{question.cluster.rpartition('x')[0]}x{devices}"
    again = replace(question, overrides=overrides, cluster=cluster).ask()
    return again.recommended is not None


def problems(question: Question, one: Answer) -> list[str]:
    """Return what is wrong with an answer."""
    found = list[str]()
    if (one.step_s is not None) != question.fits:
        found.append("fits" if one.step_s is not None else "does not fit")
    if not question.fits and not one.change_fits:
        found.append("no change that fits")
    if one.seconds > question.limit_s:
        found.append(f"takes {one.seconds} s of {question.limit_s}")
    return found


def main(words: list[str]) -> int:
    """Ask the questions; return 1 if an answer is wrong or late."""
    save = "--save" in words
    words = [word.lower() for word in words if word != "--save"]
    rows = list[dict[str, Any]]()
    status = 0
    for question in QUESTIONS:
        if not all(word in question.text.lower() for word in words):
            continue
        one = answer(question)
        wrong = problems(question, one)
        status = status or int(bool(wrong))
        rows.append(asdict(one) | {"wrong": wrong})
        step = "nothing fits" if one.step_s is None else f"{one.step_s:,.2f} s"
        said = f"{one.change} (fits: {one.change_fits})" if one.change else one.policies
        print(
            f"{one.seconds:5.1f} s  {question.text}: {step}, {one.gb} of {one.of_gb} GB, "
            f"{one.layout}; {said}{'  WRONG: ' + '; '.join(wrong) if wrong else ''}",
            flush=True,
        )
    if save:
        stored = json.loads(FILE.read_text("utf-8")) if FILE.exists() else []
        by_question = {row["question"]: row for row in [*stored, *rows]}
        kept = [by_question[q.text] for q in QUESTIONS if q.text in by_question]
        FILE.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
