"""A run some of whose steps are made again ends as the one without."""

import json
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from bench import second_tries
from moefold.comm.world import World
from moefold.moe.dispatch.config import Padded
from moefold.optim.norm import clip_scale
from moefold.parallel import limits
from moefold.parallel.config import Layout
from moefold.proof.case import ProofCase
from moefold.proof.rank_run import LOSS_CHUNK, RankRun
from moefold.proof.subjects import SUBJECTS
from moefold.training import step
from tests.gloo.harness import run_ranks

STEPS, FLAGGED = 4, {(1, 1), (0, 2)}
"""Steps of a run, and the ranks that lack room in some."""
LAYOUT = Layout(sizes="ep2", zero=2, dispatch=Padded(max_rows=256))


def ended(rank: int, flagged: bool) -> tuple[dict[str, Tensor], list[int]]:
    """Train a model whose selection bias moves; return this rank's state, and rows that lacked."""
    case = ProofCase("", replace(SUBJECTS["mla"], micro_batches=2), LAYOUT, 2)
    trial = RankRun(case, World.open(case.folding, "cpu", 20))
    data, mixtures = trial.state, [one for _, one in trial.parts.model.moe_layers()]
    lacked, real = [], limits.missing_room

    def missing(parts: object, overflow: list[Tensor]) -> Tensor | None:
        found = real(parts, overflow)  # type: ignore[arg-type]
        if flagged and overflow and found is not None and (rank, len(lacked)) in FLAGGED:
            return torch.full_like(found, 3)
        return found

    with mock.patch.object(limits, "missing_room", missing):
        for _ in range(STEPS):
            figures = step.gradients(data, trial.batches, LOSS_CHUNK)
            lacked.append(figures.needed_rows)
            trial.optimizer.step(clip_scale(figures.grad_norm, 1.0))
            data.refresh_weights()
            for mixture in mixtures:
                mixture.balance.finish_step(mixture.router)
    left = {held.name: held.tensor.clone() for held in data.weights()}
    left |= {held.name: held.tensor.clone() for held in data.optimizer_state(trial.optimizer)}
    for number, mixture in enumerate(mixtures):
        left |= {f"{number}.{name}": one.clone() for name, one in mixture.named_buffers()}
    return left, lacked


def test_a_run_with_steps_made_again_ends_as_the_one_without() -> None:
    """State, selection biases and counters, to the bit: all rows have room in one round."""
    ran = [run_ranks(ended, 2, flagged, time_out_s=60) for flagged in (False, True)]
    for (left, lacked), (again, lacked_again) in zip(*ran, strict=True):
        assert not any(lacked)
        assert [number for number, rows in enumerate(lacked_again) if rows] == [1, 2]
        assert left.keys() == again.keys() and any("selection_bias" in name for name in left)
        assert not [name for name in left if not torch.equal(left[name], again[name])]


@pytest.mark.matrix
def test_so_it_is_of_runs_at_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Their last checkpoints, as after the 300 steps of the demo that the bench makes."""
    words = ["train.batch=4", "--recipe", "tiny", "--steps", "4", "--share", "0.5", "--zero", "3"]
    assert second_tries.main(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert 0 < told["made_again"] < 4 and told["apart"] == 0
