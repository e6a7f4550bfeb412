"""Training with weight products in few bits: what it computes, and that it is the same again."""

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from moefold.kernels.quantise.config import QUANTISE
from moefold.layers.config import Full, Selective
from moefold.moe.config import Router
from moefold.training.banner import banner_rows
from moefold.training.hooks.base import Figures, Hook
from moefold.training.nonfinite import NonFiniteStep
from tests.cpu.runs import equal, job_of, weights
from tests.cpu.small import GQA, decoder, gradients, model_of, moe, padded_rows, relative

KINDS = {"fp8_tensor": 0.3, "fp8_block": 0.25, "mxfp8": 0.25, "nvfp4": 0.85}
"""Largest errors of gradients: start values as large as these magnify roundings fivefold."""


def grads(
    kind: str | None = None, recompute: Any = None, record: Any = None
) -> dict[str, torch.Tensor]:
    every = moe(router=Router(experts=8, top_k=8))  # whose choice no rounding changes
    asked = QUANTISE.kinds[kind]() if kind is not None else record
    model = model_of(decoder(GQA, every, every, quantise=asked), "fp32")
    gradients(model, [padded_rows((9, 17), 6)], recompute, 16)
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_near_and_not_equal(kind: str) -> None:
    """And recompute of blocks and of experts gives the same bits."""
    wide, narrow = grads(None), grads(kind)
    assert wide.keys() == narrow.keys()
    for name in ("layers.1.moe.experts.w_in", "layers.1.attention.o.weight"):
        assert 0.05 < relative(narrow[name], wide[name]) < KINDS[kind], name
    for recompute in (Full(), Selective(modules=("experts",))):
        again = grads(kind, recompute)
        assert all(torch.equal(again[name], narrow[name]) for name in narrow)


@pytest.mark.parametrize("kind", ["fp8_block", "mxfp8"])
def test_codes_that_travel_change_experts_gradients_alone(kind: str) -> None:
    """On one rank too: products along features read the same codes, and wide ones along rows what
    these stand for. Codes of that, with powers of two, differ only where numbers vanish.

    Plants: rows, or their results' gradients, are not rounded on their way.
    """
    experts = {f"layers.{n}.moe.experts.{w}" for n in range(2) for w in ("w_in", "w_out")}
    for wgrad, expected in (("wide", experts), ("narrow", set())):
        plain = QUANTISE.kinds[kind].model_validate({"wgrad": wgrad})
        found = [grads(record=plain.model_copy(update={"wire": w})) for w in ("wide", "codes")]
        changed = {name for name in found[0] if not torch.equal(found[0][name], found[1][name])}
        assert changed == expected
        assert all(0.01 < relative(found[1][name], found[0][name]) < 0.06 for name in changed)


def test_codes_are_those_of_the_weights_that_are_here_now() -> None:
    """After a change in place, as an update makes one. Plant: codes stay as they were."""
    record = decoder().model_copy(update={"quantise": QUANTISE.kinds["mxfp8"]()})
    batch, old, new = padded_rows((9, 17), 6), model_of(record, "fp32"), model_of(record, "fp32")
    gradients(old, [batch], None, 16)
    for model in (old, new):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
    assert gradients(old, [batch], None, 16).lm_loss == gradients(new, [batch], None, 16).lm_loss


PARTS = ("*.attention.*", "*.ffn.*", "*.moe.experts.*", "*.moe.shared.*")


@pytest.mark.parametrize("part", PARTS)
def test_each_part_of_a_block_reads_codes(part: str) -> None:
    """Where the others are kept wide. Plant: experts stay wide."""
    wide = decoder()
    kept = tuple(other for other in PARTS if other != part)
    narrow = wide.model_copy(update={"quantise": QUANTISE.kinds["mxfp8"](keep=kept)})
    batch = padded_rows((9, 17), 6)
    one, other = (gradients(model_of(r, "fp32"), [batch], None, 16) for r in (wide, narrow))
    assert 1e-5 < abs(one.lm_loss / other.lm_loss - 1) < 0.1


FP8 = {"moments": "fp8", "moment_group": 8}
DELAYED = {"kind": "fp8_tensor", "scaling": "delayed", "history": 2}
CODES = {"kind": "fp8_block", "wire": "codes", "hidden": "codes"}


@pytest.mark.parametrize("quantise", ["nvfp4", DELAYED], ids=["nvfp4", "delayed"])
def test_a_run_that_ends_after_every_step_has_the_bits_of_an_unbroken_one(
    tmp_path: Path, quantise: Any
) -> None:
    """Draws are by seed and step; codes and scales of moments are saved, and histories of scales.

    Plants: draws by how many steps this process made; scales, or histories, are left behind.
    """
    changes: dict[str, Any] = {"train": {"steps": 3, "quantise": quantise}, "optim": FP8}
    with job_of(tmp_path, "whole", **changes) as job:
        job.train()
        whole = weights(job)
    for at in range(3):
        with job_of(tmp_path, "broken", **changes) as job:
            assert job.step_number == at
            job.last_step = at + 1
            job.train()
            found = weights(job)
    assert equal(found, whole) == []


class Killing(Hook):
    """Saves every second step, and ends the process at one as a kill does."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step(self, job: Any, metrics: Figures) -> None:
        """Save, or end."""
        if job.step_number % 2 == 0:
            job.save()
        if job.step_number == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def train_killed(folder: Path, out: str, at: int, changes: dict[str, Any]) -> None:
    """Train in a process of its own."""
    with job_of(folder, out, Killing(at), **changes) as job:
        job.train()


@pytest.mark.matrix
@pytest.mark.parametrize(
    "quantise", ["nvfp4", "mxfp8", DELAYED, CODES], ids=["nvfp4", "mxfp8", "delayed", "codes"]
)
def test_a_kill_at_any_step_leaves_the_bits_of_an_unbroken_run(
    tmp_path: Path, quantise: Any
) -> None:
    """At each step of five, at most one of which is made again, and all blocks of it; the unbroken
    run keeps all."""
    changes: dict[str, Any] = {"train": {"steps": 5, "quantise": quantise}, "optim": FP8}
    with job_of(tmp_path, "whole", **changes) as job:
        job.train()
        whole = weights(job)
    changes["layout"] = {"recompute": {"kind": "full"}}
    spawn = multiprocessing.get_context("spawn")
    for at in (*range(1, 6), 0):
        child = spawn.Process(target=train_killed, args=(tmp_path, "killed", at, changes))
        child.start()
        child.join()
        assert child.exitcode == (-signal.SIGKILL if at else 0)
    with job_of(tmp_path, "killed", **changes) as job:
        assert job.step_number == 5 and equal(weights(job), whole) == []


@pytest.mark.parametrize("kind", ["fp8_block", pytest.param("nvfp4", marks=pytest.mark.matrix)])
def test_a_block_that_is_not_finite_is_reported_with_weight_and_expert(
    tmp_path: Path, kind: str
) -> None:
    """Not by its consequences: all gradients are NaN then. Plant: nothing is looked for."""
    found = []
    with job_of(tmp_path, train={"quantise": kind}) as job:
        names = "layers.1.moe.experts.w_out", "embed.weight"
        experts, table = map(job.model.get_parameter, names)
        for weight, place in ((experts, (2, 3, 1)), (table, (slice(None), 0))):
            before = weight.detach().clone()
            with torch.no_grad():
                weight[place] = torch.inf
            with pytest.raises(NonFiniteStep) as caught:
                job.step()
            (line,) = (one for one in str(caught.value).splitlines() if "First non-finite" in one)
            found.append(line.partition(": ")[2])
            with torch.no_grad():
                weight.copy_(before)
        assert job.step()["lm_loss"] > 0 and job.model.precision_policy.non_finite_operands is None
    assert found == [
        "weight layers.1.moe.experts.w_out, expert 2",
        "input of layers.0.attention.q.weight",
    ]


@pytest.mark.parametrize(
    ("wgrad", "said"), [("narrow", "y, dx and dw in"), ("wide", "dw in float")]
)
def test_the_banner_names_each_products_path_and_why(tmp_path: Path, wgrad: str, said: str) -> None:
    with job_of(tmp_path, train={"quantise": {"kind": "mxfp8", "wgrad": wgrad}}) as job:
        shown = [*banner_rows(job)]
    at = [what for what, _ in shown].index("quantise")
    assert said in shown[at][1] and "all emulated (plain torch" in shown[at + 1][1]


def test_a_back_end_that_is_not_there_is_told_before_data_is_prepared(tmp_path: Path) -> None:
    """With how to get it. Plant: the first product tells."""
    quantise = {"kind": "fp8_block", "backend": "deep_gemm"}
    with pytest.raises(ValueError, match=r"deep_gemm cannot be used: .*Install 2.1 or newer"):
        job_of(tmp_path, train={"quantise": quantise})
    assert [one.name for one in tmp_path.iterdir()] == ["corpus"]
