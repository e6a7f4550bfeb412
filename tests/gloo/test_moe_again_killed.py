"""A rank that dies while a step is made again is replaced; the run ends as an unbroken one."""

from pathlib import Path

import fault_injection as faults
import pytest
import torch
from fault_injection import computed

from moefold.comm.elastic import launch_elastic
from moefold.config.load import load
from moefold.run import Run
from moefold.training.run_folder import History
from tests.cpu.runs import raw_run
from tests.gloo.harness import one_at_a_time
from tests.gloo.test_faults_recover import QUICK, recoveries

STEPS = 10
DIES = """
import os, signal
from pathlib import Path

import torch

from moefold.parallel import limits
from moefold.training import step

NOTE, PASSES, REAL = Path(r"{note}"), [], (limits.missing_room, step._pass)


def missing(parts, overflow):
    found = REAL[0](parts, overflow)
    PASSES.append(parts.world.rank)
    flagged = overflow and parts.world.rank == 1 and len(PASSES) % 4 == 3
    return torch.full_like(found, 3) if flagged else found


def again(*given, exact=False):
    if exact and given[0].parts.world.rank == 1 and NOTE.exists():
        NOTE.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return REAL[1](*given, exact=exact)


limits.missing_room, step._pass = missing, again
"""
"""On the first second try of a run whose note is there, one rank dies."""


def trained(folder: Path, dies: bool) -> History:
    """Train on two ranks, of which one lacks room now and then."""
    folder.mkdir()
    plugin, note = folder / "dies.py", folder / "note"
    plugin.write_text(DIES.replace("{note}", str(note)), "utf-8")
    if dies:
        note.touch()
    raw = raw_run(
        folder,
        train={"steps": STEPS, "batch": 4, "micro_batch": 1, "precision": "fp64"},
        watch={"progress": {"style": "off"}, "plots": None, "time_out_s": 20},
        layout={"sizes": "ep2", "dispatch": {"kind": "padded", "max_rows": 4096}},
    )
    run, out = load(Run, {**raw, "uses": [str(plugin)]}).record, folder / "out"
    (folder / "notes").mkdir()
    with one_at_a_time():
        given = (run, out, folder / "notes", STEPS)
        assert launch_elastic(faults.train_rank, 2, *given, record=QUICK, time_out_s=20) == STEPS
    assert not note.exists()
    return History.read(out)


@pytest.mark.matrix
def test_a_rank_that_dies_in_a_second_try_is_recovered(tmp_path: Path) -> None:
    """Losses and norms are those of the run in which none died, to the bit."""
    broken, whole = trained(tmp_path / "broken", True), trained(tmp_path / "whole", False)
    assert len(recoveries(broken)) == 1 and not recoveries(whole)
    keys = ("lm_loss", "grad_norm")
    one, other = (
        [[step.get(key) for key in keys] for step in computed(history)]
        for history in (broken, whole)
    )
    assert one == other and len(one) == STEPS
    assert torch.tensor(one, dtype=torch.float64).isfinite().all()
