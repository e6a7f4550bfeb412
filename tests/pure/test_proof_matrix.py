"""The matrix: how many layouts, all legal and different, and what they must have among them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import pytest
from proof_selection import selection

from moefold.layers.config import CONTEXT, RECOMPUTE
from moefold.mesh.config import ORDERS
from moefold.moe.config import BALANCE, Aux
from moefold.moe.dispatch.config import DISPATCH, Dispatch, ThirdParty
from moefold.optim.config import OPTIMIZER
from moefold.parallel.config import Layout
from moefold.proof.case import ProofCase
from moefold.proof.matrix import RULES, matrix
from moefold.proof.shrink import shrink
from moefold.proof.subjects import SUBJECTS
from moefold.run import load_run, recipes
from moefold.schedule.config import SCHEDULE

WANTED = 150
OWN_DISPATCHERS = {k for k, record in DISPATCH.kinds.items() if not issubclass(record, ThirdParty)}
"""Those of other packages send bf16 rows of GPUs, and nothing in fp64 on a CPU."""


@pytest.fixture(scope="module")
def cases() -> tuple[ProofCase, ...]:
    return tuple(case for found in matrix().values() for case in found)


def test_there_are_enough_and_each_is_legal_and_once(cases: tuple[ProofCase, ...]) -> None:
    assert len(cases) >= WANTED
    assert len({case.layout for case in cases}) >= WANTED
    assert not {name: n for name, n in Counter(case.name for case in cases).items() if n > 1}
    assert not {case.name: words for case in cases if (words := list(case.broken_rules()))}
    assert {case.world for case in cases} == {2, 4, 8}


def test_a_case_that_breaks_a_rule_says_which_option_of_the_layout_does() -> None:
    first, *_, last = ProofCase("odd", SUBJECTS["gqa"], Layout(sizes="tp3"), 4).broken_rules()
    assert first == "layout.sizes = 'tp3': tp must divide the number of attention heads (8)"
    assert last.startswith("world = 4: must be a multiple of")


def test_no_bound_of_a_narrow_format_lets_half_a_gradient_go(cases: tuple[ProofCase, ...]) -> None:
    """Of eight layers in 16 bits it grew to 17."""
    for precision in ("fp32", "bf16"):
        lowered = [replace(case, precision=precision) for case in cases]
        assert max(case.rounding_bound("gradients") for case in lowered) < 0.5
        assert max(case.rounding_bound("evaluation") for case in lowered) < 0.005


def test_every_rule_gives_some() -> None:
    assert not [name for name, found in matrix().items() if not found]
    assert all(make.__doc__ for make in RULES.values())


def kinds_of(cases: tuple[ProofCase, ...], part: str) -> set[str]:
    records = (getattr(case.layout, part) for case in cases)
    return {record.kind for record in records if record is not None}


def test_every_kind_of_each_slot_is_there(cases: tuple[ProofCase, ...]) -> None:
    assert kinds_of(cases, "dispatch") == OWN_DISPATCHERS
    assert kinds_of(cases, "schedule") == set(SCHEDULE.kinds)
    assert kinds_of(cases, "context") == set(CONTEXT.kinds)
    assert kinds_of(cases, "recompute") == set(RECOMPUTE.kinds)
    assert {case.subject.optim.kind for case in cases} == set(OPTIMIZER.kinds)  # type: ignore[attr-defined]
    assert {case.layout.order for case in cases} == set(ORDERS)
    assert {case.layout.zero for case in cases} == {0, 1, 2, 3}


def test_every_recipe_is_there(cases: tuple[ProofCase, ...]) -> None:
    """Recipes that differ in size alone are one model when they are made small."""
    tried = {replace(case.subject, micro_batches=0) for case in cases}
    for name in recipes():
        small = shrink(load_run(name, ["layout={}"]), [Layout(sizes="pp2 ep2 etp2")])
        assert replace(small, micro_batches=0) in tried, name


def test_every_population_of_every_term_stands_alone(cases: tuple[ProofCase, ...]) -> None:
    alone = set()
    for case in cases:
        for block in case.subject.decoder.blocks:
            terms = getattr(block.ffn, "balance", ())
            if len(terms) == 1:
                alone.add((terms[0].kind, getattr(terms[0], "over", None)))
    assert {kind for kind, _ in alone} == set(BALANCE.kinds)
    overs = {over for kind, over in alone if kind == "aux"}
    assert overs == set(Aux.model_fields["over"].annotation.__args__)  # type: ignore[union-attr]


def axes_of(case: ProofCase) -> set[str]:
    folding = case.folding
    sizes = {**dict(folding.sizes), "dp": folding.dp, "edp": folding.edp}
    return {axis for axis, size in sizes.items() if size > 1}


def test_expert_parallelism_folds_over_every_axis_of_attention(
    cases: tuple[ProofCase, ...],
) -> None:
    """A group of ``ep`` holds ranks that differ in tp, in cp, in dp; and in all of them at once."""
    crossed: set[frozenset[str]] = set()
    for case in cases:
        folding = case.folding
        spots = [folding.attention_coordinates(rank) for rank in folding.group("ep", 0)]
        differ = {a for a in ("tp", "cp", "dp") if len({getattr(spot, a) for spot in spots}) > 1}
        crossed.add(frozenset(differ))
    wanted = [{"tp"}, {"cp"}, {"dp"}, {"tp", "cp"}, {"tp", "dp"}, {"cp", "dp"}, {"tp", "cp", "dp"}]
    assert not [axes for axes in wanted if frozenset(axes) not in crossed]
    sizes = [case.layout.split for case in cases]
    assert any(s.etp > s.tp > 1 for s in sizes) and any(s.tp > s.etp > 1 for s in sizes)
    assert any(s.tp > 1 and s.etp == 1 for s in sizes) and any(s.etp > 1 == s.tp for s in sizes)


def test_pipelines_are_even_uneven_empty_and_virtual(cases: tuple[ProofCase, ...]) -> None:
    for kind in SCHEDULE.kinds:
        mine = [case for case in cases if getattr(case.layout.schedule, "kind", None) == kind]
        stages = [case.layout.stages_of(case.subject.decoder) for case in mine]
        assert any(not letters for s in stages for letters in s.letters), kind
        counts = [[sum(letter in "tdx" for letter in k) for k in s.letters] for s in stages]
        assert any(max(c) - min(c) > 1 for c in counts), kind
        assert any(max(c) == min(c) for c in counts), kind
        assert any(c.subject.decoder.tied for c in mine), kind
        virtual = {case.layout.split.vpp > 1 for case in mine}
        ranks = [case.layout.split for case in mine]
        for v in virtual:
            assert any((s.vpp > 1) == v and s.pp > 1 for s in ranks), kind


def test_steps_accumulate_and_pack_documents(cases: tuple[ProofCase, ...]) -> None:
    assert all(case.subject.micro_batches // case.folding.dp >= 2 for case in cases)
    assert any(case.subject.empty for case in cases) and any(case.subject.idle for case in cases)


@pytest.fixture
def later_kind() -> Iterator[str]:
    @DISPATCH.register
    class Later(Dispatch):
        """A dispatcher of another day."""

        kind: Literal["of_another_day"] = "of_another_day"
        lanes: int

    yield "of_another_day"
    del DISPATCH.kinds["of_another_day"]


def test_a_kind_that_is_registered_later_is_in_the_matrix(later_kind: str) -> None:
    named = [case for case in matrix()["dispatchers"] if later_kind in case.name]
    assert named and any(case.layout.dispatch.kind == later_kind for case in selection())  # type: ignore[attr-defined]


def test_the_selection_is_small_and_has_each_kind(cases: tuple[ProofCase, ...]) -> None:
    chosen = selection()
    assert set(chosen) < set(cases) and len(chosen) < len(cases) / 4
    assert kinds_of(chosen, "dispatch") == OWN_DISPATCHERS
    for part, slot in (("schedule", SCHEDULE), ("context", CONTEXT)):
        assert kinds_of(chosen, part) == set(slot.kinds)
    assert {axis for case in chosen for axis in axes_of(case)} >= {
        *("tp", "cp", "pp", "vpp", "ep", "etp", "dp", "edp")
    }
