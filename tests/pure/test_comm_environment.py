"""Where a process stands, read from torchrun's and Slurm's variables."""

import pytest

from moefold.comm.environment import RankInfo, first_host, rank_info_from_env

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
    assert rank_info_from_env(TORCHRUN) == RankInfo(5, 8, 1, "node-a", 29500)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "3"}
    found = rank_info_from_env(TORCHRUN | agent)
    assert found == RankInfo(5, 8, 1, "node-a", 29500, store_running=True, is_agents_store=True)
    assert rank_info_from_env(TORCHRUN | SLURM) == rank_info_from_env(TORCHRUN), (
        "torchrun inside of a Slurm step"
    )


def test_slurm() -> None:
    found = rank_info_from_env(SLURM)
    assert found is not None
    assert found[:4] == (9, 16, 1, "gpu03") and 20_000 <= found.port < 32_000
    assert not found.store_running
    same = rank_info_from_env(SLURM | {"SLURM_PROCID": "3", "SLURM_LOCALID": "0"})
    assert same is not None and same.port == found.port
    other = rank_info_from_env(SLURM | {"SLURM_STEP_ID": "3"})
    assert other is not None and other.port != found.port
    chosen = rank_info_from_env(SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7000"})
    assert chosen is not None and (chosen.address, chosen.port) == ("10.0.0.1", 7000)
    bare = {name: text for name, text in SLURM.items() if "NODELIST" not in name}
    named = rank_info_from_env(bare | {"MASTER_ADDR": "10.0.0.1"})
    assert named is not None and named.address == "10.0.0.1", "a node list is not needed"
    without = {name: text for name, text in SLURM.items() if name != "SLURM_STEP_NODELIST"}
    job = rank_info_from_env(without)
    assert job is not None and job.address == "gpu01"


def test_who_is_alone() -> None:
    assert rank_info_from_env({}) is None
    assert rank_info_from_env(SLURM | {"SLURM_NTASKS": "1"}) is None
    batch = {name: text for name, text in SLURM.items() if name != "SLURM_STEP_ID"}
    assert rank_info_from_env(batch) is None, "a batch script is no rank"


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
        rank_info_from_env(given)


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
