"""Ranks and CUDA devices, on a machine without any: what is refused, and what a device is at."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from moefold.cli.main import main
from moefold.comm.environment import RankInfo, rank_info_from_env
from moefold.comm.recorder import CallSite, Recorder
from moefold.comm.rendezvous import cuda_device, join
from moefold.comm.world import _mark_queued_work
from tests.pure.test_comm_environment import SLURM, TORCHRUN


@pytest.fixture
def eight_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch say that this machine has eight devices."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)

    def start(*args: Any, **how: Any) -> int:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("moefold.comm.launch.launch", start)
    monkeypatch.setattr("moefold.comm.elastic.launch_elastic", start)


@pytest.mark.usefixtures("eight_devices")
def test_two_ranks_do_not_share_a_device(capsys: Any) -> None:
    with pytest.raises(ValueError, match="rank 8 needs CUDA device 8, but its machine has 8"):
        join(RankInfo(8, 16, 8, "127.0.0.1", 0, store_running=True), 1.0, "cuda")
    assert main(["train", "tiny", "--nproc", "16", "train.batch=16"]) == 2
    assert "16 ranks and 8 CUDA devices here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("started", "seen", "number"), [(SLURM, 8, 1), (SLURM, 1, 0), (TORCHRUN, 8, 1)]
)
def test_a_rank_that_sees_its_own_device_alone_takes_it(
    started: dict[str, str], seen: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Slurm shows it with --gpus-per-task=1; torchrun shows all devices to all ranks."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    info = rank_info_from_env(started)
    assert info is not None and info.local_rank == 1
    assert cuda_device(info) == torch.device("cuda", number)


@pytest.mark.usefixtures("eight_devices")
def test_ranks_on_devices_are_started_anew_as_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def start(function: Any, nproc: int, *args: Any, **how: Any) -> int:
        given.extend([nproc, how["device"], how["record"].every])
        return 0

    monkeypatch.setattr("moefold.comm.elastic.launch_elastic", start)
    assert main(["train", "tiny", "--nproc", "2", "watch.survive={every: 3}"]) == 0
    assert given == [2, "cuda", 3]


def test_a_device_that_has_done_all_waits_for_nothing() -> None:
    queued, reached = 0, 0

    def mark() -> Callable[[], bool]:
        nonlocal queued
        queued += 1
        return lambda place=queued: reached >= place

    recorder, x = Recorder(mark=mark), torch.ones(1)
    for op, channel in (("all_reduce", "dp@0"), ("send", "pp:0>1"), ("all_reduce", "dp@0")):
        site = CallSite("", op, channel)
        recorder.end(recorder.begin(site, channel, (0, 1), x, 4, True))
    assert [open_.record.channel for open_ in recorder.waiting()] == ["pp:0>1", "dp@0"]
    reached = 2
    assert [open_.record.number for open_ in recorder.waiting()] == [2]
    reached = 3
    assert not recorder.waiting(), "the device is idle, and nobody is waited for"


def test_what_is_captured_for_a_graph_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA refuses to, which would end the watch over the rank, and spoil the capture."""

    class Event:
        def record(self) -> None:
            self.captured = torch.cuda.is_current_stream_capturing()

        def query(self) -> bool:
            assert not self.captured, "not permitted on an event last recorded in a capture"
            return False

    monkeypatch.setattr(torch.cuda, "Event", Event)
    recorder, x, waiting = Recorder(mark=_mark_queued_work), torch.ones(1), list[int]()
    for capturing in (True, False):
        answer = partial(bool, capturing)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", answer)
        site = CallSite("", "all_reduce", "tp@0")
        recorder.end(recorder.begin(site, "tp@0", (0, 1), x, 4, True))
        waiting.append(len(recorder.waiting()))
    assert waiting == [0, 1]
