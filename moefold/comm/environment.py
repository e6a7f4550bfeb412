"""This process's rank and the rendezvous address, from the environment of torchrun or Slurm."""

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SLURM_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
FIRST_PORT = 20_000
PORTS = 12_000
SECRET = "MOEFOLD_SECRET"
"""Variable with a text that all ranks of a run share, and without which nobody uses their store."""
SECRET_CHARACTERS = 16
"""Fewest characters of a secret."""
NUMBERS = r"[0-9]+(?:-[0-9]+)?"
HOSTS = rf"(?=[^,])[^,\[\]]*(?:\[{NUMBERS}(?:,{NUMBERS})*\][^,\[\]]*)*"
"""One part of a Slurm node list, such as ``gpu[01-03,7]``."""


class RankInfo(NamedTuple):
    """A rank's number, and the address of the rendezvous store."""

    rank: int
    world_size: int
    local_rank: int
    """Index among the ranks of its machine."""
    address: str
    port: int
    store_running: bool = False
    """Whether a process outside the ranks already serves the store."""
    binds_devices: bool = False
    """Whether the launcher may make a single device visible to each rank."""
    secret: bytes = b""
    """What all ranks of a run know and others do not; empty if they share none."""
    is_agents_store: bool = False
    """Whether torchrun's agent serves the store, which anyone who reaches its port can use."""
    meeting: int = 0
    """Number of the meeting, for processes that meet several times through one store."""


def rank_info_from_env(variables: Mapping[str, str] | None = None) -> RankInfo | None:
    """Read torchrun's variables, else Slurm's; None for a single process.

    Raises:
        ValueError: if some of the variables are missing or malformed.
    """
    env = os.environ if variables is None else variables
    info = None
    if "RANK" in env and "WORLD_SIZE" in env:
        missing = [name for name in TORCHRUN if name not in env]
        if missing:
            text = f"the environment has RANK and WORLD_SIZE but not {', '.join(missing)}"
            raise ValueError(f"{text}; start with torchrun, or set all of {', '.join(TORCHRUN)}")
        info = RankInfo(
            rank=_read_int(env, "RANK"),
            world_size=_read_int(env, "WORLD_SIZE"),
            local_rank=_read_int(env, "LOCAL_RANK"),
            address=env["MASTER_ADDR"],
            port=_read_int(env, "MASTER_PORT"),
            store_running=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            secret=read_secret(env),
            is_agents_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
    # A batch script outside any step also has SLURM_PROCID, but is not a rank.
    elif "SLURM_PROCID" in env and ("SLURM_STEP_ID" in env or "SLURM_STEPID" in env):
        info = _from_slurm(env)
    if info is not None and info.rank >= info.world_size:
        raise ValueError(
            f"rank {info.rank} of {info.world_size}: it must be 0 to {info.world_size - 1}"
        )
    return info


def read_secret(env: Mapping[str, str]) -> bytes:
    """Return the secret of a run's ranks; empty if there is none.

    Raises:
        ValueError: if it is too short to be one.
    """
    text = env.get(SECRET, "")
    if text and len(text) < SECRET_CHARACTERS:
        raise ValueError(
            f"{SECRET} has {len(text)} characters; use at least {SECRET_CHARACTERS}, such as "
            "those of `openssl rand -hex 32`"
        )
    return text.encode()


def _from_slurm(env: Mapping[str, str]) -> RankInfo | None:
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    world = _read_int(env, tasks, "1")
    if world == 1:
        return None
    nodes = next((env[name] for name in SLURM_NODES if env.get(name)), "")
    address = env.get("MASTER_ADDR")
    if not (address or nodes):
        text = f"no list of nodes in {', '.join(SLURM_NODES)}"
        raise ValueError(f"{text}; start ranks with srun, or set MASTER_ADDR")
    job = _read_int(env, "SLURM_JOB_ID", "0")
    step = _read_int(env, "SLURM_STEP_ID", "0")
    default_port = str(FIRST_PORT + (job * 31 + step) % PORTS)
    return RankInfo(
        rank=_read_int(env, "SLURM_PROCID"),
        world_size=world,
        local_rank=_read_int(env, "SLURM_LOCALID"),
        address=address or first_host(nodes),
        port=_read_int(env, "MASTER_PORT", default_port),
        binds_devices=True,
        secret=read_secret(env),
    )


def _read_int(env: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = env.get(name, default)
    if text is None or not re.fullmatch(r"[0-9]+", text):
        raise ValueError(f"{name} is {text!r} in the environment; it must be a whole number")
    return int(text)


def first_host(text: str) -> str:
    """Return the first host of a Slurm node list: gpu01 for ``gpu[01-03,7],login``.

    Raises:
        ValueError: if the text is not a node list.
    """
    if not re.fullmatch(rf"{HOSTS}(,{HOSTS})*", text):
        raise ValueError(f"{text!r} is not a list of nodes such as gpu[01-03,7],login")
    first = re.match(HOSTS, text)
    assert first is not None
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", first[0])
