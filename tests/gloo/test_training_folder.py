"""All ranks reach the run's folder before the first step, or the run is refused on all of them."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moefold.comm.world import World
from moefold.mesh.config import Sizes
from moefold.mesh.folding import Folding
from moefold.training import saving
from tests.gloo.harness import run_ranks


def look(rank: int, folders: list[Path]) -> str:
    """Check a rank's folder; return what the refusal says, empty if there is none."""
    world = World.open(Folding(Sizes(), dist.get_world_size()), torch.device("cpu"), 60.0)
    with world, pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "REACH_S", 0.5)
        try:
            saving.require_shared(folders[rank], world.on_host)
        except ValueError as error:
            return str(error)
    return ""


def test_a_folder_that_is_another_one_elsewhere_is_refused_on_all_ranks(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("shared", "node1", "absent")]
    for folder in folders[:2]:
        folder.mkdir()
    shared, node1, absent = folders
    (shared / f"{saving.PROBE}dead").touch()  # a first rank was killed while it looked
    assert run_ranks(look, 3, [shared, shared, shared]) == ["", "", ""]
    for others, ranks in (([node1, shared], "1"), ([node1, absent], "1, 2")):
        said = run_ranks(look, 3, [shared, *others])
        for text in said:
            assert text.startswith(f"rank {ranks} of 3 cannot reach the run's folder of rank 0")
            assert "--folder must be one folder that all machines share" in text
            assert str(shared) in text and str(node1) in text
    assert run_ranks(look, 3, [absent, node1, shared]) == ["", "", ""], "a trial run has no folder"
    assert [path for folder in folders[:2] for path in folder.iterdir()] == []
