"""Forks go on with the data where each source stopped, compared with a list of every token."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.config.base import to_dict
from moefold.config.load import load
from moefold.data.config import BatchSizes, Data
from moefold.data.loader import Loader
from moefold.data.order import OrderStart
from moefold.data.prepare import PreparedData, prepare
from moefold.run import Run
from moefold.training.continuation import RepeatedData, continue_data
from moefold.training.state import Progress
from tests.cpu.runs import WORDS, raw_run
from tests.plain import Token, tokens_of

NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreparedData, Run]:
    """Three sources of about 900, 500 and 300 tokens, and a run that reads them."""
    folder = tmp_path_factory.mktemp("forks")
    for number, (name, documents) in enumerate(zip(NAMES, (150, 80, 50), strict=True)):
        draws = Random(number)
        texts = [" ".join(draws.choices(WORDS, k=draws.randint(1, 9))) for _ in range(documents)]
        (folder / f"{name}.txt").write_text("|".join(texts))
    sources = [
        {"source": "text", "name": name, "files": [f"{folder}/{name}.txt"], "split": "|"}
        for name in NAMES
    ]
    data = {"seq": 8, "tokenizer": {"kind": "bpe", "vocab": 290}, "train": sources}
    run = load(Run, raw_run(folder, data=data)).record
    found = prepare(run.data, folder / "out")

    return found, run


class Plain:
    """A run as a plain list: what each leg read, by source."""

    def __init__(self, prepared: PreparedData, run: Run) -> None:
        self._prepared, self._run = prepared, run
        self.progress, self.meta = Progress(), dict[str, Any]()
        self.stored: dict[str, Any] = {}
        self.seen = Counter[Token]()
        self.segments: dict[str, list[range]] = {}
        self.lines: list[str] = []

    def leg(self, ranks: int = 1, **how: Any) -> dict[str, tuple[int, int]]:
        """Read some steps of a fork; return tokens that repeat by source: as said, as counted."""
        run, loader = self.fork(ranks, **how)
        self.segments = {name: [] for name in NAMES}
        index = self.progress.next_batch_index()
        end = index + how["steps"]
        said = {one.name: one.again for one in loader[0].readings(index, end)}
        expected = {one.name: one.tokens for one in loader[0].readings(index, end)}
        counted, total = Counter[str](), Counter[str]()
        for step in range(index, end):
            before, after = (loader[0].given(i) for i in (step, step + 1))
            assert sum(one != other for one, other in zip(before, after, strict=True))
            for batch in (batch for one in loader for batch in one.load_step(step)):
                for origin, length in zip(batch.sources, batch.lengths, strict=True):
                    self.segments[origin.name].append(range(length))
                for token in tokens_of(batch):
                    counted[token.name] += token in self.seen
                    total[token.name] += 1
                    self.seen[token] += 1
        self.progress = replace(self.progress, step=self.progress.step + how["steps"])
        self.stored = to_dict(run)
        assert {name: total[name] for name in expected} == expected
        sources = [one.to_dict() for one in loader[0].given(end)]
        self.meta = {
            "run": self.stored,
            "data": loader[0].fingerprint(),
            "sources": json.loads(json.dumps(sources)),
        }
        return {name: (said[name], counted[name]) for name in said}

    def run_of(
        self,
        weights: tuple[int, ...],
        seq: int,
        batch: int,
        seed: int,
        steps: int = 1,
        repeat: str = "allow",
    ) -> Run:
        """Return the run of a leg."""
        by_name = {name: float(w) for name, w in zip(NAMES, weights, strict=True) if w}
        sources = tuple(
            source.model_copy(update={"weight": by_name[source.label]})
            for source in self._run.data.train
            if source.label in by_name
        )
        data = self._run.data.model_copy(update={"seq": seq, "train": sources})
        steps += self.progress.step
        train = {"steps": steps, "batch": batch, "micro_batch": 1, "repeat": repeat}
        train = self._run.train.model_copy(update=train)
        return self._run.model_copy(update={"seed": seed, "data": data, "train": train})

    def fork(self, ranks: int = 1, **how: Any) -> tuple[Run, list[Loader]]:
        """Open a fork's loaders, one per data rank, and let them go on."""
        run = self.run_of(**how)
        data, train = run.data, run.train
        parts = {part.name: part for part in self._prepared.train}
        train_parts = tuple(
            replace(parts[source.label], weight=source.weight) for source in data.train
        )
        sources = replace(self._prepared, train=train_parts)
        loaders = [
            Loader(sources, data.seq, train.batch, 1, run.seed, rank=rank, ranks=ranks)
            for rank in range(ranks)
        ]
        if self.meta:
            first = self.progress
            for loader in loaders:
                self.progress, self.lines = continue_data(
                    first, self.meta, self.stored, run, loader
                )
            # What a checkpoint keeps is enough to go on, with any number of ranks.
            self.progress = Progress.from_dict(json.loads(json.dumps(self.progress.to_dict())))
            for loader in loaders:
                loader.start_order(self.progress.order, self.progress.sequence_offset)
        return run, loaders


LEG = st.fixed_dictionaries(
    {
        "weights": st.tuples(*[st.sampled_from((0, 1, 9))] * 3).filter(any),
        "seq": st.sampled_from((5, 8, 8, 13, 16)),
        "batch": st.sampled_from((2, 3, 6)),
        "seed": st.sampled_from((1, 1, 2)),
        "steps": st.integers(1, 9),
        "ranks": st.sampled_from((1, 2)),
    }
)
BEGUN = {"weights": (9, 1, 0), "seq": 8, "batch": 5, "seed": 1}
"""A run of two sources, of which "a" is read nine times as often."""


@settings(max_examples=30, deadline=None, database=None)
@given(st.lists(LEG, min_size=2, max_size=4))
def test_nothing_repeats_before_its_source_is_used_up(
    prepared: tuple[PreparedData, Run], legs: list[dict[str, Any]]
) -> None:
    """Weights, length, batch, seed, sources, ranks, epochs: what is said to repeat is what does.

    An epoch leaves out fewer tokens than a sequence has, and counts them as read.
    """
    plain = Plain(*prepared)
    sizes = {part.name: part.corpus.n_tokens for part in prepared[0].train}
    shortest, repeated = 99, set[str]()
    for leg in legs:
        before = replace(plain.progress)
        shortest = min(shortest, leg["seq"])
        try:
            counts = plain.leg(**leg, repeat="refuse")
        except RepeatedData as error:
            plain.progress = before
            if leg["seq"] > shortest:  # "allow" would begin epochs again
                return
            counts = plain.leg(**leg, repeat="allow")
            for name, (said, _) in counts.items():
                assert f"{said:,} of them again" in str(error) or name in repeated or not said
        repeated = {name for name, (said, _) in counts.items() if said}
        for said, counted in counts.values():
            assert 0 <= said - counted < 16, "what is said to repeat is not what does"
        for name, size in sizes.items():
            times = [n for token, n in plain.seen.items() if token.name == name]
            assert max(times, default=0) <= 1 + sum(times) // (size - 15), "repeated too early"


def test_another_mixture_reads_on_in_each_source(prepared: tuple[PreparedData, Run]) -> None:
    """Plant: count the new mixture from the start of the run."""
    plain = Plain(*prepared)
    plain.leg(**BEGUN, steps=8)
    counts = plain.leg(**{**BEGUN, "weights": (1, 9, 0)}, steps=8, repeat="refuse")
    assert counts == {"a": (0, 0), "b": (0, 0)}
    sizes = [part.corpus.n_tokens for part in prepared[0].train]
    assert plain.lines == [
        f"a: 288 of {sizes[0]:,} tokens trained; 32 more to step 16, none of them again",
        f"b: 32 of {sizes[1]:,} tokens trained; 288 more to step 16, none of them again",
    ]


def test_what_is_used_up_is_refused_with_counts_and_can_be_allowed(
    prepared: tuple[PreparedData, Run],
) -> None:
    plain = Plain(*prepared)
    plain.leg(**BEGUN, steps=8)
    size = prepared[0].train[1].corpus.n_tokens
    steps = size // 32
    how = {**BEGUN, "weights": (1, 9, 0), "steps": steps}
    read = 8 * (steps * 5 * 9 // 10)
    began, again = plain.progress, 32 + read - size // 8 * 8
    with pytest.raises(RepeatedData, match=rf"(?s)\n  b: 32 .*{again} of them again.*allow"):
        plain.leg(**how, repeat="refuse")
    plain.progress = began
    counts = plain.leg(**how, repeat="allow")
    assert counts["a"] == (0, 0) and counts["b"][0] == again
    assert again - size % 8 <= counts["b"][1] <= again


def test_a_run_that_repeats_as_it_was_stated_is_not_refused(
    prepared: tuple[PreparedData, Run],
) -> None:
    """Its small source was repeated, or was to be, before the change."""
    plain = Plain(*prepared)
    how = {"weights": (9, 0, 9), "seq": 8, "batch": 6, "seed": 1}
    plain.leg(**how, steps=30)
    counts = plain.leg(**{**how, "batch": 4}, steps=3, repeat="refuse")
    assert counts["a"] == (0, 0) and counts["c"][0] == 8 * 6


def test_a_source_that_was_left_out_goes_on_when_it_comes_back(
    prepared: tuple[PreparedData, Run],
) -> None:
    """Plant: drop the count of a source that is not read, or go by its position in the list."""
    plain = Plain(*prepared)
    plain.leg(**BEGUN, steps=6)
    counts = plain.leg(**{**BEGUN, "weights": (0, 1, 1)}, steps=6, repeat="refuse")
    assert counts == {"b": (0, 0), "c": (0, 0)}
    counts = plain.leg(**{**BEGUN, "weights": (1, 0, 1)}, steps=6, repeat="refuse")
    assert counts == {"a": (0, 0), "c": (0, 0)}
    assert plain.lines[0].startswith("a: 216 of ")


def test_longer_sequences_keep_the_epoch_or_begin_another(
    prepared: tuple[PreparedData, Run],
) -> None:
    """What is left has been cut; its short contexts are said, and what it costs to cut it anew."""
    longer = {**BEGUN, "seq": 16}
    for repeat, what in (("refuse", "stays below"), ("allow", "288 of its tokens were trained")):
        plain = Plain(*prepared)
        plain.leg(**BEGUN, steps=8)
        counts = plain.leg(**longer, steps=3, repeat=repeat)
        assert what in "\n".join(plain.lines)
        lengths = {len(tuple(tokens)) for tokens in plain.segments["a"]}
        assert (max(lengths) > 8) == (repeat == "allow")
        if repeat == "refuse":
            assert counts == {"a": (0, 0), "b": (0, 0)}
    size = prepared[0].train[0].corpus.n_tokens
    plain = Plain(*prepared)
    plain.leg(**BEGUN, steps=8)
    steps = -(-(size // 16) // 5)
    whole = plain.leg(**{**longer, "weights": (9, 0, 0)}, steps=steps, repeat="allow")
    assert 288 - 16 < whole["a"][1] <= 288 + 16 * (5 * steps - size // 16)


def test_checkpoints_with_one_position_are_converted(
    prepared: tuple[PreparedData, Run],
) -> None:
    """Of earlier versions, forks with another batch among them; a changed record is another
    source."""
    plain = Plain(*prepared)
    plain.leg(**BEGUN, steps=7)
    stated = plain.fork(**{**BEGUN, "weights": (1, 9, 0)}, steps=5, repeat="refuse")[1][0]
    expected = stated.given(plain.progress.step)
    earlier = Plain(*prepared)
    earlier.leg(**{**BEGUN, "batch": 1}, steps=5)
    # Five steps of one sequence, then six of five.
    earlier.progress = Progress.from_dict(
        {"step": 11, "tokens": 9, "excluded": [], "sequence_offset": -20}
    )
    earlier.stored = to_dict(prepared[1].model_copy(update={
        "data": plain.run_of(**BEGUN).data, "train": plain.run_of(**BEGUN).train}))  # fmt: skip
    earlier.meta = {"run": earlier.stored, "data": "of another version"}
    again = earlier.fork(**{**BEGUN, "weights": (1, 9, 0)}, steps=5, repeat="refuse")[1][0]
    assert again.given(earlier.progress.step) == expected
    assert earlier.progress.first_sequence(BatchSizes(((0, 5),))) == 35


def test_an_unchanged_order_stays_as_it_is(prepared: tuple[PreparedData, Run]) -> None:
    """A fork that changes the optimizer alone reads what the run would have read."""
    plain = Plain(*prepared)
    unbroken = Plain(*prepared).fork(**BEGUN, steps=20)[1][0]
    plain.leg(**BEGUN, steps=8)
    fork = plain.fork(**BEGUN, steps=4, repeat="refuse")[1][0]
    assert plain.progress.order == OrderStart()
    for step in (3, 8, 11):
        assert fork.load_step(step)[0].sources == unbroken.load_step(step)[0].sources


def test_steps_before_a_changed_order_are_not_made_up(prepared: tuple[PreparedData, Run]) -> None:
    plain = Plain(*prepared)
    plain.leg(**BEGUN, steps=8)
    fork = plain.fork(**{**BEGUN, "seq": 5}, steps=4, repeat="refuse")[1][0]
    assert fork.load_step(8)
    with pytest.raises(ValueError, match="step 7 is before"):
        fork.load_step(7)


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"files": ["{0}/a.txt", "{0}/c.txt"]}, True),
        ({"holdout": 0.3}, True),
        ({"files": ["{0}/c.txt"]}, False),
        ({"name": "renamed"}, False),
    ],
)
def test_a_source_whose_files_changed_is_told_from_another_one(
    prepared: tuple[PreparedData, Run], tmp_path: Path, change: dict[str, Any], refused: bool
) -> None:
    """Files added to it, or another split: what was trained is in it again, and is counted."""
    plain = Plain(*prepared)
    plain.leg(**BEGUN, steps=8)
    folder = Path(prepared[1].data.train[0].files[0]).parent  # type: ignore[attr-defined]
    change = json.loads(json.dumps(change).replace("{0}", str(folder)))
    run = plain.run_of(**BEGUN, steps=4, repeat="refuse")
    first, second = run.data.train
    tokenizer = {"kind": "file", "path": str(prepared[0].folder / "tokenizer.json")}
    data = {
        "seq": 8,
        "tokenizer": tokenizer,
        "train": [{**to_dict(first), **change}, to_dict(second)],
    }
    run = run.model_copy(update={"data": load(Data, data).record})
    loader = Loader(prepare(run.data, tmp_path), 8, 5)
    if refused:
        with pytest.raises(RepeatedData, match=r"a: its tokens .* 288 tokens of it were trained"):
            continue_data(plain.progress, plain.meta, plain.stored, run, loader)
        return
    _, lines = continue_data(plain.progress, plain.meta, plain.stored, run, loader)
    given = " 288 of " if "name" in change else " 0 of "
    assert given in lines[0] and "none of them again" in lines[0]
