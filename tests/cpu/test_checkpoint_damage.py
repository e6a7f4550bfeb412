"""Every way in which a checkpoint can be wrong is found, with the file and the tensor named."""

import os
import pickle
import random
import shutil
from pathlib import Path

import pytest
import torch

from moefold.checkpoint import manifest
from moefold.checkpoint.errors import CheckpointError, DamagedError, VersionError
from moefold.checkpoint.folder import find_newest
from moefold.checkpoint.manifest import slices_by_shard
from moefold.checkpoint.save import save
from moefold.checkpoint.verify import verify
from tests.cpu.checkpoint_tools import Calls, Refusing, load, same, state, write_sliced
from tests.cpu.runs import job_of

SHARD = "shard-00000.safetensors"


def tiny(folder: Path) -> Path:
    """Return a checkpoint with two shards and a tensor in two slices."""
    a = torch.arange(6.0).view(2, 3)
    everything = slice(None)
    parts = {
        "layers.0.w": (a, [(slice(0, 1), everything), (slice(1, 2), everything)]),
        "layers.0.b": (torch.ones(2, dtype=torch.bfloat16), [(everything,)]),
        "step": (torch.tensor(4), [()]),
    }
    return write_sliced(folder / "step-00000004", 4, parts, {"note": "é"}, chunk_bytes=8)


def owners(path: Path, shard: int) -> list[str | None]:
    """Return for each byte of a shard which tensor it belongs to, in data and in the header."""
    found = manifest.read(path)
    record = found.shards[shard]
    raw = (path / record.file).read_bytes()
    names: list[str | None] = [None] * record.size
    rows = slices_by_shard(found)[shard]
    for name, part in rows:
        names[slice(*part.span)] = [name] * part.size
    commas = [raw.index(f',"{name}'.encode()) for name, _ in rows]
    ends = [*commas[1:], raw.rindex(b"}", 0, record.header)]
    for (name, _), start, stop in zip(rows, commas, ends, strict=True):
        names[start:stop] = [name] * (stop - start)
    return names


def flip(file: Path, at: int, mask: int) -> None:
    """Change one byte of a file in place."""
    with file.open("r+b") as opened:
        opened.seek(at)
        old = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([old ^ mask]))


@pytest.mark.parametrize("shard", [0, 1])
def test_every_flipped_byte_of_a_shard_is_found_and_its_tensor_named(
    tmp_path: Path, shard: int
) -> None:
    path = tiny(tmp_path)
    found = manifest.read(path)
    record = found.shards[shard]
    file = path / record.file
    names = owners(path, shard)
    assert len(names) == file.stat().st_size
    for at, name in enumerate(names):
        mask = 1 << (at % 8)
        flip(file, at, mask)
        problems = verify(path)
        assert problems, f"byte {at} is not missed"
        assert all(problem.file == record.file for problem in problems)
        assert [problem.tensor for problem in problems] == [name], f"byte {at} of {record.file}"
        if at >= record.header:
            with pytest.raises(DamagedError, match=record.file) as caught:
                load(path)
            assert caught.value.tensor == name
            others = [other for other in found.tensors if other != name]
            assert list(load(path, others)[0]) == others
        flip(file, at, mask)
    assert verify(path) == []


def test_every_flipped_byte_of_the_manifest_is_found(tmp_path: Path) -> None:
    path = tiny(tmp_path)
    file = path / manifest.FILE
    for at in range(file.stat().st_size):
        for mask in (1 << (at % 8), 0x20):  # 0x20 turns a digest's letter into a capital
            flip(file, at, mask)
            assert verify(path), f"byte {at}"
            with pytest.raises(DamagedError, match=r"manifest\.json"):
                load(path)
            flip(file, at, mask)
    assert verify(path) == []


def test_a_damaged_digest_in_the_manifest_names_its_tensor(tmp_path: Path) -> None:
    """What is left of a damaged manifest is still compared with the shards."""
    path = tiny(tmp_path)
    file = path / manifest.FILE
    digest = manifest.read(path).tensors["layers.0.b"].slices[0].sha256[0]
    flip(file, file.read_bytes().index(digest.encode()), 1)
    assert [(p.file, p.tensor) for p in verify(path)] == [
        (manifest.FILE, None),
        (SHARD, "layers.0.b"),
    ]


@pytest.mark.parametrize("size", ["0", "header", "one less", "one more"])
def test_shards_of_another_size(tmp_path: Path, size: str) -> None:
    """Truncated or longer: the error names file, expected and actual size."""
    path = tiny(tmp_path)
    whole = manifest.read(path).shards[0]
    wrong = {"0": 0, "header": whole.header, "one less": whole.size - 1, "one more": whole.size + 1}
    os.truncate(path / SHARD, wrong[size])
    text = f"expected {whole.size} bytes, found {wrong[size]}"
    with pytest.raises(DamagedError, match=text) as caught:
        load(path)
    assert caught.value.file == SHARD
    assert {p.tensor for p in verify(path)} == {"layers.0.w", "layers.0.b", "step"}
    assert all(text in p.what and p.file == SHARD for p in verify(path))


def test_a_missing_shard(tmp_path: Path) -> None:
    path = tiny(tmp_path)
    (path / "shard-00001.safetensors").unlink()
    with pytest.raises(DamagedError, match=r"shard-00001\.safetensors: is missing; expected"):
        load(path)
    assert [p.tensor for p in verify(path)] == ["layers.0.w"]
    assert list(load(path, ["step"])[0]) == ["step"]


def test_an_extra_file_and_two_shards_exchanged(tmp_path: Path) -> None:
    path = tiny(tmp_path)
    shutil.copy(path / SHARD, path / "shard-00007.safetensors")
    assert [p.file for p in verify(path)] == ["shard-00007.safetensors"]
    (path / "shard-00007.safetensors").unlink()
    other = tiny(tmp_path / "other")
    flip(other / SHARD, manifest.read(other).shards[0].size - 1, 1)
    shutil.copy(other / SHARD, path / SHARD)  # whole in itself, but of another checkpoint
    assert {p.file for p in verify(path)} == {SHARD}


def test_a_manifest_that_is_missing_empty_or_cut(tmp_path: Path) -> None:
    path = tiny(tmp_path)
    file = path / manifest.FILE
    raw = file.read_bytes()
    for cut in (0, 1, 40, len(raw) // 2, len(raw) - 1):
        file.write_bytes(raw[:cut])
        with pytest.raises(DamagedError):
            load(path)
        assert verify(path)
    file.unlink()
    assert [p.file for p in verify(path)] == [manifest.FILE]
    with pytest.raises(DamagedError, match="save was interrupted"):
        load(path)
    with pytest.raises(CheckpointError, match="no such checkpoint folder"):
        verify(path / "nowhere")


def resealed(path: Path, old: str, new: str) -> None:
    """Replace text in a manifest and seal it again, as someone who means it would."""
    file = path / manifest.FILE
    text = file.read_text()
    assert old in text
    file.write_bytes(manifest.with_digest(text.replace(old, new).encode()))


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "/etc/secret.safetensors",
        "a/../../secret.safetensors",
        "..\\\\secret.safetensors",
        ".hidden.safetensors",
        "secret.pt",
        "a\\u0000.safetensors",
        "",
    ],
)
def test_shard_names_stay_in_the_folder(tmp_path: Path, name: str) -> None:
    path = tiny(tmp_path)
    shutil.copy(path / SHARD, tmp_path / "secret.safetensors")
    resealed(path, SHARD, name)
    with pytest.raises(DamagedError, match=r"shards\.0\.file"):
        load(path)
    assert verify(path)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_shards_are_plain_files(tmp_path: Path, kind: str) -> None:
    """A link leads out of the folder, and a pipe would make its reader wait for ever."""
    path = tiny(tmp_path)
    (path / SHARD).rename(tmp_path / "secret")
    if kind == "link":
        (path / SHARD).symlink_to(tmp_path / "secret")
    elif kind == "pipe":
        os.mkfifo(path / SHARD)
    else:
        (path / SHARD).mkdir()
    with pytest.raises(DamagedError, match="not a regular file"):
        load(path)
    assert any(p.file == SHARD for p in verify(path))
    (path / manifest.FILE).rename(tmp_path / "m")
    (path / manifest.FILE).symlink_to(tmp_path / "m")
    with pytest.raises(DamagedError, match="not a regular file"):
        load(path)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ('"shape":[2,3]', '"shape":[2,4]', "do not tile"),
        ('"shape":[2,3]', '"shape":[2,-3]', "tensors.layers.0.w.shape.1"),
        ('"shape":[2,3]', '"shape":[2,3.0]', "tensors.layers.0.w.shape.1"),
        ('"shape":[2,3]', '"shape":["2",3]', "tensors.layers.0.w.shape.0"),
        ('"shape":[2,3]', '"shape":[4611686018427387904,3]', "tensors.layers.0.w.shape.0"),
        ('"shape":[2,3]', '"shape":[0,2000000000000000000,2000000000000000000]', "impossible"),
        ('"at":[1,0]', '"at":[0,0]', "do not tile"),
        ('"at":[1,0]', '"at":[2,0]', "do not tile"),
        ('"dtype":"F32"', '"dtype":"F64"', "slice of 24 bytes in a span of 12"),
        ('"dtype":"F32"', '"dtype":"object"', "tensors.layers.0.w.dtype"),
        ('"shard":1', '"shard":7', "shard 7, but there are 2"),
        ('"shard":1', '"shard":0', "every byte"),
        ('"step": 4', '"step": -4', "step"),
        ('"step": 4', '"step": 4, "more": 1', "more"),
        ('"chunk_bytes": 8', '"chunk_bytes": 0', "chunk_bytes"),
        ('"chunk_bytes": 8', '"chunk_bytes": 4', "digests"),
        ('"header":', '"header":1', "every byte"),
        ('"meta": {', '"meta": [{', "not JSON"),
        ('"note":"', '"note":' + "[" * 100_000 + '"', "not JSON"),
    ],
)
def test_contradictions_are_refused_before_memory_is_taken(
    tmp_path: Path, old: str, new: str, what: str
) -> None:
    path = tiny(tmp_path)
    resealed(path, old, new)
    with pytest.raises(DamagedError, match=manifest.FILE) as caught:
        load(path)
    assert what in str(caught.value)
    assert verify(path)


def test_a_shape_that_no_file_holds_takes_no_memory(tmp_path: Path) -> None:
    """Sizes are compared with the file's before a tensor of that size is made."""
    path = save(tmp_path, 1, {"x": torch.zeros(1, dtype=torch.uint8)}, {})
    found = manifest.read(path)
    huge = 2**45
    shard = found.shards[0]
    part = found.tensors["x"].slices[0]
    chunk = 2**30
    many = part.sha256 * (huge // chunk)
    assert len(many) == 2**15  # 2 MiB of manifest describe what would be 32 TiB
    part = part.model_copy(
        update={"shape": (huge,), "span": (shard.header, shard.header + huge), "sha256": many}
    )
    stored = found.tensors["x"].model_copy(update={"shape": (huge,), "slices": (part,)})
    big = shard.model_copy(update={"size": shard.header + huge})
    update = {"tensors": {"x": stored}, "shards": (big,), "chunk_bytes": chunk}
    (path / manifest.FILE).write_bytes(manifest.dump(found.model_copy(update=update)))
    with pytest.raises(DamagedError, match=f"expected {big.size} bytes, found {shard.size}"):
        load(path)


def test_two_tensors_do_not_lie_in_the_same_bytes(tmp_path: Path) -> None:
    path = save(tmp_path, 1, {"x": torch.ones(3)}, {})
    found = manifest.read(path)
    update = {"tensors": {"x": found.tensors["x"], "y": found.tensors["x"]}}
    (path / manifest.FILE).write_bytes(manifest.dump(found.model_copy(update=update)))
    with pytest.raises(DamagedError, match="exactly once"):
        load(path)


def test_huge_manifests_are_not_read(tmp_path: Path) -> None:
    path = tiny(tmp_path)
    os.truncate(path / manifest.FILE, manifest.MAX_BYTES + 1)
    disk = Calls()
    with pytest.raises(DamagedError, match="more than the limit"):
        load(path, disk=disk)
    assert disk.read_bytes == 0


def test_huge_headers_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1, {}, {})
    found = manifest.read(save(tmp_path, 2, {"x": torch.ones(1)}, {}))
    shard = found.shards[0]
    size = manifest.MAX_HEADER_BYTES + 9
    grown = shard.model_copy(update={"header": size, "size": size})
    update = {"shards": (grown,), "tensors": {}, "step": 1}
    (path / manifest.FILE).write_bytes(manifest.dump(found.model_copy(update=update)))
    with pytest.raises(DamagedError, match="every byte"):
        load(path)


class Trap:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.mark),)


def test_a_hostile_pickle_is_never_run(tmp_path: Path) -> None:
    trap = pickle.dumps(Trap(tmp_path / "mark"))
    path = tiny(tmp_path)
    original = (path / SHARD).read_bytes()
    (path / SHARD).write_bytes(trap[: len(original)].ljust(len(original), b"."))
    (path / "extra.pt").write_bytes(trap)
    assert {p.file for p in verify(path)} == {SHARD, "extra.pt"}
    with pytest.raises(DamagedError):
        load(path)
    (path / manifest.FILE).write_bytes(trap)
    with pytest.raises(DamagedError):
        load(path)
    assert verify(path)
    assert not (tmp_path / "mark").exists()
    pickle.loads(trap)
    assert (tmp_path / "mark").exists(), "the trap itself works"


def test_a_header_that_says_something_else_is_found(tmp_path: Path) -> None:
    """Digests agree with the bytes, and yet other readers would see another tensor."""
    path = save(tmp_path, 1, {"x": torch.ones(2, 3), "y": torch.ones(6)}, {})
    found = manifest.read(path)
    raw = (path / SHARD).read_bytes()
    wrong = raw.replace(b'"shape":[2,3]', b'"shape":[3,2]')
    (path / SHARD).write_bytes(wrong)
    assert [p.tensor for p in verify(path)] == ["x"]
    from_bytes = manifest.sha256(wrong[: found.shards[0].header]).hexdigest()
    shard = found.shards[0].model_copy(update={"header_sha256": from_bytes})
    (path / manifest.FILE).write_bytes(manifest.dump(found.model_copy(update={"shards": (shard,)})))
    assert [(p.tensor, "contradict" in p.what) for p in verify(path)] == [("x", True)]


def test_storage_that_fails_for_a_moment_is_read_again(tmp_path: Path) -> None:
    path = save(tmp_path, 1, state(1), {})
    told: list[str] = []
    # the manifest's read comes first and is let through
    tensors, _ = load(path, disk=Refusing({"read": (2, 116)}, after=1), warn=told.append)
    assert same(tensors, state(1))
    assert len(told) == 2 and all(SHARD in text for text in told)
    with pytest.raises(DamagedError, match="cannot be read") as caught:
        load(path, disk=Refusing({"read": (99, 5)}, after=1), warn=told.append)
    assert caught.value.file == SHARD and caught.value.tensor is not None


def test_foreign_folders_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / manifest.FILE).write_text('{"format": "other", "version": 9, "writer": "them"}')
    with pytest.raises(VersionError, match="other version 9, written by them") as caught:
        load(tmp_path)
    assert "reads moefold-checkpoint version 1" in str(caught.value)
    (tmp_path / manifest.FILE).write_text('{"name": "web app"}')
    assert "no field `format`" in verify(tmp_path)[0].what


def test_random_damage_never_passes_and_never_crashes(tmp_path: Path) -> None:
    """Runs of bytes replaced, moved or cut, in any file: an error of ours each time."""
    rng = random.Random(3)
    path = tiny(tmp_path)
    files = sorted(path.iterdir())
    for _ in range(300):
        file = rng.choice(files)
        raw = file.read_bytes()
        a, b = sorted(rng.sample(range(len(raw) + 1), 2))
        middle = rng.choice([b"", rng.randbytes(b - a), raw[a:b][::-1], raw[a:b] * 2, b"0" * 9])
        changed = raw[:a] + middle + raw[b:]
        if changed == raw:
            continue
        file.write_bytes(changed)
        assert verify(path), (file.name, a, b, middle)
        with pytest.raises(CheckpointError):
            newest_or_load(path)
        file.write_bytes(raw)
    assert verify(path) == []


def newest_or_load(path: Path) -> None:
    """Do what a resuming run does; a shard's damaged header alone does not stop it."""
    find_newest(path.parent, warn=lambda text: None)
    load(path)
    if verify(path):
        raise CheckpointError("the header only")


def test_a_damaged_checkpoint_is_written_anew_when_its_step_is_made_again(tmp_path: Path) -> None:
    """A run that ends well leaves a last checkpoint that is whole; one that is whole stays."""
    path = tmp_path / "out" / "step-00000004"
    for last in (2, 4):
        with job_of(tmp_path, train={"steps": 4}) as job:
            job.last_step = last
            job.train()
    shard = path / SHARD
    flip(shard, shard.stat().st_size - 5, 4)
    files = []
    for resumed in (2, 4):
        with job_of(tmp_path, train={"steps": 4}) as job:
            assert job.step_number == resumed
            job.train()
        assert verify(path) == []
        files.append(shard.stat().st_ino)
    assert files[0] == files[1]
