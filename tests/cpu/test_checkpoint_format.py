"""The format on disk: old checkpoints stay readable, and the writer does not change it unseen.

``tests/data/checkpoint_v1`` was written at version 1 and is never written anew: a change of the
format has a new version and a new folder beside it.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moefold.checkpoint import manifest
from moefold.checkpoint.config import CheckpointPolicy
from moefold.checkpoint.errors import VersionError
from moefold.checkpoint.folder import find_newest
from moefold.checkpoint.save import save
from moefold.checkpoint.tensors import DTYPES
from moefold.checkpoint.verify import verify
from tests.cpu.checkpoint_tools import load, same, write_sliced

DATA = Path(__file__).parents[1] / "data"
V1 = DATA / "checkpoint_v1"
META = {"run": "golden", "numbers": [1, -2.5, 1e-300], "nothing": None, "text": "é"}


def golden_state() -> dict[str, Tensor]:
    """Return the state in ``step-00000007``: every type, and the odd shapes."""
    raw = torch.arange(48, dtype=torch.uint8)
    tensors = {f"types.{name}": raw.view(DTYPES[name]) for name in DTYPES if name != "BOOL"}
    return tensors | {
        "types.BOOL": raw % 3 == 0,
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "layers.0.moe.experts.w_in": torch.arange(300.0).view(2, 3, 50),
        "name with spaces/é": torch.tensor([7]),
    }


def golden_slices() -> dict[str, tuple[Tensor, list[tuple[slice, ...]]]]:
    """Return the state in ``step-00000008``: tensors in slices, as several processes write them."""
    everything = slice(None)
    experts = torch.arange(4 * 6.0).view(4, 2, 3)
    return {
        "experts": (experts, [(slice(e, e + 1), everything, everything) for e in range(4)]),
        "columns": (
            torch.arange(10).view(2, 5),
            [(everything, slice(0, 3)), (everything, slice(3, 5))],
        ),
        "whole": (torch.tensor([1.5]), [(everything,)]),
    }


def test_version_1_is_read(tmp_path: Path) -> None:
    tensors, meta = load(V1 / "step-00000007")
    assert same(tensors, golden_state())
    assert meta == META
    tensors, _ = load(V1 / "step-00000008")
    assert same(tensors, {name: tensor for name, (tensor, _) in golden_slices().items()})
    assert verify(V1 / "step-00000007") == verify(V1 / "step-00000008") == []
    assert find_newest(V1, warn=pytest.fail) == V1 / "step-00000008"


def test_the_writer_writes_version_1(tmp_path: Path) -> None:
    """Every byte of the shards, and of the manifest but for the writer's name."""
    save(tmp_path, 7, golden_state(), META, CheckpointPolicy(shard_bytes=1024))
    write_sliced(tmp_path / "step-00000008", 8, golden_slices(), META, chunk_bytes=16)
    for name in ("step-00000007", "step-00000008"):
        files = sorted(p.name for p in (V1 / name).iterdir())
        assert sorted(p.name for p in (tmp_path / name).iterdir()) == files
        for file in files:
            old, new = (folder / name / file for folder in (V1, tmp_path))
            if file != manifest.FILE:
                assert new.read_bytes() == old.read_bytes()
                continue
            theirs, ours = (json.loads(path.read_text()) for path in (old, new))
            for fields in (theirs, ours):
                assert fields.pop("sha256") and fields.pop("writer")
            assert theirs == ours
            assert old.read_text().splitlines()[2:4] == new.read_text().splitlines()[2:4]


def test_a_changed_golden_checkpoint_would_be_noticed(tmp_path: Path) -> None:
    """The digests of the stored manifests, so that nobody rewrites them in passing."""
    digests = {p.name: manifest.read(p).sha256[:16] for p in sorted(V1.iterdir())}
    assert digests == {"step-00000007": "e2b5b387af7411c6", "step-00000008": "73abc73b7cac293e"}


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ('"version": 1', '"version": 2', "moefold-checkpoint version 2"),
        ('"version": 1', '"version": 0', "moefold-checkpoint version 0"),
        ('"version": 1', '"version": "1"', "moefold-checkpoint version 1"),
        ('"version": 1', '"version": 1.5', "moefold-checkpoint version 1.5"),
        ('"format": "moefold-checkpoint"', '"format": "other"', "other version 1"),
    ],
)
def test_another_version_is_refused_with_both(
    tmp_path: Path, old: str, new: str, found: str
) -> None:
    """Its fields may be any; the digest proves that they are meant so."""
    path = tmp_path / "step-00000007"
    shutil.copytree(V1 / "step-00000007", path)
    file = path / manifest.FILE
    text = file.read_text().replace(old, new).replace('"chunk_bytes"', '"piece_bytes"')
    file.write_bytes(manifest.with_digest(text.encode()))
    for action in (load, verify, manifest.read, lambda path: find_newest(path.parent)):
        with pytest.raises(VersionError) as caught:
            action(path)
        assert f"is {found}, written by " in str(caught.value)
        assert "reads moefold-checkpoint version 1" in str(caught.value)


def test_every_type_has_its_size() -> None:
    sizes = {name: torch.empty(0, dtype=dtype).element_size() for name, dtype in DTYPES.items()}
    assert sizes == manifest.ITEM_BYTES
