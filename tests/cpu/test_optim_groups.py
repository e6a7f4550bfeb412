"""Rates and weight decay of groups of parameters: as if each group had an optimizer of its own."""

from pathlib import Path
from typing import Any

import pytest

from moefold.config.errors import RunError
from moefold.config.slot import build
from moefold.optim.config import AdamW, AdamWRule, Lion, Muon, Optim, ParameterGroup, Sgd
from moefold.proof.shrink import small_optimizer
from moefold.run import load_run
from tests.cpu.runs import job_of
from tests.cpu.test_optim_adamw import equal, give_gradients, parameters, run

GROUPS = (
    ParameterGroup(names=("embedding.*",), lr=0.04),
    ParameterGroup(names=("*.experts.*",), weight_decay=0.5, lr=0.005),
    ParameterGroup(names=("*norm*", "*.w_in"), weight_decay=0.9),
)
"""The third has what is left of its names: a norm, which never decays."""


def tuned(record: Optim, group: ParameterGroup) -> Optim:
    """Return the record of an optimizer that has a group's parameters alone."""
    changes: dict[str, Any] = {"groups": ()}
    stated = {k: v for k in ("lr", "weight_decay") if (v := getattr(group, k)) is not None}
    if isinstance(record, Muon):
        changes["rest"] = record.rest.model_copy(update=stated)
    return record.model_copy(update=changes | stated)


@pytest.mark.parametrize(
    "record",
    [AdamW(lr=0.01), Sgd(lr=0.01, weight_decay=0.1), Lion(lr=0.01),
     Muon(lr=0.01, rest=AdamWRule(lr=0.02), rest_names=("embedding*",))],
    ids=lambda record: record.kind,
)  # fmt: skip
def test_groups_are_updated_as_by_optimizers_of_their_own(record: Optim) -> None:
    ours = {n: p for n, p in parameters().items() if p.numel()}
    theirs = {n: p for n, p in parameters().items() if p.numel()}
    whole = build(record.model_copy(update={"groups": GROUPS}), ours)
    run(whole, range(3))
    expected = whole.lr(0.5)
    assert (expected["embedding.*"], expected["*.experts.*"]) == (0.02, 0.0025)
    assert expected[record.kind] == 0.005 and "*norm*+*.w_in" not in expected
    left = dict(theirs)
    for group in GROUPS:
        of_group = {n: left.pop(n) for n in list(left) if group.matches(n)}
        assert of_group
        run_like(tuned(record, group), of_group, theirs)
    run_like(record, left, theirs)
    assert equal(ours, theirs)


def run_like(record: Optim, some: dict[str, Any], everything: dict[str, Any]) -> None:
    """Take three steps of some parameters with the gradients that they have among all."""
    optimizer = build(record, some)
    for step in range(3):
        give_gradients(everything, step)
        optimizer.step(lr_factor=1 / (1 + step))


def test_a_run_states_its_groups_and_trains_by_them(tmp_path: Path) -> None:
    """At rate zero head and embedding stay; figures show each rate."""
    optim = {"kind": "adamw", "lr": 0.01, "groups": [{"names": ["embedding", "head"], "lr": 0.0}]}
    with job_of(tmp_path, optim=optim) as job:
        before = {n: p.detach().clone() for n, p in job.state.params.items()}
        figures = job.step()
        moved = {n for n, p in job.state.params.items() if not p.equal(before[n])}
    assert (figures["lr"], figures["lr/embedding+head"]) == (0.01, 0.0)
    assert before.keys() - moved == {"embed.weight", "head.weight"}


def test_a_name_that_no_trained_parameter_has_is_refused() -> None:
    for name, more in (("*.ruoter.*", []), ("router", ["train.freeze=['*.router.*']"])):
        given = f"optim.groups=[{{names: ['{name}'], lr: 0.1}}]"
        with pytest.raises(RunError, match=r"optim\.groups\[0\]\.names\[0\]"):
            load_run("tiny", [given, *more])
    with pytest.raises(RunError, match="must be set, or weight_decay"):
        load_run("tiny", ["optim.groups=[{names: [router]}]"])


def test_a_proof_keeps_the_ratio_of_rates() -> None:
    small = small_optimizer(AdamW(lr=0.01, groups=GROUPS))
    assert isinstance(small, Optim)
    rates = [group.lr and group.lr / small.lr for group in small.groups]
    assert rates == [4.0, 0.5, None]
