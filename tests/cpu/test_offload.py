"""State that lies elsewhere: slots and their faults, copies that take long, runs that go on."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import moefold
from moefold.layers.attention import GroupedQueryAttention
from moefold.layers.flow import Flow
from moefold.offload import disk
from moefold.offload.disk import BLOCK, DiskFile, OffloadError
from moefold.offload.slots import AsyncCopies, FileSlot, HostPool, HostSlot, OffloadSlot
from moefold.parallel.data.offload import units_to_offload
from moefold.training.fork import fork
from tests.cpu.runs import equal, job_of, run_of, weights

CPU = torch.device("cpu")
SIZES = (0, 1, BLOCK - 1, BLOCK, 3 * BLOCK + 5)


def placed(at: str, folder: Path, step: str = "device") -> dict[str, Any]:
    """Return a layout with its state somewhere."""
    there = {"folder": str(folder / "disk")} if at == "disk" else {}
    return {"state": {"at": at, "step": step, **there}}


def slots(folder: Path) -> tuple[HostPool, DiskFile, dict[str, Callable[[int], OffloadSlot]]]:
    """Return both kinds of slots, over a pool and a file."""
    pool, file = HostPool(CPU), DiskFile(str(folder), 3)
    on_disk = lambda size: FileSlot(file, pool, "moments", size)  # noqa: E731
    return pool, file, {"host": lambda size: HostSlot(pool, size), "disk": on_disk}


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_slot_gives_back_what_was_put_there_and_what_was_changed_there(
    kind: str, tmp_path: Path
) -> None:
    pool, file, made = slots(tmp_path)
    drawn = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in SIZES]
    there = [made[kind](size) for size in SIZES]
    for slot, values in zip(there, drawn, strict=True):
        slot.write(values)
    held = {"host": pool.bytes, "disk": file.bytes}
    assert held == {"host": 0, "disk": 0} | {kind: sum(SIZES)}
    for slot, values in zip(there, drawn, strict=True):
        slot.read(into := torch.zeros_like(values))
        assert torch.equal(into, values)
        slot.host_values().add_(1)
        slot.flush()
        slot.read(into)
        assert torch.equal(into, values + 1)
    for slot in there:
        slot.free()
    assert (pool.bytes, file.bytes) == (0, 0)
    assert not list(tmp_path.iterdir()), "the file has no name that could be left behind"


def test_a_slot_that_is_given_back_is_used_again_and_not_given_back_twice(
    tmp_path: Path,
) -> None:
    file = DiskFile(str(tmp_path), 0)
    one = file.allocate("one", BLOCK + 1)
    file.free(one)
    with pytest.raises(ValueError, match="the slot of one is freed twice"):
        file.free(one)
    other, third = file.allocate("other", 2 * BLOCK), file.allocate("third", 2 * BLOCK)
    assert (other.start, third.start) == (0, 2 * BLOCK)


def damaged(how: str, file: DiskFile) -> None:
    """Change what lies in the file."""
    if how == "short":
        os.ftruncate(file._fd, BLOCK)
    else:
        os.pwrite(os.open(f"/proc/self/fd/{file._fd}", os.O_WRONLY), b"\1", BLOCK + 7)


@pytest.mark.parametrize(
    ("how", "said"),
    [("short", "4096 of the 8192 bytes of moments"), ("flipped", "5000 bytes of moments differ")],
)
def test_what_is_not_as_it_was_written_is_named_with_rank_and_bytes(
    how: str, said: str, tmp_path: Path
) -> None:
    _, file, made = slots(tmp_path)
    slot = made["disk"](5000)
    slot.write(torch.zeros(5000, dtype=torch.uint8))
    damaged(how, file)
    with pytest.raises(OffloadError, match=f"rank 3, the state's file in .*{said}"):
        slot.read(torch.empty(5000, dtype=torch.uint8))


def test_a_folder_that_takes_no_file_and_a_full_disk_end_a_run_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").write_text("no folder")
    with pytest.raises(OffloadError, match=r"rank 0, the state's file in .* cannot be created"):
        job_of(tmp_path, layout=placed("disk", tmp_path))
    (tmp_path / "disk").unlink()

    def full(fd: int, start: int, size: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "_allocate", full)
    with pytest.raises(OffloadError, match=r"rank 0.* bytes of masters of embed at .*No space"):
        job_of(tmp_path, layout=placed("disk", tmp_path))


def test_a_disk_that_fails_in_mid_run_is_named_and_the_run_goes_on_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with job_of(tmp_path, "whole") as job:
        job.step(), job.step()
        wanted = weights(job)
    job = job_of(tmp_path, layout=placed("disk", tmp_path))
    job.step()
    job.save()
    write = os.pwrite

    def failing(fd: int, data: Any, at: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(OffloadError, match=r"rank 0.* bytes of .*Input/output") as caught:
        job.step()
    monkeypatch.setattr(os, "pwrite", write)
    job.close(caught.value)
    with job_of(tmp_path, layout=placed("host", tmp_path, "host")) as job:
        assert job.step_number == 1
        job.step()
        assert not equal(weights(job), wanted)


@pytest.mark.parametrize("at", ["host", "disk"])
@pytest.mark.parametrize("step", ["device", "host"])
def test_copies_that_take_long_end_before_their_memory_is_used_again(
    at: str, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with job_of(tmp_path, "whole") as job:
        job.step(), job.step()
        wanted = weights(job)
    made = AsyncCopies._run

    def slow(self: AsyncCopies, copy: Callable[[], object], queued: Any = None) -> None:
        time.sleep(0.002)
        made(self, copy, queued)

    monkeypatch.setattr(AsyncCopies, "_run", slow)
    with job_of(tmp_path, layout=placed(at, tmp_path, step)) as job:
        job.step(), job.step()
        assert not equal(weights(job), wanted)


@pytest.mark.parametrize("at", ["host", "disk"])
def test_weights_alone_are_loaded_and_at_rate_zero_nothing_moves(at: str, tmp_path: Path) -> None:
    with job_of(tmp_path, "first", layout=placed(at, tmp_path)) as job:
        job.step()
        job.save()
    still = {"optim": {"lr": 0.0}, "layout": placed(at, tmp_path)}
    with job_of(tmp_path, "second", **still) as job:
        fork(job, tmp_path / "first", weights_only=True)
        before = weights(job)
        losses = [job.step(list(job.loader.load_step(0)))["lm_loss"] for _ in range(2)]
        after = weights(job)
    moved = [name for name in equal(before, after) if not name.startswith("optim.")]
    assert not moved
    assert losses[0] == losses[1]
    with job_of(tmp_path, "first", layout=placed("device", tmp_path)) as job:
        kept = weights(job)
    assert not equal(kept, kept | after_of(after))
    assert float(after["optim.head.weight.step"]) == 2


def after_of(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the model's part of a state."""
    return {name: held for name, held in state.items() if not name.startswith("optim.")}


def test_a_parameter_that_a_layer_reads_directly_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads as NaN: the step was not finite, and its documents were blamed."""
    forward = GroupedQueryAttention.forward

    def scaled(self: GroupedQueryAttention, x_TD: torch.Tensor, flow: Flow) -> torch.Tensor:
        return forward(self, x_TD, flow) * self.o.weight.sum()

    monkeypatch.setattr(GroupedQueryAttention, "forward", scaled)
    run = run_of(tmp_path, layout=placed("host", tmp_path))
    with pytest.raises(ValueError, match=r"^layers\.\d\.attention\.o\.weight is read directly"):
        moefold.train(run, folder=tmp_path / "out")


def test_what_a_run_returns_has_values_wherever_its_state_lay(tmp_path: Path) -> None:
    run = run_of(tmp_path, layout=placed("host", tmp_path), train={"steps": 3})
    result = moefold.train(run, folder=tmp_path / "out")
    whole = moefold.train(run_of(tmp_path, train={"steps": 3}), folder=tmp_path / "whole")
    mine, theirs = (dict(r.model.named_parameters()) for r in (result, whole))
    assert not [name for name in theirs if not torch.equal(mine[name], theirs[name])]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.75, 1.0])
def test_what_goes_is_spread_evenly_over_the_units(share: float) -> None:
    elements = {"embed": 40, **{f"layers.{n}": 100 for n in range(12)}, "head": 40}
    away = units_to_offload(elements, share)
    gone = seen = 0
    for unit, count in elements.items():
        gone, seen = gone + count * (unit in away), seen + count
        assert abs(gone - share * seen) <= 50
    assert share not in (0.0, 1.0) or len(away) == share * len(elements)


EVERYTHING = ["norms", "attention", "experts"]
WIDE = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "expert_width": 32}
WIDE |= {"experts": 4, "top_k": 2}
TUNED: dict[str, dict[str, Any]] = {
    "adapters": {"adapter": {"kind": "lora", "rank": 2, "dropout": 0.1}},
    "frozen": {"train": {"freeze": ["*.attention.*"], "precision": "bf16"}},
    "narrow": {
        "model": {"shape": WIDE},
        "train": {"precision": "bf16", "quantise": {"kind": "mxfp8"}},
    },
}


@pytest.mark.parametrize("what", TUNED)
def test_adapters_frozen_and_narrow_weights_may_have_all_else_elsewhere(
    what: str, tmp_path: Path
) -> None:
    """Activations and state elsewhere change no bit of what three steps come to."""
    activations = {"offload": {"host": {"modules": EVERYTHING}}}
    away = {"host": activations | placed("host", tmp_path, "host")}
    away["disk"] = {"offload": {"disk": {"modules": EVERYTHING, "folder": str(tmp_path / "rows")}}}
    away["disk"] |= placed("disk", tmp_path)
    found = {}
    for where, layout in ({"device": {}} | away).items():
        with job_of(tmp_path, where, layout=layout, **TUNED[what]) as job:
            [job.step() for _ in range(3)]
            found[where] = weights(job)
    assert not equal(found["device"], found["host"]) and not equal(found["device"], found["disk"])
