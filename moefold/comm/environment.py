"""This process's rank and rendezvous address, from the environment of torchrun or Slurm."""

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SLURM_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
FIRST_PORT, PORTS = 20_000, 12_000
NUMBERS = r"[0-9]+(?:-[0-9]+)?"
HOSTS = rf"(?=[^,])[^,\[\]]*(?:\[{NUMBERS}(?:,{NUMBERS})*\][^,\[\]]*)*"
"""One part of a Slurm node list, such as ``gpu[01-03,7]``."""


class Spot(NamedTuple):
    """A rank's number, and the address of the store at which all ranks meet."""

    rank: int
    world: int
    local_rank: int
    """Number among the ranks of its machine."""
    address: str
    port: int
    served: bool = False
    """Whether the store already runs outside the ranks."""
    attempt: int = 0
    """Number of earlier starts, whose entries in the store are ignored."""
    binds: bool = False
    """Whether the launcher may make only one device visible to each rank."""


def environment(variables: Mapping[str, str] | None = None) -> Spot | None:
    """Return the spot from torchrun's variables, else Slurm's; None for a single process.

    Raises:
        ValueError: if some of the variables are missing or malformed.
    """
    given = os.environ if variables is None else variables
    spot = None
    if "RANK" in given and "WORLD_SIZE" in given:
        missing = [name for name in TORCHRUN if name not in given]
        if missing:
            text = f"the environment has RANK and WORLD_SIZE but not {', '.join(missing)}"
            raise ValueError(f"{text}; start with torchrun, or set all of {', '.join(TORCHRUN)}")
        spot = Spot(
            rank=_number(given, "RANK"),
            world=_number(given, "WORLD_SIZE"),
            local_rank=_number(given, "LOCAL_RANK"),
            address=given["MASTER_ADDR"],
            port=_number(given, "MASTER_PORT"),
            served=given.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=_number(given, "TORCHELASTIC_RESTART_COUNT", "0"),
        )
    # A batch script outside any step also has a SLURM_PROCID, but is no rank.
    elif "SLURM_PROCID" in given and ("SLURM_STEP_ID" in given or "SLURM_STEPID" in given):
        spot = _slurm(given)
    if spot is not None and spot.rank >= spot.world:
        raise ValueError(f"rank {spot.rank} of {spot.world}: it must be 0 to {spot.world - 1}")
    return spot


def _slurm(given: Mapping[str, str]) -> Spot | None:
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in given else "SLURM_NTASKS"
    world = _number(given, tasks, "1")
    if world == 1:
        return None
    nodes = next((given[name] for name in SLURM_NODES if given.get(name)), "")
    address = given.get("MASTER_ADDR")
    if not (address or nodes):
        text = f"no list of nodes in {', '.join(SLURM_NODES)}"
        raise ValueError(f"{text}; start ranks with srun, or set MASTER_ADDR")
    job, step = _number(given, "SLURM_JOB_ID", "0"), _number(given, "SLURM_STEP_ID", "0")
    chosen = str(FIRST_PORT + (job * 31 + step) % PORTS)
    return Spot(
        rank=_number(given, "SLURM_PROCID"),
        world=world,
        local_rank=_number(given, "SLURM_LOCALID"),
        address=address or first_host(nodes),
        port=_number(given, "MASTER_PORT", chosen),
        attempt=_number(given, "SLURM_RESTART_COUNT", "0"),
        binds=True,
    )


def _number(given: Mapping[str, str], name: str, otherwise: str | None = None) -> int:
    text = given.get(name, otherwise)
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
