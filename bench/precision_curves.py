"""Loss curves and gradients in few bits beside fp32's, of a two-layer mixture on real text.

300 steps in fp32; from there, at the same weights, the experts' gradient in each kind beside that
in fp32; then 60 steps in which the rate falls to nothing, and the held-out loss beside fp32's. A
curve at this size shows gross faults only; from scratch fp32 and bf16 differ by more than any kind
does here. Which codes are right is shown by bits (``docs/precision.md``). One thread, a hundred
seconds of a core.

    python bench/precision_curves.py --save
"""

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import moefold  # noqa: F401  (before torch: it says how threads wait)

# isort: split
import torch
from torch import Tensor

from moefold.checkpoint.folder import resolve_checkpoint
from moefold.config.load import load
from moefold.optim.adamw import AdamWOptimizer
from moefold.run import Run
from moefold.training.fork import fork
from moefold.training.state import restore
from moefold.training.step import gradients
from moefold.training.trainer import Trainer

RESULTS = Path(__file__).parent / "results"
STEPS, FALL = 300, 60
CURVES: dict[str, dict[str, dict[str, str]]] = {
    "fp32": {},
    "bf16": {"train": {"precision": "bf16"}},
    "fp8_tensor": {"train": {"quantise": "fp8_tensor"}},
    "fp8_block": {"train": {"quantise": "fp8_block"}},
    "mxfp8": {"train": {"quantise": "mxfp8"}},
    "nvfp4": {"train": {"quantise": "nvfp4"}},
    "moments bf16": {"optim": {"moments": "bf16"}},
    "moments fp8": {"optim": {"moments": "fp8"}},
}
"""What each changes of the run."""
LOSS = {"nvfp4": 0.01}
"""Nats of held-out loss that a kind may lie beside fp32; others 0.002."""
GRADIENT = {"fp8_tensor": 0.11, "fp8_block": 0.08, "mxfp8": 0.08, "nvfp4": 0.25}
"""Error that the experts' gradient may have at the step where the kinds begin."""


def run_of(changes: Mapping[str, Mapping[str, Any]], steps: int, fall: int) -> Run:
    """Return the run, with what a curve changes of it."""
    shape = {
        "hidden": 128,
        "layers": 2,
        "heads": 4,
        "kv_heads": 4,
        "experts": 8,
        "top_k": 2,
        "expert_width": 128,
    }
    raw = {
        "name": "precision-curves",
        "model": {
            "family": "qwen3_moe",
            "shape": shape,
            "balance": [{"kind": "aux", "over": "micro_batch", "coefficient": 0.01}],
        },
        "data": {
            "seq": 128,
            "tokenizer": {"kind": "bpe", "vocab": 1024},
            "train": [{"source": "python_stdlib", "holdout": 0.05}],
        },
        "optim": {
            "kind": "adamw",
            "lr": 0.003,
            "schedule_lr": {"kind": "wsd", "warmup": 20, "decay": fall},
            **changes.get("optim", {}),
        },
        "train": {
            "steps": steps + fall,
            "batch": 4,
            "micro_batch": 4,
            "precision": "fp32",
            **changes.get("train", {}),
        },
        "watch": {"evaluate": None, "checkpoint": {"every": None}},
    }
    return load(Run, raw).record


def experts_gradient(job: Trainer, steps: int = 2) -> dict[str, Tensor]:
    """Return the experts' gradients of the next steps, summed in fp64, at the weights there are."""
    found: dict[str, Tensor] = {}
    for number in range(steps):
        job.model.precision_policy.seed, job.model.precision_policy.step = job.run.seed, number
        batches = job.loader.load_step(job.step_number + number)
        gradients(job.state, batches, job.run.train.loss_chunk)
        for held in job.state.gradients():
            if ".experts." in held.name:
                found[held.name] = found.get(held.name, 0) + held.tensor.double()
    return found


def take(job: Trainer, base: Path, state: Mapping[str, Tensor], step: int) -> None:
    """Go on from a run's checkpoint, whose wide moments a run may keep in fewer bits."""
    assert isinstance(job.optimizer, AdamWOptimizer)
    if not job.optimizer.low_precision:
        fork(job, base)
        return
    restore(resolve_checkpoint(base), job.state, None)
    job.state.refresh_weights()
    for name, moments in job.optimizer.low_precision.items():
        for one, what in zip(moments, ("exp_avg", "exp_avg_sq"), strict=True):
            values = state[f"optim.{name}.{what}"].view(-1)
            one.write(0, len(values), values, torch.full_like(values, 0.5))  # to nearest
    for key, tensor in job.optimizer.state().items():
        if key in state and tensor.dtype == state[key].dtype:
            tensor.copy_(state[key])
    job.progress.step = step


def error(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Return the norm of the difference, over all tensors, beside that of ``theirs``."""
    apart = sum((ours[name] - held).square().sum() for name, held in theirs.items())
    return float((apart / sum(held.square().sum() for held in theirs.values())) ** 0.5)


def curves(
    names: Sequence[str], folder: Path, steps: int = STEPS, fall: int = FALL, tokens: int = 20_000
) -> dict[str, dict[str, float]]:
    """Train; return by curve the held-out loss, what it lies beside fp32's, and seconds.

    And of kinds that compute something else in a product: the experts' gradient's error.
    """
    cache, base = folder / "prepared", folder / "base"
    with Trainer(run_of({}, steps, fall), base, cache=cache) as job:
        while job.step_number < steps:
            job.step()
        job.save()
        exact = experts_gradient(job)
        state = {key: tensor.clone() for key, tensor in job.optimizer.state().items()}
    found: dict[str, dict[str, float]] = {}
    for name in ("fp32", *names):
        started = time.perf_counter()
        run = run_of(CURVES[name], steps, fall)
        with Trainer(run, folder / name, cache=cache, is_fork=True) as job:
            take(job, base, state, steps)
            apart = error(experts_gradient(job), exact)
            while job.step_number < steps + fall:
                job.step()
            loss = float(job.evaluate(tokens=tokens)["val_loss"])
        beside = loss - found["fp32"]["loss"] if found else 0.0
        seconds = time.perf_counter() - started
        found[name] = {"loss": loss, "beside": beside, "gradient": apart, "seconds": seconds}
        print(f"{name:12} loss {loss:.4f} ({beside:+.4f}), gradient {apart:.4f}, {seconds:.0f} s")
    return found


def passed(found: Mapping[str, Mapping[str, float]]) -> dict[str, bool]:
    """Return which curves lie within their bounds."""
    return {
        name: abs(one["beside"]) <= LOSS.get(name, 0.002)
        and one["gradient"] <= GRADIENT.get(name, 1.0)
        for name, one in found.items()
    }


def main() -> int:
    """Train, print a line each; 1 where a bound is passed."""
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--kinds", nargs="+", default=[n for n in CURVES if n != "fp32"])
    parser.add_argument("--save", action="store_true", help="write results/precision_curves.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = curves(args.kinds, Path(folder))
    held = passed(found)
    if args.save:
        RESULTS.mkdir(exist_ok=True)
        facts = {"torch": torch.__version__, "machine": platform.machine(), "steps": [STEPS, FALL]}
        report = {**facts, "found": found, "passed": held}
        (RESULTS / "precision_curves.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
