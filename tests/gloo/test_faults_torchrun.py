"""Restarts by torchrun's elastic agents go on from the newest checkpoint, on more ranks or fewer.

The agents are torchrun's own, two for the two machines of a run. They are forked here, and fork
their workers, which saves each the imports; ``bench/rounds.py`` starts the command itself.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from moefold.checkpoint.folder import list_candidates
from moefold.cli.main import main
from moefold.comm.environment import SECRET
from moefold.comm.fork_server import fork_server
from moefold.run import load_run
from moefold.training.hooks.logs import MetricsHook
from moefold.training.run_folder import History
from moefold.training.trainer import Trainer
from tests.cpu.runs import raw_run
from tests.gloo.harness import one_at_a_time
from tests.gloo.test_comm_launch import free_port

STEPS = 14
LIMIT_S = 300.0
KNOWN_TO_RANKS = "0123456789abcdef"
"""With a secret the store is that of the first rank, another at each meeting."""


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


Deaths = Mapping[int, Sequence[int]]
"""Agents whose worker is killed once, by the number of steps done before."""


def serve_as_agent(number: int, port: int, folder: Path, words: list[str], deaths: Deaths) -> None:
    """Be the agent of one of two machines, each with one rank."""
    os.environ |= {"OMP_NUM_THREADS": "1", SECRET: KNOWN_TO_RANKS}
    config = LaunchConfig(
        min_nodes=2,
        max_nodes=2,
        nproc_per_node=1,
        run_id="two agents",
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        max_restarts=9,
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(config, train)(number, folder, words, deaths)


def train(agent: int, folder: Path, words: list[str], deaths: Deaths) -> None:
    """Be a rank of an agent; leave a note of its count of restarts, and of each death."""
    count = os.environ["TORCHELASTIC_RESTART_COUNT"]
    (folder / f"worker {agent} {count} {os.getpid()}").touch()
    plain = Trainer.step

    def step(job: Trainer, *batches: Any) -> Any:
        done = job.step_number
        victims = deaths.get(done, ())
        notes = [folder / f"death {done} {victim}" for victim in victims]
        if agent in victims and not notes[victims.index(agent)].exists():
            wait_until(lambda: any(found.step >= done - 1 for found in list_candidates(job.folder)))
            notes[victims.index(agent)].touch()
            wait_until(lambda: all(note.exists() for note in notes))
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(job, *batches)

    Trainer.step = step  # type: ignore[method-assign]
    status = main(words)
    if status:
        raise SystemExit(status)


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def workers(folder: Path) -> list[tuple[int, ...]]:
    """Return (agent, its count of restarts, process) of each rank that was started, in order."""
    return sorted(tuple(map(int, note.name.split()[1:])) for note in folder.glob("worker *"))


def train_by_two_agents(folder: Path, *words: str, deaths: Deaths, late_s: float = 0.0) -> None:
    """Let two agents, of which one may join late, train a run in ``folder/out`` to its end."""
    arguments = ["train", str(run_file(folder)), "--folder", str(folder / "out"), *words]
    port, agents = free_port(), list[Any]()
    with one_at_a_time():
        try:
            for number in range(2):
                time.sleep(late_s * number)
                args = number, port, folder, arguments, deaths
                agents.append(fork_server().Process(target=serve_as_agent, args=args))
                agents[-1].start()
            for agent in agents:
                agent.join(LIMIT_S)
            assert [agent.exitcode for agent in agents] == [0, 0]
        finally:
            for pid in (*(agent.pid for agent in agents), *(each[-1] for each in workers(folder))):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def starts(out: Path) -> list[int]:
    """Return the steps from which a run went on."""
    return [event["step"] for event in History.read(out).events if event["event"] == "start"]


def losses(out: Path) -> list[tuple[int, int, float]]:
    return [(line["step"], line["tokens"], line["lm_loss"]) for line in History.read(out).lines]


@pytest.mark.slow
def test_ranks_that_torchrun_starts_again_go_on_with_the_same_data(tmp_path: Path) -> None:
    """Cases 1, 11: one agent counts two restarts more; then four forks; beside one rank."""
    alone, out = tmp_path / "alone", tmp_path / "out"
    with Trainer(load_run(run_file(tmp_path)), alone, [MetricsHook()]) as job:
        job.train()
    train_by_two_agents(tmp_path, "--until", "10", deaths={3: [1], 5: [1], 7: [0, 1]})
    assert starts(out) == [0, 2, 4, 6]
    counts = [each[:2] for each in workers(tmp_path)]
    assert counts == [(0, 0), (0, 0), (0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]
    with one_at_a_time():
        assert main(["train", "--folder", str(out), "--nproc", "4"]) == 0
    found, unbroken = losses(out), losses(alone)
    assert [line[:2] for line in found] == [line[:2] for line in unbroken]
    for (_, _, ours), (_, _, theirs) in zip(found, unbroken, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-10)


def test_an_agent_that_joins_late_meets_one_that_restarts_its_rank(tmp_path: Path) -> None:
    train_by_two_agents(tmp_path, "--until", "6", deaths={3: [0]}, late_s=0.5)
    assert [line[0] for line in losses(tmp_path / "out")] == [1, 2, 3, 4, 5, 6]
    assert starts(tmp_path / "out") == [0, 2]
    assert [each[:2] for each in workers(tmp_path)] == [(0, 0), (0, 1), (1, 0), (1, 0)]
