"""Restarts by torchrun's elastic agent go on from the newest checkpoint, on more ranks or fewer."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import fault_injection as faults
import pytest
import yaml

from moefold.cli.main import main
from moefold.run import load_run
from moefold.training.hooks.logs import MetricsHook
from moefold.training.run_folder import History
from moefold.training.trainer import Trainer
from tests.cpu.runs import raw_run
from tests.gloo.harness import one_at_a_time
from tests.gloo.test_comm_launch import environ, free_port

STEPS = 14


def run_file(folder: Path) -> Path:
    raw = raw_run(
        folder,
        train={"steps": STEPS, "batch": 4, "micro_batch": 1, "precision": "fp64"},
        watch={
            "checkpoint": {"every": 2, "keep": 50},
            "progress": {"style": "off"},
            "plots": None,
            "pace": None,
            "time_out_s": 30,
        },
    )
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def torchrun(run: Path, out: Path, ranks: int, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command += [f"--master-port={free_port()}", "--max-restarts=2", "--monitor-interval=0.2"]
    command += ["-m", "moefold", "train", str(run), "--folder", str(out), *more]
    return subprocess.Popen(
        command, env=environ(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ranks_of(agent: int) -> list[int]:
    """The processes that an agent started, by their numbers."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == agent:
                found.append(int(entry.name))
    return sorted(found)


def losses(out: Path) -> list[tuple[int, int, float]]:
    return [(line["step"], line["tokens"], line["lm_loss"]) for line in History.read(out).lines]


def ended(process: subprocess.Popen[str]) -> None:
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said[-3000:]


@pytest.mark.slow
def test_b27_ranks_that_torchrun_starts_again_go_on_with_the_same_data(tmp_path: Path) -> None:
    """Cases 1, 11: killed on two ranks and started again; then on four forks; beside one rank."""
    run, out = run_file(tmp_path), tmp_path / "out"
    alone = tmp_path / "alone"
    with Trainer(load_run(run), alone, [MetricsHook()]) as job:
        job.train()
    unbroken = losses(alone)
    with one_at_a_time():
        broken = torchrun(run, out, 2, "--until", "10")
        threading.Thread(target=kill_one, args=(broken, out), daemon=True).start()
        ended(broken)
        starts = [event for event in History.read(out).events if event["event"] == "start"]
        assert len(starts) == 2 and starts[1]["step"] >= 2, "the kill was to come amid the run"
        assert main(["train", "--folder", str(out), "--nproc", "4"]) == 0
    found = losses(out)
    assert [line[:2] for line in found] == [line[:2] for line in unbroken]
    for (_, _, ours), (_, _, theirs) in zip(found, unbroken, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-10)


def kill_one(agent: subprocess.Popen[Any], out: Path) -> None:
    assert faults.wait_for(out, 5)
    os.kill(ranks_of(agent.pid)[1], signal.SIGKILL)
    time.sleep(0.1)
