"""A run whose tensors are moved to host memory between steps, and come back when they are used."""

from pathlib import Path
from typing import Any

import pytest

from moefold.training.trainer import Trainer
from tests.cpu.runs import job_of
from tests.cpu.test_training_loop import DEEPSEEK
from tests.cpu.test_training_skip import everything, same

WAYS: dict[str, dict[str, Any]] = {
    "masters": {"model": DEEPSEEK, "train": {"precision": "bf16"}},
    "codes": {"train": {"precision": "bf16", "quantise": {"kind": "fp8_block", "block": 16}}},
    "offloaded": {"layout": {"state": {"at": "host", "share": 0.5}}},
    "partial": {"train": {"precision": "bf16", "freeze": ["embed.*"]}},
}


def held(job: Trainer) -> int:
    """Return the bytes of the storages that the model, its gradients and its state have."""
    found = dict[int, int]()
    state = job.state
    tensors = [*job.model.parameters(), *job.model.buffers(), *state.params.values()]
    tensors += [p.grad for p in tensors if p.grad is not None]
    tensors += job.optimizer.tensors()
    tensors += [*job.model.precision_policy.copies, *job.model.precision_policy.codes]
    for bucket in state.buckets:
        tensors += [bucket.values, *bucket.gradient_tensors]
        tensors += [] if bucket.offloaded else [bucket.master_L]
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage.nbytes()
    return sum(found.values())


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_is_moved_out_and_back_is_the_run_itself(tmp_path: Path, way: str) -> None:
    """Nothing is left in its place, and after ten times no more is on the host than once."""
    with job_of(tmp_path, "whole", **WAYS[way]) as job:
        for _ in range(3):
            job.step()
        whole = everything(job)
    with job_of(tmp_path, "moved", **WAYS[way]) as job:
        job.step()
        before = held(job)
        host = job.state._moved.pool
        peak = job.offload_all()
        for times in range(10):
            job.offload_all()
            job.offload_all()
            assert held(job) < 0.02 * before
            assert host.bytes == host.peak == peak
            if times % 2:
                job.state.move_back()
            else:
                job.weights("*.norm.weight")
            assert host.bytes == 0 and job.state._moved.pool.peak == peak
        job.offload_all()
        job.step()
        job.offload_all()
        job.evaluate(64)
        job.step()
        job.offload_all()
        job.save()
        assert same(everything(job), whole)
