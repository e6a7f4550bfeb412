"""How long the page of ``moefold plan --serve`` takes from an input to a changed table.

    python bench/plan_page.py            # prints the figures beside the stored ones
    python bench/plan_page.py --save

One input after another is changed in a headless Chromium. For each: seconds until the table or its
status shows the first answer, until the table has the fastest layout that training executes, and
until the search is done. They are of wall time: nothing else should run on the machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from planning.chromium import Chromium

STORED = Path(__file__).parent / "results" / "plan_page.json"
SMALL = {"model": "qwen3_30b_a3b", "cluster": "h100x64"}
LARGE = {"model": "deepseek_v3", "cluster": "h800x2048", "batch": "15360"}
CHANGES = (
    ("batch", "512"), ("batch", "2048"), ("seq", "8192"), ("seq", ""), ("cluster", "h100x32"),
    ("cluster", "h100x64"), ("precision", "fp8"), ("precision", ""), ("load", "1.5"), ("load", ""),
    ("memory", "70"), ("memory", ""), ("layout", "pp2 ep8"), ("zero", "2"), ("zero", ""),
    ("adapter", "{kind: lora, rank: 16}"), ("adapter", ""), ("cluster", "b200x64"),
    ("cluster", "h100x64"), ("batch", "1024"),
)  # fmt: skip
"""Inputs of the small question, changed one after another."""
TYPE = """(async (values) => {
  const seconds = {}, began = performance.now();
  const text = () => (document.querySelector(".cardlike") || {}).innerText;
  const seen = (name) => { seconds[name] ??= (performance.now() - began) / 1e3; };
  const before = text();
  document.body.dataset.answer = "typed";
  for (const name in values) inputs[name].value = values[name];
  inputs[Object.keys(values)[0]].dispatchEvent(new Event("input"));
  for (;;) {
    await new Promise((done) => setTimeout(done, 5));
    const state = document.body.dataset.answer;
    if (state === "searching" || state === "done") {
      seen("given");
      if (text() !== before) seen("changed");
      if (data.today) seen("today");
    }
    if (state === "done") { seen("done"); return seconds; }
    if (state === "refused" || state === "failed") throw new Error(document.body.innerText);
  }
})"""


def change(browser: Chromium, values: dict[str, str]) -> dict[str, float]:
    """Type into fields; return the seconds until each part of the answer is shown."""
    return browser.run(f"{TYPE}({json.dumps(values)})")


def measured() -> dict[str, Any]:
    """Return the figures of both questions, with the machine's load before and after."""
    command = [sys.executable, "-m", "moefold", "plan", "--serve", "--no-browser"]
    loads = [os.getloadavg()[0]]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        with Chromium() as browser:
            browser.open(server.stdout.readline().strip())
            change(browser, SMALL)
            small = [change(browser, {name: text}) for name, text in CHANGES]
            large = change(browser, LARGE)
    finally:
        server.terminate()
        server.wait()
    loads.append(os.getloadavg()[0])
    parts = ("given", "changed", "today", "done")
    medians = {part: statistics.median(one[part] for one in small if part in one) for part in parts}
    return {"load_average": loads, "small_median_s": medians, "small_s": small, "large_s": large}


def main() -> None:
    """Print the figures, and store them with ``--save``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--save", action="store_true", help="store the figures")
    args = parser.parse_args()
    stored = json.loads(STORED.read_text("utf-8")) if STORED.exists() else None
    found = measured()
    for name, figures in (("now", found), ("stored", stored)):
        if figures is None:
            continue
        loads = " to ".join(f"{load:.1f}" for load in figures["load_average"])
        print(f"{name}, at a load of {loads}:")
        for question, part in (("small, median", "small_median_s"), ("large", "large_s")):
            seconds = ", ".join(f"{key} {value:.2f} s" for key, value in figures[part].items())
            print(f"  {question}: {seconds}")
    if args.save:
        STORED.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
