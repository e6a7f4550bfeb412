"""Activations on host and disk: the same bits, what is fetched when, and what disks do wrong."""

import errno
import os
import threading
from itertools import cycle
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from moefold.config.base import Record
from moefold.data.batch import MicroBatch, from_ids
from moefold.layers.config import Full, Offload, OffloadKind, RecomputeKind, Selective
from moefold.layers.flow import Flow
from moefold.layers.offload import (
    BLOCK,
    ActivationOffload,
    FileStore,
    OffloadedLayers,
    OffloadedStorage,
)
from moefold.layers.saved_tensors import SavedTensors
from moefold.model.config import Decoder, Stack
from moefold.model.decoder import DecoderModel
from moefold.offload import disk as disk_room
from moefold.offload.disk import OffloadError
from moefold.planner.memory_saved import saved_tensors
from moefold.spec.layer import Shape, recomputed_modules
from moefold.training.banner import banner_rows as banner_rows
from tests.cpu.alive import HIDDEN, StorageRecorder, there
from tests.cpu.runs import equal, job_of, weights
from tests.cpu.test_planner_kept import BLOCKS

CPU, LAYERS = torch.device("cpu"), 4
EVERY = get_args(OffloadKind)
Gradients = dict[str, torch.Tensor]


def offload(folder: Path, host: Any = (), disk: Any = (), **more: Any) -> ActivationOffload:
    stated: dict[str, Any] = {"host": {"modules": host}} if host else {}
    if disk:
        stated["disk"] = {"modules": disk, "folder": str(folder)}
    return ActivationOffload(Offload.model_validate(stated | more), CPU)


def model_of(block: str, precision: Any = "fp32") -> tuple[DecoderModel, MicroBatch]:
    torch.manual_seed(0)
    stacks = (Stack(repeat=LAYERS, blocks=(BLOCKS[block],)),)
    model = DecoderModel(Decoder(vocab=50, hidden=HIDDEN, stacks=stacks), precision)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return model, from_ids(torch.randint(0, 50, (2, 32)))


def gradients(
    model: DecoderModel,
    rows: MicroBatch,
    policy: Record | None = None,
    to: ActivationOffload | None = None,
) -> Gradients:
    """Return all gradients of a pass through the layers; nothing is away after it."""
    model.zero_grad()
    for _, mixture in model.moe_layers():
        mixture.balance.start_step()
    flow = Flow(rows, model.precision_policy, saved_tensors=SavedTensors(policy, to))
    draw = torch.Generator().manual_seed(1)
    x_TD = torch.randn(rows.rows, HIDDEN, generator=draw, dtype=model.precision_policy.dtype)
    y_TD, terms = model.run(flow, x_TD.requires_grad_(), model.layers)
    flow.saved_tensors.end_forward()
    flow.saved_tensors.offloaded.prefetch()
    y_TD.float().square().mean().backward()
    del y_TD, terms, flow
    for place in () if to is None else to.stores.values():
        assert place.stats.held == 0 and place.stats.reads > 0
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found | {"x": x_TD.grad}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("block", "precision"), [*zip(BLOCKS, cycle(["fp32", "bf16"]), strict=False)]
)
def test_gradients_are_those_of_keeping_everything(
    block: str, precision: str, tmp_path: Path
) -> None:
    """To the bit, of every kind on host and disk, beside everything that is made again."""
    model, rows = model_of(block, precision)
    wanted = gradients(model, rows)
    some, rest = EVERY[::2], EVERY[1::2]
    for policy, host, disk in (
        (None, EVERY, ()),
        (None, (), EVERY),
        (Full(), ("block",), ()),
        (Selective(modules=("norms", "experts")), some, rest),
        (Selective(modules=("mla_up", "permute", "attention")), rest, some),
        (Selective(modules=get_args(RecomputeKind)), EVERY, ()),
    ):
        found = gradients(model, rows, policy, offload(tmp_path, host, disk))
        assert found.keys() == wanted.keys()
        unequal = [name for name in wanted if not torch.equal(found[name], wanted[name])]
        assert not unequal, (policy, host, disk)


@pytest.mark.parametrize(
    ("block", "policy"),
    [
        ("norms on heads, shared", None),
        ("latents, sigmoid", Selective(modules=("norms", "mla_up", "permute"))),
        ("norms on projections, gate", Selective(modules=("norms",))),
    ],
)
def test_what_leaves_and_what_stays_is_what_is_planned(
    block: str, policy: Record | None, tmp_path: Path
) -> None:
    """Each storage once, whatever shows it, weights never; nothing made again pins its input."""
    model, rows = model_of(block)
    gradients(model, rows)
    modules = tuple(kind for kind in EVERY if policy is None or kind != "norms")
    to = offload(tmp_path, modules)
    flow = Flow(rows, model.precision_policy, saved_tensors=SavedTensors(policy, to))
    leaf_TD = torch.randn(rows.rows, HIDDEN).requires_grad_()
    with StorageRecorder() as made:
        y_TD, terms = model.run(flow, leaf_TD * 1.0, model.layers)
    flow.saved_tensors.offloaded.wait_all()
    flow.saved_tensors.end_forward()
    others = {t.untyped_storage()._cdata for t in (y_TD, *terms.values())}
    again = recomputed_modules(policy)
    kept_ = [
        part
        for part in saved_tensors(BLOCKS[block], Shape(HIDDEN, 64, width=4))
        if part.is_saved_under(again)
    ]
    away = (LAYERS - 1) * sum(part.bytes for part in kept_ if part.module in modules)
    figures = to.stores["host"].stats
    assert figures.held == figures.peak == figures.moved == away
    here = LAYERS * sum(part.bytes for part in kept_) - away
    assert made.live_bytes(there(model, flow) | others) == here


def test_layers_are_sent_for_before_they_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is on its way when backward comes to it, and few more than that are on the device."""
    model, rows = model_of("grouped heads, dense")
    late, most, here = [], 0, set[int]()
    taken, fetched = OffloadedStorage.load, OffloadedStorage.prefetch

    def take(
        self: OffloadedStorage, departed: OffloadedLayers, layer: int, dtype: torch.dtype
    ) -> torch.Tensor:
        late.extend([layer] if self._fetched is None else [])
        return taken(self, departed, layer, dtype)

    def fetch(self: OffloadedStorage) -> None:
        nonlocal most
        fetched(self)
        here.add(id(self))
        most = max(most, len(here))

    def gone(self: OffloadedStorage) -> None:
        here.discard(id(self))
        self._store.free(self._written, self._size)

    monkeypatch.setattr(OffloadedStorage, "load", take)
    monkeypatch.setattr(OffloadedStorage, "prefetch", fetch)
    monkeypatch.setattr(OffloadedStorage, "__del__", gone)
    to = offload(tmp_path, ("ffn",), in_flight=1)
    gradients(model, rows, None, to)
    assert not late and to.stores["host"].stats.reads == LAYERS - 1
    assert most == 2, "the layer that runs and the one that comes"


def test_a_run_sends_away_what_its_plan_says(tmp_path: Path) -> None:
    """Settled when it begins and said in the banner; values stay."""
    shape = {"layers": 6, "hidden": 32, "experts": 4, "expert_width": 32}
    small = {
        "model": {"shape": shape | {"heads": 2, "kv_heads": 2, "top_k": 2}},
        "data": {"seq": 64},
    }
    auto = {"recompute": {"kind": "auto", "host": True, "limit": "3.7 MB"}}
    with job_of(tmp_path, "plain", **small) as job:
        job.step(), job.step()
        wanted = weights(job)
    with job_of(tmp_path, **small, layout=auto) as job:
        offload = job.run.layout.offload
        assert offload is not None and offload.host is not None and offload.disk is None
        said = f"{', '.join(offload.host.modules)} of 100% of the layers"
        assert ("on host", said) in [row[:2] for row in banner_rows(job)]
        job.step(), job.step()
        assert job.parts.offload is not None
        assert job.parts.offload.stores["host"].stats.moved > 0
        assert not equal(weights(job), wanted)


# ------------------------------------------------------------------------------------- disks


def file_of(folder: Path) -> FileStore:
    record = Offload.model_validate({"disk": {"modules": ["ffn"], "folder": str(folder)}})
    assert record.disk is not None
    return FileStore(record.disk, CPU, rank=3)


def data(size: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=draw)


def test_a_file_holds_rows_of_any_size_and_does_not_grow_for_what_fits(tmp_path: Path) -> None:
    """In any order, on two threads; sizes that differ little share slots."""
    store = file_of(tmp_path)
    assert list(tmp_path.iterdir()) == []
    grown = []
    for turn in range(3):
        rows = [data(size + turn, turn) for size in (1, BLOCK - 3, BLOCK + 1, 100_000, 1_000_001)]
        sent = [store.write(one) for one in rows]
        for one, where in reversed(list(zip(rows, sent, strict=True))):
            into = torch.empty_like(one)
            store.read(where, into).result()
            assert torch.equal(into, one)
            store.free(where, one.numel())
        grown.append(os.fstat(store._file._fd).st_size)
    assert len(set(grown)) == 1 and store.stats.held == 0 == store._file.bytes


def test_memory_that_copies_pass_is_not_used_again_before_they_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both threads write, then both read, at once: bytes are staged as others move."""
    store, both = file_of(tmp_path), threading.Barrier(2, timeout=30)

    def together(call: Any) -> Any:
        return lambda *given: (both.wait(), call(*given))[1]

    for name in ("pwrite", "preadv"):
        monkeypatch.setattr(disk_room.os, name, together(getattr(os, name)))
    rows = [data(BLOCK, seed) for seed in range(4)]
    sent = [store.write(one) for one in rows]
    into = [torch.empty_like(one) for one in rows]
    for copy in [store.read(*one) for one in zip(sent, into, strict=True)]:
        copy.result()
    assert all(map(torch.equal, rows, into))


def test_a_full_disk_stops_the_pass_that_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the rank, the file, the bytes and what they were."""
    model, rows = model_of("grouped heads, dense")
    to = offload(tmp_path, disk=("ffn",))

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk_room.os, "pwrite", full)
    said = rf"rank 0, the activations' file in {tmp_path}: \d+ bytes of activations at .*No space"
    with pytest.raises(OffloadError, match=said):
        gradients(model, rows, None, to)


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    """Before the first step: where the parts of a model are built."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OffloadError, match=r"rank 3, the activations' file in .* cannot be"):
        file_of(tmp_path / "file")
