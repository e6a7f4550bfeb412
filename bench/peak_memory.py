"""Peak memory of a whole training step on a CPU, beside other stacks: same shape and data.

Each program makes steps in a process of its own. After one step, when optimizer state is there, the
system's high-water mark of resident memory is set back, and three more steps are made; the figure
is that mark less what the process held before it had a weight. `moefold` keeps everything that
backward reads; with `norms, permute, experts` and with whole blocks made again it keeps less.
Transformers (Qwen3-MoE, eager and grouped_mm experts) makes nothing again. In bf16 transformers
trains bf16 weights, we train fp32 masters. Beside it torchtitan and Megatron Core, where they are
installed: `peers.py` says what of them a CPU runs. Linux; needs `transformers`.

    python bench/peak_memory.py --save
"""

import argparse
import importlib.util
import json
import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import moefold  # noqa: F401  (before torch: it says how threads wait)

# isort: split
import torch
from one_device import BATCH, RESULTS, SEQ, SHAPE, ours
from peers import PEERS, Step

from moefold.convert.exporter import export_folder
from moefold.layers.config import Full, Selective
from moefold.model.decoder import DecoderModel
from moefold.model.init import initialise
from moefold.training.machine import cpu_name

OURS: dict[str, Any] = {
    "moefold": None,
    "moefold, norms, permute and experts again": Selective(modules=("norms", "permute", "experts")),
    "moefold, blocks again": Full(),
}
PACKAGES = {"transformers": "transformers", "torchtitan": "torchtitan", "megatron-core": "megatron"}
THEIRS = [
    name
    for name in PEERS
    if "compiled" not in name and importlib.util.find_spec(PACKAGES[name.split()[0]])
]
Precision = Literal["bf16", "fp32"]


def resident(mark: str) -> int:
    """Return bytes of this process: ``VmRSS`` now, or ``VmHWM``, the most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (line.split()[1] for line in lines if line.startswith(mark))
    return int(found) * 1024


def step_of(name: str, precision: Precision, folder: Path) -> Step:
    """Return a program's step."""
    draw = torch.Generator().manual_seed(0)
    ids_BS = torch.randint(0, SHAPE.vocab, (BATCH, SEQ), generator=draw)
    if name in OURS:
        return ours(ids_BS, precision, OURS[name])[0]
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    return PEERS[name](folder, ids_BS, dtype)


def highest(make: Callable[[], Step]) -> tuple[int, float]:
    """Return the most bytes of a program from its second step on, and the first's loss."""
    before = resident("VmRSS")
    step = make()
    first = step()
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(3):
        step()
    return resident("VmHWM") - before, first


def peak(name: str, precision: Precision, folder: Path, threads: int) -> tuple[int, float]:
    """Return the most bytes of a program's step, and the loss of its first, in this process."""
    torch.set_num_threads(threads)
    return highest(lambda: step_of(name, precision, folder))


def measured(precision: Precision, threads: int) -> dict[str, Any]:
    """Return every program's peak, and ours as shares of the smaller of theirs."""
    fresh = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch:
        model = DecoderModel(SHAPE, precision)
        initialise(model, SHAPE, seed=1)
        export_folder(SHAPE, model.state_dict(), folder := Path(scratch) / "model")
        peaks, losses = dict[str, int](), dict[str, float]()
        for name in (*OURS, *THEIRS):
            with fresh.Pool(1) as pool:
                given = (name, precision, folder, threads)
                peaks[name], losses[name] = pool.apply(peak, given)
    wide = [loss for name, loss in losses.items() if name != "torchtitan"]  # whose experts are bf16
    for some, most in ((losses.values(), 2e-2), (wide, 2e-2 if precision == "bf16" else 1e-4)):
        assert max(some) - min(some) < most, f"not the same computation: {losses}"
    least = min(peaks[name] for name in THEIRS)
    shares = {name: peaks[name] / least for name in OURS}
    return {"precision": precision, "peak_bytes": peaks, "share_of_theirs": shares}


def main() -> None:
    """Measure and print; ``--save`` writes the figures beside this machine's name."""
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--save", action="store_true", help="write bench/results/peak_memory.json")
    args = parser.parse_args()
    found = [measured(precision, args.threads) for precision in ("fp32", "bf16")]
    for part in found:
        print(f"\n{part['precision']}")
        for name, size in part["peak_bytes"].items():
            share = part["share_of_theirs"].get(name)
            print(f"  {name:45} {size / 1e6:6.0f} MB" + (f"  {share:.2f}" if share else ""))
    if args.save:
        facts = {"machine": cpu_name(), "threads": args.threads, "torch": torch.__version__}
        text = json.dumps(facts | {"found": found}, indent=1)
        (RESULTS / "peak_memory.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
