"""Text generated during training: on the console and in ``samples.txt``."""

import re
from pathlib import Path

from rich.console import Console
from rich.text import Text

from moefold.files import write_text
from moefold.training.formatting import escape_control
from moefold.training.hooks.base import Figures, Hook, JobView
from moefold.training.hooks.config import Sample
from moefold.training.run_folder import append_bytes

SAMPLES_FILE = "samples.txt"
MAX_SHOWN_LINES = 8


class SampleHook(Hook):
    """Continues the prompts at steps that are due, each time with the same random seed."""

    def __init__(self, record: Sample, console: Console) -> None:
        self._record = record
        self._console = console

    def on_start(self, job: JobView) -> None:
        """Encode the prompts, which must have tokens; drop samples of steps that are repeated."""
        self._ids = [job.tokenizer.encode_prompt(text) for text in self._record.prompts]
        if not all(self._ids):
            raise ValueError(
                "watch.sample.prompts: an empty prompt has no tokens, as the tokenizer has no "
                "start token; give each prompt some text"
            )
        truncate_samples(job.folder / SAMPLES_FILE, job.step_number)

    on_rewind = on_start

    def on_step(self, job: JobView, metrics: Figures) -> None:
        """Generate if the step is due, and at the end."""
        record = self._record
        step = job.step_number
        if step % record.every and step != job.last_step:
            return
        tokenizer = job.tokenizer
        generated = job.generate(
            self._ids,
            tokens=record.tokens,
            temperature=record.temperature,
            top_p=record.top_p,
            seed=job.run.seed,
            stop_ids=tokenizer.end_ids,
            vocab=tokenizer.size,
            window=job.run.data.seq,
        )
        written = ""
        title = f"sample step {step}\n"
        for prompt, ids in zip(record.prompts, generated, strict=True):
            text = prompt + tokenizer.decode(ids)
            written += f"=== step {step} · {prompt!r}\n{text}\n\n"
            lines = escape_control(text).split("\n")
            shown = "\n".join(lines[:MAX_SHOWN_LINES]) + "\n…" * (len(lines) > MAX_SHOWN_LINES)
            output = Text.assemble((title, "cyan"), shown)
            output.stylize("bold", len(title), len(title + prompt))
            self._console.print(output, soft_wrap=True)
        with open(job.folder / SAMPLES_FILE, "ab", buffering=0) as file:
            append_bytes(file, written.encode())


def truncate_samples(path: Path, step: int) -> None:
    """Drop the samples of steps after ``step``."""
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8", errors="replace")  # the last one may be incomplete
    for head in re.finditer(r"^=== step (\d+) · ", text, re.MULTILINE):
        if int(head[1]) > step:
            write_text(path, text[: head.start()])
            return
