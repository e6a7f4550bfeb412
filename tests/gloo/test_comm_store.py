"""Who may use a run's store: nobody from another address, and nobody without the secret."""

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Timer

import pytest
import torch
import torch.distributed as dist

from moefold.comm import store as stores
from moefold.comm.collectives import sum_
from moefold.comm.environment import RankInfo
from moefold.comm.launch import launch
from moefold.comm.rendezvous import (
    Meeting,
    PrefixStore,
    TCPStore,
    connect,
    serve,
    serve_in_subprocess,
)
from moefold.comm.store import SecretRefused, SecretStore, StoreServer, pack, unpack
from moefold.comm.world import World
from moefold.mesh.config import Sizes
from moefold.mesh.folding import Folding
from tests.gloo.harness import one_at_a_time
from tests.gloo.test_comm_launch import descendants, free_port

SECRET = b"a secret of the run"
TIME_OUT_S = 4.0
LISTENS = "0A"
LOOPBACKS = {"0100007F", "00000000000000000000000001000000"}
"""127.0.0.1 and ::1 as the kernel lists them."""


def listening(pids: list[int]) -> list[str]:
    """Return the addresses at which processes listen, as in ``/proc/net/tcp`` and ``tcp6``."""
    links = {
        os.readlink(file)
        for pid in pids
        for file in Path(f"/proc/{pid}/fd").iterdir()
        if file.is_symlink()
    }
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and f"socket:[{words[9]}]" in links:
                found.append(words[1].partition(":")[0])
    return found


def look(info: RankInfo, launcher: int) -> list[str]:
    """Open the groups of a run, and return where its processes listen."""
    with World.open(Folding(Sizes(), info.world_size), "cpu", 20.0) as world:
        sum_(torch.ones(1), world.group("world"))
        return listening([launcher, *descendants(launcher)]) if info.rank == 0 else []


def test_processes_of_one_machine_listen_on_its_loopback_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever interface an environment names, as those of clusters do."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    before = listening([os.getpid()])
    with one_at_a_time():
        found = launch(look, 2, os.getpid(), time_out_s=20)
    assert len(found) > len(before) + 2, "the store and either rank listen"
    assert set(found) - set(before) <= LOOPBACKS


def test_a_store_beside_a_rank_at_a_loopback_address_listens_there_only() -> None:
    for secret in (b"", SECRET):
        served, port = serve("localhost", 0, TIME_OUT_S, secret)
        with pytest.raises(OSError):
            socket.create_connection((address_of_this_machine(), port), 2).close()
        connect("localhost", port, TIME_OUT_S, secret).set("a", "b")
        if secret:
            served.close()


def address_of_this_machine() -> str:
    """Return an address other than a loopback; the test is skipped if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no other address")
        return str(probe.getsockname()[0])


def test_without_the_secret_no_key_is_read_written_or_listed() -> None:
    port = serve_in_subprocess("", 0, TIME_OUT_S, SECRET)
    known = connect("127.0.0.1", port, TIME_OUT_S, SECRET)
    known.set("moefold watch/alarm", "0")
    for wrong in (b"a secret of another run", SECRET[:-1]):
        with pytest.raises(SecretRefused, match="does not take this rank's secret"):
            SecretStore(address_of_this_machine(), port, wrong, TIME_OUT_S)
    with pytest.raises(RuntimeError):
        TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=1))
    with socket.create_connection(("127.0.0.1", port), 5) as stranger:
        stranger.settimeout(5)
        stranger.recv(stores.CHALLENGE_BYTES)
        # Requests are read only after the proof; these take the place of one.
        for request in ([b"set", b"moefold watch/alarm", b"9"], [b"count"]):
            stranger.sendall(pack(request).ljust(64, b"\0"))
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert known.get("moefold watch/alarm") == b"0" and known.num_keys() == 1


def test_who_does_not_know_the_secret_is_no_store() -> None:
    """A server that repeats what it is sent does not pass for one that knows the secret."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def answer() -> None:
            connection, _ = impostor.accept()
            with connection:
                connection.sendall(bytes(stores.CHALLENGE_BYTES))
                heard = connection.recv(64)
                connection.sendall(heard[stores.CHALLENGE_BYTES :].ljust(32, b"\0"))
                connection.recv(1)

        Timer(0.0, answer).start()
        with pytest.raises(SecretRefused, match="does not know this rank's secret"):
            SecretStore("127.0.0.1", impostor.getsockname()[1], SECRET, TIME_OUT_S)


def test_operations_are_those_of_torchs_store() -> None:
    server = StoreServer(SECRET, "127.0.0.1")
    _served, port = serve("127.0.0.1", 0, TIME_OUT_S)
    answers = []
    for store in (
        connect("127.0.0.1", server.port, TIME_OUT_S, SECRET),
        connect("127.0.0.1", port, TIME_OUT_S),
    ):
        keys = PrefixStore("a", PrefixStore("b", store))
        said: list[object] = [keys.add("n", 2), keys.add("n", 3), keys.get("n")]
        keys.set("text", "word")
        said += [keys.get("text"), keys.check(["n", "text"]), keys.check(["n", "none"])]
        said += [keys.compare_set("text", "no", "new"), keys.compare_set("text", "word", "new")]
        said += [keys.compare_set("made", "", "first"), keys.compare_set("none", "is", "first")]
        said += [store.delete_key("b/a/made"), store.delete_key("b/a/made")]
        with pytest.raises(RuntimeError):
            keys.wait(["none"], timedelta(seconds=0.1))
        answers.append(said)
    server.close()
    assert answers[0] == answers[1]
    with pytest.raises(RuntimeError, match="no store at"):
        connect("127.0.0.1", free_port(), 0.1, SECRET)


def test_a_wait_ends_when_another_connection_sets_the_key() -> None:
    server = StoreServer(SECRET, "127.0.0.1")
    one, other = (SecretStore("127.0.0.1", server.port, SECRET, TIME_OUT_S) for _ in range(2))
    Timer(0.2, other.set, ("late", b"value")).start()
    assert one.get("late") == b"value"
    server.close()


@pytest.mark.parametrize("body", [b"\0\0\0", b"\0\0\0\5word", b"\xff\xff\xff\xff"])
def test_a_message_whose_lengths_do_not_add_up_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"length|longer"):
        unpack(body)


def test_a_rank_does_not_meet_those_of_an_earlier_start() -> None:
    """A store that outlives the ranks holds the whole round before."""
    store, rounds = dist.HashStore(), list[str]()
    leader, follower = (RankInfo(rank, 2, rank, "127.0.0.1", 0) for rank in range(2))
    with ThreadPoolExecutor(2) as threads:
        for _ in range(2):
            early = threads.submit(Meeting(store, follower, TIME_OUT_S).hold, None)
            time.sleep(0.1)
            assert not early.done()
            leading = threads.submit(Meeting(store, leader, TIME_OUT_S).hold, None)
            assert early.result() == leading.result()
            rounds.append(early.result()[0])
    assert rounds[0] != rounds[1]
