"""Where a process stands, read from torchrun's and Slurm's variables."""

import pytest

from moefold.comm.environment import Spot, environment, first_host

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "2",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_NODELIST": "gpu[03-04,11]",
    "SLURM_JOB_NODELIST": "gpu[01-11]",
}


def test_torchrun() -> None:
    assert environment(TORCHRUN) == Spot(5, 8, 1, "node-a", 29500)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "3"}
    found = environment(TORCHRUN | agent)
    assert found == Spot(5, 8, 1, "node-a", 29500, served=True, attempt=3)
    assert environment(TORCHRUN | SLURM) == environment(TORCHRUN), "torchrun inside of a Slurm step"


def test_slurm() -> None:
    found = environment(SLURM)
    assert found is not None
    assert found[:4] == (9, 16, 1, "gpu03") and 20_000 <= found.port < 32_000
    assert not found.served
    same = environment(SLURM | {"SLURM_PROCID": "3", "SLURM_LOCALID": "0"})
    assert same is not None and same.port == found.port
    other = environment(SLURM | {"SLURM_STEP_ID": "3"})
    assert other is not None and other.port != found.port
    chosen = environment(SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7000"})
    assert chosen is not None and (chosen.address, chosen.port) == ("10.0.0.1", 7000)
    bare = {name: text for name, text in SLURM.items() if "NODELIST" not in name}
    named = environment(bare | {"MASTER_ADDR": "10.0.0.1"})
    assert named is not None and named.address == "10.0.0.1", "a node list is not needed"
    without = {name: text for name, text in SLURM.items() if name != "SLURM_STEP_NODELIST"}
    job = environment(without)
    assert job is not None and job.address == "gpu01"


def test_who_is_alone() -> None:
    assert environment({}) is None
    assert environment(SLURM | {"SLURM_NTASKS": "1"}) is None
    batch = {name: text for name, text in SLURM.items() if name != "SLURM_STEP_ID"}
    assert environment(batch) is None, "a batch script is no rank"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "not LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        (TORCHRUN | {"RANK": "x"}, "RANK is 'x'"),
        (TORCHRUN | {"RANK": "8"}, "rank 8 of 8"),
        (SLURM | {"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""}, "no list of nodes in"),
        (SLURM | {"SLURM_PROCID": "-1"}, "SLURM_PROCID is '-1'"),
        (SLURM | {"SLURM_STEP_NODELIST": "gpu[3"}, "not a list of nodes"),
    ],
)
def test_what_is_malformed_is_said(given: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        environment(given)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("login", "login"),
        ("gpu[01-03,7]", "gpu01"),
        ("gpu[7,01-03],login", "gpu7"),
        ("a,b-c,d[9-11]x", "a"),
        ("d[9-11]x,a", "d9x"),
        ("r[1-2]n[08-09]", "r1n08"),
        ("gpu[098-101]", "gpu098"),
    ],
)
def test_the_first_host_of_a_node_list(text: str, expected: str) -> None:
    assert first_host(text) == expected


@pytest.mark.parametrize("text", ["", ",", "a,", "gpu[1", "gpu]1", "gpu[]", "gpu[a]"])
def test_what_is_no_node_list(text: str) -> None:
    with pytest.raises(ValueError):
        first_host(text)
