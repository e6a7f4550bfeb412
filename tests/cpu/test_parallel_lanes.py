"""Two lanes: what runs beside what, in which order, shown by tasks that wait for each other."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise

import pytest
import torch

from moefold.parallel.pipeline import lanes as lanes_module
from moefold.parallel.pipeline.lanes import Chain, FillTask, Lanes, LaneTask, State, interleave

CPU = torch.device("cpu")
LIMIT_S = 20.0


def noted(name: str, log: list[str]) -> Callable[..., State]:
    def run(*state: torch.Tensor | None) -> State:
        log.append(name)
        return state

    return run


def chain(names: str, log: list[str]) -> Chain:
    """Return tasks by name: upper case exchanges, a full stop fills."""
    tasks: list[LaneTask | FillTask] = []
    for name in names.split():
        run = noted(name, log)
        tasks.append(FillTask(run) if name.startswith(".") else LaneTask(run, name.isupper()))
    return Chain((), tasks)


def order(*chains: str) -> list[str]:
    log: list[str] = []
    for _, task in interleave([chain(names, log) for names in chains]):
        task.run()
    return log


def test_turns_end_with_an_exchange_and_what_fills_it() -> None:
    back, forth = "C1 e1 D1 .w1 a1 C2 e2 D2 .w2 a2", "b1 P1 f1 Q1 b2 P2 f2 Q2 g"
    expected = "C1 b1 P1 e1 D1 .w1 f1 Q1 a1 C2 b2 P2 e2 D2 .w2 f2 Q2 a2 g"
    assert order(back, forth) == expected.split()


def test_what_a_shorter_chain_leaves_runs_alone() -> None:
    assert order("a A b B c", "x") == ["a", "A", "x", "b", "B", "c"]
    assert order("a", "x X y") == ["a", "x", "X", "y"]


def test_an_exchange_runs_while_the_other_chain_computes() -> None:
    inside, computed = threading.Event(), threading.Event()

    def exchange(*state: torch.Tensor | None) -> State:
        inside.set()
        assert computed.wait(LIMIT_S), "nothing was computed meanwhile"
        return state

    def compute(*state: torch.Tensor | None) -> State:
        assert inside.wait(LIMIT_S), "the exchange has not begun"
        computed.set()
        return state

    with Lanes(CPU) as lanes:
        lanes.run(Chain((), [LaneTask(exchange, is_exchange=True)]), Chain((), [LaneTask(compute)]))


def test_a_task_takes_what_the_one_before_it_left() -> None:
    def doubled(x: torch.Tensor) -> State:
        return (2 * x,)

    one = Chain(
        (torch.ones(2),), [LaneTask(doubled), LaneTask(doubled, True), LaneTask(doubled, True)]
    )
    other = Chain((torch.full((2,), 3.0),), [LaneTask(doubled, True), LaneTask(doubled)])
    with Lanes(CPU) as lanes:
        (left,), (right,) = lanes.run(one, other)
    assert left is not None and right is not None
    assert left.tolist() == [8.0, 8.0] and right.tolist() == [12.0, 12.0]


def test_exchanges_start_in_the_order_in_which_they_were_queued() -> None:
    log: list[str] = []
    with Lanes(CPU) as lanes:
        lanes.run(chain("A b C D", log), chain("P q R S T", log))
    exchanged = [name for name in log if name.isupper()]
    assert exchanged == [n for n in order("A b C D", "P q R S T") if n.isupper()]


def test_an_error_on_the_second_lane_reaches_the_first() -> None:
    def broken(*state: torch.Tensor | None) -> State:
        raise ValueError("no such rank")

    with pytest.raises(ValueError, match="no such rank"), Lanes(CPU) as lanes:
        lanes.run(Chain((), [LaneTask(broken, True), LaneTask(lambda: ())]))


class FakeStream:
    """What a stream's next work comes after, by name."""

    def __init__(self) -> None:
        self.behind: set[str] = set()

    def wait_event(self, event: "FakeEvent") -> None:
        self.behind |= event.behind


class FakeEvent:
    """What a stream had been given when this was recorded in it."""

    def record(self, stream: FakeStream | None = None) -> None:
        self.behind = set((stream or current()).behind)


here = threading.local()


def current() -> FakeStream:
    """Return this thread's stream, a new one at first."""
    if not hasattr(here, "stream"):
        here.stream = FakeStream()
    return here.stream


@contextmanager
def on(stream: FakeStream) -> Iterator[None]:
    before, here.stream = current(), stream
    yield
    here.stream = before


def test_each_lane_waits_for_what_it_takes_from_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Streams of CUDA acted out: work is behind what it takes, and not behind the other chain's."""
    fakes = {"Event": FakeEvent, "current_stream": current, "stream": on, "device": nullcontext}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(lanes_module, "_side_stream", lambda device: FakeStream())
    found: dict[str, set[str]] = {}

    def task(name: str) -> LaneTask:
        def run() -> State:
            found[name] = set(current().behind)
            current().behind.add(name)
            return ()

        return LaneTask(run, name.isupper())

    names = ("aAbBc", "pPqQr")
    with Lanes(torch.device("cuda")) as lanes:
        lanes.run(*(Chain((), [task(name) for name in chain]) for chain in names))
    for chain in names:
        for before, after in pairwise(chain):
            assert before in found[after], f"{after} does not wait for {before}"
    assert "p" not in found["A"] and "P" not in found["b"]
